"""The reference: what a request answers alone on a stock server, plugin flag off, radix cache off."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.support.reply import Reply
from tests.support.server import LiveServer

TOLERANCE = 1e-3
"""Largest difference of a logprob to its cold value, in nats."""

NEAR_TIE = 0.05
"""Two best logprobs closer than this may swap by summation order alone."""


@dataclass
class Cold:
    """Memoised cold runs. The stock server starts at the first question, ends when another model is asked."""

    start: Callable[[str], LiveServer]
    _known: dict[tuple[str, tuple[int, ...], str], Reply] = field(default_factory=dict)
    _server: tuple[str, LiveServer] | None = None
    _alone: threading.Lock = field(default_factory=threading.Lock)

    def ask(
        self, model: str, prompt: Sequence[int], m: int, sampling: Mapping[str, Any] | None = None
    ) -> Reply:
        """ids, logprobs and gaps of m greedy tokens after `prompt`."""
        key = (model, tuple(prompt), repr(sorted((sampling or {}).items())))
        with self._alone:
            known = self._known.get(key)
            if known is None or len(known.ids) < m:
                known = self.server(model).generate(
                    prompt, m, top_logprobs_num=2, sampling=dict(sampling or {})
                )
                assert known.cached == 0, "the cold reference served from a cache"
                assert len(known.gaps) == len(known.ids) == len(known.logprobs)
                self._known[key] = known
            return known.cut(m)

    def server(self, model: str) -> LiveServer:
        """The running stock server of a model."""
        if self._server is None or self._server[0] != model or not self._server[1].alive():
            self.stop()
            self._server = (model, self.start(model))
        return self._server[1]

    def stop(self) -> None:
        """End the server; what is known stays known."""
        if self._server is not None:
            self._server[1].stop()
            self._server = None


def differences(reply: Reply, cold: Reply) -> str | None:
    """None if `reply` equals `cold`, else a sentence.

    After a near tie of the cold run another token is no fault, and nothing later can be compared; up to there
    all must agree. A whole seed is not thrown away for a tie at its end.
    """
    if len(reply.ids) != len(cold.ids):
        return f"{len(reply.ids)} tokens instead of {len(cold.ids)}: {reply.reason} {reply.message}"
    for i, (got, want) in enumerate(zip(reply.ids, cold.ids, strict=True)):
        off = abs(reply.logprobs[i] - cold.logprobs[i])
        if got != want and not (cold.gaps[i] < NEAR_TIE and off <= NEAR_TIE + TOLERANCE):
            return (
                f"token {i} is {got}, cold {want} (gap {cold.gaps[i]:.3f}); {reply.ids} instead of {cold.ids}"
            )
        if got != want:
            return None
        if not off <= TOLERANCE:  # NaN is no small difference
            return f"logprob of token {i} is {reply.logprobs[i]:.5f}, cold {cold.logprobs[i]:.5f}"
    return None


def equal_cold(reply: Reply, cold: Reply, what: str = "output") -> None:
    """Assert that ids are equal and logprobs within `TOLERANCE`."""
    wrong = differences(reply, cold)
    assert wrong is None, f"{what} differs from cold: {wrong}"
