"""`python -m bench.chains`: is the longest chain of a prefill as short as that of the stock kernels?  No GPU.

SGLang's Mamba2 kernels (`mamba_chunk_scan_combined`) are called with the arguments of its own mixer and not
run: every launch is recorded, compiled by the same compiler as ours, and read back from machine code.  They
choose their tiles by timing on a device.  Here each takes the choice with the shortest chain, which no other
choice can beat.

The chain of a launch is what a warp of its longest program issues one after another: instructions, each as
often as its loops come by (`sglang_hybrid.kernels.compiled.Chain`).  Launches of a layer wait for each
other, so their chains add up.  What starting a launch costs is not counted: we have three, they six.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from math import prod
from typing import Any, NamedTuple
from unittest import mock

import torch
from triton.runtime.autotuner import Autotuner, Heuristics
from triton.runtime.jit import JITFunction

from sglang_hybrid.kernels.check import CHAIN_COLUMNS, chain_line
from sglang_hybrid.kernels.compiled import Chain, chain_of, compile_for
from sglang_hybrid.kernels.launch import Launch
from sglang_hybrid.kernels.prefills import PREFILL_TOKENS, PREFILLS, prefill_launches
from sglang_hybrid.kernels.samples import Mixer

MOST = 1.2
"""Our chain by theirs."""
STOCK_CHUNK = {"Falcon-H1-0.5B": 128, "Falcon-H1-7B": 256, "Nemotron-3-Nano-30B": 128}
"""`mamba_chunk_size` of the models' configurations."""


class Recorded(NamedTuple):
    """A launch of a kernel under decorators, not run."""

    kernel: Any
    args: tuple[Any, ...]
    grid: Any
    named: dict[str, Any]

    def choices(self) -> Iterator[Launch]:
        """One launch for each choice of the autotuner that fits the shape; one without an autotuner."""
        inner, configs = self.kernel, [None]
        if isinstance(inner, Autotuner):
            inner.nargs = dict(zip(inner.arg_names, self.args))
            configs = inner.prune_configs(self.named)
            inner.nargs = None
            inner = inner.fn
        heuristics = []
        while isinstance(inner, Heuristics):
            heuristics.append(inner.values)
            inner = inner.fn
        for config in configs:
            args = dict(zip((param.name for param in inner.params), self.args)) | self.named
            warps, stages = args.pop("num_warps", 4), args.pop("num_stages", 3)
            if config is not None:
                args |= config.kwargs
                warps, stages = config.num_warps, config.num_stages
            for values in heuristics:
                args |= {name: decide(args) for name, decide in values.items()}
            args = {param.name: args.get(param.name, param.default) for param in inner.params}
            grid = self.grid(args) if callable(self.grid) else self.grid
            yield Launch(inner, tuple(grid), args, warps, stages, trips=trips(inner.__name__, args))


def trips(kernel: str, args: dict[str, Any]) -> tuple[int, ...]:
    """Loops of a stock kernel's longest program, read from its source."""

    def over(size: str, step: str) -> int:
        return int(-(-args[size] // args[step]))

    if kernel == "_chunk_cumsum_fwd_kernel":
        return ()
    if kernel == "_state_passing_fwd_kernel":
        return (int(args["nchunks"]),)
    if kernel == "_bmm_chunk_fwd_kernel":
        return (over("K", "BLOCK_SIZE_K"),)
    if kernel == "_chunk_scan_fwd_kernel":
        known = () if args["BLOCK_SIZE_DSTATE"] <= 128 else (over("dstate", "BLOCK_SIZE_K"),)
        return (*known, over("chunk_size", "BLOCK_SIZE_K"))
    if kernel in ("_chunk_state_fwd_kernel", "_chunk_state_varlen_kernel"):
        return (over("chunk_size", "BLOCK_SIZE_K"),)
    raise SystemExit(f"{kernel} is a kernel of SGLang's that this bench does not know: read its loops")


def recorded(call: Callable[[], object]) -> list[Recorded]:
    """The launches of `call`, on CPU tensors, none of them run."""
    found: list[Recorded] = []

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **named: Any) -> None:
        found.append(Recorded(kernel, args, grid, named))

    with (
        mock.patch.object(Autotuner, "run", record),
        mock.patch.object(Heuristics, "run", record),
        mock.patch.object(JITFunction, "run", record),
        mock.patch.object(torch, "get_device_module", lambda device: mock.MagicMock()),
    ):
        call()
    return found


def stock_scan(mixer: Mixer, chunk: int) -> list[Recorded]:
    """SGLang's prefill of `PREFILL_TOKENS` of one sequence that resumes from a state."""
    from sglang.kernels.ops.mamba.triton_ops.ssd_combined import mamba_chunk_scan_combined

    heads, dim, size, groups, tokens = mixer.heads, mixer.dim, mixer.size, mixer.groups, PREFILL_TOKENS
    row = torch.zeros(tokens, mixer.channels, dtype=torch.bfloat16)
    x, b, c = torch.split(row, [mixer.inner, groups * size, groups * size], 1)
    chunks = torch.arange(tokens // chunk, dtype=torch.int32)
    return recorded(
        lambda: mamba_chunk_scan_combined(
            x.view(1, tokens, heads, dim), torch.zeros(1, tokens, heads, dtype=torch.bfloat16),
            -torch.ones(heads), b.view(1, tokens, groups, size), c.view(1, tokens, groups, size),
            chunk_size=chunk, D=torch.ones(heads), dt_bias=torch.ones(heads), dt_softplus=True,
            seq_idx=torch.zeros(1, tokens, dtype=torch.int32), chunk_indices=chunks,
            chunk_offsets=torch.zeros_like(chunks), cu_seqlens=torch.tensor([0, tokens], dtype=torch.int32),
            initial_states=torch.zeros(1, heads, dim, size), return_varlen_states=True,
            out=torch.empty(1, tokens, heads, dim, dtype=torch.bfloat16), state_dtype=torch.float32,
        )
    )  # fmt: skip


def shortest(one: Recorded) -> tuple[Launch, Chain]:
    """The choice with the shortest chain on sm_90."""
    chains = [(launch, chain_of(compile_for(launch, 90), launch.trips)) for launch in one.choices()]
    return min(chains, key=lambda pair: pair[1].instructions)


def compare(name: str) -> tuple[list[tuple[Launch, Chain]], list[tuple[Launch, Chain]]]:
    """(our launches, theirs) of a layer of `PREFILLS`, in order, with their chains."""
    mixer = PREFILLS[name]
    ours = [
        (launch, chain_of(compile_for(launch, 90), launch.trips)) for launch in prefill_launches(mixer)
    ]
    return ours, [shortest(one) for one in stock_scan(mixer, STOCK_CHUNK[name.rpartition(" ")[0]])]


def total(launches: list[tuple[Launch, Chain]]) -> int:
    """Chains of launches that wait for each other."""
    return sum(chain.instructions for _, chain in launches)


def main() -> None:
    """Command line; see the module.  Exits 1 when a chain of ours is more than `MOST` times theirs."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.chains", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--only", default="", help="layers whose name contains this (default all)")
    options = parser.parse_args()
    failed = False
    print(CHAIN_COLUMNS)
    for name in PREFILLS:
        if options.only not in name:
            continue
        ours, theirs = compare(name)
        for whose, launches in ((name, ours), ("  stock", theirs)):
            for launch, chain in launches:
                print(chain_line(f"{whose}: {launch.kernel.__name__}", prod(launch.grid), chain))
        share = total(ours) / total(theirs)
        failed |= share > MOST
        print(f"{name}: {total(ours)} instructions, stock {total(theirs)}, {share:.2f}\n", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
