"""`python -m bench.simulate` on a trace of a few requests."""

import json
import sys
from pathlib import Path

import pytest

from bench import simulate


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Turns of conversations behind one block, and at last one request that only 1,000 pages hold."""
    rows: list[dict[str, object]] = []
    for turn in range(6):
        for one in range(5):
            ids = [0, *range(100 * one + 1, 100 * one + 4 + 2 * turn)]
            length = 512 * len(ids) - 37
            rows.append(
                {"timestamp": 60_000 * turn, "input_length": length, "output_length": 90, "hash_ids": ids}
            )
    blocks = [*range(9000, 9391)]
    rows.append({"timestamp": 360_000, "input_length": 200_000, "output_length": 5, "hash_ids": blocks})
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


@pytest.mark.parametrize("serving", simulate.SERVING)
def test_the_report(
    serving: str, trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--trace", str(trace), "--pages", "254,1000", "--organization", "S2,D0", "--json"]
    monkeypatch.setattr(sys, "argv", ["simulate", *arguments, "--serving", serving])
    simulate.main()
    answer = json.loads(capsys.readouterr().out)
    assert answer["requests"] == 31
    rows = {(row["organization"], row["pages"]): row for row in answer["rows"]}
    assert [row["refused"] for row in rows.values()] == [1, 0, 1, 0] and len(rows) == 4
    assert all(row["served"] + row["refused"] == 31 for row in rows.values())
    assert rows["S2", 1000]["adopted_tokens"] >= rows["S2", 254]["adopted_tokens"] > 0
    assert all(row["requests_per_wall_second"] > 0 and 0 < row["hit_rate"] < 1 for row in rows.values())


def test_a_trace_goes_on_beyond_its_end(
    trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = []
    for count in ("31", "62"):
        arguments = ["--trace", str(trace), "--pages", "1000", "--requests", count, "--json"]
        monkeypatch.setattr(sys, "argv", ["simulate", *arguments])
        simulate.main()
        rows += json.loads(capsys.readouterr().out)["rows"]
    once, twice = rows
    assert (once["served"], twice["served"]) == (31, 62)
    assert twice["adopted_tokens"] > 1.9 * once["adopted_tokens"] > 0
    assert 0 < once["cached_blocks"] <= twice["cached_blocks"] <= 1000 and once["peak_mib"] > 0


def test_no_trace(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["simulate", "--trace", "/nowhere"])
    with pytest.raises(SystemExit):
        simulate.main()
    assert "there is no trace at /nowhere: name one with --trace" in capsys.readouterr().err
