"""Faults of captured decode steps: each is in while a file of its name lies in the folder of faults."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sglang_hybrid.pools.views import NO_LINE, SINK_PAGE

STALE = "graph-stale-maps"
"""A replay prepares no page maps: the static buffers hold those of an earlier batch."""
BAKED = "graph-baked-maps"
"""The page maps of the capture are numbers in the graph, instead of buffers that it reads."""
PADDING = "graph-padding-writes"
"""A padding row names the first request's pages, instead of the sink."""


class Baking:
    """Whether a graph is being captured with `BAKED`."""

    now = False


def plant(folder: Path) -> None:
    """Wrap the page maps of every state backend; before they are built."""
    from sglang_hybrid.engine.gdn_mixer import HybridGDNBackend
    from sglang_hybrid.engine.mixer import HybridMamba2Backend
    from sglang_hybrid.engine.page_maps import PageMapMetadata

    prepare, gather = PageMapMetadata.init_forward_metadata_out_graph, PageMapMetadata._decode_maps

    def init_forward_metadata_out_graph(self: Any, forward_batch: Any, in_capture: bool = False) -> None:
        if in_capture or not (folder / STALE).exists():
            prepare(self, forward_batch, in_capture)

    def decode_maps(self: Any, rows: torch.Tensor) -> Any:
        if (folder / PADDING).exists():
            rows = torch.where(rows == 0, rows[0], rows)
        return gather(self, rows)

    PageMapMetadata.init_forward_metadata_out_graph = init_forward_metadata_out_graph  # type: ignore[method-assign]
    PageMapMetadata._decode_maps = decode_maps  # type: ignore[method-assign]
    for backend in (HybridMamba2Backend, HybridGDNBackend):
        backend._decode = baking(backend._decode)  # type: ignore[method-assign]


def baking(decode: Callable[..., Any]) -> Callable[..., Any]:
    """A layer's decode step; while a faulty graph is captured, its page maps are constants.

    Those that the host knows then: every row is the padding row, without a source, with the sink as its
    destination.
    """

    def decode_baked(self: Any, *args: Any) -> Any:
        if not Baking.now:
            return decode(self, *args)
        maps = self.forward_metadata
        constants = (NO_LINE, NO_LINE, SINK_PAGE, SINK_PAGE)
        baked = type(maps)(*(torch.full_like(held, value) for held, value in zip(maps, constants)))
        self.forward_metadata = baked
        try:
            return decode(self, *(baked if arg is maps else arg for arg in args))
        finally:
            self.forward_metadata = maps

    return decode_baked
