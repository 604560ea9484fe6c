"""What a refusal is made of: the facts a rule may look at, the common shapes of a rule, the exception.

The tables are `input_rules.py`, `model_rules.py` and `exact_rules.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from types import TracebackType
from typing import Any, NamedTuple, NoReturn

from sglang_hybrid.engine.args import organization
from sglang_hybrid.engine.seams import SeamError


class Refusal(ValueError):
    """A combination of arguments that is not served; the text is the whole message for the user."""


class Facts:
    """What a rule may look at: the user's input, what resolution has decided so far, and the model."""

    def __init__(self, record: Any) -> None:
        from sglang.srt.arg_groups.overrides import resolving_view

        self.record = record
        self.mem = organization(record) or ""
        self._now = resolving_view(record)

    def given(self, field: str) -> Any:
        """The user's own value; the record is never written by resolution."""
        return getattr(self.record, field)

    def now(self, field: str) -> Any:
        """The value in effect so far: the last declaration, else the user's."""
        return getattr(self._now, field)

    @property
    def model(self) -> Any:
        """SGLang's ModelConfig; only for rules of the second step, model overrides precede it."""
        from sglang.srt.arg_groups.overrides import model_config_of

        return model_config_of(self.record)


Check = Callable[[Facts], str | None]


class Rule(NamedTuple):
    """One row.  `field` is the argument it looks at; `check` answers a sentence or None."""

    field: str
    check: Check


def flag_of(field: str) -> str:
    """`--page-size` for `page_size`.  Every field in the tables has this plain spelling."""
    return "--" + field.replace("_", "-")


def one_of(field: str, legal: Collection[str]) -> Rule:
    """Refuse what is not legal; the argument parser has refused it already where there is one."""

    def check(facts: Facts) -> str | None:
        value = facts.given(field)
        if value is None or value in legal:
            return None
        return f"{flag_of(field)} {value} is unknown; legal: {', '.join(legal)}."

    return Rule(field, check)


def off(field: str, why: str) -> Rule:
    """Refuse a switch that is on, or an option that was set at all."""

    def check(facts: Facts) -> str | None:
        value = facts.now(field)
        if not value:
            return None
        shown = flag_of(field) if value is True else f"{flag_of(field)} {value}"
        return f"{shown} is not supported with --hybrid-mem {facts.mem}: {why}; leave it out."

    return Rule(field, check)


def unset(field: str, why: str) -> Rule:
    """Refuse any value that the user gave where the default is None; zero counts as given."""

    def check(facts: Facts) -> str | None:
        value = facts.given(field)
        if value is None:
            return None
        return (
            f"{flag_of(field)} {value} has no meaning with --hybrid-mem {facts.mem}: {why}; "
            "leave it out, or bound the memory with --hybrid-budget-bytes."
        )

    return Rule(field, check)


def only(field: str, legal: tuple[Any, ...], why: str) -> Rule:
    """Refuse a value outside `legal`, of which the first is recommended."""

    def check(facts: Facts) -> str | None:
        value = facts.now(field)
        if value in legal:
            return None
        return (
            f"{flag_of(field)} {value} is not supported with --hybrid-mem {facts.mem}: {why}; "
            f"legal: {', '.join(str(choice) for choice in legal)}."
        )

    return Rule(field, check)


def positive(field: str, unit: str, example: str) -> Rule:
    def check(facts: Facts) -> str | None:
        value = facts.given(field)
        if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
            return None
        return f"{flag_of(field)} {value!r} must be a whole number of {unit}, at least 1, such as {example}."

    return Rule(field, check)


def refuse(sentence: str, record: Any) -> NoReturn:
    """Raise Refusal with this sentence."""
    speak_plainly(record)
    raise Refusal(sentence)


def speak_plainly(record: Any) -> None:
    """On a command line, let an uncaught Refusal or SeamError end as one sentence without a traceback.

    `sgl.Engine` marks its record as made by a call (`launch_command`), so there the caller's
    traceback stays; either way the exception is an ordinary one that a caller can catch.
    """
    command = getattr(record, "launch_command", None)
    if command is not None and not command.startswith("Engine(") and sys.excepthook is not _plain_hook:
        _hook_before.append(sys.excepthook)
        sys.excepthook = _plain_hook


_hook_before: list[Callable[..., Any]] = []


def _plain_hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
    if isinstance(value, Refusal | SeamError):
        print(f"sglang_hybrid: error: {value}", file=sys.stderr, flush=True)
    else:
        _hook_before[-1](kind, value, trace)
