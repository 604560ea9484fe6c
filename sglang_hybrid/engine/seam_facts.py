"""What can be said of a name of SGLang: its parameters, its attributes, and a fingerprint of its body."""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any


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


def fingerprint(source: str) -> str:
    """16 hex digits of a definition's syntax tree, the same under Python 3.11 to 3.13.

    Docstrings, comments and layout do not count.  Raises SyntaxError when it is no Python.
    """
    digest = hashlib.sha256()
    for part in _tokens(ast.parse(textwrap.dedent(source))):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:16]


def _tokens(node: Any) -> Iterator[str]:
    """The tree in order.  Empty fields are left out: later Pythons have added some (`type_params`)."""
    if isinstance(node, ast.AST):
        yield type(node).__name__
        for name, value in ast.iter_fields(node):
            if name == "body" and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                value = _without_docstring(value)
            if value not in (None, []):
                yield name
                yield from _tokens(value)
        yield "end"
    elif isinstance(node, list):
        for one in node:
            yield from _tokens(one)
    else:
        yield repr(node)


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0]
    is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return body[1:] if is_text and isinstance(first.value.value, str) else body  # type: ignore[attr-defined]


def body_of(thing: Any) -> str:
    """Fingerprint of a function as its file has it.  Raises OSError or TypeError when it has no source."""
    return fingerprint(inspect.getsource(inspect.unwrap(thing)))


@functools.cache
def attributes_of(kind: type) -> frozenset[str]:
    """What an instance may have: names of its class and bases, fields, slots, what `self.x = ...` sets."""
    names: set[str] = set()
    for base in kind.__mro__[:-1]:
        names |= {*vars(base), *vars(base).get("__annotations__", ()), *vars(base).get("__slots__", ())}
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError):
            continue  # a class made at run time
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Store):
                continue
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                names.add(node.attr)
    return frozenset(names)
