"""The kernel check reports what machine code and addresses say, and fails where they are bad."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sglang_hybrid.kernels.check import Row, main
from sglang_hybrid.kernels.compiled import access_bytes, compile_for
from sglang_hybrid.kernels.launch import Launch
from sglang_hybrid.kernels.samples import SAMPLES
from sglang_hybrid.kernels.triton_conv_update import plan_conv_update
from sglang_hybrid.pools.views import ConvView
from tests.support.interpreted import PASSED, verdicts

ROOT = Path(__file__).parents[1]
GOOD = Row("a kernel", "sm_90", 64, 0, 0, 16, 1.0, 0.1)


def check(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sglang_hybrid.kernels.check", *args],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )


def test_a_kernel_is_compiled_and_counted_without_a_gpu() -> None:
    done = check("--json", "--only", "Falcon-H1-7B S1 bf16")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["kernels"]
    names = [f"{op} Falcon-H1-7B S1 bf16" for op in ("state_update", "conv_update")]
    assert [(row["name"], row["arch"]) for row in rows if "rows cut" not in row["name"]] == [
        (name, arch) for name in names for arch in ("sm_80", "sm_90")
    ]
    for row in rows:
        assert 16 <= row["registers"] <= 255 and row["spills"] == 0
        assert row["state_access_bytes"] == 16 and row["bytes_over_floor"] == 1.0


def test_an_unknown_sample_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["check", "--only", "no such kernel"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "matches none of: state_update" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        (GOOD._replace(spills=3), "3 spills"),
        (GOOD._replace(state_access_bytes=8), "state accesses of 8 bytes, needs 16"),
        (GOOD._replace(state_access_bytes=0), "state accesses of 0 bytes, needs 16"),
        (GOOD._replace(bytes_over_floor=1.011), "moves 1.0110 times the floor, needs 1.01 or less"),
        (GOOD._replace(bytes_over_floor=float("nan")), "moves nan times the floor, needs 1.01 or less"),
    ],
)
def test_a_bad_row_is_a_fault(row: Row, fault: str) -> None:
    assert row.faults() == [fault]


def test_a_good_row_is_none() -> None:
    assert GOOD._replace(bytes_over_floor=1.01).faults() == []


@pytest.mark.parametrize(
    ("modifiers", "size"),
    [(".E.128", 16), (".E.EF.128", 16), (".E.64", 8), (".E", 4), (".E.U16", 2), (".E.U8", 1), (".128", 16)],
)
def test_width_of_an_instruction(modifiers: str, size: int) -> None:
    assert access_bytes(modifiers) == size


def test_machine_code_shows_narrow_accesses() -> None:
    """13 channels are no whole words: the kernel is right there, and element by element."""
    lines, line = torch.zeros(3, 13, 3, dtype=torch.bfloat16), torch.tensor([1])
    x, weight = torch.zeros(1, 13, dtype=torch.bfloat16), torch.zeros(13, 4, dtype=torch.bfloat16)
    launch = plan_conv_update(ConvView(lines), line, line, x, weight, None, torch.empty_like(x))
    code = compile_for(launch, 90)
    assert set(code.loads) == set(code.stores) == {2} and code.narrowest == 2


def test_machine_code_shows_spills(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same kernel with 24 registers a thread keeps the rest in local memory."""
    launch = SAMPLES["conv_update Falcon-H1-7B S2 bf16"]().launch
    monkeypatch.setattr(Launch, "options", {**launch.options, "maxnreg": 24})
    code = compile_for(launch, 90)
    assert code.registers <= 24 and code.spills > 0


def test_faults_are_named_and_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = GOOD._replace(name="conv_update here", spills=3)
    monkeypatch.setattr("sglang_hybrid.kernels.check.rows", lambda names: [GOOD, bad])
    monkeypatch.setattr(sys, "argv", ["check", "--json"])
    with pytest.raises(SystemExit, match="1"):
        main()
    said = capsys.readouterr()
    assert said.err == "conv_update here on sm_90: 3 spills\n"
    assert [row["name"] for row in json.loads(said.out)["kernels"]] == ["a kernel", "conv_update here"]


@pytest.mark.parametrize("name", ["each byte once", "a second read", "whole sectors"])
def test_bytes_are_counted(name: str) -> None:
    verdict = verdicts("tests.support.triton_traffic")[name]
    assert verdict == PASSED, verdict


@pytest.mark.parametrize("name", ["in place", "apart", "a race", "outside", "the same address"])
def test_the_guard_of_the_tables_sees(name: str) -> None:
    verdict = verdicts("tests.support.triton_guard")[name]
    assert verdict == PASSED, verdict
