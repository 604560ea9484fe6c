"""The exporter against `prometheus_client`'s own reader: every scrape sees one moment, whole."""

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.parser import text_string_to_metric_families

from sglang_hybrid.engine.metrics import Exporter, Sample, histogram
from sglang_hybrid.engine.reuse import Histogram


def scrape(folder: Path) -> dict[tuple[str, str], float]:
    """Values by name and by the one label that tells them apart; as `/metrics` would show them."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(folder))
    text = generate_latest(registry).decode()
    return {
        (sample.name, sample.labels.get("state") or sample.labels.get("le", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


class Budget:
    """Bytes that move between three states all the time, and always add up."""

    TOTAL = 1000

    def __init__(self) -> None:
        self.moved = 0

    def samples(self) -> Iterator[Sample]:
        self.moved += 1
        held, cached = self.moved % 300, self.moved % 500
        states = {"held": held, "cached": cached, "free": self.TOTAL - held - cached}
        for state, size in states.items():
            yield Sample("gauge", "bytes", "Bytes.", {"state": state}, size)
        yield Sample("counter", "moves", "Moves.", {}, self.moved)


def test_a_scrape_never_sees_half_an_update(tmp_path: Path) -> None:
    budget = Budget()
    exporter = Exporter(str(tmp_path), {"organization": "S1"}, budget.samples)
    exporter.write()
    done = threading.Event()

    def keep_writing() -> None:
        while not done.is_set():
            exporter.write()

    writer = threading.Thread(target=keep_writing)
    writer.start()
    moved = "sglang:hybrid_moves_total", ""
    seen = []
    deadline = time.monotonic() + 60
    try:
        # A writer that seldom gets the processor tells nothing.
        while len(seen) < 300 or len({one[moved] for one in seen}) <= 10:
            seen.append(scrape(tmp_path))
            assert time.monotonic() < deadline, "INCONCLUSIVE: nothing moved"
    finally:
        done.set()
        writer.join()
    for one in seen:
        states = [value for (name, _), value in one.items() if name == "sglang:hybrid_bytes"]
        assert len(states) == 3 and sum(states) == Budget.TOTAL, one
    assert exporter.failed == 0


def test_values_are_written_when_they_are_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step writes unless one was written a moment ago; what is left over is written when idle, once."""
    now = 100.0
    monkeypatch.setattr("sglang_hybrid.engine.metrics.time.monotonic", lambda: now)
    budget = Budget()
    exporter = Exporter(str(tmp_path), {}, budget.samples)
    exporter.changed()
    assert budget.moved == 1
    exporter.changed()
    assert budget.moved == 1
    exporter.idle()
    exporter.idle()
    assert budget.moved == 2
    now += 1.0
    exporter.changed()
    assert budget.moved == 3


def test_a_folder_that_is_gone_costs_an_export(tmp_path: Path) -> None:
    exporter = Exporter(str(tmp_path / "gone"), {}, Budget().samples)
    exporter.write()
    assert exporter.failed == 1
    (tmp_path / "gone").mkdir()
    exporter.write()
    assert exporter.failed == 1 and len(os.listdir(tmp_path / "gone")) == 2


def test_histogram(tmp_path: Path) -> None:
    """Buckets are inclusive, by powers of two of a grid step; the last takes everything."""
    found = Histogram(grid=8)
    for value in (0, 8, 9, 16, 24, 32, 33, 1 << 40):
        found.add(value)
    samples = list(histogram("depth_tokens", "Depth.", {}, found.bounds, found.counts, found.total))
    exporter = Exporter(str(tmp_path), {}, lambda: samples)
    exporter.write()
    seen = scrape(tmp_path)
    bounds = ("0.0", "8.0", "16.0", "32.0", "64.0", "+Inf")
    shown = [seen["sglang:hybrid_depth_tokens_bucket", le] for le in bounds]
    assert shown == [1, 2, 4, 6, 7, 8]
    assert seen["sglang:hybrid_depth_tokens_count", ""] == 8
    assert seen["sglang:hybrid_depth_tokens_sum", ""] == found.total
