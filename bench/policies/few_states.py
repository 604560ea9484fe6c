"""Placements that bound the states of a path: the last K of a conversation, and SGLang's cap.

States stand at ends and where paths part; it is left to LRU which paths stay.
"""

from __future__ import annotations

from collections.abc import Iterable

from sglang_hybrid.pools.organization import Organization
from sglang_hybrid.radix.live_state import LiveState
from sglang_hybrid.radix.node import Node
from sglang_hybrid.radix.placement import Branch


class PathBound(Branch):
    """At most `most` states, as far as the `excess` on a path may go."""

    def __init__(self, organization: Organization, most: int) -> None:
        super().__init__(organization)
        self.most = most
        self.gone: list[Node] = []
        """What went last for the bound's sake."""

    def excess(self, node: Node) -> list[Node]:
        """What the path above a node that has gained a state has too many."""
        raise NotImplementedError

    def gives_up(self, node: Node, before: Node | None) -> Iterable[Node]:
        yield from super().gives_up(node, before)
        self.gone = self.excess(node)
        yield from self.gone

    def spares(self, state: LiveState, node: Node) -> bool:
        return node not in self.gone and super().spares(state, node)


class LastStates(PathBound):
    """A conversation keeps its K deepest states; those where others part from it are not its own."""

    def excess(self, node: Node) -> list[Node]:
        own: list[Node] = []
        above = node.parent
        while above is not None and not above.is_branch:
            if above.checkpoint is not None:
                own.append(above)
            above = above.parent
        return own[self.most - 1 :]


class PathCap(PathBound):
    """SGLang's `--mamba-max-states-per-path`: the shallowest go first.

    Source: `_evict_excess_path_states` of `unified_cache/components/mamba.py`.  Forks, and states that are
    executed on, stay, so that the cap is a soft one.
    """

    def excess(self, node: Node) -> list[Node]:
        holders = [one for one in node.path()[:-1] if one.checkpoint is not None]
        free = [one for one in holders if one.checkpoint and not one.checkpoint.references]
        return [one for one in free if not one.is_branch][: max(0, 1 + len(holders) - self.most)]
