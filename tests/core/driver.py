"""Operations over a shadow scheduler, an audit after each; the seeded run and hypothesis choose them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from sglang_hybrid.pools.organization import Checkpoint, Need, Organization
from sglang_hybrid.pools.pages import PageState
from sglang_hybrid.pools.reclaim import ReclaimStep
from sglang_hybrid.radix.policy import DEFAULT_POLICY, Policy
from sglang_hybrid.radix.tree import Node
from tests.core.audit import Audit
from tests.core.shadow import VOCABULARY, Shadow

NAMESPACES = ((None, None), ("a", None), (None, "a"))


def _tokens(seed: int, count: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(VOCABULARY) for _ in range(count)]


class Driver:
    """Every operation takes small integers and picks among what is there by them."""

    def __init__(self, organization: Organization, policy: Policy = DEFAULT_POLICY) -> None:
        self.shadow = Shadow(organization, policy)
        self.audit = Audit(self.shadow)
        self.done: Counter[str] = Counter()
        self._stems = [_tokens(stem, organization.token_capacity()) for stem in range(2)]

    def do(self, name: str, *arguments: int) -> None:
        """Run one operation and check everything."""
        operation: Callable[..., None] = getattr(self, name)
        operation(*arguments)
        self.done[name] += 1
        self.audit()

    # -- requests ---------------------------------------------------------------------------

    def submit(self, stem: int, shared: int, tail: int, new: int) -> None:
        """A prompt of `shared` tokens that others know and `tail` that few do."""
        if len(self.shadow.waiting) > 6:
            return
        tokens = self._stems[stem % 2][:shared] + _tokens(shared * 31 + tail, tail)
        namespace = NAMESPACES[0 if stem < 6 else stem % len(NAMESPACES)]
        if tokens:
            self.shadow.submit(tokens, 1 + new, namespace, private=stem == 9)

    def extend(self, chunk: int, most: int, margin: int) -> None:
        self.shadow.prepare_extend(1 + chunk, most, margin)

    def decode(self, most: int) -> None:
        """A step of some; results that lag behind more than overlap scheduling allows come first."""
        batch = self.shadow.decodable()[: 1 + most]
        if batch and len(self.shadow.launched) < 3:
            self.shadow.prepare_decode(batch)

    def launch(self) -> None:
        if self.shadow.prepared:
            self.shadow.launch()

    def process(self) -> None:
        if self.shadow.launched and not self.shadow.prepared:
            self.shadow.process()

    def preempt(self, which: int) -> None:
        ready = [request for request in self.shadow.running if not request.pending]
        if ready:
            self.shadow.preempt(ready[which % len(ready)])

    def abort(self, which: int) -> None:
        everyone = self.shadow.waiting + self.shadow.running
        if everyone:
            self.shadow.abort(everyone[which % len(everyone)])

    def flush(self) -> None:
        self.shadow.flush()

    # -- policy and pressure ----------------------------------------------------------------

    def retain(self, which: int) -> None:
        offered = [n.checkpoint for n in self.shadow.tree.nodes() if n.checkpoint is not None]
        if offered and len(self.shadow.retained) < 3:
            checkpoint = offered[which % len(offered)]
            self.shadow.lifetime.retain(checkpoint)
            self.shadow.retained.append(checkpoint)

    def unretain(self, which: int) -> None:
        retained = self.shadow.retained
        if retained:
            self.shadow.lifetime.unretain(retained.pop(which % len(retained)))

    def probe(self, units: int, checkpoints: int) -> None:
        """Whatever `could_fit` promises can be allocated; what `fits` promises without evicting."""
        organization = self.shadow.organization
        need = Need(units, checkpoints)
        promised = organization.could_fit(need)
        if organization.fits(need):
            assert promised, f"{need} fits but could not"
        if not promised:
            return
        assert self.shadow.lifetime.make_room(need), f"could_fit was optimistic about {need}"
        assert organization.fits(need)
        taken: list[Checkpoint] = []
        got = organization.allocate_units(units)
        assert got is not None
        for _ in range(checkpoints):
            checkpoint = organization.allocate_checkpoint()
            assert checkpoint is not None, f"fits was optimistic about {need}"
            taken.append(checkpoint)
        for checkpoint in taken:
            organization.release(checkpoint)
        organization.release_units(got)

    # -- reclaim ----------------------------------------------------------------------------

    def reclaim(self, which: int, page: int, steps: int) -> None:
        """Begin to take any page from whoever has it, and stop between two steps."""
        organization = self.shadow.organization
        pool = organization.pools[which % len(organization.pools)]
        page = 1 + page % pool.size
        if pool.state(page) is PageState.FREE or len(self.shadow.reclaims) > 3:
            return
        is_unit = pool is organization.unit_pool and (
            pool is not organization.state_pool
            or any(isinstance(entry, Node) for entry in pool.dependents(page))
        )
        reclaim = organization.reclaim_unit(page) if is_unit else organization.reclaim_state(page)
        if reclaim not in self.shadow.reclaims:
            self.shadow.reclaims.append(reclaim)
        for _ in range(1 + steps):
            reclaim.advance()
        self._forget_done()

    def resume(self, which: int) -> None:
        reclaims = self.shadow.reclaims
        if reclaims:
            reclaims[which % len(reclaims)].run()
        self._forget_done()

    def abandon(self, which: int) -> None:
        reclaims = self.shadow.reclaims
        if reclaims:
            reclaim = reclaims[which % len(reclaims)]
            if reclaim.step <= ReclaimStep.DETACH:
                reclaim.abandon()
                reclaims.remove(reclaim)

    def _forget_done(self) -> None:
        self.shadow.reclaims = [r for r in self.shadow.reclaims if r.step is not ReclaimStep.DONE]

    def reached(self) -> Counter[str]:
        """How often what matters has happened."""
        states, evicted = self.shadow.live.counts, self.shadow.lifetime.counts
        return Counter(
            hits=self.shadow.hits,
            finished=self.shadow.finished,
            forks=states.forks,
            in_place=states.settled_in_place,
            skipped=states.checkpoints_skipped,
            published=states.checkpoints_published,
            duplicates=states.duplicates,
            dead=evicted.dead_blocks,
            leaves=evicted.leaf_blocks,
            checkpoints=evicted.checkpoints,
            given_up=evicted.pins_given_up,
            retained=self.shadow.live.retention.retained_ever,
            superseded=states.checkpoints_superseded,
            waits=self.shadow.admission.waits,
            prefix_waits=self.shadow.live.prefix_waits,
        )

    # -- bulk -------------------------------------------------------------------------------

    def step(self, chance: random.Random) -> None:
        """One operation, drawn by weight."""
        name, ranges = chance.choices(_OPERATIONS, _WEIGHTS)[0]
        self.do(name, *(chance.randrange(limit) for limit in ranges))

    def drain(self) -> None:
        """Everything that was admitted or waits comes to its end: nothing is stuck."""
        for reclaim in self.shadow.reclaims:
            reclaim.run()
        self._forget_done()
        limit = 400 + 40 * len(self.shadow.waiting + self.shadow.running)
        self.launch()
        while self.shadow.launched:
            self.shadow.process()
        while self.shadow.waiting or self.shadow.running:
            limit -= 1
            assert limit, "requests make no progress"
            if not self.shadow.prepare_extend(1 << 20):
                self._drain_decode()
            self.launch()
            while self.shadow.launched:
                self.shadow.process()
            self.audit()

    def _drain_decode(self) -> None:
        batch = self.shadow.decodable()
        if not batch or not self.shadow.prepare_decode(batch):
            unfinished = [request for request in self.shadow.running if not request.prefilled]
            assert unfinished, "the last running request does not fit"
            self.shadow.preempt(unfinished[-1])


_TABLE: dict[str, tuple[float, tuple[int, ...]]] = {
    "submit": (10, (10, 18, 8, 12)),
    "extend": (14, (14, 3, 3)),
    "decode": (26, (4,)),
    "launch": (30, ()),
    "process": (24, ()),
    "preempt": (2, (8,)),
    "abort": (2, (8,)),
    "flush": (0.05, ()),
    "retain": (1, (8,)),
    "unretain": (1, (8,)),
    "probe": (2, (6, 4)),
    "reclaim": (4, (2, 64, 6)),
    "resume": (4, (4,)),
    "abandon": (1, (4,)),
}
_OPERATIONS = [(name, ranges) for name, (_, ranges) in _TABLE.items()]
_WEIGHTS = [weight for weight, _ in _TABLE.values()]
