"""`python -m bench.kernels`: kernels on a GPU, against contiguous state, FlashInfer and a plain copy.

Every figure is the median over replays of a captured graph whose launches each touch checkpoints of their
own, on shuffled pages, after the cache was flushed: state is cold, as it is between two decode steps.
Bytes are state in and state out, in a prefill also tokens in and out; their share of the measured copy
bandwidth is what a kernel can be judged by.  Each variant is compared with the torch route before it is
timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch

from bench.kernel_cases import OPERATIONS, PREFILL_TOKENS, check, make_case, sets_for
from sglang_hybrid.kernels import KernelError, choose
from sglang_hybrid.kernels.samples import FALCON_H1_7B, QWEN3_NEXT, Mixer

BF16, FP32 = torch.bfloat16, torch.float32
SHAPES: dict[str, tuple[Mixer, torch.dtype]] = {
    "Falcon-H1-7B bf16": (FALCON_H1_7B, BF16),
    "Falcon-H1-7B fp32": (FALCON_H1_7B, FP32),
    "Qwen3-Next fp32": (QWEN3_NEXT, FP32),
    "Qwen3-Next bf16": (QWEN3_NEXT, BF16),
}
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MEMORIES = ("D0", "S0", "S1", "S2")
"""D0 is the contiguous case: a checkpoint is one run of bytes."""
FLUSH_BYTES = 256 << 20
REPLAYS = 20
LARGE = 64
"""Batch from which a step should run at the speed of a copy."""
MOST_PREFILLS = 16
"""Requests of the largest prefill, `PREFILL_TOKENS` each."""


class Result(NamedTuple):
    """One variant at one batch size; `copy_share` is of the measured copy bandwidth."""

    operation: str
    shape: str
    variant: str
    batch: int
    median_us: float
    gb_per_s: float
    copy_share: float


def median_us(run: Callable[[int], object], sets: int) -> float:
    """Microseconds of one launch: `run(i)` for all sets in one graph, cache flushed before each replay."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    for index in range(sets):
        run(index)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(sets):
            run(index)
    times = []
    for _ in range(REPLAYS + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / sets)
    return statistics.median(times[3:])


def copy_bandwidth() -> float:
    """Bytes read and written a second by a device-to-device copy of 2 GiB: what the card can do."""
    source = torch.empty(2 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / (median_us(lambda _: target.copy_(source), 1) * 1e-6)


def variants(operation: str, memory: str) -> Iterator[tuple[str, bool, str]]:
    """(name, forked, route).  FlashInfer has the state update alone: contiguous, and a launch a member."""
    for route in ("triton", "flashinfer") if operation == "state_update" else ("triton",):
        name = memory if route == "triton" else f"FlashInfer {memory}"
        if OPERATIONS[operation].in_place:
            yield f"{name} in place", False, route
        yield f"{name} forked", True, route


def measure(
    operation: str, shape: str, batches: list[int], bandwidth: float, device: str = "cuda"
) -> Iterator[Result]:
    """All variants of an operation at one shape."""
    mixer, dtype = SHAPES[shape]
    reference = choose("torch", device)
    step, request_bytes, prefill, _, written, _ = OPERATIONS[operation]
    tokens = PREFILL_TOKENS if prefill else None
    moved = request_bytes(mixer, dtype)
    for batch in batches:
        if prefill and batch > MOST_PREFILLS:
            continue
        sets = sets_for(mixer, dtype, batch, moved)
        for memory in MEMORIES:
            case = make_case(mixer, dtype, memory, batch, sets, tokens=tokens, device=device)
            for name, forked, route in variants(operation, memory):
                try:
                    chosen = choose(route, device)
                    run = partial(step, case, chosen)
                    if batch == batches[0]:
                        few = make_case(mixer, dtype, memory, min(batch, 8), 2, tokens=tokens, device=device)
                        right = partial(step, few, reference, 0, forked)
                        check(few, written or dtype, partial(step, few, chosen, 0, forked), right)
                    time = median_us(partial(run, forked=forked), sets)
                except (ImportError, OSError, RuntimeError, KernelError) as error:
                    if route == "triton":
                        raise
                    print(f"{name} does not run here: {error}", file=sys.stderr)  # it compiles at first use
                    continue
                rate = batch * moved / (time * 1e-6)
                yield Result(operation, shape, name, batch, time, rate / 1e9, rate / bandwidth)
            del case, run
            if device == "cuda":
                torch.cuda.empty_cache()


def served(operation: str, shape: str) -> bool:
    """Whether layers of this shape have this operation."""
    return OPERATIONS[operation].delta in (None, SHAPES[shape][0].delta)


def summary(results: list[Result]) -> Iterator[str]:
    """Worst case of each comparison that matters, one line an operation and shape."""
    times = {(r.operation, r.shape, r.variant, r.batch): r.median_us for r in results}
    for operation, shape in dict.fromkeys((r.operation, r.shape) for r in results):
        rows = [r for r in results if (r.operation, r.shape) == (operation, shape)]
        ratios: dict[str, list[float]] = {"paged/contiguous": [], "forked/in place": [], "D0/FlashInfer": []}
        for row in rows:
            memory, _, mode = row.variant.partition(" ")
            for name, other in (
                ("paged/contiguous", f"D0 {mode}" if memory in ("S0", "S1", "S2") else ""),
                ("forked/in place", f"{memory} in place" if mode == "forked" else ""),
                ("D0/FlashInfer", f"FlashInfer {row.variant}" if memory == "D0" else ""),
            ):
                if (key := (operation, shape, other, row.batch)) in times:
                    ratios[name].append(row.median_us / times[key])
        worst = [f"{name} {max(values):.3f}" for name, values in ratios.items() if values]
        large = [row.copy_share for row in rows if row.batch >= LARGE and row.variant[0] != "F"]
        if large:
            worst.append(f"share of copy from batch {LARGE} {min(large):.1%}")
        yield f"{operation} {shape}, worst: {', '.join(worst)}"


def main() -> None:
    """Command line; see the module."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.kernels", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    for flag, default in (
        ("--batch", ",".join(map(str, BATCHES))),
        ("--shape", ",".join(SHAPES)),
        ("--operation", ",".join(OPERATIONS)),
    ):
        parser.add_argument(flag, default=default, help="comma list (default %(default)s)")
    options = parser.parse_args()
    shapes, operations = options.shape.split(","), options.operation.split(",")
    for kind, given, legal in (
        ("shape", shapes, tuple(SHAPES)),
        ("operation", operations, tuple(OPERATIONS)),
    ):
        for name in given:
            if name not in legal:
                parser.error(f"--{kind} {name} is unknown; choose among {', '.join(legal)}")
    if not all(size.isdigit() and int(size) > 0 for size in options.batch.split(",")):
        parser.error(f"--batch {options.batch} is no comma list of positive numbers")
    batches = [int(size) for size in options.batch.split(",")]
    pairs = [(operation, shape) for operation in operations for shape in shapes if served(operation, shape)]
    if not pairs:
        parser.error(f"layers of {options.shape} have no {options.operation}")
    if not torch.cuda.is_available():
        reason = "No CUDA device is visible, so the kernels were not timed."
        print(json.dumps({"skipped": reason}) if options.json else reason)
        return
    bandwidth = copy_bandwidth()
    card = torch.cuda.get_device_name()
    if not options.json:
        print(f"{card}: copy {bandwidth / 1e12:.2f} TB/s, read and written")
        print(f"{'operation':<18}{'shape':<20}{'variant':<21}{'batch':>6}{'us':>10}{'GB/s':>9}{'of copy':>9}")
    results = []
    for operation, shape in pairs:
        for row in measure(operation, shape, batches, bandwidth):
            results.append(row)
            if not options.json:
                print(
                    f"{row.operation:<18}{row.shape:<20}{row.variant:<21}{row.batch:>6}"
                    f"{row.median_us:>10.2f}{row.gb_per_s:>9.0f}{row.copy_share:>9.1%}",
                    flush=True,
                )
    if not options.json:
        print("\n".join(summary(results)))
    else:
        print(
            json.dumps(
                {
                    "card": card,
                    "torch": torch.__version__,
                    "copy_bytes_per_s": bandwidth,
                    "results": [row._asdict() for row in results],
                }
            )
        )


if __name__ == "__main__":
    main()
