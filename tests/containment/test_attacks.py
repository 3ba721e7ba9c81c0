"""One table of attacks on both sandboxes, that of the tool `python` and `agent.sandbox`, as root and as anybody."""

import json
import os

import pytest
from containment_help import BOMBS, KINDS, REFUSED, as_ordinary_user, host, told
from sandbox_help import descendants

pytestmark = pytest.mark.usefixtures("bubblewrap")
ROOT_ONLY = pytest.mark.skipif(os.getuid() != 0, reason="needs root")
USERS = [
    pytest.param(os.getuid() == 0, id="as an ordinary user"),
    pytest.param(False, id="as root, where ordinary users have no namespaces", marks=ROOT_ONLY),
]


@pytest.mark.parametrize("ordinary", USERS)
@pytest.mark.parametrize("kind", KINDS)
async def test_what_reaches_for_the_host_is_refused(kind: str, ordinary: bool) -> None:
    before = len(descendants())
    async with host() as here:
        assert json.loads(await told(kind, here.refusals(), ordinary=ordinary)) == {}
    assert len(descendants()) == before


BOMBS_BY_USER = [
    pytest.param(name, *user.values, id=f"{name}-{user.id}", marks=user.marks)
    for name in BOMBS
    for user in USERS
    if user is USERS[0] or name != "forks without end"  # root's processes are only counted: see SECURITY.md
]


@pytest.mark.parametrize(("name", "ordinary"), BOMBS_BY_USER)
@pytest.mark.parametrize("kind", KINDS)
async def test_what_takes_the_machine_is_stopped(kind: str, name: str, ordinary: bool) -> None:
    code, wanted = BOMBS[name]
    async with host() as here:
        found = await told(kind, here.script(code), ordinary=ordinary)
    assert any(word in found for word in wanted), found


@ROOT_ONLY
@pytest.mark.slow
def test_an_ordinary_user_has_the_same_sandboxes() -> None:
    found = as_ordinary_user(
        "import asyncio, json, containment_help as c\nprint(json.dumps(asyncio.run(c.all_told())))"
    )
    for kind in KINDS:
        assert json.loads(found[f"{kind}: refused"]) == {}
        for name, (_, wanted) in BOMBS.items():
            assert any(word in found[f"{kind}: {name}"] for word in wanted), (kind, name, found)


async def test_the_attacks_reach_what_is_not_kept_apart() -> None:
    """Outside, those that do no harm succeed: it is the sandbox that refuses them."""
    async with host() as here:
        for name in ("a host's file", "a host's folder", "the host's network", "an abstract socket"):
            exec(here.script(REFUSED[name]), {})
