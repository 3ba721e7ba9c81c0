"""Problems about what is there, what comes and what goes."""

from agentrl_envs.gsm8k.problems.grammar import kind

KINDS = (
    kind(
        "restock",
        "n + a*c - m",
        lambda d: {"n": (n := d.medium()), "a": d.small(), "c": d.small(), "m": d.between(2, n)},
        "[{A} <has> {n} {o}|There are {n} {o} in {A}'s [room|shop|house]]. "
        "[{A} <buys> {a} {g} [of|with] {c} {o} each|{A} [brings|adds] {a} {g} with {c} {o} in each"
        "|{A} <buys> {a} {g} that hold {c} {o} each|^{B} brings {a} {g}, each with {c} {o}]<then> <loses>. <q_left>",
    ),
    kind(
        "seats",
        "a*n - m",
        lambda d: {"a": (a := d.small()), "n": (n := d.medium()), "m": d.between(2, a * n // 2)},
        "[A [hall|theater|bus station] has|There are] {a} rows [with|of] {n} seats[| each]. "
        "[{m} seats are [empty|broken|free]. How many [seats are taken|people are sitting]"
        "|{m} [people|guests] [sit down|take a seat]. How many seats are [empty|free|left]"
        "|^{m} of the seats are empty. How many are taken]?",
    ),
    kind(
        "gift_bags",
        "(a + b)*k",
        lambda d: {"a": d.medium(), "b": d.medium(), "k": d.small()},
        "[[Each|Every one] of {k} {g} [holds|has] {a} {o} and {b} {o2}[| in it]."
        "|{A} [makes|fills|packs] {k} {g}[. Each one has| with|, each with] {a} {o} and {b} {o2}."
        "|^{A} puts {a} {o} and {b} {o2} into each of {k} {g}.] How many things [are there|are in the {g}"
        "|does {A} [use|need]] <total>?",
    ),
    kind(
        "twice_as_many_gone",
        "n - a - 2*a",
        lambda d: {"a": (a := d.medium()), "n": 3 * a + d.spare()},
        "{A} <has> {n} {o}. [{A} [uses|sells|loses|^gives {B}] {a} on {d1} and twice as many on {d2}"
        "|On {d1} {A} [uses|sells|loses] {a}[| {o}], and on {d2} twice as many"
        "|{A} gives {a} {o} to {B} and twice as many to {C}"
        "|{B} takes {a} {o}[ and|. Then] {C} takes twice as many]. <q_left>",
    ),
)
