"""The platform class that `platforms.cpu.activate` names; imports SGLang.

It decides defaults only.  Whatever the user wrote on the command line stays.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from sglang_hybrid.engine.seams import check_replaced
from sglang_hybrid.platforms import (
    gdn_ops,
    host_memory,
    kda_ops,
    lightning_ops,
    moe_ops,
    snapshot_ops,
    stock_ops,
)

TRITON_LORA = "csgmv"
"""SGLang's default for `--lora-backend`, a Triton kernel."""
CONV_DTYPE_SWITCH = "SGLANG_MAMBA_CONV_DTYPE"

POOL_BYTES = 2 << 30
"""Memory for pools when the user names none.  SGLang's own rule takes most of the machine's free memory,
and touching that much takes a CPU longer than everything else at start-up."""

logger = logging.getLogger(__name__)


def weight_bytes(model_path: str) -> int | None:
    """Bytes of the weight files in a local checkpoint folder, None where there are none to see."""
    files = [path for kind in ("*.safetensors", "*.bin") for path in Path(model_path).glob(kind)]
    return sum(path.stat().st_size for path in files) or None


def text_config(server_args: Any) -> Any | None:
    """The checkpoint's config.json, None where it cannot be read.

    Source symbol: `_get_and_verify_dtype` of `sglang.srt.configs.model_config`, which reads the
    same two places.
    """
    from sglang.srt.utils.hf_transformers_utils import get_config

    try:
        config = get_config(
            server_args.model_path,
            trust_remote_code=server_args.trust_remote_code,
            revision=server_args.revision,
        )
    except Exception:  # a default must not be what stops the start; SGLang reports the config itself
        logger.debug("config of %s could not be read", server_args.model_path, exc_info=True)
        return None
    return getattr(config, "text_config", None) or config


def checkpoint_dtype(config: Any | None) -> torch.dtype | None:
    """Dtype that a config names, None where it names none."""
    dtype = getattr(config, "dtype", None)
    return getattr(torch, dtype, None) if isinstance(dtype, str) else dtype


class HybridCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """CPU through torch-native operations: no compiled SGLang kernels, no graphs, no Triton."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()
    takes_snapshots = False

    def get_device(self, device_id: int = 0) -> str:
        """A string, unlike the mixin's: `handle_missing_default_values` splits it at the colon."""
        return "cpu"

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        return "native"

    def support_mamba_cache_extra_buffer(self) -> bool:
        """Whether the model is a Mamba2 one: those of the gated delta rule have no snapshots here."""
        return self.takes_snapshots

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.CPU

    def init_backend(self) -> None:
        """Called once in each worker, before any model is built.

        Raises:
            SeamError: a function that is replaced here is not the one that was replaced in our tests.
        """
        check_replaced()
        stock_ops.install()
        gdn_ops.install()
        kda_ops.install()
        lightning_ops.install()
        snapshot_ops.install()
        host_memory.install()
        moe_ops.install()

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Defaults for whatever the user left open (`handle_platform_defaults` declares them).

        Attention backend, sampler and LoRA; the one state strategy that works here; a modest amount of
        memory; and fp32 where the checkpoint is fp32 (SGLang's automatic choice would be fp16, which
        a CPU computes slowly and less exactly), with the conv window in the same dtype.

        Called in the process that will take requests: what it must refuse here is put in place, too.
        """
        from sglang_hybrid.platforms import cpu_routes

        cpu_routes.install()
        if server_args.attention_backend is None:
            server_args.attention_backend = self.get_default_attention_backend()
        server_args.sampling_backend = "pytorch"
        if server_args.lora_backend == TRITON_LORA:
            server_args.lora_backend = "torch_native"
        if server_args.mamba_radix_cache_strategy == "auto":
            # The automatic choice is extra_buffer as soon as overlap is on, whatever the platform
            # says it can do; without overlap it is no_buffer.
            server_args.disable_overlap_schedule = True
        config = text_config(server_args)
        self.takes_snapshots = hasattr(config, "mamba_d_state")
        weights = weight_bytes(server_args.model_path)
        if server_args.mem_fraction_static is None and weights is not None:
            # A fraction of what is free now covers weights and pools (KVCacheConfigurator).
            free, _ = self.get_available_memory()
            server_args.mem_fraction_static = round(min(0.8, (weights + POOL_BYTES) / free), 3)
        if server_args.dtype == "auto" and checkpoint_dtype(config) == torch.float32:
            server_args.dtype = "float32"
        if server_args.dtype in ("float", "float32"):
            # Read from the environment by mamba2_state_dtype, here and in every child.
            os.environ.setdefault(CONV_DTYPE_SWITCH, "float32")
