"""Two answers to one question, token by token and logprob by logprob."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

TOLERANCE = 1e-3
"""Largest difference of a logprob without exact mode, in nats."""

NEAR_TIE = 2 * TOLERANCE
"""The two best logprobs of the reference closer than this may swap within the tolerance."""


class Answer(NamedTuple):
    """What a server said to one prompt.

    `gaps`: best less second-best logprob at each position, only where they were asked for.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    gaps: tuple[float, ...] = ()
    cached: int = 0
    preempted: int = 0

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> Answer:
        """From one element of an answer of `/generate`.  A logprob that is no number counts as NaN."""
        meta = answer["meta_info"]
        best = meta.get("output_top_logprobs") or []
        return cls(
            ids=tuple(answer["output_ids"]),
            logprobs=tuple(_number(entry[0]) for entry in meta["output_token_logprobs"]),
            gaps=tuple(_number(top[0][0]) - _number(top[1][0]) for top in best if top and len(top) > 1),
            cached=int(meta.get("cached_tokens") or 0),
            preempted=int(meta.get("num_retractions") or 0),
        )


def _number(value: float | None) -> float:
    return float("nan") if value is None else float(value)


@dataclass
class Tally:
    """Counts of one scenario, or of several added up.

    A comparison is one output token with its logprob.  Where an id differs the rest of that run is
    not compared: its contexts are different ones.  `different_bits` counts logprobs whose bits
    differ at equal ids; `beyond` those further off than `TOLERANCE`, a missing number included.
    """

    runs: int = 0
    comparisons: int = 0
    different_ids: int = 0
    different_bits: int = 0
    beyond: int = 0
    near_ties: int = 0
    largest: float = 0.0
    cached_tokens: int = 0
    preempted: int = 0

    def add(self, other: Tally) -> None:
        """Add the counts of `other`."""
        self.largest = max(self.largest, other.largest)
        for name in vars(self):
            if name != "largest":
                setattr(self, name, getattr(self, name) + getattr(other, name))

    def count(self, got: Answer, want: Answer, exact: bool) -> Mismatch | None:
        """Compare one run with its reference; the first mismatch, if any.

        Without `exact` another token where the reference's two best were a near tie is counted as
        that and no mismatch.
        """
        self.runs += 1
        self.cached_tokens += got.cached
        self.preempted += bool(got.preempted)
        first: Mismatch | None = None
        if len(got.ids) != len(want.ids):
            self.different_ids += 1
            return Mismatch(min(len(got.ids), len(want.ids)), None, None, None, None)
        for place, (mine, theirs) in enumerate(zip(got.ids, want.ids)):
            self.comparisons += 1
            a, b = got.logprobs[place], want.logprobs[place]
            if mine != theirs:
                if not exact and place < len(want.gaps) and want.gaps[place] <= NEAR_TIE:
                    self.near_ties += 1
                else:
                    self.different_ids += 1
                    first = first or Mismatch(place, mine, theirs, a, b)
                break
            if struct.pack("d", a) == struct.pack("d", b) and a == a:
                continue
            self.different_bits += 1
            off = not abs(a - b) <= TOLERANCE  # NaN is beyond any tolerance
            self.beyond += off
            self.largest = max(self.largest, abs(a - b)) if a == a and b == b else float("inf")
            if exact or off:
                first = first or Mismatch(place, mine, theirs, a, b)
        return first

    def failures(self, exact: bool) -> int:
        """Mismatches that end the command with an error."""
        return self.different_ids + (self.different_bits if exact else self.beyond)


class Mismatch(NamedTuple):
    """First difference of a run: output position, ids and logprobs; None where the lengths differ."""

    place: int
    got_id: int | None
    want_id: int | None
    got_logprob: float | None
    want_logprob: float | None


class Row(NamedTuple):
    """A line of the mismatch table: where it was seen, in which scenario, on which prompt."""

    server: str
    scenario: str
    prompt_tokens: int
    cached: int
    mismatch: Mismatch


@dataclass
class Report:
    """Everything a verification found, by server and scenario."""

    exact: bool
    tallies: dict[tuple[str, str], Tally] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """What was to be exercised and was not: without it an empty table proves nothing."""

    def compare(self, server: str, scenario: str, prompt_tokens: int, got: Answer, want: Answer) -> None:
        """Count one run under its server and scenario."""
        tally = self.tallies.setdefault((server, scenario), Tally())
        mismatch = tally.count(got, want, self.exact)
        if mismatch is not None:
            self.rows.append(Row(server, scenario, prompt_tokens, got.cached, mismatch))

    def total(self) -> Tally:
        """All scenarios together."""
        total = Tally()
        for tally in self.tallies.values():
            total.add(tally)
        return total

    def ok(self) -> bool:
        """Nothing differs, something was compared, nothing is missing."""
        total = self.total()
        return not (total.failures(self.exact) or self.missing) and total.comparisons > 0

    def json(self) -> dict[str, Any]:
        """The report as plain values."""
        return {
            "ok": self.ok(),
            "exact": self.exact,
            **_counts(self.total()),
            "missing": self.missing,
            "scenarios": [
                {"server": server, "scenario": scenario, **_counts(tally)}
                for (server, scenario), tally in self.tallies.items()
            ],
            "mismatches": [
                {**row._asdict(), "mismatch": row.mismatch._asdict()} for row in self.rows[:MOST_ROWS]
            ],
        }

    def lines(self) -> Iterable[str]:
        """Two tables: counts by scenario, and the first mismatches."""
        heads = (
            "server",
            "scenario",
            "runs",
            "tokens",
            "cached",
            "preempted",
            "ids",
            "bits",
            "beyond",
            "ties",
        )
        table: list[tuple[str, ...]] = [heads]
        for (server, scenario), t in [*self.tallies.items(), (("all", ""), self.total())]:
            numbers = (
                t.runs, t.comparisons, t.cached_tokens, t.preempted,
                t.different_ids, t.different_bits, t.beyond, t.near_ties,
            )  # fmt: skip
            table.append((server, scenario, *(str(number) for number in numbers)))
        yield from _aligned(table)
        for row in self.rows[:MOST_ROWS]:
            m = row.mismatch
            what = (
                "another number of tokens"
                if m.got_id is None
                else f"id {m.got_id} for {m.want_id}, logprob {m.got_logprob!r} for {m.want_logprob!r}"
            )
            where = f"{row.server}, {row.scenario}, prompt of {row.prompt_tokens}, {row.cached} cached"
            yield f"DIFFERS: {where}: output token {m.place}: {what}"
        if len(self.rows) > MOST_ROWS:
            yield f"... and {len(self.rows) - MOST_ROWS} more runs that differ"
        for sentence in self.missing:
            yield f"INCONCLUSIVE: {sentence}"


MOST_ROWS = 40
"""Mismatches that are shown; the counts hold all."""


def _counts(tally: Tally) -> dict[str, Any]:
    names = {"beyond": "beyond_tolerance", "largest": "largest_difference"}
    return {names.get(name, name): value for name, value in vars(tally).items()}


def _aligned(table: list[tuple[str, ...]]) -> Iterable[str]:
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    for row in table:
        left = [cell.ljust(width) for cell, width in zip(row[:2], widths)]
        right = [cell.rjust(width) for cell, width in zip(row[2:], widths[2:])]
        yield "  ".join([*left, *right])
