"""What `sglang-hybrid verify` asks a server: the scenarios, each run compared with its cold reference.

Prompt lengths are 1 to n grid steps, one less and one more.  A *path* is one sequence cut at these
lengths, so that each prompt begins with all shorter ones; *singles* share nothing.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from sglang_hybrid.cli.verify_compare import Answer, Report

Prompt = tuple[int, ...]


class Asks(Protocol):
    """A server that answers greedily."""

    def flush(self) -> None:
        """Empty the cache."""

    def ask(self, prompts: Sequence[Prompt], tokens: int) -> list[Answer]:
        """Answers of exactly `tokens` tokens to prompts sent together."""


@dataclass(frozen=True)
class Plan:
    """Sizes of a verification, all in tokens: prompts up to `steps` grid steps, answers of `tokens`."""

    grid: int
    steps: int = 8
    tokens: int = 4
    ids: tuple[int, int] = (5, 500)
    """Token ids of the prompts: first, past the last."""
    seed: int = 0

    @property
    def lengths(self) -> tuple[int, ...]:
        """1 to `steps` grid steps, one less and one more; at least one token."""
        around = (k * self.grid + d for k in range(1, self.steps + 1) for d in (-1, 0, 1))
        return tuple(length for length in around if length > 0)

    @property
    def long_tokens(self) -> int:
        """Answers that pass two boundaries wherever they begin."""
        return 2 * self.grid + 1

    def sequence(self, name: str, length: int) -> Prompt:
        """Random ids, the same for the same name; each name begins with another id."""
        source = random.Random(f"{self.seed} {name}")
        return tuple(source.randrange(*self.ids) for _ in range(length))

    def path(self) -> list[Prompt]:
        """Prompts of all lengths, each the beginning of the next."""
        base = self.sequence("path", self.lengths[-1])
        return [base[:length] for length in self.lengths]

    def singles(self) -> list[Prompt]:
        """Prompts of all lengths that share nothing."""
        return [self.sequence(f"single {length}", length) for length in self.lengths]

    def starts(self) -> list[Prompt]:
        """Prompts of long answers and conversations: one at, below and above each of four boundaries."""
        return [self.sequence(f"start {length}", length) for length in self.lengths[:12]]


@dataclass
class References:
    """Cold answers: alone, on an empty cache, on the first server asked.  Later servers must agree."""

    server: Asks
    known: dict[tuple[Prompt, int], Answer] = field(default_factory=dict)

    def of(self, prompt: Prompt, tokens: int) -> Answer:
        """The cold answer; asked once."""
        key = (prompt, tokens)
        if key not in self.known:
            self.server.flush()
            (self.known[key],) = self.server.ask([prompt], tokens)
        return self.known[key]


@dataclass
class Verifier:
    """Runs the scenarios on one server and counts into a report under `name`."""

    name: str
    server: Asks
    plan: Plan
    references: References
    report: Report

    def all(self) -> None:
        """Every scenario; those that answer shortly first."""
        self.prepare()
        self.cold()
        self.hits()
        self.company()
        self.conversation()
        self.long_answers()

    def prepare(self) -> None:
        """Ask all references.  Each empties the cache, which a scenario must not."""
        short = [*self.plan.path(), *self.plan.singles(), *self.resumed()]
        for prompt in [*short, *(prompt for turn in self.turns() for prompt in turn)]:
            self.references.of(prompt, self.plan.tokens)

    def turns(self) -> list[list[Prompt]]:
        """Prompts of three turns: each is the one before, its answer, and a few tokens."""
        turns = [self.plan.starts()]
        for turn in range(2):
            before = [p + self.references.of(p, self.plan.tokens).ids for p in turns[-1]]
            turns.append([p + self.plan.sequence(f"turn {turn} {i}", 3) for i, p in enumerate(before)])
        return turns

    def resumed(self) -> list[Prompt]:
        """Prompts with their long answers, cut anywhere: hits on what decode left behind."""
        answers = [self.references.of(prompt, self.plan.long_tokens) for prompt in self.plan.starts()]
        return [p + answer.ids[: -1 - i] for i, (p, answer) in enumerate(zip(self.plan.starts(), answers))]

    def check(self, scenario: str, prompts: Sequence[Prompt], tokens: int) -> None:
        """Ask together, compare each with its reference."""
        for prompt, answer in zip(prompts, self.server.ask(prompts, tokens), strict=True):
            want = self.references.of(prompt, tokens)
            self.report.compare(self.name, scenario, len(prompt), answer, want)

    def cold(self) -> None:
        """Alone on an empty cache: on another server than the reference's, or in other chunks."""
        for prompt in self.plan.singles():
            self.server.flush()
            self.check("cold", [prompt], self.plan.tokens)

    def hits(self) -> None:
        """Up the path each prompt extends a cached one; down it each was asked before.

        Then down it from an empty cache: the shorter ones resume inside what the longest computed.
        """
        up = self.plan.path()
        self.server.flush()
        for scenario, prompts in (("hit, longer", up), ("hit, same", up[::-1])):
            for prompt in prompts:
                self.check(scenario, [prompt], self.plan.tokens)
        self.server.flush()
        for prompt in up[::-1]:
            self.check("hit, shorter", [prompt], self.plan.tokens)

    def company(self) -> None:
        """All prompts in one batch: none cached, then all; then hits and strangers mixed."""
        singles, path = self.plan.singles(), self.plan.path()
        self.server.flush()
        self.check("together, cold", singles, self.plan.tokens)
        self.check("together, hit", singles, self.plan.tokens)
        self.server.flush()
        self.check("together, mixed", singles[::2], self.plan.tokens)
        self.check("together, mixed", [*path[1::2], *singles], self.plan.tokens)

    def conversation(self) -> None:
        """Three turns of all conversations, each turn in one batch."""
        turns = self.turns()
        self.server.flush()
        for prompts in turns:
            self.check("conversation", prompts, self.plan.tokens)

    def long_answers(self) -> None:
        """Answers over two boundaries, together: where a server preempts.  Then on from inside them."""
        resumed = self.resumed()
        self.server.flush()
        self.check("long answers", self.plan.starts(), self.plan.long_tokens)
        self.check("after decode", resumed, self.plan.tokens)
