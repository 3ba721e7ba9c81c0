"""Kinds that training never shows."""

from agentrl_envs.code.kinds.kind import Kind, letter, numbers, word, words

KINDS = (
    Kind(
        ("running_max",), "xs",
        "a list with, at each place of xs, the largest number up to there, but at most {k}",
        "return [min(max(xs[: i + 1]), {k}) for i in range(len(xs))]",
        lambda r: {"k": r.randint(-5, 15)},
        lambda r, p: (numbers(r, p["k"]),),
    ),
    Kind(
        ("longest_run",), "xs",
        "the length of the longest stretch of neighbours in xs that are all greater than {k}",
        "best = run = 0\nfor x in xs:\n    run = run + 1 if x > {k} else 0\n    best = max(best, run)\nreturn best",
        lambda r: {"k": r.randint(-12, 4)},
        lambda r, p: (numbers(r, p["k"]),),
    ),
    Kind(
        ("unique_plus",), "xs",
        "a list of the numbers of xs, each once and in the order of their first place, plus {k} each",
        "return [x + {k} for x in dict.fromkeys(xs)]",
        lambda r: {"k": r.randint(2, 40)},
        lambda r, p: (numbers(r, low=0, high=5),),
    ),
    Kind(
        ("dot_plus",), "xs, ys",
        "{k} plus the sum of the products of the numbers at the same places of the equally long lists xs and ys",
        "return {k} + sum(x * y for x, y in zip(xs, ys))",
        lambda r: {"k": r.randint(1, 40)},
        lambda r, p: (xs := numbers(r), [r.randint(-9, 9) for _ in xs]),
    ),
    Kind(
        ("by_remainder",), "xs",
        "a dict from each remainder of the numbers of xs when divided by {k} to how many have it",
        "out = {{}}\nfor x in xs:\n    out[x % {k}] = out.get(x % {k}, 0) + 1\nreturn out",
        lambda r: {"k": r.randint(2, 15)},
        lambda r, p: (numbers(r, low=0, high=60),),
    ),
    Kind(
        ("in_base",), "n",
        "the whole number n, which is 0 or more, written in base {k}, with '{c}' before it",
        "digits = str(n % {k})\nwhile n := n // {k}:\n    digits = str(n % {k}) + digits\nreturn '{c}' + digits",
        lambda r: {"k": r.randint(2, 9), "c": letter(r)},
        lambda r, p: (r.choice((0, r.randint(1, 9), r.randint(10, 999))),),
    ),
    Kind(
        ("acronym",), "s",
        "the first letters of those words of the text s that are longer than {k}, in upper case, one after the other",
        "return ''.join(w[0].upper() for w in s.split() if len(w) > {k})",
        lambda r: {"k": r.randint(1, 6)},
        lambda r, p: (words(r),),
    ),
    Kind(
        ("mirrored",), "s",
        "the text s followed by itself backwards, with '{c}' between them if s has at least {k} letters",
        "return s + ('{c}' if len(s) >= {k} else '') + s[::-1]",
        lambda r: {"k": r.randint(2, 7), "c": r.choice("|-+")},
        lambda r, p: (word(r),),
    ),
)  # fmt: skip
