"""Reuse depth of requests: what an admission found, for the answer, the trace and the counters."""

from __future__ import annotations

import hashlib
import os
import time
from collections import Counter
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from sglang_hybrid.geometry import ceil_div
from sglang_hybrid.radix.history import Cause, Reuse

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sglang_hybrid.engine.trace import Trace

META_KEY = "hybrid"
"""Key in a reply's `meta_info`: a list with one element an admission."""

DEPTHS = ("r_max", "attention", "j_adopt", "gap_r")
BUCKETS = 14
"""Of a histogram of depths: 0, then 1, 2, 4, ... grid steps, then everything."""

_SECRET = os.urandom(16)
"""A key's digest in the trace groups requests; nobody can find the key by trying."""


class Served:
    """One request, from its first admission on."""

    __slots__ = ("began", "key", "reuses", "rid")

    def __init__(self, rid: str, namespace: Hashable) -> None:
        self.rid = rid
        self.key = digest(namespace)
        self.began = time.time()
        self.reuses: list[Reuse] = []


class Histogram:
    """Counts by powers of two of a grid step."""

    def __init__(self, grid: int) -> None:
        self.grid = grid
        self.total = 0
        self.counts = [0] * BUCKETS

    @property
    def bounds(self) -> list[float]:
        """Upper bounds, inclusive."""
        return [0.0, *(float(self.grid << step) for step in range(BUCKETS - 2)), float("inf")]

    def add(self, value: int) -> None:
        self.total += value
        steps = ceil_div(value, self.grid)
        self.counts[min(steps and 1 + (steps - 1).bit_length(), BUCKETS - 1)] += 1


class ReuseLog:
    """One for a scheduler."""

    def __init__(self, grid: int, trace: Trace | None = None) -> None:
        self.trace = trace
        self.admitted_first = self.admitted_again = 0
        self.prompt_tokens = 0
        self.resumed_tokens = 0
        """Adopted by preempted requests on their return."""
        self.state_missing_tokens = 0
        """KV was there and no checkpoint: attention depth less J_adopt."""
        self.depths = {name: Histogram(grid) for name in DEPTHS}
        self.gaps: Counter[Cause] = Counter()
        self.lost_tokens: Counter[Cause] = Counter()
        self._away: dict[str, Served] = {}
        """Preempted requests by id."""

    def admitted(self, req: Req, namespace: Hashable, reuse: Reuse) -> None:
        """A request begins, or comes back after it was preempted."""
        served = self._away.pop(req.rid, None)
        if served is None:
            served = Served(req.rid, namespace)
            self._count(reuse)
        else:
            self.admitted_again += 1
            self.resumed_tokens += reuse.j_adopt
        served.reuses.append(reuse)
        req.hybrid_served = served
        if req.customized_info is None:
            req.customized_info = {}
        # Sent once a request: `streamer.GridOutputStreamer`.
        req.customized_info[META_KEY] = [public(one) for one in served.reuses]

    def _count(self, reuse: Reuse) -> None:
        # Of first admissions only: so the sum of J_adopt is SGLang's own sum of cached tokens.
        self.admitted_first += 1
        self.prompt_tokens += reuse.prompt
        self.state_missing_tokens += reuse.attention - reuse.j_adopt
        for name, histogram in self.depths.items():
            histogram.add(getattr(reuse, name))
        if reuse.cause is not None:
            self.gaps[reuse.cause] += 1
            self.lost_tokens[reuse.cause] += reuse.lost

    def left(self, req: Req) -> None:
        """The request gives up its row: it has ended, or is preempted and will be back."""
        served: Served | None = getattr(req, "hybrid_served", None)
        if served is None:
            return
        if req.finished():
            finish = req.finished_reason.to_json().get("type")
            self._write(served, finish, len(req.output_ids), req.cached_tokens)
        else:
            self._away[req.rid] = served
        req.hybrid_served = None

    def aborted(self, rid: str) -> None:
        """A waiting request is aborted; one that was never admitted has nothing to record."""
        served = self._away.pop(rid, None)
        if served is not None:
            self._write(served, "abort", None, served.reuses[0].j_adopt)

    def _write(self, served: Served, finish: str | None, output: int | None, cached: int) -> None:
        if self.trace is None:
            return
        first, *again = served.reuses
        self.trace.put(
            {
                "rid": served.rid,
                "time": served.began,
                "key": served.key,
                **plain(first),
                "cached_tokens": cached,
                "output_tokens": output,
                "finish": finish,
                "resumes": [plain(reuse) for reuse in again],
            }
        )


def plain(reuse: Reuse) -> dict[str, Any]:
    """An admission as the operator sees it."""
    return {
        "prompt_tokens": reuse.prompt,
        "r_max": reuse.r_max,
        "attention": reuse.attention,
        "j_adopt": reuse.j_adopt,
        "gap_r": reuse.gap_r,
        "lost_tokens": reuse.lost,
        "cause": None if reuse.cause is None else str(reuse.cause),
    }


def public(reuse: Reuse) -> dict[str, Any]:
    """An admission as the client sees it, who must not learn what others sent under another key."""
    if reuse.cause is Cause.OTHER_KEY:
        reuse = reuse._replace(cause=None, lost=0)
    return plain(reuse)


def digest(namespace: Hashable) -> str | None:
    """Names the key and salt of a request without telling them; None without either."""
    if namespace == (None, None):
        return None
    return hashlib.blake2b(repr(namespace).encode(), digest_size=8, key=_SECRET).hexdigest()
