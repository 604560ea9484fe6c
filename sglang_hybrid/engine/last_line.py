"""The last line: an exception of ours ends the request that caused it, where that can be told.

- On the way to the queue (`door.handled`), and while a waiting request is looked up or asked for (`asked`):
  the request owns nothing yet, and ends alone.
- While a prefill is prepared (`preparing`): nothing was launched.  The batch is taken back.  A batch of one
  request ends that request; the requests of a larger one are tried again one by one, so that the one at fault
  ends alone.
- While computed blocks are handed to the tree (`Memory.on_unpublished`) and it has not changed: the request
  keeps its answer, and those blocks are not cached.

After the last two, `holders.check` must find every page with exactly its holders, or the server ends.  It
also ends, as SGLang's does, where the request cannot be told or what it shares with others is half done: in a
batch with a prompt that goes on from an earlier chunk, in a decode step, in the page maps of a forward, in a
tree that has changed.  So it does where several ranks compute a batch together: the preparation asks the
device for memory, and a rank that took its batch back alone would leave the others waiting for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang.srt.runtime_context import get_parallel

from sglang_hybrid.engine import holders

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sglang_hybrid.engine.cache import GridPrefixCache

logger = logging.getLogger(__name__)


class Failed(NamedTuple):
    """A request that an exception has ended, and where (`cache.ENDED_AT`)."""

    req: Req
    stage: str
    error: Exception


class PrefillFailed(Exception):
    """The preparation of an extend batch failed; its cause is the exception itself."""

    def __init__(self, reqs: Sequence[Req]) -> None:
        super().__init__(f"a prefill of {len(reqs)} requests could not be prepared")
        self.reqs = list(reqs)


@contextmanager
def preparing(reqs: Sequence[Req]) -> Iterator[None]:
    """Around what prepares this extend batch.  Raises PrefillFailed."""
    try:
        yield
    except Exception as error:
        raise PrefillFailed(reqs) from error


@contextmanager
def asked(cache: GridPrefixCache, req: Req) -> Iterator[None]:
    """Around what is asked for a waiting request; one that fails is ended after the pass."""
    try:
        yield
    except Exception as error:
        cache.failed[req.rid] = Failed(req, "admission", error)


def prefill_prepared(
    original: Callable[..., Any], self: Any, prefill_delayer_single_pass: Any, running_batch: Any
) -> Any:
    """Around `Scheduler._get_new_batch_prefill_raw`: answers for the requests that failed in this pass."""
    cache: GridPrefixCache = self.tree_cache
    try:
        made = original(self, prefill_delayer_single_pass, running_batch)
    except PrefillFailed as failure:
        _take_back(self, cache, failure)
        made = None, running_batch
    if cache.failed:
        failed = list(cache.failed.values())
        cache.failed.clear()
        for one in failed:
            _end(self, one)
    return made


def _take_back(scheduler: Any, cache: GridPrefixCache, failure: PrefillFailed) -> None:
    """Undo the preparation.  Raises the failure when it cannot be undone."""
    requests, reqs = cache.req_to_token_pool, failure.reqs
    if len(requests.fresh) < len(reqs) or get_parallel().tp_size > 1:
        raise failure
    for req in reqs:
        requests.take_back(req)
    holders.check(cache)
    if scheduler.chunked_req in reqs:
        scheduler.chunked_req = None
    scheduler.waiting_queue = [*reqs, *scheduler.waiting_queue]
    error = failure.__cause__
    assert isinstance(error, Exception)
    if len(reqs) == 1:
        cache.failed[reqs[0].rid] = Failed(reqs[0], "prefill", error)
    else:
        logger.error("%s; they are tried one by one.", failure, exc_info=error)
        cache.suspects.update(req.rid for req in reqs)


def _end(scheduler: Any, failed: Failed) -> None:
    from sglang_hybrid.engine.door import end

    req, stage, error = failed
    logger.error("Request %s is ended (%s).", req.rid, stage, exc_info=error)
    scheduler.waiting_queue = [other for other in scheduler.waiting_queue if other is not req]
    scheduler._release_aborted_request(req)
    sentence = f"The request was ended by a fault of the server ({stage}): {type(error).__name__}: {error}."
    end(scheduler, req, stage, sentence, HTTPStatus.INTERNAL_SERVER_ERROR)
