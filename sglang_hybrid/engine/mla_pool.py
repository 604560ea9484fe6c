"""Latent KV (MLA) in an organization's pages: a row a token and layer, the keys; its front is the values."""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

from sglang_hybrid.pools.arena import Arenas


class GridMLAPool(MLATokenToKVPool):
    """Latent rows of the attention layers as views of the arenas, `[slots, 1, rank + rope dim]` a layer."""

    def __init__(self, *, arenas: Arenas, **kwargs: Any) -> None:
        self.arenas = arenas
        super().__init__(**kwargs)

    def _create_buffers(self) -> None:
        # SGLang writes bytes where it has no arithmetic of the dtype (fp8); `get_key_buffer` views them back.
        self.kv_buffer = [
            self.arenas.kv(arena)[:, 0].view(self.store_dtype) for arena in range(self.layer_num)
        ]

    def _clear_buffers(self) -> None:
        del self.kv_buffer

    def get_kv_size_bytes(self) -> int:
        """Bytes of the arenas, which also hold recurrent state."""
        return sum(buffer.numel() for buffer in self.arenas.kv_buffers)
