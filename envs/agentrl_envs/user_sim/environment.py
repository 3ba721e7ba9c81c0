"""The environment `user_sim`: a customer leaves out what matters; 1.0 for the right final line behind `####`."""

from collections.abc import Mapping, Sequence
from random import Random

from agentrl.plugins.environment import Environment
from agentrl.plugins.tool import Tool
from agentrl.plugins.types import Json, Message, Reply, Session, Task
from agentrl_envs.conversation import check_generated, check_split, check_style, generated_tasks
from agentrl_envs.user_sim.demonstrations import STYLES, demonstrate
from agentrl_envs.user_sim.dialogue import Dialogue, Heard, Lookup
from agentrl_envs.user_sim.generate import HELD_OUT_SIZE, SPLITS, Scenario, scenario

TRAIN_SIZE = 100_000

INSTRUCTIONS = "Ask the customer for what is missing. When you know it all, end with: {form}"


class UserSim(Environment):
    """A customer who must be asked.

    seed: of the training tasks. patience: idle or repeated questions that the customer bears before he leaves.
    fact_reward: step reward for asking, shared out among the missing facts of a task. question_cost: what each question
    takes off. system_prompt: `{form}` in it stands for the form of the final line.
    """

    name = "user_sim"
    reward_parts = ("answer", "questions")
    splits = SPLITS[1:]

    def __init__(
        self,
        source: str = "generated",
        seed: int = 0,
        patience: int = 2,
        fact_reward: float = 0.2,
        question_cost: float = 0.01,
        system_prompt: str = INSTRUCTIONS,
    ) -> None:
        check_generated(self, source)
        if patience < 0:
            raise ValueError("patience must be 0 or more")
        if "{form}" not in system_prompt:
            raise ValueError("system_prompt lacks {form}, where the form of the final line goes")
        self._seed, self._patience, self._system_prompt = seed, patience, system_prompt
        self._fact_reward, self._question_cost = fact_reward, question_cost
        self._lookup = Lookup()

    def tasks(self, split: str) -> Sequence[Task]:
        check_split(self, split)
        return generated_tasks(split, TRAIN_SIZE, HELD_OUT_SIZE, self._seed, _task)

    def tools(self) -> Sequence[Tool]:
        return (self._lookup,)

    def tools_for(self, task: Task) -> Sequence[Tool]:
        return (self._lookup,) if task.data["looks_up"] else ()

    async def create(self, session: Session, **create_kwargs: Json) -> list[Message]:
        made = _scenario(session.task)
        session.state = Dialogue(made, self._patience)
        system = self._system_prompt.replace("{form}", made.kind.shown_form)
        return [{"role": "system", "content": system}, {"role": "user", "content": made.opening}]

    async def execute(self, session: Session, message: Message) -> Reply:
        dialogue: Dialogue = session.state
        content = message["content"]
        heard, said, new = dialogue.hear(content if isinstance(content, str) else "", session.rng)
        if heard is Heard.ANSWER:
            return Reply(done=True)
        reward = self._fact_reward * new / len(dialogue.scenario.missing) if new else None
        return Reply(({"role": "user", "content": said},), reward, done=dialogue.gone)

    async def calc_reward(self, session: Session, **kwargs: Json) -> dict[str, float]:
        dialogue: Dialogue = session.state
        return {"answer": float(dialogue.right), "questions": -self._question_cost * dialogue.asked}

    def solved(self, rewards: Mapping[str, float], task: Task) -> bool:
        """Decide by the answer alone: how it was asked for does not count."""
        return rewards.get("answer", 0.0) >= 1.0

    def demonstrate(self, task: Task, rng: Random, style: str) -> list[Message]:
        """A customer served in a style of `demonstrations.STYLES`."""
        check_style(self, style, STYLES)
        return demonstrate(_scenario(task), self._patience, rng, style)


def _task(split: str, index: int, seed: int) -> Task:
    made = scenario(split, index, seed)
    data = {
        "split": split, "index": index, "seed": seed, "kind": made.kind.name, "opening": made.opening,
        "missing": made.missing, "answer": made.answer, "looks_up": made.kind.looks_up,
    }  # fmt: skip
    return Task(id=f"{split}-{index}", data=data)


def _scenario(task: Task) -> Scenario:
    return scenario(task.data["split"], task.data["index"], task.data["seed"])
