"""SGLang's overlap loop in small, over the real pools, page maps and recurrent layers, on an emulated device.

The order is that of `Scheduler.event_loop_overlap` and `run_batch`: a batch is prepared on the schedule
stream while the previous forward still runs; the forward stream waits for the schedule stream, prepares
metadata, publishes that it has read the shared tables, and runs; results go to the host on the copy stream;
then the schedule stream waits until the tables were read (`_apply_war_barrier`), and the previous batch's
results are processed. Requests are SGLang's `Req`; allocation, tree and release are called as its
scheduler does. The model is one Mamba2 layer and one head of attention over whole pages.
"""

from __future__ import annotations

import random
from array import array
from collections import deque
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_hybrid.engine.cache import GridPrefixCache
from sglang_hybrid.engine.mixer import HybridMamba2Backend
from sglang_hybrid.engine.requests import GridRequests, PageMaps
from sglang_hybrid.engine.tokens import GridTokens
from sglang_hybrid.engine.unit_tails import Poison, UnitTails
from sglang_hybrid.kernels import choose
from sglang_hybrid.kernels.samples import FP32, Mixer, make_cell
from sglang_hybrid.pools.arena import Arenas
from tests.support.planted.whole_page_backend import attend, page_table
from tests.support.streams.device import NAME, Device, Event

MIXER = Mixer(heads=2, dim=8, size=16, groups=1, kv_heads=1, kv_dim=16)
WIDE = MIXER._replace(kv_dim=64)
"""For S2, which packs no conv line that is large beside a page."""
GRID, CONTEXT, ROWS, VOCABULARY, WIDTH = 16, 128, 6, 61, 24
PIECES = {"S1": 4}
"""Sets the budget, 24 where it names none: so little for S1 that checkpoints are evicted all the time."""
PROMPTS = 2
"""Stems that prompts share."""

FORWARD_WAITS = "forward waits for schedule"
TABLES_READ = "schedule waits until tables are read"
COPY_WAITS = "copy waits for forward"
HOST_WAITS = "host waits for copy"
CLEARED = "tails and poison go on the forward stream"
EDGES = (FORWARD_WAITS, TABLES_READ, COPY_WAITS, HOST_WAITS, CLEARED)


class Batch(NamedTuple):
    """What a forward is given, on the device and, where SGLang has it there too, on the host."""

    reqs: list[Any]
    extend: bool
    input_ids: torch.Tensor | None
    rows: torch.Tensor
    seq_lens: torch.Tensor
    slots: torch.Tensor
    host: Any


class Result(NamedTuple):
    batch: Batch
    tokens: torch.Tensor
    on_device: torch.Tensor
    """Their source, which the copy stream still reads."""
    done: Event
    epochs: list[int]


class Model:
    """Weights, and what a layer reads of a `MambaMixer2`."""

    def __init__(self, shape: Mixer) -> None:
        make = torch.Generator().manual_seed(3)

        def weight(*shape: int) -> torch.Tensor:
            return (torch.randn(*shape, generator=make) / shape[0] ** 0.5).to(NAME)

        self.embed = (2 * torch.randn(VOCABULARY, WIDTH, generator=make)).to(NAME)
        self.into = weight(WIDTH, shape.channels + shape.heads)
        self.qkv = weight(WIDTH, 3 * shape.kv_dim)
        self.head = weight(shape.inner + shape.kv_dim, VOCABULARY)
        self.mixer = SimpleNamespace(
            tp_size=1, intermediate_size=shape.inner, groups_ssm_state_size=shape.size, n_groups=1,
            head_dim=shape.dim, activation="silu",
            A=(-0.05 - 0.1 * torch.rand(shape.heads, generator=make)).to(NAME),
            D=weight(shape.heads), dt_bias=weight(shape.heads),
            conv1d=SimpleNamespace(weight=weight(shape.channels, 1, 4), bias=weight(shape.channels)),
        )  # fmt: skip


class Loop:
    """One scheduler. `missing`: edges that are left out."""

    def __init__(self, device: Device, seed: int, memory: str, missing: str | None = None) -> None:
        self.device, self.missing = device, missing
        self.chance = random.Random(seed)
        self.shape = WIDE if memory == "S2" else MIXER
        cell = make_cell(self.shape, memory, FP32, grid=GRID, batch=PIECES.get(memory, 24), conv_dtype=FP32)
        organization = cell.organization
        organization.reset()
        arenas = Arenas(organization.layout(), cell.arenas.shape, cell.arenas.model, NAME)
        self.requests = requests = object.__new__(GridRequests)
        ReqToTokenPool.__init__(requests, ROWS, CONTEXT, NAME, False)
        rows = requests.req_to_token.shape[0]
        requests.organization, requests.arenas, requests.mamba_map = organization, arenas, {0: 0}
        requests.maps = PageMaps(rows, organization.members, NAME)
        requests.states_by_row, requests._requests = [None] * rows, [None] * rows
        requests.batch = None
        requests._forked, requests._unwritten = set(), set()
        requests.tails = UnitTails(organization, arenas)
        requests.tails.poison = Poison(organization, arenas)
        self.tokens = GridTokens(organization, requests, torch.float32, NAME, SimpleNamespace())
        self.cache = GridPrefixCache(requests, self.tokens, enable_metrics=False)
        self.backend: Any = object.__new__(HybridMamba2Backend)
        self.backend.device = NAME
        self.backend.attach(SimpleNamespace(req_to_token_pool=requests))
        self.backend.route = choose("torch", "cpu")
        self.kv = arenas.kv(0)
        self.model = Model(self.shape)
        self.relay = torch.zeros(rows, dtype=torch.int64, device=NAME)
        self.stems = [[self.chance.randrange(VOCABULARY) for _ in range(48)] for _ in range(PROMPTS)]
        self.waiting: list[Any] = []
        self.running: list[Any] = []
        self.left: dict[str, int] = {}
        self.epoch: dict[str, int] = {}
        self.answers: dict[str, list[int]] = {}
        self.results: deque[Result] = deque()
        self.hits = self.retracted = self.steps = 0

    # -- the loop ---------------------------------------------------------------------------

    def run(self, steps: int, right: dict[str, list[int]] | None = None) -> int | None:
        """The step after which a token differed from `right`, None if none did."""
        with self.device.active():
            for _ in range(steps):
                self.step()
                if right is not None and any(
                    tokens != right[rid][: len(tokens)] for rid, tokens in self.answers.items()
                ):
                    return self.steps
        return None

    def step(self) -> None:
        self.steps += 1
        while len(self.waiting) < 2:
            self.arrive()
        batch = self.next_batch()
        before = self.results.popleft() if self.results else None
        if batch is not None:
            self.results.append(self.run_batch(batch))
        if before is not None:
            self.process(before)

    def edge(self, name: str) -> bool:
        return name != self.missing

    def run_batch(self, batch: Batch) -> Result:
        device = self.device
        read, done = Event(device), Event(device)
        if not self.edge(CLEARED):
            tails, route = self.requests.tails, self.backend.route
            tails.clear(route, tails.due(route))
        with device.on(device.forward):
            if self.edge(FORWARD_WAITS):
                device.forward.wait_stream(device.schedule)
            ids = batch.input_ids if batch.input_ids is not None else self.relay[batch.rows]
            table = self.prepare_metadata(batch)
            read.record()
            tokens = self.forward(batch, ids, table)
            self.relay[batch.rows] = tokens
        if self.edge(COPY_WAITS):
            device.copy.wait_stream(device.forward)
        with device.on(device.copy):
            on_host = tokens.to("cpu", non_blocking=True)
            done.record()
        if self.edge(TABLES_READ):
            if batch.extend:
                device.schedule.wait_stream(device.forward)
            else:
                device.schedule.wait_event(read)
        return Result(batch, on_host, tokens, done, [self.epoch[req.rid] for req in batch.reqs])

    def process(self, result: Result) -> None:
        """`process_batch_result`: tokens to their requests, finished ones give everything back."""
        if self.edge(HOST_WAITS):
            result.done.synchronize()
        for req, token, epoch in zip(result.batch.reqs, result.tokens.tolist(), result.epochs):
            if epoch != self.epoch[req.rid]:
                continue  # retracted meanwhile: it is computed again
            req.output_ids.append(token)
            self.answers[req.rid] = list(req.output_ids)
            if result.batch.extend:
                self.cache.checkpoint(req, up_to=result.batch.host[req.rid])
            if self.left[req.rid] == len(req.output_ids):
                req.finished_reason = FINISH_LENGTH(len(req.output_ids))
                self.running.remove(req)
                release_kv_cache(req, self.cache, checkpoint=True)

    # -- the scheduler's choices -------------------------------------------------------------

    def arrive(self) -> None:
        chance = self.chance
        stem = self.stems[chance.randrange(PROMPTS)][: chance.randrange(1, 49)]
        ids = array("q", [*stem, *(chance.randrange(VOCABULARY) for _ in range(chance.randrange(1, 7)))])
        sampling = SamplingParams(max_new_tokens=40)
        sampling.normalize(None)
        req = Req(f"r{len(self.epoch)}", "", ids, sampling, vocab_size=VOCABULARY)
        self.left[req.rid], self.epoch[req.rid] = chance.randrange(2, 30), 0
        self.waiting.append(req)

    def next_batch(self) -> Batch | None:
        """A prefill now and then, else a step of all that have tokens to come; a retraction at times."""
        if len(self.running) > 2 and self.chance.randrange(12) == 0:
            self.retract(self.chance.choice(self.running))
        if len(self.running) < 2 or (len(self.running) < ROWS - 1 and self.chance.randrange(4) == 0):
            return self.prepare_extend(self.waiting.pop(0))
        going = [req for req in self.running if self.coming(req) < self.left[req.rid]]
        return self.prepare_decode(going) if going else None

    def coming(self, req: Any) -> int:
        """Tokens that it has or that a launched forward computes."""
        return int(req.kv.kv_committed_len) - len(req.origin_input_ids) + 1

    def retract(self, req: Any) -> None:
        """`retract_decode`: it loses everything; what a forward in flight computes for it is dropped."""
        self.running.remove(req)
        release_kv_cache(req, self.cache, checkpoint=False)
        req.reset_for_retract()
        self.epoch[req.rid] += 1
        self.waiting.insert(0, req)
        self.retracted += 1

    # -- preparation, on the schedule stream ---------------------------------------------------

    def prepare_extend(self, req: Any) -> Batch:
        """`ScheduleBatch.prepare_for_extend` and `alloc_for_extend` of one request."""
        req.init_next_round_input(self.cache)
        req.lock = self.cache.lock(req.last_node)
        start, end = req.prefix_len, len(req.full_untruncated_fill_ids)
        self.hits += start > 0
        prefix = self.cache.path_device_indices(req.last_node)
        assert self.requests.alloc([req]) is not None
        row = req.kv.req_pool_idx
        starts, ends = torch.tensor([start]), torch.tensor([end])
        slots = self.tokens.alloc_extend(
            starts.to(NAME), starts, ends.to(NAME), ends, starts.to(NAME), end - start
        )
        assert slots is not None
        self.requests.write((row, slice(0, start)), prefix.to(torch.int32))
        self.requests.write((row, slice(start, end)), slots.to(torch.int32))
        self.requests.alloc_aux_to_lengths(req_pool_indices_cpu=torch.tensor([row]), target_seq_lens_cpu=ends)
        req.extend_end = req.kv.kv_committed_len = req.kv.kv_allocated_len = end
        self.running.append(req)
        ids = torch.tensor(req.full_untruncated_fill_ids[start:], dtype=torch.int64)
        host = {req.rid: end, "start": start, "row": torch.tensor([row])}
        return Batch([req], True, ids.to(NAME), torch.tensor([row]).to(NAME), ends.to(NAME), slots, host)

    def prepare_decode(self, reqs: list[Any]) -> Batch:
        """`ScheduleBatch.prepare_for_decode` and `alloc_for_decode`."""
        rows = torch.tensor([req.kv.req_pool_idx for req in reqs])
        lengths = torch.tensor([req.kv.kv_committed_len for req in reqs])
        on_rows, on_lengths = rows.to(NAME), lengths.to(NAME)
        last = self.requests.req_to_token[on_rows, on_lengths - 1]
        slots = self.tokens.alloc_decode(on_lengths + 1, lengths + 1, last)
        assert slots is not None
        self.requests.write((on_rows, on_lengths.clone()), slots.to(torch.int32))
        self.requests.alloc_aux_to_lengths(req_pool_indices_cpu=rows, target_seq_lens_cpu=lengths + 1)
        for req in reqs:
            req.kv.kv_allocated_len += 1
            req.kv.kv_committed_len += 1
        return Batch(list(reqs), False, None, on_rows, on_lengths + 1, slots, {})

    # -- the forward, on its stream ------------------------------------------------------------

    def prepare_metadata(self, batch: Batch) -> torch.Tensor:
        """Page maps of the recurrent layer, and the page table of attention."""
        if batch.extend:
            (req,) = batch.reqs
            start = batch.host["start"]
            self.backend.init_forward_metadata(
                SimpleNamespace(
                    forward_mode=SimpleNamespace(is_decode_or_idle=lambda: False),
                    req_pool_indices_cpu=batch.host["row"],
                    extend_prefix_lens_cpu=[start],
                    extend_seq_lens_cpu=[batch.host[req.rid] - start],
                )
            )
        else:
            self.backend.init_forward_metadata_out_graph(SimpleNamespace(req_pool_indices=batch.rows))
        unit = self.tokens.page_size
        table = page_table(self.requests.req_to_token, batch.rows, batch.seq_lens, unit, CONTEXT // unit)
        return (table[:, :, None] + torch.arange(unit, device=NAME)).flatten(1)

    def forward(self, batch: Batch, ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """The next token of each request."""
        model, maps = self.model, self.backend.forward_metadata
        x = model.embed[ids]
        conv_in, dt = torch.split(x @ model.into, [self.shape.channels, self.shape.heads], 1)
        run = self.backend._extend if batch.extend else self.backend._decode
        y = run(model.mixer, 0, conv_in, dt, maps)
        q, k, v = torch.split(x @ model.qkv, self.shape.kv_dim, 1)
        self.kv[batch.slots] = torch.stack([k, v], 1)[:, :, None].to(self.kv.dtype)
        if batch.extend:
            y, q = y[-1:], q[-1:]
        held = self.kv[table]  # [B, rows of whole pages, 2, 1, dim]
        read = attend(q[:, None, None], held[:, :, 0], held[:, :, 1], batch.seq_lens[:, None], 1.0)
        read = read.flatten(1)
        return (torch.cat([y, read], 1) @ model.head).argmax(1)
