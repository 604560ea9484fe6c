"""Entry point of group `sglang.srt.plugins`: puts every hook of `engine/hooks.py` in place.

SGLang calls `register` in the launcher and in every child, and only logs what it raises.  So the
options come last: while they are missing, `--hybrid-mem` is an unknown argument, which no start
survives.  What fails before that is recorded, and raised where a start can still be ended
(`engine/seams.py`).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

logger = logging.getLogger(__name__)

_registered = False


def register() -> None:
    """Register hooks, resolution steps and the tree factory.  Idempotent; imports no adapter."""
    global _registered
    if _registered:
        return
    _registered = True

    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    from sglang_hybrid.engine import resolve

    # Nothing is accepted from the command line before the steps that check it are in place.
    register_resolution_hook("handle_missing_default_values")(resolve.derive)
    register_resolution_hook("handle_attention_backend_compatibility")(resolve.adapt)
    register_resolution_hook("handle_other_validations")(resolve.validate)
    _attempt("tree factory", _register_tree)
    _attempt("hooks", _register_hooks)


def _register_tree() -> None:
    from sglang_hybrid.engine.hooks import SCHEDULER, register_tree

    if SCHEDULER in sys.modules:  # see `Hook.needs`
        register_tree()


def _register_hooks() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sglang_hybrid.engine.hooks import HOOKS, entry

    for hook in reversed(HOOKS):  # the options stand first in the list and are registered last
        if hook.needs is None or hook.needs in sys.modules:
            HookRegistry.register(hook.target, entry(hook), hook.kind)


def _attempt(step: str, action: Callable[[], None]) -> None:
    from sglang_hybrid.engine import seams

    try:
        action()
    except Exception as error:
        logger.exception("sglang_hybrid: %s", step)
        seams.record_failure(step, error)
