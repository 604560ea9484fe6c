"""A real SGLang HTTP server in a subprocess, seen through its public endpoints and its log."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import requests

from sglang_hybrid.cli.port import free_port
from tests.support.nursery import Nursery, Nursling
from tests.support.reply import Reply, replies_of

LAUNCHER = "sglang.launch_server"
START_TIMEOUT = 240.0
REQUEST_TIMEOUT = 120.0
DRAIN_TIMEOUT = 30.0

_RUNNING = re.compile(r"Prefill batch.*?#new-seq: (\d+), .*?#running-req: (\d+)")
_PREFILL = re.compile(r"Prefill batch.*?#new-seq: (\d+), #new-token: (\d+), #cached-token: (\d+)")
_DECODE = re.compile(r"Decode batch.*?#running-req: (\d+), .*?graph: (\w+)")


class ServerDied(AssertionError):
    """The server process ended while a test was talking to it; the message has the end of its log."""


class LiveServer:
    """`python -m sglang.launch_server ARGS` on a free port, its output in `log_path`.

    With a nursery it is forked from there, where the libraries are imported already.
    """

    def __init__(
        self, args: Sequence[str], log_path: Path, env: Mapping[str, str], nursery: Nursery | None = None
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_path = log_path
        self._args = [*args, "--host", "127.0.0.1", "--port", str(self.port)]
        self._command = [sys.executable, "-m", LAUNCHER, *self._args]
        self._env = {**os.environ, **env}
        self._nursery = nursery
        self._http = threading.local()
        self._pool = ThreadPoolExecutor(64)
        self.process: subprocess.Popen[bytes] | Nursling | None = None

    # -- life -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Spawn, and return once /health answers 200. Raises `ServerDied` when the process ends first."""
        self.spawn()
        self.wait_ready()

    def spawn(self) -> None:
        """Spawn without waiting."""
        if self._nursery is not None:
            self.process = self._nursery.spawn(LAUNCHER, self._args, self.log_path, self._env)
            return
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                self._command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                env=self._env, start_new_session=True,
            )  # fmt: skip

    def wait_ready(self) -> None:
        """Return once /health answers 200."""

        def healthy() -> bool:
            self.check_alive()
            try:
                return requests.get(self.url + "/health", timeout=10).status_code == 200
            except requests.RequestException:
                return False

        self.wait_until(healthy, "the server to become healthy", START_TIMEOUT, pause=0.2)

    def wait_exit(self, timeout: float = START_TIMEOUT) -> int:
        """Exit status of a server that is expected to refuse its arguments."""
        assert self.process is not None
        try:
            return self.process.wait(timeout)
        finally:
            self.stop()

    def stop(self) -> None:
        """End the server and every process that it started."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self.process is None:
            return
        # Killed, not asked: SGLang's orderly end takes five seconds and would tidy this process group only.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)

    def alive(self) -> bool:
        """Whether the process runs. SGLang's launcher ends with its scheduler."""
        return self.process is not None and self.process.poll() is None

    def check_alive(self) -> None:
        """Raise `ServerDied` if the process has ended."""
        if not self.alive():
            code = None if self.process is None else self.process.returncode
            raise ServerDied(f"the server ended with status {code}; end of its log:\n{self.log_tail()}")

    # -- log --------------------------------------------------------------------------------------

    def log_mark(self) -> int:
        """A position in the log, for `log_since`."""
        return self.log_path.stat().st_size

    def log_since(self, mark: int = 0) -> str:
        """What was logged after a mark."""
        with self.log_path.open("rb") as log:
            log.seek(mark)
            return log.read().decode(errors="replace")

    def log_tail(self, lines: int = 60) -> str:
        """The last lines of the log."""
        return "\n".join(self.log_since().splitlines()[-lines:])

    def prefill_batches(self, mark: int) -> list[tuple[int, int, int]]:
        """(new sequences, new tokens, cached tokens) of each prefill batch logged after a mark."""
        return [tuple(map(int, found)) for found in _PREFILL.findall(self.log_since(mark))]  # type: ignore[misc]

    def decode_batches(self, mark: int) -> list[tuple[int, bool]]:
        """(running requests, by a graph) of each decode batch logged after a mark."""
        return [(int(size), graph == "True") for size, graph in _DECODE.findall(self.log_since(mark))]

    def prefilled(self, mark: int) -> int:
        """Tokens computed by the prefill batches logged after a mark."""
        return sum(new for _, new, _ in self.prefill_batches(mark))

    def most_running(self, mark: int) -> int:
        """Most requests at once, by the prefill batches logged after a mark."""
        return max(int(new) + int(running) for new, running in _RUNNING.findall(self.log_since(mark)))

    # -- requests ---------------------------------------------------------------------------------

    def request(
        self, method: str, path: str, timeout: float = REQUEST_TIMEOUT, **kwargs: Any
    ) -> requests.Response:
        """One HTTP request. A dead server raises `ServerDied`; a hung one fails with the end of its log."""
        session = getattr(self._http, "session", None)
        if session is None:
            session = self._http.session = requests.Session()
        try:
            return session.request(method, self.url + path, timeout=timeout, **kwargs)
        except requests.Timeout:
            self.check_alive()
            raise AssertionError(
                f"no answer to {path} in {timeout:.0f} s; end of the log:\n{self.log_tail()}"
            ) from None
        except requests.RequestException as error:
            # The launcher needs a moment to notice that its scheduler is gone.
            deadline = time.monotonic() + 10
            while time.monotonic() < deadline and self.alive():
                time.sleep(0.1)
            self.check_alive()
            raise AssertionError(
                f"{path} failed with {error!r}; end of the log:\n{self.log_tail()}"
            ) from error

    def post(self, path: str, body: Mapping[str, Any], timeout: float = REQUEST_TIMEOUT) -> Any:
        """The JSON answer to a POST that must succeed."""
        answer = self.request("POST", path, json=dict(body), timeout=timeout)
        assert answer.status_code == 200, f"{path}: {answer.status_code} {answer.text[:2000]}"
        return answer.json()

    def generate(self, input_ids: Sequence[int], m: int, **extra: Any) -> Reply:
        """One greedy request for exactly m tokens with their logprobs; `extra` goes into the body."""
        (reply,) = self.generate_batch([input_ids], m, **extra)
        return reply

    def generate_batch(self, prompts: Sequence[Sequence[int]], m: int, **extra: Any) -> list[Reply]:
        """One HTTP request for several prompts, which the scheduler queues in their order."""
        body = generate_body([list(prompt) for prompt in prompts], m, **extra)
        return replies_of(self.post("/generate", body))

    def generate_all(self, input_ids: Sequence[int], m: int, **extra: Any) -> list[Reply]:
        """Every sample of one prompt (sampling parameter `n`)."""
        return replies_of(self.post("/generate", generate_body(list(input_ids), m, **extra)))

    def submit(self, input_ids: Sequence[int], m: int, **extra: Any) -> Future[Reply]:
        """`generate` in a thread of its own; an aborted or refused request is a reply too."""
        return self._pool.submit(self._generate_any, list(input_ids), m, extra)

    def _generate_any(self, input_ids: list[int], m: int, extra: Mapping[str, Any]) -> Reply:
        answer = self.request("POST", "/generate", json=generate_body(input_ids, m, **extra))
        if answer.status_code == 200:
            (reply,) = replies_of([answer.json()])
            return reply
        return Reply.refused(answer.status_code, answer.text)

    def begin(self, input_ids: Sequence[int], m: int, **extra: Any) -> Future[Reply]:
        """`submit`, returning once the first token has come: the request runs, unless it is over already."""
        begun = threading.Event()
        future = self._pool.submit(self._generate_streaming, list(input_ids), m, extra, begun)
        future.add_done_callback(lambda _: begun.set())
        assert begun.wait(REQUEST_TIMEOUT), f"no first token; end of the log:\n{self.log_tail()}"
        return future

    def _generate_streaming(
        self, input_ids: list[int], m: int, extra: Mapping[str, Any], begun: threading.Event
    ) -> Reply:
        parts = self.stream(input_ids, m, **extra)
        last = next(parts)
        begun.set()
        for part in parts:
            last = part
        return Reply.of(last)

    def stream(self, input_ids: Sequence[int], m: int, **extra: Any) -> Iterator[dict[str, Any]]:
        """The parts of a streamed answer as they come, each with all that came before."""
        body = generate_body(list(input_ids), m, stream=True, **extra)
        with self.request("POST", "/generate", json=body, stream=True) as answer:
            assert answer.status_code == 200, answer.text
            for line in answer.iter_lines():
                if line.startswith(b"data: ") and line != b"data: [DONE]":
                    yield json.loads(line.removeprefix(b"data: "))

    def abort(self, rid: str) -> None:
        """Abort a request. SGLang's scheduler compares prefixes: end an id so that it begins no other."""
        answer = self.request("POST", "/abort_request", json={"rid": rid}, timeout=10)
        assert answer.status_code == 200, answer.text

    def flush(self) -> None:
        """Empty the cache; a busy server refuses, and is then given time to drain."""
        for patience in (0.0, DRAIN_TIMEOUT):
            answer = self.request("POST", "/flush_cache", params={"timeout": patience}, timeout=patience + 30)
            if answer.status_code == 200:
                return
        raise AssertionError(f"flush refused: {answer.text}\n{self.log_tail()}")

    def info(self) -> dict[str, Any]:
        """/server_info."""
        answer = self.request("GET", "/server_info", timeout=30)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def load(self) -> tuple[int, int]:
        """(running, waiting) requests, as they are after this call began.

        SGLang answers from a snapshot that its scheduler writes now and then: one from before the call says
        nothing about what was sent since.
        """
        begun = time.time()
        while True:
            answer = self.request("GET", "/v1/loads", params={"include": "core"}, timeout=30)
            assert answer.status_code == 200, answer.text
            (rank,) = answer.json()["loads"]
            if rank["timestamp"] >= begun:
                return int(rank["num_running_reqs"]), int(rank["num_waiting_reqs"])
            self.check_alive()
            # Goes through the scheduler, which then writes another.
            self.info()

    # -- waiting ----------------------------------------------------------------------------------

    def wait_until(
        self, true: Callable[[], bool], what: str, timeout: float = 30.0, pause: float = 0.02
    ) -> None:
        """Poll; fails with the end of the log when it takes longer than `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while not true():
            self.check_alive()
            if time.monotonic() > deadline:
                raise AssertionError(f"waited {timeout:.0f} s for {what}; end of the log:\n{self.log_tail()}")
            time.sleep(pause)

    def wait_waiting(self, count: int) -> None:
        """Until exactly so many requests wait."""
        self.wait_until(lambda: self.load()[1] == count, f"{count} requests to wait")

    def wait_idle(self) -> None:
        """Until nothing runs or waits."""
        self.wait_until(lambda: self.load() == (0, 0), "the server to drain", DRAIN_TIMEOUT)


def generate_body(input_ids: Sequence[Any], m: int, **extra: Any) -> dict[str, Any]:
    """Body of a greedy /generate request; a key `sampling` in `extra` adds sampling parameters."""
    sampling = {"temperature": 0, "max_new_tokens": m, "ignore_eos": True, **extra.pop("sampling", {})}
    return {"input_ids": list(input_ids), "sampling_params": sampling, "return_logprob": True, **extra}
