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
from sglang_hybrid.radix.admission import Pass
from sglang_hybrid.radix.live import LiveStates
from sglang_hybrid.radix.live_state import LiveState
from sglang_hybrid.radix.memory import Memory, Prefill, Publication
from sglang_hybrid.radix.policy import DEFAULT_POLICY, Policy
from tests.core.content import NOWHERE, ContentError, Contents, place_of
from tests.core.request import Forward, Request

TOKEN_BYTES = 8
VOCABULARY = 3
"""Few tokens, so that prompts and generated text meet again."""


class CheckedStates(LiveStates):
    """Live states that check what an optional checkpoint leaves the others."""

    def begin(self, state: LiveState, start: int, adopted: Checkpoint | None) -> None:
        old = state.live
        is_optional = old is not None and old.references == 1
        super().begin(state, start, adopted)
        self._check_spare(is_optional and state.live is not old)

    def extend(self, state: LiveState, start: int, end: int) -> None:
        super().extend(state, start, end)
        self._check_spare(bool(state.boundaries))

    def _check_spare(self, taken: bool) -> None:
        """Whoever took an optional checkpoint has left the others what they may need next."""
        need = Need(units=self.running, checkpoints=self.due)
        assert not taken or self.organization.could_fit(need), f"a checkpoint left no room for {need}"


class Shadow:
    """One scheduler.  Methods are named after what the engine does; they assert what it relies on."""

    def __init__(self, organization: Organization, policy: Policy = DEFAULT_POLICY) -> None:
        self.memory = memory = Memory(organization, policy, token_bytes=TOKEN_BYTES, states=CheckedStates)
        self.organization, self.tree, self.lifetime = organization, memory.tree, memory.lifetime
        self.live, self.admission, self.pins = memory.live, memory.admission, memory.pins
        self.contents = Contents(organization)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
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
            if not self.memory.could_fit(Need(units + more, self.live.due)):
                break
            units += more
            wanted.append((request, end))
        rules = self.memory.begin_pass()
        fresh = []
        for request in list(self.waiting[:most]):
            if self._should_wait(request, rules):
                continue
            if not self._adopt(request, chunk, units, rules):
                break
            end = min(request.prompt, request.end + chunk)
            units += self._units_to(request, end)
            fresh.append(request)
            wanted.append((request, end))
        for request in fresh:
            self._admit(request)
        states = [request.live for request, _ in wanted]
        granted = self.memory.take_units(states, [end for _, end in wanted])
        assert granted, f"could_fit promised {units - margin} units"
        self.memory.prepare_prefill([Prefill(request.live, request.end, end) for request, end in wanted])
        for request, end in wanted:
            self._prepare(request, end)
        return [request for request, _ in wanted]

    def _should_wait(self, request: Request, rules: Pass) -> bool:
        """A prefill that runs, or was admitted just now, computes what this one shares."""
        request.lookup = self.memory.look_up(
            request.namespace, request.known_bytes(), request.prompt - 1, request.lookup
        )
        waits = rules.should_wait(request.lookup, request.known_bytes)
        assert not (waits and not self.running and not rules.states), "it waits for nobody"
        return waits

    def _adopt(self, request: Request, chunk: int, units: int, rules: Pass) -> bool:
        """Protect what the request starts from, if there is room for its first chunk."""
        lookup = request.found
        lease = self.memory.adopt(lookup.match.node)
        request.lease, request.end = lease, lookup.match.depth * self.organization.grid
        end = min(request.prompt, request.end + chunk)
        more = self._units_to(request, end)
        if rules.missing(units + more, request.end, end) is not None:
            self.memory.abandon(lease)
            request.lease, request.end = None, 0
            return False
        rules.admitted()
        if not request.private:
            rules.promise(lookup, lease, request.known_bytes, request.prompt)
        return True

    def _admit(self, request: Request) -> None:
        request.hit = request.end
        self.hits += request.hit > 0
        request.lives += 1
        request.state, reuse = self.memory.admit(
            request.found, request.lent, request.known_bytes(), request.prompt,
            private=request.private, resumed=request.lives > 1, key=request.rid,
        )  # fmt: skip
        assert reuse.j_adopt == request.end <= reuse.attention <= reuse.r_max < request.prompt
        assert (reuse.cause is None) == (reuse.lost == 0) and reuse.lost >= reuse.gap_r
        assert len(self.live.history) <= self.live.history.most
        request.reuses.append(reuse)
        self.waiting.remove(request)
        self.running.append(request)

    def _units_to(self, request: Request, end: int) -> int:
        held = len(request.state.units) if request.state else request.lock.depth * self.per_block
        return ceil_div(end, self.organization.unit_tokens) - held

    @property
    def per_block(self) -> int:
        return self.organization.units_per_block

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
        crossing = [request.live for request in batch if request.end % self.organization.unit_tokens == 0]
        units = self.memory.take_step_units(len(crossing))
        assert units is not None, f"could_fit promised a unit to each of {len(crossing)}"
        leaving = [request for request in batch if request.end % self.organization.grid == 0]
        settling = [r.live for r in batch if r.live.source is not None and r not in leaving]
        self.memory.prepare_decode(settling, [self._publication(r, r.end) for r in leaving], crossing)
        for request in batch:
            self._prepare(request, request.end + 1)
        return batch

    def _decode_fits(self, batch: Sequence[Request]) -> bool:
        crossing = sum(request.end % self.organization.unit_tokens == 0 for request in batch)
        return self.memory.missing_for_step(crossing) is None

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
        self.contents.clear_tails(self.organization.leftovers.take())
        for forward in batch:
            request = forward.request
            self.contents.check_tail(forward.units, forward.end)
            tag = request.tags[forward.start]
            self.contents.check_state(forward.source, tag, request.tags[0])
            self.contents.check_kv(request.live.units, request.tags, forward.start)
        self._check_apart(batch)
        for forward in batch:
            request = forward.request
            self.contents.write_kv(forward.units, request.tags, forward.start, forward.end)
            for depth, place in forward.boundaries:
                self.contents.write_state(place, request.tags[depth])
            self.contents.write_state(forward.target, request.tags[forward.end])
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
                for cell in self.contents.cells(place):
                    if writers.setdefault(cell, forward) is not forward:
                        raise ContentError("two forwards of a batch write the same state")
        for forward in batch:
            if forward.source != NOWHERE:
                for cell in self.contents.cells(forward.source):
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
        self.memory.publish(*self._publication(request, up_to))

    @staticmethod
    def _publication(request: Request, up_to: int) -> Publication:
        return Publication(request.live, request.known_bytes(), min(up_to, request.known), request.end)

    def release(self, request: Request) -> None:
        """`release_kv_cache`, once what it computed is published."""
        self.memory.finish(request.live)
        self.running.remove(request)
        request.state = request.lease = None

    def preempt(self, request: Request) -> None:
        """Publish what is launched, pin its deepest boundary, give everything back, wait again."""
        assert not request.pending
        self.memory.preempt(request.rid, self._publication(request, request.end))
        self.release(request)
        request.restart()
        self.waiting.append(request)

    def abort(self, request: Request) -> None:
        """At any point: waiting, prepared and not launched, or running."""
        if request in self.waiting:
            self.waiting.remove(request)
            self.memory.forget(request.rid)
            return
        self.prepared = [forward for forward in self.prepared if forward.request is not request]
        self.release(request)

    def flush(self) -> None:
        """`GridPrefixCache.reset`, once nothing runs."""
        for request in list(self.running):
            self.abort(request)
        self.prepared, self.launched = [], []
        self.retained.clear()
        self.reclaims.clear()
        self.memory.flush()
        self.contents.clear()
