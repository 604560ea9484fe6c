"""Putting our functions where SGLang defines its own, and wherever it imported them by name."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping


def replace_functions(table: Mapping[str, tuple[Callable[..., object], ...]]) -> None:
    """`table`: module that defines a function -> ours of the same name.  Idempotent."""
    for module_name, functions in table.items():
        module = importlib.import_module(module_name)
        for ours in functions:
            original = getattr(module, ours.__name__)
            for holder in [m for name, m in sys.modules.items() if name.startswith("sglang.")]:
                if vars(holder).get(ours.__name__) is original:
                    setattr(holder, ours.__name__, ours)
