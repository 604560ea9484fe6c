"""What `--hybrid-exact` refuses."""

import pytest

from tests.support.arguments import resolved
from tests.support.refusal import ON, refusal

pytest.importorskip("sglang")

from sglang_hybrid.engine import exact_rules, refusals, rules
from sglang_hybrid.engine.args import settings

pytestmark = pytest.mark.usefixtures("kept")


EXACT = (*ON, "--hybrid-exact")


@pytest.mark.parametrize(
    ("argv", "value", "choice"),
    [
        ("--tp-size 2", "--tp-size 2", "--tp-size 1"),
        ("--attention-backend triton", "--attention-backend triton", "legal: torch_native"),
        ("--kv-cache-dtype fp8_e4m3", "--kv-cache-dtype fp8_e4m3", "--kv-cache-dtype auto"),
        ("--enable-lora --max-lora-rank 8 --lora-target-modules all", "--enable-lora", "leave it out"),
    ],
)
def test_exact_mode_takes_only_what_is_proven(argv: str, value: str, choice: str, model: str) -> None:
    said = refusal("--model-path", model, *EXACT, *argv.split())
    assert value in said and choice in said and "--hybrid-exact" in said


def test_exact_mode_is_proven_on_this_packages_cpu_platform_only(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = resolved("--model-path", model, "--skip-tokenizer-init", *EXACT)
    assert settings(record).exact
    from sglang.srt.arg_groups.overrides import declare_resolution

    declare_resolution(record, "another platform", device="cuda")
    with pytest.raises(rules.Refusal, match=r"--hybrid-exact is not proven on cuda, .*leave it out"):
        refusals.refuse_resolved(record)
    declare_resolution(record, "SGLang's engine", device="cpu")
    monkeypatch.setattr("sglang.srt.platforms.current_platform", object())
    with pytest.raises(rules.Refusal, match=r"not proven on SGLang's own CPU engine"):
        refusals.refuse_resolved(record)


def test_exact_mode_is_proven_per_architecture(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact_rules, "tested", lambda exact: ("AnotherForCausalLM",))
    assert "not proven for FalconH1ForCausalLM" in refusal("--model-path", model, *EXACT)


def test_exact_mode_needs_the_hybrid_memory(model: str) -> None:
    said = refusal("--model-path", model, "--hybrid-exact")
    assert said.startswith("--hybrid-exact has no effect without --hybrid-mem")
