"""Finds the best candidate with few simulations: what matters most first, then all around it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from sglang_hybrid.planner.candidates import HEADROOMS, Candidate
from sglang_hybrid.planner.race import NOISE, Race
from sglang_hybrid.radix.placement import PLACEMENTS
from sglang_hybrid.radix.policy import DEFAULT_POLICY

LAYOUTS_KEPT = 5
"""Of memory, grid and share, after one seed."""

RACED, FINALISTS = 8, 3
"""Candidates of the second and the third round."""

SEEDS = (1, 3, 6)
"""Of each round."""

STEPS = 3
"""Times that the search moves on to a better neighbour."""


class Found(NamedTuple):
    """The best one, and what was compared with it on the last round's seeds, the best first: among them the
    best found of each memory, and those defaults that may be as good."""

    best: Candidate
    compared: list[Candidate]


def search(race: Race, candidates: Sequence[Candidate]) -> Found:
    """Rounds on 1, 3 and 6 seeds, then steps to better neighbours, until there is none."""
    allowed = set(candidates)
    first, middle, last = (range(seeds) for seeds in SEEDS)

    def among(those: Iterable[Candidate]) -> list[Candidate]:
        return [one for one in dict.fromkeys(those) if one in allowed]

    # Headroom decides between organizations, so each layout is tried without and with some.
    some = (HEADROOMS[0], HEADROOMS[2])
    usual = DEFAULT_POLICY.checkpoints
    layouts = among(one for one in candidates if one.checkpoints == usual and one.headroom in some)
    ranked = race.ranked(layouts, first)
    kept = list(dict.fromkeys(one._replace(headroom=0.0) for one in ranked))[:LAYOUTS_KEPT]
    kept += [one for one in _best_of_each(ranked) if one not in kept]
    tried = among(one._replace(headroom=part) for one in kept for part in HEADROOMS)
    tried = race.ranked(tried, first)[:LAYOUTS_KEPT]
    tried = among(one._replace(checkpoints=name) for one in tried for name in PLACEMENTS)
    raced = race.ranked(tried, first)[:RACED]
    finalists = race.ranked(raced, middle)[:FINALISTS]
    best = race.ranked(finalists, last)[0]
    compared = list(finalists)
    for _ in range(STEPS):
        around = race.ranked(among(neighbours(best, candidates)), middle)[:FINALISTS]
        compared = list(dict.fromkeys([*compared, *around]))
        better = race.ranked([best, *around], last)[0]
        if better == best:
            break
        best = better
    compared += [*_bests(race, candidates, middle), *_plain(race, candidates, best, middle)]
    return Found(best, race.ranked(compared, last))


def _best_of_each(ranked: Sequence[Candidate]) -> list[Candidate]:
    """The best layout of each memory."""
    best: dict[str, Candidate] = {}
    for one in ranked:
        best.setdefault(one.memory, one._replace(headroom=0.0))
    return list(best.values())


def _bests(race: Race, candidates: Iterable[Candidate], seeds: Sequence[int]) -> list[Candidate]:
    """Of each memory, the better of the two that did best on the first seed."""
    tried: dict[str, list[Candidate]] = {}
    for one in race.ranked(race.tried(candidates), range(1)):
        tried.setdefault(one.memory, []).append(one)
    return [race.ranked(those[:2], seeds)[0] for those in tried.values()]


def _plain(
    race: Race, candidates: Iterable[Candidate], best: Candidate, seeds: Sequence[int]
) -> list[Candidate]:
    """The plugin's defaults of each memory, and the best one's with the policy's, where they are as good."""
    policies = {best._replace(headroom=0.0, checkpoints=name) for name in (best.checkpoints, "all")}
    policies.add(best._replace(checkpoints="all"))
    default = race.machine.default_grid
    plain = race.ranked(
        [one for one in candidates if not one.flags(default(one)) or one in policies], range(1)
    )
    near = [one for one in plain if race.excess(one, best, range(1)).mean <= NOISE]
    return [one for one in race.ranked(near, seeds) if race.excess(one, best, seeds).mean <= NOISE]


def neighbours(one: Candidate, candidates: Iterable[Candidate]) -> list[Candidate]:
    """Candidates that differ in one choice: memory, whose grid and options may come with it, grid, an
    option, headroom or placement."""
    return [other for other in candidates if _differences(one, other) == 1]


def _differences(one: Candidate, other: Candidate) -> int:
    policy = (one.headroom != other.headroom) + (one.checkpoints != other.checkpoints)
    if one.memory != other.memory:
        return policy + 1
    own = sum(value != other.weighed[name] for name, value in one.weighed.items())
    return policy + (one.grid != other.grid) + own
