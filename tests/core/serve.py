"""Serve one request at a time, as an idle scheduler without overlap would: the words of the rule tests."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from sglang_hybrid.pools.organization import Checkpoint
from sglang_hybrid.radix.tree import Match, Node
from tests.core.audit import Audit
from tests.core.request import Request
from tests.core.shadow import Shadow
from tests.core.worlds import NAMES, World

NO_KEY = (None, None)


def scheduler(name: str = "S1", **world: object) -> Shadow:
    """A shadow scheduler on an organization with room for everything, unless the world says less."""
    room = {"pages": 150, "units": 120, "states": 60}
    return Shadow(World(name, **{**room, **world}).build())  # type: ignore[arg-type]


def everywhere() -> list[Shadow]:
    """One scheduler an organization, with room for everything."""
    return [scheduler(name) for name in NAMES]


def serve(
    shadow: Shadow,
    tokens: Sequence[int],
    new: int = 1,
    *,
    chunk: int = 1 << 20,
    key: Hashable = NO_KEY,
    private: bool = False,
) -> Request:
    """Run a request to its end; returns it with `hit` in tokens and what it generated."""
    request = shadow.submit(tokens, new, key, private)
    assert request is not None, "an empty budget cannot serve this request"
    while request in shadow.waiting or not request.prefilled:
        assert shadow.prepare_extend(chunk) == [request], "an idle scheduler does not admit the request"
        step(shadow)
    while request in shadow.running:
        assert shadow.prepare_decode([request]) == [request], "a lone request cannot go on"
        step(shadow)
    return request


def start(shadow: Shadow, tokens: Sequence[int], new: int = 100, **options: object) -> Request:
    """Prefill a request and leave it running."""
    request = shadow.submit(tokens, new, NO_KEY, **options)  # type: ignore[arg-type]
    assert request is not None
    while not request.prefilled or request in shadow.waiting:
        shadow.prepare_extend(1 << 20)
        step(shadow)
    return request


def decode(shadow: Shadow, request: Request, steps: int = 1) -> None:
    for _ in range(steps):
        assert shadow.prepare_decode([request]) == [request]
        step(shadow)


def step(shadow: Shadow) -> None:
    """Launch what is prepared, look at its results, check everything."""
    shadow.launch()
    shadow.process()
    Audit(shadow)()


def match(shadow: Shadow, tokens: Sequence[int], key: Hashable = NO_KEY) -> Match:
    """What a request with these tokens would find."""
    request = Request(0, key, False, list(tokens), 0)
    return shadow.tree.match(key, request.known_bytes(), len(tokens) // shadow.organization.grid)


def node_at(shadow: Shadow, tokens: Sequence[int], depth: int, key: Hashable = NO_KEY) -> Node:
    """The node of this prompt that ends at this many blocks, checkpoint or not."""
    size = shadow.tree.block_bytes
    node = shadow.tree.match(key, b"", 0).node
    data = Request(0, key, False, list(tokens), 0).known_bytes()
    while node.depth < depth:
        node = node.children[data[node.depth * size : (node.depth + 1) * size]]
    assert node.depth == depth, f"no checkpoint ever stood at block {depth}: it is inside a run"
    return node


def checkpoint_at(shadow: Shadow, tokens: Sequence[int], depth: int) -> Checkpoint:
    checkpoint = node_at(shadow, tokens, depth).checkpoint
    assert checkpoint is not None
    return checkpoint


def audit(shadow: Shadow) -> None:
    Audit(shadow)()
