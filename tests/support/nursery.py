"""Server processes that begin with the third-party libraries imported.

Most of a server's start is spent, three times over (launcher, scheduler, detokenizer), on importing torch,
transformers and their like. A nursery imports them once and forks a server from there. SGLang and the plugin
are imported by each process anew, under its own environment, as by `python -m sglang.launch_server`.
"""

import array
import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing import util
from pathlib import Path
from typing import Any, NoReturn

SPARES = 2
"""Processes that a launcher starts: a scheduler and a detokenizer."""

SERVER = ("launch_server", "srt.entrypoints.http_server", "srt.managers.scheduler", "srt.models.registry")
"""Modules of SGLang that import all others that a server needs."""

OURS = ("sglang", "sglang_hybrid", "tests", "__main__", "__mp_main__")
_MESSAGE = 1 << 20


class Nursery:
    """The tests' end: asks a process with everything imported for servers."""

    def __init__(self, log: Path, env: Mapping[str, str]) -> None:
        """`env` is added to the environment that its libraries see; `log` gets what they say."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.nursery", str(theirs.fileno())],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                env={**os.environ, **env}, start_new_session=True,
            )  # fmt: skip
        self._socket = ours
        self._lock = threading.Lock()

    def spawn(self, module: str, args: Sequence[str], log: Path, env: Mapping[str, str]) -> "Nursling":
        """`python -m module args` under `env`, its output in `log`, in a session of its own."""
        pid = self.ask({"module": module, "args": list(args), "log": str(log), "env": dict(env)})
        return Nursling(self, pid)

    def ask(self, question: Mapping[str, Any]) -> Any:
        """The answer of the other end. Raises `RuntimeError` if that has ended."""
        with self._lock:
            self._socket.sendall(json.dumps(question).encode())
            answer = self._socket.recv(_MESSAGE)
        if not answer:
            raise RuntimeError(f"the nursery ended with status {self._process.wait()}")
        return json.loads(answer)

    def close(self) -> None:
        """End it and every server that still runs."""
        self._socket.close()
        self._process.wait()


class Nursling:
    """What is used of `subprocess.Popen`, for a child of the nursery."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._nursery = nursery

    def poll(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        if self.returncode is None:
            self.returncode = self._nursery.ask({"poll": self.pid})
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Exit status. Raises `subprocess.TimeoutExpired`."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.02)
        return code


# -- the nursery's own process ------------------------------------------------------------------


def main(channel: socket.socket) -> None:
    """Import, then fork servers until the other end closes."""
    for name in third_party():
        # Some modules of a package can only be imported by it.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    ended: dict[int, int] = {}
    living: set[int] = set()
    while question := channel.recv(_MESSAGE):
        asked = json.loads(question)
        while living:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            living.discard(pid)
            ended[pid] = os.waitstatus_to_exitcode(status)
        if "poll" in asked:
            answer: int | None = ended.get(asked["poll"])
        else:
            answer = os.fork()
            if not answer:
                channel.close()
                become(**asked)
            living.add(answer)
        channel.sendall(json.dumps(answer).encode())
    for pid in living:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def third_party() -> list[str]:
    """Modules of others that a server imports, in their order; found out in a process that is thrown away."""
    reading, writing = os.pipe()
    if not os.fork():
        for name in SERVER:
            importlib.import_module(f"sglang.{name}")
        with open(writing, "w") as pipe:
            pipe.write("\n".join(name for name in sys.modules if name.partition(".")[0] not in OURS))
        os._exit(0)
    os.close(writing)
    with open(reading) as pipe:
        names = pipe.read().split()
    os.wait()
    return names


def become(module: str, args: Sequence[str], log: str, env: Mapping[str, str]) -> NoReturn:
    """Turn this fork into `python -m module args`."""
    import runpy

    os.setsid()
    with open(log, "wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    adopt(env)
    keep_spares()
    sys.argv = [module, *args]
    leave(lambda: runpy.run_module(module, run_name="__main__", alter_sys=True))


def adopt(env: Mapping[str, str]) -> None:
    """Make `env` the environment."""
    os.environ.clear()
    os.environ.update(env)


def leave(work: Any) -> NoReturn:
    """Do it and end as an interpreter would: exit status, threads joined, handlers of `atexit` run."""
    import atexit
    import traceback

    code: Any = 0
    try:
        work()
    except SystemExit as ending:
        code = ending.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


# -- what the launcher starts -------------------------------------------------------------------


def keep_spares() -> None:
    """Fork processes now, before SGLang is imported, and let the spawning of `multiprocessing` use them."""
    spares: list[tuple[int, socket.socket]] = []
    for _ in range(SPARES):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if not pid:
            ours.close()
            for _, other in spares:
                other.close()
            serve_spawn(theirs)
        theirs.close()
        spares.append((pid, ours))
    start = util.spawnv_passfds

    def spawn(path: bytes, args: Sequence[Any], fds: Sequence[int]) -> int:
        command = [os.fsdecode(arg) for arg in args]
        if not spares or "--multiprocessing-fork" not in command:
            return start(path, args, fds)
        pid, ours = spares.pop(0)
        order = {"code": command[command.index("-c") + 1], "fds": list(fds), "env": dict(os.environ)}
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
        with ours:
            ours.sendmsg([json.dumps(order).encode()], rights)
        return pid

    util.spawnv_passfds = spawn  # type: ignore[assignment]


def serve_spawn(theirs: socket.socket) -> NoReturn:
    """Wait to be told what to run; end unused when the launcher does."""
    import fcntl

    message, passed, *_ = socket.recv_fds(theirs, _MESSAGE, 16)
    if not message:
        os._exit(0)
    order = json.loads(message)
    theirs.close()
    # First out of the way of each other, then to the numbers that the code names.
    moved = []
    for fd in passed:
        moved.append(fcntl.fcntl(fd, fcntl.F_DUPFD, 512))
        os.close(fd)
    for fd, number in zip(moved, order["fds"], strict=True):
        os.dup2(fd, number)
        os.close(fd)
    adopt(order["env"])
    sys.argv = ["-c", "--multiprocessing-fork"]
    leave(lambda: exec(order["code"], {"__name__": "__main__"}))


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
    # Tidying away that many modules would take seconds.
    os._exit(0)
