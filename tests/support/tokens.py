"""Prompts of the test cases, as token ids."""

SPAN = 507
"""Ids are 5 .. 511, so a vocabulary of 512 suffices."""


def T(s: int, n: int) -> list[int]:
    """n token ids of seed s; two different seeds below 507 differ at every position."""
    return [5 + (s * 1009 + i * 31 + (i * i) % 97) % SPAN for i in range(n)]
