"""Resolve SGLang's arguments in this process, as the launcher would, without starting anything."""

import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sglang_hybrid.cli.demo_families import FALCON_H1, DemoFamily

ROOT = Path(__file__).resolve().parents[2]


def write_config(
    directory: Path, architecture: str | None = None, family: DemoFamily = FALCON_H1, **changes: Any
) -> str:
    """A model directory with config.json alone: whoever looks for weights there must fail."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        **family.config(family.shape),
        "model_type": family.model_type,
        "architectures": [architecture or family.model],
        "dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps({**config, **changes}))
    return str(directory)


@contextmanager
def kept_process() -> Iterator[None]:
    """Undo what parsing and resolution do to a process: root logger, environment, exception hook."""
    root = logging.getLogger()
    handlers, level, hook, environment = list(root.handlers), root.level, sys.excepthook, dict(os.environ)
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        sys.excepthook = hook
        os.environ.clear()
        os.environ.update(environment)


def parse(*argv: str) -> Any:
    """The record of a command line, not resolved."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.server_args import prepare_server_args

    return prepare_server_args(list(argv))


def resolved(*argv: str) -> Any:
    """The record of a command line after resolution.  Raises what the launcher would."""
    record = parse(*argv)
    record.resolve_once()
    return record


def view(record: Any) -> Any:
    """The values in effect."""
    from sglang.srt.arg_groups.overrides import resolving_view

    return resolving_view(record)


def python(*argv: str, path: Path | None = None, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """Run a fresh interpreter in an empty place; `path` goes in front of its module search path."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    parts = [str(path)] if path else []
    environment["PYTHONPATH"] = os.pathsep.join([*parts, str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, *argv]
    with tempfile.TemporaryDirectory() as place:  # -m searches the current folder first
        return subprocess.run(
            command, cwd=place, env=environment, capture_output=True, text=True, timeout=timeout
        )


def plant_plugin(site: Path, body: str) -> Path:
    """A second plugin that SGLang finds before ours, with this function body; returns the search path."""
    info = site / "planted-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nplanted = planted_plugin:plant\n")
    lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
    (site / "planted_plugin.py").write_text(f"def plant():\n{lines}\n")
    return site
