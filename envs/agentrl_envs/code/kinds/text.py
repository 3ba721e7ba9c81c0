"""Functions of a text."""

from agentrl_envs.code.kinds.kind import Kind, letter, two_letters, word, words

KINDS = (
    Kind(
        ("count_letter", "letters"), "s",
        "how often the letter {a} occurs in the text s",
        "return s.count('{a}')",
        lambda r: {"a": letter(r)},
        lambda r, p: (words(r, p["a"]),),
    ),
    Kind(
        ("swap_letter", "change_letter"), "s",
        "the text s with {b} in place of each {a}",
        "return s.replace('{a}', '{b}')",
        two_letters,
        lambda r, p: (words(r, p["a"]),),
    ),
    Kind(
        ("long_words", "words_over"), "s",
        "a list of the words of the text s with more than {k} letters, in upper case if they end in {a}",
        "return [w.upper() if w.endswith('{a}') else w for w in s.split() if len(w) > {k}]",
        lambda r: {"k": r.randint(1, 5), "a": letter(r)},
        lambda r, p: (" ".join(w + r.choice(("", p["a"])) for w in words(r).split()),),
    ),
    Kind(
        ("words_with", "beginning"), "s",
        "a list of the words of the text s that begin with {a}",
        "return [w for w in s.split() if w.startswith('{a}')]",
        lambda r: {"a": letter(r)},
        lambda r, p: (words(r, p["a"]),),
    ),
    Kind(
        ("shift_letters", "caesar"), "s",
        "the text s with each letter moved on by {k} in the alphabet from a to z, after z again a; blanks stay",
        "return ''.join(chr((ord(c) - 97 + {k}) % 26 + 97) if c != ' ' else c for c in s)",
        lambda r: {"k": r.randint(1, 25)},
        lambda r, p: (words(r),),
    ),
    Kind(
        ("short_words", "shorten"), "s",
        "the words of the text s, each cut to its first {k} letters, with '{sep}' between them",
        "return '{sep}'.join(w[:{k}] for w in s.split())",
        lambda r: {"k": r.randint(1, 5), "sep": r.choice("-+/_.")},
        lambda r, p: (words(r),),
    ),
    Kind(
        ("pad_left", "fill_up"), "s",
        "the text s with as many '{c}' before it as make it {k} long (unchanged if it is longer)",
        "return s.rjust({k}, '{c}')",
        lambda r: {"k": r.randint(3, 8), "c": r.choice("*-.0#")},
        lambda r, p: (word(r, most=p["k"] + 2),),
    ),
    Kind(
        ("drop_letters", "cleaned"), "s",
        "the text s without the letters {a} and {b}",
        "return ''.join(c for c in s if c not in '{a}{b}')",
        two_letters,
        lambda r, p: (words(r, p["a"] + p["b"]),),
    ),
    Kind(
        ("last_place", "where_last"), "s",
        "the index of the last {a} in the text s, or {d} if it has none",
        "return s.rindex('{a}') if '{a}' in s else {d}",
        lambda r: {"a": letter(r), "d": r.choice((-1, 100))},
        lambda r, p: (word(r, p["a"] if r.random() < 0.7 else ""),),
    ),
)  # fmt: skip
