"""`python -m bench.overhead`: host time of our lookup and bookkeeping against SGLang's own prefix cache.

For one request: find room for a prompt's KV and its state (*allocate*), publish the prompt (*insert*), look
up another (*match*), make room for as much again (*evict*), take a single page from the cache and all that
depends on it (*reclaim*; SGLang's counterpart evicts one state).  Medians in microseconds.

Both insert a prompt's KV with one checkpoint at its end, which is all that SGLang keeps.  *Insert* is what a
request costs: the tree, the locks, the references, duplicates; SGLang's is `UnifiedRadixCache.checkpoint`
over the tree core of the row.  *Tree insert* is the tree alone, and so is *match*: SGLang's are those of its
core, without the Python around it.  *Dense*, with a checkpoint at every boundary, is ours alone.
"""

from __future__ import annotations

import gc
import random
from array import array
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch
from tqdm import tqdm

from bench.grid_cache import FILLER_BLOCKS, GridCache
from bench.stock_tree import CORES, StockTree
from bench.table import Cell, parser, report, table
from sglang_hybrid.geometry import DEFAULT_GRID

LENGTHS = (1024, 2048, 4096, 8192, 16_384, 32_768)
BLOCKS = (100, 1000, 10_000, 100_000, 1_000_000)
STOCK_BLOCKS = 10_000
"""SGLang keeps 16 bytes a token: 10^6 blocks of 512 tokens would be 8 GB of them."""

COMPARED = 8192
"""Prompt length of the ratios and of the growth."""

GROWTH = (1000, 1_000_000)
ROUNDS = 41

COMMON = ("match", "insert", "tree insert", "allocate", "evict", "reclaim")
OPERATIONS = (*COMMON, "match dense", "insert dense")


Cache = GridCache | StockTree


def compare(
    caches: Mapping[tuple[str, int], Cache], lengths: Sequence[int], count: int, served: Callable[[], object]
) -> dict[tuple[str, int], dict[str, dict[str, float]]]:
    """Medians of every operation on every cache, by prompt length, in microseconds.

    The caches take turns at prompts of all lengths, in random order, so that whatever else the machine
    does strikes all of them alike.  `served` is called after each round of turns.
    """
    times: dict[tuple[str, int, int], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    before: dict[tuple[str, int, int], array[int]] = {}
    chance = random.Random(0)
    for _ in range(count):
        turn = [_prompt(length, chance) for length in (lengths[0], *chance.sample(lengths, len(lengths)))]
        for (name, size), cache in caches.items():
            for index, prompt in enumerate(turn):
                length = len(prompt)
                # A cache in which few prompts fit would be nothing but the last ones.
                if 8 * length <= size * DEFAULT_GRID:
                    found = serve(cache, prompt, before.get((name, size, length)))
                    if isinstance(cache, GridCache):
                        found |= serve_dense(cache, prompt[1:] + prompt[:1])
                    before[name, size, length] = prompt
                    for operation, seconds in found.items() if index else ():  # the first one warms up
                        times[name, size, length][operation].append(seconds)
        served()
    medians: dict[tuple[str, int], dict[str, dict[str, float]]] = {key: {} for key in caches}
    for (name, size, length), by_operation in sorted(times.items()):
        medians[name, size][str(length)] = {
            operation: round(1e6 * median(one), 2) for operation, one in by_operation.items()
        }
    return medians


def _prompt(length: int, chance: random.Random) -> array[int]:
    return array("q", chance.randbytes(8 * length))


def serve(cache: Cache, prompt: array[int], before: array[int] | None) -> dict[str, float]:
    """Two requests, one with the bookkeeping of a request; `before` is the prompt that is looked up."""
    tried: dict[str, float | None] = {}
    tried |= {"allocate": cache.allocate(len(prompt)), "insert": cache.insert(prompt)}
    tried["match"] = None if before is None else cache.match(before)
    tried |= {"evict": cache.evict(len(prompt)), "reclaim": cache.reclaim()}
    found = {operation: seconds for operation, seconds in tried.items() if seconds is not None}
    cache.top_up()
    cache.allocate(len(prompt))
    found["tree insert"] = cache.insert_tree(prompt[::-1])
    cache.evict(len(prompt))
    cache.top_up()
    return found


def serve_dense(cache: GridCache, prompt: array[int]) -> dict[str, float]:
    """What SGLang has no counterpart of."""
    cache.allocate(len(prompt))
    found = {"insert dense": cache.insert_dense(prompt)}
    matched = cache.match(prompt)
    assert matched is not None, "the youngest prompt is not in the tree"
    found["match dense"] = matched
    cache.evict(len(prompt))
    cache.top_up()
    return found


def measure(blocks: Sequence[int], stock_blocks: int, lengths: Sequence[int], count: int) -> dict[str, Any]:
    """Everything the bench reports; times are by cache, cached blocks, prompt length and operation."""
    torch.set_num_threads(1)  # SGLang's tensors here are too small for more
    sizes = {"ours": list(blocks)}
    sizes |= {core: [size for size in blocks if size <= stock_blocks] for core in CORES}
    progress = tqdm(total=sum(map(len, sizes.values())) + count, disable=None)
    caches: dict[tuple[str, int], Cache] = {}
    gc.disable()  # what is built stays
    for name, numbers in sizes.items():
        for size in numbers:
            progress.set_description(f"filling {name} with {size:,} blocks")
            caches[name, size] = build(name, size, max(lengths))
            progress.update()
    gc.enable()
    gc.collect()
    gc.freeze()
    progress.set_description("serving")
    times: dict[str, dict[str, dict[str, dict[str, float]]]] = {name: {} for name in sizes}
    for (name, size), found in compare(caches, sorted(lengths), count, progress.update).items():
        times[name][str(size)] = found
    progress.close()
    gc.unfreeze()
    ratios = {
        core: {
            size: {length: _ratios(times["ours"][size][length], one) for length, one in by_length.items()}
            for size, by_length in times[core].items()
        }
        for core in CORES
    }
    compared = ratios["rust"][max(ratios["rust"], key=int)].get(str(COMPARED), {})
    small, large = (times["ours"].get(str(size), {}).get(str(COMPARED), {}) for size in GROWTH)
    return {
        "grid": DEFAULT_GRID,
        "match_8k_ratio": compared.get("match"),
        "insert_8k_ratio": compared.get("insert"),
        "tree_insert_8k_ratio": compared.get("tree insert"),
        "growth": _ratios(large, small),
        "ratios": ratios,
        "microseconds": times,
    }


def build(name: str, blocks: int, longest: int) -> Cache:
    """A cache that holds so many blocks in prompts of 16, with room for the longest twice more."""
    if name == "ours":
        return GridCache(blocks, longest // DEFAULT_GRID)
    return StockTree(name, blocks * DEFAULT_GRID, FILLER_BLOCKS * DEFAULT_GRID, longest)


def _ratios(ours: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {what: round(ours[what] / other[what], 3) for what in ours if what in other}


def tables(answer: dict[str, Any]) -> None:
    times, growth = answer["microseconds"], answer["growth"]
    sizes = list(times["ours"])
    for operation in OPERATIONS:
        rows: list[Sequence[Cell]] = []
        for name, by_size in times.items():
            for length in sorted({length for one in by_size.values() for length in one}, key=int):
                found = [by_size.get(size, {}).get(length, {}).get(operation, "") for size in sizes]
                if any(found):
                    rows.append((f"{name}, {int(length):,} tokens", *found))
        note = f" (ours grows {growth[operation]} times from 10^3 to 10^6)" if operation in growth else ""
        table(
            f"{operation}, microseconds by cached blocks{note}",
            ("", *(f"{int(size):,}" for size in sizes)),
            rows,
        )
    table(
        f"Ours over SGLang's tree at {COMPARED:,} tokens",
        ("cached blocks", *COMMON),
        [
            (f"{core}, {int(size):,}", *(by_length.get(str(COMPARED), {}).get(one, "") for one in COMMON))
            for core, by_size in answer["ratios"].items()
            for size, by_length in by_size.items()
        ],
    )


def main() -> None:
    options = parser("overhead", __doc__)
    options.add_argument("--blocks", default=",".join(map(str, BLOCKS)), help="cached blocks of 512 tokens")
    options.add_argument("--lengths", default=",".join(map(str, LENGTHS)), help="tokens of a prompt")
    options.add_argument(
        "--stock-blocks",
        type=int,
        default=STOCK_BLOCKS,
        help="no more of them in SGLang's cache, which keeps 16 bytes a token (default %(default)s)",
    )
    options.add_argument("--rounds", type=int, default=ROUNDS, help="turns of each cache")
    chosen = options.parse_args()
    blocks, lengths = ([int(one) for one in text.split(",")] for text in (chosen.blocks, chosen.lengths))
    answer = measure(blocks, chosen.stock_blocks, lengths, chosen.rounds)
    report(answer, chosen.json, lambda: tables(answer))


if __name__ == "__main__":
    main()
