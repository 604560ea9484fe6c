"""Bad requests beside good ones: each gets a 4xx and a sentence, and nobody else is hurt."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.park import on
from tests.support.server import LiveServer
from tests.support.tokens import T
from tests.support.witness import Witness

GENERATE = "/generate"
TWO = {"max_new_tokens": 2}
HUGE = 10**12
MEGABYTE = "x" * 1_000_000


class Bad(NamedTuple):
    """A body for a route, and what the sentence must name."""

    route: str
    body: dict[str, Any]
    named: str
    other: str = ""


def ids(*prompt: Any, **fields: Any) -> dict[str, Any]:
    return {"input_ids": list(prompt), "sampling_params": TWO, **fields}


def sampled(**params: Any) -> dict[str, Any]:
    return {"input_ids": [5, 6, 7], "sampling_params": {**TWO, **params}}


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2, **fields}


def score(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "query": [5, 6], "items": [[7]], "label_token_ids": [5], **fields}


EMPTY = "at least 1"
BAD = (
    # No token, alone, among others, after tokenization.
    Bad(GENERATE, {"text": "", "sampling_params": TWO}, "0 tokens", EMPTY),
    Bad(GENERATE, {"text": ["hi", ""], "sampling_params": TWO}, "0 tokens", EMPTY),
    Bad(GENERATE, ids([], [5, 6]), "0 tokens", EMPTY),
    Bad(GENERATE, ids([5, 6], []), "0 tokens", EMPTY),
    Bad(GENERATE, ids(), "empty list", EMPTY),
    Bad("/v1/completions", {"model": "m", "prompt": [[5], []], "max_tokens": 2}, "0 tokens", EMPTY),
    Bad("/v1/score", score(query=[], items=[[]]), "0 tokens", EMPTY),
    # Ids without a row in the embedding table.
    Bad(GENERATE, ids(5, -5), "id -5", "0 to 511"),
    Bad(GENERATE, ids(5, 512), "id 512", "0 to 511"),
    Bad(GENERATE, ids(5, 2**31), "id 2147483648", "0 to 511"),
    Bad(GENERATE, ids([5], [2**63 - 1]), "id 9223372036854775807", "0 to 511"),
    Bad("/v1/completions", {"model": "m", "prompt": [5, -1], "max_tokens": 2}, "id -1", "0 to 511"),
    Bad("/v1/score", score(items=[[-7]]), "id -7", "0 to 511"),
    Bad("/detokenize", {"model": "m", "tokens": [5, -1]}, "id -1", "token ids are 0 to"),
    Bad("/v1/detokenize", {"model": "m", "tokens": [[5], [2**40]]}, f"id {2**40}", "token ids are 0 to"),
    # More logprobs than there are.
    Bad(GENERATE, ids(5, 6, return_logprob=True, top_logprobs_num=1_000_000), "1000000", "512"),
    Bad(GENERATE, ids(5, 6, return_logprob=True, top_logprobs_num=-1), "top_logprobs_num is -1", "0 to 512"),
    Bad(GENERATE, ids(5, 6, return_logprob=True, token_ids_logprob=[512]), "512", "token_ids_logprob"),
    Bad(GENERATE, ids(5, 6, return_logprob=True, logprob_start_len=3), "logprob_start_len is 3", "0 to 2"),
    Bad(GENERATE, ids(5, 6, return_logprob=True, logprob_start_len=-7), "logprob_start_len is -7", "0 to 2"),
    Bad("/v1/completions", {"model": "m", "prompt": "a", "logprobs": HUGE}, str(HUGE), "512"),
    Bad("/v1/chat/completions", chat(logprobs=True, top_logprobs=HUGE), str(HUGE), "512"),
    # Fields that a validator opens before it knows their type.
    Bad("/v1/chat/completions", chat(response_format=1.0), "cannot be read", "'float'"),
    Bad(
        "/v1/chat/completions",
        chat(response_format={"type": "json_schema", "schema": [1]}),
        "cannot be read",
        "'list'",
    ),
    Bad("/vertex_generate", {"instances": [{"text": "a"}], "parameters": {"top_p": 2}}, "'top_p'"),
    # What this model, or this memory, cannot take.
    Bad(
        "/v1/score",
        score(embed_override_token_id=6, query_embed_overrides=[[0.5] * 64]),
        "embed_override_token_id",
        "FalconH1ForCausalLM",
    ),
    Bad(GENERATE, ids(5, 6, positional_embed_overrides=[1]), "positional_embed_overrides"),
    Bad(GENERATE, ids(5, 6, image_data="http://127.0.0.1:1/x.png"), "image_data", "text only"),
    Bad(GENERATE, {"input_embeds": [[0.5] * 64], "sampling_params": TWO}, "input_embeds", "--hybrid-mem"),
    Bad(GENERATE, ids(5, 6, token_indices_to_pool=[9]), "token_indices_to_pool", "--hybrid-mem"),
    Bad(GENERATE, ids(5, 6, multi_item_delimiter_indices=[9]), "multi_item_delimiter_indices"),
    Bad(GENERATE, sampled(beam_width=2), "beam_width is 2", "--hybrid-mem"),
    Bad("/v1/score", score(score_extraction_token="a"), "score_extraction_token", "--hybrid-mem"),
    Bad("/encode", {"text": "hi"}, "embedding model", "--hybrid-mem"),
    Bad("/v1/embeddings", {"model": "m", "input": "hi"}, "embedding model", "--hybrid-mem"),
    # Sizes.
    Bad(GENERATE, ids(*[5] * 5000), "5000"),
    Bad(GENERATE, sampled(max_new_tokens=HUGE), str(HUGE)),
    Bad(GENERATE, sampled(n=10**9), "n is 1000000000", "16384"),
    Bad(GENERATE, sampled(n=0), "n is 0", EMPTY),
    Bad(GENERATE, ids(5, 6, extra_key=MEGABYTE), "extra_key has 1000000", "4096"),
    Bad(GENERATE, ids(5, 6, cache_salt=MEGABYTE), "cache_salt has 1000000", "4096"),
    Bad(GENERATE, ids(5, 6, rid=MEGABYTE), "rid has 1000000", "4096"),
    Bad(GENERATE, sampled(custom_params={"a": MEGABYTE}), "custom_params has 1000008", "65536"),
    # Numbers that overflow a tensor, or make logits that are none.
    Bad(GENERATE, sampled(top_k=HUGE), f"top_k is {HUGE}", "1073741824"),
    Bad(GENERATE, sampled(temperature=1e300), "temperature is 1e+300", "finite"),
    Bad(GENERATE, sampled(logit_bias={"5": 1e38}), "logit_bias['5'] is 1e+38", "10000"),
    Bad(GENERATE, sampled(repetition_penalty=1e-30), "repetition_penalty is 1e-30", "0.0001"),
    Bad(GENERATE, sampled(min_new_tokens=1, stop_token_ids=[HUGE]), f"id {HUGE}", "0 to 511"),
    # What is not what its field takes.
    Bad(GENERATE, sampled(stop_regex="("), "unterminated subpattern"),
    Bad(GENERATE, {"input_ids": [[5], [6]], "return_logprob": [True]}, "return_logprob has 1", "2 prompts"),
    Bad(GENERATE, ids(5, rid=["a", "b"]), "cannot be read"),
    Bad(GENERATE, ids(5, http_worker_ipc="ipc:///tmp/none"), "http_worker_ipc"),
    Bad("/api/chat", {"model": "m", "messages": [], "stream": False}, ""),
    Bad(
        "/api/generate", {"model": "m", "prompt": "a", "stream": False, "options": {"temperature": -5}}, "-5"
    ),
    # The operator's routes that reach what this server has not.
    *(
        Bad(f"/{name}_expert_distribution_record", {}, "--expert-distribution-recorder-mode")
        for name in ("start", "stop", "dump")
    ),
    Bad("/stop_profile", {}, "rofil"),
    Bad("/v1/messages", {"model": "m", "max_tokens": -1, "messages": [{"role": "user", "content": "a"}]}, ""),
)


@on("g8", "s0", "s2", "d0")
def test_a_bad_request_is_answered_and_hurts_nobody(witness: Witness) -> None:
    """Each of them beside a request that runs, which must answer as cold."""
    server = witness.server
    before = server.info()["internal_states"][0]["hybrid"]["requests_ended"]
    running = witness.begin(T(1, 43), 400)
    wrong = []
    for bad in BAD:
        answer = server.request("POST", bad.route, json=bad.body)
        if not (400 <= answer.status_code < 500 and bad.named in answer.text and bad.other in answer.text):
            wrong.append(f"{bad.route} {str(bad.body)[:120]}: {answer.status_code} {answer.text[:300]}")
    assert not wrong, "\n".join(wrong)
    witness.check(running.result(120), T(1, 43), 400)
    witness.base()
    after = server.info()["internal_states"][0]["hybrid"]["requests_ended"]
    assert {stage: after[stage] - before[stage] for stage in after if after[stage] != before[stage]} == {
        "door": 1
    }, "only the scheduler knows that the model has no embedding table to override"


@on("g8")
def test_in_a_stream_it_is_an_error_of_code_400(witness: Witness) -> None:
    for body in (ids(stream=True), ids(5, -5, stream=True), sampled(temperature=1e300) | {"stream": True}):
        answer = witness.server.request("POST", GENERATE, json=body)
        first = json.loads(answer.text.split("\n")[0].removeprefix("data: "))
        assert first["error"]["code"] == 400 and first["error"]["message"], answer.text


@on("g8")
def test_a_session_needs_tokens_and_an_offset_that_is_one(witness: Witness) -> None:
    server = witness.server
    name = server.post("/open_session", {"capacity_of_str_len": 1000})
    for prompt, session in (
        ([], {}),
        ([5], {"offset": "x"}),
        ([5], {"offset": -9}),
        ([-5], {}),
        ([5], {"rid": 5}),
    ):
        body = ids(*prompt, session_params={"id": name, **session})
        answer = server.request("POST", GENERATE, json=body)
        assert 400 <= answer.status_code < 500 and answer.text, (prompt, session, answer.text)
    assert (
        server.post(GENERATE, ids(*T(1, 9), session_params={"id": name}))["meta_info"]["prompt_tokens"] == 9
    )
    closed = server.request("POST", "/close_session", json={"session_id": name})
    assert closed.status_code == 200


@pytest.mark.parametrize("server", ["g8"], indirect=True)
def test_what_is_at_its_limit_is_served(server: LiveServer) -> None:
    """The door refuses no more than it says."""
    for body in (
        ids(0, 511),
        ids(5, 6, return_logprob=True, top_logprobs_num=512, logprob_start_len=0),
        ids(5, 6, return_logprob=True, logprob_start_len=2),
        ids(5, 6, return_logprob=True, token_ids_logprob=[0, 511]),
        ids(5, 6, extra_key="x" * 4096, cache_salt="y" * 4096, rid="z" * 4096),
        sampled(top_k=1 << 30, repetition_penalty=1e-4, temperature=1e-5, logit_bias={"5": -1e4, "6": 1e4}),
        sampled(top_k=-1, repetition_penalty=2, temperature=1e9, min_new_tokens=2, stop_token_ids=[0, 511]),
        sampled(n=3, custom_params={"a": "x" * 65000}, frequency_penalty=-2, presence_penalty=2, min_p=1),
        {"input_ids": [[5], [6]], "sampling_params": [TWO, TWO], "return_logprob": [True, False]},
        {"text": ["a", "b"], "sampling_params": None, "top_logprobs_num": [1, 2]},
    ):
        answer = server.request("POST", GENERATE, json=body)
        assert answer.status_code == 200, f"{str(body)[:200]}: {answer.status_code} {answer.text[:300]}"


@on("g8")
def test_what_only_an_accelerator_serves_is_501(witness: Witness) -> None:
    server = witness.server
    for route, body in (
        ("/release_memory_occupation", {}),
        ("/resume_memory_occupation", {}),
        ("/start_profile", {"activities": ["MEM"]}),
        ("/start_profile", {"activities": ["CPU", "CUDA_PROFILER"]}),
    ):
        answer = server.request("POST", route, json=body)
        assert answer.status_code == 501 and "on the CPU platform" in answer.text, f"{route}: {answer.text}"
    witness.ask(T(1, 20), 3)


@on("g8")
def test_the_profiler_works_on_a_cpu(witness: Witness, tmp_path: Path) -> None:
    server = witness.server
    begun = server.request("POST", "/start_profile", json={"output_dir": str(tmp_path)})
    assert begun.status_code == 200, begun.text
    witness.ask(T(1, 20), 3)
    assert server.request("POST", "/stop_profile").status_code == 200
    assert list(tmp_path.glob("**/*.gz")), "no trace was written"
