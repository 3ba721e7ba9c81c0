"""Problems that compare two or three people, or days."""

from agentrl_envs.gsm8k.problems.grammar import kind

_AND_B = "[. {B} {has}| and {B} {has}|, and {B} {has}|. Then {B} {has}]"
_AND_C = "[. {C} {has}| and {C} {has}|, and {C} {has}|^, while {C} {has}]"

KINDS = (
    kind(
        "times_both",
        "n + n*k",
        lambda d: {"n": d.medium(), "k": d.small()},
        "[{A} {has} {n} {o}<and_b> {k} times as many[| {o}| as {A}| {o} as {A}]."
        "|{B} {has} {k} times as many {o} as {A}. {A} {has} {n} {o}."
        "|^{B} {has} {k} times as many {o} as {A}, who {has} {n}.] <q_both>",
        and_b=_AND_B,
    ),
    kind(
        "fewer_both",
        "n + (n - m)",
        lambda d: {"n": (n := d.medium()), "m": d.between(2, n - 1)},
        "[{A} {has} {n} {o}<and_b> {m} fewer[| {o}| than {A}| {o} than {A}]."
        "|{B} {has} {m} fewer {o} than {A}. {A} {has} {n} {o}."
        "|^{B} {has} {m} fewer {o} than {A}, who {has} {n}.] <q_both>",
        and_b=_AND_B,
    ),
    kind(
        "more_both",
        "n + (n + m)",
        lambda d: {"n": d.medium(), "m": d.medium()},
        "[{A} {has} {n} {o}<and_b> {m} more than {A}.|{B} {has} {m} more {o} than {A}. {A} {has} {n} {o}."
        "|^{B} {has} {m} more {o} than {A}, who {has} {n}.] <q_both>",
        and_b=_AND_B,
    ),
    kind(
        "times_then_more",
        "n*k + m",
        lambda d: {"n": d.medium(), "k": d.small(), "m": d.medium()},
        "[{A} {has} {n} {o}. {B} {has} {k} times as many[| {o}][| as {A}]<and_c> {m} more[| {o}] than {B}."
        "|{C} {has} {m} more {o} than {B}. {B} {has} {k} times as many as {A}. {A} {has} {n}[| {o}].] How many {o} "
        "does {C} {have}?",
        and_c=_AND_C,
    ),
    kind(
        "times_then_fewer",
        "n*k - m",
        lambda d: {"n": (n := d.medium()), "k": (k := d.small()), "m": d.between(2, n * k // 2)},
        "[{A} {has} {n} {o}. {B} {has} {k} times as many[| {o}][| as {A}]<and_c> {m} fewer[| {o}] than {B}."
        "|{C} {has} {m} fewer {o} than {B}. {B} {has} {k} times as many as {A}. {A} {has} {n}[| {o}].] How many "
        "{o} does {C} {have}?",
        and_c=_AND_C,
    ),
    kind(
        "ages",
        "n*k + t",
        lambda d: {"n": d.small(), "k": d.between(2, 6), "t": d.small()},
        "[{A} is {n} years old[. {B} is| and {B} is|, and {B} is] {k} times as old[| as {A}]."
        "|{B} is {k} times as old as {A}. {A} is {n} years old.|^{B} is {k} times as old as {A}, who is {n}.] "
        "[How old [will {B} be|is {B}] in {t} years|In {t} years, how old will {B} be"
        "|How old will {B} be {t} years from now|^How old will {B} be after {t} years]?",
    ),
    kind(
        "three_days",
        "n + (n + k) + m",
        lambda d: {"n": d.medium(), "k": d.small(), "m": d.medium()},
        "[On {d1} {A} {makes} {n} {o}|{A} {makes} {n} {o} on {d1}][, {k} more on {d2} and {m} on {d3}"
        "|. On {d2} {A} {makes} {k} more than on {d1}, and on {d3} {m}"
        "|. {A} {makes} {k} more than that on {d2} and {m} on {d3}"
        "|^. On {d2} it is {k} more, and on {d3} it is {m}]. How many {o} does {A} {make} [<total>"
        "|in the three days]?",
    ),
)
