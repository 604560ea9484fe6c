"""Write `seams.json` anew from the installed SGLang: `python -m sglang_hybrid.engine.seam_record [NAME ...]`.

Found by itself: hooked functions, methods that an adapter overrides, functions that the CPU platform
replaces, and what adapters read of `Req`, `ForwardBatch` and the pool configurator.  Of what adapters call
or lean on otherwise, the names that are in the file stay, and those on the command line (`module:name`) are
added.

A name that is gone ends the recording with exit status 1, and nothing is written: change the adapter, then
`--drop` the name.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from sglang_hybrid.engine import seam_table
from sglang_hybrid.engine.seam_facts import attributes_of, body_of, parameter_names
from sglang_hybrid.engine.seam_table import CPU, Seam
from sglang_hybrid.engine.seams import sglang_version

OWN = "hybrid_"
"""Attributes of ours on SGLang's objects begin so."""
READ = {
    "req": "sglang.srt.managers.schedule_batch:Req",
    "req.kv": "sglang.srt.managers.schedule_batch:ReqKvInfo",
    "forward_batch": "sglang.srt.model_executor.forward_batch_info:ForwardBatch",
    "configurator": "sglang.srt.mem_cache.kv_cache_configurator:KVCacheConfigurator",
}
"""Name of a variable in our adapters -> class of SGLang's that it holds."""
NOT_REQUESTS = ("cpu_routes.py",)
"""Files whose `req` is another object."""


def modules() -> Iterator[ModuleType]:
    """Every module of `engine` and `platforms`."""
    for room in ("engine", "platforms"):
        package = importlib.import_module(f"sglang_hybrid.{room}")
        for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            yield importlib.import_module(found.name)


def adapters() -> Iterator[type]:
    """Classes of ours that subclass one of SGLang's."""
    for module in modules():
        for thing in vars(module).values():
            if isinstance(thing, type) and thing.__module__ == module.__name__:
                yield thing


def overridden(adapter: type) -> Iterator[Any]:
    """Functions of SGLang's classes that this adapter overrides."""
    for name, own in vars(adapter).items():
        if not inspect.isfunction(own) or name.startswith("__"):
            continue
        for base in adapter.__mro__[1:]:
            if name in vars(base):
                if base.__module__.startswith("sglang.") and inspect.isfunction(vars(base)[name]):
                    yield vars(base)[name]
                break


def hooked() -> Iterator[str]:
    """Names of the functions that are hooked."""
    from sglang.srt.plugins.hook_registry import HookType

    from sglang_hybrid.engine.hooks import DOOR, HOOKS

    for hook in (*HOOKS, *DOOR):
        if hook.kind is not HookType.REPLACE:
            thing = inspect.unwrap(pkgutil.resolve_name(hook.target))
            yield f"{thing.__module__}:{thing.__qualname__}"


def replaced() -> Iterator[str]:
    """Names of the functions that `replace_functions` puts ours over."""
    for module in modules():
        for target, functions in getattr(module, "REPLACEMENTS", {}).items():
            if isinstance(functions, tuple):
                yield from (f"{target}:{function.__name__}" for function in functions)


def read_of(variable: str) -> set[str]:
    """Attributes of SGLang's that our files read or write of a variable of this name."""
    names = set()
    for module in modules():
        path = Path(str(module.__file__))
        if path.name in NOT_REQUESTS:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == variable:
                names.add(node.attr)
    return {name for name in names if not name.startswith(OWN)}


def wanted(known: Iterable[Seam]) -> dict[str, Seam]:
    """A row of every name that is in the file or found, by path."""
    rows = {seam.path: seam for seam in known}
    have = {id(inspect.unwrap(thing)) for thing in map(_installed, rows)}
    overrides = (
        f"{function.__module__}:{function.__qualname__}"
        for adapter in adapters()
        for function in map(inspect.unwrap, overridden(adapter))
        if id(function) not in have
    )
    for path in (*hooked(), *overrides):
        rows.setdefault(path, Seam(path, names=""))
    for path in replaced():
        rows[path] = Seam(path, names="", only=CPU)
    for variable, path in READ.items():
        attributes = " ".join(sorted(read_of(variable)))
        rows[path] = rows.get(path, Seam(path))._replace(attributes=attributes)
    return rows


def _installed(path: str) -> Any:
    """What the name stands for; None where it is gone."""
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        return None


def recorded(seam: Seam) -> Seam:
    """The row as the installed SGLang has it.

    Raises:
        LookupError: the name, or an attribute, is not there.
    """
    try:
        thing = pkgutil.resolve_name(seam.path)
    except (ImportError, AttributeError) as error:
        raise LookupError(f"{seam.path}: {type(error).__name__}: {error}") from error
    missing = [name for name in (seam.attributes or "").split() if name not in attributes_of(thing)]
    if missing:
        raise LookupError(f"{seam.path}: no attribute {' '.join(missing)}")
    names = None if seam.names is None else parameter_names(thing)
    return seam._replace(
        names=None if names is None else " ".join(names),
        body=None if seam.body is None else body_of(thing),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Record; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="seam_record", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="module:name to add")
    parser.add_argument("--body", action="store_true", help="hold the bodies of these names too")
    parser.add_argument("--drop", nargs="+", default=[], metavar="NAME", help="module:name to forget")
    parser.add_argument("--tested", action="store_true", help="the installed version has passed the tests")
    args = parser.parse_args(argv)
    known = [seam for seam in seam_table.SEAMS if seam.path not in args.drop]
    given = {seam.path: seam for seam in known}
    for path in args.names:
        row = given.get(path, Seam(path, names=""))
        given[path] = row._replace(body="" if args.body else row.body)
    seams, gone = [], []
    for seam in wanted(given.values()).values():
        try:
            seams.append(recorded(seam))
        except LookupError as error:
            gone.append(str(error))
    for line in gone:
        print(f"gone: {line}", file=sys.stderr)
    if gone:
        return 1
    changed = {seam.path for seam in set(seams) ^ set(seam_table.SEAMS)}
    tested = seam_table.TESTED
    if args.tested and sglang_version() not in tested:
        # A version whose rows differ from these would no longer start.
        tested = (sglang_version(),) if changed else (*tested, sglang_version())
    seam_table.write(tested, seams)
    print(f"{len(seams)} seams of SGLang {sglang_version()}, {len(changed)} written otherwise than before")
    return 0


if __name__ == "__main__":
    sys.exit(main())
