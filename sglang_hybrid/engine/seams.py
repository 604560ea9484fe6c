"""Proof that this SGLang is the one the adapters were written against, and that our hooks took.

SGLang logs a plugin's failure and starts without it.  Here every such failure is recorded, and the
start ends with it: in the parent when the arguments are resolved, in a child when the tree is built.
"""

from __future__ import annotations

import logging
import pkgutil
from collections.abc import Iterable
from typing import Any

from sglang_hybrid.engine.seam_facts import attributes_of, body_of, parameter_names
from sglang_hybrid.engine.seam_table import CHILD, CPU, SEAMS, TESTED, Seam

logger = logging.getLogger(__name__)


class SeamError(RuntimeError):
    """A name of SGLang is not what the adapters need, or a hook is not in place."""


_failures: list[str] = []


def record_failure(step: str, error: Exception) -> None:
    """Keep what went wrong while the plugin registered itself, for the next check to raise."""
    _failures.append(f"{step}: {type(error).__name__}: {error}")


def clear_failures() -> None:
    """Forget recorded failures; for tests that plant one."""
    _failures.clear()


def difference(seam: Seam) -> str | None:
    """What the installed SGLang has otherwise, one line; None when it is as recorded.  Imports the module."""
    try:
        thing = pkgutil.resolve_name(seam.path)
    except (ImportError, AttributeError) as error:
        return f"{seam.path}: expected it to exist, found {type(error).__name__}: {error}"
    if seam.names is not None:
        found = parameter_names(thing)
        if found != tuple(seam.names.split()):
            shown = "nothing callable" if found is None else f"({' '.join(found)})"
            return f"{seam.path}: expected ({seam.names}), found {shown}"
    if seam.attributes is not None:
        missing = [name for name in seam.attributes.split() if name not in attributes_of(thing)]
        if missing:
            return f"{seam.path}: expected the attributes {' '.join(missing)}, found none of that name"
    if seam.body is not None:
        try:
            body = body_of(thing)
        except (OSError, TypeError, SyntaxError) as error:
            return f"{seam.path}: expected a body to read, found {type(error).__name__}: {error}"
        if body != seam.body:
            return f"{seam.path}: expected the body {seam.body}, found {body}: read what it does now"
    return None


def check_seams(table: Iterable[Seam]) -> None:
    """Compare every seam with what is installed; imports the modules it names.

    Raises:
        SeamError: names the first seam that differs, what it expected and what it found.
    """
    for seam in table:
        found = difference(seam)
        if found is not None:
            raise SeamError(found + ("" if is_tested() else f" ({_untested()})"))


def is_tested() -> bool:
    """Whether the installed SGLang is a version that the tests ran with."""
    return sglang_version() in TESTED


def sglang_version() -> str:
    from sglang.version import __version__

    return str(__version__)


def _untested() -> str:
    return f"SGLang {sglang_version()} is installed, tested: {', '.join(TESTED)}"


def warn_untested() -> None:
    """One warning at a version of SGLang that no test ran with, once its seams have been compared."""
    if not is_tested():
        logger.warning(
            "%s. Everything that is leaned on there is as in a tested version, so the start goes on; "
            "run `sglang-hybrid verify` with your model.",
            _untested(),
        )


def check_failures() -> None:
    """Raises SeamError with everything that `record_failure` kept."""
    if _failures:
        raise SeamError("sglang_hybrid could not register itself: " + "; ".join(_failures))


def check_resolved() -> None:
    """Raises SeamError when the published record carries our option but not what `resolve.derive` declares.

    So it is when a program builds `HybridServerArgs` itself and resolves it before plugins are loaded.
    """
    from sglang.srt.arg_groups.overrides import resolution_result
    from sglang.srt.runtime_context import get_server_args

    from sglang_hybrid.engine.args import RADIX_BACKEND

    found = resolution_result(get_server_args(), "radix_cache_backend")
    if found != RADIX_BACKEND:
        raise SeamError(
            f"radix_cache_backend: expected {RADIX_BACKEND}, found {found}: the arguments were resolved "
            "before load_plugins()"
        )


def check_parent() -> None:
    """All that can be proved before a child starts; imports the scheduler, so only with the flag on.

    The door of this process is put in place here: what it hooks is not imported when plugins are loaded.
    """
    from sglang_hybrid.engine.hooks import DOOR, HOOKS, install_door

    check_failures()
    install_door()
    _check_live([*(hook for hook in HOOKS if hook.needs is None), *DOOR])
    check_seams(seam for seam in SEAMS if seam.only is None)
    warn_untested()


def assert_applied() -> None:
    """For the tree factory, in a scheduler process: every hook is live and the record is ours.

    Raises:
        SeamError: a failure at registration, a seam that differs, or a hook that is missing or was
            assigned over by another plugin.
    """
    from sglang.srt.runtime_context import get_server_args

    from sglang_hybrid.engine.args import HybridServerArgs
    from sglang_hybrid.engine.hooks import HOOKS

    check_failures()
    _check_live(HOOKS)
    check_seams(seam for seam in SEAMS if seam.only == CHILD)
    record = get_server_args()
    if not isinstance(record, HybridServerArgs):
        raise SeamError(f"server arguments: expected HybridServerArgs, found {type(record).__name__}")


def check_replaced() -> None:
    """For a worker of the CPU platform, before it replaces functions.  Raises SeamError."""
    check_seams(seam for seam in SEAMS if seam.only == CPU)


def _check_live(hooks: Iterable[Any]) -> None:
    from sglang_hybrid.engine.hooks import is_live

    for hook in hooks:
        if not is_live(hook):
            raise SeamError(f"{hook.target}: expected it to lead to {hook.function}, found it does not")
