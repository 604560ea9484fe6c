"""A unit that held a state is clean before a forward reads it; without that, whole-page attention says so.

Freed states are filled with NaN in these servers, and each checks at every forward that all is finite behind
the tokens (`tests.support.planted.whole_pages`).
"""

from collections.abc import Iterator

import pytest

from tests.support.cold import differences
from tests.support.park import on
from tests.support.planted.planted_faults import TAILS
from tests.support.server_config import FAULTS
from tests.support.tokens import T
from tests.support.witness import Witness

PROMPTS = [T(seed, length) for seed, length in ((61, 37), (62, 90), (63, 21), (64, 130), (65, 11), (66, 68))]


@pytest.fixture
def fault(request: pytest.FixtureRequest) -> Iterator[str]:
    """The guard is out until the test ends."""
    path = FAULTS / request.param
    yield request.param
    path.unlink(missing_ok=True)


def fill_with_states(witness: Witness) -> None:
    """Leave the memory full of the states of others, all of it free."""
    for seed in range(8):
        witness.ask(T(100 + seed, 60), 3, exact=False)
    witness.flush()


@on("s2")
def test_units_of_freed_states_are_clean(witness: Witness) -> None:
    """Prefills, decode steps into fresh units, and company."""
    fill_with_states(witness)
    for prompt in PROMPTS[:3]:
        witness.ask(prompt, 12)
    witness.together(PROMPTS[3:], 12)


@on("s2")
@pytest.mark.parametrize("fault", TAILS, indirect=True)
def test_a_guard_taken_out_shows_in_the_output(witness: Witness, fault: str) -> None:
    if not witness.config.hybrid:
        pytest.skip("stock has no guard")
    wanted = [witness.cold.ask(witness.config.model, prompt, 12) for prompt in PROMPTS]
    fill_with_states(witness)
    (FAULTS / fault).touch()
    wrong = 0
    for prompt, cold in zip(PROMPTS, wanted, strict=True):
        reply = witness.server.submit(prompt, 12).result()
        wrong += differences(reply, cold) is not None
    assert wrong, "INCONCLUSIVE: no output differs without the guard"
