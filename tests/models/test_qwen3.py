"""What the embedded model needs of transformers, without it: the same model, the same tokenizer, the same files."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from paths import ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl.checkpoint.huggingface import save_model
from agentrl.compute.forward import choose
from agentrl.errors import UserError
from agentrl.learner.optimizer import Optimizer
from agentrl.models import embedded_path, fast_tokenizer, qwen3
from agentrl.models.fast_tokenizer import FastTokenizer
from agentrl.models.load import load_model, load_tokenizer
from agentrl.models.qwen3 import Qwen3
from agentrl.models.shape import Shape, read_shape
from agentrl.recipe.sections.model import LoraSection, ModelSection

TINY = str(embedded_path())
CALL = {"type": "function", "id": "c1", "function": {"name": "add", "arguments": {"a": 1, "b": "é<"}}}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add <two> numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number", "enum": [1, 2.5]}}, "required": ["a"]},
    },
}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "What is 12 * 7?"}],
    [{"role": "system", "content": "Be brief.\n"}, {"role": "user", "content": "  Ünï 漢字 <|im_end|> "}],
    [
        {"role": "user", "content": "Add."},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [CALL], "name": None},
        {"role": "tool", "content": "3", "tool_call_id": "c1", "name": "add"},
        {"role": "tool", "content": '{"x": [1]}', "tool_call_id": "c2", "name": "add"},
        {"role": "assistant", "content": "3", "reasoning": "so"},
    ],
]


@pytest.fixture(scope="module")
def theirs() -> Any:
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()


def light(path: str = "tiny", **settings: Any) -> tuple[Any, Any]:
    model, tokenizer = load_model(ModelSection(path=path, device="cpu", **settings), light=True)
    return model, tokenizer


def test_its_parameters_and_logits_are_those_of_transformers(theirs: Any) -> None:
    model, _ = light()
    assert type(model) is Qwen3
    assert not model.training
    ours, wanted = dict(model.named_parameters()), dict(theirs.named_parameters())
    assert list(ours) == list(wanted)
    assert all(torch.equal(ours[name], wanted[name]) and ours[name].requires_grad for name in wanted)
    assert list(model.state_dict()) == list(theirs.state_dict())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.model.rotary_emb.inv_freq, theirs.model.rotary_emb.inv_freq)
    ids = torch.randint(0, 1000, (3, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, theirs(ids).logits, atol=2e-4, rtol=1e-4)


def test_it_trains_by_our_own_forward_and_is_as_large_as_before(theirs: Any) -> None:
    model, _ = light()
    assert choose(model)[1] == "own forward"
    assert read_shape(ModelSection()) == Shape.of(theirs.config)


def test_either_reads_what_the_other_wrote(tmp_path: Path, theirs: Any) -> None:
    model, tokenizer = light()
    with torch.no_grad():
        model.model.norm.weight += 0.25
        theirs.model.norm.weight += 0.25
    try:
        save_model(model, tokenizer, tmp_path / "ours")
        save_model(theirs, AutoTokenizer.from_pretrained(TINY), tmp_path / "theirs")
    finally:
        with torch.no_grad():
            theirs.model.norm.weight -= 0.25
    files = sorted(path.name for path in (tmp_path / "theirs").iterdir())
    assert sorted(path.name for path in (tmp_path / "ours").iterdir()) == files
    for name in files:
        ours, wanted = (tmp_path / "ours" / name).read_bytes(), (tmp_path / "theirs" / name).read_bytes()
        if name == "tokenizer_config.json":  # transformers adds where it was read from
            assert json.loads(ours).items() <= json.loads(wanted).items()
        elif name.endswith(".json"):
            assert json.loads(ours) == json.loads(wanted), name
        else:
            assert ours == wanted, name
    again, _ = light(str(tmp_path / "theirs"))
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert type(again) is Qwen3
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)
        assert torch.equal(back.state_dict()[name], tensor)


@pytest.mark.parametrize("generate", [True, False])
@pytest.mark.parametrize("tools", [[TOOL], None])
@pytest.mark.parametrize("conversation", CONVERSATIONS, ids=["user", "system", "calls"])
def test_the_tokenizer_writes_what_that_of_transformers_does(conversation: Any, tools: Any, generate: bool) -> None:
    ours, theirs = FastTokenizer(TINY), AutoTokenizer.from_pretrained(TINY)
    said = {"tools": tools, "tokenize": False, "add_generation_prompt": generate}
    text = ours.apply_chat_template(conversation, **said)
    assert text == theirs.apply_chat_template(conversation, **said)
    ids = ours.encode(text)
    assert ids == theirs.encode(text)
    assert ours.decode(ids) == theirs.decode(ids) == text


def test_the_tokenizer_knows_the_same_tokens() -> None:
    ours: Any
    ours, theirs = FastTokenizer(TINY), AutoTokenizer.from_pretrained(TINY)
    for name in ("eos_token_id", "pad_token_id", "bos_token_id", "unk_token_id", "special_tokens_map", "name_or_path"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.get_vocab() == theirs.get_vocab()
    assert len(ours) == len(theirs)
    assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
    for tokens in ("<|im_end|>", ["<|im_end|>", "a", "no such token"]):
        assert ours.convert_tokens_to_ids(tokens) == theirs.convert_tokens_to_ids(tokens)
    assert ours.convert_ids_to_tokens([2, 40]) == theirs.convert_ids_to_tokens([2, 40])


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no ' + messages[0].role) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ dict.mro() }}",
        "{% set n = namespace() %}{% set n.__class__ = 1 %}",
        "{{ namespace(**{'_' ~ '_call_' ~ '_': 1}) }}",
        "{{ 1 // 0 }}",
    ],
)
def test_a_template_is_confined_and_may_refuse(template: str) -> None:
    ours, theirs = FastTokenizer(TINY), AutoTokenizer.from_pretrained(TINY)
    for tokenizer in (ours, theirs):
        with pytest.raises(Exception) as error:  # noqa: PT011 - whatever the template raises; the text is compared
            tokenizer.apply_chat_template(CONVERSATIONS[0], chat_template=template, tokenize=False)
        assert type(error.value).__module__.startswith(("jinja2", "builtins"))


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "bfloat16"},
        {"compute": "bfloat16"},
        {"lora": LoraSection()},
        {"config": {"rope_parameters": {"rope_theta": 5e3}}},
        {"compile": True},
        {"checkpointing": True},
        {"trust_remote_code": True},
        {"device": "meta"},
    ],
)
def test_other_computations_are_left_to_transformers(settings: dict[str, Any]) -> None:
    assert qwen3.reads(TINY, ModelSection())
    assert not qwen3.reads(TINY, ModelSection(**settings))


def _set(name: str, **changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


@pytest.mark.parametrize(
    "change",
    [
        _set("config.json", model_type="qwen2"),
        _set("config.json", hidden_act="gelu"),
        _set("config.json", use_sliding_window=True),
        _set("config.json", layer_types=["sliding_attention"] * 4),
        _set("config.json", rope_parameters={"rope_theta": 1e4, "rope_type": "yarn", "factor": 2.0}),
        _set("config.json", quantization_config={"quant_method": "fp8"}),
        _set("config.json", num_key_value_heads=None),
        _set("config.json", tie_word_embeddings=None),
        _set("config.json", rope_parameters={"rope_theta": "far", "rope_type": "default"}),
        _set("tokenizer_config.json", tokenizer_class="LlamaTokenizer"),
        _set("tokenizer_config.json", added_tokens_decoder={}),
        _set("tokenizer_config.json", eos_token={"content": "<|im_end|>"}),
        lambda folder: (folder / "config.json").write_text("[]"),
        lambda folder: (folder / "config.json").write_text("{"),
        lambda folder: (folder / "tokenizer_config.json").unlink(),
        lambda folder: (folder / "chat_template.jinja").write_text("{%- generation %}a{% endgeneration %}"),
        lambda folder: (folder / "preprocessor_config.json").write_text("{}"),
        lambda folder: (folder / "model.safetensors").unlink(),
    ],
)
def test_other_models_are_left_to_transformers(tmp_path: Path, change: Callable[[Path], None]) -> None:
    folder = copytree(TINY, tmp_path / "model")
    assert qwen3.reads(str(folder), ModelSection())
    change(folder)
    assert not qwen3.reads(str(folder), ModelSection())


def test_what_is_damaged_is_said_in_a_line(tmp_path: Path) -> None:
    folder = copytree(TINY, tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
    with pytest.raises(UserError, match=r"is no whole causal language model: it has no weights for model"):
        light(str(folder))
    (folder / "model.safetensors").write_bytes(b"abc")
    with pytest.raises(UserError, match=r"its weights cannot be loaded: "):
        light(str(folder))
    _set("config.json", hidden_size=64)(folder)
    (folder / "model.safetensors").write_bytes((Path(TINY) / "model.safetensors").read_bytes())
    with pytest.raises(UserError, match=r"its weights cannot be loaded: "):
        light(str(folder))
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"its tokenizer cannot be loaded: "):
        load_tokenizer(ModelSection(path=str(folder)), light=True)


def test_the_recipe_s_template_goes_with_the_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }}!")
    section = ModelSection(chat_template=str(tmp_path / "own.jinja"))
    tokenizer = load_tokenizer(section, light=True)
    assert isinstance(tokenizer, FastTokenizer)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "a!"
    tokenizer.save_pretrained(tmp_path / "saved")
    assert FastTokenizer(str(tmp_path / "saved")).chat_template == "{{ messages[0].content }}!"
    assert not fast_tokenizer.reads(TINY, ModelSection(chat_template=str(tmp_path / "absent.jinja")))


def test_an_update_is_that_of_torch() -> None:
    """Bit by bit: a run that was begun with torch's optimizer goes on by ours."""
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator) for shape in ((8, 4), (8,), (3, 8), ())]
    ours, theirs = ([torch.nn.Parameter(t.clone()) for t in start] for _ in range(2))
    made = Optimizer(ours, (0.9, 0.95), 0.1, 1e9)
    torchs = torch.optim.AdamW(
        [{"params": theirs[::2][:2], "weight_decay": 0.1}, {"params": theirs[1::2], "weight_decay": 0.0}],
        betas=(0.9, 0.95), fused=True,
    )  # fmt: skip
    for step in range(4):
        for a, b in zip(ours, theirs, strict=True):
            gradient = torch.randn(a.shape, generator=generator)
            a.grad, b.grad = (None, None) if step == 1 and a.dim() == 1 else (gradient.clone(), gradient.clone())
        for group in torchs.param_groups:
            group["lr"] = 0.01 * (step + 1)
        torchs.step()
        made.step(0.01 * (step + 1))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    for number, parameter in enumerate(theirs):
        for kind, tensor in torchs.state[parameter].items():
            assert torch.equal(made.named_state()[f"{kind}.{number}"], tensor)


RUN = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name in ("transformers", "torch._dynamo", "torch.distributed.checkpoint", "sympy", "aiohttp"):
            raise ImportError(f"{name} is not to be imported")
sys.meta_path.insert(0, Refuse())
from agentrl.cli.main import main
sys.argv = ["agentrl", *sys.argv[1:]]
main()
"""


@pytest.mark.slow
def test_a_run_on_the_embedded_model_imports_no_more_than_it_needs(tmp_path: Path) -> None:
    run = [sys.executable, "-c", RUN, "train", str(ROOT / "recipes" / "gsm8k_tool.yaml"), "train.steps=1"]
    sizes = ["rollout.tasks=4", "rollout.n=4", "eval.tasks=4", "algorithm.kl_coef=0.01", "train.threads=1"]
    done = subprocess.run([*run, *sizes], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    saved = tmp_path / "runs" / "gsm8k_tool-001" / "checkpoints" / "step_1"
    assert type(light(str(saved))[0]) is Qwen3
    more = [sys.executable, "-c", RUN, "train", "--resume", str(saved.parent.parent), "train.steps=2"]
    done = subprocess.run(more, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    shown = [sys.executable, "-c", RUN, "eval", str(saved.parent.parent), "eval.tasks=4"]
    done = subprocess.run(shown, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
