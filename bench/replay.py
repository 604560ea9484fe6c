"""Serve a trace from an organization's real bookkeeping: tree, live states, eviction; no tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from struct import pack

from bench.trace import HASHED_TOKENS, Request
from sglang_hybrid.geometry import ceil_div
from sglang_hybrid.pools.organization import Checkpoint, Need, Organization
from sglang_hybrid.radix.lifetime import Lifetime
from sglang_hybrid.radix.live import LiveState, LiveStates
from sglang_hybrid.radix.tree import GridTree, Node

PIECE_TOKENS = 256
"""Keys are built of pieces that divide both the trace's blocks and D0's native grid of 1792."""

STEP_TOKENS = 32
"""Tokens that every running request generates between two looks at the queue."""

_REPEAT = PIECE_TOKENS // 8
"""A piece is its id, this many times: one byte a token."""


class Running:
    """An admitted request."""

    def __init__(self, request: Request, key: bytes, node: Node) -> None:
        self.request = request
        self.key = key
        self.node = node
        self.adopted: Checkpoint | None = node.checkpoint
        self.state = LiveState()
        self.position = 0
        """Tokens whose state is computed."""

    @property
    def end(self) -> int:
        return self.request.prompt + self.request.new


class Replay:
    """One scheduler without overlap: admit in order of arrival, prefill in one step, decode in lockstep.

    Units for the whole request are taken at admission, so that nothing is ever preempted and the
    adopted tokens are those of first admissions.  Prompts are published when they are prefilled.
    """

    def __init__(
        self,
        organization: Organization,
        order: Callable[[GridTree], Lifetime],
        most_running: int = 1,
        states: Callable[[GridTree, Lifetime], LiveStates] = LiveStates,
    ) -> None:
        if organization.grid % PIECE_TOKENS:
            raise ValueError(f"a grid of {organization.grid} is no multiple of {PIECE_TOKENS} tokens")
        self.organization = organization
        self.tree = GridTree(organization, token_bytes=1)
        self.lifetime = order(self.tree)
        self.live = states(self.tree, self.lifetime)
        self.most_running = most_running
        self.running: list[Running] = []
        self.adopted_tokens = 0
        self.prompt_tokens = 0
        self.refused = 0
        """Requests that an empty budget cannot hold."""
        self._generated = 0

    def run(self, requests: Sequence[Request], admitted: Callable[[int], None] = lambda count: None) -> None:
        """Serve all of them; `admitted` is called with how many have just left the queue."""
        waiting = deque(requests)
        while waiting or self.running:
            batch = self._admit(waiting)
            if not batch and not self.running and waiting:
                waiting.popleft()
                self.refused += 1
            self._prefill(batch)
            admitted(len(batch))
            for one in list(self.running):
                self._decode(one)

    # -- admission --------------------------------------------------------------------------

    def _admit(self, waiting: deque[Request]) -> list[Running]:
        batch: list[Running] = []
        units = 0
        while waiting and len(self.running) + len(batch) < self.most_running:
            one = self._adopt(waiting[0])
            units += self._missing(one)
            if not self.organization.could_fit(Need(units, 1 + self.live.due)):
                self._let_go(one)
                self.tree.unlock(one.node)
                break
            waiting.popleft()
            batch.append(one)
            self.live.running += 1
            self.adopted_tokens += one.position
            self.prompt_tokens += one.request.prompt
        return batch

    def _adopt(self, request: Request) -> Running:
        grid = self.organization.grid
        key = self._key(request)
        match = self.tree.match(None, key, (request.prompt - 1) // grid)
        one = Running(request, key, self.tree.lock(match.node))
        if one.adopted is not None:
            self.organization.hold(one.adopted)
        one.position = match.depth * grid
        one.state.branch = match.attention_depth * grid
        one.state.units = [unit for block in one.node.path() for unit in block.units]
        return one

    def _let_go(self, one: Running) -> None:
        if one.adopted is not None:
            self.organization.release(one.adopted)
            one.adopted = None

    def _missing(self, one: Running) -> int:
        return ceil_div(one.end, self.organization.unit_tokens) - len(one.state.units)

    def _key(self, request: Request) -> bytes:
        """Prompt and answer; a piece that holds a generated token is like no other."""
        half = HASHED_TOKENS // PIECE_TOKENS
        pieces = range(request.prompt // PIECE_TOKENS)
        ids = [request.ids[piece // half] * half + piece % half for piece in pieces]
        while len(ids) * PIECE_TOKENS < request.prompt + request.new:
            self._generated -= 1
            ids.append(self._generated)
        return b"".join(pack("<q", one) * _REPEAT for one in ids)

    # -- forwards ---------------------------------------------------------------------------

    def _prefill(self, batch: Sequence[Running]) -> None:
        for one in batch:
            if one.adopted is not None:
                self.lifetime.touch(one.adopted)
        total = sum(self._missing(one) for one in batch)
        assert self.lifetime.make_room(Need(units=total)), f"could_fit promised {total} units"
        units = self.organization.allocate_units(total)
        assert units is not None
        for one in batch:
            count = self._missing(one)
            one.state.units += units[:count]
            del units[:count]
        for one in batch:
            self.live.begin(one.state, one.position, one.adopted)
            self._let_go(one)
        for one in batch:
            self.live.extend(one.state, one.position, one.request.prompt)
            one.position = one.request.prompt
            self.running.append(one)
        for one in batch:
            self._publish(one)

    def _decode(self, one: Running) -> None:
        """Up to STEP_TOKENS more tokens, no further than the next boundary."""
        grid = self.organization.grid
        if one.position % grid == 0:
            self._publish(one)
            self.live.begin(one.state, one.position, None)
        one.position = min(one.end, one.position + STEP_TOKENS, (one.position // grid + 1) * grid)
        self.live.settle(one.state)
        if one.position == one.end:
            self._finish(one)

    def _publish(self, one: Running) -> None:
        published = self.live.publish(one.state, one.node, one.key, one.position, one.position)
        if published.node is not one.node:
            node = self.tree.lock(published.node)
            self.tree.unlock(one.node)
            self.live.handed_over(published)
            one.node = node

    def _finish(self, one: Running) -> None:
        self._publish(one)
        own = one.node.depth * self.organization.units_per_block
        self.organization.release_units(one.state.units[own:])
        self.tree.unlock(one.node)
        self.live.release(one.state)
        self.live.running -= 1
        self.running.remove(one)
