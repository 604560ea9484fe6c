"""Grid, budget, share and model that do not go together: known in the parent, from config.json alone."""

import re

import pytest

from tests.support.arguments import resolved
from tests.support.refusal import ON, refusal

pytest.importorskip("sglang")

from sglang_hybrid.engine import rules
from sglang_hybrid.pools.factory import ORGANIZATIONS

pytestmark = pytest.mark.usefixtures("kept")


@pytest.mark.parametrize(
    ("mem", "argv", "value", "choice"),
    [
        ("D0", "--hybrid-grid 100", "--hybrid-grid 100", "112"),
        ("S1", "--hybrid-grid 8 --hybrid-budget-bytes 1000", "--hybrid-budget-bytes 1000", "or more"),
        ("D0", "--hybrid-budget-bytes 1000", "--hybrid-budget-bytes 1000", "or more"),
        (
            "D0",
            "--hybrid-grid 16 --hybrid-budget-bytes 1M --hybrid-attention-share 0.9",
            "at --hybrid-attention-share 0.9 gives D0 26 units and 0 checkpoints; it needs at least 2 and 2",
            "or --hybrid-attention-share from 0.099 to 0.688",
        ),
        (
            "S2",
            "--hybrid-grid 4",
            "a conv line of 3840 bytes: its slot of 4096 is more than a quarter of a page of 4096",
            "(--hybrid-grid 4); use --hybrid-mem S1, or --hybrid-grid 16 or larger",
        ),
        ("S1", "--hybrid-grid 1", "(--hybrid-grid 1)", "or larger"),
    ],
)
def test_layout(mem: str, argv: str, value: str, choice: str, model: str) -> None:
    """Grid, budget and model do not go together: known in the parent, from config.json alone."""
    said = refusal("--model-path", model, "--hybrid-mem", mem, *argv.split())
    assert value in said
    assert choice in said


@pytest.mark.parametrize("mem", ORGANIZATIONS)
def test_the_named_budget_is_the_least(mem: str, model: str) -> None:
    """HB-29: asked, available and the flag to change are named; the named value starts, one less does not."""
    argv = ("--model-path", model, "--hybrid-mem", mem, "--hybrid-grid", "16", "--hybrid-budget-bytes")
    named = re.search(r"--hybrid-budget-bytes 1000 .* use (\d+) or more", refusal(*argv, "1000"))
    assert named
    resolved(*argv, named[1], "--skip-tokenizer-init")
    below = int(named[1]) - 1
    if mem == "D0":
        below = below * 9 // 10  # its two sides are rounded apart
    assert f"use {named[1]} or more" in refusal(*argv, str(below))


def test_the_smallest_budget_serves_a_hit(model: str) -> None:
    """On a grid so small that SGLang's margin takes all that the organization's own least leaves."""
    for mem, grid in (("S0", 3), ("S1", 4)):
        argv = ("--model-path", model, "--hybrid-mem", mem, "--hybrid-grid", str(grid))
        argv += ("--hybrid-budget-bytes",)
        budget, reasons = 1000, []
        while len(reasons) < 3:
            try:
                resolved(*argv, str(budget), "--skip-tokenizer-init")
                break
            except rules.Refusal as refused:
                reasons.append(str(refused))
            found = re.search(r"use (\d+) or more", reasons[-1])
            assert found and int(found[1]) > budget
            budget = int(found[1])
        assert len(reasons) == 2, reasons
        assert f"serves no prompt of more than {grid} tokens" in reasons[1]
        assert "serves no prompt" in refusal(*argv, str(budget - 1))


def test_budget_beyond_the_machine(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.utils import common

    monkeypatch.setattr(common, "get_device_memory_capacity", lambda device: 1024.0)
    argv = ("--model-path", model, *ON, "--hybrid-budget-bytes")
    said = refusal(*argv, "1Gi")
    assert "--hybrid-budget-bytes 1073741824 is more than the 1073741824 bytes" in said
    assert "use less, such as 536870912" in said
    resolved(*argv, "536870912", "--skip-tokenizer-init")


@pytest.mark.parametrize("share", ["0", "1", "-0.5", "1.5", "nan", "inf"])
def test_share_leaves_both_pools(share: str, model: str) -> None:
    said = refusal("--model-path", model, "--hybrid-mem", "D0", f"--hybrid-attention-share={share}")
    assert f"--hybrid-attention-share {float(share)} leaves D0 one pool" in said
    assert "between 0 and 1, like 0.5" in said


@pytest.mark.parametrize("mem", ["S0", "S1", "S2"])
def test_share_is_for_dual_pools(mem: str, model: str) -> None:
    said = refusal("--model-path", model, "--hybrid-mem", mem, "--hybrid-attention-share", "0.5")
    assert f"--hybrid-attention-share 0.5 has no meaning with --hybrid-mem {mem}" in said
    assert said.endswith("leave it out, or use --hybrid-mem D0.")


@pytest.mark.parametrize("share", ["0.5", "0.0001", "0.9999"])
def test_share_of_unknown_or_ample_bytes(share: str, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a budget only the scheduler knows the bytes; with one the parent knows both sides."""
    from sglang.srt.utils import common

    monkeypatch.setattr(common, "get_device_memory_capacity", lambda device: 1e6)
    argv = ("--model-path", model, "--hybrid-mem", "D0", "--hybrid-attention-share", share)
    for more in ((), ("--hybrid-budget-bytes", "100G")):
        resolved(*argv, *more, "--skip-tokenizer-init")
