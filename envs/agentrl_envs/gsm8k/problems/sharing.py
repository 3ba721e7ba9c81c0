"""Problems about sharing, packing and dividing."""

from math import gcd

from agentrl_envs.gsm8k.problems.draw import Draw
from agentrl_envs.gsm8k.problems.grammar import kind


def _packs(d: Draw) -> dict[str, int]:
    each, size = d.small(), d.small()
    unit = size // gcd(each, size)
    return {"n": unit * d.between(2, max(3, 40 // unit)), "a": each, "c": size}


KINDS = (
    kind(
        "share_all",
        "(n + m)/k",
        lambda d: {"k": (k := d.small()), "n": (n := d.between(2, k * (each := d.medium()) - 2)), "m": k * each - n},
        "[{A} has {n} {o} and {B} has {m}[| {o}]. They <share>"
        "|{A} [gets|buys|finds] {n} {o} on {d1} and {m} on {d2}. {A} <shares>"
        "|{A} has {n} {o}[ and|. Then {A}] [gets|buys|finds] {m} more. {A} <shares>] equally [among"
        "|between] {k} {people}. How many {o} does [each|every] {person} get?",
        share="[share|split|divide] [them|all of them|all the {o}|^everything]",
        shares="[shares|splits|divides] [them|all of them|all the {o}|^everything]",
    ),
    kind(
        "share_rest",
        "(n - m)/k",
        lambda d: {"k": (k := d.small()), "m": (m := d.medium()), "n": k * d.between(2, 30) + m},
        "[{A} has {n} {o}[, keeps {m} and|. {A} keeps {m}[| {o}] and|. {A} uses {m} and] <shares>"
        "|{A} <has> {n} {o}<then> <loses>. {A} <shares>|^From {n} {o}, {A} keeps {m} and <shares>] equally [among"
        "|between] {k} {people}. How many {o} does [each|every] {person} get?",
        shares="[shares|splits|divides] the [rest|others|other {o}]",
    ),
    kind(
        "pack_and_sell",
        "n/c*p",
        lambda d: {"c": (c := d.small()), "n": c * d.small(), "p": d.small()},
        "[{A} [packs|puts] {n} {o} into {g} [of {c}[| each]|with {c} in each|that hold {c} each]"
        "|{A} has {n} {o} and [packs|puts] them into {g} [of {c}|with {c} in each]]. "
        "[{A} sells [the|all the] {g} <for> {$p} each|Each of the {g} [costs|sells for|is sold for] {$p}"
        "|{A} gets {$p} for each of the {g}|^Someone buys all the {g} and pays {$p} for each]. <q_earn>",
    ),
    kind(
        "half_and_more",
        "n/2 + m",
        lambda d: {"n": 2 * (d.medium() // 2), "m": d.medium()},
        "[{A} <has> {n} {o}[ and|. {A}] [gives half of them to {B}|sells half of them|loses half of them|uses half]"
        "|{A} [sells|loses|uses|^gives away] half of {n} {o}]. [Then {A}|Later {A}|After that, {A}|{A} then] "
        "[<buys>|finds|makes] {m} more[| {o}]. <q_have>",
    ),
    kind(
        "packs_needed",
        "n*a/c",
        _packs,
        "[{n} {people} [eat|get|need|want] {a} {f} each.|Each of {n} {people} [eats|gets|needs|wants] {a} {f}."
        "|{A} wants to give {a} {f} to each of {n} {people}."
        "|^{n} {people} come to a party, and each [eats|gets] {a} {f}.] [{f} come in {g} of {c}."
        "|The {f} come in {g} [of {c}|with {c} in each].|Each of the {g} holds {c} {f}.] How many {g} [are needed"
        "|do they need|does {A} need]?",
    ),
    kind(
        "pages_a_day",
        "(n - m)/t",
        lambda d: {"t": (t := d.small()), "m": (m := d.medium()), "n": t * d.between(2, 30) + m},
        "[A book has {n} pages. {A} [reads|has read] {m} [pages|of them]"
        "|{A} reads {m} pages of a book with {n} pages"
        "|{A} has to [pack|paint|make|sell] {n} {o} and has done {m}]. "
        "[{A} [does|finishes] the rest in {t} days, the same number <every> day"
        "|The rest takes {t} days, with the same number <every> day"
        "|^{A} finishes in {t} more days and does the same number <every> day]. How many [is that|does {A} do] "
        "[a day|each day|per day]?",
    ),
)
