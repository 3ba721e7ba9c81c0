"""A seeded generator of grade-school word problems: any problem of any split, by its index, the same everywhere."""

from agentrl_envs.gsm8k.problems.generate import HELD_OUT_SIZE, KINDS, SPLITS, Problem, problem

__all__ = ["HELD_OUT_SIZE", "KINDS", "SPLITS", "Problem", "problem"]
