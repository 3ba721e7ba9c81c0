"""The driver over a real chat and over the local engine: what it writes down is what the template and the model say."""

import asyncio

import pytest
import torch
from chat_help import HERMES, make_tokenizer
from fakes import TASK, Echo, Env, ScriptedEngine
from tiny_models import NO_IDS, qwen3

from agentrl.chat.load import load_chat
from agentrl.engine.base import Generation, GenerationFinish
from agentrl.engine.local.engine import LocalEngine
from agentrl.plugins.types import Reply, Task
from agentrl.recipe.sections.rollout import RolloutSection
from agentrl.rollout.driver import Driver
from agentrl.rollout.groups import roll_out
from agentrl.rollout.metrics import rollout_metrics
from agentrl.trajectory import FinishReason, check_invariants

USER = {"role": "user", "content": "and?"}


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer(HERMES)


def chat_of(tokenizer):
    return load_chat(tokenizer, model_path="nowhere", kind="bridge", tools=[Echo().schema])


class TextEngine(ScriptedEngine):
    """Writes the script's texts with the model's tokenizer."""

    def __init__(self, script, tokenizer):
        super().__init__(script)
        self.tokenizer = tokenizer

    async def generate(self, ids, sampling, request_id):
        text = self.script(request_id, self.turns[request_id])
        self.turns[request_id] += 1
        whole = self.tokenizer.encode(text, add_special_tokens=False)
        answer = whole[: sampling.max_tokens]
        finish = GenerationFinish.STOP if answer[-1] in sampling.stop_ids else GenerationFinish.LENGTH
        return Generation(answer, [-1.0] * len(answer), finish, 0)


def written(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


async def test_what_is_written_down_is_what_the_template_renders(tokenizer):
    turns = [
        "Let me see.\n" + written("echo", '{"text": "a<|im_end|>b"}') + "\n" + written("echo", '{"text": "c"}'),
        "One more.\n" + written("ecko", "{}"),
        "Is it 4?",
        "It is 4.",
    ]
    env = Env(
        execute=lambda s, m: Reply(done="is 4." in m["content"], messages=() if "is 4." in m["content"] else (USER,))
    )
    engine = TextEngine([turn + "<|im_end|>" for turn in turns], tokenizer)
    chat = chat_of(tokenizer)
    driver = Driver(engine=engine, chat=chat, environment=env, tools=[Echo()], limits=RolloutSection())
    t = await driver.drive(driver.request(TASK, 0))
    assert (t.failure, t.finish, len(t.turns)) == (None, FinishReason.STOP, 4)
    assert [use.error is None for use in t.tool_uses] == [True, True, False]
    rendered = tokenizer.apply_chat_template(list(t.messages), tools=[Echo().schema], tokenize=False)
    assert chat.decode(t.ids.tolist()) == rendered.removesuffix("\n")
    assert chat.decode(t.ids[t.loss_mask == 1].tolist()) == "".join(turn + "<|im_end|>" for turn in turns)
    spelled = tokenizer.convert_tokens_to_ids("<|im_end|>")
    tool = t.ids[t.turns[0].end : t.turns[1].start].tolist()
    assert tool.count(spelled) == 1, "what a tool says ends no turn, whatever tokens it spells"


async def test_a_call_that_is_cut_off_is_closed_told_and_goes_on(tokenizer):
    turns = [written("echo", '{"text": "' + "x" * 200 + '"}'), "It is 4.<|im_end|>"]
    driver = Driver(
        engine=TextEngine(turns, tokenizer), chat=chat_of(tokenizer), environment=Env(), tools=[Echo()],
        limits=RolloutSection(max_turn_tokens=40),
    )  # fmt: skip
    t = await driver.drive(driver.request(TASK, 0))
    assert (t.finish, len(t.turns)) == (FinishReason.STOP, 2)
    assert t.tool_uses[0].error.startswith("model: ")
    assert t.messages[2]["content"].startswith("Error: ")
    assert t.turns[0].end - t.turns[0].start == 40
    assert t.loss_mask.sum() == 40 + t.turns[1].end - t.turns[1].start


@pytest.fixture(scope="module")
def model(tokenizer):
    return qwen3(vocab_size=len(tokenizer), max_position_embeddings=400, initializer_range=0.1, **NO_IDS)


def rolled_out(model, tokenizer, seed):
    """Four tasks by four samples; every twelfth id ends a turn, so that a random model takes turns."""
    chat = chat_of(tokenizer)
    chat.stop_at((*chat.stop_ids, *range(0, 600, 12)))
    engine = LocalEngine(model, max_batch=8)
    env = Env(
        create=lambda s: [{"role": "user", "content": f"{s.task.id}: 2 + 2?"}],
        execute=lambda s, m: Reply((USER,)),
        calc_reward=lambda s: s.rng.random(),
    )
    limits = RolloutSection(max_turns=4, max_turn_tokens=20, max_tokens=250)
    driver = Driver(engine=engine, chat=chat, environment=env, tools=[Echo()], limits=limits)

    async def main():
        groups = await roll_out(driver, [Task(f"t{i}", {}) for i in range(4)], 4, seed=seed)
        await engine.close()
        return groups

    return asyncio.run(main())


def test_the_local_engines_logprobs_are_the_models_own(model, tokenizer):
    groups = rolled_out(model, tokenizer, seed=(1, 2))
    trajectories = [t for g in groups for t in g.trajectories]
    assert len(trajectories) == 16
    assert rollout_metrics(groups)["rollout/turns_mean"] > 1.5
    for t in trajectories:
        check_invariants(t)
        with torch.no_grad():
            ids = torch.tensor(t.ids.astype("int64"))[None]
            own = model(ids).logits[0].log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
        sampled = torch.from_numpy(t.loss_mask[1:].astype(bool))
        engines = torch.from_numpy(t.logprobs[1:])
        assert torch.allclose(own[sampled], engines[sampled], atol=1e-4)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_step(model, tokenizer):
    def tokens(seed):
        return [t.ids.tolist() for g in rolled_out(model, tokenizer, seed) for t in g.trajectories]

    first = tokens((1, 2))
    assert first == tokens((1, 2))
    assert first != tokens((1, 3))
