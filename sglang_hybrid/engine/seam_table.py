"""Every name of SGLang that is hooked, subclassed, replaced or called here, as the tested versions have it.

The rows are in `seams.json`, written by `python -m sglang_hybrid.engine.seam_record`; `seams.py` compares.
A further name: `python -m sglang_hybrid.engine.seam_record PACKAGE.MODULE:NAME`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).with_name("seams.json")

CHILD = "child"
CPU = "cpu"


class Seam(NamedTuple):
    """A name of SGLang and what must be true of it; of nothing else it only has to exist."""

    path: str
    names: str | None = None
    """Parameter (or field) names in order, space separated."""
    body: str | None = None
    """Fingerprint of a function on whose order we lean (`seam_facts.fingerprint`)."""
    attributes: str | None = None
    """Names that an instance of this class has, space separated."""
    only: str | None = None
    """Where it is compared when a server starts; None: in the parent.

    `CHILD`: not to be imported in the parent (`prometheus_client` decides at its import where counters go,
    and SGLang sets the folder that the parent's own go to only after the arguments are resolved).  `CPU`: in
    a worker of the CPU platform, which replaces the function.
    """


def read() -> tuple[tuple[str, ...], tuple[Seam, ...]]:
    """(tested versions of SGLang, rows in the order of their paths)."""
    table = json.loads(FILE.read_text())
    return tuple(table["tested"]), tuple(Seam(path, **row) for path, row in table["seams"].items())


def write(tested: tuple[str, ...], seams: list[Seam]) -> None:
    """One line a row, so that a difference of two versions can be read."""
    rows = []
    for seam in sorted(seams, key=lambda seam: seam.path):
        row = {name: value for name, value in seam._asdict().items() if name != "path" and value is not None}
        rows.append(f"{json.dumps(seam.path)}: {json.dumps(row)}")
    FILE.write_text(
        f'{{"tested": {json.dumps(tested)},\n"seams": {{\n' + ",\n".join(rows) + "\n}}\n",
    )


TESTED, SEAMS = read()
