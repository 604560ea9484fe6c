"""A shadow scheduler: the engine's calling order over the real core, with memory that checks content.

One batch is prepared (prefills, then decodes), launched as one forward, and its results are processed
when the next batch may be on its way already: overlap scheduling is the order in which the driver calls.
A launched forward writes at once: on a device, everything runs in the order of launches.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from sglang_hybrid.geometry import ceil_div
from sglang_hybrid.pools.organization import Checkpoint, Need, Organization
from sglang_hybrid.pools.reclaim import Reclaim
from sglang_hybrid.radix.coming import Coming
from sglang_hybrid.radix.history import Trail
from sglang_hybrid.radix.lifetime import Lifetime
from sglang_hybrid.radix.live_state import LiveState
from sglang_hybrid.radix.policy import DEFAULT_POLICY, Policy
from sglang_hybrid.radix.tree import GridTree, Match, Node
from tests.core.content import NOWHERE, ContentError, Memory, place_of
from tests.core.request import Forward, Request

TOKEN_BYTES = 8
VOCABULARY = 3
"""Few tokens, so that prompts and generated text meet again."""


class Shadow:
    """One scheduler.  Methods are named after what the engine does; they assert what it relies on."""

    def __init__(self, organization: Organization, policy: Policy = DEFAULT_POLICY) -> None:
        self.organization = organization
        self.tree = GridTree(organization, TOKEN_BYTES)
        self.lifetime = Lifetime(self.tree)
        self.live = policy.live_states(self.tree, self.lifetime)
        self.admission = policy.admission(self.live)
        self.memory = Memory(organization)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.pins: dict[int, Checkpoint] = {}
        self.retained: list[Checkpoint] = []
        self.reclaims: list[Reclaim] = []
        self.prepared: list[Forward] = []
        self.launched: list[list[Forward]] = []
        self.finished = self.hits = 0
        self._rid = 0

    # -- arrival and admission --------------------------------------------------------------

    def submit(
        self, tokens: Sequence[int], new: int, namespace: Hashable = None, private: bool = False
    ) -> Request | None:
        """Queue a request; None when an empty budget cannot serve it (`most_new_tokens`)."""
        units = ceil_div(len(tokens) + new, self.organization.unit_tokens)
        if not self.organization.capacity_fits(Need(units, 2)):
            return None
        self._rid += 1
        request = Request(self._rid, namespace, private, list(tokens), len(tokens) + new)
        self.waiting.append(request)
        return request

    def prepare_extend(self, chunk: int, most: int = 8, margin: int = 0) -> list[Request]:
        """Go on with chunked prompts, admit waiting requests, each for at most `chunk` tokens."""
        wanted: list[tuple[Request, int]] = []
        units = margin
        for request in [r for r in self.running if not r.prefilled and not r.pending]:
            self.publish(request, request.end)  # SGLang's stash_chunked_request
            end = min(request.prompt, request.end + chunk)
            more = self._units_to(request, end)
            if not self.organization.could_fit(self._need(units + more)):
                break
            units += more
            wanted.append((request, end))
        promised = Coming(self.live.history)
        for request in list(self.waiting[:most]):
            if self._awaits(request, promised):
                continue
            if not self._admit(request, chunk, units):
                break
            end = min(request.prompt, request.end + chunk)
            units += self._units_to(request, end)
            wanted.append((request, end))
        self._take_units([(request, self._units_to(request, end), end) for request, end in wanted])
        for request, _ in wanted:
            if request.adopted is not None:
                self.lifetime.touch(request.adopted)
            self._begin(request, request.adopted)
            self._let_go(request)
        for request, end in wanted:
            self.live.extend(request.live, request.end, end)
            self._check_spare(bool(request.live.boundaries))
        for request, end in wanted:
            self._prepare(request, end)
        return [request for request, _ in wanted]

    def _need(self, units: int) -> Need:
        """What the batch in preparation takes; states of those admitted before are due."""
        return Need(units, self.live.due)

    def _awaits(self, request: Request, promised: Coming) -> bool:
        """A prefill that runs computes what this one shares.  Who is admitted here runs at once, so that
        nobody is merely promised."""
        grid, known = self.organization.grid, request.known_bytes()
        last = (request.prompt - 1) // grid
        match = self.tree.match(request.namespace, known, last)
        if request.trail is None:
            request.trail = Trail(request.namespace)
        self.live.history.extend(request.trail, known, request.prompt - 1)
        waits = self.live.waits and self.live.awaits(request.trail, match.depth, last, promised)
        assert not (waits and not self.running), "it waits for nobody"
        return waits

    def _admit(self, request: Request, chunk: int, units: int) -> bool:
        grid = self.organization.grid
        match = self.tree.match(request.namespace, request.known_bytes(), (request.prompt - 1) // grid)
        node = self.tree.lock(match.node)
        if node.checkpoint is not None:
            self.organization.hold(node.checkpoint)
        request.node, request.adopted = node, node.checkpoint
        request.end = match.depth * grid
        end = min(request.prompt, request.end + chunk)
        more = self._units_to(request, end)
        leaves = len(self.live.planned(request.end, end))
        if self.admission.missing(units + more, 0, leaves) is not None:
            self._let_go(request)
            self.tree.unlock(node)
            request.node, request.end = None, 0
            return False
        request.hit = request.end
        self.hits += request.hit > 0
        request.lives += 1
        request.state = LiveState(private=request.private, newcomer=request.lives == 1)
        request.state.branch = match.attention_depth * grid
        parted = self.tree.parted(node, request.known_bytes(), match.attention_depth)
        request.state.parted = [depth * grid for depth in parted]
        request.state.units = [unit for block in node.path() for unit in block.units]
        self._record(request, match)
        self.live.running += 1
        self._unpin(request)
        self.waiting.remove(request)
        self.running.append(request)
        return True

    def _record(self, request: Request, match: Match) -> None:
        known, trail = request.known_bytes(), request.trail
        reuse = self.live.admitted(
            request.live, request.namespace, known, request.prompt, request.prompt - 1, match, trail
        )
        assert reuse.j_adopt == request.end <= reuse.attention <= reuse.r_max < request.prompt
        assert (reuse.cause is None) == (reuse.lost == 0) and reuse.lost >= reuse.gap_r
        assert len(self.live.history) <= self.live.history.most
        request.reuses.append(reuse)

    def _let_go(self, request: Request) -> None:
        if request.adopted is not None:
            checkpoint, request.adopted = request.adopted, None
            self.organization.release(checkpoint)

    def _units_to(self, request: Request, end: int) -> int:
        held = len(request.state.units) if request.state else request.lock.depth * self.per_block
        return ceil_div(end, self.organization.unit_tokens) - held

    @property
    def per_block(self) -> int:
        return self.organization.units_per_block

    def _take_units(self, wanted: Sequence[tuple[Request, int, int]]) -> None:
        """(request, units, its tokens after the coming forward)."""
        total, size = sum(count for _, count, _ in wanted), self.organization.unit_tokens
        assert self.lifetime.make_room(Need(units=total)), f"could_fit promised {total} units"
        units = self.organization.allocate_units(total)
        assert units is not None, f"make_room promised {total} units"
        for request, count, end in wanted:
            for unit in units[:count]:
                self.organization.leftovers.will_write(unit, min(size, end - len(request.live.units) * size))
                request.live.units.append(unit)
            del units[:count]

    # -- decode -----------------------------------------------------------------------------

    def decodable(self) -> list[Request]:
        return [r for r in self.running if r.prefilled and not r.pending and r.end < r.limit]

    def prepare_decode(self, requests: Sequence[Request]) -> list[Request]:
        """One more token each; the last ones are preempted until the rest fits."""
        batch = list(requests)
        while not self._decode_fits(batch):
            if len(batch) == 1 and not self.prepared:
                return []
            self.preempt(batch.pop())
        size = self.organization.unit_tokens
        self._take_units([(request, 1, request.end + 1) for request in batch if request.end % size == 0])
        for request in batch:
            start = request.end
            if start % self.organization.grid == 0:
                self.publish(request, start)
                self._begin(request, None)
            elif request.live.source is not None:
                self.live.settle(request.live)
        for request in batch:
            self._prepare(request, request.end + 1)
        return batch

    def _decode_fits(self, batch: Sequence[Request]) -> bool:
        crossing = sum(request.end % self.organization.unit_tokens == 0 for request in batch)
        return self.organization.could_fit(Need(units=crossing, checkpoints=self.live.forced))

    def _begin(self, request: Request, adopted: Checkpoint | None) -> None:
        old = request.live.live
        is_optional = old is not None and old.references == 1
        self.live.begin(request.live, request.end, adopted)
        self._check_spare(is_optional and request.live.live is not old)

    def _check_spare(self, taken: bool) -> None:
        """Whoever took an optional checkpoint has left the others what they may need next."""
        need = Need(units=self.live.running, checkpoints=self.live.due)
        assert not taken or self.organization.could_fit(need), f"a checkpoint left no room for {need}"

    # -- the forward ------------------------------------------------------------------------

    def _prepare(self, request: Request, end: int) -> None:
        state = request.live
        assert state.live is not None
        source = NOWHERE if request.end == 0 else place_of(state.source or state.live)
        boundaries = [(depth, place_of(checkpoint)) for depth, checkpoint in state.boundaries]
        units, target = list(state.units), place_of(state.live)
        self.prepared.append(
            Forward(request, request.end, end, units, source, target, boundaries, request.lives)
        )
        request.end, request.pending = end, True

    def launch(self) -> None:
        """Run the prepared batch: all of it reads before any of it writes to another's pages."""
        batch, self.prepared = self.prepared, []
        self.memory.clear_tails(self.organization.leftovers.take())
        for forward in batch:
            request = forward.request
            self.memory.check_tail(forward.units, forward.end)
            tag = request.tags[forward.start]
            self.memory.check_state(forward.source, tag, request.tags[0])
            self.memory.check_kv(request.live.units, request.tags, forward.start)
        self._check_apart(batch)
        for forward in batch:
            request = forward.request
            self.memory.write_kv(forward.units, request.tags, forward.start, forward.end)
            for depth, place in forward.boundaries:
                self.memory.write_state(place, request.tags[depth])
            self.memory.write_state(forward.target, request.tags[forward.end])
            request.pending = False
            if request.prefilled:
                request.tokens.append(request.tags[-1] % VOCABULARY)
                request.extend_tags()
        self.launched.append(batch)

    def _check_apart(self, batch: Sequence[Forward]) -> None:
        """No forward of a batch may write where another reads or writes."""
        writers: dict[int, Forward] = {}
        for forward in batch:
            for place in (forward.target, *(place for _, place in forward.boundaries)):
                for cell in self.memory.cells(place):
                    if writers.setdefault(cell, forward) is not forward:
                        raise ContentError("two forwards of a batch write the same state")
        for forward in batch:
            if forward.source != NOWHERE:
                for cell in self.memory.cells(forward.source):
                    if writers.get(cell, forward) is not forward:
                        raise ContentError("a forward reads a state that its batch overwrites")

    def process(self) -> None:
        """Results of the oldest launched batch: tokens become known, prompts are published."""
        assert not self.prepared, "SGLang launches what it prepared before it looks at results"
        for forward in self.launched.pop(0):
            request = forward.request
            if request not in self.running or forward.life != request.lives:
                continue  # aborted, or preempted meanwhile
            if forward.end < request.prompt:
                continue
            request.known = max(request.known, forward.end + 1)
            if request.known >= request.limit:
                self.publish(request, request.end)
                self.release(request)
                self.finished += 1
            elif forward.end == request.prompt:
                self.publish(request, forward.end)

    # -- publish, release, preempt ----------------------------------------------------------

    def publish(self, request: Request, up_to: int) -> None:
        """`GridPrefixCache.checkpoint`."""
        if request.private:
            return
        old = request.lock
        length = min(up_to, request.known)
        published = self.live.publish(request.live, old, request.known_bytes(), length, request.end)
        if published.node is old:
            return
        request.node = self.tree.lock(published.node)
        self._let_go(request)
        self.tree.unlock(old)
        self.live.handed_over(published)

    def release(self, request: Request) -> None:
        """`release_kv_cache`: units beyond the published path, the lock, then the row."""
        state, node = request.live, request.lock
        self.organization.release_units(state.units[node.depth * self.per_block :])
        self._let_go(request)
        self.tree.unlock(node)
        self.live.release(state)
        self.live.running -= 1
        self.running.remove(request)
        request.state = request.node = None

    def preempt(self, request: Request) -> None:
        """Publish what is launched, pin its deepest boundary, give everything back, wait again."""
        assert not request.pending
        if not request.private:
            self.publish(request, request.end)
            node: Node | None = request.lock
            while node is not None and node.checkpoint is None:
                node = node.parent
            if node is not None and node.checkpoint is not None:
                self._unpin(request)
                self.lifetime.pin(node.checkpoint)
                self.pins[request.rid] = node.checkpoint
        self.release(request)
        request.restart()
        self.waiting.append(request)

    def abort(self, request: Request) -> None:
        """At any point: waiting, prepared and not launched, or running."""
        if request in self.waiting:
            self.waiting.remove(request)
            self._unpin(request)
            return
        self.prepared = [forward for forward in self.prepared if forward.request is not request]
        self.release(request)

    def _unpin(self, request: Request) -> None:
        checkpoint = self.pins.pop(request.rid, None)
        if checkpoint is not None:
            self.lifetime.unpin(checkpoint)

    def flush(self) -> None:
        """`GridPrefixCache.reset`, once nothing runs."""
        for request in list(self.running):
            self.abort(request)
        self.prepared, self.launched = [], []
        self.pins.clear()
        self.retained.clear()
        self.reclaims.clear()
        self.tree.reset()
        self.lifetime.reset()
        self.organization.reset()
        self.memory.clear()
