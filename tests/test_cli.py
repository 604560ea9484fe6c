"""The console script."""

import subprocess
import sys

from sglang_hybrid import __version__


def run(*args: str) -> subprocess.CompletedProcess[str]:
    """`sglang-hybrid ARGS` in this environment."""
    return subprocess.run(
        [sys.executable, "-m", "sglang_hybrid.cli.main", *args], capture_output=True, text=True, timeout=120
    )


def test_help_names_every_command() -> None:
    done = run("--help")
    assert done.returncode == 0, done.stderr
    assert "demo-model" in done.stdout


def test_version() -> None:
    assert run("--version").stdout == f"sglang-hybrid {__version__}\n"


def test_no_command_is_a_usage_error() -> None:
    assert run().returncode == 2
