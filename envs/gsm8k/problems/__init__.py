"""A seeded generator of grade-school word problems: any problem of any split, by its index, the same everywhere."""

from agentrl_envs.gsm8k.problems.generate import KINDS, SPLITS, Problem, problem

__all__ = ["KINDS", "SPLITS", "Problem", "problem"]
