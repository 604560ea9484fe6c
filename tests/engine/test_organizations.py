"""Every organization and family through one scheduler and tree: output as cold, hits by the formula."""

import random

from tests.support.configs import SAME_KINDS
from tests.support.park import on
from tests.support.tokens import T
from tests.support.witness import Witness

FAMILIES = (
    *("granite-s1", "granite-s2", "granite-d0", "qwen-s1", "qwen-s2", "qwen-d0"),
    *("lfm2-s2", "lfm2-s0", "lfm2-s1", "lfm2-d0"),
    *("kimi-s1", "kimi-s0", "kimi-s2", "kimi-d0"),
    *("ling-s1", "ling-s0", "ling-d0"),
)
OTHERS = ("s0", "s2", "d0", *FAMILIES, *SAME_KINDS)


@on(*OTHERS)
def test_hits_follow_the_formula(witness: Witness) -> None:
    """HB-01 and HB-03 on the organization's own grid."""
    k = witness.G // 8
    for n in (7, 8, 9, 17, 43):
        prompt = T(n * k, n * k)
        for _ in range(3):
            witness.ask(prompt, 4)
    shared = T(1, 42 * k)
    for i in range(4):
        reply = witness.ask(shared + T(100 + i, 24 * k))
        witness.hit_is(reply, 0 if i == 0 else 40 * k)
    witness.cached_exactly()


@on(*OTHERS)
def test_decode_leaves_checkpoints(witness: Witness) -> None:
    """A conversation whose second turn reuses what the first generated."""
    first = witness.ask(T(2, 3 * witness.G), 3 * witness.G)
    follow_up = witness.ask([*T(2, 3 * witness.G), *first.ids, *T(9, 5)], 4)
    witness.hit_is(follow_up, 5 * witness.G)


@on(*OTHERS)
def test_waves_over_one_prefix(witness: Witness) -> None:
    """Requests in one batch, some with a hit, crossing boundaries out of step."""
    shared = T(3, 4 * witness.G + 2)
    witness.ask(shared, 1)
    witness.together([shared + T(200 + i, 1 + 3 * i) for i in range(6)], 2 * witness.G)
    witness.together([T(220 + i, 5 + 7 * i) for i in range(6)], witness.G + 3)


@on(*FAMILIES)
def test_two_requests_fork_from_one_checkpoint(witness: Witness) -> None:
    """Both begin with the state that a third left, in one batch; neither sees what the other makes of it."""
    shared = T(5, 3 * witness.G)
    witness.ask([*shared, 6], 1)
    for tail in (1, witness.G + 3):
        for reply in witness.together([shared + T(520 + tail + i, tail) for i in range(2)], witness.G + 2):
            witness.hit_is(reply, 3 * witness.G)


@on(*OTHERS)
def test_eviction_under_a_random_load(witness: Witness) -> None:
    """More prefixes than the memory holds; freed pages and conv lines are poisoned."""
    chance = random.Random(7)
    for i in range(24):
        stem = T(300 + chance.randrange(10), 1 + chance.randrange(12 * witness.G))
        witness.ask(stem + T(400 + i, 1 + chance.randrange(20)), 1 + chance.randrange(12), exact=False)
    witness.together([T(320 + i, 6 * witness.G + i) for i in range(8)], 9)
    witness.evicted()
