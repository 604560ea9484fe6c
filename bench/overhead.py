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
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch
from tqdm import tqdm

from bench.falcon import organization
from bench.stock_tree import CORES, StockTree
from bench.table import Cell, parser, report, table
from sglang_hybrid.geometry import DEFAULT_GRID, ceil_div
from sglang_hybrid.pools.organization import Checkpoint, Need
from sglang_hybrid.radix.demand import Kind
from sglang_hybrid.radix.lifetime import Lifetime
from sglang_hybrid.radix.live import LiveStates
from sglang_hybrid.radix.live_state import LiveState
from sglang_hybrid.radix.node import Node
from sglang_hybrid.radix.tree import GridTree

LENGTHS = (1024, 2048, 4096, 8192, 16_384, 32_768)
BLOCKS = (100, 1000, 10_000, 100_000, 1_000_000)
STOCK_BLOCKS = 10_000
"""SGLang keeps 16 bytes a token: 10^6 blocks of 512 tokens would be 8 GB of them."""

COMPARED = 8192
"""Prompt length of the ratios and of the growth."""

GROWTH = (1000, 1_000_000)
ROUNDS = 41
FILLER_BLOCKS = 16
"""Blocks of the prompts that fill the cache."""

COMMON = ("match", "insert", "tree insert", "allocate", "evict", "reclaim")
OPERATIONS = (*COMMON, "match dense", "insert dense")


class GridCache:
    """Our core on S2 with room for so many cached blocks and two prompts more."""

    def __init__(self, blocks: int, spare: int) -> None:
        self.blocks = blocks
        # A filler has 16 blocks and two checkpoints of three pages and a slot.
        pages = ceil_div(blocks, FILLER_BLOCKS) * (FILLER_BLOCKS + 7) + 5 * spare + 64
        self.organization = organization("S2", pages)
        self.tree = GridTree(self.organization)
        self.lifetime = Lifetime(self.tree)
        self.live = LiveStates(self.tree, self.lifetime)
        self.chance = random.Random(0)
        self._fillers = 0
        self._filled: list[Checkpoint] = []
        self._rest = array("q", range(DEFAULT_GRID * (FILLER_BLOCKS - 1))).tobytes()
        self.top_up()

    def top_up(self) -> None:
        """Fill up to the number of blocks, as far as checkpoints of short prompts leave room for them."""
        filler = Need(FILLER_BLOCKS, 3)
        while self.tree.blocks - self.tree.blocks_dead < self.blocks and self.organization.fits(filler):
            self._fillers += 1
            self._add_filler(array("q", [-self._fillers]) * DEFAULT_GRID)

    def _add_filler(self, first: array[int]) -> None:
        """A block of its own, then what all have alike; a checkpoint after either."""
        organization, tree = self.organization, self.tree
        lock = node = tree.lock(tree.match(None, b"", 0).node)
        for key in (first.tobytes(), self._rest):
            units = organization.allocate_units(len(key) // tree.block_bytes)
            assert units is not None
            node = tree.add(node, key, units)
            checkpoint = organization.allocate_checkpoint()
            assert checkpoint is not None
            tree.offer(node, checkpoint)
            self.lifetime.offered(node, Kind.PROMPT_END)
            self._filled.append(checkpoint)
            organization.release_units(units)
            organization.release(checkpoint)
        tree.unlock(lock)
        self.lifetime.finished(node, None)

    def allocate(self, tokens: int) -> float:
        """KV units and a live state for a prompt of so many tokens."""
        state = LiveState()
        self.live.running += 1
        need = Need(tokens // DEFAULT_GRID, 1)
        begun = time.perf_counter()
        assert self.organization.could_fit(need)
        assert self.lifetime.make_room(need)
        units = self.organization.allocate_units(need.units)
        self.live.begin(state, 0, None)
        seconds = time.perf_counter() - begun
        assert units is not None
        state.units, state.prefilled = units, tokens
        self._state = state
        return seconds

    def insert_tree(self, prompt: array[int]) -> float:
        """What was allocated last, for this prompt, by tree and lifetime alone."""
        tree, state = self.tree, self._state
        root = tree.lock(tree.match(None, b"", 0).node)
        assert state.live is not None
        begun = time.perf_counter()
        grown = tree.grow(root, prompt.tobytes(), state.units, (len(prompt) // DEFAULT_GRID,))
        node = grown.path[-1]
        tree.offer(node, state.live)
        self.lifetime.offered(node, Kind.PROMPT_END)
        seconds = time.perf_counter() - begun
        state.prompt_end = node
        tree.lock(node)
        tree.unlock(root)
        self.organization.release_units(state.units)
        self._end(node)
        return seconds

    def insert_dense(self, prompt: array[int]) -> float:
        self.live.extend(self._state, 0, len(prompt))
        return self.insert(prompt)

    def insert(self, prompt: array[int]) -> float:
        """The same for a running request, which goes on with its path locked."""
        tree, state = self.tree, self._state
        root = tree.lock(tree.match(None, b"", 0).node)
        begun = time.perf_counter()
        published = self.live.publish(state, root, prompt.tobytes(), len(prompt), len(prompt))
        node = tree.lock(published.node)
        tree.unlock(root)
        self.live.handed_over(published)
        seconds = time.perf_counter() - begun
        self._end(node)
        return seconds

    def _end(self, node: Node) -> None:
        self.tree.unlock(node)
        self.live.release(self._state)
        self.live.running -= 1

    def match(self, prompt: array[int]) -> float | None:
        """None when it has been evicted meanwhile."""
        begun = time.perf_counter()
        match = self.tree.match(None, memoryview(prompt).cast("B"), len(prompt) // DEFAULT_GRID)
        seconds = time.perf_counter() - begun
        return seconds if match.depth == len(prompt) // DEFAULT_GRID else None

    def evict(self, tokens: int) -> float:
        """So many tokens and a checkpoint more than are free."""
        need = Need(self.organization.units_free() + tokens // DEFAULT_GRID, 1)
        begun = time.perf_counter()
        assert self.lifetime.make_room(need)
        return time.perf_counter() - begun

    def reclaim(self) -> float | None:
        """A page of a checkpoint that nobody has asked for, and all that depends on it; None without one."""
        while self._filled:
            chosen = self.chance.randrange(len(self._filled))
            self._filled[chosen], self._filled[-1] = self._filled[-1], self._filled[chosen]
            checkpoint = self._filled.pop()
            if checkpoint.owner is not None:
                begun = time.perf_counter()
                assert self.organization.reclaim_state(checkpoint.pages[0]).run()
                return time.perf_counter() - begun
        return None


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
