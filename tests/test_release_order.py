"""The source's queue: oldest release first, blank pages among the cached, checkpoints before their KV."""

from dataclasses import replace

import pytest

from bench.arms import Arm, Constants, memory, setting, workload
from bench.release_order import ReleaseOrder
from sglang_hybrid.pools.organization import Checkpoint, Need
from sglang_hybrid.radix.lifetime import Lifetime
from sglang_hybrid.radix.node import Node
from sglang_hybrid.radix.order import LIKELY
from sglang_hybrid.radix.tree import GridTree
from sglang_hybrid.simulator.passes import SourcePass
from sglang_hybrid.simulator.scheduler import Scheduler
from sglang_hybrid.simulator.setting import SOURCE, Serving

PAGES = 10
FEW = replace(Constants(), requests=50)


class Shelf:
    """A memory of ten S0 pages, and what a request leaves in it when it ends."""

    def __init__(self) -> None:
        self.memory = memory("S0", PAGES, 0.5)
        self.tree = GridTree(self.memory)
        self.lifetime = Lifetime(self.tree, ReleaseOrder)
        self.order = self.lifetime.policy
        assert isinstance(self.order, ReleaseOrder)

    def leave(self, name: str, checkpoint: bool = False) -> Node:
        """One block, released; with a checkpoint, its boundary's is released right after."""
        key = name.encode() * self.tree.block_bytes
        units = self.memory.allocate_units(1)
        assert units is not None
        root = self.tree.lock(self.tree.match(None, b"", 0).node)
        node = self.tree.lock(self.tree.add(root, key, units))
        held = self.memory.allocate_checkpoint() if checkpoint else None
        if held is not None:
            self.tree.offer(node, held)
        self.memory.release_units(units)
        self.tree.unlock(node)
        self.tree.unlock(root)
        self.order.finished(node, None)
        if held is not None:
            self.memory.release(held)
        return node

    def is_cached(self, node: Node) -> bool:
        return self.tree.is_linked(node)


def checkpoint_of(node: Node) -> Checkpoint:
    assert node.checkpoint is not None
    return node.checkpoint


def test_blank_pages_wait_for_their_turn() -> None:
    shelf = Shelf()
    first, second = shelf.leave("a"), shelf.leave("b")
    assert shelf.lifetime.make_room(Need(units=8)) and shelf.is_cached(first)  # never used: before all others
    units = shelf.memory.allocate_units(8)
    assert units is not None
    for _ in range(2):
        shelf.order.finished(None, None)  # time goes on
    shelf.memory.release_units(units)  # blank from now on, behind the two blocks
    assert shelf.lifetime.make_room(Need(units=1))
    assert (shelf.is_cached(first), shelf.is_cached(second)) == (False, True)
    assert shelf.memory.unit_pool.free == 9
    shelf.memory.allocate_units(1)  # the page of the first block
    assert shelf.lifetime.make_room(Need(units=1)) and not shelf.is_cached(second)


def test_a_hit_puts_a_path_to_the_end_of_the_queue() -> None:
    shelf = Shelf()
    first, second = shelf.leave("a"), shelf.leave("b")
    shelf.tree.unlock(shelf.tree.lock(first))
    shelf.order.finished(first, None)
    assert shelf.lifetime.make_room(Need(units=9))
    assert (shelf.is_cached(first), shelf.is_cached(second)) == (True, False)


def test_of_two_released_together_the_checkpoint_goes_first() -> None:
    shelf = Shelf()
    node = shelf.leave("a", checkpoint=True)
    assert shelf.lifetime.make_room(Need(units=9))
    assert node.checkpoint is None and shelf.is_cached(node) and shelf.order.broken == 0


@pytest.mark.parametrize("keep", ["retain", "pin"])
def test_what_is_kept_yields_when_nothing_else_is_left(keep: str) -> None:
    shelf = Shelf()
    kept = checkpoint_of(shelf.leave("a", checkpoint=True))
    later = shelf.leave("b", checkpoint=True)
    getattr(shelf.lifetime, keep)(kept)
    assert shelf.lifetime.make_room(Need(units=8), LIKELY)
    assert kept.owner is not None and not shelf.is_cached(later)
    assert not shelf.lifetime.make_room(Need(units=10), LIKELY)
    assert kept.owner is not None
    assert shelf.lifetime.make_room(Need(units=10)) and kept.owner is None
    counts = shelf.lifetime.counts
    assert counts.retained_given_up + counts.pins_given_up == 1


def test_what_is_not_retained_any_more_is_released_then() -> None:
    shelf = Shelf()
    kept = checkpoint_of(shelf.leave("a", checkpoint=True))
    shelf.lifetime.retain(kept)
    later = checkpoint_of(shelf.leave("b", checkpoint=True))
    shelf.lifetime.unretain(kept)  # its producer ends: it is released, and then its KV
    assert isinstance(kept.owner, Node)
    shelf.order.finished(kept.owner, None)
    shelf.lifetime.make_room(Need(units=7))
    assert kept.owner is not None and later.owner is None


@pytest.mark.parametrize(
    "arm", [Arm("S0", 63), Arm("S2", 63), Arm("S1", 83, retention=True), Arm("D0", 63, 4.5)]
)
def test_runs_keep_the_books(arm: Arm) -> None:
    """Pools, tree and queue agree while requests are served, preempted and resumed."""
    orders: list[ReleaseOrder] = []

    def order(tree: GridTree) -> ReleaseOrder:
        orders.append(ReleaseOrder(tree))
        return orders[-1]

    scheduler = Scheduler(setting(arm, FEW, order), workload(arm, FEW).requests(1))
    steps = 0
    while scheduler.step():
        steps += 1
        if steps % 40 == 0:
            scheduler.core.check_integrity()
            for pool, blank in orders[-1].blank.items():
                times = blank.times
                assert times == sorted(times) and len(times) >= pool.free
    scheduler.core.check_integrity()
    assert scheduler.outcome.served == 50
    if arm.organization != "D0":  # where KV can run short alone, it takes its checkpoints along
        assert orders[-1].broken == 0


def served(arm: Arm, serving: Serving) -> Scheduler:
    scheduler = Scheduler(replace(setting(arm, FEW), serving=serving), workload(arm, FEW).requests(1))
    scheduler.run()
    return scheduler


def test_who_leaves_a_boundary_takes_a_new_state_and_preempts_for_it() -> None:
    """On little memory, where SGLang with the plugin goes on in place and leaves no checkpoint."""
    crowded = Arm("S2", 30, rate=9.0)
    insisting, yielding = served(crowded, SOURCE), served(crowded, SOURCE._replace(insists=False))
    assert insisting.core.memory.live.counts.checkpoints_skipped <= 1
    assert yielding.core.memory.live.counts.checkpoints_skipped > 50
    assert insisting.outcome.preemptions > yielding.outcome.preemptions


def test_what_is_retained_is_not_free_for_those_who_wait() -> None:
    arm = Arm("S2", 83, retention=True)
    scheduler = Scheduler(setting(arm, FEW), workload(arm, FEW).requests(1))
    while not scheduler.core.memory.lifetime.kept().checkpoints:
        assert scheduler.step()
    core = scheduler.core
    kept = core.memory.lifetime.kept()
    rules = SourcePass(core, scheduler.running)
    whole = core.memory.organization.units_reclaimable() * core.grid

    def most_that_fits() -> int:
        job = next(iter(scheduler.running))
        return max(tokens for tokens in range(0, whole, core.grid) if rules.fits(job, 0, tokens))

    with_retention = most_that_fits()
    core.memory.lifetime.kept = lambda: Need()  # type: ignore[method-assign]
    pages = kept.units + core.memory.organization.unit_equivalent(kept.checkpoints)
    assert most_that_fits() - with_retention == pages * core.grid > 0
