"""Every program in `examples/` runs as its head says."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.park import ServerPark, on
from tests.support.server_config import ENV
from tests.support.witness import Witness

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *arguments: str) -> str:
    """Standard output of an example."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        capture_output=True, text=True, timeout=300, env={**os.environ, **ENV},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def counts(output: str) -> list[tuple[int, int]]:
    """(prompt tokens, tokens from the cache) of each line that reports them."""
    return [(int(a), int(b)) for a, b in re.findall(r"(\d+) prompt tokens, +(\d+) from the cache", output)]


@on("public")
def test_chat_reuse(witness: Witness) -> None:
    (_, first), (prompt, second) = counts(run("chat_reuse.py", "--url", witness.server.url))
    if witness.config.hybrid:
        assert first == 0
        assert prompt // 2 < second < prompt


@on("public")
def test_fork_join(witness: Witness) -> None:
    output = run("fork_join.py", "--url", witness.server.url)
    cached = int(output.split()[-1])
    if witness.config.hybrid:
        assert cached > 1000


@pytest.mark.long
def test_offline_batch(park: ServerPark) -> None:
    if park.stock:
        return
    found = counts(run("offline_batch.py", str(park.model_dir("public")), "--grid", "64"))
    assert len(found) == 8
    assert all(cached == 64 * (cached // 64) > 1000 for _, cached in found)


def test_read_trace(tmp_path: Path) -> None:
    """On records of the form that `test_metrics.py` reads from a server."""
    trace = tmp_path / "trace.jsonl"
    records = [
        {"r_max": 0, "cached_tokens": 0, "cause": None, "lost_tokens": 0},
        {"r_max": 64, "cached_tokens": 32, "cause": "evicted", "lost_tokens": 32},
    ]
    trace.write_text("".join(json.dumps(record) + "\n" for record in records))
    output = run("read_trace.py", str(trace))
    assert "2 requests, 64 tokens could be reused, 32 were" in output
    assert re.search(r"evicted +32 tokens lost", output)


def test_every_example_is_tested() -> None:
    source = Path(__file__).read_text()
    for path in EXAMPLES.glob("*.py"):
        assert f'"{path.name}"' in source, f"{path.name} has no test"
