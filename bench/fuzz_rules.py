"""Bodies that break one rule of the door each (docs/bad-requests.md), often by the least that breaks it."""

from __future__ import annotations

from typing import Any, NamedTuple

from hypothesis import strategies as st

VOCABULARY = 512
CONTEXT = 4096
NEW = 4
"""Tokens that a good body asks for."""
LONGEST_KEY = 4096
LARGEST_PARAMS = 1 << 16
LARGEST_TOP_K = 1 << 30
MOST_SAMPLES = 1 << 14
TEXT_ONLY = ("image_data", "video_data", "audio_data")
BEYOND = (2**63, -(2**63) - 1, 2**70)
NO_NUMBER: tuple[Any, ...] = ("x", [], {}, True, float("inf"), float("nan"), 1e300)
BELOW = (-1, -5, -(2**31), -(2**63))
ABOVE = (VOCABULARY, VOCABULARY + 1, 2**31, 2**63 - 1)

Body = st.SearchStrategy[tuple[str, dict[str, Any]]]


class Bad(NamedTuple):
    """A rule, and (route, body) that break it."""

    name: str
    body: Body


def _prompts() -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=20)


def _one(**fields: Any) -> Body:
    """/generate with one of these values in each of these fields."""
    chosen = {name: st.sampled_from(values) for name, values in fields.items()}
    streams = st.sampled_from(({}, {}, {}, {}, {"stream": True}))
    return st.builds(
        lambda ids, stream, more: (
            "/generate",
            {"input_ids": ids, "sampling_params": {"max_new_tokens": NEW}, **stream, **more},
        ),
        _prompts(),
        streams,
        st.fixed_dictionaries(chosen),
    )


def _sampled(**fields: Any) -> Body:
    """/generate with one of these values in each of these sampling parameters."""
    return st.builds(
        lambda drawn, params: (
            drawn[0],
            {**drawn[1], "sampling_params": {"max_new_tokens": NEW, **params}},
        ),
        _one(),
        st.fixed_dictionaries({name: st.sampled_from(values) for name, values in fields.items()}),
    )


def _ids(wrong: tuple[int, ...]) -> Body:
    """A prompt with an id that the table has not, anywhere in it, alone or beside a good one."""

    def put(drawn: tuple[str, dict[str, Any]], place: int, token: int, batch: bool) -> tuple[str, Any]:
        ids = list(drawn[1]["input_ids"])
        ids.insert(place, token)
        return drawn[0], {**drawn[1], "input_ids": [[5, 6], ids] if batch else ids}

    return st.builds(put, _one(), st.integers(0, 20), st.sampled_from(wrong), st.booleans())


def _completions(**fields: Any) -> Body:
    body = {"model": "m", "max_tokens": NEW, "prompt": "a"}
    return st.builds(
        lambda more: ("/v1/completions", {**body, **more}),
        st.fixed_dictionaries({name: st.sampled_from(values) for name, values in fields.items()}),
    )


def _score(**fields: Any) -> Body:
    body = {"model": "m", "query": [5, 6], "items": [[7]], "label_token_ids": [5]}
    return st.builds(
        lambda more: ("/v1/score", {**body, **more}),
        st.fixed_dictionaries({name: st.sampled_from(values) for name, values in fields.items()}),
    )


_LOGPROBS = {"return_logprob": (True,)}

BAD: tuple[Bad, ...] = (
    Bad("ids below", _ids(BELOW)),
    Bad("ids above", _ids(ABOVE)),
    Bad("ids in a completion", _completions(prompt=([5, -1], [VOCABULARY], [[5], [2**31]]))),
    Bad("ids in a score", _score(items=([[-7]], [[VOCABULARY]], [[5], [2**40]]))),
    Bad(
        "ids to text",
        st.sampled_from(
            [("/detokenize", {"model": "m", "tokens": tokens}) for tokens in ([-1], [[5], [-5]], [2**40])]
        ),
    ),
    Bad("no token", _one(input_ids=([], [[5], []], [[], [5]]))),
    Bad("no text", st.sampled_from([("/generate", {"text": text}) for text in ("", ["a", ""])])),
    Bad("too long", _one(input_ids=([5] * CONTEXT, [5] * (CONTEXT + 1), [5] * 20_000))),
    Bad("top_logprobs_num", _one(**_LOGPROBS, top_logprobs_num=(-1, VOCABULARY + 1, 10**6, 2**40))),
    Bad(
        "token_ids_logprob", _one(**_LOGPROBS, token_ids_logprob=([-1], [VOCABULARY], [5, 2**31], [-(2**40)]))
    ),
    Bad("logprob_start_len", _one(**_LOGPROBS, logprob_start_len=(-2, 21, 2**31, 2**40))),
    Bad("n", _sampled(n=(0, -1, MOST_SAMPLES + 1, 10**9))),
    *(
        Bad(name, _one(**{name: ("x" * (LONGEST_KEY + 1), "y" * 10**6)}))
        for name in ("rid", "extra_key", "cache_salt", "routing_key")
    ),
    Bad("custom_params", _sampled(custom_params=({"a": "x" * LARGEST_PARAMS}, "x", [1], 5))),
    Bad("temperature", _sampled(temperature=(*NO_NUMBER, -1, -1e-9))),
    Bad("top_p", _sampled(top_p=(*NO_NUMBER, 0, -1, 1.001))),
    Bad("top_k", _sampled(top_k=(*BEYOND, "x", LARGEST_TOP_K + 1, 2**40, 0, -2))),
    Bad("max_new_tokens", _sampled(max_new_tokens=(*BEYOND, "x", -1, [5]))),
    Bad("repetition_penalty", _sampled(repetition_penalty=(*NO_NUMBER, 0, 9e-5, 1e-30, 2.001, -1))),
    Bad("logit_bias", _sampled(logit_bias=({"5": 10_001}, {"5": -1e30}, {"5": "x"}, [5], {"5": True}))),
    Bad("stop_token_ids", _sampled(min_new_tokens=(0, 1), stop_token_ids=([-1], [VOCABULARY], [5, 2**31]))),
    Bad("stop", _sampled(stop=([5], [None], ["a", 5]))),
    Bad("stop_regex", _sampled(stop_regex=("(", ["["]))),
    Bad("stream_interval", _sampled(stream_interval=(0, -1))),
    Bad("beam_width", _sampled(beam_width=(2, 10**6))),
    Bad("unknown parameter", _sampled(bogus=(1, None))),
    Bad("sampling_params", _one(sampling_params=([], "x", 5, [{}, {}]))),
    *(Bad(name, _one(**{name: ("http://127.0.0.1:1/x.png", ["x"])})) for name in TEXT_ONLY),
    Bad("input_embeds", st.just(("/generate", {"input_embeds": [[0.5] * 64]}))),
    Bad("token_indices_to_pool", _one(token_indices_to_pool=([0], [9]))),
    Bad("positional_embed_overrides", _one(positional_embed_overrides=([1], "x", {"a": 1}))),
    Bad("http_worker_ipc", _one(http_worker_ipc=("ipc:///tmp/none", "x"))),
    Bad("priority", _one(priority=("x", 2**63, [1]))),
    Bad("lengths", _one(input_ids=([[5], [6]],), return_logprob=([True], [True] * 3))),
    Bad("embeddings", st.just(("/v1/embeddings", {"model": "m", "input": "hi"}))),
)
