"""What an operator may choose of one organization alone: a flag of a server, a keyword of its class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Option(NamedTuple):
    """`attention_share` is `--hybrid-attention-share` and that keyword of the class and of its prices."""

    name: str
    default: Any
    problem: Callable[[Any], str | None]
    """What is wrong with a value, and a legal one, as the sentence goes on behind the flag's name."""
    elsewhere: str
    """Why it means nothing to the other organizations."""
    tried: tuple[Any, ...] = ()
    """Values that a planner weighs; none: the ledger settles it (`Organization.settled`)."""
    splits: bool = False
    """It is the part of the budget that one pool gets: while the bytes are not known, any value may do."""

    @property
    def flag(self) -> str:
        return "--hybrid-" + self.name.replace("_", "-")


def among(values: tuple[str, ...]) -> Callable[[Any], str | None]:
    """`Option.problem` of a choice between names."""
    return lambda value: None if value in values else f"{value} is unknown; legal: {', '.join(values)}."
