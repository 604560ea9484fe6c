"""A SGLang server in a subprocess, for benches that compare whole servers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import requests

from sglang_hybrid.cli.port import free_port

START_SECONDS = 900.0
"""Several may start at once, on two cores."""


class BenchServer:
    """`python -m sglang.launch_server ARGS` on a free loopback port, for the length of a `with` block."""

    def __init__(self, args: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._log = tempfile.NamedTemporaryFile("w+b", suffix=".log")  # noqa: SIM115 - closed in __exit__
        self._process = subprocess.Popen(
            [sys.executable, "-m", "sglang.launch_server", *args, "--host", "127.0.0.1", "--port", str(port)],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )

    def __enter__(self) -> BenchServer:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                break
            try:
                if requests.get(f"{self.url}/health", timeout=5).ok:
                    return self
            except requests.RequestException:
                time.sleep(0.3)
        self.stop()
        raise RuntimeError(f"the server did not start; end of its log:\n{self.log()[-4000:]}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            print(f"end of the server's log:\n{self.log()[-4000:]}", file=sys.stderr)
        self.stop()
        self._log.close()

    def stop(self) -> None:
        """End the server and all that it started."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(10)

    def alive(self) -> bool:
        return self._process.poll() is None

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def generate(self, input_ids: Sequence[int], new_tokens: int) -> dict[str, Any]:
        """One greedy request of fixed length; the reply of `/generate`."""
        reply = requests.post(
            f"{self.url}/generate",
            json={
                "input_ids": list(input_ids),
                "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
            },
            timeout=600,
        )
        reply.raise_for_status()
        result: dict[str, Any] = reply.json()
        return result

    def gauge(self, name: str) -> float:
        """Sum of a metric's samples; the server needs --enable-metrics."""
        text = requests.get(f"{self.url}/metrics", timeout=30).text
        return sum(
            float(line.rsplit(" ", 1)[1])
            for line in text.splitlines()
            if line.startswith((f"{name}{{", f"{name} "))
        )

    def info(self) -> dict[str, Any]:
        """`/server_info`."""
        info: dict[str, Any] = requests.get(f"{self.url}/server_info", timeout=30).json()
        return info
