"""Problems about buying, selling and saving."""

from agentrl_envs.gsm8k.problems.grammar import kind

KINDS = (
    kind(
        "two_prices",
        "a*p + b*q",
        lambda d: {"a": d.small(), "p": d.small(), "b": d.small(), "q": d.small()},
        "[<prices> <takes>|<takes> <costs>|<together>] <q_spend>",
        prices=(
            "[A <shop> sells {o} <for> {$p} each and {o2} <for> {$q} each.|{o} cost {$p} each and {o2} cost {$q} each.]"
        ),
        takes="{A} [<buys>|needs|wants] {a} {o} and {b} {o2}.",
        costs="[The|All] {o} [cost|are] {$p} each and the {o2} [cost|are] {$q} each.",
        together=(
            "[{A} <buys> {a} {o} <for> {$p} each[ and|. {A} also <buys>|, and] {b} {o2} <for> {$q} each."
            "|^{A} pays {$p} for each of {a} {o} and {$q} for each of {b} {o2}.]"
        ),
    ),
    kind(
        "change",
        "n - a*p",
        lambda d: {"a": (a := d.small()), "p": (p := d.small()), "n": a * p + d.spare()},
        "[{A} has {$n}[ and| and then|. {A}] <buys> {a} {o} <for> {$p} each."
        "|{A} <buys> {a} {o} that cost {$p} each [and pays with|with] {$n}."
        "|{o} cost {$p} each. {A} <buys> {a} of them [with|and pays with] {$n}."
        "|^{A} goes to the <shop> with {$n} and comes home with {a} {o}. The {o} cost {$p} each.] [<q_money_left>"
        "|How much [change|money] does {A} get back?]",
    ),
    kind(
        "discount",
        "(p - d)*a",
        lambda d: {"p": (p := d.medium()), "d": d.between(2, p - 2), "a": d.small()},
        "<usual> <sale> {A} <buys> {a} [of them|{o}]. <q_spend>",
        usual=(
            "[{o} [usually|normally] cost {$p} each.|A <shop> sells {o} <for> {$p} each."
            "|The price of {o} is {$p} each.]"
        ),
        sale=(
            "[[Today|This week] they are {$d} cheaper.|In a sale the price [drops|falls] by {$d}."
            "|{A} gets {$d} off each one.|^Now each one is {$d} cheaper.]"
        ),
    ),
    kind(
        "unit_price",
        "n/k*a",
        lambda d: {"n": (k := d.small()) * d.small(), "k": k, "a": d.small()},
        "[{k} {o} cost {$n}. [<how_much> do {a} {o} cost|<how_much> does {A} [pay|need] for {a} {o}]?"
        "|{A} [pays {$n} for {k} {o}[ and| and then|. Then {A}]|[buys|gets] {k} {o}[ for {$n} and| that cost {$n}. "
        "Then {A}|. They cost {$n}. {A}]] [buys|gets|orders] {a} more at the same price. <how_much> do the {a} {o} "
        "cost?"
        "|{A} [pays|spends] {$n} [for|on] {k} {o}. {B} buys {a} {o} at the same price. <how_much> does {B} "
        "[pay|spend]?|^If {k} {o} cost {$n}, <how_much> do {a} {o} cost?]",
    ),
    kind(
        "short_of_money",
        "n - (m + a*t)",
        lambda d: {"m": (m := d.medium()), "a": (a := d.small()), "t": (t := d.small()), "n": m + a * t + d.spare()},
        "[{A} wants [to buy a|a] {thing} [for|that costs] {$n}.|A {thing} costs {$n}.] "
        "[{A} has {$m} and [saves|earns] {$a} <every> week for {t} weeks."
        "|^{A} already has {$m} and puts aside {$a} <every> week for {t} weeks.] How [many more dollars"
        "|much more money] does {A} [need|still need][| to buy it]?",
    ),
    kind(
        "market_stall",
        "a*p + b*q - m",
        lambda d: {
            "a": (a := d.small()),
            "p": (p := d.small()),
            "b": (b := d.small()),
            "q": (q := d.small()),
            "m": d.between(2, min(a * p + b * q - 1, 400)),
        },
        "{A} sells {a} {o} <for> {$p} each[ and|. {A} also sells|, and] {b} {o2} <for> {$q} each. "
        "[{A} [pays|spends] {$m} [for|on] [a table|paper|the bus]|[A table|The bus|The paper] costs {A} {$m}"
        "|^Out of that, {A} pays {$m} for a table]. [<q_money_left>|<how_much> does {A} keep?]",
    ),
)
