"""SGLang's argument resolution as on a CUDA machine, on a machine without a GPU.

Run as a program in a process of its own: modules that SGLang imports meanwhile keep what they found, and
another test's process must stay one of a CPU.  `resolve_on_gpu` is the way in.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from tests.support.arguments import kept_process, parse, python, view

MACHINES: dict[str, dict[str, Any]] = {
    name: {
        "is_cuda": True,
        "has_flashinfer": True,
        "is_sm90": sm == 90,
        "is_hopper_with_cuda_12_3": sm == 90,
        "is_sm100": sm == 100,
        "is_sm100_or_sm110": sm == 100,
        "is_blackwell": sm == 100,
        "is_sm110": False,
        "is_sm120": False,
        "device_sm": sm,
        "device_capability": (sm // 10, sm % 10),
    }
    for name, sm in (("sm_80", 80), ("sm_90", 90), ("sm_100", 100))
}
"""Facts of `sglang.srt.runtime_context.PlatformFacts` for an A100, an H100 and a B200."""
MACHINES["sm_90 without flashinfer"] = {**MACHINES["sm_90"], "has_flashinfer": False}

MEMORY_MIB = 80 * 1024


class Case(NamedTuple):
    """A start: machine by name, folder with a config.json, arguments, environment beside the process's."""

    machine: str
    model: str
    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()


class Outcome(NamedTuple):
    """`refused` is the sentence, or what another error says; the rest is what resolution decided."""

    refused: str | None
    attention: tuple[str, str]
    """Of prefill and of decode."""
    page: int
    grid: int | None
    prefill_graph: str
    decode_graph: str
    overlap: bool
    chunk: int
    kv_dtype: str
    log: list[str]
    """Messages of this package."""


def resolve_on_gpu(cases: Sequence[Case]) -> list[Outcome]:
    """Resolve all of them, one after another, in one fresh process."""
    ended = python("-m", "tests.support.gpu_resolution", json.dumps(cases), timeout=600)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return [Outcome(**found) for found in json.loads(ended.stdout.splitlines()[-1])]


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname}: {record.getMessage()}")


def _resolve(case: Case) -> dict[str, Any]:
    import os

    import torch
    from sglang.srt.arg_groups.overrides import attention_backends_of, resolved_view
    from sglang.srt.runtime_context import override_platform
    from sglang.srt.utils import common

    log = _Kept()
    ours = logging.getLogger("sglang_hybrid")
    with (
        kept_process(),
        override_platform(**MACHINES[case.machine]),
        mock.patch.dict(os.environ, dict(case.env)),
        mock.patch.object(torch.cuda, "is_available", lambda: True),
        mock.patch.object(common, "get_device", lambda *args, **kwargs: "cuda"),
        mock.patch.object(common, "get_device_memory_capacity", lambda device: MEMORY_MIB),
    ):
        ours.addHandler(log)
        try:
            record = parse(
                "--model-path", case.model, "--skip-tokenizer-init", "--device", "cuda", *case.argv
            )
            record.resolve_once()
        except (Exception, SystemExit) as error:
            return Outcome(
                f"{type(error).__name__}: {error}", ("", ""), 0, None, "", "", False, 0, "", log.lines
            )._asdict()
        finally:
            ours.removeHandler(log)
        now = view(record)
        graphs = now.cuda_graph_config
        return Outcome(
            None,
            attention_backends_of(resolved_view(record)),
            now.page_size,
            now.hybrid_grid,
            str(graphs.prefill.backend),
            str(graphs.decode.backend),
            not now.disable_overlap_schedule,
            now.chunked_prefill_size,
            now.kv_cache_dtype,
            log.lines,
        )._asdict()


def main() -> None:
    import sglang.srt.platforms as platforms
    from sglang.srt.platforms.cuda import CudaSRTPlatform

    platforms._current_platform = CudaSRTPlatform()
    # sgl_kernel's loader asks the driver where torch says that there is a GPU: imported before it does.
    import sglang.srt.arg_groups.pipeline
    import sglang.srt.plugins
    import sglang.srt.server_args  # noqa: F401

    print(json.dumps([_resolve(Case(*case)) for case in json.loads(sys.argv[1])]))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    main()
