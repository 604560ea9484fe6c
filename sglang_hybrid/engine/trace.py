"""`--hybrid-trace`: one line of JSON a request, to a file or a ZMQ publisher, never at the scheduler's cost.

The scheduler only puts a record into a bounded queue; a thread of its own does the rest.  What does
not fit the queue, the disk or a subscriber is dropped and counted.
"""

from __future__ import annotations

import os
import queue
import socket
import stat
import threading
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

SCHEME = "tcp://"
QUEUED = 4096
"""Records that may wait for the thread."""
EXAMPLE = "--hybrid-trace trace.jsonl or --hybrid-trace tcp://127.0.0.1:5599"


class Address(NamedTuple):
    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{SCHEME}{host}:{self.port}"


def address(target: str) -> Address | None:
    """Host and port of a `tcp://` target; None for a path.  Raises ValueError when it has none."""
    if not target.startswith(SCHEME):
        return None
    parts = urlsplit(target)
    if not parts.hostname or not parts.port or parts.path or parts.query:
        raise ValueError("it has the form tcp://HOST:PORT")
    return Address(parts.hostname, parts.port)


def problem(target: str) -> str | None:
    """Why records cannot be written to `target`; None when they can.  Leaves nothing behind."""
    try:
        where = address(target)
    except ValueError:
        return "an address has the form tcp://HOST:PORT with a port from 1 to 65535"
    if where is None:
        return _path_problem(target)
    try:
        family, kind, *_, place = socket.getaddrinfo(*where, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
    except OSError as error:
        return f"it cannot be bound ({error.strerror or error})"
    return None


def _path_problem(target: str) -> str | None:
    if not target or "://" in target:
        return "it is neither a path nor an address tcp://HOST:PORT"
    path = Path(target)
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        folder = path.parent
        if not folder.is_dir():
            return f"there is no folder {folder}"
        return None if os.access(folder, os.W_OK) else f"the folder {folder} cannot be written"
    except (OSError, ValueError) as error:
        return f"it cannot be opened ({getattr(error, 'strerror', None) or error})"
    if not stat.S_ISREG(mode) and not stat.S_ISCHR(mode):
        return "it exists and is no file"
    return None if os.access(path, os.W_OK) else "the file cannot be written"


class Sink(Protocol):
    """Where lines go.  Called by the thread only; what it raises but OSError ends the trace."""

    def write(self, line: bytes) -> bool:
        """Whether the line has arrived as a whole; nothing of it has, otherwise."""


class FileSink:
    """Appends to a file."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def write(self, line: bytes) -> bool:
        done = os.write(self._file, line)
        if 0 < done < len(line):  # the disk is full: take the part back
            os.ftruncate(self._file, os.fstat(self._file).st_size - done)
        return done == len(line)


class PublisherSink:
    """Publishes to whoever has subscribed; a subscriber that does not keep up costs a record."""

    def __init__(self, where: Address) -> None:
        import zmq

        self._again = zmq.Again
        self._now = zmq.NOBLOCK
        # As PUB, but it tells who has subscribed and when its queue is full.
        self._socket: Any = zmq.Context.instance().socket(zmq.XPUB)
        self._socket.setsockopt(zmq.XPUB_NODROP, 1)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IPV6, ":" in where.host)
        self._socket.bind(str(where))
        self._topics: set[bytes] = set()

    def write(self, line: bytes) -> bool:
        self._hear()
        if not any(line.startswith(topic) for topic in self._topics):
            return False
        try:
            self._socket.send(line, self._now)
        except self._again:
            return False
        return True

    def _hear(self) -> None:
        while True:
            try:
                note = self._socket.recv(self._now)
            except self._again:
                return
            change = self._topics.add if note[:1] == b"\x01" else self._topics.discard
            change(note[1:])


class Trace:
    """Records on their way to a sink."""

    def __init__(self, sink: Sink, queued: int = QUEUED) -> None:
        self.written = 0
        self._refused = 0
        """Records that found the queue full: counted by the scheduler."""
        self._lost = 0
        """Records that the sink did not take: counted by the thread."""
        self._sink = sink
        self._queue: queue.Queue[dict[str, Any]] = queue.Queue(queued)
        threading.Thread(target=self._run, name="hybrid-trace", daemon=True).start()

    @property
    def dropped(self) -> int:
        return self._refused + self._lost

    def put(self, record: dict[str, Any]) -> None:
        """Hand over a record of plain values; returns at once."""
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self._refused += 1

    def _run(self) -> None:
        import orjson

        while True:
            record = self._queue.get()
            try:
                arrived = self._sink.write(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE))
            except Exception:  # a full disk, a name that is no UTF-8: a record less, never a thread less
                arrived = False
            self.written += arrived
            self._lost += not arrived


def open_trace(target: str, rank: int) -> Trace:
    """The trace of one scheduler.  Data-parallel rank r > 0 adds `.r` to the path, r to the port.

    Raises:
        OSError, zmq.ZMQError: `problem` was not asked, or things have changed since.
    """
    where = address(target)
    if where is not None:
        return Trace(PublisherSink(where._replace(port=where.port + rank)))
    return Trace(FileSink(f"{target}.{rank}" if rank else target))
