"""Where launched servers listen, and who may call them."""

from typing import Any

import pytest
from sglang_help import tiny

from agentrl import addresses
from agentrl.addresses import KEY_VARIABLE, is_own, listen_host, own_address, url_of
from agentrl.engine.servers.settings import Settings
from agentrl.engine.sglang.command import SglangPlan
from agentrl.errors import UserError


@pytest.fixture(autouse=True)
def network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of two networks."""
    routes = {"10.0.0.1": "10.0.0.7", "192.168.1.1": "192.168.1.7", "127.0.0.1": "127.0.0.1", "8.8.8.8": "10.0.0.7"}
    monkeypatch.setattr(addresses, "own_address", lambda host, port: routes[host])
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.mark.parametrize(
    ("cluster", "ray", "host"),
    [
        (None, None, "127.0.0.1"),
        ("10.0.0.1:6379", None, "10.0.0.7"),
        ("192.168.1.1:6379", None, "192.168.1.7"),
        ("127.0.0.1:6379", None, "127.0.0.1"),
        ("auto", "192.168.1.1:6379", "192.168.1.7"),
        ("auto", None, "10.0.0.7"),
    ],
)
def test_servers_listen_where_the_cluster_reaches_them(
    cluster: str | None, ray: str | None, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if ray is not None:
        monkeypatch.setenv("RAY_ADDRESS", ray)
    assert listen_host(cluster) == host


def plan(cluster: str | None = None, **flags: Any) -> SglangPlan:
    found = Settings(command="true", flags=flags).plan(SglangPlan, tiny()[0], "m", 4, None, cluster)
    assert found is not None
    return found


def test_a_server_on_a_network_asks_for_a_key() -> None:
    words = plan("10.0.0.1:6379").arguments(30000, 0)
    assert words[words.index("--host") + 1] == "10.0.0.7"
    assert len(words[words.index("--api-key") + 1]) == 64
    assert plan("10.0.0.1:6379").key != plan("10.0.0.1:6379").key
    assert plan(host="0.0.0.0").key is not None
    assert (plan().key, plan().host, "--api-key" in plan().arguments(30000, 0)) == (None, "127.0.0.1", False)
    assert plan("127.0.0.1:6379").key is None


@pytest.mark.slow
def test_a_key_of_the_recipe_or_the_environment_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan(api_key="abc").key == "abc"
    assert Settings(urls=("http://a:1",)).key(None) is None
    monkeypatch.setenv(KEY_VARIABLE, "of mine")
    assert Settings(urls=("http://a:1",)).key(None) == "of mine"
    assert plan("10.0.0.1:6379").key == "of mine"
    assert plan().key is None


def test_a_port_cannot_be_given() -> None:
    with pytest.raises(UserError, match=r"engine\.args\.flags\.port: leave it out"):
        plan(port=30000)


def test_addresses() -> None:
    assert is_own("127.0.0.1")
    assert not is_own("192.0.2.1")
    assert url_of("10.0.0.7", 3) == "http://10.0.0.7:3"
    assert url_of("::1", 3) == "http://[::1]:3"
    assert url_of("0.0.0.0", 3) == "http://10.0.0.7:3"
    assert own_address("127.0.0.1", 3) == "127.0.0.1"
    with pytest.raises(UserError, match="no route to no-such-host"):
        own_address("no-such-host.invalid", 3)
