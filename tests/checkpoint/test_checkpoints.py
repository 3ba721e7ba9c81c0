"""Checkpoints of one process: all of it comes back, and what bears a checkpoint's name is whole, whatever happens."""

import dataclasses
import errno
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from checkpoint_help import SMALL_FILES, Role, as_ranks_write, everything, learn, learned, names, same, tiny
from lora_help import merged_state
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from agentrl.checkpoint import sharded, state_file
from agentrl.checkpoint.checkpoints import Checkpoints
from agentrl.checkpoint.huggingface import HuggingFace, save_model
from agentrl.checkpoint.pending import Pending
from agentrl.checkpoint.roles import _state, load_roles, restore_rng, rng_state, save_roles
from agentrl.errors import UserError
from agentrl.models import lora
from agentrl.recipe.sections.model import LoraSection


def saver(**roles: Role) -> Callable[[Path], Pending]:
    return lambda folder: save_roles(roles, folder)


def adapted(seed: int = 0) -> Any:
    model = tiny(seed)
    lora.add_adapter(model, LoraSection(rank=2, targets=("q_proj", "down_proj")), "base")
    return model


WRITTEN = len(_state(learned(1), 0))  # tensors of a role


MODELS: dict[str, Callable[[], Any]] = {
    "float32": tiny, "bfloat16": lambda: tiny(dtype=torch.bfloat16), "adapter": adapted,
}  # fmt: skip


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_a_role_goes_on_as_if_it_had_never_stopped(tmp_path: Path, make: Callable[[], Any]) -> None:
    torch.manual_seed(5)
    first = learned(1, 2, model=make())
    torch.manual_seed(6)
    saved = Checkpoints(tmp_path, 2).save(2, saver(actor=first), {"sampler": [1, 2]})
    assert saved.extra == {"sampler": [1, 2]}
    other = make()
    for parameter in other.parameters():
        if parameter.requires_grad:
            parameter.data.fill_(7)
    second = Role.of(other)
    torch.manual_seed(99)
    load_roles({"actor": second}, saved.path)
    assert same(everything(second), everything(first))
    used = torch.rand(3)
    learn(second, 3)
    torch.manual_seed(6)
    assert torch.equal(used, torch.rand(3))
    learn(first, 3)
    assert same(everything(second), everything(first))


def test_a_rank_that_did_not_exist_follows_from_the_first_one_and_its_own_number() -> None:
    found = []
    for seed, rank in ((1, 2), (1, 3), (4, 2), (1, 2)):
        torch.manual_seed(seed)
        saved = rng_state(0)
        torch.manual_seed(77)  # what the rank has before does not matter
        restore_rng(saved, rank)
        found.append(torch.rand(4))
    assert torch.equal(found[0], found[3])
    assert len({tuple(numbers.tolist()) for numbers in found}) == 3


def test_a_role_that_has_learned_nothing_is_saved_too(tmp_path: Path) -> None:
    saved = Checkpoints(tmp_path, 1).save(0, saver(actor=Role.of(tiny())), {})
    again = learned(1, model=tiny(seed=3))
    load_roles({"actor": again}, saved.path)
    assert same(everything(again), everything(Role.of(tiny())))


def test_two_roles_are_saved_and_either_is_loaded_alone(tmp_path: Path) -> None:
    actor, critic = learned(1), learned(2, model=tiny(seed=1, hidden_size=20))
    saved = Checkpoints(tmp_path, 1).save(1, saver(actor=actor, critic=critic), {})
    again = Role.of(tiny(seed=9, hidden_size=20))
    load_roles({"critic": again}, saved.path)
    assert same(everything(again), everything(critic))


@pytest.mark.parametrize("limit", [SMALL_FILES, 10**9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_loads_the_folder(tmp_path: Path, limit: int, dtype: torch.dtype) -> None:
    model = tiny(dtype=dtype)
    exported = HuggingFace(model)
    exported.begin(tmp_path)
    exported.write(tmp_path, shard=limit)
    files = sorted(tmp_path.glob("*.safetensors"))
    if limit == SMALL_FILES:
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert len(files) > 1
        assert index["metadata"]["total_size"] == sum(p.nbytes for p in model.parameters())
        assert set(index["weight_map"].values()) == {f.name for f in files}
    else:
        assert names(tmp_path) == ["config.json", "generation_config.json", "model.safetensors"]
    assert all(int.from_bytes(f.read_bytes()[:8], "little") % 8 == 0 for f in files)  # so that values lie aligned
    assert sum(len(safe_open(f, "pt").keys()) for f in files) == len(list(model.parameters()))
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.dtype == dtype
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)


def test_an_adapter_is_merged_and_lies_beside(tmp_path: Path) -> None:
    from peft import PeftModel

    role = learned(1, 2, model=adapted())
    saved = Checkpoints(tmp_path, 1).save(2, saver(actor=role), {})
    merged = AutoModelForCausalLM.from_pretrained(saved.path)
    for name, value in merged_state(role.model).items():
        torch.testing.assert_close(merged.state_dict()[name], value)
    adapter = PeftModel.from_pretrained(tiny(), saved.path / "adapter")
    ids = torch.arange(9)[None]
    torch.testing.assert_close(adapter(ids).logits, merged(ids).logits, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(merged(ids).logits, tiny()(ids).logits, atol=1e-3)
    described = state_file.describe(saved.path / "trainer" / "actor")
    assert {name for name in described if name.startswith("weight.")} == {
        f"weight.{name}" for name, p in role.model.named_parameters() if "lora" in name and p.requires_grad
    }


class Gate:
    """Holds every background save until it is opened."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        self._write = state_file.write
        patch.setattr(state_file, "write", self._wait)

    def _wait(self, *arguments: Any) -> None:
        self.reached.set()
        assert self.opened.wait(60)
        self._write(*arguments)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_what_is_learned_while_it_is_written_is_not_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any]
) -> None:
    gate = Gate(monkeypatch)
    role = learned(1, 2, model=make())
    then = everything(role)
    checkpoints = Checkpoints(tmp_path, 2)
    checkpoints.begin(2, saver(actor=role), {})
    assert gate.reached.wait(60)
    learn(role, 3)
    checkpoints.check()  # it is under way, and nothing is wrong
    assert checkpoints.latest() is None
    gate.opened.set()
    checkpoints.finish()
    saved = checkpoints.latest()
    again = Role.of(make())
    load_roles({"actor": again}, saved.path)
    assert same(everything(again), then)
    assert not same(everything(again), everything(role))
    model = AutoModelForCausalLM.from_pretrained(saved.path)
    for name, value in merged_state(again.model).items():
        torch.testing.assert_close(model.state_dict()[name], value)


def test_the_next_save_waits_for_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    role = learned(1)
    checkpoints = Checkpoints(tmp_path, 2)
    checkpoints.begin(1, saver(actor=role), {})
    assert gate.reached.wait(60)
    threading.Timer(0.2, gate.opened.set).start()
    checkpoints.begin(2, saver(actor=role), {})
    assert (tmp_path / "step_1").is_dir()
    checkpoints.finish()
    assert names(tmp_path) == ["step_1", "step_2"]


def save_all(checkpoints: Checkpoints, role: Role, accuracies: dict[int, float | None], split: str = "test") -> None:
    for step, accuracy in accuracies.items():
        checkpoints.begin(step, saver(actor=role), {}, None if accuracy is None else (split, accuracy))
    checkpoints.finish()


@pytest.mark.slow
def test_the_last_and_the_best_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 2)
    save_all(checkpoints, learned(1), {1: 0.5, 2: 0.75, 3: None, 4: 0.25, 10: None})
    assert names(tmp_path) == ["best.json", "step_10", "step_2", "step_4"]
    assert json.loads((tmp_path / "best.json").read_text()) == {
        "step": 2,
        "accuracy": 0.75,
        "split": "test",
        "path": "step_2",
    }
    best, latest = checkpoints.best(), Checkpoints(tmp_path, 2).latest()
    assert (best.step, best.accuracy, latest.step) == (2, 0.75, 10)
    save_all(checkpoints, learned(1), {11: 0.75, 12: None, 13: None})
    assert names(tmp_path) == ["best.json", "step_11", "step_12", "step_13"]


def test_accuracies_on_two_splits_are_not_compared(tmp_path: Path) -> None:
    """A run that was resumed with another split to choose by: what it chose by last counts."""
    checkpoints = Checkpoints(tmp_path, 1)
    save_all(checkpoints, learned(1), {1: 0.75})
    save_all(checkpoints, learned(1), {2: 0.5, 3: 0.25, 4: None}, split="validation")
    best = checkpoints.best()
    assert (best.step, best.split) == (2, "validation")
    assert names(tmp_path) == ["best.json", "step_2", "step_4"]


def test_without_an_evaluation_there_is_no_best(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 1)
    assert checkpoints.best() is None
    assert checkpoints.latest() is None
    save_all(checkpoints, learned(1), {1: None, 2: None})
    assert names(tmp_path) == ["step_2"]
    assert checkpoints.best() is None


def test_what_a_killed_run_left_is_neither_seen_nor_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 2)
    save_all(checkpoints, learned(1), {2: None, 10: None})
    (tmp_path / ".step_11.part").mkdir()
    (tmp_path / ".step_2.old").mkdir()  # killed once the second save of step 2 was whole
    (tmp_path / "step_10").rename(tmp_path / ".step_10.old")  # killed between the two renames of a second save
    saved = checkpoints.latest()
    assert saved.step == 10
    save_all(checkpoints, learned(1), {12: None})
    assert names(tmp_path) == ["step_10", "step_12"]


def test_a_step_is_saved_again_in_the_place_of_the_first(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 2)
    save_all(checkpoints, learned(1), {1: None})
    second = learned(1, 2)
    saved = checkpoints.save(1, saver(actor=second), {"second": True})
    again = Role.of(tiny())
    load_roles({"actor": again}, saved.path)
    assert same(everything(again), everything(second))
    assert names(tmp_path) == ["step_1"]


def refuses(patch: pytest.MonkeyPatch, owner: Any, name: str, after: int = 0) -> None:
    """The disk is full at the call `after` of `owner.name`."""
    calls = iter(range(10**6))
    original = getattr(owner, name)

    def call(*arguments: Any, **options: Any) -> Any:
        if next(calls) >= after:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(*arguments, **options)

    patch.setattr(owner, name, call)


def places() -> Iterator[Any]:
    from agentrl.checkpoint import checkpoints, disk, huggingface
    from agentrl.checkpoint import safetensors_writer as tensor_files

    yield pytest.param(Path, "mkdir", 1, id="folder")
    yield pytest.param(HuggingFace, "begin", 0, id="config")
    yield pytest.param(state_file, "write", 0, id="trainer")
    yield pytest.param(tensor_files, "_write_values", 3, id="moments")
    yield pytest.param(tensor_files, "_write_values", WRITTEN + 3, id="weights")
    yield pytest.param(huggingface, "write_model", 0, id="shard")
    yield pytest.param(Path, "write_text", 0, id="state")
    yield pytest.param(disk, "flush", 0, id="flush")
    yield pytest.param(checkpoints, "rename", 0, id="rename")


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(("owner", "name", "after"), list(places()))
def test_a_full_disk_is_one_line_and_the_last_checkpoint_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, after: int
) -> None:
    role = learned(1)
    folder = tmp_path / "checkpoints"
    checkpoints = Checkpoints(folder, 1)
    checkpoints.save(1, saver(actor=role), {})
    then = everything(role)
    learn(role, 2)
    with monkeypatch.context() as patch:
        refuses(patch, owner, name, after)
        with pytest.raises(UserError) as told:
            checkpoints.save(2, saver(actor=role), {})
    line = str(told.value)
    assert line.startswith(f"{folder}: a checkpoint could not be written: No space left on device (")
    assert line.endswith("B free there); the checkpoint of step 2 is lost, that of step 1 is kept")
    assert "\n" not in line
    assert names(folder) == ["step_1"]
    saved = checkpoints.latest()
    again = Role.of(tiny())
    load_roles({"actor": again}, saved.path)
    assert same(everything(again), then)
    assert checkpoints.save(2, saver(actor=role), {}).path.is_dir()  # and once there is room again it goes on
    assert names(folder) == ["step_2"]


@pytest.mark.parametrize("how", ["begin", "check", "finish"])
def test_a_failure_in_the_background_is_told_at_the_next_opportunity_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    role, checkpoints = learned(1), Checkpoints(tmp_path, 2)
    with monkeypatch.context() as patch:
        refuses(patch, state_file, "write")
        checkpoints.begin(1, saver(actor=role), {})
        while names(tmp_path):
            pass
    ways: dict[str, Callable[[], None]] = {
        "begin": lambda: checkpoints.begin(2, saver(actor=role), {}),
        "check": lambda: wait_and_check(checkpoints),
        "finish": checkpoints.finish,
    }
    with pytest.raises(UserError, match=r"No space left on device .* step 1 is lost, there was none before"):
        ways[how]()
    checkpoints.finish()
    assert names(tmp_path) == []


def wait_and_check(checkpoints: Checkpoints) -> None:
    for _ in range(1000):
        checkpoints.check()
        threading.Event().wait(0.01)


def test_what_is_no_fault_of_the_disk_is_raised_as_it_is(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 2)

    def breaks(folder: Path) -> Pending:
        raise ZeroDivisionError("of the program itself")

    def breaks_later(folder: Path) -> Pending:
        return Pending(lambda: breaks(folder).result())

    for way in (breaks, breaks_later):
        with pytest.raises(ZeroDivisionError):
            checkpoints.save(1, way, {})
        assert names(tmp_path) == []


def test_what_a_worker_wrote_elsewhere_is_missed(tmp_path: Path) -> None:
    """As on a machine that does not share the output folder."""
    role = learned(1)
    checkpoints = Checkpoints(tmp_path / "checkpoints", 2)

    def elsewhere(folder: Path) -> Pending:
        (tmp_path / "other").mkdir()
        return save_roles({"actor": role}, tmp_path / "other")

    def partly(folder: Path) -> Pending:
        save_roles({"actor": role}, folder).result()
        (folder / "trainer" / "actor" / state_file.FILE).unlink()
        return Pending(lambda: None)

    def cut(folder: Path) -> Pending:
        save_roles({"actor": role}, folder).result()
        write(folder / "trainer" / "actor" / state_file.FILE, b"cut")
        return Pending(lambda: None)

    def partly_by_ranks(folder: Path) -> Pending:
        save_roles({"actor": role}, folder).result()
        as_ranks_write(folder)
        (folder / "trainer" / "actor" / "__0_0.distcp").unlink()
        return Pending(lambda: None)

    def cut_by_ranks(folder: Path) -> Pending:
        save_roles({"actor": role}, folder).result()
        as_ranks_write(folder)
        write(folder / "trainer" / "actor" / "__0_0.distcp", b"cut")
        return Pending(lambda: None)

    for step, way in enumerate((elsewhere, partly, cut, partly_by_ranks, cut_by_ranks), 1):
        with pytest.raises(UserError, match=f"folder that all of them share; the checkpoint of step {step} is lost"):
            checkpoints.save(step, way, {})
        assert names(tmp_path / "checkpoints") == []


class LostError(UserError):
    """Of a worker."""


def test_a_lost_worker_is_left_to_who_can_start_another(tmp_path: Path) -> None:
    def lose(folder: Path) -> Pending:
        raise LostError("worker 1 is dead")

    with pytest.raises(LostError, match=r"^worker 1 is dead$"):
        Checkpoints(tmp_path, 2).save(1, lose, {})


def damaged(saved: Path) -> Iterator[tuple[str, Callable[[], None], str]]:
    trainer = saved / "trainer"
    yield "gone", lambda: shutil.rmtree(trainer / "actor"), "no actor was saved there"
    yield "state", lambda: write(trainer / "actor" / state_file.FILE, b"nonsense"), "actor: .*header"
    yield "cut", lambda: cut(trainer / "actor" / state_file.FILE), "actor: .*incomplete|actor: .*covered"
    yield (
        "random",
        lambda: replaced(trainer / "actor", "rng.0", torch.zeros(3, dtype=torch.uint8)),
        "actor: .*RNG state",
    )
    yield "dtype", lambda: write(trainer / "actor" / state_file.FILE, FOUR_BITS), "actor: "
    as_ranks_write(saved)
    yield "metadata", lambda: write(trainer / "actor" / ".metadata", b"nonsense"), "actor: .*pickle|actor: .*load key"
    yield "values", lambda: write(trainer / "actor" / "__0_0.distcp", b"cut"), "actor: "
    yield "missing", lambda: (trainer / "actor" / "__0_0.distcp").unlink(), "actor: .*No such file"


def write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


HEADER = b'{"x": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}'
FOUR_BITS = len(HEADER).to_bytes(8, "little") + HEADER + b"1"


def replaced(folder: Path, name: str, tensor: torch.Tensor) -> None:
    found = safetensors.torch.load_file(folder / state_file.FILE)
    safetensors.torch.save_file({**found, name: tensor}, folder / state_file.FILE)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


class Hostile:
    """What unpickling it would run."""

    def __init__(self, *what: Any) -> None:
        self.what = what

    def __reduce__(self) -> Any:
        return self.what


def hostile(saved: Path, ran: Path) -> Iterator[tuple[str, Any]]:
    """What somebody may have put in the place of, or into, the metadata of a checkpoint."""
    import builtins
    import os
    import pickle

    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

    with (saved / "trainer" / "actor" / ".metadata").open("rb") as file:
        real: Metadata = pickle.load(file)
    attack = Hostile(os.system, (f"touch {ran}",))
    yield "alone", attack
    yield "eval", Hostile(builtins.eval, (f"open({str(ran)!r}, 'w')",))
    yield "torch", Hostile(torch.load, (str(ran),))
    yield "beside", dataclasses.replace(real, planner_data=attack)
    yield "as a size", Hostile(torch.Size, (attack,))
    yield "an attribute", Hostile(getattr, (torch.Size, "__call__"))
    yield "an attribute of torch", Hostile(getattr, (torch.float32, "is_complex"))
    yield "bytes", dataclasses.replace(real, state_dict_metadata={"x": BytesStorageMetadata()})
    yield (
        "a path",
        dataclasses.replace(
            real,
            storage_data={k: dataclasses.replace(v, relative_path="../../x") for k, v in real.storage_data.items()},
        ),
    )
    yield "no metadata", torch.float32
    yield "half", dataclasses.replace(real, storage_data=None)
    yield (
        "a size",
        dataclasses.replace(real, state_dict_metadata=dict.fromkeys(real.state_dict_metadata, torch.Size([1]))),
    )


def test_a_hostile_checkpoint_runs_nothing(tmp_path: Path) -> None:
    import pickle

    saved, ran = Checkpoints(tmp_path, 1).save(1, saver(actor=learned(1)), {}), tmp_path / "ran"
    as_ranks_write(saved.path)
    attacks = list(hostile(saved.path, ran))
    for name, attack in attacks:
        write(saved.path / "trainer" / "actor" / ".metadata", pickle.dumps(attack))
        with pytest.raises(UserError, match=r"actor: \.metadata is not what is written for tensors: "):
            load_roles({"actor": Role.of(tiny())}, saved.path)
        assert not ran.exists(), name
    assert len(attacks) == 12


def test_a_checkpoint_of_an_older_python_is_read(tmp_path: Path) -> None:
    """Before 3.11.4, which Debian 12 lacks, members of an enum were pickled as attributes of it."""
    import enum
    import io
    import pickle

    class ByName(pickle.Pickler):
        def reducer_override(self, found: object) -> Any:
            return (getattr, (type(found), found.name)) if isinstance(found, enum.Enum) else NotImplemented

    saved = Checkpoints(tmp_path, 1).save(1, saver(actor=learned(1)), {})
    as_ranks_write(saved.path)
    file = saved.path / "trainer" / "actor" / ".metadata"
    known, rewritten = sharded.read_metadata(file), io.BytesIO()
    ByName(rewritten).dump(pickle.loads(file.read_bytes()))
    assert b"getattr" in rewritten.getvalue()
    write(file, rewritten.getvalue())
    assert sharded.read_metadata(file) == known


def test_what_ranks_wrote_is_read_by_one_process(tmp_path: Path) -> None:
    """As older versions wrote it of one process, too."""
    role = learned(1, 2)
    saved = Checkpoints(tmp_path, 1).save(1, saver(actor=role), {})
    as_ranks_write(saved.path)
    again = Role.of(tiny(seed=3))
    load_roles({"actor": again}, saved.path)
    assert same(everything(again), everything(role))


@pytest.mark.parametrize("kind", ["gone", "state", "cut", "random", "dtype", "metadata", "values", "missing"])
def test_a_damaged_checkpoint_is_one_clear_line(tmp_path: Path, kind: str) -> None:
    saved = Checkpoints(tmp_path, 1).save(1, saver(actor=learned(1)), {})
    damage, words = next((d, w) for k, d, w in damaged(saved.path) if k == kind)
    damage()
    with pytest.raises(UserError, match=f"^{saved.path}: the trainer's state cannot be restored: ({words})") as told:
        load_roles({"actor": Role.of(tiny())}, saved.path)
    assert "\n" not in str(told.value)


def test_the_state_beside_it_may_be_damaged_too(tmp_path: Path) -> None:
    saved = Checkpoints(tmp_path, 1).save(
        1,
        saver(actor=learned(1)),
        {},
    )
    (saved.path / "trainer" / "state.json").write_text("{")
    with pytest.raises(UserError, match="the trainer's state cannot be restored"):
        _ = saved.extra
    assert saved.accuracy is None


def test_a_checkpoint_of_an_older_version_is_one_clear_line(tmp_path: Path) -> None:
    saved = Checkpoints(tmp_path, 1).save(1, saver(actor=learned(1)), {})
    shutil.rmtree(saved.path / "trainer" / "actor")
    (saved.path / "trainer" / "actor.pt").write_bytes(b"as it was")
    with pytest.raises(UserError, match=r"an older version of agentrl wrote it; .*\(model\.path\)"):
        load_roles({"actor": Role.of(tiny())}, saved.path)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (
            lambda: tiny(num_hidden_layers=3),
            r"it lacks weight\.model\.layers\.2\.input_layernorm\.weight \(and \d+ more",
        ),
        (lambda: tiny(num_hidden_layers=1), r"the model lacks weight\.model\.layers\.1\."),
        (lambda: tiny(hidden_size=28), r"weight.model.embed_tokens.weight is \[51, 30\], the model's \[51, 28\]$"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, other: Callable[[], Any], words: str) -> None:
    saved = Checkpoints(tmp_path, 1).save(1, saver(actor=learned(1)), {})
    with pytest.raises(UserError, match=f"of another model: .*{words}"):
        load_roles({"actor": Role.of(other())}, saved.path)


def test_weights_go_on_in_another_precision(tmp_path: Path) -> None:
    half, full = learned(1, model=tiny(dtype=torch.bfloat16)), learned(1)
    saved = Checkpoints(tmp_path / "half", 1).save(1, saver(actor=half), {})
    again = Role.of(tiny(seed=3))
    load_roles({"actor": again}, saved.path)
    assert torch.equal(again.model.lm_head.weight, half.optimizer.named_state()["master.model.embed_tokens.weight"])
    saved = Checkpoints(tmp_path / "full", 1).save(1, saver(actor=full), {})
    again = Role.of(tiny(seed=3, dtype=torch.bfloat16))
    load_roles({"actor": again}, saved.path)
    assert torch.equal(again.optimizer.named_state()["master.model.norm.weight"], full.model.model.norm.weight)
    assert torch.equal(again.model.model.norm.weight, full.model.model.norm.weight.bfloat16())


def test_a_model_without_an_optimizer_is_saved(tmp_path: Path) -> None:
    model = tiny()
    save_model(model, None, tmp_path / "new" / "model")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "new" / "model")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
