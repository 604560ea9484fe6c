"""What a server answered, reduced to what the tests compare."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Reply:
    """One finished, aborted or refused request.

    `logprobs`: of each output token. `gaps`: distance of the best to the second-best logprob at each output
    position, only where two top logprobs were asked for. `reason`: finish type (`length`, `stop`, `abort`, or
    `http` when the request was refused with status `status`).
    """

    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    gaps: tuple[float, ...] = ()
    cached: int = 0
    prompt_tokens: int = 0
    reason: str = "length"
    message: str = ""
    status: int = 200
    text: str = ""
    meta: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> "Reply":
        """From one element of a /generate answer."""
        meta = answer["meta_info"]
        finish = meta.get("finish_reason") or {}
        tops = meta.get("output_top_logprobs") or []
        # JSON has no NaN: a model that computed one answers null.
        entries = meta.get("output_token_logprobs") or []
        logprobs = [math.nan if entry[0] is None else entry[0] for entry in entries]
        return cls(
            ids=tuple(answer.get("output_ids") or ()),
            logprobs=tuple(logprobs),
            gaps=tuple(top[0][0] - top[1][0] for top in tops if top and len(top) > 1),
            cached=int(meta.get("cached_tokens") or 0),
            prompt_tokens=int(meta.get("prompt_tokens") or 0),
            reason=str(finish.get("type")),
            message=str(finish.get("message", "")),
            status=int(finish.get("status_code") or 200),
            text=str(answer.get("text", "")),
            meta=meta,
        )

    @classmethod
    def refused(cls, status: int, text: str) -> "Reply":
        """From an HTTP answer other than 200."""
        return cls(reason="http", status=status, message=text)

    def cut(self, m: int) -> "Reply":
        """The answer to the same greedy request for m tokens only, m not above what is here."""
        return Reply(self.ids[:m], self.logprobs[:m], self.gaps[:m], self.cached, self.prompt_tokens)


def replies_of(answers: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> list[Reply]:
    """Replies of a /generate answer: one object, or a list for several prompts."""
    return [Reply.of(answer) for answer in ([answers] if isinstance(answers, Mapping) else answers)]
