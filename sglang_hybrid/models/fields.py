"""Reading of a model's config.json: every value is checked, every message says which file and field."""

from __future__ import annotations

from typing import Any

ATTENTION = {"attention", "full_attention", "*"}
RECURRENT = {"mamba", "linear_attention", "conv", "short_conv", "M"}
STATELESS = {"mlp", "moe", "-", "E"}


class ConfigError(ValueError):
    """A config that gives no geometry; the message names the value and a legal choice."""


class Fields:
    """Values of one config, or of one of its sections.  `where` names it in messages."""

    def __init__(self, values: dict[str, Any], family: str, where: str) -> None:
        self.values = values
        self.family = family
        self.where = where

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.values.get(name) is not None

    def _first(self, names: tuple[str, ...]) -> str:
        for name in names:
            if self.has(name):
                return name
        raise ConfigError(
            f"{self.where}: a {self.family} config needs {' or '.join(names)}, this one lacks it"
        )

    def whole(self, *names: str, default: int | None = None) -> int:
        """Positive integer in the first of these fields that is there, else `default`."""
        if default is not None and not any(self.has(name) for name in names):
            return default
        name = self._first(names)
        return self._checked(name, self.values[name], 1)

    def positions(self, name: str, count: int, *, first: int) -> tuple[int, ...]:
        """Sorted 0-based layers of a list field that counts `count` layers from `first`."""
        values = self.values[self._first((name,))]
        if not isinstance(values, list):
            raise ConfigError(f"{self.where}: {name} {values!r} is no list of layer numbers")
        layers = sorted({self._checked(name, value, first) - first for value in values})
        if layers and layers[-1] >= count:
            raise ConfigError(
                f"{self.where}: {name} names layer {layers[-1] + first}; the last one is {count - 1 + first}"
            )
        return tuple(layers)

    def _checked(self, name: str, value: Any, least: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"{self.where}: {name} {value!r} is no whole number of {least} or more")
        return value

    def inner(self, name: str) -> Fields:
        """A section."""
        values = self.values[self._first((name,))]
        if not isinstance(values, dict):
            raise ConfigError(f"{self.where}: {name} {values!r} is no section of fields")
        return Fields(values, f"{self.family} {name}", self.where)

    def layers(self, *names: str, counted: bool = True) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(attention layers, recurrent layers) of a list of names or a pattern of letters.

        `counted`: `num_hidden_layers`, where given, must agree.
        """
        name = self._first(names)
        kinds = self.values[name]
        if not isinstance(kinds, list | str):
            raise ConfigError(f"{self.where}: {name} {kinds!r} is no list of layer names")
        known = ATTENTION | RECURRENT | STATELESS
        for kind in kinds:
            if not isinstance(kind, str) or kind not in known:
                raise ConfigError(
                    f"{self.where}: {name} has a layer {kind!r}; known: {', '.join(sorted(known))}"
                )
        count = self.values.get("num_hidden_layers")
        if counted and count is not None and count != len(kinds):
            raise ConfigError(f"{self.where}: {name} has {len(kinds)} layers, num_hidden_layers is {count}")
        return (
            tuple(i for i, kind in enumerate(kinds) if kind in ATTENTION),
            tuple(i for i, kind in enumerate(kinds) if kind in RECURRENT),
        )
