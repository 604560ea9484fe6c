"""Bodies drawn from SGLang's request schema, beside good requests that must answer as cold."""

from collections.abc import Iterator

import pytest

from bench.fuzz import Fuzz, run
from bench.fuzz_rules import BAD
from bench.storm import Storm, sample
from tests.support.cold import equal_cold
from tests.support.configs import CONFIGS
from tests.support.park import ServerPark, on
from tests.support.reply import Reply
from tests.support.server_config import FAULTS
from tests.support.witness import Witness

BODIES = 300
BODIES_LONG = 1250
COMPARED = 12


def fuzz(witness: Witness, seed: int, bodies: int) -> None:
    storm = Storm(witness.server.url, seed, witness.G, 200)
    found = run(witness.server.url, seed, bodies, storm)
    print(dict(found.done), len(storm.answers))
    assert not found.wrong, "\n".join(found.wrong)
    assert found.done["sent"] == bodies and not found.done["ended"] and not found.done["5xx"]
    assert set(+found.rules) == {rule.name for rule in BAD} and found.done["2xx"] and storm.done["hits"]
    for answer in sample(storm.answers, COMPARED / len(storm.answers), seed):
        reply = Reply(ids=answer.ids, logprobs=answer.logprobs)
        equal_cold(reply, witness.cold.ask(witness.config.model, answer.prompt, len(answer.ids)))
    witness.base()


@on("s2")
def test_bodies_of_all_kinds(witness: Witness) -> None:
    fuzz(witness, 1, BODIES)


@pytest.mark.long
@on("g8", "s0", "s2", "d0")
def test_many_bodies_of_all_kinds(witness: Witness) -> None:
    fuzz(witness, 2, BODIES_LONG)


@pytest.fixture
def without_check(request: pytest.FixtureRequest) -> Iterator[None]:
    """The plugin `planted` passes over what the door says in these words."""
    (FAULTS / "no-door").write_text(request.param)
    yield
    (FAULTS / "no-door").unlink()


REMOVED = {
    "extra_key": "extra_key has",
    "custom_params": "custom_params has",
    "logit_bias": "logit_bias",
}
"""Rule -> words of its sentence.  Without it the server answers, or errs, and goes on."""


@on("s2")
@pytest.mark.parametrize("without_check", ["|".join(REMOVED.values())], indirect=True)
def test_checks_that_are_taken_out_are_found(witness: Witness, without_check: None) -> None:
    found = Fuzz(witness.server.url, 1)
    found.run(4 * len(BAD))
    assert set(+found.missed) == set(REMOVED), found.wrong


@pytest.mark.long
@pytest.mark.parametrize("without_check", ["input_ids has the id", "logprob_start_len is"], indirect=True)
def test_a_check_that_keeps_the_server_alive_is_found(park: ServerPark, without_check: None) -> None:
    with park.serve(CONFIGS["s2"]) as server:
        found = Fuzz(server.url, 1)
        found.run(4 * len(BAD))
    assert found.done["ended"] and found.wrong, found.done
