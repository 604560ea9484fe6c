"""The recommendation: what was found, why, what it rests on, and what would change it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sglang_hybrid.geometry import GeometryError, ceil_div
from sglang_hybrid.ledger import Account, Capacity, Demand
from sglang_hybrid.planner.candidates import Candidate, Machine, choices
from sglang_hybrid.planner.race import NOISE, Interval, Race, Run
from sglang_hybrid.planner.search import SEEDS, Found, neighbours, search
from sglang_hybrid.pools.factory import ORGANIZATIONS
from sglang_hybrid.simulator.request import Request
from sglang_hybrid.simulator.traffic import Traffic

REQUESTS, TURN_REQUESTS = 240, 400
"""Requests of a simulation: of single prompts, and of conversations, which take longer to warm."""

CHANGE_SEEDS = range(2)
"""Seeds on which other circumstances are tried."""

CHANGE = 0.03
"""What another choice must gain there, on every seed, to be told."""

PRESSED = 2
"""Times the traffic's rate, to tell what is served when more comes."""

MANY = 64
"""Checkpoints over which one's share of a slab is averaged."""


class NothingFits(ValueError):
    """No candidate starts on this machine; the message is the ledger's."""


class Against(NamedTuple):
    """The best candidate with another value of one choice, and how much longer a request takes with it."""

    candidate: Candidate
    excess: Interval


class Change(NamedTuple):
    """Under other circumstances another candidate is the better one: by this part of a request's time."""

    circumstances: str
    candidate: Candidate | None
    """None: the recommendation stands."""
    gain: float


class Line(NamedTuple):
    """One organization in the ledger: what the budget becomes, and what a mean request costs there."""

    memory: str
    grid: int
    capacity: Capacity
    request_bytes: int
    checkpoint_blocks: float
    """Attention blocks of its grid that a checkpoint takes the place of."""


@dataclass
class Plan:
    """Everything the command tells."""

    machine: Machine
    traffic: Traffic
    best: Candidate
    seeds: int
    requests: int
    simulations: int
    figures: dict[str, Interval]
    """Of the recommendation, by `Run`'s names; `capacity`: output tokens a second under twice the load."""
    memories: dict[str, Against]
    """The best of each other memory."""
    against: dict[str, list[Against]]
    """Other values of grid, searched options, headroom and checkpoints, everything else equal."""
    ledger: list[Line]
    changes: list[Change]
    left_out: list[str]


def plan(machine: Machine, traffic: Traffic, conversations: bool, workers: int = 1) -> Plan:
    """Raises `NothingFits` when the budget holds no memory at all."""
    choice = choices(machine)
    if not choice.candidates:
        raise NothingFits(choice.left_out[-1])
    race = Race(machine, traffic, TURN_REQUESTS if conversations else REQUESTS, workers)
    best, compared = recommend(race, choice.candidates)
    last = range(SEEDS[-1])
    memories = _memories(race, best, compared, last)
    against = _neighbours(race, best, choice.candidates)
    figures = {name: race.of(best, last, name) for name in Run._fields}
    pressed = Race(machine, traffic.at_rate(traffic.rate * PRESSED), race.count, workers)
    pressed.prepare([best], last)
    figures["capacity"] = pressed.of(best, last, "throughput")
    rivals = [best, *(one.candidate for one in memories.values())]
    rivals += [one.candidate for one in against["headroom"]]
    changes = _changes(machine, traffic, race, best, rivals)
    told = [best, *(one.candidate for one in memories.values())]
    return Plan(
        machine,
        traffic,
        best,
        len(last),
        race.count,
        race.runs,
        figures,
        memories,
        against,
        [_line(machine, one, mean_tokens(race.sample())) for one in told],
        changes,
        choice.left_out,
    )


def recommend(race: Race, candidates: Sequence[Candidate]) -> Found:
    """The candidate to take, and what was compared with it on the last round's seeds."""
    found = search(race, candidates)
    best = _preferred(race, found, range(SEEDS[-1]), mean_tokens(race.sample()))
    return Found(best, found.compared)


def _preferred(race: Race, found: Found, seeds: Sequence[int], tokens: int) -> Candidate:
    """Of those as good as the best: fewest flags, then most requests at once."""
    machine = race.machine
    equal = [one for one in found.compared if race.excess(one, found.best, seeds).mean <= NOISE]

    def preference(one: Candidate) -> tuple[int, int, float]:
        flags = one.flags(machine.default_grid(one))
        return flags, -_line(machine, one, tokens).capacity.holds, race.score(one, seeds)

    return min([found.best, *equal], key=preference)


def _memories(
    race: Race, best: Candidate, compared: Sequence[Candidate], seeds: Sequence[int]
) -> dict[str, Against]:
    """Each other memory at its best."""
    found: dict[str, Against] = {}
    for one in compared:
        if one.memory != best.memory and one.memory not in found:
            found[one.memory] = Against(one, race.excess(one, best, seeds))
    return found


def _neighbours(race: Race, best: Candidate, candidates: Sequence[Candidate]) -> dict[str, list[Against]]:
    """Other values of each choice, everything else equal; those that seem better on all seeds."""
    few, last = range(SEEDS[1]), range(SEEDS[-1])
    around = [one for one in neighbours(best, candidates) if one.memory == best.memory]
    race.prepare([best, *around], few)
    close = [one for one in around if race.excess(one, best, few).mean < 0]
    race.prepare(close, last)
    return {
        choice: [
            Against(one, race.excess(one, best, last if one in close else few))
            for one in around
            if one.value(choice) != best.value(choice)
        ]
        for choice in ("grid", *best.weighed, "headroom", "checkpoints")
    }


def mean_tokens(requests: Sequence[Request]) -> int:
    """Of prompt and answer."""
    return round(sum(one.prompt + one.new for one in requests) / len(requests))


def _line(machine: Machine, one: Candidate, tokens: int) -> Line:
    """The ledger of requests of so many tokens, each with its live state and a checkpoint."""
    account = account_of(machine, one)
    demand = Demand(tokens, ceil_div(tokens, one.grid), 2)
    checkpoint = account.cost(Demand.of_blocks(0, MANY, one.grid)).total / MANY
    return Line(
        one.memory,
        one.grid,
        account.capacity(demand, machine.budget),
        account.cost(demand).total * machine.model.arenas,
        checkpoint / account.cost(Demand.of_blocks(1, 0, one.grid)).total,
    )


def account_of(machine: Machine, candidate: Candidate) -> Account:
    """The ledger's account of a candidate."""
    return ORGANIZATIONS[candidate.memory].prices(machine.model, candidate.grid, **candidate.own)


def _changes(
    machine: Machine, traffic: Traffic, race: Race, best: Candidate, rivals: Sequence[Candidate]
) -> list[Change]:
    """Other loads, budgets and sharing, with what was compared before."""
    other: dict[str, tuple[Machine, Traffic]] = {}
    for times in (0.5, 2.0):
        rate = traffic.rate * times
        other[f"at {rate:.3g} requests/s"] = machine, traffic.at_rate(rate)
    for times in (0.5, 2.0):
        other[f"with {times:g} x the state bytes"] = (
            machine._replace(budget=int(machine.budget * times)),
            traffic,
        )
    unshared = traffic.unshared()
    if unshared is not None:
        other["with nothing shared between users"] = machine, unshared
    races = {name: Race(*one, race.count, race.workers) for name, one in other.items()}
    return [_change(name, there, best, rivals) for name, there in races.items()]


def _change(name: str, there: Race, best: Candidate, rivals: Sequence[Candidate]) -> Change:
    starting = [one for one in rivals if starts(there.machine, one)]
    if not starting:
        return Change(name, None, 0.0)
    first = there.ranked(starting, CHANGE_SEEDS)[0]
    if best not in starting:
        return Change(name, first, 1.0)
    gains = [1 - there.run(first, seed).latency / there.run(best, seed).latency for seed in CHANGE_SEEDS]
    gain = sum(gains) / len(gains)
    return Change(name, first, gain) if min(gains) > 0 and gain >= CHANGE else Change(name, None, 0.0)


def starts(machine: Machine, candidate: Candidate) -> bool:
    """Whether the ledger lets it start."""
    try:
        machine.setting(candidate).organization()
    except GeometryError:
        return False
    return True
