"""Clients that behave badly, on little memory; `python -m bench.chaos` is the long version."""

from bench.storm import Storm
from tests.support.park import on
from tests.support.witness import Witness

REQUESTS = 60
MOST_TOKENS = 150
SAMPLED = 8


@on("kv256", "s0", "s2", "d0")
def test_nothing_a_client_does_ends_the_scheduler(witness: Witness) -> None:
    """Aborts by id and by dropped connection, flushes, keys that look alike: who is answered equals cold."""
    storm = Storm(witness.server.url, 1, witness.G, MOST_TOKENS)
    storm.run(REQUESTS)
    assert not storm.wrong, storm.wrong
    witness.server.check_alive()
    assert storm.done["answered"] and storm.done["aborted"] and storm.done["drop"], storm.done
    for answer in storm.answers[:SAMPLED]:
        cold = witness.cold.ask(witness.config.model, answer.prompt, len(answer.ids))
        assert cold.ids == answer.ids or min(cold.gaps) < 0.05, answer.prompt
