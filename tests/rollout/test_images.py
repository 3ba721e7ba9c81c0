"""Pictures in a rollout: of openings, tools and replies; broken, too many, or too large for what room is left."""

import random

import numpy as np
import pytest
from vision_help import Actor, picture, seeing_chat, seeing_model

from agentrl.compute.batch import Batch
from agentrl.images import hashes
from agentrl.plugins.environment import Environment
from agentrl.plugins.tool import Tool
from agentrl.plugins.types import Reply, Task, ToolResponse
from agentrl.recipe.schema import RolloutSection
from agentrl.rollout.driver import Driver
from agentrl.rollout.stored import read_samples
from agentrl.rollout.trajectory_file import row, write_trajectories
from agentrl.trajectory import Boundary, FinishReason, InvariantError, check_invariants

CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'


class Look(Tool):
    name = "look"
    description = "Look."
    parameters = {"type": "object", "properties": {}}  # noqa: RUF012

    def __init__(self, images):
        self.images = images

    async def execute(self, session, **arguments):
        return ToolResponse("Here.", images=self.images)


class Gallery(Environment):
    name = "gallery"

    def __init__(self, opening, images=(), reply=()):
        self.opening, self.look, self.reply = opening, Look(images), reply

    def tasks(self, split):
        return [Task("a", {})]

    def tools(self):
        return (self.look,)

    async def create(self, session, **kwargs):
        parts = [{"type": "text", "text": "see"}, *({"type": "image", "image": image} for image in self.opening)]
        return [{"role": "user", "content": parts}]

    async def execute(self, session, message):
        if not self.reply:
            return Reply(done=True)
        return Reply(({"role": "user", "content": [{"type": "image", "image": one} for one in self.reply]},))

    async def calc_reward(self, session, **kwargs):
        return 1.0


@pytest.fixture(scope="module")
def parts():
    model, tokenizer = seeing_model()
    return model, seeing_chat(tokenizer, [Look(()).schema])


async def drive(chat, env, turns, **limits):
    engine = Actor(chat, turns)
    driver = Driver(engine=engine, chat=chat, environment=env, tools=(), limits=RolloutSection(**limits))
    t = await driver.drive(driver.request(Task("a", {}), 0))
    if t.valid:
        check_invariants(t)
    return t, engine


async def test_every_picture_stands_where_it_was_shown(parts):
    chat = parts[1]
    env = Gallery([picture(1)], [picture(2, 48, 16), picture(3)], [picture(4)])
    t, engine = await drive(chat, env, [CALL, "a", "b"], max_turns=3)
    assert t.failure is None, t.failure
    shown = hashes(t.messages)
    assert [span.hash for span in t.images] == shown[: len(t.images)]
    assert [span.tokens for span in t.images] == [4, 3, 4, 4]
    assert len(shown) == 5, "what is said after the last turn is for people"
    assert all(not t.loss_mask[s.start : s.start + s.tokens].any() for s in t.images)
    assert sum(i < 0 for i in engine.prompts[-1]) == 15
    assert engine.prompts[1][: len(engine.prompts[0])] == engine.prompts[0]


async def test_broken_pictures_of_a_tool_are_told_in_words(parts):
    env = Gallery([], [b"broken", picture(2), "/no/file.png"])
    t, _ = await drive(parts[1], env, [CALL, "a"])
    assert (t.failure, len(t.images)) == (None, 1)
    text = t.messages[2]["content"][0]["text"]
    assert "[image 1 cannot be shown: it is no image that can be read]" in text
    assert "[image 3 cannot be shown: its file /no/file.png cannot be read" in text
    assert t.tool_uses[0].error.startswith("tool: image 1: ")


async def test_a_broken_picture_of_a_task_fails_it_with_a_line(parts):
    t, _ = await drive(parts[1], Gallery([picture(1), b"broken"]), ["a"])
    assert t.failure.boundary is Boundary.ENVIRONMENT
    assert "image 2 of a message of role 'user': it is no image" in t.failure.message


async def test_more_pictures_than_a_conversation_may_hold_are_left_out(parts):
    env = Gallery([picture(1)], [picture(2), picture(3)])
    t, _ = await drive(parts[1], env, [CALL, CALL, "a"], max_images=2)
    assert len(t.images) == 2
    assert "[image 2 left out: the conversation holds as many images as it may]" in t.messages[2]["content"][0]["text"]
    assert t.messages[4]["content"].count("left out") == 2


async def test_pictures_without_room_are_left_out_whole(parts):
    chat = parts[1]
    env = Gallery([], [picture(i, 128, 96) for i in range(4)])
    whole, _ = await drive(chat, env, [CALL, "a"])
    assert [span.tokens for span in whole.images] == [48] * 4
    seen = set()
    for most in range(whole.prompt_length + 30, len(whole.ids) + 8, 9):
        t, _ = await drive(chat, env, [CALL, "a"], max_tokens=most)
        assert t.failure is None
        assert len(t.ids) <= most
        assert {span.tokens for span in t.images} <= {48}
        seen.add(len(t.images))
        if t.finish is FinishReason.STOP or len(t.turns) == 2:
            assert (left := 4 - len(t.images)) == 0 or f"[{left} of the images left out" in str(t.messages[2])
    assert seen >= {0, 4}
    assert seen & {1, 2, 3}


async def test_a_model_that_reads_text_is_told_how_many_there_were(parts):
    class Blind(Actor):
        images = False

    chat = parts[1]
    engine = Blind(chat, [CALL, "a"])
    driver = Driver(engine=engine, chat=chat, environment=Gallery([], [picture(1)]), tools=(), limits=RolloutSection())
    t = await driver.drive(driver.request(Task("a", {}), 0))
    assert (t.failure, t.images) == (None, ())
    assert "[1 image, which you cannot see]" in chat.decode(t.ids.tolist())
    driver = Driver(engine=engine, chat=chat, environment=Gallery([picture(1)]), tools=(), limits=RolloutSection())
    t = await driver.drive(driver.request(Task("a", {}), 0))
    assert "the engine does not take" in t.failure.message


async def test_no_sample_is_lost_where_some_pictures_are_broken(parts):
    """Random conversations, 5 % of whose pictures are broken: their invariants hold, and their masks are exact."""
    rng = random.Random(0)
    for _ in range(25):
        images = [
            b"x" if rng.random() < 0.05 else picture(i, 16 * rng.randint(1, 4), 32) for i in range(rng.randint(0, 6))
        ]
        turns = [rng.choice([CALL, "a"]) for _ in range(4)]
        env = Gallery([picture(9)] * rng.randint(0, 2), images, [picture(8)])
        t, engine = await drive(parts[1], env, turns, max_turns=4, max_tokens=rng.randint(150, 600), max_images=9)
        assert t.valid
        sampled = np.zeros(len(t.ids), bool)
        for turn in t.turns:
            sampled[turn.start : turn.end] = True
        assert (sampled == t.loss_mask.astype(bool)).all()
        keyed = Batch.from_trajectories([t]).tokens.get("keyed_ids", t.ids)
        assert keyed[: len(engine.prompts[-1])].tolist() == engine.prompts[-1]


async def test_stored_rollouts_come_back_with_their_pictures(parts, tmp_path):
    t, _ = await drive(parts[1], Gallery([picture(1)], [picture(2)]), [CALL, "a"])
    (tmp_path / "trajectories").mkdir()
    path = tmp_path / "trajectories" / "step_1.parquet"
    facts = {**row(t), "step": 1, "evaluation": False, "split": "train", "group": 0}
    write_trajectories(path, [facts], [t])
    (back,) = read_samples(path)
    assert back.trajectory.images == t.images
    assert back.trajectory.messages == t.messages
    assert {file.stem for file in (tmp_path / "images").iterdir()} == {span.hash for span in t.images}


async def test_what_does_not_fit_its_pictures_is_found(parts):
    from dataclasses import replace

    t, _ = await drive(parts[1], Gallery([picture(1)], [picture(2)]), [CALL, "a"])
    first, second = t.images
    for wrong in (
        (first,),
        (second, first),
        (replace(first, tokens=3), second),
        (replace(first, start=first.start + 1), second),
        (replace(first, grid=(1, 4, 8)), second),
        (first, replace(second, start=len(t.ids) - 2)),
    ):
        with pytest.raises(InvariantError, match=r"image|placeholders"):
            check_invariants(replace(t, images=wrong))
