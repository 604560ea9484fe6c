"""Admission's limits and what a chunked prompt may go on with, against the organizations themselves."""

from types import SimpleNamespace

import pytest

pytest.importorskip("sglang")

from sglang_hybrid.engine.admission import GridPrefillBudget, longest_request
from sglang_hybrid.engine.build import most_running
from sglang_hybrid.geometry import ceil_div
from sglang_hybrid.pools.organization import Need
from sglang_hybrid.radix.memory import Memory, Prefill
from sglang_hybrid.radix.policy import Policy
from tests.core.worlds import NAMES, World


@pytest.mark.parametrize("chunk", [3, 4, 7, 12, 1000])
@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_that_is_alone_goes_on_to_its_end(name: str, chunk: int) -> None:
    """HB-20: the longest prompt, in chunks that leave published states behind, in the order of the engine."""
    memory = Memory(World(name, pages=30, units=50, states=3).build(), token_bytes=1)
    organization = memory.organization
    cache = SimpleNamespace(memory=memory, refused=lambda at, need: None)
    allocator = SimpleNamespace(organization=organization, page_size=organization.unit_tokens)
    prompt = longest_request(organization)
    tokens = bytes(i % 251 for i in range(prompt))
    lookup = memory.look_up((None, None), tokens, prompt - 1)
    state, _ = memory.admit(lookup, memory.adopt(lookup.match.node), tokens, prompt)
    done = 0
    while done < prompt:
        budget = GridPrefillBudget(allocator, cache)
        budget.begun = -done % organization.unit_tokens
        room = budget.available_chunk_tokens(chunk)
        assert room, f"{prompt - done} of {prompt} tokens wait for ever: {organization.usage()}"
        end = min(prompt, done + room)
        assert memory.take_units([state], [end]), "the promised units are not there"
        memory.prepare_prefill([Prefill(state, done, end)])
        memory.publish(state, tokens, end, end)
        done = end
    assert len(state.units) == ceil_div(prompt, organization.unit_tokens)


@pytest.mark.parametrize("headroom", [0.0, 0.99])
@pytest.mark.parametrize("name", NAMES)
def test_whatever_is_not_too_long_is_admitted_when_nothing_runs(name: str, headroom: float) -> None:
    """`longest_request` and `check_prefill` count the same pieces, without SGLang's page for rounding."""
    organization = World(name, pages=30, units=50, states=3).build()
    memory = Memory(organization, Policy(headroom), token_bytes=1)
    page = organization.unit_tokens
    cache = SimpleNamespace(memory=memory, refused=lambda *why: None)
    longest = longest_request(organization)
    for tokens in range(1, organization.token_capacity() + 3 * page):
        budget = GridPrefillBudget(SimpleNamespace(organization=organization, page_size=page), cache)
        admitted, _ = budget.check_prefill(
            extend_input_len=tokens, total_tokens=tokens + page, input_tokens=tokens, chunk_limit=None
        )
        assert admitted is organization.capacity_fits(Need(ceil_div(tokens, page), 1)), tokens
        assert admitted or tokens > longest
    memory.live.running = memory.live._alive = 1
    budget = GridPrefillBudget(SimpleNamespace(organization=organization, page_size=page), cache)
    admitted, _ = budget.check_prefill(
        extend_input_len=page, total_tokens=2 * page, input_tokens=page, chunk_limit=None
    )
    assert admitted is (headroom == 0.0), "the headroom is asked for beside another request"


@pytest.mark.parametrize("headroom", [0.0, 0.3])
@pytest.mark.parametrize("name", NAMES)
def test_as_many_may_run_as_is_announced(name: str, headroom: float) -> None:
    """Requests of one unit each, in one pass."""
    organization = World(name, pages=40, units=50, states=9).build()
    memory = Memory(organization, Policy(headroom), token_bytes=1)
    page = organization.unit_tokens
    cache = SimpleNamespace(memory=memory, refused=lambda *why: None)
    budget = GridPrefillBudget(SimpleNamespace(organization=organization, page_size=page), cache)
    running = 0
    while budget.check_prefill(extend_input_len=1, total_tokens=1 + page, input_tokens=1, chunk_limit=None)[
        0
    ]:
        running += 1
        budget.rules.states += 1
        budget.total_offset += page
    assert running == most_running(organization, headroom) > 1
