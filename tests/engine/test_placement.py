"""`branch` and `sparse` placement: output as cold, hits by the documented formula, one checkpoint a place."""

import random

from tests.support.park import on
from tests.support.tokens import T
from tests.support.witness import Witness

PLACED = ("branch", "sparse")


@on(*PLACED)
def test_hits_follow_the_formula(witness: Witness) -> None:
    """A shared context, its second question's fork, a conversation, and prompts that branch off anywhere."""
    context = T(1, 5 * witness.G + 3)
    for seed in range(3):
        witness.ask(context + T(10 + seed, 2 * witness.G), 3)
    first = witness.ask(T(2, 3 * witness.G + 1), 3 * witness.G)
    witness.ask([*T(2, 3 * witness.G + 1), *first.ids, *T(3, 5)], 4)
    chance = random.Random(5)
    known = [context, T(2, 40)]
    for seed in range(12):
        parent = chance.choice(known)
        prompt = parent[: chance.randrange(len(parent))] + T(20 + seed, 1 + chance.randrange(30))
        reply = witness.ask(prompt, 1 + chance.randrange(20))
        known.append([*prompt, *reply.ids])
    witness.cached_exactly()


@on(*PLACED)
def test_waves(witness: Witness) -> None:
    """Requests that run together, with headroom and retention on."""
    shared = T(4, 3 * witness.G + 2)
    witness.ask(shared, 1)
    witness.together([shared + T(200 + i, 1 + 3 * i) for i in range(8)], 2 * witness.G + 3)
    witness.together([shared + T(220 + i, 2 + 5 * i) for i in range(8)], witness.G)
