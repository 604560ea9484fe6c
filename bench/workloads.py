"""Requests for the simulator and for the real server; seeds decide everything.

Each quantity (arrivals, contexts, sharing, questions, answers) is drawn from a stream of its own
(`sglang_hybrid.simulator.draws`), so that runs of one seed are paired.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from bench import trace
from bench.trace import CONTEXT_LIMIT, DEFAULT_TRACE, HASHED_TOKENS, MOST_NEW_TOKENS
from sglang_hybrid.simulator.draws import Lognormal, Zipf, arrivals, stream, uniform
from sglang_hybrid.simulator.request import Request

CountTokens = Callable[[str], int]
"""Length of a text in tokens, such as `lambda text: len(tokenizer.encode(text))`."""


def estimate_tokens(text: str) -> int:
    """Four characters a token, rounded up: for English, where no tokenizer is at hand."""
    return -(-len(text) // 4)


class Turn(NamedTuple):
    """Tokens that a user adds to a conversation, and tokens of the answer."""

    asked: int
    new: int


# -- the source's workload ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SharedContexts:
    """The source's workload: questions behind a few long contexts.

    A request stands behind a shared context with probability `sharing`, and otherwise behind one of the
    same length that nobody else has: what has to be computed without a cache does not depend on it.
    """

    count: int = 280
    rate: float = 3.0
    """Requests a second."""
    sharing: float = 1.0
    contexts: int = 8
    context_tokens: int = 2600
    zipf: float = 0.8
    """Exponent of the contexts' popularity; 0: all alike."""
    mean_input: float = 3332.0
    question_sigma: float = 1.4
    mean_new: float = 250.0
    new_sigma: float = 0.9
    context_limit: int = CONTEXT_LIMIT
    most_new: int = MOST_NEW_TOKENS

    @property
    def most_asked(self) -> int:
        """Tokens of the longest question."""
        return self.context_limit - self.most_new - self.context_tokens

    def requests(self, seed: int, turns: Sequence[Turn] | None = None) -> list[Request]:
        """In order of arrival.  Questions and answers come from `turns` (such as ShareGPT's), if given, and
        from lognormal laws otherwise."""
        pairs = self._lognormal(seed) if turns is None else self._sampled(seed, turns)
        popularity = Zipf(self.contexts, self.zipf)
        which, whether = stream(seed, "contexts"), stream(seed, "sharing")
        answer = []
        for number, (at, turn) in enumerate(zip(arrivals(seed, self.rate, self.count), pairs)):
            context: Hashable = ("context", popularity.draw(which))
            if uniform(whether) >= self.sharing:
                context = ("private context", number)
            segments = ((context, self.context_tokens), (("question", number), turn.asked))
            answer.append(Request(at=at, segments=segments, new=turn.new))
        return answer

    def _lognormal(self, seed: int) -> list[Turn]:
        asked = Lognormal(self.mean_input - self.context_tokens, self.question_sigma, self.most_asked)
        new = Lognormal(self.mean_new, self.new_sigma, self.most_new)
        questions, answers = stream(seed, "questions"), stream(seed, "answers")
        return [Turn(asked.draw(questions), new.draw(answers)) for _ in range(self.count)]

    def _sampled(self, seed: int, turns: Sequence[Turn]) -> list[Turn]:
        chance = stream(seed, "turns")
        drawn = [turns[int(uniform(chance) * len(turns))] for _ in range(self.count)]
        return [Turn(min(one.asked, self.most_asked), min(one.new, self.most_new)) for one in drawn]


# -- files --------------------------------------------------------------------------------------


def sharegpt(path: Path, count_tokens: CountTokens = estimate_tokens) -> list[list[Turn]]:
    """Conversations of a ShareGPT file (V3: a list of objects with `conversations`), in its order.

    A turn is what a human said and the model's reply; conversations are cut where the two do not
    alternate or a text is empty.  Raises `ValueError` when nothing is left, `FileNotFoundError` when there
    is no such file.
    """
    rows = json.loads(path.read_text(encoding="utf-8"))
    found = [
        list(_turns(row.get("conversations", row.get("conversation", [])), count_tokens)) for row in rows
    ]
    found = [turns for turns in found if turns]
    if not found:
        raise ValueError(f"{path} holds no conversation of a human's text and a reply")
    return found


def _turns(said: Sequence[dict[str, Any]], count_tokens: CountTokens) -> Iterable[Turn]:
    if said and said[0].get("from") == "system":
        said = said[1:]
    for asked, reply in zip(said[::2], said[1::2]):
        if (asked.get("from"), reply.get("from")) not in (("human", "gpt"), ("user", "chatgpt")):
            return
        turn = Turn(count_tokens(asked["value"]), count_tokens(reply["value"]))
        if not turn.asked or not turn.new:
            return
        yield turn


def mooncake(
    path: Path = DEFAULT_TRACE,
    count: int | None = None,
    rate: float | None = None,
    *,
    capped: bool = True,
) -> Iterator[Request]:
    """A Mooncake trace, one run of 512 tokens a hash id, under the paper's caps (`bench.trace.load`) or not.

    `count` takes the first so many; beyond the trace's, it is `repeated`.  `rate` stretches its times to so
    many requests a second on average.
    """
    rows = trace.load(path, count, capped=capped)
    stretch = len(rows) / rows[-1].at / rate if rate and rows[-1].at else 1.0
    return of_trace(trace.repeated(rows, count or len(rows)), stretch)


def of_trace(rows: Iterable[trace.Request], stretch: float = 1.0) -> Iterator[Request]:
    """Requests of a trace, their times multiplied by `stretch`: with 0 they all wait from the start."""
    for row in rows:
        yield Request(at=row.at * stretch, segments=_runs(row), new=max(row.new, 1))


def _runs(row: trace.Request) -> tuple[tuple[Hashable, int], ...]:
    starts = range(0, row.prompt, HASHED_TOKENS)
    return tuple((one, min(HASHED_TOKENS, row.prompt - start)) for one, start in zip(row.ids, starts))


# -- agents -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Agents:
    """Conversations behind one system prompt; each turn repeats all that was said, answers included.

    Open loop: a turn comes when its user has read and thought, however long the answer took to compute.
    """

    count: int = 60
    """Conversations."""
    rate: float = 0.5
    """New conversations a second."""
    system_tokens: int = 1200
    mean_turns: float = 6.0
    mean_asked: float = 300.0
    asked_sigma: float = 1.0
    mean_new: float = 200.0
    new_sigma: float = 0.8
    think: float = 10.0
    """Mean seconds between an answer and the next turn."""
    pace: float = 0.03
    """Seconds that a user gives the model for each token of its answer."""
    context_limit: int = CONTEXT_LIMIT
    most_new: int = MOST_NEW_TOKENS

    def requests(self, seed: int, conversations: Sequence[Sequence[Turn]] | None = None) -> list[Request]:
        """In order of arrival.  `conversations` (such as ShareGPT's) are drawn from, if given."""
        chosen = self._lognormal(seed) if conversations is None else self._sampled(seed, conversations)
        thinking = stream(seed, "thinking")
        answer: list[Request] = []
        for number, (at, turns) in enumerate(zip(arrivals(seed, self.rate, self.count), chosen)):
            answer += self._conversation(number, at, turns, thinking)
        return sorted(answer, key=lambda request: request.at)

    def _conversation(
        self, number: int, at: float, turns: Sequence[Turn], thinking: Random
    ) -> Iterable[Request]:
        said: tuple[tuple[Hashable, int], ...] = (("system", self.system_tokens),)
        length = self.system_tokens
        for depth, turn in enumerate(turns):
            new = min(turn.new, self.most_new)
            length += turn.asked + new
            if length > self.context_limit:
                return
            said = (*said, (("asked", number, depth), turn.asked))
            reply: Hashable = ("answer", number, depth)
            yield Request(at=at, segments=said, new=new, answer=reply)
            said = (*said, (reply, new))
            at += new * self.pace - self.think * math.log(uniform(thinking))

    def _lognormal(self, seed: int) -> list[list[Turn]]:
        asked = Lognormal(self.mean_asked, self.asked_sigma, self.context_limit)
        new = Lognormal(self.mean_new, self.new_sigma, self.most_new)
        turns, questions, answers = (stream(seed, name) for name in ("turns", "questions", "answers"))
        conversations = []
        for _ in range(self.count):
            goes_on = 1 - 1 / self.mean_turns
            length = 1 + (int(math.log(uniform(turns)) / math.log(goes_on)) if goes_on > 0 else 0)
            conversations.append([Turn(asked.draw(questions), new.draw(answers)) for _ in range(length)])
        return conversations

    def _sampled(self, seed: int, conversations: Sequence[Sequence[Turn]]) -> list[Sequence[Turn]]:
        chance = stream(seed, "conversations")
        return [conversations[int(uniform(chance) * len(conversations))] for _ in range(self.count)]


# -- arms and what they could reuse -------------------------------------------------------------


def control(requests: Sequence[Request]) -> list[Request]:
    """The same lengths and arrivals, and no text in common: reuse is impossible."""
    return [
        replace(
            request,
            segments=tuple(((number, content), tokens) for content, tokens in request.segments),
            answer=None,
        )
        for number, request in enumerate(requests)
    ]


def isolate(requests: Sequence[Request]) -> list[Request]:
    """The source's ISOLATE: the same texts, each request under a salt of its own."""
    return [replace(request, salt=("request", number)) for number, request in enumerate(requests)]


class _Texts:
    """Texts by their runs: runs of equal content share their first tokens."""

    def __init__(self) -> None:
        self._next: dict[Hashable, dict[int, _Texts]] = {}

    def common(self, segments: Sequence[tuple[Hashable, int]]) -> int:
        """Tokens at the beginning that some text added before has too."""
        node, common = self, 0
        for content, tokens in segments:
            known = node._next.get(content)
            if known is None:
                break
            if tokens not in known:
                return common + min(tokens, max(known))
            node = known[tokens]
            common += tokens
        return common

    def add(self, segments: Iterable[tuple[Hashable, int]]) -> None:
        node = self
        for content, tokens in segments:
            node = node._next.setdefault(content, {}).setdefault(tokens, _Texts())


def r_max(requests: Sequence[Request], grid: int) -> list[int]:
    """Tokens that an endless cache, with a checkpoint at every boundary, would serve of each prompt.

    Requests in order of arrival, each one done before the next: what the workload offers.
    """
    texts: dict[Hashable, _Texts] = {}
    depths = []
    for request in requests:
        under_key = texts.setdefault(request.salt, _Texts())
        usable = min(under_key.common(request.segments), request.prompt - 1)
        depths.append(usable // grid * grid)
        under_key.add(_computed(request))
    return depths


def _computed(request: Request) -> Iterable[tuple[Hashable, int]]:
    """The last token of an answer has been sampled, and never went through the model."""
    yield from request.segments
    if request.answer is not None and request.new > 1:
        yield request.answer, request.new - 1
