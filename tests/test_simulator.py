"""The simulator: conservation at every step, the scheduler's rules, costs that do not grow with the cache."""

import gc
import random
import sys
from dataclasses import replace
from typing import Any

import pytest

from sglang_hybrid.pools.organization import Organization
from sglang_hybrid.pools.pages import IntegrityError
from sglang_hybrid.radix.policy import Policy
from sglang_hybrid.simulator.cost import StepCost, Weights
from sglang_hybrid.simulator.outcome import Outcome, Record
from sglang_hybrid.simulator.request import Request
from sglang_hybrid.simulator.run import simulate
from sglang_hybrid.simulator.scheduler import Scheduler
from sglang_hybrid.simulator.setting import ENGINE, SOURCE, Serving, Setting, Victim
from tests.core.worlds import GRID, NAMES, World
from tests.support.publish_faults import FAULTS as PUBLISH_FAULTS

COST = StepCost(1e12, 1e12, Weights(1e9, 2e9, 1e5), kv_bytes=1e6, state_bytes=1e8, overhead=1e-3)
SERVINGS = {
    "source": SOURCE,
    "engine": ENGINE,
    "separate": SOURCE._replace(mixed=False, insists=False),
    "unaligned": SOURCE._replace(aligned=False),
}


def setting(name: str, serving: Serving = SOURCE, *, pages: int = 40, **fields: Any) -> Setting:
    """A small memory of one organization."""
    world = World(name, pages=pages, units=2 * pages // 3, states=pages // 4)
    fields = {"most_running": 6, "prefill_tokens": 16, **fields}
    return Setting(world.build, COST, serving=serving, **fields)


def traffic(seed: int, count: int, rate: float = 300.0) -> list[Request]:
    """Shared beginnings, conversations, salts, answers that grow beyond what admission expects."""
    chance = random.Random(seed)
    at, said, requests = 0.0, [], []
    for index in range(count):
        at += chance.expovariate(rate)
        if said and chance.random() < 0.4:
            begun = said[chance.randrange(len(said))]
        else:
            begun = ((("context", chance.randrange(3)), chance.randint(1, 3 * GRID)),)
        segments = (*begun, (index, chance.randint(1, 2 * GRID)))
        new = chance.randint(1, 5 * GRID)
        salt = chance.choice((None, None, "salt"))
        limit = None if chance.random() < 0.5 else new + chance.randint(0, 9)
        requests.append(Request(at, segments, new, answer=("answer", index), salt=salt, limit=limit))
        if sum(tokens for _, tokens in segments) + new < 12 * GRID:
            said.append((*segments, (("answer", index), new)))
    return requests


def checked(setting: Setting, requests: list[Request]) -> Outcome:
    """A run whose bookkeeping is checked after every step."""
    one = Scheduler(setting, requests, records=True)
    while one.step():
        one.core.check_integrity()
        held = {unit for job in one.running for unit in job.state.units}
        pool = one.core.memory.organization.unit_pool
        assert all(pool.references(unit) for unit in held)
        pins = [node.checkpoint.pins for node in one.core.memory.tree.nodes() if node.checkpoint is not None]
        assert sum(pins) == len(one.core.memory.pins)
        assert one.core.memory.live.running == len(one.running) <= setting.most_running
        assert len(one.prefilling) + len(one.decoding) + len(one.flight.ended()) == len(one.running)
        assert one.decoding.context == sum(one.decoding.position(job) for job in one.decoding)
    one.core.check_integrity()
    usage = one.core.memory.organization.usage()
    assert usage.pages_held == usage.pages_reclaiming == 0 and not one.core.memory.pins
    assert one.outcome.served + one.outcome.refused == len(requests)
    return one.outcome


@pytest.mark.parametrize("serving", SERVINGS)
@pytest.mark.parametrize("name", NAMES)
def test_every_step_conserves(name: str, serving: str) -> None:
    preemptions = adopted = 0
    for seed in range(2):
        policy = Policy(headroom=0.1 * seed, retention=2 if seed else None)
        outcome = checked(setting(name, SERVINGS[serving], policy=policy), traffic(seed, 40))
        preemptions += outcome.preemptions
        adopted += outcome.adopted_tokens
        missing = outcome.prompt_tokens - outcome.prefilled_tokens - outcome.adopted_tokens
        # Who is preempted before its prompt is computed computes the rest in another life.
        assert 0 <= missing <= outcome.prefilled_again_tokens
        assert not missing or SERVINGS[serving].victim is Victim.LAST
        assert outcome.adopted_tokens <= outcome.attention_tokens <= outcome.r_max_tokens
        assert outcome.records is not None
        for one in outcome.records:
            assert one.at <= one.admitted < one.first_token <= one.finished <= outcome.seconds
            assert one.j_adopt % GRID == 0 and one.j_adopt < one.prompt
            assert (one.cause is None) or one.gap_r >= 0
        assert sum(one.preemptions for one in outcome.records) == outcome.preemptions
        assert outcome.output_tokens == sum(one.new for one in outcome.records)
    assert adopted
    assert preemptions or serving == "engine", "INCONCLUSIVE: nothing was preempted"


@pytest.mark.parametrize("fault", PUBLISH_FAULTS)
@pytest.mark.parametrize("name", NAMES)
def test_a_fault_in_what_serves_is_seen_here(name: str, fault: str) -> None:
    """The memory of the simulator is the one of a server: what is broken in it breaks a simulated run."""
    with PUBLISH_FAULTS[fault](), pytest.raises((IntegrityError, AssertionError)):
        checked(setting(name, ENGINE), traffic(0, 40))


class StepByStep(Scheduler):
    """Without fast-forward."""

    def _undisturbed(self) -> int:
        return 1


@pytest.mark.parametrize("serving", SERVINGS)
@pytest.mark.parametrize("name", NAMES)
def test_fast_forward_changes_nothing(name: str, serving: str) -> None:
    chosen = setting(name, SERVINGS[serving], pages=60)
    jumped, walked = (kind(chosen, traffic(9, 60), records=True) for kind in (Scheduler, StepByStep))
    fast, slow = jumped.run(), walked.run()
    assert fast.records is not None and slow.records is not None
    for one, other in zip(fast.records, slow.records, strict=True):
        assert one == pytest.approx(other)
    for field, value in vars(replace(fast, records=None)).items():
        assert value == pytest.approx(getattr(replace(slow, records=None), field)), field


def alone(segments: tuple[tuple[Any, int], ...], new: int, **fields: Any) -> Request:
    return Request(0.0, segments, new, **fields)


def test_seconds_of_one_request() -> None:
    """Two chunks that end on boundaries, the rest of the prompt, then a token a step."""
    outcome = simulate(setting("S2"), [alone((("a", 4 * GRID + 3),), 6)], records=True)
    chunk, tail = 4 * GRID, 4 * GRID + 3
    prefill = COST.step(chunk, 1, chunk, chunk * (chunk + 1) / 2) + COST.step(3, 1, tail, 3 * chunk + 6)
    decode = sum(COST.step(1, 1, tail + step, tail + step) for step in range(5))
    assert outcome.seconds == pytest.approx(prefill + decode)
    assert outcome.records is not None and outcome.records[0].first_token == pytest.approx(prefill)
    assert outcome.steps == 2 + 5


def test_an_answer_serves_the_next_turn() -> None:
    first = Request(0.0, (("a", 2 * GRID),), 2 * GRID + 1, answer="answer")
    second = Request(9.0, (("a", 2 * GRID), ("answer", 2 * GRID + 1), ("b", 1)), 1)
    other = replace(second, segments=(("a", 2 * GRID), ("other", 2 * GRID + 1), ("b", 1)))
    reached = [simulate(setting("S1"), [first, turn], records=True).records for turn in (second, other)]
    assert [records[1].j_adopt for records in reached if records] == [4 * GRID, 2 * GRID]


def test_where_a_prefill_leaves_checkpoints() -> None:
    """A prompt of five blocks and a tail in chunks of four: at chunk ends, or at every boundary."""
    left = {}
    for name, serving in SERVINGS.items():
        one = Scheduler(setting("S1", serving), [alone((("a", 5 * GRID + 1),), 1)])
        one.run()
        left[name] = [node.depth for node in one.core.memory.tree.nodes() if node.checkpoint is not None]
    assert left["source"] == left["separate"] == [4, 5]
    assert left["engine"] == left["unaligned"] == [1, 2, 3, 4, 5]


def test_salts_and_isolation() -> None:
    segments = (("a", 3 * GRID + 1),)
    pair = [Request(0.0, segments, 1), Request(9.0, segments, 1)]
    assert simulate(setting("S1"), pair).adopted_tokens == 3 * GRID
    assert simulate(setting("S1", isolate=True), pair).adopted_tokens == 0
    assert simulate(setting("S1"), [pair[0], replace(pair[1], salt="s")]).adopted_tokens == 0


def test_first_come_first_served() -> None:
    """A head that finds no memory is not passed by a smaller request behind it."""
    requests = [alone(((index, 8 * GRID if index % 2 else GRID),), 3 * GRID) for index in range(9)]
    for serving in SERVINGS.values():
        outcome = simulate(setting("S1", serving, pages=40), requests, records=True)
        assert outcome.records is not None
        admitted = [one.admitted for one in sorted(outcome.records, key=lambda one: one.arrival)]
        assert admitted == sorted(admitted) and len(set(admitted)) > 3


def test_preempted_work_is_resumed_from_its_checkpoint() -> None:
    requests = [alone(((index, 2 * GRID),), 4 * GRID) for index in range(6)]
    outcome = checked(setting("S1", SOURCE._replace(insists=False), pages=44, isolate=True), requests)
    assert (outcome.preemptions, outcome.gave_up, outcome.prefilled_tokens) == (2, 0, 6 * 2 * GRID)
    # What each had when it was preempted, and the token that was not computed yet.
    assert outcome.resumed_tokens > outcome.prefilled_again_tokens > 0


def test_headroom_is_kept_while_others_run() -> None:
    """With f = .5 half of 40 pages stay free: two requests of 4 blocks and a state do not run together."""
    requests = [alone(((index, 4 * GRID),), 2) for index in range(2)]
    waited = [
        max(simulate(setting("S1", policy=Policy(headroom=f)), requests).running_seconds) for f in (0.0, 0.8)
    ]
    assert waited == [2, 1]


def test_what_never_fits_is_refused() -> None:
    outcome = checked(setting("S2"), [alone((("a", 400 * GRID),), 1), alone((("b", GRID),), 400 * GRID)])
    assert (outcome.refused, outcome.served) == (2, 0)


def test_illegal_input() -> None:
    late = [Request(1.0, (("a", 1),), 1), Request(0.5, (("a", 1),), 1)]
    with pytest.raises(ValueError, match=r"request 1 arrives at 0\.5, after one at 1\.0"):
        simulate(setting("S1"), late)
    with pytest.raises(ValueError, match="empty part"):
        Request(0.0, (("a", 0),), 1)
    with pytest.raises(ValueError, match="above its limit of 3"):
        Request(0.0, (("a", 1),), 4, limit=3)
    with pytest.raises(ValueError, match=f"use {GRID} or more"):
        simulate(setting("S1", prefill_tokens=GRID - 1), [])


# -- cost of a simulation -------------------------------------------------------------------------


class Steady:
    """A scheduler over a memory that is full of what unrelated requests left behind."""

    BLOCKS = 6

    def __init__(self, pages: int) -> None:
        one = setting("S2", ENGINE, pages=pages, prefill_tokens=64)
        self.served = 0
        self.scheduler = Scheduler(one, self._requests(10**6))
        pool = self.scheduler.core.memory.organization.unit_pool
        while pool.free > 0.02 * pages:
            self.serve(20)
        self.serve(40)

    def _requests(self, count: int) -> Any:
        return (Request(index * 1.0, ((index, self.BLOCKS * GRID),), 2 * GRID) for index in range(count))

    def serve(self, count: int) -> None:
        end = self.scheduler.outcome.served + count
        while self.scheduler.outcome.served < end:
            self.scheduler.step()

    def calls(self, count: int) -> float:
        """Python and C calls a request."""
        calls = 0

        def count_call(frame: object, event: str, argument: object) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        sys.setprofile(count_call)
        try:
            self.serve(count)
        finally:
            sys.setprofile(None)
        return calls / count

    def objects(self) -> int:
        gc.collect()
        return len(gc.get_objects())


def test_a_request_costs_the_same_in_a_large_cache() -> None:
    small, large = Steady(1_500).calls(30), Steady(15_000).calls(30)
    assert large < 1.3 * small, f"{small} calls a request over 1,500 pages, {large} over 15,000"


def test_memory_does_not_grow_with_the_requests() -> None:
    steady = Steady(300)
    steady.serve(700)  # what the history and the demand remember is full
    before = steady.objects()
    steady.serve(300)
    assert steady.objects() < before + 100


def test_records_have_every_field() -> None:
    outcome = simulate(setting("S1"), [alone((("a", GRID),), 1)], records=True)
    assert outcome.records is not None and isinstance(outcome.records[0], Record)
    assert outcome.throughput > 0 and outcome.j_adopt == 0


def test_a_setting_builds_a_fresh_memory_each_time() -> None:
    built: list[Organization] = []

    def build() -> Organization:
        built.append(World("S1").build())
        return built[-1]

    one = Setting(build, COST, prefill_tokens=16)
    assert simulate(one, traffic(1, 5)) == simulate(one, traffic(1, 5))
    assert len(built) == 2
