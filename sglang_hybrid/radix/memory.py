"""The memory of one rank, and what happens to a request in it, from its first lookup to its end.

One request's life, in the order of the calls:

    match / look_up     how deep could it start?                         no side effects
    begin_pass          may it begin?  (`Pass`: should_wait, missing, promise)
    adopt               the path of the hit and the checkpoint at its end are protected; `abandon` undoes it
    admit               it runs from now on: its `LiveState`, with the units of the path
    take_units          KV units for the coming forward, all or nothing
    prepare_prefill     live states, then checkpoints for the boundaries that the forward passes
    publish             whole blocks and checkpoints go to the tree
    prepare_decode      a step leaves boundaries: publish, then go on in other pages
    preempt             its deepest checkpoint is kept for its return; `forget` undoes it
    finish              all that it holds is given back

SGLang's adapters (`engine`), the simulator and the property run translate between their requests and these
calls.  What is simulated and what is tested is what serves.  Nothing here knows a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple

from sglang_hybrid.geometry import ceil_div
from sglang_hybrid.pools.organization import Checkpoint, Need, Organization
from sglang_hybrid.pools.pages import IntegrityError
from sglang_hybrid.radix.admission import Admission, Pass
from sglang_hybrid.radix.eviction import EVICTIONS
from sglang_hybrid.radix.history import Lookup, Reuse
from sglang_hybrid.radix.interfaces import EvictionPolicy, Placement
from sglang_hybrid.radix.lifetime import Lifetime
from sglang_hybrid.radix.live import LiveStates
from sglang_hybrid.radix.live_state import Duplicate, Lease, LiveState
from sglang_hybrid.radix.node import Node
from sglang_hybrid.radix.placement import PLACEMENTS
from sglang_hybrid.radix.policy import DEFAULT_POLICY, Policy
from sglang_hybrid.radix.retention import Retention
from sglang_hybrid.radix.tree import GridTree, Match


class Prefill(NamedTuple):
    """A request's part of a prefill: tokens `start` to `end`."""

    state: LiveState
    start: int
    end: int


class Publication(NamedTuple):
    """What a request can publish: its token ids `text` up to token `length`.

    `length` must not pass what launched forwards have written, nor the token ids that are known.
    `position` is the token depth of the live state.
    """

    state: LiveState
    text: bytes
    length: int
    position: int


class Memory:
    """Organization, tree, lifetime, live states, admission and pins of one rank."""

    def __init__(
        self,
        organization: Organization,
        policy: Policy = DEFAULT_POLICY,
        *,
        token_bytes: int = 8,
        digest_bytes: int | None = None,
        eviction: Callable[[GridTree], EvictionPolicy] | None = None,
        placement: Callable[[Organization], Placement] | None = None,
        states: type[LiveStates] = LiveStates,
    ) -> None:
        """Keys are token ids of `token_bytes` each, or `digest_bytes` for a whole block (`GridTree`).

        `eviction` and `placement` take the place of those that the policy names (`radix.interfaces`).
        """
        self.organization = organization
        self.grid = organization.grid
        self.unit_tokens = organization.unit_tokens
        self.tree = GridTree(organization, token_bytes, digest_bytes=digest_bytes)
        self.lifetime = Lifetime(self.tree, eviction or EVICTIONS[policy.eviction])
        self.lifetime.on_given_up = self._given_up
        place = placement or PLACEMENTS[policy.checkpoints]
        retention = Retention(self.lifetime, policy.retention)
        self.live = states(self.tree, self.lifetime, place(organization), retention, policy.waits)
        self.admission = Admission(self.live, self.lifetime, policy.headroom)
        self.pins: dict[Hashable, Checkpoint] = {}
        """The deepest boundary of each preempted request, by the caller's key."""
        self.on_given_up: Callable[[Hashable, int], None] | None = None
        """Called with the key of a preempted request whose checkpoint goes, and its token depth."""
        self.on_unpublished: Callable[[LiveState, Exception], None] | None = None
        """Called when blocks of a request cannot go to the tree; without it, `publish` raises."""
        self._step_units: list[int] = []

    # -- before a request runs --------------------------------------------------------------

    def match(self, namespace: Hashable, text: bytes | memoryview, usable: int) -> Match:
        """The deepest boundary within the first `usable` tokens where both halves are there."""
        return self.tree.match(namespace, text, usable // self.grid)

    def look_up(
        self,
        namespace: Hashable,
        text: bytes | memoryview,
        usable: int,
        before: Lookup | None = None,
    ) -> Lookup:
        """`match` for a request that waits; `before` is its last lookup, if there was one."""
        trail = None if before is None else before.trail
        return Lookup(namespace, usable, self.tree.match(namespace, text, usable // self.grid), trail)

    def begin_pass(self) -> Pass:
        """A pass over the queue: which requests may begin now."""
        return Pass(self.admission)

    def adopt(self, node: Node) -> Lease:
        """Protect the path to a matched node, and the checkpoint at its end."""
        node = self.tree.lock(node)
        checkpoint = node.checkpoint
        if checkpoint is not None:
            self.organization.hold(checkpoint)
        return Lease(node, checkpoint)

    def abandon(self, lease: Lease) -> None:
        """Undo `adopt`: the request does not run."""
        self._drop_adopted(lease)
        self.tree.unlock(lease.node)

    def _drop_adopted(self, lease: Lease) -> None:
        checkpoint = lease.adopted
        if checkpoint is not None:
            lease.adopted = None
            self.organization.release(checkpoint)

    def admit(
        self,
        lookup: Lookup,
        lease: Lease,
        text: bytes,
        prompt: int,
        *,
        private: bool = False,
        resumed: bool = False,
        key: Hashable = None,
    ) -> tuple[LiveState, Reuse]:
        """The request runs from now on, with the first `prompt` tokens of `text` to compute.

        `private`: it may not publish.  `resumed`: it ran before and was preempted, under this `key`.
        Also returns what it could have reused.
        """
        node, attention = lease.node, lookup.match.attention_depth
        state = LiveState(private=private, newcomer=not resumed)
        state.lease, state.key = lease, key
        state.units = [unit for run in node.path() for unit in run.units]
        state.branch = attention * self.grid
        if attention > node.depth:
            parted = self.tree.parted(node, text, attention)
            state.parted = [depth * self.grid for depth in parted]
        self.forget(key)
        found = Match(node, node.depth, max(node.depth, attention))
        reuse = self.live.admitted(state, lookup.namespace, text, prompt, lookup.usable, found, lookup.trail)
        lookup.trail = None  # the state has it now
        self.live.running += 1
        return state, reuse

    # -- before a forward -------------------------------------------------------------------

    def could_fit(self, need: Need) -> bool:
        """Whether the need fits once everything idle is evicted."""
        return self.organization.could_fit(need)

    def missing_for_step(self, units: int) -> Need | None:
        """What a decode step that takes so many units does not find; None when it may be prepared.

        Live states that others have adopted must go on in new pages; checkpoints are optional.
        """
        need = Need(units, self.live.forced)
        return None if self.organization.could_fit(need) else need

    def make_room(self, need: Need) -> bool:
        """Evict, in order, until the need fits; False when it cannot."""
        return self.lifetime.make_room(need)

    def take_step_units(self, count: int) -> list[int] | None:
        """Units for the first tokens that a decode step writes into them; `prepare_decode` hands them out."""
        units = self._take(count)
        for unit in units or ():
            self.organization.leftovers.will_write(unit, 1)
        self._step_units = units or []
        return units

    @property
    def step_units(self) -> int:
        """Units that are taken for the decode step in preparation and not handed out."""
        return len(self._step_units)

    def take_units(self, states: Sequence[LiveState], ends: Sequence[int]) -> bool:
        """The units that each lacks to hold so many tokens, all or nothing."""
        size, leftovers = self.unit_tokens, self.organization.leftovers
        wanted = [ceil_div(end, size) - len(state.units) for state, end in zip(states, ends, strict=True)]
        fresh = self._take(sum(wanted))
        if fresh is None:
            return False
        taken = 0
        for state, count in zip(states, wanted, strict=True):
            state.units += fresh[taken : taken + count]  # at once: `finish` finds what a request has
            taken += count
        for state, end, count in zip(states, ends, wanted, strict=True):
            for index in range(len(state.units) - count, len(state.units)):
                leftovers.will_write(state.units[index], min(size, end - index * size))
        return True

    def _take(self, count: int) -> list[int] | None:
        if count and not self.lifetime.make_room(Need(units=count)):
            return None
        return self.organization.allocate_units(count)

    def prepare_prefill(self, parts: Sequence[Prefill]) -> None:
        """Places for the states that a prefill writes; its units are there.

        Every live state comes first: checkpoints take only what the whole batch leaves.
        """
        for state, start, _ in parts:
            adopted = state.lease.adopted
            if adopted is not None:
                self.lifetime.touch(adopted)
            self.live.begin(state, start, adopted)
            self._drop_adopted(state.lease)  # the live state holds what it reads by itself now
        for state, start, end in parts:
            self.live.extend(state, start, end)

    def prepare_decode(
        self,
        settling: Iterable[LiveState],
        leaving: Sequence[Publication],
        crossing: Sequence[LiveState] = (),
    ) -> list[Sequence[Duplicate]]:
        """One token more for each of a batch; all arguments are in its order.

        `settling` have read another state than they wrote, and stand on no boundary; `leaving` stand on one.
        `crossing` begin a new unit: they get the `take_step_units`.  Returns what `publish` did for each of
        `leaving`.
        """
        for state, unit in zip(crossing, self._step_units, strict=True):
            state.units.append(unit)
        self._step_units = []
        for state in settling:
            self.live.settle(state)
        duplicates = []
        for one in leaving:
            duplicates.append(self.publish(*one))
            self.live.begin(one.state, one.position, None)
        return duplicates

    # -- after a forward --------------------------------------------------------------------

    def publish(self, state: LiveState, text: bytes, length: int, position: int) -> Sequence[Duplicate]:
        """Hand the request's whole blocks to the tree, states where they stand (`Publication`).

        Blocks that the tree had already are returned: the request's row must point at their units.
        """
        if state.private:
            return ()
        lease = state.lease
        before = lease.node
        try:
            published = self.live.publish(state, before, text, length, position)
        except Exception as error:
            if self.on_unpublished is None:
                raise
            self.on_unpublished(state, error)
            return ()
        if published.node is before:
            return ()
        # The new path is protected before the old one is let go, and before the request drops its own
        # references: at no moment could the blocks be evicted.
        lease.node = self.tree.lock(published.node)
        if lease.adopted is not None:
            self._drop_adopted(lease)
        self.tree.unlock(before)
        self.live.handed_over(published)
        return published.duplicates

    # -- the end ----------------------------------------------------------------------------

    def finish(self, state: LiveState) -> None:
        """The request is done, aborted or preempted: give back its units, its path and its states."""
        lease = state.lease
        own = lease.node.depth * self.organization.units_per_block
        self.organization.release_units(state.units[own:])
        self.abandon(lease)
        self.live.release(state)
        self.live.running -= 1

    def preempt(self, key: Hashable, one: Publication) -> Sequence[Duplicate]:
        """Publish, and keep the deepest checkpoint on the path until the request comes back under this key.

        `finish` follows.
        """
        if one.state.private:
            return ()
        duplicates = self.publish(*one)
        node: Node | None = one.state.lease.node
        while node is not None and node.checkpoint is None:
            node = node.parent
        if node is not None and node.checkpoint is not None:
            self.forget(key)
            self.lifetime.pin(node.checkpoint)
            self.pins[key] = node.checkpoint
        return duplicates

    def forget(self, key: Hashable) -> None:
        """The preempted request comes back, or never will."""
        checkpoint = self.pins.pop(key, None)
        if checkpoint is not None:
            self.lifetime.unpin(checkpoint)

    def _given_up(self, checkpoint: Checkpoint) -> None:
        """Nothing else could make room for what goes on."""
        node = checkpoint.owner
        assert isinstance(node, Node)
        for key in [key for key, pinned in self.pins.items() if pinned is checkpoint]:
            if self.on_given_up is not None:
                self.on_given_up(key, node.depth * self.grid)
            self.forget(key)

    def flush(self) -> None:
        """Forget everything.  Nothing may run."""
        if self.live.running:
            raise IntegrityError(f"a flush while {self.live.running} requests run")
        self.pins.clear()
        self.tree.reset()
        self.lifetime.reset()
        self.live.history.reset()
        self.organization.reset()
        self._step_units = []

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless tree and organization agree with themselves and each other."""
        self.tree.check_integrity()
        self.organization.check_integrity()
