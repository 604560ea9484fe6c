"""KV in fp8, end to end: a stock server with the same KV dtype and no cache says the same."""

from tests.support.park import on
from tests.support.tokens import T
from tests.support.witness import Witness


@on("fp8")
def test_hits_and_forks(witness: Witness) -> None:
    """Cold, again, on from there, two that part inside the prefix, and a prompt of several chunks."""
    base = T(1, 100)
    witness.ask(base, 8)
    witness.hit_is(witness.ask(base, 8), 96)
    witness.ask([*base, *T(2, 40)], 8)
    witness.ask([*base[:70], *T(3, 30)], 8)
    witness.ask(T(4, 600), 4)


@on("fp8")
def test_company_and_decode_over_boundaries(witness: Witness) -> None:
    """Answers that cross into fresh units, which held the states of others."""
    for seed in range(6):
        witness.ask(T(20 + seed, 70), 2)
    witness.flush()
    witness.together([T(30, 37), T(31, 64), T(32, 5)], 70)
