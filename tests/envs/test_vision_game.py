"""The game of pictures: what is drawn, what is paid, and a whole run of a model that sees, from nothing to a report."""

import json
from collections import Counter
from random import Random

import numpy as np
import pytest
import torch
from agentrl_envs.vision_game.environment import VisionGame
from agentrl_envs.vision_game.game import CELL, COLORS, named
from paths import ROOT

from agentrl.checkpoint.run_folder import RunFolder
from agentrl.errors import UserError
from agentrl.fine_tuning.run import sft
from agentrl.images import STORE
from agentrl.models.load import load_model
from agentrl.offline.replay import Which, replay
from agentrl.plugins.types import Session
from agentrl.recipe.load import load_recipe
from agentrl.recipe.sections.model import ModelSection
from agentrl.recipe.sections.sft import SftSection, SftStage
from agentrl.rollout.stored import read_samples
from agentrl.training.run import train
from agentrl.trajectory import check_invariants
from agentrl.view.store import _sample

NOTHING = Random(0)


async def begun(env, task):
    session = Session("s", task, NOTHING, 0.0)
    (opening,) = await env.create(session)
    return session, opening


def color_at(image, cell):
    x, y = cell
    return image.getpixel((x * CELL + 4, y * CELL + 4))


async def test_the_picture_shows_the_game_and_a_blank_one_nothing():
    env, blank = VisionGame(), VisionGame(blank=True)
    pictures = set()
    for index in range(20):
        task = env.tasks("test")[index]
        session, opening = await begun(env, task)
        game, image = session.state.game, opening["content"][1]["image"]
        assert {cell: color_at(image, cell) for cell in game.gems} == {c: COLORS[n] for c, n in game.gems.items()}
        assert f"the {game.wanted} gem" in opening["content"][0]["text"]
        pictures.add((await begun(blank, task))[1]["content"][1]["image"].tobytes())
    assert len(pictures) == 1


async def test_a_game_is_won_by_the_right_gem_alone():
    env = VisionGame(gems=3)
    _, move, pick_up = env.tools()
    outcomes = Counter()
    for index in range(30):
        session, _ = await begun(env, env.tasks("train")[index])
        game = session.state.game
        playing = Session("t", session.task, NOTHING, 0.0, environment=session)
        target = game.target if index % 2 else next(c for c, n in game.gems.items() if n != game.wanted)
        game.wanted, wanted = game.gems[target], game.wanted
        way = 0
        while best := game.best():
            said = await move.execute(playing, to=best[0])
            assert color_at(said.images[0], target) == COLORS[game.wanted]
            way += 1
        game.wanted = wanted
        assert (await pick_up.execute(playing)).done
        outcomes[(await env.calc_reward(session))["gem"], index % 2] += 1
        assert way <= 6
    assert set(outcomes) == {(1.0, 1), (0.0, 0)}


async def test_looking_takes_turns_and_the_last_one_ends_it():
    env = VisionGame()
    session, _ = await begun(env, env.tasks("train")[0])
    playing = Session("t", session.task, NOTHING, 0.0, environment=session)
    left = session.state.game.left
    said = [(await env.tools()[0].execute(playing)).done for _ in range(left)]
    assert said == [False] * (left - 1) + [True]
    session.state.game.left = 2
    assert not (await env.execute(session, {"role": "assistant", "content": "hm"})).done


def test_splits_share_no_game_and_arguments_are_checked():
    env = VisionGame()
    seen = {}
    for split in ("train", "test", "validation"):
        for task in env.tasks(split)[:100]:
            game = env._game(task.data["split"], task.data["index"])
            assert game.held_out == (split != "train")
            seen.setdefault((game.player, str(sorted(game.gems.items())), game.wanted), split)
    for wrong in ({"gems": 4}, {"size": 1}):
        with pytest.raises(UserError):
            VisionGame(**wrong)


def test_careful_demonstrations_win():
    env = VisionGame()
    for index in range(20):
        said = env.demonstrate(env.tasks("train")[index], Random(index), "clean")
        assert said[-1]["content"].startswith("You have the")
        game = env._game("train", index)
        for turn in said[::2]:
            assert turn["content"] == f"At {named(game.player)}, {game.wanted} at {named(game.target)}."
            call = turn["tool_calls"][0]["function"]
            if call["name"] == "move":
                game.move(call["arguments"]["to"])
        assert game.player == game.target
        assert all(part["type"] in ("text", "image") for m in said[1:-1:2] for part in m["content"])


SMALL = [
    "sft.new_model.config.num_hidden_layers=2", "sft.new_model.config.hidden_size=32", "sft.new_model.texts=20",
    "sft.new_model.config.intermediate_size=32", "sft.new_model.config.head_dim=16", "sft.new_model.vision.depth=1",
    "sft.new_model.vision.hidden_size=16", "sft.stages.0.steps=2", "sft.stages.1.steps=1", "sft.stages.0.batch=2",
    "sft.stages.1.batch=2", "train.threads=1",
]  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model from nothing, and a run of one step of it."""
    folder = tmp_path_factory.mktemp("vision")
    made = sft(load_recipe(str(ROOT / "recipes" / "tiny_vision.yaml"), SMALL), str(folder / "model")).folder
    changed = [
        f"model.path={made}", "train.steps=1", "rollout.tasks=1", "rollout.n=3", "rollout.max_turns=3", "eval.tasks=1",
        f"output={folder / 'run'}", "model.freeze=[vision]", "train.threads=1", "rollout.max_image_pixels=16000000",
    ]  # fmt: skip
    train(load_recipe(str(ROOT / "recipes" / "vision_game.yaml"), changed))
    return made, RunFolder(folder / "run")


@pytest.mark.slow
def test_a_run_keeps_its_pictures_once(trained):
    _, run = trained
    assert STORE.limits.pixels == 16_000_000
    (file,) = (run.path / "trajectories").glob("step_*.parquet")
    samples = read_samples(file)
    hashes = {span.hash for sample in samples for span in sample.trajectory.images}
    kept = {path.stem for path in (run.path / "images").glob("*.png")}
    assert hashes <= kept
    assert all(sample.trajectory.images for sample in samples)
    told = json.dumps(_sample(file, 0))
    assert "data:image/png;base64," in told
    assert "data:image/png;base64," in (run.path / "report.html").read_text(encoding="utf-8")


async def play_by_gateway(task, client, way):
    """Let the model answer, then do what is right, whatever it said, and show it what comes of that."""
    messages = list(client.messages)
    async with client.openai() as openai:
        for to in way:
            found = await openai.chat.completions.create(model=client.model, messages=messages)
            messages.append({"role": "assistant", "content": found.choices[0].message.content})
            shown = await client.call_tool("move", {"to": to})
            messages.append({"role": "user", "content": shown})
        await openai.chat.completions.create(model=client.model, messages=messages)


@pytest.mark.slow
def test_an_agent_is_trained_by_what_it_shows_the_model(trained, tmp_path):
    made, _ = trained
    changed = [
        f"model.path={made}", "train.steps=1", "rollout.tasks=1", "rollout.n=2", "eval.tasks=1", "eval.before=false",
        f"output={tmp_path / 'run'}", "train.threads=1", "train.save_every=0", "algorithm.filter=null",
        f"agent.name={__name__}:play_by_gateway", "agent.args.way=[east, south]",
    ]  # fmt: skip
    train(load_recipe(str(ROOT / "recipes" / "vision_game.yaml"), changed))
    (file,) = (tmp_path / "run" / "trajectories").glob("step_*.parquet")
    for sample in read_samples(file):
        t = sample.trajectory
        check_invariants(t)
        assert (t.failure, len(t.turns)) == (None, 3)
        last = set(t.paths()[-1].tolist())  # of an untrained model not every turn is written as it was sampled
        assert sum(span.start in last for span in t.images) == 3
        assert all((tmp_path / "run" / "images" / f"{span.hash}.png").is_file() for span in t.images)
    again = replay(tmp_path / "run", Which(split="train", sample=0))
    assert again.same, again.stopped
    assert again.live.images == read_samples(file)[0].trajectory.images


@pytest.mark.slow
def test_a_checkpoint_sees_and_its_frozen_tower_is_the_first_ones(trained):
    made, run = trained
    before, _ = load_model(ModelSection(path=str(made)))
    after, tokenizer = load_model(ModelSection(path=str(run.path / "checkpoints" / "step_1")))
    assert tokenizer.image_input is not None
    assert (run.path / "checkpoints" / "step_1" / "preprocessor_config.json").is_file()
    visual = zip(before.model.visual.parameters(), after.model.visual.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in visual)


@pytest.mark.slow
def test_stored_rollouts_with_pictures_are_trained_on_again(trained):
    from agentrl.compute.batch import Batch
    from agentrl.compute.forward import choose
    from agentrl.compute.packing import micro_batches

    made, run = trained
    (file,) = (run.path / "trajectories").glob("step_*.parquet")
    samples = [sample.trajectory for sample in read_samples(file)]
    (packed,) = micro_batches(Batch.from_trajectories(samples, [0] * len(samples)), 100_000)
    model, _ = load_model(ModelSection(path=str(made)))
    with torch.no_grad():
        found = choose(model)[0](packed, 1.0)[0].numpy()
    engine = np.concatenate([t.logprobs for t in samples])[packed.source]
    assert np.abs(found - engine).max() < 1e-4


@pytest.mark.slow
def test_a_run_that_learns_from_rollouts_keeps_their_pictures(trained, tmp_path):
    made, run = trained
    base = load_recipe(str(ROOT / "recipes" / "vision_game.yaml"), [f"model.path={made}", "train.threads=1"])
    section = SftSection(source=str(run.path), retokenize=True, stages=(SftStage(steps=1, batch=2),))
    learned = sft(base.model_copy(update={"sft": section, "output": str(tmp_path / "sft")}))
    (file,) = (learned.run / "trajectories").glob("step_*.parquet")
    known = {s.trajectory.task.id: s.trajectory for s in read_samples(next((run.path / "trajectories").glob("step*")))}
    for sample in read_samples(file):
        t = sample.trajectory
        assert [span.hash for span in t.images] == [s.hash for s in known[t.task.id].images][: len(t.images)]
        assert all((learned.run / "images" / f"{span.hash}.png").is_file() for span in t.images)
        assert t.images


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (("algorithm=opd", "teacher.path=http://127.0.0.1:1"), "teacher.path: a server is not yet sent images"),
        (("algorithm.routing_replay=true",), "has no router whose choice can be replayed"),
    ],
)
def test_what_a_model_that_sees_cannot_do_yet_is_refused(trained, tmp_path, changed, why):
    made, _ = trained
    recipe = load_recipe(
        str(ROOT / "recipes" / "vision_game.yaml"),
        [f"model.path={made}", f"output={tmp_path / 'x'}", *changed],
    )
    with pytest.raises(UserError, match=why):
        train(recipe)
