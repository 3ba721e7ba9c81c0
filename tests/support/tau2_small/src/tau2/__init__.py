"""A stand-in for tau2-bench that needs the standard library alone: the parts of its interface that conversations use,
written for our tests. One shop is its only domain (`registry.py`)."""

import copy
import hashlib
import itertools
import json
import sys
import urllib.request
from dataclasses import dataclass, field
from enum import StrEnum

_clock = itertools.count()
for name in (
    "agent", "agent.llm_agent", "data_model", "data_model.message", "data_model.simulation", "evaluator",
    "evaluator.evaluator", "orchestrator", "orchestrator.orchestrator", "user", "user.user_simulator", "utils",
    "utils.utils",
):  # fmt: skip
    sys.modules[f"{__name__}.{name}"] = sys.modules[__name__]

AGENT_INSTRUCTION = "Help the user."
SYSTEM_PROMPT = "{agent_instruction}\n\n{domain_policy}"


def get_now() -> str:
    return f"{next(_clock):09d}"


class Role(StrEnum):
    AGENT = "agent"
    USER = "user"
    ENV = "env"


class TerminationReason(StrEnum):
    USER_STOP = "user_stop"
    MAX_STEPS = "max_steps"
    TOO_MANY_ERRORS = "too_many_errors"
    AGENT_ERROR = "agent_error"


class EvaluationType(StrEnum):
    ALL = "all"


@dataclass
class ToolCall:
    id: str
    name: str
    arguments: dict
    requestor: str = "assistant"


@dataclass
class AssistantMessage:
    role: str
    content: str | None = None
    tool_calls: list[ToolCall] | None = None
    timestamp: str = field(default_factory=get_now)


@dataclass
class UserMessage(AssistantMessage):
    pass


@dataclass
class ToolMessage:
    id: str
    role: str
    content: str
    requestor: str
    error: bool
    timestamp: str = field(default_factory=get_now)


@dataclass
class SimulationRun:
    id: str
    task_id: str
    start_time: str
    end_time: str
    duration: float
    termination_reason: TerminationReason
    messages: list
    seed: int | None = None


@dataclass
class RewardInfo:
    reward: float
    reward_breakdown: dict | None = None


class Tool:
    def __init__(self, function) -> None:
        kinds = {name: kind for name, kind in function.__annotations__.items() if name != "return"}
        types = {str: "string", int: "integer"}
        self.name = function.__name__
        self.openai_schema = {
            "type": "function",
            "function": {
                "name": self.name, "description": function.__doc__,
                "parameters": {
                    "type": "object", "properties": {name: {"type": types[kind]} for name, kind in kinds.items()},
                    "required": list(kinds),
                },
            },
        }  # fmt: skip


class Environment:
    """tools, user_tools: an object whose public methods are tools and whose `db` is a dictionary."""

    def __init__(self, domain_name: str, policy: str, tools, user_tools=None) -> None:
        self.domain_name, self.policy, self.tools, self.user_tools = domain_name, policy, tools, user_tools

    def get_policy(self) -> str:
        return self.policy

    def get_tools(self) -> list[Tool]:
        return [Tool(getattr(self.tools, name)) for name in sorted(vars(type(self.tools))) if name[0] != "_"]

    def get_user_tools(self, include=None) -> list[Tool]:
        if self.user_tools is None:
            raise ValueError("User tools not available")
        return [Tool(getattr(self.user_tools, name)) for name in include or ()]

    def get_response(self, call: ToolCall) -> ToolMessage:
        kit = self.user_tools if call.requestor == "user" else self.tools
        try:
            if call.name.startswith("_") or not hasattr(type(kit), call.name):
                raise ValueError(f"Tool '{call.name}' not found.")
            said, error = getattr(kit, call.name)(**call.arguments), False
        except (KeyError, TypeError, ValueError) as problem:
            said, error = f"Error: {problem}", True
        return ToolMessage(call.id, "tool", said if isinstance(said, str) else json.dumps(said), call.requestor, error)

    def get_db_hash(self) -> str:
        return hashlib.sha256(json.dumps(self.tools.db, sort_keys=True).encode()).hexdigest()


class UserSimulator:
    """A user by an endpoint. Its messages begin with what it is told."""

    def __init__(self, tools=None, instructions=None, llm=None, llm_args=None) -> None:
        self.instructions, self.llm, self.llm_args = instructions, llm.removeprefix("openai/"), llm_args

    def get_init_state(self, message_history=None):
        return [{"role": "system", "content": self.instructions}]

    def set_seed(self, seed: int) -> None:
        self.llm_args["seed"] = seed

    def stop(self, message=None, state=None) -> None:
        pass

    @classmethod
    def is_stop(cls, message) -> bool:
        return message.tool_calls is None and "###STOP###" in (message.content or "")

    def generate_next_message(self, message, state):
        state.append({"role": "user", "content": message.content})
        given = json.dumps({"model": self.llm, "messages": state, "seed": self.llm_args["seed"]}).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.llm_args['api_key']}"}
        asked = urllib.request.Request(f"{self.llm_args['api_base']}/chat/completions", given, headers)
        with urllib.request.urlopen(asked, timeout=30) as answer:
            said = json.load(answer)["choices"][0]["message"]["content"]
        state.append({"role": "assistant", "content": said})
        return UserMessage("user", said), state


class Orchestrator:
    def __init__(self, domain, agent, user, environment, task, max_steps=100, max_errors=10, seed=None) -> None:
        self.domain, self.agent, self.user, self.environment, self.task = domain, agent, user, environment, task
        self.max_steps, self.max_errors, self.seed, self.simulation_id = max_steps, max_errors, seed, "run"
        self.step_count, self.num_errors, self.done, self.termination_reason = 0, 0, False, None

    def initialize(self) -> None:
        self.user.set_seed(self.seed)
        self.agent_state, self.user_state = self.agent.get_init_state(), self.user.get_init_state()
        self.message = AssistantMessage("assistant", "Hello. What can I do?")
        self.trajectory, self.from_role, self.to_role = [self.message], Role.AGENT, Role.USER

    def step(self) -> None:
        if self.done:
            raise ValueError("Simulation is done")
        if self.to_role is Role.ENV:
            results = [self.environment.get_response(call) for call in self.message.tool_calls]
            self.num_errors += sum(result.error for result in results)
            self.trajectory += results
            self.message, self.from_role, self.to_role = results[-1], Role.ENV, self.from_role
        else:
            seat, role = (self.user, Role.USER) if self.to_role is Role.USER else (self.agent, Role.AGENT)
            state = self.user_state if role is Role.USER else self.agent_state
            self.message, _ = seat.generate_next_message(self.message, state)
            self.trajectory.append(self.message)
            self.from_role, other = role, Role.AGENT if role is Role.USER else Role.USER
            self.to_role = Role.ENV if self.message.tool_calls else other
            if role is Role.USER and UserSimulator.is_stop(self.message):
                self.done, self.termination_reason = True, TerminationReason.USER_STOP
        self.step_count += 1

    def get_trajectory(self) -> list:
        return copy.deepcopy(self.trajectory)


def evaluate_simulation(simulation, task, evaluation_type, solo_mode, domain, env_kwargs=None) -> RewardInfo:
    """The database after the agent's calls, played again, beside that after the reference actions; what was said."""
    from tau2.registry import registry

    if simulation.termination_reason is not TerminationReason.USER_STOP:
        return RewardInfo(0.0)
    played, wanted = (registry.get_env_constructor(domain)(**(env_kwargs or {})) for _ in range(2))
    for message in simulation.messages:
        for call in getattr(message, "tool_calls", None) or ():
            played.get_response(call)
    for action in task.evaluation_criteria.actions:
        wanted.get_response(ToolCall("", action.name, action.arguments, action.requestor))
    said = " ".join(m.content or "" for m in simulation.messages if m.role == "assistant")
    parts = {
        "DB": float(played.get_db_hash() == wanted.get_db_hash()),
        "COMMUNICATE": float(all(info in said for info in task.evaluation_criteria.communicate_info)),
    }
    return RewardInfo(parts["DB"] * parts["COMMUNICATE"], parts)
