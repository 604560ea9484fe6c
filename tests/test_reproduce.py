"""The reproduction: its memories, what its arms ask for, when a comparison holds, and what is written."""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bench import calibrate, reproduce
from bench.arms import Arm, Constants, Figures, memory, run, workload
from bench.calibrate import SLOW_TARGETS, START, TARGETS, error, fit, frozen
from bench.claims import COMPARISONS, Comparison, arms
from bench.effects import Part, at, best, retained
from bench.plots import draw
from bench.reproduce import Results, answer_of, is_met, row
from bench.workloads import isolate

SEEDS = range(3)


def made_up(arm: Arm, seed: int) -> Figures:
    """Figures with which every comparison holds."""
    level = {"S0": 290.0, "S1": 405.0, "S2": 415.0, "D0": 420.0}[arm.organization] + seed
    if arm.sharing and arm.headroom is None:
        level *= {"S0": 1.2, "S1": 1.3, "S2": 1.4}[arm.organization]
    if arm.headroom is not None:
        f, budget = arm.headroom, arm.budget
        level = 400.0 + seed
        if arm.organization == "S2" and arm.rate >= 3.0:
            level *= 1 + (0.0 if budget == 108 else 0.6 * f)
            level *= 1 + (0.1 / arm.rate if budget == 108 else 0)
        elif arm.rate >= 3.0:
            level *= 1 + (0.12 * (0.1 - abs(f - 0.1)) + 0.065 * (budget == 63 and f < 0.27))
    if arm.retention:
        level *= 1.0 if arm.isolate else 1.2
    sparse = arm.organization == "S0"
    return Figures(
        throughput=level,
        window=level,
        input=7e5 if sparse else 5e5,
        waiting=70.0 if sparse else 10.0,
        running=7.0 if sparse else 17.0,
        j_adopt=500.0 + 3000 * (arm.headroom or 0) + 900 * arm.retention + seed,
        attention=2300.0 + 40 * arm.retention + 50 * seed,
        broken=0.0,
        preemptions=1.0,
        p99=30.0,
    )


@pytest.fixture(scope="module")
def results() -> Results:
    return Results({arm: [made_up(arm, seed) for seed in SEEDS] for arm in arms()})


# -- memories and arms ---------------------------------------------------------------------------


def test_budgets_become_the_sources_blocks() -> None:
    assert [memory("S2", b, 0.42).unit_pool.size for b in (63, 83, 108)] == [192, 254, 330]
    assert [memory("S0", b, 0.42).unit_pool.size for b in (63, 83, 108)] == [63, 83, 108]
    assert memory("S1", 83, 0.42).unit_pool.size == 254


def test_d0_splits_the_bytes_and_steps_natively() -> None:
    for budget in (63, 83, 108):
        pools = memory("D0", budget, 0.42)
        units, states = pools.unit_pool.size, pools.state_pool.size
        assert units == budget * 1568 * 42 // 100 // 16
        assert states == (budget * 1568 - units * 16) // 1557
        assert (pools.unit_tokens, pools.grid) == (16, 1792)


def test_an_arm_is_the_same_every_time_and_sharing_keeps_its_input() -> None:
    few = replace(Constants(), requests=40)
    arm = Arm("S2", 63)
    assert run(arm, few, 3) == run(arm, few, 3) != run(arm, few, 4)
    alone = run(arm._replace(sharing=0.0), few, 3)
    asked = sum(one.prompt for one in workload(arm, few).requests(3))
    assert (alone.input, alone.j_adopt) == (asked, 0.0)
    assert run(arm, few, 3).input < asked


def test_isolated_requests_reuse_nothing_and_retain_nothing() -> None:
    few = replace(Constants(), requests=40)
    assert isolate(workload(Arm("S2", 83), few).requests(0))[0].salt is not None
    plain, kept = (run(retained(isolate=True, retention=on), few, 0) for on in (False, True))
    assert plain == kept and plain.j_adopt == 0.0
    assert run(retained(), few, 0).j_adopt > 0


# -- the comparisons -----------------------------------------------------------------------------


def test_they_are_the_29_of_the_list() -> None:
    counts = {
        "C1": 2,
        "C2": 2,
        "C3": 3,
        "C4": 2,
        "C5": 2,
        "C6": 6,
        "C7": 3,
        "C8": 3,
        "C9": 2,
        "C10": 2,
        "C11": 2,
    }
    ids = [comparison.id for comparison in COMPARISONS]
    assert ids == [f"{claim}{'abcdef'[k]}" for claim, count in counts.items() for k in range(count)]


@pytest.mark.parametrize("comparison", COMPARISONS, ids=lambda one: one.id)
def test_each_can_hold_and_each_can_fail(comparison: Comparison, results: Results) -> None:
    """Turning the organizations or the arms against each other turns every comparison."""
    assert row(comparison, results)["reproduced"], row(comparison, results)["reason"]
    for spoil in SPOILERS:
        spoilt = Results({arm: [spoil(arm, one) for one in runs] for arm, runs in results.figures.items()})
        if not row(comparison, spoilt)["reproduced"]:
            return
    pytest.fail(f"{comparison.id} holds whatever is simulated")


def _inverted(arm: Arm, one: Figures) -> Figures:
    figures = ("throughput", "window", "input", "running")
    return one._replace(**{figure: 1e9 / getattr(one, figure) for figure in figures})


def _level(arm: Arm, one: Figures) -> Figures:
    """Nothing differs: no strict order holds."""
    return Figures(400.0, 400.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0)


def _lopsided(arm: Arm, one: Figures) -> Figures:
    """D0, headroom and retention make more of a difference than they may."""
    factor = 1 + 2 * (arm.headroom or 0) + 0.5 * arm.retention + 0.5 * (arm.organization == "D0")
    return one._replace(throughput=factor * one.throughput, window=factor * one.window)


SPOILERS = (_inverted, _level, _lopsided)


def one_part(effect: Sequence[float], published: float | None = None, low: float = 0.0) -> Comparison:
    return Comparison("X", "", "", "%", lambda runs: [Part("part", effect, low, published=published)])


def test_a_mean_inside_holds_and_an_interval_outside_is_weak(results: Results) -> None:
    assert row(one_part([1.0, 1.1, 0.9]), results)["weak"] is False
    loose = row(one_part([3.0, -1.0, 0.1]), results)
    assert (loose["reproduced"], loose["weak"]) == (True, True)
    exact = row(one_part([0.0, 0.0]), results)
    assert exact["reproduced"] is False and exact["reason"] == "part: +0.00 %"


def test_magnitudes_count_by_factor_sign_and_calibration(results: Results) -> None:
    near = row(one_part([10.0, 12.0], published=15.0), results)
    assert near["factor"] == pytest.approx(15 / 11) and is_met(near)
    assert not is_met(row(one_part([10.0, 12.0], published=17.0), results))
    assert row(one_part([10.0, 12.0], published=-11.0), results)["factor"] is None
    assert not is_met(row(one_part([10.0, 12.0]), results))
    assert not is_met(row(one_part([10.0, 12.0], 11.0)._replace(calibrated="its levels"), results))
    assert not is_met(row(one_part([10.0, 12.0], 11.0, low=20.0), results))


def test_best_headroom_is_of_means_over_seeds(results: Results) -> None:
    assert best(results, "S2", 63) == 0.35
    assert best(results, "D0", 83) == 0.10
    assert best(results, "S2", 108) == 0.0  # all alike: the smallest


# -- calibration ---------------------------------------------------------------------------------


def test_calibration_sees_levels_only() -> None:
    assert len(TARGETS) == 11
    assert {target.claim for target in TARGETS} == {"C1", "C3", "C4"}
    arms_seen = {target.arm for target in (*TARGETS, *SLOW_TARGETS)}
    assert {arm.organization for arm in arms_seen} == {"S0", "S2"}
    assert {arm.organization for arm in arms_seen if arm.sharing == 0} == {"S0"}  # no effect can be formed
    assert not any(arm.retention for arm in arms_seen)


def test_the_descent_finds_what_is_there() -> None:
    """Each level is its target's, off by how far two constants are from 270 and 3 ms."""

    def simulate(jobs: Sequence[tuple[Arm, Constants, int]]) -> list[Figures]:
        found = []
        for arm, constants, _ in jobs:
            off = 1 + abs(constants.requests - 270) / 100 + abs(constants.overhead - 3e-3) * 100
            levels = {one.figure: one.published * off for one in TARGETS if one.arm == arm}
            found.append(Figures(**{name: levels.get(name, 0.0) for name in Figures._fields}))
        return found

    found = fit(START, (0, 1), simulate)
    assert found.constants == replace(START, requests=270, overhead=3e-3)
    assert error(found.levels) == 0.0


def test_what_is_frozen_was_never_seen() -> None:
    file = json.loads(calibrate.CALIBRATION.read_text())
    seen, fresh = set(file["calibration_seeds"]), file["evaluation_seeds"]
    assert len(set(fresh)) == len(fresh) >= 12 and not seen & set(fresh)
    constants = frozen()["constants"]
    for name, values in calibrate.GRID.items():
        assert getattr(constants, name) in values
    assert constants.slowness in calibrate.SLOWNESS
    assert constants.attention_share == pytest.approx(0.527, abs=0.01)


# -- what is written -----------------------------------------------------------------------------


def test_the_json_has_its_fields(
    results: Results, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reproduce, "simulate_all", lambda constants, seeds, workers: results)
    monkeypatch.setattr(sys, "argv", ["reproduce", "--json", "--quick"])
    reproduce.main()
    answer = json.loads(capsys.readouterr().out)
    assert (answer["comparisons"], answer["reproduced"], answer["quick"]) == (29, 29, True)
    fields = {"id", "published", "simulated", "interval", "reproduced", "calibrated"}
    assert all(fields <= one.keys() for one in answer["rows"])
    assert [one["id"] for one in answer["rows"] if one["calibrated"]] == ["C3a", "C3b", "C3c", "C4a", "C4b"]
    assert answer["within_factor_1_5"] == len(answer["within"]) > 0
    assert not set(answer["within"]) & answer["calibrated"].keys()
    assert len(answer["contrasts"]) == 6 and answer["assumptions"] and answer["hot_share"]


def test_the_table_names_what_is_not_reproduced(
    results: Results, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spoilt = Results({arm: [_level(arm, one) for one in runs] for arm, runs in results.figures.items()})
    monkeypatch.setattr(reproduce, "simulate_all", lambda constants, seeds, workers: spoilt)
    monkeypatch.setattr(sys, "argv", ["reproduce"])
    reproduce.main()
    said = capsys.readouterr().out
    assert "Not reproduced: C5a." in said and "29 comparisons, seeds" in said
    answer = answer_of(spoilt, frozen(), list(SEEDS), False)
    assert f"{answer['reproduced']} of 29 hold." in said


def test_one_seed_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["reproduce", "--seeds", "1"])
    with pytest.raises(SystemExit):
        reproduce.main()
    assert "--seeds 1 gives no interval: use 2 or more" in capsys.readouterr().err


def test_plots_are_written_and_labelled(results: Results, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    paths = draw(results, SEEDS, tmp_path / "plots")
    assert len(paths) == 3
    for path in paths:
        pixels = image.open(path).convert("RGBA")
        assert min(pixels.width, pixels.height) > 600
        assert pixels.getpixel((0, 0)) == (255, 255, 255, 255)  # opaque


def test_every_plot_says_what_it_shows(results: Results) -> None:
    from bench import plots

    for make, unit in (
        (plots.throughput_over_headroom, "output tokens per second"),
        (plots.depth_and_retention, "tokens per request, first admission"),
        (plots.sharing_and_retention, "output tokens per second"),
    ):
        figure = make(results, SEEDS)
        assert figure.axes[0].get_ylabel() == unit
        note = figure.get_supxlabel()
        assert "seeds 0 to 2 (3)" in note and "3,332 input tokens" in note.replace("\n", " ")
        assert figure.get_suptitle()
        assert len(figure.axes[0].get_legend().get_texts()) >= 2
    panels = plots.throughput_over_headroom(results, SEEDS).axes
    assert [panel.get_title() for panel in panels] == [
        "b63 (192 S2 pages)",
        "b83 (254 S2 pages)",
        "b108 (330 S2 pages)",
    ]
    assert all("f (part of all blocks)" in panel.get_xlabel() for panel in panels)
    lines = [container.lines[0] for container in panels[0].containers]
    assert len({(line.get_marker(), line.get_linestyle()) for line in lines}) == len(lines) == 2
    assert at("S2", 63) in results.figures
