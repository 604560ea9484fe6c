"""What happens to a request in the memory that serves: adopt, compute, publish, preempt, release.

The calls and their order are those of `engine.requests` and `engine.cache`; tensors alone are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from sglang_hybrid.geometry import ceil_div
from sglang_hybrid.pools.organization import ONE_CHECKPOINT, Checkpoint, Need, Organization
from sglang_hybrid.radix.admission import Admission
from sglang_hybrid.radix.history import Trail
from sglang_hybrid.radix.live import LiveStates
from sglang_hybrid.radix.live_state import LiveState
from sglang_hybrid.radix.node import Node
from sglang_hybrid.radix.order import Limit
from sglang_hybrid.radix.tree import GridTree, Match
from sglang_hybrid.simulator.job import Job
from sglang_hybrid.simulator.keys import DIGEST_BYTES
from sglang_hybrid.simulator.setting import Setting

STATES = 2
"""States that a lone request may need at once: its live one, and the one that it starts from."""


class InsistentStates(LiveStates):
    """A checkpoint is never skipped as long as anything can be evicted for it."""

    def _take_spare(self, limit: Limit) -> Checkpoint | None:
        if not self.lifetime.make_room(ONE_CHECKPOINT):
            return None
        return self.organization.allocate_checkpoint()


class Core:
    """Pools, tree, live states and admission of one setting."""

    def __init__(self, setting: Setting) -> None:
        self.organization: Organization = setting.organization()
        self.grid = self.organization.grid
        self.unit_tokens = self.organization.unit_tokens
        self.tree = GridTree(self.organization, digest_bytes=DIGEST_BYTES)
        self.lifetime = setting.order(self.tree)
        self.lifetime.on_given_up = self._given_up
        self.insists = setting.serving.insists
        kind = InsistentStates if self.insists else LiveStates
        policy = setting.policy if setting.serving.waits else setting.policy._replace(wait="never")
        states = setting.states or partial(policy.live_states, kind=kind)
        self.live = states(self.tree, self.lifetime)
        self.admission: Admission = setting.policy.admission(self.live)
        self.aligned = setting.serving.aligned
        self.pins: dict[Job, Checkpoint] = {}

    def units_to(self, job: Job, depth: int) -> int:
        """Units that the job lacks for so many tokens."""
        return ceil_div(depth, self.unit_tokens) - len(job.state.units)

    def ever_fits(self, job: Job) -> bool:
        """Whether an empty memory can serve it."""
        units = ceil_div(job.prompt + job.request.new, self.unit_tokens)
        return self.organization.capacity_fits(Need(units, STATES))

    # -- admission --------------------------------------------------------------------------

    def match(self, job: Job) -> Match:
        """The deepest boundary it could start from: at least one token is left to compute."""
        return self.tree.match(job.namespace, job.key(self.grid), (job.known - 1) // self.grid)

    def adopt(self, job: Job, match: Match) -> None:
        """Protect what it would start from; `abandon` undoes it."""
        grid, node = self.grid, self.tree.lock(match.node)
        job.node, job.adopted = node, node.checkpoint
        if node.checkpoint is not None:
            self.organization.hold(node.checkpoint)
        state = job.state = LiveState(newcomer=not job.lives)
        state.units = [unit for run in node.path() for unit in run.units]
        job.position = match.depth * grid
        state.branch = match.attention_depth * grid

    def trail(self, job: Job) -> Trail:
        """The job's own until it runs."""
        if job.trail is None:
            job.trail = Trail(job.namespace)
            self.live.history.extend(job.trail, job.key(self.grid), job.known)
        return job.trail

    def abandon(self, job: Job) -> None:
        self._let_go(job)
        self.tree.unlock(job.node)

    def admit(self, job: Job) -> None:
        """It runs from now on."""
        key, depth, attention = job.key(self.grid), job.node.depth, job.state.branch // self.grid
        if attention > depth:
            parted = self.tree.parted(job.node, key, attention)
            job.state.parted = [depth * self.grid for depth in parted]
        checkpoint = self.pins.pop(job, None)
        if checkpoint is not None:
            self.lifetime.unpin(checkpoint)
        found = Match(job.node, depth, attention)
        trail, job.trail = self.trail(job), None
        reuse = self.live.admitted(job.state, job.namespace, key, job.known, job.known - 1, found, trail)
        if not job.lives:
            job.reuse = reuse
        job.lives += 1
        job.running = True
        self.live.running += 1

    def _let_go(self, job: Job) -> None:
        if job.adopted is not None:
            checkpoint, job.adopted = job.adopted, None
            self.organization.release(checkpoint)

    # -- forwards ---------------------------------------------------------------------------

    def chunk(self, start: int, known: int, left: int) -> int:
        """Tokens of the chunk that begins at `start`; 0 when the next boundary is too far."""
        if not self.aligned:
            return min(known - start, left)
        last = known // self.grid * self.grid
        if start >= last:
            return known - start if known - start <= left else 0
        return min(last, (start + left) // self.grid * self.grid) - start

    def take(self, jobs: Sequence[Job], counts: Sequence[int]) -> bool:
        """So many more units for each, all or nothing."""
        total = sum(counts)
        if total and not self.lifetime.make_room(Need(units=total)):
            return False
        units = self.organization.allocate_units(total)
        assert units is not None
        taken = 0
        for job, count in zip(jobs, counts):
            job.state.units += units[taken : taken + count]
            taken += count
        return True

    def take_chunk(self, job: Job, end: int) -> bool:
        """Take the units of a further chunk, if there is a state to leave the boundary with too."""
        units = self.units_to(job, end)
        if not self.organization.could_fit(Need(units, int(self.insists))):
            return False
        return self.take([job], [units])

    def prefill(self, chunks: Sequence[tuple[Job, int]]) -> None:
        """Prepare a forward up to these token depths; their units are there."""
        live = self.live
        for job, _ in chunks:
            if job.adopted is not None:
                self.lifetime.touch(job.adopted)
            live.begin(job.state, job.position, job.adopted)
            self._let_go(job)
        for job, end in chunks:
            if self.aligned:
                job.state.prefilled = end  # checkpoints stand where chunks end, nowhere between
            else:
                live.extend(job.state, job.position, end)

    def publish(self, job: Job, position: int, length: int | None = None) -> None:
        """Hand whole blocks to the tree, up to the depth that launched forwards have written.

        `length` is a lesser depth, where the one of the live state is prepared already.
        """
        length = position if length is None else length
        published = self.live.publish(job.state, job.node, job.key(self.grid), length, position)
        if published.node is not job.node:
            node = self.tree.lock(published.node)
            self.tree.unlock(job.node)
            self.live.handed_over(published)
            job.node = node

    # -- the end ----------------------------------------------------------------------------

    def release(self, job: Job, position: int) -> None:
        """The request ends or is preempted; what it computed stays behind."""
        self.publish(job, position)
        own = job.node.depth * self.organization.units_per_block
        self.organization.release_units(job.state.units[own:])
        self.tree.unlock(job.node)
        self._let_go(job)
        self.live.release(job.state)
        self.live.running -= 1
        job.running = False

    def preempt(self, job: Job, position: int) -> None:
        """`release`, and keep the deepest boundary for its return."""
        self.publish(job, position)
        node: Node | None = job.node
        while node is not None and node.checkpoint is None:
            node = node.parent
        if node is not None and node.checkpoint is not None:
            self.lifetime.pin(node.checkpoint)
            self.pins[job] = node.checkpoint
        self.release(job, position)

    def _given_up(self, checkpoint: Checkpoint) -> None:
        for job in [job for job, pinned in self.pins.items() if pinned is checkpoint]:
            del self.pins[job]
            self.lifetime.unpin(checkpoint)

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless tree and pools agree with themselves and each other."""
        self.tree.check_integrity()
        self.organization.check_integrity()
