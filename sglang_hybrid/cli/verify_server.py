"""A SGLang server as `sglang-hybrid verify` sees it: its HTTP endpoints, and a process to start one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from sglang_hybrid.cli.port import free_port
from sglang_hybrid.cli.verify_compare import Answer
from sglang_hybrid.cli.verify_runs import Prompt

START_SECONDS = 1800.0
"""A large model takes long to load."""
REQUEST_SECONDS = 3600.0


class VerifyError(Exception):
    """The verification could not be done; the text is for the user."""


class Client:
    """A running server."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def request(
        self, path: str, body: Mapping[str, Any] | None = None, timeout: float = REQUEST_SECONDS
    ) -> bytes:
        """Answer to GET, or to POST with a body.

        Raises:
            VerifyError: no answer, or an error status; says which, and the server's own words.
        """
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")[:500]
            raise VerifyError(f"{self.url}{path} answered {error.code}: {text}") from None
        except OSError as error:
            raise VerifyError(f"{self.url}{path} does not answer: {error}") from None

    def info(self) -> dict[str, Any]:
        """`/server_info`."""
        return dict(json.loads(self.request("/server_info", timeout=60)))

    def flush(self) -> None:
        """Empty the cache, once nothing runs."""
        self.request("/flush_cache?timeout=60", {}, timeout=90)

    def ask(self, prompts: Sequence[Prompt], tokens: int) -> list[Answer]:
        """Greedy answers of exactly `tokens` tokens to prompts sent in one request."""
        body = {
            "input_ids": [list(prompt) for prompt in prompts],
            "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
            "return_logprob": True,
            "top_logprobs_num": 2,
        }
        return [Answer.of(answer) for answer in json.loads(self.request("/generate", body))]


class Server(Client):
    """`python -m sglang.launch_server` on a free port of the loopback interface; a context manager."""

    def __init__(self, args: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        port = free_port()
        super().__init__(f"http://127.0.0.1:{port}")
        self.args = [*args, "--host", "127.0.0.1", "--port", str(port)]
        self.env = {**os.environ, **(env or {})}

    def __enter__(self) -> Server:
        self.log = tempfile.NamedTemporaryFile(prefix="sglang-hybrid-verify-", suffix=".log", delete=False)
        command = [sys.executable, "-m", "sglang.launch_server", *self.args]
        self.process = subprocess.Popen(
            command, env=self.env, stdout=self.log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            self._wait()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        if kind is None:
            os.unlink(self.log.name)

    def _wait(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise VerifyError(f"the server ended with status {self.process.returncode}:\n{self._tail()}")
            try:
                self.request("/health", timeout=5)
                return
            except VerifyError:
                time.sleep(0.3)
        raise VerifyError(f"the server did not start in {START_SECONDS:.0f} s:\n{self._tail()}")

    def _tail(self) -> str:
        """The end of the log, which stays where it is."""
        with open(self.log.name, errors="replace") as log:
            lines = log.read().splitlines()[-25:]
        return "\n".join([*lines, f"(log: {self.log.name})"])

    def _stop(self) -> None:
        """End the launcher and all its children: they share its session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.log.close()
