"""The filter of system calls, run step by step as the kernel does."""

import struct

import pytest

from agentrl.containment.seccomp import filter_program
from agentrl.errors import UserError

ALLOWED, REFUSED, MISSING, NO_FAMILY = 0x7FFF0000, 0x00050001, 0x00050026, 0x00050061
X86_64, AARCH64 = 0xC000003E, 0xC00000B7
LOAD, EQUAL, AT_LEAST, ANY_BIT = 0x20, 0x15, 0x35, 0x45


def answer(program: bytes, machine: int, number: int, *arguments: int) -> int:
    """What the filter answers to a system call."""
    data = struct.pack("=IIQ6Q", number, machine, 0, *(*arguments, *[0] * 6)[:6])
    steps, at, held = list(struct.iter_unpack("=HBBI", program)), 0, 0
    while True:
        code, if_true, if_false, value = steps[at]
        if code == LOAD:
            held = struct.unpack_from("=I", data, value)[0]
        elif code in (EQUAL, AT_LEAST, ANY_BIT):
            true = {EQUAL: held == value, AT_LEAST: held >= value, ANY_BIT: bool(held & value)}[code]
            at += if_true if true else if_false
        else:
            return int(value)
        at += 1


@pytest.mark.parametrize(
    ("call", "both"),
    [
        ((0, 0), ALLOWED), ((165,), REFUSED), ((250, 0), REFUSED), ((0x40000001,), REFUSED), ((435,), MISSING),
        ((56, 0x10000011), REFUSED), ((56, 17), ALLOWED), ((41, 2, 1, 0), ALLOWED), ((41, 17, 3, 0), NO_FAMILY),
        ((41, 16, 3, 12), NO_FAMILY), ((16, 0, 0x5412), REFUSED), ((16, 0, 0x541C), REFUSED),
        ((16, 0, 0x5401), ALLOWED),
        ((302, 0, 7), ALLOWED), ((302, 1, 7), REFUSED), ((72, 3, 1031), REFUSED), ((72, 3, 1), ALLOWED),
    ],
)  # fmt: skip
def test_what_is_refused_to_both(call: tuple[int, ...], both: int) -> None:
    for watching in (False, True):
        assert answer(filter_program("x86_64", watching=watching), X86_64, *call) == both


@pytest.mark.parametrize(("call", "otherwise"), [((294,), REFUSED), ((253,), REFUSED), ((41, 16, 3, 0), NO_FAMILY)])
def test_what_only_programs_may(call: tuple[int, ...], otherwise: int) -> None:
    assert answer(filter_program("x86_64"), X86_64, *call) == otherwise
    assert answer(filter_program("x86_64", watching=True), X86_64, *call) == ALLOWED


def test_the_filter_knows_its_machines() -> None:
    for name, machine, other in (("x86_64", X86_64, AARCH64), ("aarch64", AARCH64, X86_64)):
        program = filter_program(name)
        assert len(program) // 8 < 4096
        assert answer(program, other, 0) == REFUSED
        assert answer(program, machine, 2 if machine == X86_64 else 56) == ALLOWED
    with pytest.raises(UserError, match="riscv64"):
        filter_program("riscv64")
