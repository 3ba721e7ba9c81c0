"""What is said of workers that died, without any workers."""

from pathlib import Path

import pytest

from agentrl.cluster import post_mortem
from agentrl.cluster.host import ProcessInfo
from agentrl.cluster.post_mortem import PostMortem, WorkerReference, cause_of_death, last_stack, worker_died


@pytest.mark.parametrize(("alive", "said"), [(False, "it was killed"), (True, "Ray has lost touch with it")])
def test_a_process_that_ray_lost_is_looked_for(monkeypatch: pytest.MonkeyPatch, alive: bool, said: str) -> None:
    monkeypatch.setattr(post_mortem, "examine", lambda _: [PostMortem(["bye"], "", [], 0, alive)])
    worker = WorkerReference("probe", 1, ProcessInfo(7, "127.0.0.1", "node", 1, 1, "", (), 0), Path("probe_1.log"))
    assert f"died in 'end': {said}" in str(worker_died(worker, "end", post_mortem.DISCONNECTED))


def test_what_ray_says_of_the_dead() -> None:
    class NodeDiedError(Exception):
        pass

    class RayTaskError(Exception):
        pass

    assert cause_of_death(RuntimeError("x\nworker killed, node running low on memory\n")).startswith("Ray ended it")
    assert cause_of_death(NodeDiedError("gone")) == "its machine left the cluster"
    assert cause_of_death(RuntimeError("\n  first line\nsecond")) == "first line"
    assert cause_of_death(RayTaskError("ray::Host.call()\n  File x\nOSError: full\n")) == "OSError: full"


def test_the_last_stack_of_a_log() -> None:
    dump = ["Thread 0x1 (most recent call first):", '  File "/a/other.py", line 1 in wait']
    main = ["Current thread 0x2 (most recent call first):", '  File "/a b/it.py", line 7 in <lambda>', "", "said"]
    assert last_stack([*main, *dump, *main]) == ["/a b/it.py:7 <lambda>"]
    assert last_stack([*main, *dump], "Current") == ["/a b/it.py:7 <lambda>"]
    assert last_stack(["no stacks"]) == []
