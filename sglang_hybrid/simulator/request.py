"""What arrives at the simulator."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

Segment = tuple[Hashable, int]
"""A run of content: whose it is, and how many tokens from its beginning."""


@dataclass(frozen=True, slots=True)
class Request:
    """Two prompts share tokens as far as the ids and positions of their segments agree.

    `at`: seconds of arrival.  `new`: tokens to be generated, unlike any others unless `answer` names
    them, so that a later prompt can repeat them as a segment.  `salt`: the cache key's.  `limit`: new tokens
    that its sender allows; None when the answer's length is known beforehand.
    Raises `ValueError` for an empty prompt, segment or answer.
    """

    at: float
    segments: tuple[Segment, ...]
    new: int
    answer: Hashable | None = None
    salt: Hashable | None = None
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.new < 1 or not self.segments or min(tokens for _, tokens in self.segments) < 1:
            raise ValueError(f"a request of {self.segments} for {self.new} new tokens has an empty part")
        if self.limit is not None and self.limit < self.new:
            raise ValueError(f"an answer of {self.new} tokens is above its limit of {self.limit}")

    @property
    def prompt(self) -> int:
        """Tokens."""
        return sum(tokens for _, tokens in self.segments)
