"""Which pages a prefill reads and writes, by what each request stands on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang_hybrid.engine.page_maps import PageMapMetadata
from sglang_hybrid.engine.requests import GridRequests, PageMaps

NOWHERE = ([-1, -1], -1)


def piece(number: int) -> Any:
    """A checkpoint of two pages."""
    return SimpleNamespace(members=(10 * number, 10 * number + 1), line=number, pages=())


def request(live: int, source: int | None = None, **boundaries: int) -> Any:
    """A request's states, by the numbers of their pieces."""
    planned = [(int(depth[1:]), piece(number)) for depth, number in boundaries.items()]
    return SimpleNamespace(
        live=piece(live), source=None if source is None else piece(source), boundaries=planned
    )


def test_sources_and_destinations_of_a_prefill() -> None:
    """Fresh: nothing is read, the boundary and the end are written.  A chunk that goes on: its live state is
    read and written.  Behind a hit: the checkpoint is read, the boundary without memory is written nowhere,
    and one beyond this chunk is not written yet.  An end on a boundary is the live state, whatever was
    planned there."""
    states = {
        3: request(1, d8=2),
        5: request(3),
        4: request(5, 6, d32=7),
        9: request(8, d8=9),
    }
    requests = object.__new__(GridRequests)
    requests.organization = SimpleNamespace(grid=8)
    requests.maps = PageMaps(16, 2, "cpu")
    requests.state = states.__getitem__
    backend: Any = object.__new__(PageMapMetadata)
    backend.requests, backend.device = requests, "cpu"
    backend.route, requests.tails = None, SimpleNamespace(due=lambda route: [])
    backend.init_forward_metadata(
        SimpleNamespace(
            forward_mode=SimpleNamespace(is_decode_or_idle=lambda: False),
            req_pool_indices_cpu=torch.tensor([3, 5, 4, 9]),
            extend_prefix_lens_cpu=[0, 8, 16, 0],
            extend_seq_lens_cpu=[11, 3, 9, 8],
        )
    )
    maps = backend.forward_metadata
    assert maps.segments.emissions == ((0, 8), (0, 11), (1, 11), (2, 24), (2, 25), (3, 8))
    read = list(zip(maps.src_pages.tolist(), maps.src_lines.tolist(), strict=True))
    written = list(zip(maps.dst_pages.tolist(), maps.dst_lines.tolist(), strict=True))
    assert read == [NOWHERE, ([30, 31], 3), ([60, 61], 6), NOWHERE]
    assert written == [([20, 21], 2), ([10, 11], 1), ([30, 31], 3), NOWHERE, ([50, 51], 5), ([80, 81], 8)]
