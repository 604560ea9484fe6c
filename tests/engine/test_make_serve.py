"""The README's first command, from the outside: `make serve`, nothing set, then a chat."""

import shutil
import sys
from pathlib import Path

import pytest

from tests.support.park import ServerPark
from tests.support.server import LiveServer

ROOT = Path(__file__).parents[2]


class MakeServe(LiveServer):
    """A server that make starts."""

    def __init__(self, variables: list[str], log_path: Path) -> None:
        super().__init__([], log_path, {})
        make = shutil.which("make")
        assert make is not None
        self._command = [make, "-C", str(ROOT), "serve", f"PORT={self.port}", *variables]


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_make_serve_answers_a_chat(park: ServerPark, tmp_path: Path) -> None:
    """Default grid and budget: the second request with the same long prefix reports what it reused."""
    variables = [f"VENV={sys.prefix}", f"DEMO={tmp_path / 'demo'}", f"HYBRID={'' if park.stock else 'S1'}"]
    if not list(Path(sys.prefix).glob(".sglang-hybrid-*")):
        # An environment that make did not make: leave it as it is.
        variables.append("STAMP=/dev/null")
    server = MakeServe(variables, tmp_path / "make-serve.log")
    server.start()
    try:
        answers = [
            server.post(
                "/v1/chat/completions",
                {
                    "model": "default",
                    "max_tokens": 16,
                    "temperature": 0,
                    "messages": [{"role": "user", "content": " ".join(map(str, range(400)))}],
                },
            )
            for _ in range(2)
        ]
        texts = [answer["choices"][0]["message"]["content"] for answer in answers]
        assert texts[0] == texts[1] != ""
        usage = answers[1]["usage"]
        details = usage["prompt_tokens_details"] or {}
        if not park.stock:
            assert details["cached_tokens"] == 512 * ((usage["prompt_tokens"] - 1) // 512) > 0
            assert server.info()["internal_states"][0]["hybrid"]["grid"] == 512
        assert f"curl -s {server.url}/v1/chat/completions" in server.log_since(), "it says what to try"
    finally:
        server.stop()
