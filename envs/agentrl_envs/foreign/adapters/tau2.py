"""tau2-bench: the domains of a checkout, by its own environments, tools, conversation rules and evaluator.

The model has the agent's seat. The user's seat is a model behind an endpoint, by tau2's own simulator, or a script.
"""

import contextlib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

SCRIPTED = "scripted"
USER_MODEL = "openai/"  # of LiteLLM: an endpoint that speaks the Chat Completions API
Script = Callable[[str, Sequence[str]], str]
"""From what the user is told and what the agent has said to what the user says next."""


class Adapter:
    """checkout: the folder of a clone of tau2-bench. domain: one of its registry. user: `scripted`, `file.py:function`
    or an endpoint, as `{model, base_url, api_key_env}` with further arguments of LiteLLM. task_set: by default that of
    the domain. train: how many tasks are for training where tau2 has no split `train` of them; by default none.
    max_steps, max_errors: as `tau2 run` counts them. env_args: keyword arguments of the domain's environment. judged:
    whether to play tasks that need tau2's judge, a model of its own configuration."""

    def __init__(
        self,
        checkout: str,
        domain: str,
        user: str | dict[str, Any] = SCRIPTED,
        task_set: str = "",
        train: int = 0,
        max_steps: int = 100,
        max_errors: int = 10,
        env_args: dict[str, Any] | None = None,
        judged: bool = False,
    ) -> None:
        self.tau2 = tau2 = Tau2(checkout)
        _check(domain, tau2.registry.get_domains(), "domain")
        self.domain, self.max_steps, self.max_errors, self.env_args = domain, max_steps, max_errors, env_args or {}
        self.user = _script(user) if isinstance(user, str) else _simulator(user)
        task_set = task_set or domain
        _check(task_set, tau2.registry.get_task_sets(), "task set")
        tasks = tau2.registry.get_tasks_loader(task_set)()
        kept = [task for task in tasks if judged or not _is_judged(task)]
        self.left_out = len(tasks) - len(kept)
        self.splits = self._split(kept, task_set, train)

    def _split(self, tasks: list[Any], task_set: str, train: int) -> dict[str, list[Any]]:
        """By tau2's own splits `train` and `test` where it has both; else the first ones and the others."""
        load = self.tau2.registry.get_task_splits_loader(task_set)
        names = load() if load is not None else {}
        if not {"train", "test"} <= names.keys():
            return {"train": tasks[:train], "test": tasks[train:]}
        return {split: [task for task in tasks if task.id in set(names[split])] for split in ("train", "test")}

    def describe(self) -> dict[str, Any]:
        """See docs/foreign.md."""
        cannot = {
            "solo mode, voice": "the agent talks with a user, in text",
            "text beside tool calls": "it is not said to the user, as in tau2",
            **({"costs": "what the user's endpoint takes is not counted"} if not self.is_scripted else {}),
        }
        if self.left_out:
            cannot["assertions that a model judges"] = f"{self.left_out} tasks are left out; `judged: true` plays them"
        return {
            "name": f"tau2-{self.domain}",
            "splits": {split: len(tasks) for split, tasks in self.splits.items()},
            "tools": [tool.openai_schema for tool in self.environment().get_tools()],
            "reward_parts": ["reward"],
            "solved": {"reward": 1.0},
            "checked": False,  # an argument that does not fit is an error of tau2's own, which it counts
            "cannot": cannot,
        }

    @property
    def is_scripted(self) -> bool:
        """Whether the user's seat needs no model."""
        return not isinstance(self.user, dict)

    def environment(self) -> Any:
        """The domain's environment, in its first state."""
        return self.tau2.registry.get_env_constructor(self.domain)(**self.env_args)

    def task(self, split: str, index: int) -> dict[str, Any]:
        """A task's id."""
        return {"id": f"{split}-{self.splits[split][index].id}"}

    def open(self, task: dict[str, Any], seed: int) -> "Conversation":
        """One rollout."""
        return Conversation(self, self.splits[task["split"]][task["index"]], seed)

    def demonstrate(self, task: dict[str, Any], seed: int, style: str) -> list[dict[str, Any]]:
        """The reference actions of the agent, then what it has to say. Raises ValueError: they are not all of it."""
        ours = self.splits[task["split"]][task["index"]]
        criteria = ours.evaluation_criteria
        actions = (criteria.actions if criteria is not None else None) or []
        if not self.is_scripted:
            raise ValueError("a demonstration needs a scripted user")
        if any(action.requestor != "assistant" for action in actions):
            raise ValueError(f"task {ours.id} needs actions of the user, which a script does not take")
        talk, said = Conversation(self, ours, seed), list[dict[str, Any]]()
        for action in actions:
            call = {"type": "function", "function": {"name": action.name, "arguments": action.arguments}}
            told = talk.call(action.name, action.arguments)
            said.append({"role": "assistant", "content": "", "tool_calls": [call]})
            said.append({"role": "tool", "content": told["text"]})
            if told["done"]:
                return said
        info = (criteria.communicate_info if criteria is not None else None) or []
        said.append({"role": "assistant", "content": ". ".join(["Done", *info]) + "."})
        return said


class Conversation:
    """A task, up to the next turn of the agent."""

    def __init__(self, adapter: Adapter, task: Any, seed: int) -> None:
        self._adapter, self._tau2, self._task = adapter, adapter.tau2, task
        environment = adapter.environment()
        self._agent = Agent(self._tau2)
        user = Scripted(self._tau2, adapter.user, str(task.user_scenario)) if callable(adapter.user) else None
        self._talk = self._tau2.Orchestrator(
            domain=adapter.domain, agent=self._agent, user=user or self._simulated(environment),
            environment=environment, task=task, max_steps=adapter.max_steps, max_errors=adapter.max_errors, seed=seed,
        )  # fmt: skip
        self._began = self._tau2.get_now()
        self._talk.initialize()
        system = self._tau2.SYSTEM_PROMPT.format(
            domain_policy=environment.get_policy(), agent_instruction=self._tau2.AGENT_INSTRUCTION
        )
        self._go_on()
        shown = [one for one in map(_message, self._talk.trajectory) if one is not None]
        self.messages = [{"role": "system", "content": system}, *shown]

    def _simulated(self, environment: Any) -> Any:
        """tau2's own simulator of a user."""
        try:
            tools = environment.get_user_tools(include=getattr(self._task, "user_tools", None)) or None
        except ValueError:  # the domain has none
            tools = None
        given = self._adapter.user
        assert isinstance(given, dict)
        return self._tau2.UserSimulator(
            tools=tools, instructions=str(self._task.user_scenario), llm=given["llm"], llm_args=dict(given["llm_args"])
        )

    def _go_on(self) -> None:
        """Let the others take their turns. The limits count between turns, not before a result."""
        talk, tau2 = self._talk, self._tau2
        while not talk.done and talk.to_role is not tau2.Role.AGENT:
            talk.step()
            if talk.to_role is not tau2.Role.ENV and not talk.done:
                over = talk.step_count >= talk.max_steps, talk.num_errors >= talk.max_errors
                if any(over):
                    reasons = tau2.TerminationReason
                    talk.done = True
                    talk.termination_reason = reasons.TOO_MANY_ERRORS if over[1] else reasons.MAX_STEPS

    def _take(self, content: str | None, calls: list[Any] | None) -> list[Any]:
        """A turn of the agent, and what was said since."""
        before = len(self._talk.trajectory) + 1
        self._agent.next = self._tau2.AssistantMessage(role="assistant", content=content, tool_calls=calls)
        self._talk.step()
        self._go_on()
        return list(self._talk.trajectory[before:])

    def call(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Run a call of a tool."""
        if self._talk.done:
            return {"text": "the conversation is over", "done": True, "error": True}
        number = f"call-{len(self._talk.trajectory)}"
        made = self._tau2.ToolCall(id=number, name=name, arguments=arguments, requestor="assistant")
        (result,) = self._take(None, [made])
        return {"text": result.content or "", "error": bool(result.error), "done": self._talk.done}

    def step(self, message: dict[str, Any]) -> list[dict[str, Any]] | None:
        """What the user answers; None: it is over. A turn without words ends it, as tau2 counts that."""
        text = message.get("content")
        if self._talk.done:
            return None
        if not isinstance(text, str) or not text.strip():
            self._talk.done, self._talk.termination_reason = True, self._tau2.TerminationReason.AGENT_ERROR
            return None
        since = self._take(text, None)
        if self._talk.done:
            return None
        return [one for one in map(_message, since) if one is not None]

    def grade(self, messages: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """What tau2's evaluator says. A conversation that was cut short earns 0, as there."""
        tau2, talk = self._tau2, self._talk
        reason = talk.termination_reason if talk.done else tau2.TerminationReason.MAX_STEPS
        now = tau2.get_now()
        run = tau2.SimulationRun(
            id=talk.simulation_id, task_id=self._task.id, start_time=self._began, end_time=now, duration=0.0,
            termination_reason=reason, messages=talk.get_trajectory(), seed=talk.seed,
        )  # fmt: skip
        given = {"env_kwargs": self._adapter.env_args} if self._adapter.env_args else {}
        said = tau2.evaluate_simulation(
            simulation=run, task=self._task, evaluation_type=tau2.EvaluationType.ALL, solo_mode=False,
            domain=self._adapter.domain, **given,
        )  # fmt: skip
        parts = {getattr(name, "value", str(name)).lower(): value for name, value in _breakdown(said).items()}
        return {"rewards": {"reward": float(said.reward)}, "metrics": {"tool_errors": talk.num_errors, **parts}}


class Agent:
    """The seat of the model: it says what it was given."""

    def __init__(self, tau2: "Tau2") -> None:
        self.next: Any = None

    def get_init_state(self, message_history: Any = None) -> None:
        """See tau2's `HalfDuplexAgent`; so are the others."""

    def set_seed(self, seed: int) -> None:
        """What is sampled is sampled elsewhere."""

    def stop(self, message: Any = None, state: Any = None) -> None:
        """There is nothing to end."""

    def is_stop(self, message: Any) -> bool:
        """The user ends a conversation."""
        return False

    def generate_next_message(self, message: Any, state: Any) -> tuple[Any, Any]:
        """What the model said."""
        said, self.next = self.next, None
        return said, state


class Scripted:
    """A user by a function."""

    def __init__(self, tau2: "Tau2", script: Script, instructions: str) -> None:
        self._tau2, self._script, self._instructions = tau2, script, instructions
        self._heard: list[str] = []

    def get_init_state(self, message_history: Any = None) -> None:
        """See tau2's `HalfDuplexUser`; so are the others."""
        self._heard = [m.content or "" for m in message_history or [] if m.role == "assistant"]

    def set_seed(self, seed: int) -> None:
        """It draws no random numbers."""

    def stop(self, message: Any = None, state: Any = None) -> None:
        """There is nothing to end."""

    def generate_next_message(self, message: Any, state: Any) -> tuple[Any, Any]:
        """What the script says."""
        self._heard.append(message.content or "")
        said = self._script(self._instructions, list(self._heard))
        if not isinstance(said, str) or not said.strip():
            raise ValueError(f"the user's script returned {said!r:.60}; expected a text")
        return self._tau2.UserMessage(role="user", content=said), state


def tell_and_end(instructions: str, heard: Sequence[str]) -> str:
    """A user who tells all at once, and ends with the agent's first answer."""
    return instructions if len(heard) < 2 else "###STOP###"


class Tau2:
    """What is used of a checkout. Raises ValueError: it is none, or another version."""

    def __init__(self, checkout: str) -> None:
        top = Path(checkout).expanduser().absolute()
        if not (top / "src/tau2/registry.py").is_file():
            raise ValueError(f"checkout: {top} is no clone of tau2-bench: there is no src/tau2/registry.py")
        os.environ.setdefault("TAU2_DATA_DIR", str(top / "data"))
        os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it looks for prices on the internet
        sys.path.insert(0, str(top / "src"))
        with contextlib.suppress(ImportError):
            from loguru import logger

            logger.disable("tau2")  # it prints each message, several times
        from tau2.agent.llm_agent import AGENT_INSTRUCTION, SYSTEM_PROMPT
        from tau2.data_model.message import AssistantMessage, ToolCall, UserMessage
        from tau2.data_model.simulation import SimulationRun, TerminationReason
        from tau2.evaluator.evaluator import EvaluationType, evaluate_simulation
        from tau2.orchestrator.orchestrator import Orchestrator, Role
        from tau2.registry import registry
        from tau2.user.user_simulator import UserSimulator
        from tau2.utils.utils import get_now

        self.registry, self.Orchestrator, self.Role, self.UserSimulator = registry, Orchestrator, Role, UserSimulator
        self.AssistantMessage, self.ToolCall, self.UserMessage = AssistantMessage, ToolCall, UserMessage
        self.SimulationRun, self.TerminationReason = SimulationRun, TerminationReason
        self.EvaluationType, self.evaluate_simulation = EvaluationType, evaluate_simulation
        self.AGENT_INSTRUCTION, self.SYSTEM_PROMPT, self.get_now = AGENT_INSTRUCTION, SYSTEM_PROMPT, get_now


def _message(message: Any) -> dict[str, Any] | None:
    """A message as the agent sees it; None for what stands between the user and the user's own tools."""
    calls = getattr(message, "tool_calls", None)
    if message.role == "tool":
        return None if message.requestor == "user" else {"role": "tool", "content": message.content or ""}
    if message.role == "user" and calls:
        return None
    shown = {"role": message.role, "content": message.content or ""}
    if calls:
        functions = [{"name": call.name, "arguments": call.arguments} for call in calls]
        shown["tool_calls"] = [{"type": "function", "function": function} for function in functions]
    return shown


def _breakdown(said: Any) -> Mapping[Any, float]:
    return said.reward_breakdown or {}


def _is_judged(task: Any) -> bool:
    criteria = task.evaluation_criteria
    asserted = criteria is not None and criteria.nl_assertions  # where there are none, tau2 asks no judge
    return bool(asserted) and any(getattr(one, "value", one) == "NL_ASSERTION" for one in criteria.reward_basis)


def _check(name: str, there: Sequence[str], what: str) -> None:
    if name not in there:
        raise ValueError(f"there is no {what} {name!r}: the checkout has {', '.join(sorted(there))}")


def _script(given: str) -> Script:
    """A user's script. Raises ValueError."""
    if given == SCRIPTED:
        return tell_and_end
    file, colon, name = given.rpartition(":")
    if not colon or not file.endswith(".py") or not os.path.isfile(file):
        raise ValueError(f"user is {given!r}; expected {SCRIPTED}, file.py:function, or an endpoint's model, base_url")
    spec = importlib.util.spec_from_file_location("tau2_user_script", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    script: Script | None = getattr(module, name, None)
    if not callable(script):
        raise ValueError(f"user: {file} has no function {name!r}")
    return script


def _simulator(given: dict[str, Any]) -> dict[str, Any]:
    """Arguments of tau2's simulator. Raises ValueError."""
    rest = dict(given)
    model, url, variable = rest.pop("model", None), rest.pop("base_url", None), rest.pop("api_key_env", None)
    if not isinstance(model, str) or not isinstance(url, str):
        raise ValueError("user: an endpoint needs model and base_url")
    if variable is not None and variable not in os.environ:
        raise ValueError(f"user: the environment variable {variable} is not set")
    key = os.environ[variable] if variable is not None else "none"
    return {"llm": f"{USER_MODEL}{model}", "llm_args": {"api_base": url, "api_key": key, "num_retries": 0, **rest}}
