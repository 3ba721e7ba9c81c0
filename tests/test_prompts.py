from collections.abc import Sequence
from typing import Any

import pytest
from fakes import TASK, CharChat

from agentrl import Environment, Message, Session, Task
from agentrl.data.prompts import measure_prompts


class Plain(Environment):
    name = "plain"

    def __init__(self, failing: str = "") -> None:
        self.failing = failing
        self.released = 0

    def tasks(self, split: str) -> Sequence[Task]:
        return [TASK]

    async def create(self, session: Session, **create_kwargs: Any) -> Sequence[Message]:
        if self.failing == "create":
            raise RuntimeError("no room")
        return [{"role": "user", "content": "How many?"}]

    async def calc_reward(self, session: Session, **kwargs: Any) -> float:
        return 0.0

    async def release(self, session: Session, **kwargs: Any) -> None:
        self.released += 1
        if self.failing == "release":
            raise RuntimeError("stuck")


@pytest.mark.parametrize("failing", ["", "create", "release"])
async def test_every_opening_is_released_and_no_hook_ends_the_run(failing: str) -> None:
    env, chat = Plain(failing), CharChat()
    found = await measure_prompts(env, [], chat, [TASK, TASK], limit=100)
    whole = len(chat.render([{"role": "user", "content": "How many?"}], []))
    assert found.lengths == ((0, 0) if failing == "create" else (whole, whole))
    assert env.released == 2
