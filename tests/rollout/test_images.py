"""Pictures in a rollout: of openings, tools and replies; broken, too many, or too large for what room is left."""

import asyncio
import base64
import io
import random
import threading
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from agentrl_envs.dataset.environment import Dataset
from agentrl_tools.agents import anthropic_messages, chat_completions, responses
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from vision_help import BROKEN, Actor, file_of, picture, seeing_chat, seeing_model

from agentrl.compute.batch import Batch
from agentrl.data.files import write_parquet
from agentrl.data.prompts import drawn, measure_prompts, showable
from agentrl.data.sampler import TaskSampler
from agentrl.errors import UserError
from agentrl.gateway.server import Gateway
from agentrl.images import STORE, ImageError, hashes, size_of
from agentrl.models.vision import Vision
from agentrl.plugins.agent import FunctionAgent
from agentrl.plugins.environment import Environment
from agentrl.plugins.tool import Tool
from agentrl.plugins.types import Reply, Task, ToolResponse
from agentrl.recipe.sections.agent import AgentSection
from agentrl.recipe.sections.rollout import RolloutSection
from agentrl.rollout.agent import AgentDriver
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


async def test_broken_pictures_of_a_tool_are_told_in_words(parts, tmp_path):
    (tmp_path / "text.png").write_text("no image")
    env = Gallery([], [b"broken", picture(2), "/no/file.png", str(tmp_path / "text.png")])
    t, _ = await drive(parts[1], env, [CALL, "a"])
    assert (t.failure, len(t.images)) == (None, 1)
    text = t.messages[2]["content"][0]["text"]
    assert "[image 1 cannot be shown: it is no image that can be read]" in text
    assert "[image 3 cannot be shown: its file /no/file.png cannot be read" in text
    assert f"[image 4 cannot be shown: it is no image that can be read ({tmp_path}/text.png)]" in text
    with pytest.raises(ImageError, match="its path is empty"):
        STORE.put("")
    assert t.tool_uses[0].error.startswith("tool: image 1: ")


@pytest.mark.parametrize("kind", BROKEN)
async def test_whatever_is_wrong_with_a_picture_of_a_tool_the_sample_is_kept(parts, kind):
    t, _ = await drive(parts[1], Gallery([picture(1)], [BROKEN[kind], picture(2)]), [CALL, "a"])
    assert (t.failure, len(t.images)) == (None, 2)
    assert "[image 1 cannot be shown: " in t.messages[2]["content"][0]["text"]


async def test_what_is_said_of_many_broken_pictures_is_bounded(parts):
    t, _ = await drive(parts[1], Gallery([], [*[b"broken"] * 500, *[picture(2)] * 40]), [CALL, "a"], max_images=1)
    assert (t.failure, len(t.images)) == (None, 1)
    lines = t.messages[2]["content"][0]["text"].splitlines()
    assert lines[-2:] == [
        "[497 further images cannot be shown]",
        "[39 images left out: the conversation holds as many images as it may]",
    ]
    assert len(lines) == 6


async def test_rows_with_broken_pictures_are_left_out_and_no_sample_is_lost(parts, tmp_path):
    """100 rows, 5 of them with a picture that cannot be shown, are measured and those that fit are played."""
    chat, rows = parts[1], []
    wrong = ["nothing", "cut off", "bomb", "no file", "line"]
    for number in range(100):
        image = file_of(picture(number % 7)) if number % 20 else BROKEN[wrong[number // 20]]
        data = file_of(image) if isinstance(image, Image.Image) else image
        rows.append({"prompt": "see <image>", "images": [{"bytes": None, "path": data} if isinstance(data, str) else
                                                         {"bytes": data, "path": None}]})  # fmt: skip
    write_parquet(tmp_path / "train.parquet", rows, lambda count: None)
    env = Dataset(splits={"train": str(tmp_path / "train.parquet")}, reward="none")
    tasks = env.tasks("train")
    before = len(STORE._written)
    found = await measure_prompts(env, (), chat, tasks, 1000)
    assert len(STORE._written) == before, "nothing is decoded or kept"
    assert sorted(found.broken) == [0, 20, 40, 60, 80]
    assert found.report("training").startswith(
        "5 of 100 training prompts hold images that cannot be shown (the first: train-0: image 1 of a message of "
        "role 'user': it is no image that can be read): left out"
    )
    driver = Driver(engine=Actor(chat, ["a"] * 95), chat=chat, environment=env, tools=(), limits=RolloutSection())
    played = [await driver.drive(driver.request(tasks[i], 0)) for i in found.fitting]
    assert [t.failure for t in played] == [None] * 95
    assert [t.prompt_length for t in played] == [found.lengths[i] for i in found.fitting]
    assert all(len(t.images) == 1 for t in played)
    path = tmp_path / "run" / "trajectories" / "step_1.parquet"
    path.parent.mkdir(parents=True)
    facts = {**row(played[0]), "step": 1, "evaluation": False, "split": "train", "group": 0}
    write_trajectories(path, [facts], played[:1])
    assert read_samples(path)[0].trajectory.messages == played[0].messages


def damaged_inside() -> bytes:
    """A JPEG whose head and end are whole, and which cannot be decoded."""
    rng, data = random.Random(0), file_of(picture(3, 64, 64), "JPEG")
    for _ in range(1000):
        flipped = bytearray(data)
        for _ in range(20):
            flipped[rng.randrange(20, len(data) - 70)] ^= rng.randrange(1, 256)
        with suppress(ImageError):
            size_of(bytes(flipped))
            try:
                STORE.put(bytes(flipped))
            except ImageError:
                return bytes(flipped)
    raise AssertionError


async def test_another_task_is_drawn_where_a_picture_turns_out_to_be_damaged(parts, tmp_path, caplog):
    images = [{"bytes": damaged_inside() if i in (2, 5) else file_of(picture(i)), "path": None} for i in range(8)]
    rows = [{"prompt": "<image>", "images": image} for image in images]
    write_parquet(tmp_path / "train.parquet", rows, lambda count: None)
    env = Dataset(splits={"train": str(tmp_path / "train.parquet")}, reward="none")
    tasks = env.tasks("train")
    assert not (await measure_prompts(env, (), parts[1], tasks, 1000)).broken
    sampler = TaskSampler(8, seed=0)
    shuffled = [i for i in TaskSampler(8, seed=0).draw(8) if i not in (2, 5)]
    assert await drawn(sampler, 6, partial(showable, sampler, env, parts[1], tasks)) == shuffled
    assert "task train-2 is left out: an image cannot be shown: it is damaged" in caplog.text
    assert sampler.excluded == {2, 5}
    none = TaskSampler(8, seed=0, excluded=frozenset({0, 1, 3, 4, 5, 6, 7}))
    with pytest.raises(UserError, match="no task is left"):
        await drawn(none, 1, partial(showable, none, env, parts[1], tasks))


class Decoding(Gallery):
    """Its pictures are looked at once something has run in the event loop meanwhile."""

    def __init__(self) -> None:
        super().__init__([], (), [])
        self.went_on, self.threads = threading.Event(), set()

    def images(self, task):
        self.threads.add(threading.current_thread())
        assert self.went_on.wait(20)
        return [picture(1)]


async def test_the_event_loop_goes_on_while_pictures_of_drawn_tasks_are_decoded(parts):
    env, tasks = Decoding(), [Task(str(i), {}) for i in range(3)]
    sampler = TaskSampler(3, seed=0)
    drawing = asyncio.create_task(drawn(sampler, 3, partial(showable, sampler, env, parts[1], tasks)))
    while not env.threads:
        await asyncio.sleep(0.001)
    env.went_on.set()
    assert sorted(await drawing) == [0, 1, 2]
    assert threading.main_thread() not in env.threads


async def test_replies_of_an_environment_show_no_more_than_a_conversation_may_hold(parts):
    env = Gallery([picture(1)], (), [picture(2), picture(3), picture(4)])
    t, _ = await drive(parts[1], env, ["a", "b"], max_turns=2, max_images=3)
    assert (t.failure, len(t.images)) == (None, 3)
    assert "[1 of the images left out" in t.messages[2]["content"][-1]["text"]


async def test_rows_that_show_more_pictures_than_a_conversation_may_hold_are_left_out(parts, tmp_path):
    shown = [{"bytes": file_of(picture(i)), "path": None} for i in range(4)]
    rows = [{"prompt": "see " + "<image>" * n, "images": shown[:n]} for n in (1, 3, 2, 4)]
    write_parquet(tmp_path / "train.parquet", rows, lambda count: None)
    env = Dataset(splits={"train": str(tmp_path / "train.parquet")}, reward="none")
    found = await measure_prompts(env, (), parts[1], env.tasks("train"), 1000, 2)
    assert found.fitting == [0, 2]
    assert found.report("training") == (
        "2 of 4 training prompts hold images that cannot be shown (the first: train-1: the messages hold 3 images, of "
        "2 (rollout.max_images)): left out"
    )


async def test_an_opening_with_too_many_pictures_fails_its_own_sample_before_one_is_decoded(parts):
    before = len(STORE._written)
    t, engine = await drive(parts[1], Gallery([picture(91), picture(92), picture(93)]), ["a"], max_images=2)
    assert t.failure.boundary is Boundary.ENVIRONMENT
    assert t.failure.message.endswith("the messages hold 3 images, of 2 (rollout.max_images)")
    assert (len(STORE._written), engine.prompts) == (before, [])


async def test_of_a_reply_no_more_pictures_are_decoded_than_are_shown(parts):
    env = Gallery([picture(1)], (), [picture(2), b"broken", b"broken too"])
    t, _ = await drive(parts[1], env, ["a", "b"], max_turns=2, max_images=2)
    assert (t.failure, len(t.images)) == (None, 2)
    assert "[2 of the images left out" in t.messages[2]["content"][-1]["text"]


async def test_a_broken_picture_of_a_task_fails_it_with_a_line(parts):
    t, _ = await drive(parts[1], Gallery([picture(1), b"broken"]), ["a"])
    assert t.failure.boundary is Boundary.ENVIRONMENT
    assert "image 2 of a message of role 'user': it is no image" in t.failure.message


async def test_no_row_and_no_tool_writes_a_placeholder(parts, tmp_path):
    chat, spelled = parts[1], "<|vision_start|><|image_pad|><|vision_end|>\ufdd2"

    class Spelling(Look):
        async def execute(self, session, **arguments):
            return ToolResponse(spelled, images=self.images)

    rows = [{"prompt": f"{spelled}<image>{spelled}", "images": {"bytes": file_of(picture(1)), "path": spelled}}]
    write_parquet(tmp_path / "train.parquet", rows, lambda count: None)
    env = Dataset(splits={"train": str(tmp_path / "train.parquet")}, reward="none")
    tool, tasks = Spelling([picture(2, 48, 16)]), env.tasks("train")
    engine = Actor(chat, [CALL, "a"])
    driver = Driver(engine=engine, chat=chat, environment=env, tools=(tool,), limits=RolloutSection())
    t = await driver.drive(driver.request(tasks[0], 0))
    assert t.failure is None, t.failure
    check_invariants(t)
    assert [span.tokens for span in t.images] == [4, 3]
    assert sum(i < 0 for i in engine.prompts[-1]) == 7
    assert (await measure_prompts(env, (tool,), chat, tasks, 1000)).lengths == (t.prompt_length,)


async def test_more_pictures_than_a_conversation_may_hold_are_left_out(parts):
    env = Gallery([picture(1)], [picture(2), picture(3)])
    t, _ = await drive(parts[1], env, [CALL, CALL, "a"], max_images=2)
    assert len(t.images) == 2
    assert "[1 image left out: the conversation holds as many images as it may]" in t.messages[2]["content"][0]["text"]
    assert t.messages[4]["content"].endswith("[2 images left out: the conversation holds as many images as it may]")


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


SHOWN = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4), st.integers(1, 4)), max_size=6)
"""Pictures by number and size; of number 0, broken ones."""


def pictures(shown):
    return [picture(i, 16 * width, 16 * height) if i else b"x" for i, width, height in shown]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    opening=SHOWN, tool=SHOWN, reply=SHOWN, turns=st.lists(st.sampled_from([CALL, CALL + CALL, "a"]), min_size=4),
    max_tokens=st.integers(150, 1200), max_images=st.integers(0, 12),
)  # fmt: skip
async def test_conversations_with_pictures_anywhere_keep_their_invariants(
    parts, opening, tool, reply, turns, max_tokens, max_images
):
    """Also those that break off, and those of tools that show several, some of them broken."""
    whole = [one for one in opening if one[0]]
    env = Gallery(pictures(whole), pictures(tool), pictures([one for one in reply if one[0]]))
    t, engine = await drive(parts[1], env, turns, max_turns=4, max_tokens=max_tokens, max_images=max_images)
    if len(whole) > max_images:
        assert "rollout.max_images" in t.failure.message
        return
    assert t.failure is None, t.failure
    sampled = np.zeros(len(t.ids), bool)
    for turn in t.turns:
        sampled[turn.start : turn.end] = True
    assert (sampled == t.loss_mask.astype(bool)).all()
    keyed = Batch.from_trajectories([t]).tokens.get("keyed_ids", t.ids)
    assert keyed[: len(engine.prompts[-1])].tolist() == engine.prompts[-1]
    placeholder, sees = parts[0].image_input.placeholder, parts[0].image_input
    assert [span.tokens for span in t.images] == [sees.tokens(sees.grid(span.hash)) for span in t.images]
    assert int(((t.ids == placeholder) & ~sampled).sum()) == sum(span.tokens for span in t.images)
    kept = hashes(t.messages)
    assert [span.hash for span in t.images] == kept[: len(t.images)]
    assert len(t.ids) <= max_tokens
    with torch.no_grad():
        features = Vision(parts[0]).features(keyed.astype(np.int64))
    assert (0 if features is None else len(features.embeddings)) == sum(span.tokens for span in t.images)


async def test_pictures_that_the_models_processor_refuses_are_told_in_words(parts):
    long = picture(2, 4000, 16)
    t, _ = await drive(parts[1], Gallery([], [long, picture(1)]), [CALL, "a"])
    assert (t.failure, len(t.images)) == (None, 1)
    text = t.messages[2]["content"][0]["text"]
    assert "[image 1 cannot be shown: the model's image processor does not take it: ValueError: absolute" in text
    t, _ = await drive(parts[1], Gallery([long]), ["a"])
    assert t.failure.boundary is Boundary.ENVIRONMENT
    assert "image 1 of a message of role 'user': the model's image processor does not take it" in t.failure.message


async def test_a_processor_that_would_end_the_process_is_told_in_words(parts, monkeypatch):
    def leave(*_, **__):
        raise SystemExit(3)

    monkeypatch.setattr(parts[0].image_input, "processor", leave)
    t, _ = await drive(parts[1], Gallery([], [picture(4711)]), [CALL, "a"])  # of which nothing is known yet
    assert "image 1 cannot be shown: the model's image processor does not take it: SystemExit: 3" in str(t.messages)


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


@asynccontextmanager
async def acting(chat, env, turns, solve, **limits):
    """A driver of the agent `solve`, and the engine that says `turns`."""
    engine, gateway = Actor(chat, turns), Gateway()
    await gateway.start()
    try:
        yield AgentDriver(
            agent=FunctionAgent("solve", solve), gateway=gateway, section=AgentSection(name="solve"), engine=engine,
            chat=chat, environment=env, tools=(), limits=RolloutSection(**limits),
        ), engine  # fmt: skip
    finally:
        await gateway.close()


async def acted(chat, env, turns, solve, **limits):
    async with acting(chat, env, turns, solve, **limits) as (driver, engine):
        t = await driver.drive(driver.request(Task("a", {}), 0))
    if t.valid:
        check_invariants(t)
    return t, engine


@pytest.mark.parametrize("solve", [chat_completions, responses, anthropic_messages])
async def test_an_agent_shows_what_the_driver_shows(parts, solve):
    """The tokens are those of the built-in driver, whose conversation it is."""
    env = Gallery([picture(1)], [picture(2, 48, 16), picture(3)])
    wanted, engine = await drive(parts[1], env, [CALL, "a"])
    t, gate = await acted(parts[1], env, [CALL, "a"], solve)
    assert t.failure is None, t.failure
    assert gate.prompts == engine.prompts
    assert t.images == wanted.images
    assert t.ids.tolist() == wanted.ids.tolist()
    assert t.loss_mask.tolist() == wanted.loss_mask.tolist()
    assert hashes(t.messages) == hashes(wanted.messages)
    assert t.extra["gateway"]["forks"] == 0
    keys = Batch.from_trajectories([t]).tokens["keyed_ids"]
    assert keys.tolist() == Batch.from_trajectories([wanted]).tokens["keyed_ids"].tolist()


async def said(openai, client, messages):
    found = await openai.chat.completions.create(model=client.model, messages=messages)
    return [*messages, found.choices[0].message.model_dump(exclude_none=True)]


def shown(image, **options):
    buffer = io.BytesIO()
    image.save(buffer, **{"format": "PNG", **options})
    url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}


async def test_a_picture_that_changes_begins_a_branch_and_another_file_of_it_does_not(parts):
    async def solve(task, client):
        async with client.openai() as openai:
            first = await said(openai, client, [shown(picture(1))])
            await said(openai, client, [shown(picture(1), compress_level=0), *first[1:], shown(picture(2))])
            await said(openai, client, [*first, shown(picture(3))])
            await said(openai, client, [shown(picture(4)), *first[1:], shown(picture(2))])

    t, engine = await acted(parts[1], Gallery([]), ["a", "b", "c", "d"], solve)
    assert t.failure is None, t.failure
    assert [segment.parent for segment in t.segments] == [-1, 0, 0, -1]
    assert t.extra["gateway"]["forks"] == 2
    assert [span.hash for span in t.images] == [STORE.put(picture(i)) for i in (1, 2, 3, 4, 2)]
    batch = Batch.from_trajectories([t])
    paths = [batch.tokens["keyed_ids"][a:b].tolist() for a, b in pairwise(batch.offsets.tolist())]
    assert all(any(path[: len(one)] == one for path in paths) for one in engine.prompts)
    assert len(t.branches) == 4
    assert hashes(t.branches[3]) == [STORE.put(picture(4)), STORE.put(picture(2))]


async def test_an_agent_is_told_what_it_cannot_show(parts):
    heard = []

    async def solve(task, client):
        heard.append(await client.call_tool("look", {}))
        async with client.openai() as openai:
            await said(openai, client, [shown(picture(1))])
            await said(openai, client, [shown(picture(i)) for i in range(4)])

    t, _ = await acted(parts[1], Gallery([], [picture(2), b"x"]), ["a"], solve, max_images=3)
    assert (t.failure, t.finish) == (None, FinishReason.LENGTH)
    assert "the messages hold 4 images, of 3 (rollout.max_images)" in t.extra["agent_error"]
    assert [part["type"] for part in heard[0]] == ["text", "image_url"]
    assert "[image 2 cannot be shown: it is no image" in heard[0][0]["text"]


async def test_an_agent_of_a_model_that_reads_text_is_refused_images(parts, monkeypatch):
    heard = []

    async def solve(task, client):
        heard.extend([client.messages, await client.call_tool("look", {})])
        async with client.openai() as openai:
            await said(openai, client, list(client.messages))

    monkeypatch.setattr(Actor, "images", False)
    t, _ = await acted(parts[1], Gallery([picture(1)], [picture(2)]), [], solve)
    assert t.failure.boundary is Boundary.AGENT
    assert "this model does not see" in t.failure.message
    assert heard[0][0]["content"][1]["image_url"]["url"].startswith("data:image/png;base64,")
    assert heard[1] == "Here.\n[1 image, which you cannot see]"


async def test_tokens_of_images_are_counted(parts):
    counted = []

    async def solve(task, client):
        blocks = [{"type": "text", "text": "see"}, {"type": "image", "source": {
            "type": "base64", "media_type": "image/png",
            "data": shown(picture(1, 64, 64))["content"][0]["image_url"]["url"].partition(",")[2]}}]  # fmt: skip
        async with client.anthropic() as anthropic:
            for content in (blocks, "see"):
                talk = [{"role": "user", "content": content}]
                counted.append((await anthropic.messages.count_tokens(model="any", messages=talk)).input_tokens)
            talk = [{"role": "user", "content": blocks}]
            found = await anthropic.messages.create(model="any", max_tokens=9, messages=talk)
            counted.append(found.usage.input_tokens)

    t, _ = await acted(parts[1], Gallery([]), ["a"], solve)
    assert t.failure is None, t.failure
    assert counted[0] == counted[2] == counted[1] + t.images[0].tokens + 2
    assert t.images[0].tokens == 16


async def test_a_summary_takes_the_place_of_pictures_and_says_so(parts):
    chat = parts[1]
    env = Gallery([picture(1)], [picture(2), picture(3)])
    turns = [CALL, "two of them", CALL, "again two", "a"]
    t, engine = await drive(chat, env, turns, max_turns=8, compact={"at": 90})
    assert (t.failure, t.finish) == (None, FinishReason.STOP)
    assert [segment.parent for segment in t.segments] == [-1] * 3
    assert [len(hashes(messages)) for messages in t.branches] == [3, 3, 1]
    assert len(t.images) == 7
    resumed = [chat.decode([i for i in prompt if i >= 0]) for prompt in engine.prompts[2::2]]
    assert all("\n[2 images are not shown any more]" in text for text in resumed)
    assert "two of them" in resumed[0]
    assert "again two" in resumed[1]
    batch = Batch.from_trajectories([t])
    paths = [batch.tokens["keyed_ids"][a:b].tolist() for a, b in pairwise(batch.offsets.tolist())]
    assert all(any(path[: len(one)] == one for path in paths) for one in engine.prompts)


class Ask(Tool):
    """Shows a sub-agent two pictures and says what it says."""

    name = "look"
    description = "Look."
    parameters = {"type": "object", "properties": {}}  # noqa: RUF012
    converses = True

    async def execute(self, session, **arguments):
        shown = [{"type": "image", "image": picture(i)} for i in (5, 6)]
        found = await arguments["converse"]([{"role": "user", "content": [*shown, {"type": "text", "text": "Which?"}]}])
        return ToolResponse(found.answer, images=(picture(7),))


async def test_a_sub_agent_is_shown_pictures(parts):
    env = Gallery([picture(1)])
    env.look = Ask()
    t, engine = await drive(parts[1], env, [CALL, "the first", "a"])
    assert t.failure is None, t.failure
    assert [span.hash for span in t.images] == [STORE.put(picture(i)) for i in (1, 5, 6, 7)]
    assert [segment.parent for segment in t.segments] == [-1, -1, 0]
    assert [len(hashes(messages)) for messages in t.branches] == [1, 2, 1]
    assert [sum(i < 0 for i in prompt) // 4 for prompt in engine.prompts] == [1, 2, 2]
    batch = Batch.from_trajectories([t])
    paths = [batch.tokens["keyed_ids"][a:b].tolist() for a, b in pairwise(batch.offsets.tolist())]
    assert all(any(path[: len(one)] == one for path in paths) for one in engine.prompts)
