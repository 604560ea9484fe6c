"""Names that an option takes: the built-in ones, and those that installed packages declare."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, TypeVar

Made = TypeVar("Made")


class Choices(Mapping[str, Made], Generic[Made]):
    """A package's entry point in `group` adds its name; its object is imported when it is chosen.

    All processes of a server see the same names, since all see the same packages.  A built-in name stays.
    """

    def __init__(self, group: str, built_in: Mapping[str, Made]) -> None:
        self.group = group
        self.built_in = built_in

    @cached_property
    def _declared(self) -> dict[str, EntryPoint]:
        return {one.name: one for one in entry_points(group=self.group) if one.name not in self.built_in}

    def __getitem__(self, name: str) -> Made:
        found: Made = self.built_in[name] if name in self.built_in else self._declared[name].load()
        return found

    def __iter__(self) -> Iterator[str]:
        yield from self.built_in
        yield from self._declared

    def __len__(self) -> int:
        return len(self.built_in) + len(self._declared)
