"""A tool that grades the model's answer while it works, so that it may check itself and try again.

The task gives the truth in `tools_kwargs.calc_gsm8k_reward.create_kwargs.ground_truth`; the model never sees it. The
tool's part of the final reward is that of the LATEST answer, so a right answer that is then spoilt earns nothing.
"""

from fractions import Fraction

from agentrl import Session, Tool, ToolResponse
from agentrl.plugins.types import Json
from agentrl_tools.rewards.grade import grade, read_truth


class CalcGsm8kReward(Tool):
    """penalty: the step reward for asking again without a better answer than the one before."""

    name = "calc_gsm8k_reward"
    reward_parts = ("calc_gsm8k_reward",)
    description = "Grades an answer to the problem: reward 1.0 if it is right, else 0.0."
    parameters = {  # noqa: RUF012 - shared and never changed
        "type": "object",
        "properties": {"answer": {"type": "string", "description": "the final number"}},
        "required": ["answer"],
    }

    def __init__(self, penalty: float = -0.05) -> None:
        if penalty > 0:
            raise ValueError("penalty must be 0 or less")
        self.penalty = penalty

    async def create(self, session: Session, **create_kwargs: Json) -> None:
        if create_kwargs.get("ground_truth") is None:
            place = f"tools_kwargs.{self.name}.create_kwargs.ground_truth"
            raise ValueError(f"task {session.task.id}: {place} is missing")
        session.state = _Asked(read_truth(str(create_kwargs["ground_truth"])))

    async def execute(self, session: Session, **arguments: Json) -> ToolResponse:
        asked: _Asked = session.state
        reward = 1.0 if grade(f"#### {arguments['answer']}", asked.truth) else 0.0
        again = asked.times > 0 and reward <= asked.reward
        asked.times, asked.reward = asked.times + 1, reward
        return ToolResponse(f"reward: {reward}", reward=self.penalty if again else None, metrics={"reward": reward})

    async def calc_reward(self, session: Session, **kwargs: Json) -> float:
        return session.state.reward if session.state else 0.0

    async def release(self, session: Session, **kwargs: Json) -> None:
        session.state = None


class _Asked:
    """What one request has asked: how often, and the reward of the latest answer."""

    def __init__(self, truth: Fraction) -> None:
        self.truth = truth
        self.times = 0
        self.reward = 0.0
