"""/metrics of a live server, and its trace, as a test wants to see them."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.support.server import LiveServer

_LINE = re.compile(r"^([a-z0-9_:]+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')

PREFIX = "sglang:hybrid_"


@dataclass(frozen=True)
class Scrape:
    """Values by name and sorted labels."""

    values: Mapping[tuple[str, tuple[tuple[str, str], ...]], float]

    def total(self, name: str, **labels: str) -> float:
        """Sum of what a name shows under these labels, whatever the others; SGLang's own by full name."""
        name = name if ":" in name else PREFIX + name
        wanted = set(labels.items())
        found = [value for (own, has), value in self.values.items() if own == name and wanted <= set(has)]
        assert found or name.startswith("sglang:cached"), f"/metrics has no {name} {labels}"
        return sum(found)

    def bytes(self) -> dict[str, int]:
        """Bytes by `kind_state`."""
        return {
            f"{dict(labels)['kind']}_{dict(labels)['state']}": int(value)
            for (name, labels), value in self.values.items()
            if name == f"{PREFIX}bytes"
        }


def scrape(server: LiveServer) -> Scrape:
    answer = server.request("GET", "/metrics/", timeout=30)
    assert answer.status_code == 200, answer.text
    return Scrape(
        {
            (name, tuple(sorted(_LABEL.findall(labels or "")))): float(value)
            for name, labels, value in _LINE.findall(answer.text)
        }
    )


def trace_of(server: LiveServer, prefix: str) -> dict[str, dict[str, Any]]:
    """Records of the trace so far whose request id begins so, by request id; a request has one.

    Other tests of the same server may send one id twice.
    """
    lines = server.log_path.with_suffix(".jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if record["rid"].startswith(prefix)]
    found = {record["rid"]: record for record in records}
    assert len(found) == len(records), "a request has two records"
    return found
