"""Functions of one whole number."""

from agentrl_envs.code.kinds.kind import Kind

KINDS = (
    Kind(
        ("linear", "line"), "x",
        "{a} times x, plus {b}",
        "return {a} * x + {b}",
        lambda r: {"a": r.randint(2, 12), "b": r.randint(1, 30)},
        lambda r, p: (r.randint(-50, 50),),
    ),
    Kind(
        ("count_digit", "digit_count"), "n",
        "{c} plus how often the digit {d} occurs in the whole number n, which is 0 or more",
        "return {c} + str(n).count('{d}')",
        lambda r: {"d": r.randint(0, 9), "c": r.randint(0, 5)},
        lambda r, p: (int("".join(r.choice((str(p["d"]), str(r.randint(0, 9)))) for _ in range(r.randint(1, 7)))),),
    ),
    Kind(
        ("power_rest", "power_mod"), "n",
        "the remainder of n to the power of {a} when divided by {m}",
        "return n ** {a} % {m}",
        lambda r: {"a": r.randint(2, 5), "m": r.randint(5, 40)},
        lambda r, p: (r.randint(0, 30),),
    ),
    Kind(
        ("two_rates", "tariff"), "x",
        "{a} times x where x is below {k}, otherwise x plus {b}",
        "return {a} * x if x < {k} else x + {b}",
        lambda r: {"a": r.randint(2, 9), "b": r.randint(1, 40), "k": r.randint(3, 30)},
        lambda r, p: (p["k"] + r.choice((-1, 0, 1, r.randint(-20, 20))),),
    ),
    Kind(
        ("count_divisible", "divisible_up_to"), "n",
        "how many whole numbers from 1 to n are divisible by {a} or by {b}",
        "return sum(i % {a} == 0 or i % {b} == 0 for i in range(1, n + 1))",
        lambda r: {"a": r.randint(2, 7), "b": r.randint(8, 15)},
        lambda r, p: (r.randint(0, 120),),
    ),
    Kind(
        ("repeat_step", "iterate"), "n",
        "what {c} becomes after n steps, each of which multiplies by {a} and adds {b}",
        "x = {c}\nfor _ in range(n):\n    x = x * {a} + {b}\nreturn x",
        lambda r: {"a": r.randint(2, 4), "b": r.randint(1, 9), "c": r.randint(0, 9)},
        lambda r, p: (r.randint(0, 12),),
    ),
    Kind(
        ("label", "name_number"), "n",
        "'A' where n is divisible by {a}, otherwise 'B' where it is divisible by {b}, otherwise n as text",
        "if n % {a} == 0:\n    return 'A'\nif n % {b} == 0:\n    return 'B'\nreturn str(n)",
        lambda r: {"a": (a := r.randint(2, 9)), "b": r.choice([b for b in range(10, 17) if b % a])},
        lambda r, p: (r.choice((p["a"], p["b"], p["a"] * p["b"], 1)) * r.randint(1, 6) + r.randint(0, 1),),
    ),
)  # fmt: skip
