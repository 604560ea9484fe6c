"""What a batch brings from the host to the device: how many copies, and that none of them waits.

The pools and the metadata take themselves for a GPU's.  Whatever goes to "cuda" by `Tensor.to` is counted and
stays on the CPU; any other way there fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("sglang")

from sglang_hybrid.engine.page_maps import PageMapMetadata
from sglang_hybrid.engine.requests import GridRequests, PageMaps
from sglang_hybrid.engine.tokens import GridTokens
from sglang_hybrid.engine.unit_tails import UnitTails
from sglang_hybrid.kernels import Segments, upload
from sglang_hybrid.kernels.samples import SAMPLES
from sglang_hybrid.pools.leftovers import Leftovers
from sglang_hybrid.radix.memory import Memory, Publication

GRID, UNIT = 512, 256
MOST_COPIES, MOST_OPERATIONS = 2, 30
BATCHES = {
    "100 tokens behind a hit": ((100,), (7680,)),
    "8K tokens": ((8192,), (0,)),
    "128K tokens": ((131072,), (512,)),
    "16 requests": ((512,) * 16, (0, 512) * 8),
    "60 requests": (tuple(range(1, 61)), tuple(range(60))),
}


class Copies(TorchDispatchMode):
    """(pinned, waits) of every copy to the device, and every operation."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[bool, bool]] = []
        self.operations: list[str] = []
        self._pinned: list[torch.Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.operations.append(str(func.overloadpacket.__name__))
        return func(*args, **(kwargs or {}))

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        pinned = tensor.clone()
        self._pinned.append(pinned)
        return pinned

    def copy(self, tensor: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        self.made.append((any(tensor is one for one in self._pinned), not non_blocking))
        return tensor.clone()


@contextmanager
def counting() -> Iterator[Copies]:
    """Count the copies and operations of a block."""
    copies, convert = Copies(), torch.Tensor.to

    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if str(kwargs.get("device", args[0] if args else "")).startswith("cuda"):
            return copies.copy(tensor, kwargs.get("non_blocking", False))
        return convert(tensor, *args, **kwargs)

    def on_host(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def made(*args: Any, **kwargs: Any) -> torch.Tensor:
            device = str(kwargs.pop("device", "cpu"))
            if device.startswith("cuda"):
                copies.made.append((False, True))
            return make(*args, **kwargs)

        return made

    with (
        mock.patch.object(torch.Tensor, "to", to),
        mock.patch.object(torch.Tensor, "pin_memory", lambda tensor: copies.pin(tensor)),
        mock.patch.object(torch, "tensor", on_host(torch.tensor)),
        mock.patch.object(torch, "as_tensor", on_host(torch.as_tensor)),
        copies,
    ):
        yield copies


def checkpoint(number: int) -> Any:
    return SimpleNamespace(members=(10 * number, 10 * number + 1), line=number, pages=())


class Batch:
    """Requests in rows 1, 2, ..., that extend from `begins` by `lengths`, with units up to their begins.

    Every unit that they get held a state before: its rows behind the tokens have to be cleared.
    """

    def __init__(self, lengths: tuple[int, ...], begins: tuple[int, ...]) -> None:
        self.lengths, self.begins = lengths, begins
        self.rows = list(range(1, len(lengths) + 1))
        units = iter(range(1, 10**6))
        leftovers = Leftovers()

        def allocate_units(count: int) -> list[int]:
            fresh = [next(units) for _ in range(count)]
            leftovers.became_state(fresh)
            leftovers.became_unit(fresh)
            return fresh

        organization: Any = SimpleNamespace(
            grid=GRID, unit_tokens=UNIT, slots_per_unit=UNIT, token_capacity=lambda: 10**6,
            allocate_units=allocate_units, units_free=lambda: 10**4, units_allocated=0, leftovers=leftovers,
        )  # fmt: skip
        self.states = [
            SimpleNamespace(
                units=[next(units) for _ in range(-(-begin // UNIT))], lease=SimpleNamespace(adopted=None),
                live=checkpoint(row), source=checkpoint(100 + row) if row % 2 else None,
                boundaries=[(depth, checkpoint(200 + row)) for depth in range(GRID, begin + length, GRID)],
            )
            for row, begin, length in zip(self.rows, begins, lengths, strict=True)
        ]  # fmt: skip
        self.requests = object.__new__(GridRequests)
        self.requests.organization = organization
        self.requests.tails = object.__new__(UnitTails)
        self.requests.tails.organization, self.requests.tails.poison = organization, None
        self.requests.tails.table, self.requests.tails.row_bytes = None, 64
        self.requests.maps = PageMaps(len(lengths) + 1, 2, "cpu")
        self.requests.state = lambda row: self.states[row - 1]
        self.requests._forked, self.requests._unwritten = set(), set()
        self.requests._request = lambda row: row
        memory: Any = object.__new__(Memory)
        memory.organization, memory.unit_tokens, memory._step_units = organization, UNIT, []
        memory.lifetime = SimpleNamespace(make_room=lambda need: True)
        memory.publish = lambda *one: ()
        memory.live = SimpleNamespace(
            begin=lambda *args: None, extend=lambda *args: None,
            settle=lambda state: state.__dict__.update(source=None),
        )  # fmt: skip
        cache: Any = SimpleNamespace(
            memory=memory, changed=lambda: None, published=lambda row, duplicates: None,
            publication=lambda row, start: Publication(self.requests.state(row), b"", 0, start),
        )  # fmt: skip
        self.requests.connect(cache)
        self.tokens = GridTokens(organization, self.requests, torch.float32, "cpu", SimpleNamespace())
        self.tokens.connect(cache)
        self.backend: Any = object.__new__(PageMapMetadata)
        self.backend.requests, self.backend.device = self.requests, "cuda"
        self.cleared: list[tuple[int, int]] = []
        self.backend.route = SimpleNamespace(fill_rows=self.fill_rows)
        self.backend._static = self.backend._buffers(len(lengths) + 1)
        self.tokens.device = self.requests.maps.device = "cuda"

    def fill_rows(self, table: Any, runs: Any, row_bytes: int, fill: str, placed: Any = None) -> None:
        """As Triton's does: one launch over numbers that are on the device."""
        if placed is None:
            placed = upload(torch.tensor(runs), "cuda")
        assert placed.flatten().tolist() == [number for run in runs for number in run]
        self.cleared += runs

    def extend(self) -> tuple[torch.Tensor, Any]:
        """What SGLang calls for an extend batch, in its order: slots, states, metadata."""
        begins = torch.tensor(self.begins)
        ends = begins + torch.tensor(self.lengths)
        rows = torch.tensor(self.rows)
        self.requests.batch = [
            SimpleNamespace(kv=SimpleNamespace(req_pool_idx=row), prefix_len=begin)
            for row, begin in zip(self.rows, self.begins, strict=True)
        ]
        slots = self.tokens.alloc_extend(begins, begins, ends, ends, begins, sum(self.lengths))
        assert slots is not None
        self.requests.alloc_aux_to_lengths(req_pool_indices_cpu=rows, target_seq_lens_cpu=ends)
        self.backend.init_forward_metadata(
            SimpleNamespace(
                forward_mode=SimpleNamespace(is_decode_or_idle=lambda: False),
                req_pool_indices_cpu=rows, extend_prefix_lens_cpu=list(self.begins),
                extend_seq_lens_cpu=list(self.lengths),
            )
        )  # fmt: skip
        return slots, self.backend.forward_metadata

    def decode(self, lengths: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """What SGLang calls for the decode step that makes the requests `lengths` long."""
        rows = torch.tensor(self.rows)
        slots = self.tokens.alloc_decode(lengths, lengths, last)
        assert slots is not None
        self.requests.alloc_aux_to_lengths(req_pool_indices_cpu=rows, target_seq_lens_cpu=lengths)
        self.backend.init_forward_metadata(
            SimpleNamespace(
                forward_mode=SimpleNamespace(is_decode_or_idle=lambda: True), req_pool_indices=rows
            )
        )
        return slots


@pytest.mark.parametrize("name", BATCHES)
def test_an_extend_batch_is_two_copies_that_nothing_waits_for(name: str) -> None:
    """Of any length and any number of requests: slots, and metadata of all layers."""
    batch = Batch(*BATCHES[name])
    with counting() as copies:
        slots, maps = batch.extend()
    inputs = 5  # what `extend` itself makes of host lists
    assert copies.made and len(copies.made) <= MOST_COPIES
    assert all(pinned and not waits for pinned, waits in copies.made)
    spans = [(begin, begin + length) for begin, length in zip(batch.begins, batch.lengths, strict=True)]
    tails = [end for begin, end in spans if end % UNIT and -(-end // UNIT) > -(-begin // UNIT)]
    assert len(batch.cleared) == len(tails)
    assert len(copies.operations) - inputs <= MOST_OPERATIONS, copies.operations
    want: list[int] = []
    for state, begin, length in zip(batch.states, batch.begins, batch.lengths, strict=True):
        want += [
            state.units[position // UNIT] * UNIT + position % UNIT
            for position in range(begin, begin + length)
        ]
    assert slots.tolist() == want
    assert maps.segments.tokens == len(want) and maps.dst_pages.dtype == torch.int32


def test_a_decode_step_waits_for_no_copy() -> None:
    """Three requests go on, two of them into new units, one of these over a boundary; then none."""
    batch = Batch((100, 256, 511), (0, 0, 1))
    with counting():
        batch.extend()
    with counting() as copies:
        slots = batch.decode(torch.tensor([101, 257, 513]), torch.tensor([1000, 2000, 3000]))
    assert copies.made == [(True, False)] * 3  # slots, what to clear, maps
    assert slots[0] == 1001 and slots[1] % UNIT == slots[2] % UNIT == 0
    maps = batch.backend.forward_metadata
    # Settled, unchanged, and a fork: what it reads is what `begin` left it.
    assert maps.src_lines.tolist() == [1, 2, 103] and maps.dst_lines.tolist() == [1, 2, 3]
    with counting() as copies:  # the fork settles
        batch.decode(torch.tensor([102, 258, 514]), slots)
    assert copies.made == [(True, False)]
    with counting() as copies:
        batch.decode(torch.tensor([103, 259, 515]), slots)
    assert not copies.made


def test_maps_of_a_prefill_are_written_when_a_decode_step_needs_them() -> None:
    """Chunk after chunk costs no table write; the first decode step writes each row, later ones none."""
    batch = Batch((512, 512), (0, 512))
    before = batch.requests.maps.dst_lines.clone()
    with counting():
        for _ in range(3):
            batch.extend()
    assert torch.equal(batch.requests.maps.dst_lines, before)
    with counting():
        batch.decode(torch.tensor([514, 1026]), torch.tensor([1000, 2000]))
    assert batch.requests.maps.dst_lines.tolist() == [0, 1, 2]
    assert not batch.requests._unwritten


LAZY = (
    "token_seq", "token_position", "token_slot", "piece_mask", "piece_tokens", "rounds",
    "_flat", "_token_piece",
)  # fmt: skip


@pytest.mark.parametrize("sample", [name for name in SAMPLES if name.startswith("paged_")])
def test_launches_need_only_what_was_copied(sample: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is derived on the device is derived for the torch route."""

    def derived(segments: Segments) -> torch.Tensor:
        raise AssertionError("a launch asked for a derived tensor")

    for name in LAZY:
        monkeypatch.setattr(Segments, name, property(derived))
    SAMPLES[sample]()


def test_a_copy_is_pinned_only_where_there_is_a_gpu() -> None:
    values = torch.tensor([1, 2])
    assert upload(values, "cpu") is values
    with counting() as copies:
        upload(values, "cuda:0")
    assert copies.made == [(True, False)]


def test_the_count_sees_what_waits() -> None:
    with counting() as copies:
        torch.tensor([1], device="cuda")
        torch.tensor([1]).to("cuda", non_blocking=True)
        torch.tensor([1]).to("cuda")
    assert copies.made == [(False, True), (False, False), (False, True)]
