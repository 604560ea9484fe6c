"""The door: every request of every entrance is looked at here before it reaches a forward.

`/generate`, OpenAI, Anthropic, Ollama, scores, sessions, batches and `sgl.Engine` all build one of SGLang's
request records.  Each is looked at three times:

- `normalized`: the record as it came, before SGLang reads it;
- `tokenized`: the record that would be sent to the scheduler.  Nothing of an HTTP request is sent when one of
  its prompts is refused;
- `arriving`: the same in the scheduler, for what comes past the first process's tokenizer (further tokenizer
  workers load no plugins), and what only the scheduler knows.

The client gets HTTP 400, or in a stream that has begun an error event of code 400.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from http import HTTPStatus
from traceback import walk_tb
from typing import Any

from fastapi import HTTPException
from fastapi.exceptions import ValidationException
from sglang.srt.managers.io_struct import AbortReq, TokenizedEmbeddingReqInput, TokenizedGenerateReqInput
from sglang.srt.runtime_context import get_exec

from sglang_hybrid.engine.door_rules import OF_THE_SERVER, Limits, body_fault, fault, flat, ids_faults
from sglang_hybrid.engine.hooks import published_on
from sglang_hybrid.engine.refusals import way_out_is_refused

logger = logging.getLogger(__name__)

TOKENIZED = (TokenizedGenerateReqInput, TokenizedEmbeddingReqInput)

# -- hooks in the process of the tokenizer --------------------------------------------------------


def routed(original: Callable[..., Any], route: Any) -> Callable[..., Any]:
    """Around FastAPI's `APIRoute.get_route_handler`: what a route that takes requests raises before it sends
    one is the client's error.

    Some validators of SGLang open a field before anybody has looked at its type, and some routes make a
    request of a body by themselves.  Errors of an administrator's routes (`auth_level`) stay as they are.
    """
    handler = original(route)
    if route.body_field is None or hasattr(route.endpoint, "_auth_level"):
        return handler

    async def handled(request: Any) -> Any:
        try:
            return await handler(request)
        except ValidationException:
            raise
        except Exception as error:
            if not published_on():
                raise
            raise _of_the_client(error) from error

    return handled


def normalized(original: Callable[..., Any], body: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `normalize_batch_and_arguments` of both request records.

    Raises:
        ValueError: the sentence for the client.
    """
    try:
        sentence = body_fault(body)
        if sentence is not None:
            raise ValueError(sentence)
        return original(body, *args, **kwargs)
    except Exception:
        if not hasattr(body, "is_single"):
            # Asked when a stream has ended, for what to abort: nothing.
            body.is_single, body.rid = False, []
        raise


def tokenized(original: Callable[..., Any], self: Any, body: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `TokenizerManager._create_tokenized_object`, which all prompts pass one by one.

    Raises:
        ValueError: the sentence for the client.
    """
    for name, why in OF_THE_SERVER.items():
        if getattr(body, name, None) is not None:
            raise ValueError(f"{name} is {why}; leave it out.")
    if body.contains_mm_input() and self.mm_processor is None:
        raise ValueError(
            "The request has image_data, video_data or audio_data, and this server's model takes text only."
        )
    request = original(self, body, *args, **kwargs)
    sentence = fault(request, Limits(self.model_config.vocab_size, self.context_len))
    if sentence is not None:
        raise ValueError(sentence)
    return request


async def answered(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
    """Around `TokenizerManager.generate_request`: what a field makes SGLang raise is the client's error.

    Raises:
        RequestRefused: SGLang refused the request or could not read it, or needs an option refused here.
    """
    try:
        async for part in original(self, *args, **kwargs):
            yield part
    except Exception as error:
        raise _of_the_client(error) from error.__cause__


async def read(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Around what reads a body before it makes requests of it: scores, and Ollama's two routes.

    Raises:
        RequestRefused: as `answered`.
    """
    try:
        return await original(self, *args, **kwargs)
    except Exception as error:
        raise _of_the_client(error) from error.__cause__


async def detokenized(original: Callable[..., Any], self: Any, body: Any, *args: Any) -> Any:
    """Around `OpenAIServingDetokenize._handle_non_streaming_request`: a tokenizer may take no other ids."""
    manager = self.tokenizer_manager
    rows = max(manager.model_config.vocab_size, len(manager.tokenizer or ()))
    sentence = next(ids_faults("tokens", [*flat(body.tokens)], rows), None)
    return await original(self, body, *args) if sentence is None else self.create_error_response(sentence)


async def recorded(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Around the routes of the expert recorder, which raises in the scheduler where it was not asked for.

    Raises:
        RequestRefused: it was not.
    """
    if get_exec().moe.expert_distribution_recorder_mode is None:
        raise RequestRefused(
            "No expert distribution is recorded here; the start needs --expert-distribution-recorder-mode."
        )
    return await original(self, *args, **kwargs)


class RequestRefused(ValueError, HTTPException):
    """HTTP 4xx: most entrances of SGLang catch a ValueError and answer so, others let it go to FastAPI."""

    def __init__(self, sentence: str, status: HTTPStatus = HTTPStatus.BAD_REQUEST) -> None:
        HTTPException.__init__(self, status, sentence)

    def __str__(self) -> str:
        return str(self.detail)


def _of_the_client(error: Exception) -> Exception:
    """The same as a RequestRefused, unless it has a status of its own or is no field's fault."""
    if hasattr(error, "status_code") or (_was_sent(error) and not isinstance(error, ValueError)):
        return error
    if isinstance(error, ValueError):
        return RequestRefused(way_out_is_refused(str(error)) or str(error))
    logger.info("A request could not be read.", exc_info=error)
    return RequestRefused(f"The request cannot be read: {type(error).__name__}: {error}.")


def _was_sent(error: BaseException) -> bool:
    """Whether it was raised while an answer was awaited: then no field of the request is at fault."""
    return any(frame.f_code.co_name == "_stream_one_response" for frame, _ in walk_tb(error.__traceback__))


# -- hooks in the scheduler -----------------------------------------------------------------------


def arriving(original: Callable[..., Any], self: Any, received: list[Any]) -> Any:
    """Around `Scheduler.process_input_requests`: refused requests are answered here and go no further.

    All ranks receive the same list and refuse the same requests; only the first one's answer is sent.
    """
    limits = Limits(self.model_config.vocab_size, self.model_config.context_len)
    return original(self, [kept for one in received for kept in _kept(self, one, limits)])


def _kept(scheduler: Any, received: Any, limits: Limits) -> list[Any]:
    """The message, without the requests that are refused; nothing when none is left."""
    if isinstance(received, TOKENIZED):
        return [] if _refused(scheduler, received, limits) else [received]
    batch = getattr(received, "batch", None)
    if batch is None or not all(isinstance(one, TOKENIZED) for one in batch):
        return [received]
    received.batch = [one for one in batch if not _refused(scheduler, one, limits)]
    return [received] if received.batch else []


def _refused(scheduler: Any, request: Any, limits: Limits) -> bool:
    sentence = fault(request, limits)
    if sentence is None and request.positional_embed_overrides is not None:
        model = scheduler.tp_worker.model_runner.model
        if not hasattr(model, "get_input_embeddings"):
            sentence = (
                f"positional_embed_overrides (embed_override_token_id of a score) is not served with "
                f"{type(model).__name__}: it has no embedding table of its own to override; leave it out."
            )
    if sentence is not None:
        refuse(scheduler, request, sentence)
    return sentence is not None


def refuse(scheduler: Any, request: Any, sentence: str) -> None:
    """HTTP 400 for a request that owns nothing yet; it has `rid` and `http_worker_ipc`."""
    end(scheduler, request, "door", sentence, HTTPStatus.BAD_REQUEST)


def end(scheduler: Any, request: Any, stage: str, sentence: str, status: HTTPStatus) -> None:
    """Answer a request that has left the scheduler, and count it by its stage (`cache.ENDED_AT`)."""
    reason = {"type": "abort", "status_code": int(status), "message": sentence}
    scheduler.send_abort_output(AbortReq(rid=request.rid, finished_reason=reason), request)
    scheduler.tree_cache.ended[stage] += 1


def handled(original: Callable[..., Any], self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `Scheduler.handle_generate_request` and `handle_embedding_request`.

    The request owns nothing before it is queued, so an exception on the way there ends it alone.
    """
    try:
        return original(self, request, *args, **kwargs)
    except Exception as error:
        logger.exception("Request %s could not be queued.", request.rid)
        sentence = f"The request could not be queued: {type(error).__name__}: {error}."
        end(self, request, "arrival", sentence, HTTPStatus.INTERNAL_SERVER_ERROR)
        return None


def queued(original: Callable[..., Any], self: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `Scheduler._add_request_to_queue`: a session or a truncation may have left no token."""
    if not len(req.origin_input_ids) and not len(req.output_ids):
        refuse(self, req, "input_ids has 0 tokens; a prompt must have at least 1.")
        self._release_aborted_request(req)
        return None
    return original(self, req, *args, **kwargs)
