"""What must hold between two operations, seen from the holders: who holds what, and is it right."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator

from sglang_hybrid.geometry import block_bytes
from sglang_hybrid.pools.organization import Checkpoint
from sglang_hybrid.pools.pages import IntegrityError, PagePool, PageState
from sglang_hybrid.pools.reclaim import ReclaimStep
from sglang_hybrid.pools.shared import PackedConv
from sglang_hybrid.radix.account import account
from sglang_hybrid.radix.tree import Node
from tests.core.content import next_tag, place_of, root_tag
from tests.core.request import Request
from tests.core.shadow import Shadow


def check(condition: bool, what: str) -> None:
    if not condition:
        raise IntegrityError(what)


class Audit:
    """Checks one shadow scheduler; keeps tags of blocks that it has seen."""

    def __init__(self, shadow: Shadow) -> None:
        self.shadow = shadow
        self._tags: dict[tuple[int, bytes], list[int]] = {}

    def __call__(self) -> None:
        """Raise `IntegrityError` or `ContentError` unless all of it holds."""
        shadow = self.shadow
        shadow.tree.check_integrity()
        shadow.organization.check_integrity()
        nodes = list(shadow.tree.nodes())
        detached = self._detached()
        held = self._held_checkpoints()
        self._check_locks(nodes)
        self._check_rows()
        self._check_coming()
        self._check_pages(nodes, detached, held)
        self._check_checkpoints(nodes, detached, held)
        self._check_account(nodes)
        self._check_content()

    # -- holders ----------------------------------------------------------------------------

    @staticmethod
    def _states_of(request: Request) -> Iterator[Checkpoint]:
        state = request.live
        yield from state.kept.values()
        yield from (boundary.checkpoint for boundary in state.boundaries)
        yield from (c for c in (state.live, state.source, state.lease.adopted) if c is not None)

    def _held_checkpoints(self) -> dict[Checkpoint, int]:
        return Counter(c for request in self.shadow.running for c in self._states_of(request))

    def _detached(self) -> set[int]:
        """Entries that an interrupted reclaim has taken from the lookup but not yet from the index."""
        return {
            id(entry)
            for reclaim in self.shadow.reclaims
            if reclaim.step is ReclaimStep.UNINDEX
            for entry in reclaim.entries
        }

    def _check_locks(self, nodes: list[Node]) -> None:
        expected: Counter[Node] = Counter(request.lock for request in self.shadow.running)
        for node in reversed(nodes):  # children before parents
            check(node.locks == expected[node], f"{node.locks} locks at depth {node.depth}, {expected[node]}")
            if node.locks and node.parent is not None:
                expected[node.parent] += 1
        roots = {node.parent for node in nodes if node.start == 0}
        roots |= {node for node in expected if node.depth == 0}
        check(len(roots) == self.shadow.tree.namespaces, "a root without children or locks stayed behind")

    def _check_rows(self) -> None:
        for request in self.shadow.running:
            path = [unit for node in request.lock.path() for unit in node.units]
            check(request.live.units[: len(path)] == path, "a row does not point at the units of its path")

    def _check_coming(self) -> None:
        """Others wait for what running prompts have not published yet, and for nothing else."""
        live, grid = self.shadow.live, self.shadow.organization.grid
        expected: Counter[int] = Counter()
        for request in self.shadow.running:
            trail = request.live.trail
            if live.waits and trail is not None and not request.private:
                ahead = range(request.lock.depth + 1, request.prompt // grid + 1)
                expected.update(live.history.boundary(trail, block) for block in ahead)
        check(live.coming._computed == expected, f"{live.coming._computed} are coming, not {expected}")
        check(not live.coming._left - expected, "a checkpoint is to come where nobody computes")

    # -- pages ------------------------------------------------------------------------------

    def _check_pages(self, nodes: list[Node], detached: set[int], held: dict[Checkpoint, int]) -> None:
        organization = self.shadow.organization
        units: Counter[int] = Counter()
        states: Counter[int] = units if organization.unit_pool is organization.state_pool else Counter()
        taken: set[int] = set()
        for request in self.shadow.running:
            own = request.live.units[request.lock.depth * organization.units_per_block :]
            units.update(own)
            taken.update(own)
        for node in nodes:
            taken.update(node.units)
            if node.locks:
                units.update(node.units)
        for checkpoint, count in held.items():
            check(checkpoint.references == count, f"a checkpoint counts {checkpoint.references}, not {count}")
            for page in checkpoint.pages:
                states[page] += count
        self._check_pool(organization.unit_pool, units)
        self._check_pool(organization.state_pool, states)
        offered = {id(node) for node in nodes} | {id(n.checkpoint) for n in nodes if n.checkpoint} | detached
        for pool in organization.pools:
            for page in range(1, pool.size + 1):
                for entry in pool.dependents(page):
                    check(id(entry) in offered, f"page {page} knows an entry that left the lookup")
        taken |= {unit for unit in range(1, organization.unit_pool.size + 1) if self._is_detached(unit)}
        counted = organization.units_allocated
        check(counted == len(taken), f"{counted} units are counted, {len(taken)} are somebody's")

    def _is_detached(self, unit: int) -> bool:
        return any(isinstance(e, Node) for e in self.shadow.organization.unit_pool.dependents(unit))

    @staticmethod
    def _check_pool(pool: PagePool, expected: Counter[int]) -> None:
        for page in range(1, pool.size + 1):
            found = pool.references(page)
            check(found == expected[page], f"page {page} has {found} references, holders {expected[page]}")

    # -- checkpoints ------------------------------------------------------------------------

    def _check_checkpoints(self, nodes: list[Node], detached: set[int], held: dict[Checkpoint, int]) -> None:
        organization = self.shadow.organization
        offered = {node.checkpoint for node in nodes if node.checkpoint is not None}
        for pool in organization.pools:
            for page in range(1, pool.size + 1):
                offered |= {e for e in pool.dependents(page) if isinstance(e, Checkpoint)}
        alive = offered | held.keys()
        idle = sum(not checkpoint.references for checkpoint in offered)
        found = organization.usage()
        check(found.checkpoints_allocated == len(alive), f"{found}, not {len(alive)} checkpoints")
        check(found.checkpoints_cached == idle, f"{found}, not {idle} cached checkpoints")
        check(found.checkpoints_shared == len(offered) - idle, f"{found}, not {len(offered) - idle} shared")
        pins = Counter(id(checkpoint) for checkpoint in self.shadow.pins.values())
        retained = Counter(id(checkpoint) for checkpoint in self.shadow.retained)
        retained.update(id(c) for c, kept in self.shadow.live.retention._made.items() if kept)
        made = {id(c) for request in self.shadow.running for c in request.live.made}
        check({id(c) for c in self.shadow.live.retention._made} == made, "made by nobody who runs")
        for checkpoint in alive:
            check(checkpoint.retained == retained[id(checkpoint)], "retained, but nobody retains it")
            check(checkpoint.pins == pins[id(checkpoint)], "pins do not equal what preempted requests hold")
        if isinstance(organization, PackedConv):
            lines = {checkpoint.line for checkpoint in alive}
            slabs = organization.slabs
            pages = {slabs.page_of(line) for line in lines}
            check(len(lines) == len(alive) == slabs.lines, "a conv line is shared or leaked")
            check(0 not in pages, "a conv line lies on the sink page")
            check(len(pages) == slabs.slabs, "an empty slab")

    # -- bytes ------------------------------------------------------------------------------

    def _check_account(self, nodes: list[Node]) -> None:
        """The account adds up, and its counters equal what a walk over everything finds."""
        organization, found = self.shadow.organization, account(self.shadow.organization, self.shadow.tree)
        check(sum(found) == organization.budget_bytes and min(found) >= 0, f"{found} is not the budget")
        useful: set[Node | None] = set()
        units = Counter(held=0, cached=0, dead=0)
        for node in reversed(nodes):  # children before parents
            if node.checkpoint is not None or node in useful:
                useful.add(node.parent)
            kind = "held" if node.locks else "cached" if node.checkpoint or node in useful else "dead"
            units[kind] += len(node.units)
        unit = block_bytes(organization.model, organization.unit_tokens) * organization.model.arenas
        check(found.attention_cached == units["cached"] * unit, f"{units} cached, account {found}")
        check(found.attention_dead == units["dead"] * unit, f"{units} dead, account {found}")
        nobody = 0
        for pool in organization.pools:
            size = organization.layout().kv_page_bytes
            if pool is not organization.unit_pool:
                size = organization.layout().state_page_bytes
            bare = [p for p in pool.reclaims if not pool.references(p) and not pool.wanted(p)]
            nobody += sum(pool.state(page) is PageState.RECLAIMING for page in bare) * size
        nobody *= organization.model.arenas
        check(found.any_reclaiming == nobody, f"{nobody} bytes in reclaim, account {found}")

    # -- content ----------------------------------------------------------------------------

    def _check_content(self) -> None:
        """What the tree offers equals what a cold run would have made."""
        contents = self.shadow.contents
        if len(self._tags) > 100_000:
            self._tags.clear()
        for root in {node.parent for node in self.shadow.tree.nodes() if node.start == 0}:
            assert root is not None
            start = root_tag(root.key)
            stack = [(child, start) for child in root.children.values()]
            while stack:
                node, before = stack.pop()
                tags = self._block_tags(before, node.key)
                contents.check_kv(node.units, tags, node.blocks * self.shadow.organization.grid)
                if node.checkpoint is not None:
                    contents.check_state(place_of(node.checkpoint), tags[-1], start)
                stack += [(child, tags[-1]) for child in node.children.values()]

    def _block_tags(self, before: int, key: object) -> list[int]:
        assert isinstance(key, bytes)
        tags = self._tags.get((before, key))
        if tags is None:
            tags = [before]
            for token in array("q", key):
                tags.append(next_tag(tags[-1], token))
            self._tags[before, key] = tags
        return tags
