"""Admission's limits and what a chunked prompt may go on with, against the organizations themselves."""

from types import SimpleNamespace

import pytest

pytest.importorskip("sglang")

from sglang_hybrid.engine.admission import GridPrefillBudget, longest_request
from sglang_hybrid.geometry import ceil_div
from sglang_hybrid.pools.organization import Need
from sglang_hybrid.radix.lifetime import Lifetime
from sglang_hybrid.radix.live import LiveState, LiveStates
from sglang_hybrid.radix.tree import GridTree
from tests.core.worlds import NAMES, World


@pytest.mark.parametrize("chunk", [3, 4, 7, 12, 1000])
@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_that_is_alone_goes_on_to_its_end(name: str, chunk: int) -> None:
    """HB-20: the longest prompt, in chunks that leave published states behind, in the order of the engine."""
    organization = World(name, pages=30, units=50, states=3).build()
    tree = GridTree(organization, 1)
    lifetime = Lifetime(tree)
    live = LiveStates(tree, lifetime)
    state = LiveState()
    cache = SimpleNamespace(live=live, refused=lambda at, need: None)
    allocator = SimpleNamespace(organization=organization, page_size=organization.unit_tokens)
    prompt = longest_request(organization)
    tokens = bytes(i % 251 for i in range(prompt))
    node = tree.lock(tree.match((None, None), tokens, 0).node)
    live.running = 1
    done = 0
    while done < prompt:
        room = GridPrefillBudget(allocator, cache).available_chunk_tokens(chunk)
        assert room, f"{prompt - done} of {prompt} tokens wait for ever: {organization.usage()}"
        end = min(prompt, done + room)
        units = ceil_div(end, organization.unit_tokens) - len(state.units)
        assert lifetime.make_room(Need(units=units)), "the promised units are not there"
        state.units += organization.allocate_units(units) or []
        live.begin(state, done, None)
        live.extend(state, done, end)
        published = live.publish(state, node, tokens, end, end)
        if published.node is not node:
            locked = tree.lock(published.node)
            tree.unlock(node)
            node = locked
            live.handed_over(published)
        done = end
    assert len(state.units) == ceil_div(prompt, organization.unit_tokens)
