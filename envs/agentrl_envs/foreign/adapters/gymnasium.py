"""Gymnasium: environments whose observations are words, numbers or dictionaries of such.

A step is a tool call where its action has named parts or is a number, else the words of the answer. Rewards are those
of the steps.
"""

import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
from gymnasium import spaces

HELD_OUT = 1_000_000_007
"""Where the seeds of held-out tasks begin."""


class Adapter:
    """env: an id of Gymnasium's registry, or `package.module:Class`, or `file.py:Class`. options: its arguments.
    actions: names of the numbers of a discrete action, in order. opening: what stands before the first observation.
    tool: the name of the tool by which the model acts. train, held_out: how many tasks, each a seed of `reset`. solved:
    the return that counts as solved."""

    def __init__(
        self,
        env: str,
        options: dict[str, Any] | None = None,
        actions: list[str] | None = None,
        opening: str = "",
        tool: str = "act",
        train: int = 10_000,
        held_out: int = 200,
        seed: int = 0,
        solved: float = 1.0,
    ) -> None:
        self.make, self.options = _maker(env), options or {}
        self.actions, self.opening, self.tool = actions, opening, tool
        self.sizes, self.seed, self.solved = {"train": train, "test": held_out}, seed, solved
        made = self.make(**self.options)
        self.space = made.action_space
        self.name = env.rpartition(":")[2].lower()
        made.close()
        self.schema = None if isinstance(self.space, spaces.Text) else self._parameters(self.space)

    def _parameters(self, space: Any) -> dict[str, Any]:
        """The schema of a tool for an action. Raises ValueError: no call can hold it."""
        if isinstance(space, spaces.Dict):
            fields = {key: _schema(inner, None) for key, inner in space.spaces.items()}
        else:
            fields = {"action": _schema(space, self.actions)}
        return {"type": "object", "properties": fields, "required": list(fields)}

    def describe(self) -> dict[str, Any]:
        """See docs/foreign.md."""
        tools = [] if self.schema is None else [
            {"name": self.tool, "description": "Act in the environment.", "parameters": self.schema}
        ]  # fmt: skip
        return {
            "name": self.name,
            "splits": self.sizes,
            "tools": tools,
            "reward_parts": [],
            "solved": self.solved,
            "cannot": {"images": "observations are told as text", "vectors": "actions are words, numbers, named parts"},
        }

    def task(self, split: str, index: int) -> dict[str, Any]:
        """The seed of an episode."""
        return {"seed": index + (self.seed if split == "train" else HELD_OUT)}

    def open(self, task: dict[str, Any], seed: int) -> "Episode":
        """One rollout."""
        return Episode(self, task)

    def action(self, arguments: Mapping[str, Any]) -> Any:
        """The action of a tool's arguments."""
        if not isinstance(self.space, spaces.Dict):
            return _value(self.space, arguments["action"], self.actions)
        return {key: _value(self.space.spaces[key], value, None) for key, value in arguments.items()}


class Episode:
    """An environment from `reset` on."""

    def __init__(self, adapter: Adapter, task: dict[str, Any]) -> None:
        self._adapter = adapter
        self._env = adapter.make(**adapter.options)
        observation, _ = self._env.reset(seed=task["seed"])
        self.messages = f"{adapter.opening}{told(observation)}"
        self._over = False

    def _act(self, action: Any) -> dict[str, Any]:
        if self._over:  # a further call of the turn that ended it
            return {"text": "Error: the episode is over", "error": True}
        if not self._adapter.space.contains(action):
            return {"text": f"Error: {str(action)[:100]!r} is no action here: {self._adapter.space}", "error": True}
        observation, reward, terminated, truncated, _ = self._env.step(action)
        self._over = bool(terminated or truncated)
        return {"text": told(observation), "reward": float(reward), "done": self._over}

    def call(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """A step by a tool."""
        return self._act(self._adapter.action(arguments))

    def step(self, message: dict[str, Any]) -> dict[str, Any] | None:
        """A step by words; None where actions are no words."""
        if self._adapter.schema is not None:
            return None
        said = message.get("content")
        result = self._act(said.strip() if isinstance(said, str) else "")
        messages = [] if result.get("done") else [{"role": "user", "content": result["text"] or "(nothing)"}]
        return {"messages": messages, "reward": result.get("reward"), "done": result.get("done", False)}

    def grade(self) -> dict[str, float]:
        """Nothing: each step had its reward."""
        return {}

    def close(self) -> None:
        """Close the environment."""
        self._env.close()


def told(observation: Any) -> str:
    """An observation as text: words as they are, parts of a dictionary a line each, what else there is as JSON."""
    if isinstance(observation, str):
        return observation
    if isinstance(observation, Mapping):
        return "\n".join(f"{key}: {told(value)}" for key, value in observation.items())
    if isinstance(observation, tuple | list):
        return " ".join(told(one) for one in observation)
    value = observation.tolist() if hasattr(observation, "tolist") else observation
    return json.dumps(value, default=str)


def _schema(space: Any, names: list[str] | None) -> dict[str, Any]:
    """The schema of a part of an action. Raises ValueError."""
    if isinstance(space, spaces.Text):
        return {"type": "string"}
    if isinstance(space, spaces.Discrete):
        if names is not None:
            return {"type": "string", "enum": names}
        return {"type": "integer", "minimum": int(space.start), "maximum": int(space.start + space.n - 1)}
    if isinstance(space, spaces.Box) and space.shape == ():
        return {"type": "number"}
    raise ValueError(
        f"actions of the kind {space} are not carried: words, whole numbers, numbers, and parts with names"
    )


def _value(space: Any, given: Any, names: list[str] | None) -> Any:
    """An argument as its space wants it."""
    if isinstance(space, spaces.Discrete):
        return int(space.start) + names.index(given) if names is not None else int(given)
    if isinstance(space, spaces.Box):
        import numpy

        return numpy.asarray(given, dtype=space.dtype)
    return given


def _maker(env: str) -> Callable[..., Any]:
    """What makes an environment."""
    module, _, name = env.partition(":")
    if not name:
        return lambda **options: gymnasium.make(env, **options)
    if not module.endswith(".py"):
        sys.path.append(os.getcwd())
        made: Callable[..., Any] = getattr(importlib.import_module(module), name)
        return made
    spec = importlib.util.spec_from_file_location("gymnasium_environment", module)
    if spec is None or spec.loader is None or not os.path.isfile(module):
        raise ValueError(f"there is no file {module}")
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded
    spec.loader.exec_module(loaded)
    found: Callable[..., Any] = getattr(loaded, name)
    return found
