"""Proof that this SGLang is the one the adapters were written against, and that our hooks took.

SGLang logs a plugin's failure and starts without it.  Here every such failure is recorded, and the
start ends with it: in the parent when the arguments are resolved, in a child when the tree is built.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Iterable
from typing import Any, NamedTuple

SGLANG_VERSION = "0.5.23"


class SeamError(RuntimeError):
    """A name of SGLang is not what the adapters need, or a hook is not in place."""


class Seam(NamedTuple):
    """A name of SGLang and its parameter (or field) names in order, space separated.

    None: it only has to exist.
    """

    path: str
    names: str | None = None
    child_only: bool = False
    """Not to be imported in the parent: `prometheus_client` decides at its import where counters go, and
    SGLang sets the folder that the parent's own go to only after the arguments are resolved."""


_failures: list[str] = []


def record_failure(step: str, error: Exception) -> None:
    """Keep what went wrong while the plugin registered itself, for the next check to raise."""
    _failures.append(f"{step}: {type(error).__name__}: {error}")


def clear_failures() -> None:
    """Forget recorded failures; for tests that plant one."""
    _failures.clear()


def parameter_names(thing: Any) -> tuple[str, ...] | None:
    """Parameters of a callable or fields of a record, in order; None for anything else.

    Looks through wrappers, so a hooked function answers for its original.
    """
    fields = getattr(thing, "__struct_fields__", None)  # msgspec; its __signature__ evaluates hints
    if fields is not None:
        return tuple(fields)
    try:
        return tuple(inspect.signature(thing).parameters)
    except (TypeError, ValueError):
        return None


def check_seams(table: Iterable[Seam]) -> None:
    """Compare every seam with what is installed; imports the modules it names.

    Raises:
        SeamError: names the seam, what it expected and what it found.
    """
    for seam in table:
        try:
            thing = pkgutil.resolve_name(seam.path)
        except (ImportError, AttributeError) as error:
            raise SeamError(
                f"{seam.path}: expected it to exist, found {type(error).__name__}: {error}"
            ) from error
        if seam.names is None:
            continue
        found = parameter_names(thing)
        if found != tuple(seam.names.split()):
            shown = "nothing callable" if found is None else f"({' '.join(found)})"
            raise SeamError(f"{seam.path}: expected ({seam.names}), found {shown}")


def check_version() -> None:
    """Raises SeamError unless SGLang is exactly the version that the table was recorded from."""
    from sglang.version import __version__

    if __version__ != SGLANG_VERSION:
        raise SeamError(f"sglang version: expected {SGLANG_VERSION}, found {__version__}")


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
    from sglang_hybrid.engine.seam_table import SEAMS

    check_version()
    check_failures()
    install_door()
    _check_live([*(hook for hook in HOOKS if hook.needs is None), *DOOR])
    check_seams(seam for seam in SEAMS if not seam.child_only)


def assert_applied() -> None:
    """For the tree factory, in a scheduler process: every hook is live and the record is ours.

    Raises:
        SeamError: a failure at registration, another version, or a hook that is missing or was
            assigned over by another plugin.
    """
    from sglang.srt.runtime_context import get_server_args

    from sglang_hybrid.engine.args import HybridServerArgs
    from sglang_hybrid.engine.hooks import HOOKS
    from sglang_hybrid.engine.seam_table import SEAMS

    check_version()
    check_failures()
    _check_live(HOOKS)
    check_seams(seam for seam in SEAMS if seam.child_only)
    record = get_server_args()
    if not isinstance(record, HybridServerArgs):
        raise SeamError(f"server arguments: expected HybridServerArgs, found {type(record).__name__}")


def _check_live(hooks: Iterable[Any]) -> None:
    from sglang_hybrid.engine.hooks import is_live

    for hook in hooks:
        if not is_live(hook):
            raise SeamError(f"{hook.target}: expected it to lead to {hook.function}, found it does not")
