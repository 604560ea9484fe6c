"""Putting our functions where SGLang defines its own, and wherever it imported them by name."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping


def replace_functions(table: Mapping[str, tuple[Callable[..., object], ...]]) -> None:
    """`table`: module that defines a function -> ours of the same name.  Idempotent.

    Ours then answer `inspect.signature` for the function that they replaced, as a wrapper does.
    """
    for module_name, functions in table.items():
        module = importlib.import_module(module_name)
        for ours in functions:
            original = getattr(module, ours.__name__)
            if original is not ours and not hasattr(ours, "__wrapped__"):
                ours.__wrapped__ = original  # type: ignore[attr-defined]
            for holder in [m for name, m in sys.modules.items() if name.startswith("sglang.")]:
                if vars(holder).get(ours.__name__) is original:
                    setattr(holder, ours.__name__, ours)
