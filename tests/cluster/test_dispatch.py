"""How arguments reach workers, and how outputs come back: without any workers."""

import numpy as np
import pytest
from cluster_help import BACKWARDS, Rows

from agentrl.cluster.dispatch import ALL_TO_ALL, ONE_TO_ALL, RANK_ZERO, SPLIT, Shape, register, registered


def test_one_to_all_gives_every_rank_the_same_object() -> None:
    calls, kept = ONE_TO_ALL.scatter(Shape(3), (1,), {"a": 2})
    assert calls == [((1,), {"a": 2})] * 3
    assert calls[0] is calls[2]
    assert ONE_TO_ALL.gather(Shape(3), ["x", "y", "z"], kept) == ["x", "y", "z"]


def test_all_to_all_gives_each_rank_its_entry() -> None:
    calls, _ = ALL_TO_ALL.scatter(Shape(2), ([1, 2],), {"a": ("x", "y")})
    assert calls == [((1,), {"a": "x"}), ((2,), {"a": "y"})]


@pytest.mark.parametrize(("args", "kwargs", "name"), [(([1],), {}, "0"), ((), {"a": 7}, "a"), (("ab",), {}, "0")])
def test_all_to_all_wants_one_entry_a_worker(args: tuple, kwargs: dict, name: str) -> None:
    with pytest.raises(TypeError, match=f"argument {name} must be a list of 2 entries, one a worker"):
        ALL_TO_ALL.scatter(Shape(2), args, kwargs)


def test_rank_zero_calls_no_other() -> None:
    calls, kept = RANK_ZERO.scatter(Shape(3), (1,), {})
    assert calls == [((1,), {}), None, None]
    assert RANK_ZERO.gather(Shape(3), ["x", None, None], kept) == "x"


@pytest.mark.parametrize("count", [0, 1, 2, 5, 7])
@pytest.mark.parametrize("parallel", [1, 2])
def test_split_puts_any_number_of_rows_back_in_order(count: int, parallel: int) -> None:
    shape = Shape(4, parallel)
    rows = Rows(np.arange(count))
    calls, partition = SPLIT.scatter(shape, ("same", rows), {})
    assert [call[0][0] for call in calls] == ["same"] * 4
    assert sum(len(call[0][1].values) for call in calls) == count * parallel
    outputs = [call[0][1].values + 100 for call in calls]
    assert SPLIT.gather(shape, outputs, partition).tolist() == [value + 100 for value in range(count)]


def test_ranks_of_one_sequence_are_given_the_same_object() -> None:
    calls, _ = SPLIT.scatter(Shape(4, 2), (), {"rows": Rows(np.arange(4))})
    assert calls[0] is calls[1]
    assert calls[2] is calls[3]
    assert calls[0][1]["rows"].values.tolist() == [0, 2]


def test_several_arguments_are_split_alike() -> None:
    calls, _ = SPLIT.scatter(Shape(2), (Rows(np.arange(3)), Rows(np.arange(3) * 10)), {})
    assert [call[0][1].values.tolist() for call in calls] == [[0, 20], [10]]


def test_split_needs_something_to_deal() -> None:
    with pytest.raises(TypeError, match="must have `distribute"):
        SPLIT.scatter(Shape(2), ([1, 2],), {})


def test_split_refuses_a_deal_of_the_wrong_size() -> None:
    class Broken(Rows):
        def distribute(self, parts: int):  # type: ignore[no-untyped-def]
            return super().distribute(parts + 1)

    with pytest.raises(ValueError, match=r"distribute\(2\) gave 3 parts"):
        SPLIT.scatter(Shape(2), (Broken(np.arange(3)),), {})


def test_a_dispatch_of_ones_own() -> None:
    calls, kept = BACKWARDS.scatter(Shape(3), ("a", "b", "c"), {})
    assert calls == [(("c",), {}), None, (("a",), {})]
    assert BACKWARDS.gather(Shape(3), ["x", None, "z"], kept) == ("kept", ["x", None, "z"])


def test_what_is_registered() -> None:
    class Base:
        @register(dispatch=SPLIT)
        def kept(self) -> None: ...

        @register(dispatch=SPLIT)
        def changed(self) -> None: ...

        def not_marked(self) -> None: ...

    class Derived(Base):
        def kept(self) -> None: ...

        @register(dispatch=RANK_ZERO, blocking=False)
        def changed(self) -> None: ...

    assert registered(Derived) == {"kept": (SPLIT, True), "changed": (RANK_ZERO, False)}


def test_register_without_brackets_is_an_error() -> None:
    with pytest.raises(TypeError, match="takes a Dispatch"):

        @register
        def method() -> None: ...
