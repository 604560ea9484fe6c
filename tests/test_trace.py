"""`--hybrid-trace`: whole lines, and nothing that a disk or a subscriber does reaches the scheduler."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest
import zmq

from sglang_hybrid.cli.port import free_port
from sglang_hybrid.engine.trace import FileSink, Trace, open_trace, problem


def wait(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_file_gets_one_line_a_record(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"rid":"of an earlier run"}\n')
    trace = open_trace(str(path), 0)
    for number in range(500):
        trace.put({"rid": str(number), "cause": None})
    wait(lambda: trace.written == 500)
    lines = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    assert [line["rid"] for line in lines[1:]] == [str(number) for number in range(500)]
    assert trace.dropped == 0


def test_further_ranks_have_files_of_their_own(tmp_path: Path) -> None:
    trace = open_trace(str(tmp_path / "trace.jsonl"), 2)
    trace.put({"rid": "a"})
    wait(lambda: trace.written == 1)
    assert [path.name for path in tmp_path.iterdir()] == ["trace.jsonl.2"]


def test_a_full_disk_costs_records(tmp_path: Path) -> None:
    trace = open_trace("/dev/full", 0)
    for number in range(100):
        trace.put({"rid": str(number)})
    wait(lambda: trace.dropped == 100)
    assert trace.written == 0


def test_half_a_line_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last bytes of a disk take part of a record."""
    path = tmp_path / "trace.jsonl"
    sink = FileSink(str(path))
    assert sink.write(b"first\n")
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, line: write(file, line[:3]))
    assert not sink.write(b"second\n")
    monkeypatch.undo()
    assert sink.write(b"third\n")
    assert path.read_bytes() == b"first\nthird\n"


class Stuck:
    """A disk that does not answer."""

    def __init__(self) -> None:
        self.release = threading.Event()

    def write(self, line: bytes) -> bool:
        return self.release.wait(10)


def test_a_stuck_disk_never_blocks() -> None:
    sink = Stuck()
    trace = Trace(sink, queued=8)
    began = time.monotonic()
    for number in range(1000):
        trace.put({"rid": str(number)})
    assert time.monotonic() - began < 1.0
    assert trace.dropped >= 1000 - 8 - 1
    sink.release.set()
    wait(lambda: trace.written + trace.dropped == 1000)


def test_what_cannot_be_written_as_json_costs_a_record(tmp_path: Path) -> None:
    trace = open_trace(str(tmp_path / "trace.jsonl"), 0)
    trace.put({"rid": "\ud800"})  # a lone surrogate: no UTF-8
    trace.put({"rid": "next"})
    wait(lambda: (trace.dropped, trace.written) == (1, 1))


def test_subscribers_get_records_and_nobody_costs_them() -> None:
    port = free_port()
    trace = open_trace(f"tcp://127.0.0.1:{port}", 0)
    for number in range(10):
        trace.put({"rid": str(number)})
    wait(lambda: trace.dropped == 10)  # nobody listened

    listener = zmq.Context.instance().socket(zmq.SUB)
    listener.setsockopt(zmq.RCVTIMEO, 10_000)
    listener.setsockopt(zmq.LINGER, 0)
    listener.connect(f"tcp://127.0.0.1:{port}")
    listener.subscribe(b"")

    def heard() -> bool:
        trace.put({"rid": "hello"})
        return bool(listener.poll(20))

    wait(heard)
    assert orjson.loads(listener.recv()) == {"rid": "hello"}
    listener.close()


def test_a_slow_subscriber_costs_records() -> None:
    """It reads nothing: its queue fills, and what finds no place is counted."""
    port = free_port()
    trace = open_trace(f"tcp://127.0.0.1:{port}", 0)
    listener = zmq.Context.instance().socket(zmq.SUB)
    listener.setsockopt(zmq.RCVHWM, 1)
    listener.setsockopt(zmq.LINGER, 0)
    listener.connect(f"tcp://127.0.0.1:{port}")
    listener.subscribe(b"")

    def arrived() -> bool:
        trace.put({"rid": "hello"})
        return trace.written > 0

    wait(arrived)
    before, put = trace.dropped + trace.written, 0
    while trace.dropped < before + 1000:
        trace.put({"rid": "x" * 4000})
        put += 1
        assert put < 1_000_000
    listener.close()


@pytest.mark.parametrize("target", ["trace.jsonl", "/dev/null", "tcp://127.0.0.1:{port}", "tcp://[::1]:{port}"])
def test_legal_targets(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert problem(target.format(port=free_port())) is None
    assert not list(tmp_path.iterdir())


def test_a_port_in_use_is_named() -> None:
    port = free_port()
    open_trace(f"tcp://127.0.0.1:{port}", 0)
    assert "cannot be bound (Address already in use)" in str(problem(f"tcp://127.0.0.1:{port}"))
