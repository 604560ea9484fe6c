"""Isolation by `extra_key` and `cache_salt` (HB-24): one root a key, the same output under all."""

from typing import Any

import pytest

from tests.support.expect import NO_KEY, Key
from tests.support.park import on
from tests.support.tokens import T
from tests.support.witness import Witness

X, M = T(1, 41), 9
FIRST_HITS = (0, 0, 0, 40, 40)


def key(field: str, value: str | None) -> Key:
    """The key of a request whose one field is set."""
    if value is None:
        return NO_KEY
    return (value, None) if field == "extra_key" else (None, value)


@pytest.mark.parametrize(
    ("server", "field"),
    [("g8", "cache_salt"), *((name, "extra_key") for name in ("g8", "s0-ample", "s2-ample", "d0-ample"))],
    indirect=["server"],
)
def test_keys_do_not_share(witness: Witness, field: str) -> None:
    """HB-24 through /generate."""
    k = witness.G // 8
    x, m = T(1, 41 * k), 9 * k
    replies = {}
    for value, tokens in zip((None, "a", "b", "a", None), FIRST_HITS, strict=True):
        replies[value] = witness.ask(x, m, key=key(field, value))
        witness.hit_is(replies[value], tokens * k)
    assert len({reply.ids for reply in replies.values()}) == 1
    witness.cached_exactly()

    keys = [key(field, value) for value in "abc"]
    for reply, tokens in zip(witness.together([x] * 3, m, keys=keys), (40, 40, 0), strict=True):
        witness.hit_is(reply, tokens * k)
    witness.cached_exactly()

    turn = [*x, *replies["a"].ids, *T(9, 5)]
    for value, tokens in (("a", 48), ("b", 48), ("d", 0)):
        witness.hit_is(witness.ask(turn, 3, key=key(field, value)), tokens * k)
    witness.cached_exactly()


@on("g8")
def test_both_fields_are_one_key(witness: Witness) -> None:
    """("a", None), (None, "a"), ("a", "b") and ("ab", None) are four roots: fields are never joined."""
    for one in (("a", None), (None, "a"), ("a", "b"), ("ab", None), ("b", "a")):
        witness.hit_is(witness.ask(X, 2, key=one), 0)
    witness.hit_is(witness.ask(X, 2, key=("a", "b")), 40)
    witness.cached_exactly()


@on("g8")
def test_salt_of_an_openai_completion(witness: Witness) -> None:
    """HB-24 through /v1/completions: the API layer hands the salt on."""

    def complete(salt: str | None) -> tuple[int, str]:
        body: dict[str, Any] = {
            "model": "default", "prompt": X, "max_tokens": M, "temperature": 0, "ignore_eos": True,
        }  # fmt: skip
        answer = witness.server.post("/v1/completions", body | ({"cache_salt": salt} if salt else {}))
        details = answer["usage"].get("prompt_tokens_details") or {}
        return details.get("cached_tokens", 0), answer["choices"][0]["text"]

    answers = [complete(salt) for salt in (None, "a", "b", "a", None)]
    if witness.config.hybrid:
        assert tuple(cached for cached, _ in answers) == FIRST_HITS
    assert len({text for _, text in answers}) == 1


@on("tight")
def test_pressure_under_one_key_never_spoils_another(witness: Witness) -> None:
    """HB-24, end: evictions for "c" may cost "a" its hit, never its output."""
    witness.ask(X, M, key=("a", None), exact=False)
    for i in range(40):
        witness.ask(T(200 + i, 60), 2, key=("c", None), exact=False)
    witness.evicted()
    again = witness.ask(X, M, key=("a", None), exact=False)
    third = witness.ask(X, M, key=("a", None), exact=False)
    assert third.cached >= again.cached
