"""What running requests hand to the tree: whole blocks, and the checkpoints at their boundaries."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_hybrid.pools.organization import Organization
from sglang_hybrid.radix.coming import Coming
from sglang_hybrid.radix.demand import Kind
from sglang_hybrid.radix.history import History
from sglang_hybrid.radix.interfaces import Placement
from sglang_hybrid.radix.lifetime import Lifetime
from sglang_hybrid.radix.live_state import Duplicate, LiveState, Published
from sglang_hybrid.radix.node import Node
from sglang_hybrid.radix.retention import Retention
from sglang_hybrid.radix.tree import GridTree


class Publishing:
    """The half of `LiveStates` that follows a forward."""

    def __init__(
        self, tree: GridTree, lifetime: Lifetime, placement: Placement, retention: Retention
    ) -> None:
        self.tree = tree
        self.lifetime = lifetime
        self.policy = lifetime.policy
        self.placement = placement
        self.retention = retention
        self.organization: Organization = tree.organization
        self.history = History(tree)
        self.coming = Coming(self.history)
        self._offered: dict[LiveState, None] = {}
        """Requests whose live state is in the lookup at this moment."""
        self.checkpoints_published = 0
        self.checkpoints_superseded = 0
        self.duplicates = 0

    def publish(self, state: LiveState, node: Node, tokens: bytes, length: int, position: int) -> Published:
        """Hand whole blocks of `tokens[..length]` below `node` to the tree, with their checkpoints.

        `node` must be locked; what the caller does next is `Memory.publish`.  `length` must not pass what
        launched forwards have written, nor the token ids that are known.  `position` is the token depth of
        the live state.
        """
        state.keep_boundaries()
        grid, per_block = self.organization.grid, self.organization.units_per_block
        first, last = node.depth, length // grid
        if state.trail is not None:
            self.coming.passed(state.trail, last)
        if last <= first:
            self._record(state, tokens, length, ())
            return Published(node, [], [])
        own_units = state.units[first * per_block : last * per_block]
        path, known = self.tree.grow(node, tokens, state.units, self._ends(state, first, last, position))
        duplicates = []
        for block in path:
            if block.depth > known:
                break
            for index in range(block.blocks):
                units = block.units[index * per_block : (index + 1) * per_block]
                duplicates.append(Duplicate(block.start + index, units))
        for index, units in duplicates:
            state.units[index * per_block : (index + 1) * per_block] = units
        for block in path:
            depth = block.depth * grid
            if depth == state.branch:
                self._want(state, block)
            if depth in state.kept or depth == position:
                self._offer(state, block, depth, last)
        self._note_ends(state, node, path)
        self._record(state, tokens, length, path)
        self.duplicates += len(duplicates)
        return Published(path[-1], duplicates, own_units)

    def _record(self, state: LiveState, tokens: bytes, length: int, path: Sequence[Node]) -> None:
        if state.trail is not None and not state.private:
            taken = {node.depth for node in path if node.checkpoint is not None}
            self.history.computed(state.trail, tokens, length, taken)

    def _ends(self, state: LiveState, first: int, last: int, position: int) -> list[int]:
        """Depths in blocks where a checkpoint may be offered or a later prompt may begin."""
        grid = self.organization.grid
        ends = {last, position // grid, *[depth // grid for depth in state.kept]}
        ends |= {state.prefilled // grid, state.branch // grid}
        return sorted([end for end in ends if first < end <= last])

    def _offer(self, state: LiveState, node: Node, depth: int, last: int) -> None:
        checkpoint = state.kept.pop(depth, None)
        is_live = checkpoint is None and not state.private
        if is_live:
            checkpoint = state.live
        if checkpoint is None:
            return
        if node.checkpoint is None:
            self.tree.offer(node, checkpoint)
            self.policy.offered(node, self._kind(state, node.depth, last))
            self.checkpoints_published += 1
            self.retention.made(state, node)
            if is_live:
                self._offered[state] = None
            before, state.passing = state.passing, checkpoint
            passed = None if before is None else before.owner
            for one in self.placement.gives_up(node, passed if isinstance(passed, Node) else None):
                self._give_up(state, one)
        elif is_live:
            state.covered = depth
        if not is_live:
            self.organization.release(checkpoint)

    def _want(self, state: LiveState, node: Node) -> None:
        if state.newcomer:
            state.newcomer = False
            self.placement.came(node)
            self.retention.want(node)

    def _give_up(self, state: LiveState, node: Node) -> None:
        """The placement does not keep its checkpoint: it goes, once the forward that reads it is launched."""
        if node.checkpoint is not None and node.checkpoint is state.source:
            state.superseded = node.checkpoint
        else:
            self._drop(state, node)

    def _drop(self, state: LiveState, node: Node) -> None:
        """Unless somebody keeps it, or the placement has another reason for it."""
        checkpoint = node.checkpoint
        if checkpoint is None or checkpoint.references or checkpoint.pins or checkpoint.retained:
            return
        if not self.placement.spares(state, node):
            self.tree.evict_checkpoint(checkpoint)
            self.checkpoints_superseded += 1
            if state.trail is not None:
                self.history.superseded(state.trail, node.depth * self.organization.grid)

    def _kind(self, state: LiveState, depth: int, last: int) -> Kind:
        prompt = state.prefilled // self.organization.grid
        if depth == prompt:
            return Kind.PROMPT_END
        return Kind.ANSWER_END if depth == last > prompt else Kind.INNER

    def _note_ends(self, state: LiveState, begun: Node, path: Sequence[Node]) -> None:
        """The request's path in the tree has grown by these nodes below `begun`."""
        prompt = state.prefilled // self.organization.grid
        if begun.depth != prompt:
            self.policy.passed(begun)
        if path[-1].depth > prompt:
            state.answer_end = path[-1]
        for node in path:
            if node.depth == prompt:
                state.prompt_end = node
        self.placement.published(state.prompt_end, state.answer_end)

    def handed_over(self, published: Published) -> None:
        """Drop the request's own references on the units of the published blocks."""
        self.organization.release_units(published.own_units)
