"""`sglang-hybrid verify`: it sees a difference wherever one is, and says nothing where none is."""

import json
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from sglang_hybrid.cli import main, verify
from sglang_hybrid.cli.verify_compare import Answer, Report, Tally
from sglang_hybrid.cli.verify_runs import Plan, Prompt, References, Verifier
from sglang_hybrid.cli.verify_server import Server, VerifyError

PLAN = Plan(grid=4, steps=4, tokens=3)


@dataclass
class Toy:
    """A server whose answers are functions of the prompt, but for a planted fault.

    A fault adds `off` to the logprobs (and swaps the ids if `swap`) of the answers that it names:
    "hit" those with a cached boundary, "company" those of larger batches, "cold" all, "preempted" the
    long ones of batches.
    """

    fault: str = ""
    off: float = 0.0
    swap: bool = False
    cached: set[Prompt] = field(default_factory=set)
    asked: int = 0

    def flush(self) -> None:
        self.cached = set()

    def ask(self, prompts: Sequence[Prompt], tokens: int) -> list[Answer]:
        self.asked += len(prompts)
        answers = []
        for prompt in prompts:
            ids: list[int] = []
            logprobs: list[float] = []
            for _ in range(tokens):
                source = random.Random(repr((prompt, ids)))
                ids.append(source.randrange(5, 500))
                logprobs.append(-source.random())
            depths = (length for length in range(4, len(prompt), 4) if prompt[:length] in self.cached)
            hit = max(depths, default=0)
            company = len(prompts) > 1
            struck = {"hit": hit > 0, "company": company, "cold": True, "preempted": company and tokens > 3}
            if struck.get(self.fault):
                logprobs = [value + self.off for value in logprobs]
                ids = [id + 1 for id in ids] if self.swap else ids
            whole = (*prompt, *ids)
            self.cached.update(whole[:length] for length in range(4, len(whole), 4))
            answers.append(
                Answer(tuple(ids), tuple(logprobs), (1.0,) * tokens, hit, int(self.fault == "preempted"))
            )
        return answers


def verified(server: Toy, exact: bool = True, reference: Toy | None = None) -> Report:
    report = Report(exact)
    Verifier("toy", server, PLAN, References(reference or server), report).all()
    return report


def test_equal_runs_are_ok_and_every_scenario_was_asked() -> None:
    report = verified(Toy())
    assert report.ok() and not report.rows
    names = {scenario for _, scenario in report.tallies}
    assert names == {
        "cold", "hit, longer", "hit, same", "hit, shorter",
        "together, cold", "together, hit", "together, mixed",
        "conversation", "long answers", "after decode",
    }  # fmt: skip
    total = report.total()
    assert total.comparisons == sum(tally.comparisons for tally in report.tallies.values()) > 500
    for name in ("hit, longer", "hit, same", "hit, shorter", "together, hit", "conversation", "after decode"):
        assert report.tallies["toy", name].cached_tokens > 0, f"{name} hits nothing"


def test_prompts_lie_around_every_boundary() -> None:
    assert PLAN.lengths == (3, 4, 5, 7, 8, 9, 11, 12, 13, 15, 16, 17)
    path = PLAN.path()
    assert all(long[: len(short)] == short for short, long in zip(path, path[1:]))
    singles = PLAN.singles()
    assert len({prompt[:3] for prompt in singles}) == len(singles)
    assert Plan(grid=1, steps=2).lengths == (1, 2, 1, 2, 3)


@pytest.mark.parametrize("fault", ["hit", "company", "preempted"])
def test_one_bit_is_seen(fault: str) -> None:
    report = verified(Toy(fault, off=2**-52))
    total = report.total()
    assert not report.ok() and total.different_bits > 0 and total.different_ids == 0
    assert total.beyond == 0 and verified(Toy(fault, off=2**-52), exact=False).ok()


@pytest.mark.parametrize("exact", [True, False])
def test_another_token_is_seen(exact: bool) -> None:
    report = verified(Toy("hit", swap=True), exact)
    assert not report.ok() and report.total().different_ids > 0


def test_without_exact_a_logprob_may_differ_by_the_tolerance_only() -> None:
    assert verified(Toy("hit", off=9e-4), exact=False).ok()
    report = verified(Toy("hit", off=1.1e-3), exact=False)
    assert not report.ok() and report.total().beyond > 0


def test_a_cold_run_on_another_server_counts_too() -> None:
    report = verified(Toy("cold", off=1e-9), reference=Toy())
    assert report.tallies["toy", "cold"].different_bits > 0


def answer(ids: Sequence[int], logprobs: Sequence[float], gap: float = 1.0) -> Answer:
    return Answer(tuple(ids), tuple(logprobs), (gap,) * len(ids))


def test_a_near_tie_is_counted_and_ends_the_run() -> None:
    tally = Tally()
    assert tally.count(answer([1, 9, 9], [-1, -1, -9]), answer([1, 2, 3], [-1, -1, -1], 1e-3), False) is None
    assert (tally.near_ties, tally.comparisons, tally.failures(False)) == (1, 2, 0)
    mismatch = tally.count(answer([9], [-1]), answer([1], [-1], 1e-3), True)
    assert mismatch is not None and tally.different_ids == 1, "exact mode knows no ties"
    assert tally.count(answer([9], [-1]), answer([1], [-1], 3e-3), False) is not None


def test_what_is_no_number_or_missing_is_a_difference() -> None:
    nan = math.nan
    for exact in (True, False):
        for got, want in ((nan, -1.0), (-1.0, nan), (nan, nan)):
            tally = Tally()
            assert tally.count(answer([1], [got]), answer([1], [want]), exact) is not None
            assert tally.failures(exact) == 1
        assert Tally().count(answer([1], [-1.0]), answer([1, 2], [-1.0, -1.0]), exact) is not None
    assert Tally().count(answer([1], [-0.0]), answer([1], [0.0]), True) is not None


def test_a_report_that_compared_nothing_or_missed_a_part_is_not_ok() -> None:
    assert not Report(True).ok()
    report = verified(Toy())
    report.missing.append("no request was preempted")
    assert not report.ok() and any("INCONCLUSIVE" in line for line in report.lines())


def test_json_has_the_totals_and_tables_name_the_mismatch() -> None:
    report = verified(Toy("hit", off=1e-9))
    told = json.loads(json.dumps(report.json()))
    assert told["ok"] is False and told["different_ids"] == 0 and told["different_bits"] > 0
    assert told["comparisons"] == sum(row["comparisons"] for row in told["scenarios"])
    assert {"preempted", "runs", "near_ties", "beyond_tolerance", "mismatches"} <= told.keys()
    assert sum("DIFFERS" in line for line in report.lines()) > 0


def test_answers_are_read_from_sglangs_own() -> None:
    meta = {
        "output_token_logprobs": [[-0.5, 7, None], [None, 8, None]],
        "output_top_logprobs": [[[-0.5, 7, None], [-0.75, 9, None]], None],
        "cached_tokens": 8,
        "num_retractions": 2,
    }
    read = Answer.of({"output_ids": [7, 8], "meta_info": meta})
    assert read.ids == (7, 8) and read.logprobs[0] == -0.5 and math.isnan(read.logprobs[1])
    assert read.gaps == (0.25,) and (read.cached, read.preempted) == (8, 2)


# -- the command -----------------------------------------------------------------------------------


def failing(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main.main(["verify", *argv]) == 2
    return capsys.readouterr().err


def test_bad_input_is_one_sentence(capsys: pytest.CaptureFixture[str], tmp_path: object) -> None:
    for argv, words in (
        (("--model", "demo", "--organizations", "S1,S9"), "S9 is unknown; legal: S0, S1, S2, D0"),
        (("--model", "demo", "--state-dtypes", "int8"), "int8 is unknown; legal: auto"),
        (("--model", "demo", "--chunk-sizes", "-3"), "-3 must be a number of tokens or 'whole'"),
        (("--model", "demo", "--steps", "0"), "--steps 0 must be at least 1"),
        (("--model", str(tmp_path)), "has no config.json"),
        (("--url", "http://127.0.0.1:9"), "does not answer"),
    ):
        assert words in failing(capsys, *argv)


def test_the_servers_that_are_started() -> None:
    parser = main.build_parser()
    args = parser.parse_args(["verify", "--model", "demo", "--organizations", "S0,D0", "--exact"])
    setups = list(verify._setups(args, demo=True))
    assert [(s.dtype, s.organization, s.chunk, s.in_steps) for s in setups] == [
        (dtype, organization, chunk, chunk is not None)
        for dtype in ("float32", "bfloat16")
        for organization, chunk in (("S0", None), ("S0", 3), ("D0", 3))
    ]
    args = parser.parse_args(["verify", "--model", "demo", "--chunk-sizes", "16,whole,32"])
    assert [s.chunk for s in verify._setups(args, demo=True)] == [None, 16, 32]
    line = setups[1].args("M", 16, exact=True)
    assert "--hybrid-exact" in line and line[line.index("--chunked-prefill-size") + 1] == "48"
    assert "--hybrid-exact" not in setups[1].args("M", 16, exact=False)


def test_without_a_grid_the_first_server_chooses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grid 512 is not legal for every model: `--hybrid-grid` is left to the first start."""
    (tmp_path / "config.json").write_text("{}")
    started: list[list[str]] = []
    plans: list[Plan] = []

    class Started(Toy):
        def __init__(self, args: list[str], env: object) -> None:
            super().__init__()
            started.append(args)

        def __enter__(self) -> "Started":
            return self

        def __exit__(self, *_: object) -> None: ...

        def info(self) -> dict[str, object]:
            return {"internal_states": [{"hybrid": {"grid": 1056}}]}

    monkeypatch.setattr(verify, "Server", Started)
    monkeypatch.setattr(verify, "_verify", lambda name, server, plan, *_, **__: plans.append(plan))
    main.main(["verify", "--model", str(tmp_path), "--organizations", "S2"])
    first, second = started
    assert "--hybrid-grid" not in first
    assert second[second.index("--hybrid-grid") + 1] == "1056"
    assert second[second.index("--chunked-prefill-size") + 1] == "3168"
    assert [plan.grid for plan in plans] == [1056, 1056]


def test_a_server_that_ends_is_told_with_its_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "echo")
    told = r"(?s)ended with status 0:.*sglang.launch_server --port-is-mine"
    with pytest.raises(VerifyError, match=told), Server(["--port-is-mine"]):
        pass
