"""Seeds that depend on what they are for and on nothing else: not on order, concurrency or process."""

import hashlib

Seed = int | tuple[int, ...]
"""A run's seed, alone or with what it is divided by (the step)."""

_BITS = 63


def derive(*parts: object) -> int:
    """A seed of 63 bits from any printable parts: the same parts give the same seed on every machine."""
    text = "\x1f".join(map(str, parts)).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> (64 - _BITS)


def nth(seed: int, index: int) -> int:
    """The `index`-th seed of the sequence that `seed` starts (a step of splitmix64), without hashing."""
    x = (seed + (index + 1) * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (x ^ (x >> 31)) >> (64 - _BITS)
