"""What a request may bring: sentences about what no forward may see, each with field, value and limit.

`body_fault` looks at SGLang's request record as a client sent it, `fault` at the record that the scheduler
gets.  `door.py` asks both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, get_args

import msgspec
from sglang.srt.managers.io_struct import (
    EmbeddingReqInput,
    GenerateReqInput,
    PositionalEmbeds,
    TokenizedGenerateReqInput,
)
from sglang.srt.sampling.sampling_params import TOP_K_ALL, SamplingParams

LONGEST_KEY = 4096
"""Characters of a text that names something: a request, a session, a cache namespace."""
KEYS = ("rid", "extra_key", "cache_salt", "session_id", "routing_key", "lora_path")
LARGEST_PARAMS = 1 << 16
"""Bytes of `custom_params` as JSON."""
MOST_SAMPLES = 1 << 14
"""Requests that one HTTP request may become by `n`."""
MOST_LOGPROBS = 1 << 24
"""Values of one answer: positions times logprobs at each."""
LARGEST_BIAS = 1e4
"""Of a logit.  Beyond it float32 has no digits left for the model's own."""
SMALLEST_PENALTY = 1e-4
"""Of `repetition_penalty`, which logits are divided by."""
INT64 = 1 << 63

NOT_SERVED = {
    "input_embeds": "a cached prefix is found by its token ids",
    "token_indices_to_pool": "the positions of a cached prefix are not computed again",
    "multi_item_delimiter_indices": "the items of a request would fork its state off the grid",
}
OF_THE_SERVER = {
    "http_worker_ipc": "the address of SGLang's own process",
    "encoder_urls": "what a separate encoder is asked by",
    "num_items_assigned": "what a separate encoder is asked by",
}


class Limits(NamedTuple):
    """What requests are measured by."""

    vocab: int
    """Rows of the embedding table."""
    context: int
    """Tokens, prompt and answer together."""


# -- the record as it came ------------------------------------------------------------------------


def _scalars() -> dict[str, type]:
    """Sampling parameters with one number or one text: name -> int, float or str."""
    kinds: dict[str, type] = {}
    for field in msgspec.structs.fields(SamplingParams):
        choices = [kind for kind in (field.type, *get_args(field.type)) if kind in (int, float, str)]
        others = [kind for kind in get_args(field.type) if kind not in (int, float, str, type(None))]
        if len(choices) == 1 and not others:
            kinds[field.name] = choices[0]
    return kinds


SCALARS = _scalars()
NAMED = {int: "a whole number below 2**63", float: "a finite number", str: "a string"}


def sampling_fault(params: Any) -> str | None:
    """Sentence about the first sampling parameter that has not the type of its field; None without one."""
    if not isinstance(params, dict):
        return f"sampling_params is {_shown(params)}; it must be an object, or have one for each prompt."
    for name, value in params.items():
        if name not in _PARAMETERS:
            return f"sampling_params.{_shown(name)} is unknown; legal: {', '.join(sorted(_PARAMETERS))}."
        kind = SCALARS.get(name)
        if value is not None and kind is not None and not _is(value, kind):
            return f"sampling_params.{name} is {_shown(value)}; it must be {NAMED[kind]}."
    biases = params.get("logit_bias")
    if biases is not None:
        if not isinstance(biases, dict):
            return f"sampling_params.logit_bias is {_shown(biases)}; it must be an object of id: number."
        for token, bias in biases.items():
            if not _is(bias, float) or not -LARGEST_BIAS <= bias <= LARGEST_BIAS:
                return (
                    f"sampling_params.logit_bias[{_shown(token)}] is {_shown(bias)}; it must be a number "
                    f"from {-LARGEST_BIAS:g} to {LARGEST_BIAS:g}."
                )
    return _params_fault(params.get("custom_params"))


_PARAMETERS = frozenset(SamplingParams.__struct_fields__)


def _params_fault(params: Any) -> str | None:
    if params is None:
        return None
    if not isinstance(params, dict):
        return f"sampling_params.custom_params is {_shown(params)}; it must be an object."
    try:
        size = len(msgspec.json.encode(params))
    except (TypeError, ValueError, RecursionError) as error:
        return f"sampling_params.custom_params is not JSON ({error})."
    if size > LARGEST_PARAMS:
        return f"sampling_params.custom_params has {size} bytes as JSON; at most {LARGEST_PARAMS} are taken."
    return None


def body_fault(body: GenerateReqInput | EmbeddingReqInput) -> str | None:
    """Sentence about a record as a client sent it; None when SGLang may read it."""
    params = body.sampling_params
    rows = params if isinstance(params, list) else [] if params is None else [params]
    if isinstance(params, list) and not params:
        return "sampling_params is an empty list; it must be an object, or have one for each prompt."
    for row in rows:
        sentence = sampling_fault(row)
        if sentence is not None:
            return sentence
        samples = row.get("n")
        if samples is not None and samples < 1:
            return f"sampling_params.n is {samples}; it must be at least 1."
    for name in KEYS:
        for text in flat(getattr(body, name, None)):
            if isinstance(text, str) and len(text) > LONGEST_KEY:
                return f"{name} has {len(text)} characters; at most {LONGEST_KEY} are taken."
    prompts = next(
        (value for value in (body.text, body.input_ids, body.input_embeds) if value is not None), None
    )
    if isinstance(prompts, list) and not prompts and not getattr(body, "session_params", None):
        return "The prompt is an empty list; it must have at least 1 token or text."
    count = len(prompts) if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int) else 1
    most = max((row.get("n") or 1 for row in rows), default=1)
    if most > 1 and most * count > MOST_SAMPLES:
        return (
            f"sampling_params.n is {most} for {count} prompts, which is {most * count} samples; at most "
            f"{MOST_SAMPLES} are taken at once."
        )
    for name in ("return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob", "lora_path"):
        value = getattr(body, name, None)
        if isinstance(value, list) and len(value) != count and name != "token_ids_logprob":
            return f"{name} has {len(value)} elements for {count} prompts; it must be one value, or one each."
    return None


# -- the record that the scheduler gets -----------------------------------------------------------


def fault(request: Any, limits: Limits) -> str | None:
    """Sentence about a tokenized request that no forward may see; None when it may be scheduled.

    `request` is a `TokenizedGenerateReqInput` or a `TokenizedEmbeddingReqInput`.  The prompt of a session's
    request is what it adds, and may be empty.
    """
    return next(_faults(request, limits), None)


def _faults(request: Any, limits: Limits) -> Iterator[str]:
    ids = request.input_ids
    if ids is None or not len(ids):
        if getattr(request, "session_params", None) is None and request.mm_inputs is None:
            yield "input_ids has 0 tokens after tokenization; a prompt must have at least 1."
    else:
        yield from ids_faults("input_ids", ids, limits.vocab)
    for name, why in NOT_SERVED.items():
        if getattr(request, name, None) is not None:
            yield f"{name} is not served with --hybrid-mem: {why}; leave it out."
    for name in ("priority", "routed_dp_rank", "bootstrap_room"):
        value = getattr(request, name, None)
        if value is not None and not _is(value, int):
            yield f"{name} is {_shown(value)}; it must be {NAMED[int]}."
    yield from _embedding_faults(request.positional_embed_overrides, len(ids or ()))
    yield from _sampling_faults(request.sampling_params, limits)
    if isinstance(request, TokenizedGenerateReqInput):
        yield from _logprob_faults(request, limits)
        yield from _session_faults(request.session_params)


def ids_faults(name: str, ids: Sequence[int], vocab: int) -> Iterator[str]:
    """Sentence about an id that is none."""
    if len(ids) and (min(ids) < 0 or max(ids) >= vocab):
        yield f"{name} has the id {min(ids) if min(ids) < 0 else max(ids)}; token ids are 0 to {vocab - 1}."


def _sampling_faults(params: Any, limits: Limits) -> Iterator[str]:
    if (params.beam_width or 1) > 1:
        yield (
            f"sampling_params.beam_width is {params.beam_width}; with --hybrid-mem it must be 1: beams would "
            "fork its state off the grid."
        )
    if params.top_k > TOP_K_ALL:
        yield f"sampling_params.top_k is {params.top_k}; it must be -1 (all) or 1 to {TOP_K_ALL}."
    if params.repetition_penalty < SMALLEST_PENALTY:
        yield (
            f"sampling_params.repetition_penalty is {params.repetition_penalty}; it must be from "
            f"{SMALLEST_PENALTY:g} to 2."
        )
    if params.stream_interval is not None and params.stream_interval < 1:
        yield f"sampling_params.stream_interval is {params.stream_interval}; it must be at least 1."
    for name in ("stop_strs", "stop_regex_strs"):
        for text in flat(getattr(params, name)):
            if not isinstance(text, str):
                yield f"sampling_params.{name.removesuffix('_strs')} has {_shown(text)}; it must be a string."
    for token in params.stop_token_ids or ():
        # `min_new_tokens` masks these columns of the logits.
        if not 0 <= token < limits.vocab:
            yield f"sampling_params.stop_token_ids has the id {token}; token ids are 0 to {limits.vocab - 1}."


def _logprob_faults(request: Any, limits: Limits) -> Iterator[str]:
    prompt, top, start = len(request.input_ids or ()), request.top_logprobs_num, request.logprob_start_len
    for name, value in (("top_logprobs_num", top), ("logprob_start_len", start)):
        if not _is(value, int):
            yield f"{name} is {_shown(value)}; it must be {NAMED[int]}."
            return
    if not 0 <= top <= limits.vocab:
        yield f"top_logprobs_num is {top}; it must be 0 to {limits.vocab}, the size of the vocabulary."
    if request.return_logprob and request.session_params is None and not -1 <= start <= prompt:
        yield f"logprob_start_len is {start}; it must be -1 or 0 to {prompt}, the length of the prompt."
    named = request.token_ids_logprob or ()
    if any(not _is(token, int) or not 0 <= token < limits.vocab for token in named):
        wrong = next(token for token in named if not _is(token, int) or not 0 <= token < limits.vocab)
        yield f"token_ids_logprob has {_shown(wrong)}; token ids are 0 to {limits.vocab - 1}."
    if not request.return_logprob:
        return
    new = request.sampling_params.max_new_tokens
    answer = max(0, limits.context - prompt) if new is None else min(new, max(0, limits.context - prompt))
    positions = answer + (prompt - start if start >= 0 else 0)
    values = positions * (1 + top + len(named))
    if values > MOST_LOGPROBS:
        yield (
            f"top_logprobs_num is {top} with {len(named)} token_ids_logprob at {positions} positions, which "
            f"is {values} values; at most {MOST_LOGPROBS} are taken."
        )


def _embedding_faults(overrides: Any, prompt: int) -> Iterator[str]:
    if overrides is None:
        return
    if not isinstance(overrides, PositionalEmbeds):
        yield "positional_embed_overrides is set by the server's own scores; leave it out."
        return
    if any(not 0 <= position < prompt for position in overrides.positions):
        yield f"positional_embed_overrides has positions outside of the prompt's {prompt} tokens."


def _session_faults(session: Any) -> Iterator[str]:
    if session is None:
        return
    for name, kind in (("id", str), ("rid", str), ("offset", int)):
        value = getattr(session, name, None)
        if value is not None and not _is(value, kind):
            yield f"session_params.{name} is {_shown(value)}; it must be {NAMED[kind]}."
    if (session.offset or 0) < 0:
        yield f"session_params.offset is {session.offset}; it must be at least 0."


def _is(value: Any, kind: type) -> bool:
    if isinstance(value, bool):
        return False
    if kind is float:
        return isinstance(value, int | float) and abs(value) < INT64 * 1e20 and math.isfinite(value)
    return -INT64 <= value < INT64 if kind is int and isinstance(value, int) else isinstance(value, kind)


def flat(value: Any) -> Iterator[Any]:
    """Members of nested lists, or the value itself; nothing for None."""
    if isinstance(value, list | tuple):
        for part in value:
            yield from flat(part)
    elif value is not None:
        yield value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
