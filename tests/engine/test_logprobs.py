"""Requests that ask for more than tokens: prompt logprobs, several samples, constrained decoding."""

import json

import pytest

from tests.support.cold import TOLERANCE
from tests.support.park import on
from tests.support.tokens import T
from tests.support.witness import Witness

STARTS = (0, 1, 7, 8, 20, 39, 40, 42)


@pytest.mark.parametrize(
    ("server", "start"),
    [*(("g8", start) for start in STARTS), ("s0-ample", 20), ("s2-ample", 20), ("d0-ample", 20)],
    indirect=["server"],
)
def test_prompt_logprobs_limit_the_hit(witness: Witness, start: int) -> None:
    """A hit ends before the first prompt position whose logprob is wanted; those logprobs equal cold's."""
    k = witness.G // 8
    start *= k
    prompt = T(1, 43 * k)
    witness.ask(prompt, 2)
    reply = witness.ask(prompt, 2, start=start)
    witness.hit_is(reply, witness.G * (min(start, 42 * k) // witness.G))
    got = [entry[0] for entry in reply.meta["input_token_logprobs"]]
    reference = witness.cold.server(witness.config.model).generate(prompt, 1, logprob_start_len=0)
    want = [entry[0] for entry in reference.meta["input_token_logprobs"]][start:]
    assert len(got) == len(want) == len(prompt) - start
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        if i == 0:
            # Nothing before the first asked position is computed here, so it has no logprob.
            assert a is None or b is None or abs(a - b) <= TOLERANCE
        else:
            assert abs(a - b) <= TOLERANCE, f"prompt logprob at {start + i}: {a} instead of {b}"


@on("g8", "s0-ample", "s2-ample", "d0-ample")
def test_several_samples_of_one_prompt(witness: Witness) -> None:
    """n = 4: all greedy samples equal cold."""
    prompt = T(1, 4 * witness.G + 5)
    for _ in range(2):
        replies = witness.server.generate_all(prompt, 14, sampling={"n": 4})
        assert len(replies) == 4
        for reply in replies:
            witness.check_output(reply, prompt, 14)
            witness.expected.commit(prompt, reply.ids)
            witness.check_bounds(reply.cached, witness.expected.hit(prompt), prompt, "n=4")
    witness.hit_is(witness.ask(prompt, 3), 4 * witness.G)
    witness.cached_exactly()


REGEX = {"regex": "(one|two|three|four|five|six){20}"}
SCHEMA = {"json_schema": json.dumps({"type": "array", "items": {"type": "integer"}, "minItems": 60})}


@pytest.mark.parametrize(
    ("server", "constraint"),
    [("g8", SCHEMA), *((name, REGEX) for name in ("g8", "s0-ample", "s2-ample", "d0-ample"))],
    ids=["g8-schema", "g8-regex", "s0-ample-regex", "s2-ample-regex", "d0-ample-regex"],
    indirect=["server"],
)
def test_constrained_decoding(witness: Witness, constraint: dict[str, str]) -> None:
    """A grammar's tokens cross boundaries, are cached and resumed like any other."""
    prompt, m = T(1, 2 * witness.G + 3), 30
    for _ in range(2):
        reply = witness.server.generate(prompt, m, sampling=constraint)
        cold = witness.cold.ask(witness.config.model, prompt, m, sampling=constraint)
        witness.equal(reply, cold)
        assert reply.text.startswith(("[", *("one", "two", "three", "four", "five", "six")))
        witness.expected.commit(prompt, reply.ids)
    witness.hit_is(reply, 2 * witness.G)
    witness.ask([*prompt, *reply.ids, 4], 2)


@on("g8")
def test_sampled_requests_leave_the_cache_right(witness: Witness) -> None:
    """Tokens drawn at temperature 1 are committed like greedy ones: what follows them equals cold."""
    prompt = T(1, 21)
    replies = witness.server.generate_all(prompt, 20, sampling={"n": 3, "temperature": 1.0})
    assert len({reply.ids for reply in replies}) > 1
    for reply in replies:
        witness.expected.commit(prompt, reply.ids)
    for i, reply in enumerate(replies):
        witness.ask([*prompt, *reply.ids, *T(70 + i, 3)], 3)
    witness.cached_exactly()
