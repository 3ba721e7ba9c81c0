"""Fixtures that several test files share: one real SGLang server for the whole session."""

import os
import signal
from collections.abc import Iterator

import pytest
from paths import SUPPORT

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job, which tests of Ctrl-C would inherit
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ["PYTHONPATH"] = os.pathsep.join([str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])])
"""So that subprocesses and Ray's workers find what tests share."""

VENV = "AGENTRL_SGLANG_VENV"
LONGEST = (
    "test_cluster_train_faults", "test_sglang_server", "test_cluster_train_equal", "test_sglang_lora",
    "test_cluster_faults", "test_sglang_exact", "test_cluster_train_run", "test_train_resume", "test_sharded",
    "test_cluster_nodes", "test_new",
)  # fmt: skip
"""What takes long comes first where processes share the tests, so that they end at about the same time."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        order = {name: place for place, name in enumerate(LONGEST)}
        items.sort(key=lambda item: order.get(item.path.stem, len(order)))


@pytest.fixture(scope="session")
def sglang_venv() -> str:
    """The virtual environment of the real server; skips where there is none."""
    if not (venv := os.environ.get(VENV)):
        pytest.skip(f"no SGLang: make one with scripts/sglang_cpu/install VENV and set {VENV}=VENV")
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
