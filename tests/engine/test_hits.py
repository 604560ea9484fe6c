"""Hits of sequential requests (HB-01, HB-03, HB-05), with ample memory: exactly the formula."""

import pytest

from tests.support.park import on
from tests.support.tokens import T
from tests.support.witness import Witness


@on("g8", "g16", "s0-ample", "s2-ample", "d0-ample")
def test_the_same_prompt_again_hits(witness: Witness) -> None:
    """HB-01."""
    k = witness.G // 8
    right = {7: 0, 8: 0, 9: 8, 15: 8, 16: 8, 17: 16, 43: 40}
    for n, tokens in right.items():
        prompt = T(n * k, n * k)
        first, second = (witness.ask(prompt, 4) for _ in range(2))
        witness.cached_exactly()
        before = witness.pools()
        third = witness.ask(prompt, 4)
        witness.hit_is(first, 0)
        witness.hit_is(second, tokens * k)
        witness.hit_is(third, tokens * k)
        after = witness.pools()
        if before is not None and after is not None:
            assert (after.cached, after.checkpoints) == (before.cached, before.checkpoints)


@on("g8", "g16")
@pytest.mark.parametrize("tail", [24, 3])
def test_a_long_shared_prefix_hits_whatever_the_tail(witness: Witness, tail: int) -> None:
    """HB-03 (a) and (b)."""
    k = witness.G // 8
    shared = T(1, 42 * k)
    for i in range(6):
        reply = witness.ask(shared + T(100 + i, tail * k))
        witness.hit_is(reply, 0 if i == 0 else 40 * k)
    witness.cached_exactly()


@on("g8", "g16", "s0-ample", "s2-ample", "d0-ample")
def test_branches_off_one_base(witness: Witness) -> None:
    """HB-03 (c)."""
    k = witness.G // 8
    base = T(1, 67 * k)
    witness.hit_is(witness.ask(base), 0)
    right = {0: 0, 1: 0, 7: 0, 8: 8, 9: 8, 23: 16, 24: 24, 25: 24, 66: 64}
    for d, tokens in right.items():
        reply = witness.ask(base[: d * k] + T(200 + d, (67 - d) * k))
        witness.hit_is(reply, tokens * k)
    witness.hit_is(witness.ask(base), 64 * k)
    witness.cached_exactly()


@on("g8")
def test_prompts_of_at_most_one_grid_step(witness: Witness) -> None:
    """HB-05: nothing to reuse, nothing kept below a grid step, and nothing breaks."""
    for n in (1, 2, 3, 4, 7, 8):
        for _ in range(2):
            witness.hit_is(witness.ask(T(n, n)), 0)
    witness.cached_exactly()
    for reply in witness.together([T(300 + i, 1 + i % 3) for i in range(64)], 3):
        witness.hit_is(reply, 0)
    witness.cached_exactly()


@on("g8")
def test_decode_leaves_checkpoints_of_a_short_prompt(witness: Witness) -> None:
    """HB-05, last step: 2 prompt tokens and 19 states of decode reach the boundary at 16."""
    first = witness.ask(T(1, 2), 20)
    follow_up = witness.ask([*T(1, 2), *first.ids, 3])
    witness.hit_is(follow_up, 16)
