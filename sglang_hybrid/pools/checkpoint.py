"""A checkpoint as one logical atom of physical pieces: its pages, its conv line, and who counts on it."""

from __future__ import annotations

from typing import Protocol


class CheckpointOwner(Protocol):
    """The lookup's node that offers a checkpoint."""

    def lose_checkpoint(self) -> None: ...


class Checkpoint:
    """Complete recurrent state at one boundary: one reuse unit, several pages.

    `members` are its SSM pages in order, `line` its conv line, `pages` every page that it depends
    on.  `references` counts executions, `pins` preempted requests, `retained` requests of policy:
    three counts that are never mixed.
    """

    __slots__ = (
        "frozen",
        "line",
        "members",
        "owner",
        "pages",
        "pins",
        "references",
        "retained",
        "stamp",
    )

    def __init__(self, members: tuple[int, ...], line: int, pages: tuple[int, ...]) -> None:
        self.members = members
        self.line = line
        self.pages = pages
        self.references = 1
        self.pins = 0
        self.retained = 0
        self.frozen = False
        self.stamp = 0
        self.owner: CheckpointOwner | None = None

    def detach(self) -> None:
        """Leave the lookup (`Entry`)."""
        owner, self.owner = self.owner, None
        if owner is not None:
            owner.lose_checkpoint()
