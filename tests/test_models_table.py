"""`sglang-hybrid models --json`: one row a public checkpoint, by the rules that a start uses."""

import json
from typing import Any

import pytest

from sglang_hybrid.cli.main import main
from sglang_hybrid.models.public import PUBLIC

pytest.importorskip("sglang")

MIB = 2**20
KINDS = {
    "mamba2": {
        *("falcon-h1-tiny-90m", "falcon-h1-0.5b", "falcon-h1-7b", "falcon-h1-34b"),
        *("granite-4.0-h-small", "granite-4.0-h-tiny", "granite-4.0-h-micro"),
        *("granite-4.0-h-1b", "granite-4.0-h-350m"),
        *("nemotron-nano-9b-v2", "nemotron-3-nano-30b", "nemotron-3-super-120b"),
    },
    "gated-delta": {
        *("qwen3.5-0.8b", "qwen3.5-9b", "qwen3.6-27b", "qwen3.6-35b-a3b", "qwen3.8-2.4t"),
        *("qwen3.5-4b-finetune-text", "qwen3-coder-next-80b"),
    },
    "short-conv": {"lfm2.5-1.2b", "lfm2.5-8b-a1b", "lfm2.5-vl-1.6b"},
    "kda": {"kimi-linear-48b", "kimi-k3", "ling-3.0-flash"},
    "lightning": {"ling-2.6-flash"},
}
MUST_SERVE = KINDS["mamba2"] | KINDS["gated-delta"] | KINDS["short-conv"]
"""The others have latent KV, which may be served too."""
UNTESTED = {
    *("lfm2.5-vl-1.6b", "kimi-k3", "ling-3.0-flash"),
}
"""Served, and served by no end-to-end test: a start warns."""


@pytest.fixture(scope="module")
def table() -> dict[str, dict[str, Any]]:
    from sglang_hybrid.cli.models import rows

    return {one["name"]: one for one in rows()}


def test_every_whole_config_is_a_row(table: dict[str, dict[str, Any]]) -> None:
    assert (
        set(table) == {name for name, model in PUBLIC.items() if model.whole} == set().union(*KINDS.values())
    )
    assert len(table) == 26
    for kind, names in KINDS.items():
        assert {name for name, one in table.items() if one["kind"] == kind} == names
        form = "MLA" if kind in ("kda", "lightning") else "MHA"
        assert {table[name]["attention"] for name in names} == {form}


def test_those_that_people_serve_are_served(table: dict[str, dict[str, Any]]) -> None:
    served = {name for name, one in table.items() if one["served"]}
    assert served >= MUST_SERVE and len(served) >= 22
    assert {name for name in served if not table[name]["tested"]} <= UNTESTED
    for one in table.values():
        assert bool(one["reason"]) != one["served"]


@pytest.mark.parametrize(
    ("name", "tp", "mib"),
    [
        ("qwen3.6-27b", "1", 146.8125),
        ("qwen3.6-35b-a3b", "1", 61.40625),
        ("nemotron-3-nano-30b", "1", 46.80859375),
        ("qwen3.6-27b", "4", 36.703125),
        ("falcon-h1-34b", "1", None),
    ],
)
def test_bytes_of_a_checkpoint(
    name: str, tp: str, mib: float | None, table: dict[str, dict[str, Any]]
) -> None:
    """Conv windows in bf16, recurrent states in the dtype that the config names, fp32 for these Qwen."""
    rank = table[name]["tp"][tp]
    if mib is None:
        assert rank["checkpoint_bytes"] > 0
        return
    assert rank["checkpoint_bytes"] / MIB == pytest.approx(mib, rel=1e-3)


def test_grids_are_legal_and_least(table: dict[str, dict[str, Any]]) -> None:
    """S2 packs conv lines four to a page, so it never takes a smaller grid than S1 takes for the line."""
    for one in table.values():
        for rank in filter(None, one["tp"].values()):
            small, packed = rank["least_grid"]["S1"], rank["least_grid"]["S2"]
            assert small and small % 64 == 0 and (packed is None or packed >= small), one["name"]


def test_the_command_prints_the_rows(
    table: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from sglang_hybrid.cli import models

    monkeypatch.setattr(models, "rows", lambda: list(table.values()))
    assert main(["models", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == list(table.values())
    assert main(["models"]) == 0
    assert "qwen3.6-27b" in capsys.readouterr().out
