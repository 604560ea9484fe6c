"""What the fuzz run holds against a server: an answer where a refusal is due, an own error, its end."""

from types import SimpleNamespace
from typing import Any

import pytest
import requests

pytest.importorskip("hypothesis")

from bench.fuzz import Fuzz, drawn, status_of
from bench.fuzz_rules import BAD

ANSWERS = {
    "an answer": (200, "{}"),
    "a stream": (200, 'data: {"text": ""}\n'),
    "an error of its own": (500, "{}"),
    "one in a stream": (200, 'data: {"error": {"code": 500}}\n'),
}
REFUSALS = {"a refusal": (400, "{}"), "one in a stream": (200, 'data: {"error": {"code": 400}}\n')}


def sent(monkeypatch: pytest.MonkeyPatch, status: int, text: str) -> Fuzz:
    """Every rule broken once, at a server that answers all alike."""
    answer = SimpleNamespace(status_code=status, text=text)
    monkeypatch.setattr(requests, "post", lambda *args, **kwargs: answer)
    fuzz = Fuzz("http://nowhere", 0)
    for rule in BAD:
        fuzz.one(*drawn(rule.body, 1, 0)[0], rule.name)
    return fuzz


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_what_is_not_refused_is_held_against_it(
    monkeypatch: pytest.MonkeyPatch, answer: tuple[int, str]
) -> None:
    fuzz = sent(monkeypatch, *answer)
    assert set(fuzz.missed) == {rule.name for rule in BAD} and len(fuzz.wrong) == len(BAD)


@pytest.mark.parametrize("answer", REFUSALS.values(), ids=REFUSALS)
def test_a_refusal_is_what_is_due(monkeypatch: pytest.MonkeyPatch, answer: tuple[int, str]) -> None:
    fuzz = sent(monkeypatch, *answer)
    assert not fuzz.wrong and not +fuzz.missed and fuzz.done["4xx"] == len(BAD)


def test_a_server_that_ends_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*args: Any, **kwargs: Any) -> Any:
        raise requests.ConnectionError("gone")

    monkeypatch.setattr(requests, "post", gone)
    monkeypatch.setattr(Fuzz, "alive", lambda self: False)
    fuzz = Fuzz("http://nowhere", 0)
    fuzz.one("/generate", {"text": "a"})
    assert fuzz.done["ended"] == 1 and fuzz.wrong


def test_the_same_seed_draws_the_same() -> None:
    for rule in BAD:
        assert repr(drawn(rule.body, 3, 7)) == repr(drawn(rule.body, 3, 7)), rule.name
    assert status_of(SimpleNamespace(status_code=404, text="")) == 404  # type: ignore[arg-type]
