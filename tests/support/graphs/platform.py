"""The CPU platform with decode graphs: SGLang's own runner over recordings.

A test server has it where the environment sets `SWITCH`; its entry point lies in `tests/support/planted`.
SGLang's own choice by name, `SGLANG_PLATFORM`, leaves out every plugin that brings another platform: ours.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from sglang.srt.platforms.interface import PlatformCapabilities

from sglang_hybrid.platforms import cpu_platform
from sglang_hybrid.platforms.cpu_platform import HybridCpuPlatform
from sglang_hybrid.platforms.replace import replace_functions

SWITCH = "SGLANG_HYBRID_TEST_GRAPHS"


def activate() -> None:
    """Put ours under the name by which the plugin's platform is resolved, whichever is asked first."""
    if os.environ.get(SWITCH) == "1":
        cpu_platform.HybridCpuPlatform = RecordedGraphsPlatform  # type: ignore[misc]


def get_current_device_stream_fast() -> Any:
    return torch.cpu.current_stream()


class RecordedGraphsPlatform(HybridCpuPlatform):
    """Captures decode steps as on a GPU; prefills run eagerly, as the plugin has it everywhere."""

    capabilities = PlatformCapabilities(graph_capture=True)

    def get_graph_runner_cls(self) -> type:
        from tests.support.graphs.runner import RecordedGraphRunner

        return RecordedGraphRunner

    def get_full_graph_backend_cls(self) -> type:
        from tests.support.graphs.runner import RecordingBackend

        return RecordingBackend

    def init_backend(self) -> None:
        super().init_backend()
        # Without arguments torch.get_device_module() is the module torch was built for, not the one in use.
        replace_functions({"sglang.srt.utils.common": (get_current_device_stream_fast,)})

    def post_load_model(self, model: torch.nn.Module) -> None:
        """`capture_decode_graph` captures on a CPU only under this flag; the runner takes it back at once."""
        from sglang.srt.runtime_context import get_flags

        get_flags().capture.enable_torch_compile = True
