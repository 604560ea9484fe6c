"""`python -m bench.fuzz`: bodies that SGLang's request schema allows and does not, to a live server.

Hypothesis draws a good body for one of the entrances and puts other values into some of its fields, of the
field's type or of another: the server may answer such a body, or refuse it with a 4xx.  Every other body has
one value that is known to be bad (`bench.fuzz_rules`): it must be refused with a 4xx.  Beside them a client
sends good requests, whose answers must equal a cold run.  The server must not end, and its counters must come
back to their baseline.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import tempfile
import threading
import time
import typing
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

import requests
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from bench.fuzz_rules import BAD, NEW, VOCABULARY
from bench.storm import Storm

TIMEOUT = 60.0
"""Seconds for a body."""
INTEGERS = (0, 1, -1, 2, 5, 511, 512, -(2**31), 2**31, 2**40, 2**63 - 1, 2**63, -(2**63) - 1, 2**70)
FLOATS = (0.0, 1.0, -1.0, 0.5, 1e-30, 1e30, 1e300, -1e300, float("inf"), float("nan"))
TEXTS = ("", "a", "hello there", "\x00", "\ud83d\ude00", "(", "[", "{}", "null", "x" * 5000, "x" * 300_000)
NO_FIELDS = {
    "stream", "max_new_tokens", "background", "received_time", "model", "max_tokens",
    "max_completion_tokens", "options",
}  # fmt: skip
"""Left as they are: streams are drawn apart, the other bodies would run for long or name another server."""


def scalars() -> st.SearchStrategy[Any]:
    """Any JSON value that a careless or hostile client may put anywhere."""
    return st.one_of(
        st.none(),
        st.booleans(),
        st.sampled_from(INTEGERS),
        st.sampled_from(FLOATS),
        st.sampled_from(TEXTS),
        st.just([]),
        st.just({}),
        st.just([[]]),
        st.just([5, -5]),
        st.just({"a": [1, {"b": None}]}),
        st.just(deep(200)),
    )


def deep(levels: int) -> list[Any]:
    """A list in a list in a list."""
    nested: list[Any] = []
    for _ in range(levels):
        nested = [nested]
    return nested


def of_type(hint: Any) -> st.SearchStrategy[Any]:
    """Values of an annotation, as JSON has them; anything where it says no more."""
    origin, inner = get_origin(hint), [one for one in get_args(hint) if one is not NoneType]
    if origin in (Union, UnionType):
        return st.one_of(st.none(), *(of_type(one) for one in inner))
    if origin in (list, set, tuple) and inner:
        return st.lists(of_type(inner[0]), max_size=3)
    if origin is dict and len(inner) == 2:
        return st.dictionaries(
            st.sampled_from(("a", "5", "", "-1", "id", "512")), of_type(inner[1]), max_size=2
        )
    if hasattr(hint, "__metadata__"):
        return of_type(get_args(hint)[0])
    by_type: dict[Any, st.SearchStrategy[Any]] = {
        int: st.sampled_from(INTEGERS),
        float: st.sampled_from(FLOATS),
        str: st.sampled_from(TEXTS),
        bool: st.booleans(),
    }
    return by_type.get(hint, scalars())


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Mostly of the type."""
    return st.one_of(of_type(hint), of_type(hint), scalars())


@st.composite
def changed(
    draw: Callable[..., Any], body: dict[str, Any], hints: dict[str, Any], most: int
) -> dict[str, Any]:
    """`body` with up to `most` fields put to other values, or taken out."""
    fields = sorted(set(hints) - NO_FIELDS)
    body = dict(body)
    # Often none: a body that is refused for one field tells nothing about another.
    count = min(draw(st.sampled_from((0, 0, 1, 1, 2, most))), len(fields))
    for name in draw(st.lists(st.sampled_from(fields), min_size=count, max_size=count, unique=True)):
        body[name] = draw(values(hints[name]))
    spare = sorted(set(body) - NO_FIELDS - {"sampling_params"})
    if spare and draw(st.integers(0, 19)) == 0:
        del body[draw(st.sampled_from(spare))]
    return body


@st.composite
def generate(draw: Callable[..., Any]) -> tuple[str, dict[str, Any]]:
    """A body of /generate from the fields of SGLang's record and of its sampling parameters."""
    from sglang.srt.managers.io_struct import GenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    hints = {name: one for name, one in _hints(GenerateReqInput).items() if name not in OWN}
    sampling = _hints(SamplingParams)
    valid = changed({"max_new_tokens": NEW}, sampling, 3)
    params = draw(st.one_of(valid, valid, valid, valid, scalars()))
    if isinstance(params, dict):
        params["max_new_tokens"] = NEW
    ids = st.one_of(st.integers(0, VOCABULARY - 1), st.integers(0, VOCABULARY - 1), st.sampled_from(INTEGERS))
    good = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=40)
    prompt = draw(
        st.one_of(
            st.fixed_dictionaries({"input_ids": st.one_of(good, good, good, st.lists(ids, max_size=8))}),
            st.fixed_dictionaries({"input_ids": st.lists(st.lists(ids, max_size=6), max_size=3)}),
            st.fixed_dictionaries(
                {"text": st.one_of(st.sampled_from(TEXTS), st.lists(st.sampled_from(TEXTS)))}
            ),
            st.fixed_dictionaries({"input_ids": scalars()}),
        )
    )
    body = draw(changed({**prompt, "sampling_params": params}, hints, 3))
    if draw(st.integers(0, 9)) == 0:
        body["stream"] = True
    return "/generate", body


OWN = ("sampling_params", "text", "input_ids")
"""Fields of /generate that `generate` fills itself."""


@functools.cache
def _hints(owner: type) -> dict[str, Any]:
    """Annotations of a class by field, evaluated; Any where that takes more than there is at run time."""
    try:
        return typing.get_type_hints(owner, include_extras=True)
    except NameError:
        return dict.fromkeys(owner.__annotations__, Any)


@st.composite
def of_model(
    draw: Callable[..., Any], route: str, model: Any, good: dict[str, Any]
) -> tuple[str, dict[str, Any]]:
    """A body of an entrance whose schema is a pydantic model."""
    hints = {name: one.annotation for name, one in model.model_fields.items()}
    return route, draw(changed(good, hints, 3))


@st.composite
def vertex(draw: Callable[..., Any]) -> tuple[str, dict[str, Any]]:
    """A body that holds the fields of /generate in two places."""
    _, body = draw(generate())
    texts = ("text", "input_ids", "input_embeds", "image_data")
    instance = {name: body.pop(name) for name in texts if name in body}
    return "/vertex_generate", {"instances": draw(st.sampled_from(([instance], []))), "parameters": body}


def bodies() -> st.SearchStrategy[tuple[str, dict[str, Any]]]:
    """(route, body) for every entrance that takes text."""
    from sglang.srt.entrypoints.anthropic.protocol import (
        AnthropicCountTokensRequest,
        AnthropicMessagesRequest,
    )
    from sglang.srt.entrypoints.ollama.protocol import OllamaChatRequest, OllamaGenerateRequest
    from sglang.srt.entrypoints.openai.protocol import (
        ChatCompletionRequest,
        CompletionRequest,
        DecisionRequest,
        DetokenizeRequest,
        EmbeddingRequest,
        ResponsesRequest,
        ScoringRequest,
        TokenizeRequest,
        V1RerankReqInput,
    )

    said = [{"role": "user", "content": "a"}]
    short = {"model": "m", "max_tokens": NEW}
    asked = {"id": "a", "type": "yes_no", "question": "a"}
    options = {"options": {"num_predict": NEW}, "stream": False}
    others = (
        ("/v1/completions", CompletionRequest, {**short, "prompt": "a"}),
        ("/v1/chat/completions", ChatCompletionRequest, {**short, "messages": said}),
        (
            "/v1/score",
            ScoringRequest,
            {"model": "m", "query": [5, 6], "items": [[7]], "label_token_ids": [5]},
        ),
        ("/v1/embeddings", EmbeddingRequest, {"model": "m", "input": "a"}),
        ("/tokenize", TokenizeRequest, {"model": "m", "prompt": "a"}),
        ("/detokenize", DetokenizeRequest, {"model": "m", "tokens": [5, 6]}),
        ("/v1/messages", AnthropicMessagesRequest, {**short, "messages": said}),
        ("/v1/responses", ResponsesRequest, {"model": "m", "input": "a", "max_output_tokens": NEW}),
        ("/v1/rerank", V1RerankReqInput, {"query": "a", "documents": ["a", "b"]}),
        ("/v1/messages/count_tokens", AnthropicCountTokensRequest, {"model": "m", "messages": said}),
        ("/v1/decisions", DecisionRequest, {"input": "a", "questions": [asked], "model": "m"}),
        ("/api/generate", OllamaGenerateRequest, {"model": "m", "prompt": "a", **options}),
        ("/api/chat", OllamaChatRequest, {"model": "m", "messages": said, **options}),
    )
    return st.one_of(generate(), generate(), generate(), vertex(), *(of_model(*other) for other in others))


def drawn(strategy: st.SearchStrategy[Any], count: int, number: int) -> list[Any]:
    """Up to `count` values, fewer where there are no more, always the same for a seed `number`."""
    found: list[Any] = []

    @seed(number)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def take(value: Any) -> None:
        found.append(value)

    take()
    return found


@dataclass
class Fuzz:
    """Bodies to one server, and what it made of them."""

    url: str
    seed: int
    done: Counter[str] = field(default_factory=Counter)
    rules: Counter[str] = field(default_factory=Counter)
    """Known bad bodies, by the rule that they break."""
    missed: Counter[str] = field(default_factory=Counter)
    """Those of them that were not refused."""
    wrong: list[str] = field(default_factory=list)

    def run(self, count: int) -> None:
        """Send `count` bodies one after another; stops when the server has ended."""
        any_body = cycle(drawn(bodies(), (count + 1) // 2, self.seed))
        # In turn: each rule is broken often, however many there are.
        share = count // (2 * len(BAD)) + 1
        breaking = {rule.name: cycle(drawn(rule.body, share, self.seed)) for rule in BAD}
        names = cycle(breaking)
        for number in range(count):
            if self.done["ended"]:
                return
            if number % 2:
                name = next(names)
                route, body = next(breaking[name])
                self.one(route, body, name)
            else:
                self.one(*next(any_body))

    def one(self, route: str, body: dict[str, Any], rule: str = "") -> None:
        """One body; with a rule, one that breaks it.  Infinities and NaN go as Python's JSON writes them."""
        shown = f"{rule and f'[{rule}] '}{route} {json.dumps(body)[:600]}"
        self.done["sent"] += 1
        self.rules[rule] += bool(rule)
        try:
            sent = json.dumps(body).encode()
            answer = requests.post(
                self.url + route, data=sent, headers={"Content-Type": "application/json"}, timeout=TIMEOUT
            )
        except requests.RequestException as error:
            self.wrong.append(f"{shown}: {error!r}")
            self.missed[rule] += bool(rule)
            self.done["ended"] += not self.alive()
            return
        status = status_of(answer)
        self.done[f"{status // 100}xx"] += 1
        self.done[route] += 1
        if status >= 500 or (rule and status < 400):
            self.missed[rule] += bool(rule)
            self.wrong.append(f"{shown}: {status} {answer.text[:300]}")

    def alive(self, patience: float = 15.0) -> bool:
        """Whether the server answers a short request; a launcher takes a moment to notice its end."""
        end = time.monotonic() + patience
        body: Any = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 1}}
        while time.monotonic() < end:
            try:
                return requests.post(f"{self.url}/generate", json=body, timeout=TIMEOUT).status_code == 200
            except requests.RequestException:
                time.sleep(0.5)
        return False


def status_of(answer: requests.Response) -> int:
    """HTTP status; of a stream that has begun, the code of its error."""
    first = answer.text.split("\n", 1)[0]
    if answer.status_code == 200 and first.startswith('data: {"error"'):
        return int(json.loads(first.removeprefix("data: "))["error"]["code"])
    return answer.status_code


def run(url: str, seed: int, count: int, storm: Storm) -> Fuzz:
    """`count` bodies beside good requests of `storm`, one for every two; drained and looked at in the end."""
    fuzz, stop = Fuzz(url, seed), threading.Event()

    def good() -> None:
        sent = 0
        while not stop.wait(0.01) and not storm.wrong:
            # Not more: prefills come first, and a long answer of a body would wait for ever.
            if 2 * sent < fuzz.done["sent"]:
                storm.good(sent)
                sent += 1

    client = threading.Thread(target=good)
    client.start()
    try:
        fuzz.run(count)
    finally:
        stop.set()
        client.join()
    if not fuzz.done["ended"]:
        storm.check_drained()
    fuzz.wrong += storm.wrong
    return fuzz


def main() -> None:
    from bench.chaos import compare, storm_server
    from sglang_hybrid.cli.demo_model import write_demo_model
    from sglang_hybrid.pools.factory import ORGANIZATIONS

    options = argparse.ArgumentParser(prog="python -m bench.fuzz", description=__doc__.splitlines()[0])
    options.add_argument("--organization", default=",".join(ORGANIZATIONS), help="comma-separated names")
    options.add_argument("--bodies", type=int, default=1250, help="for each organization (default 1250)")
    options.add_argument("--seed", type=int, default=0)
    chosen = options.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        model = write_demo_model(Path(folder) / "model", vocab=VOCABULARY, context=4096)
        for name in chosen.organization.split(","):
            with storm_server(model, name) as (server, clients):
                fuzz = run(server.url, chosen.seed, chosen.bodies, clients)
            compared, different = compare(model, clients, chosen.seed)
            failed |= bool(fuzz.wrong or different)
            print(
                f"{name}: {dict(sorted(fuzz.done.items()))}, {compared} good answers compared",
                flush=True,
            )
            print("\n".join([*fuzz.wrong, *different]), flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
