"""Problems about so much a day, an hour or a trip."""

from agentrl_envs.gsm8k.problems.grammar import kind

KINDS = (
    kind(
        "daily_then_more",
        "n*t + m",
        lambda d: {"n": d.medium(), "t": d.small(), "m": d.medium()},
        "[{A} {makes} {n} {o} <every> day for {t} days|For {t} days, {A} {makes} {n} {o} <every> day"
        "|^Over {t} days, {A} {makes} {n} {o} <every> day][ and then {m} more|. Then {A} {makes} {m} more"
        "|. On the last day {A} {makes} {m} more|. {B} gives {A} {m} more]. How many {o} [does {A} {make}|is that"
        "|are there] <total>?",
    ),
    kind(
        "save_then_spend",
        "n*t - m",
        lambda d: {"n": (n := d.medium()), "t": (t := d.small()), "m": d.between(2, n * t // 2)},
        "[{A} [saves|earns|gets] {$n} <every> {unit} for {t} {units}"
        "|For {t} {units}, {A} [saves|earns|gets] {$n} <every> {unit}][ and then|. Then {A}|. {A}"
        "|^. From that money, {A}] [spends {$m}[| on a {thing}]|pays {$m} for a {thing}"
        "|buys a {thing} for {$m}]. <q_money_left>",
    ),
    kind(
        "two_shifts",
        "(a + b)*n",
        lambda d: {"a": d.small(), "b": d.small(), "n": d.medium()},
        "[{A} [earns|gets|makes] {$n} <every> hour."
        "|For each hour of work, {A} [earns|gets|makes] {$n}.] {A} works {a} hours on {d1} and {b} [hours "
        "|]on {d2}. [<q_earn>|^What does {A} earn on both days?]",
    ),
    kind(
        "tank",
        "n + (p - q)*t",
        lambda d: {"n": d.medium(), "q": (q := d.small()), "p": q + d.small(), "t": d.small()},
        "[A tank holds {n} liters. <every_hour>, {p} liters flow in and {q} [liters |]flow out. How many liters "
        "[are in it|does it hold|are in the tank] after {t} hours?"
        "|{A} has {$n}. <every_week>, {A} [earns|gets|saves] {$p} and spends {$q}. How [many dollars|much money] "
        "does {A} have after {t} weeks?"
        "|{A} <has> {n} {o}. <every_day>, {A} [makes|buys|gets|finds] {p}[| {o}] and [sells|uses|loses] {q}. How "
        "many {o} does {A} have after {t} days?]",
        every_hour="[Every hour|Each hour|^In an hour]",
        every_week="[Every week|Each week|^In a week]",
        every_day="[Every day|Each day|^In a day]",
    ),
    kind(
        "trip",
        "p*a + q*b",
        lambda d: {"p": d.medium(), "a": d.small(), "q": d.medium(), "b": d.small()},
        "{A} [drives|rides|travels|flies] {p} miles <every> hour for {a} hours[, then| and then|. Then {A} goes"
        "|. After that, {A} goes|^, stops to eat, and then goes] {q} miles <every> hour for {b} hours. How "
        "[many miles|far] does {A} [go|travel][| <total>]?",
    ),
    kind(
        "machine",
        "n*k*t",
        lambda d: {"n": d.medium(), "k": d.between(2, 8), "t": d.small()},
        "[A machine makes {n} {o} <every> hour[ and works|. It works|^ and runs]"
        "|{A} makes {n} {o} <every> hour[ and works|. {A} works|^, working]] {k} hours <every> day. How many {o} "
        "[are made|is that|^come out] in {t} days?",
    ),
)
