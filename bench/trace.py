"""The public Mooncake conversation trace, and what of it any prefix cache could serve.

A line has `input_length` and `output_length` in tokens and `hash_ids`: one id for each 512-token block
of the prompt, equal ids meaning an equal prefix up to and including that block.  The trace does not say
what was generated, so a prompt that repeats an answer is not known to do so: generated blocks count as
never asked for again, for every order of eviction alike.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

HASHED_TOKENS = 512
"""Tokens behind one of the trace's ids."""

DEFAULT_TRACE = Path(__file__).with_name("data") / "mooncake_conversation.jsonl"
"""In the checkout; `--trace` names another."""

CONTEXT_LIMIT = 8192
MOST_NEW_TOKENS = 1024


class Request(NamedTuple):
    """Tokens of a prompt and of its answer; ids of the prompt's blocks, the last one partial."""

    prompt: int
    new: int
    ids: tuple[int, ...]
    at: float = 0.0
    """Seconds from the start of the trace to its arrival."""

    @property
    def whole_blocks(self) -> int:
        return self.prompt // HASHED_TOKENS

    @property
    def usable_blocks(self) -> int:
        """Blocks that a hit may cover: at least one token is left to compute."""
        return (self.prompt - 1) // HASHED_TOKENS


def load(path: Path = DEFAULT_TRACE, most: int | None = None, *, capped: bool = True) -> list[Request]:
    """The trace under the paper's caps: answers cut at 1,024 tokens, longer contexts than 8,192 left out.

    `most` keeps the first requests only; without `capped` all of them stay, as they are.  Raises
    `FileNotFoundError` when there is no such file.
    """
    requests = []
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            request = Request(
                row["input_length"],
                min(row["output_length"], MOST_NEW_TOKENS) if capped else row["output_length"],
                tuple(row["hash_ids"]),
                row["timestamp"] / 1000,
            )
            if not capped or request.prompt + request.new <= CONTEXT_LIMIT:
                requests.append(request)
    return requests[:most]


def repeated(requests: Sequence[Request], count: int) -> Iterator[Request]:
    """So many of them: after the last they come again, each time with blocks of their own."""
    period = requests[-1].at * (1 + 1 / len(requests))
    fresh = 1 + max(one for request in requests for one in request.ids)
    for number in range(count):
        turn, place = divmod(number, len(requests))
        one = requests[place]
        ids = tuple(block + turn * fresh for block in one.ids)
        yield one._replace(ids=ids, at=one.at + turn * period)


class Reuse(NamedTuple):
    """What an endless cache would serve, and what it would have had to hold for it."""

    tokens: int
    waits: list[tuple[int, int]]
    """(blocks beyond the first, requests since they were last in use) of every hit deeper than one block."""


def reuse(requests: Sequence[Request]) -> Reuse:
    """Look every prompt up in all that came before it."""
    last: dict[int, int] = {}
    tokens = 0
    waits = []
    for now, request in enumerate(requests):
        depth = 0
        while depth < request.usable_blocks and request.ids[depth] in last:
            depth += 1
        tokens += depth * HASHED_TOKENS
        if depth > 1:
            waits.append((depth - 1, now - last[request.ids[depth - 1]]))
        for block in request.ids[: request.whole_blocks]:
            last[block] = now
    return Reuse(tokens, waits)


def clairvoyant(requests: Sequence[Request], pages: int, checkpoint_pages: float) -> int:
    """Tokens that no order of eviction can exceed, not even one that knows the future.

    Every hit has a price, pages times requests waited: its checkpoint and the blocks beyond the first.
    The budget is bought out from the best hit down, the last one in part.  It ignores what running
    requests hold, and that a page cannot be lent from one time to another: the true optimum is lower.
    """
    found = reuse(requests)
    hits = [(blocks * HASHED_TOKENS, (blocks + checkpoint_pages) * wait) for blocks, wait in found.waits]
    served = float(found.tokens - sum(tokens for tokens, _ in hits))
    left = float(pages * len(requests))
    for tokens, price in sorted(hits, key=lambda hit: hit[1] / hit[0]):
        served += tokens * min(1.0, left / price)
        left -= price
        if left <= 0:
            break
    return int(served)
