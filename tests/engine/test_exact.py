"""Exact mode: `sglang-hybrid verify` finds no differing bit, and finds one as soon as a guard is taken out.

One server: bf16 state, preemption on demand, chunks that cut prompts in company only (so that a prompt alone
is computed whole).
"""

import random
from collections.abc import Callable
from typing import Any

import pytest
from sglang.test import kl_multiturn_utils as kl

from sglang_hybrid.cli.verify_compare import Report
from sglang_hybrid.cli.verify_runs import Plan, References, Verifier
from sglang_hybrid.cli.verify_server import Client
from tests.support.park import on
from tests.support.planted.planted_faults import NO_ROUNDING, PREEMPT, STRADDLE
from tests.support.witness import Witness


@pytest.fixture
def verifier(witness: Witness) -> Verifier:
    """All scenarios on the server; their references are its own cold answers."""
    if not witness.config.hybrid:
        pytest.skip("stock has no exact mode")
    client = Client(witness.server.url)
    plan = Plan(witness.config.grid, steps=3, ids=(5, 512))
    return Verifier("exact", client, plan, References(client), Report(exact=True))


@on("exact")
def test_verify_finds_no_differing_bit(verifier: Verifier, fault: Callable[[str], None]) -> None:
    verifier.prepare()
    fault(PREEMPT)
    verifier.all()
    report = verifier.report
    assert report.ok(), "\n".join(report.lines())
    total = report.total()
    assert total.comparisons > 500 and total.cached_tokens > 200
    assert total.preempted > 0, "INCONCLUSIVE: no request was preempted"


@on("exact")
@pytest.mark.parametrize("name", [NO_ROUNDING, STRADDLE])
def test_verify_sees_a_guard_taken_out(verifier: Verifier, fault: Callable[[str], None], name: str) -> None:
    verifier.hits()
    assert verifier.report.ok(), "\n".join(verifier.report.lines())
    # The references stay those of the honest server.
    fault(name)
    verifier.hits()
    assert verifier.report.rows


@on("exact")
def test_kl_kits_report_zero(witness: Witness, verifier: Verifier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampled answers: what decode said of its own tokens equals what a cold prefill says, as bits."""
    compared: list[int] = []
    stock = kl.compare_kl_divergence

    def compare(inputs: Any, outputs: Any, *rest: Any) -> None:
        off = max(abs(a - b) for left, right in zip(inputs, outputs) for a, b in zip(left, right))
        assert inputs == outputs, f"logprobs differ by up to {off}"
        compared.append(sum(map(len, outputs)))
        stock(inputs, outputs, *rest)

    monkeypatch.setattr(kl, "compare_kl_divergence", compare)
    # The kit asks for less than a threshold: nothing positive is.
    kit = {"base_url": witness.server.url, "model_name": "tiny", "kl_threshold": 5e-324, "max_new_tokens": 20}
    rng = random.Random(5)

    def ids(length: int) -> list[list[int]]:
        return [[rng.randrange(5, 512) for _ in range(length + i)] for i in range(5)]

    def no_check(*_: Any) -> None:
        """Memory is short: how much is cached varies."""

    kl.test_input_output_logprobs_match_helper(
        input_ids=ids(29), turn_suffixes=[ids(3), ids(7)], assert_decode_cached_tokens=no_check, **kit
    )
    base = ids(24)
    kl.test_input_output_logprobs_match_prefill_cache_hit_helper(
        prefix_input_ids=base, full_input_ids=[a + b for a, b in zip(base, ids(5))],
        assert_prefill_cached_tokens=no_check, **kit,
    )  # fmt: skip
    kl.test_input_output_logprobs_match_decode_cache_hit_helper(
        first_turn_input_ids=ids(21), turn_suffixes=[ids(4)], assert_decode_cached_tokens=no_check, **kit
    )
    assert compared == [100] * 3
