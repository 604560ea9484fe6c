"""Exceptions planted on a request's way: where it can be told that request ends, elsewhere the server."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.configs import CONFIGS
from tests.support.park import ServerPark, on
from tests.support.tokens import T
from tests.support.witness import Witness

TOLD = {
    "arrival": "arrival",
    "match": "admission",
    "asking": "admission",
    "expecting": "admission",
    "binding": "prefill",
    "units": "prefill",
    "prefill": "prefill",
    "begun": "prefill",
}
"""Where it is planted (`planted_faults`) -> the stage that is counted."""
CURSED = "cursed-"


def state(witness: Witness) -> dict[str, Any]:
    return dict(witness.server.info()["internal_states"][0]["hybrid"])


def counts(witness: Witness) -> dict[str, int]:
    now = state(witness)
    return {**now["requests_ended"], "unpublished": now["count_unpublished"]}


@on("s2")
@pytest.mark.parametrize("where", TOLD)
def test_a_request_that_can_be_told_ends_alone(
    witness: Witness, fault: Callable[[str], None], where: str
) -> None:
    """Two that fail, and four that wait with them, beside one that runs."""
    before = counts(witness)
    mark = witness.server.log_mark()
    running = witness.begin(T(1, 43), 150)
    # They wait behind whole chunks and are admitted together: none of them with a part of it.
    blocker = witness.submit(T(20, 6 * witness.config.chunk), 1)
    while state(witness)["requests_running"] < 2:
        time.sleep(0.01)
    fault(f"raise-{where}")
    good = [witness.submit(T(2 + i, 30), 5) for i in range(2)]
    cursed = [witness.submit(T(9, 30 + i), 5, rid=f"{CURSED}{where}-{i}-") for i in range(2)]
    good += [witness.submit(T(4 + i, 30), 5) for i in range(2)]
    for future in cursed:
        reply = future.result(120)
        assert reply.status == 500 and f"planted at {where}" in reply.message, reply
    for i, future in enumerate(good):
        witness.check(future.result(120), T(2 + i, 30), 5)
    witness.check(running.result(120), T(1, 43), 150)
    witness.check(blocker.result(120), T(20, 6 * witness.config.chunk), 1)
    assert ("tried one by one" in witness.server.log_since(mark)) == (TOLD[where] == "prefill")
    after = counts(witness)
    assert {name: after[name] - before[name] for name in after if after[name] != before[name]} == {
        TOLD[where]: 2
    }
    witness.base()


@on("s2")
def test_what_cannot_be_handed_to_the_tree_is_answered(
    witness: Witness, fault: Callable[[str], None]
) -> None:
    before = counts(witness)
    fault("raise-publish")
    reply = witness.server.generate(T(9, 30), 20, rid=f"{CURSED}publish-")
    witness.check(reply, T(9, 30), 20, commit=False)
    after = counts(witness)
    assert after.pop("unpublished") > before.pop("unpublished") and after == before
    witness.base()
    again = witness.server.generate(T(9, 30), 20)
    witness.check_output(again, T(9, 30), 20)
    assert again.cached == 0
    witness.base()


@pytest.mark.long
@pytest.mark.parametrize("where", ["decode", "maps", "published"])
def test_where_it_cannot_be_told_the_server_ends(
    park: ServerPark, fault: Callable[[str], None], where: str
) -> None:
    with park.serve(CONFIGS["s2"]) as server:
        fault(f"raise-{where}")
        with pytest.raises(AssertionError):
            server.generate(T(1, 16), 20, rid=f"{CURSED}{where}-")
        server.wait_exit(60)
        assert f"planted at {where}" in server.log_since()
