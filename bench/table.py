"""What every bench says and how: one JSON object, or tables."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Cell = str | int | float


def parser(name: str, doc: str) -> argparse.ArgumentParser:
    """Options of `python -m bench.NAME`; its help begins with the module's first line."""
    options = argparse.ArgumentParser(prog=f"python -m bench.{name}", description=doc.splitlines()[0])
    options.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    return options


def report(answer: Mapping[str, Any], as_json: bool, tables: Callable[[], None]) -> None:
    """Print the answer as one JSON object, or what `tables` prints of it."""
    if as_json:
        print(json.dumps(answer))
    else:
        tables()


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
    """Columns under a title, the first to the left, the others to the right."""
    cells = [list(head), *([_text(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    print(f"\n{title}")
    for row in cells:
        line = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))]
        print("  " + "  ".join(line).rstrip())


def _text(cell: Cell) -> str:
    if isinstance(cell, str):
        return cell
    if isinstance(cell, int):
        return f"{cell:,}"
    return f"{cell:,.1f}" if abs(cell) >= 100 else f"{cell:.3g}"
