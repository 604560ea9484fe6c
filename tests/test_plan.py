"""The planner: it finds the best candidate, says why, refuses in a sentence, and its command starts."""

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import plan as bench
from bench.plan import HELD_OUT
from sglang_hybrid.cli.main import main
from sglang_hybrid.cli.plan import PARAMETERS, machine_of
from sglang_hybrid.cli.plan_report import command, lines, report
from sglang_hybrid.models.public import PUBLIC
from sglang_hybrid.planner import plan as planning
from sglang_hybrid.planner.candidates import Candidate, Machine, choices
from sglang_hybrid.planner.race import NOISE, Race, Run, interval, student
from sglang_hybrid.planner.search import neighbours, search
from sglang_hybrid.simulator.traffic import PROFILES, Profile
from tests.support.arguments import kept_process, parse

BUDGET = "2GiB"
"""About b83 of the source, for simulations that take no time."""


@pytest.fixture(scope="module")
def machine() -> Machine:
    return machine_of("falcon-h1-7b", memory="40GiB", budget=BUDGET)[0]


class Table(Race):
    """A race whose times are written down: choices that work with each other, and noise by seed."""

    def __init__(self, machine: Machine, world: int) -> None:
        super().__init__(machine, PROFILES["rag"], 1)
        self.world = world

    def _simulate(self, candidate: Candidate, seed: int) -> Run:
        memory, grid, _, headroom, checkpoints = candidate
        share = candidate.own.get("attention_share", 0.5)
        best = random.Random(self.world)
        layout = random.Random(f"{self.world}/{memory}/{grid}/{share}").random()
        wanted = best.choice((0.0, 0.1, 0.25, 0.45)) if memory != "S0" else 0.0
        cost = 1 + layout + abs(headroom - wanted) * (1 + layout)
        cost *= random.Random(f"{self.world}/{checkpoints}").uniform(1, 1.3)
        noise = random.Random(f"{self.world}/{seed}").uniform(0.5, 2)
        noise *= random.Random(f"{self.world}/{seed}/{candidate}").uniform(0.997, 1.003)
        return Run(cost * noise, 1.0, 1.0, 0.5, 1.0, 0.0, 0, 0)


@pytest.mark.parametrize("world", range(12))
def test_the_search_finds_the_best(machine: Machine, world: int) -> None:
    race = Table(machine, world)
    candidates = choices(machine).candidates
    found = search(race, candidates).best
    searched = race.runs
    best = race.ranked(candidates, range(6))[0]
    excess = race.excess(found, best, range(6))
    assert excess.mean <= NOISE or excess.low <= 0, (found, best)
    assert searched < len(candidates)


class Hidden(Table):
    """A layout that is good with its own placement and headroom alone: no ranking of layouts shows it."""

    def _simulate(self, candidate: Candidate, seed: int) -> Run:
        with_it = (candidate.headroom, candidate.checkpoints) == (0.45, "branch")
        cost = {("S2", 256): 0.95, ("S2", 512): 0.9}.get(candidate[:2], 1.5) if with_it else 1.2
        if not with_it and candidate[:2] == ("S2", 256):
            cost = 1.0 - 0.1 * candidate.headroom
        if not with_it and candidate[:2] == ("S2", 512):
            cost = 2.0
        return Run(cost, 1.0, 1.0, 0.5, 1.0, 0.0, 0, 0)


def test_the_search_steps_to_a_better_neighbour(machine: Machine) -> None:
    found = search(Hidden(machine, 0), choices(machine).candidates).best
    assert found == Candidate.of("S2", 512, conv_slots="tight", headroom=0.45, checkpoints="branch")


class Equal(Table):
    """Nothing matters."""

    def _simulate(self, candidate: Candidate, seed: int) -> Run:
        return Run(1.0, 1.0, 1.0, 0.5, 1.0, 0.0, 0, 0)


def test_where_nothing_matters_the_defaults_win_and_then_room(machine: Machine) -> None:
    race = Equal(machine, 0)
    found = search(race, choices(machine).candidates)
    assert {one.memory for one in found.compared} == {"S0", "S1", "S2", "D0"}
    best = planning._preferred(race, found, range(6), tokens=3500)
    plain = Candidate.of("S2", 512, conv_slots="tight")
    assert best == plain, "no flag but the memory's, and the most requests at once"


def test_neighbours_differ_in_one_choice(machine: Machine) -> None:
    candidates = choices(machine).candidates
    one = Candidate.of("D0", 512, attention_share=0.5)
    others = neighbours(one, candidates)
    assert Candidate.of("D0", 512, attention_share=0.35) in others
    assert Candidate.of("D0", 1792, attention_share=0.5) in others
    assert Candidate("S1", 256) in others and one not in others
    assert Candidate.of("D0", 1792, attention_share=0.35) not in others
    assert Candidate("S1", 256, headroom=0.1) not in others


def test_all_candidates_get_the_same_requests(machine: Machine) -> None:
    class Counted(Profile):
        def requests(self, seed: int, count: int):  # type: ignore[no-untyped-def]
            asked.append((seed, count))
            return super().requests(seed, count)

    asked: list[tuple[int, int]] = []
    race = Race(machine, Counted(rate=5), 20)
    s2, d0 = Candidate("S2", 512), Candidate("D0", 512)
    race.ranked([s2, d0], range(2))
    assert asked == [(0, 20), (1, 20)] and race.runs == 4
    assert race.run(s2, 0) == Race(machine, Profile(rate=5), 20, workers=2).run(s2, 0)


def test_workers_change_nothing(machine: Machine) -> None:
    those = [Candidate("S2", 512), Candidate("S0", 512), Candidate("D0", 512)]
    alone, together = (Race(machine, PROFILES["chat"], 15, workers) for workers in (1, 2))
    assert alone.ranked(those, range(2)) == together.ranked(those, range(2))
    assert alone._runs == together._runs


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.706), (2, 4.303), (3, 3.182), (5, 2.571), (11, 2.201), (40, 2.021)]
)
def test_quantiles_of_students_t(freedom: int, quantile: float) -> None:
    assert student(freedom) == pytest.approx(quantile, rel=0.005)


def test_an_interval_by_hand() -> None:
    found = interval([1.0, 2.0, 3.0, 6.0])
    half = 3.182 * math.sqrt(14 / 3) / 2
    assert found == pytest.approx((3, 3 - half, 3 + half), rel=0.01)


@pytest.fixture(scope="module")
def small(machine: Machine) -> Iterator[planning.Plan]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "REQUESTS", 24)
        yield planning.plan(machine, PROFILES["rag"], conversations=False)


def test_a_plan_tells_everything(small: planning.Plan) -> None:
    _, about = machine_of("falcon-h1-7b", memory="40GiB")
    answer = json.loads(json.dumps(report(small, about)))
    chosen = answer["recommended"]
    flags = {"memory", "grid", "headroom", "checkpoints"}
    flags |= {"conv_slots"} if chosen["memory"] == "S2" else set()
    flags |= {"attention_share"} if chosen["memory"] == "D0" else set()
    assert answer["reasons"].keys() == flags
    assert sorted(one["memory"] for one in answer["ledger"]) == ["D0", "S0", "S1", "S2"]
    for name in ("throughput", "latency", "hit_rate"):
        one = answer["predicted"][name]
        assert one["low"] <= one["mean"] <= one["high"]
    assert len(answer["changes"]) == 5
    text = "\n".join(lines(answer))
    for words in ("Recommended, and why", "Ledger", "Predicted", "It would change", "Launch"):
        assert words in text


def test_every_choice_has_a_command_that_the_servers_parser_takes(
    machine: Machine, small: planning.Plan, tmp_path: Path
) -> None:
    pytest.importorskip("sglang")
    _, about = machine_of("falcon-h1-7b", memory="40GiB", tp="2", kv_dtype="fp8", ssm_dtype="fp32")
    for best in (
        Candidate("S0", 1024),
        Candidate("S1", 512, headroom=0.25),
        Candidate.of("S2", 256, conv_slots="tight", checkpoints="sparse"),
        Candidate.of("D0", 1792, attention_share=0.35, headroom=0.1, checkpoints="branch"),
    ):
        small.best, kept = best, small.best
        argv = command(small, about)
        small.best = kept
        assert argv[:3] == ["python", "-m", "sglang.launch_server"]
        with kept_process():
            record = parse(*argv[3:])
        assert (record.hybrid_mem, record.hybrid_budget_bytes) == (best.memory, machine.budget)
        assert (record.hybrid_headroom or 0.0, record.hybrid_checkpoints or "all") == best[3:]
        assert record.hybrid_grid in (best.grid, None) and record.tp_size == 2
        assert record.hybrid_conv_slots == ("tight" if best.memory == "S2" else None)
        assert record.hybrid_attention_share == (0.35 if best.memory == "D0" else None)
        assert (record.max_running_requests, record.chunked_prefill_size) == (64, 8192)


def test_the_order_of_eviction_is_simulated_and_named(small: planning.Plan) -> None:
    machine, about = machine_of("falcon-h1-7b", memory="40GiB", budget=BUDGET, eviction="lru")
    assert machine.setting(Candidate("S2", 512)).policy.eviction == "lru"
    assert "--hybrid-eviction" not in command(small, about)
    usual, small.machine = small.machine, machine
    argv = command(small, about)
    small.machine = usual
    assert argv[argv.index("--hybrid-eviction") + 1] == "lru"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["no-model", "--memory", "40GiB"], "there is no file no-model"),
        (["falcon-h1-7b", "--memory", "forty"], "--memory forty is no size"),
        (["falcon-h1-7b", "--memory", "12GiB"], "leaves nothing beside weights of 15.2 GB"),
        (["falcon-h1-7b", "--memory", "900GiB"], "more than one device has"),
        (["falcon-h1-7b", "--memory", "40GiB", "--device", "A1"], "--device A1 is not known"),
        (["falcon-h1-7b", "--memory", "40GiB", "--eviction", "fifo"], "--eviction fifo is not supported"),
        (["falcon-h1-7b", "--memory", "60GiB", "--device", "A100-40GB"], "is more than a A100-40GB has"),
        (["falcon-h1-7b", "--memory", "40GiB", "--tp", "7"], "--tp 7 does not split"),
        (["falcon-h1-7b", "--memory", "40GiB", "--traffic", "x.jsonl"], "neither a file nor a profile"),
        (["falcon-h1-7b", "--memory", "40GiB", "--rate", "-1"], "--rate -1 is no number above 0"),
        (["falcon-h1-7b", "--memory", "40GiB", "--rate", "1e9"], "is not between"),
        (["falcon-h1-7b", "--memory", "40GiB", "--budget", "1Mi"], "--hybrid-budget-bytes"),
        (["falcon-h1-7b", "--memory", "40GiB", "--parameters", "1e9,2e9"], "is no count"),
        (["falcon-h1-7b", "--memory", "40GiB", "--max-running", "0"], "--max-running 0 is no whole number"),
        (["falcon-h1-7b", "--memory", "40GiB", "--kv-dtype", "int3"], "--kv-dtype int3 is not supported"),
    ],
)
def test_bad_input_ends_with_one_sentence(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *argv]) == 2
    said = capsys.readouterr()
    assert not said.out and says in said.err
    assert said.err.startswith("sglang-hybrid plan: ") and said.err.count("\n") == 1


def test_a_directory_is_weighed_by_its_weights(tmp_path: Path) -> None:
    config = PUBLIC["falcon-h1-7b"].config
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["plan", str(tmp_path), "--memory", "40GiB"]) == 2
    index = {"metadata": {"total_size": 10**10}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    machine, about = machine_of(str(tmp_path), memory="40GiB")
    assert (about.weight_bytes, machine.cost.weights.parameters) == (1e10, 5e9)
    assert machine.budget == int(0.9 * (40 << 30) - 1e10)


def test_every_built_in_model_has_parameters() -> None:
    for name in PUBLIC:
        machine, about = machine_of(name, memory="141G", tp="1", budget="10Gi")
        assert 5e7 < machine.cost.weights.parameters <= about.weight_bytes / 2 < 5e12, name
    assert PARAMETERS.keys() <= PUBLIC.keys()


def test_the_bench_holds_the_recommendation_against_all(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few = choices(machine)
    some = [one for one in few.candidates if one.checkpoints == "all" and one.headroom in (0.0, 0.25)]
    monkeypatch.setattr(bench, "choices", lambda machine: few._replace(candidates=some))
    monkeypatch.setattr(bench, "machine_of", lambda *args, **options: (machine, None))
    monkeypatch.setattr(bench, "REQUESTS", 8)
    monkeypatch.setattr(bench, "BEST", 3)
    answer = bench.measure(1, workers=1)
    (row,) = answer["profiles"].values()
    assert answer["of"] == 1 and answer["best"] == row["is_best"]
    assert row["candidates"] == len(some) == 30 and 1 <= row["place"] <= 30
    assert row["excess"] >= 0 and row["interval"][0] <= row["excess"] <= row["interval"][1]
    assert row["worst_excess"] >= row["excess"] - 0.05
    bench.tables(answer)
    assert HELD_OUT[0].name in capsys.readouterr().out


def test_the_planner_is_judged_on_other_profiles() -> None:
    assert len(HELD_OUT) == 10 and len({one.name for one in HELD_OUT}) == 10
    assert not {one.name for one in HELD_OUT} & PROFILES.keys()
    assert not set(HELD_OUT) & set(PROFILES.values())
