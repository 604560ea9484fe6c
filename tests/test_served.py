"""Which models are served: decided by SGLang's own configuration, refused with a reason, warned of."""

from pathlib import Path
from typing import Any

import pytest

from sglang_hybrid import models
from sglang_hybrid.cli.demo_families import demo_family
from tests.support.arguments import resolved, write_config
from tests.support.refusal import ON, refusal

pytest.importorskip("sglang")

from sglang_hybrid.engine import served

pytestmark = pytest.mark.usefixtures("kept")

NEXT: dict[str, Any] = {
    **demo_family("qwen3.5").config(demo_family("qwen3.5").shape),
    "model_type": "qwen3_next",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "mlp_only_layers": [],
    "rope_parameters": None,
}
SALA: dict[str, Any] = {
    "model_type": "minicpm_sala",
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "num_attention_heads": 4,
    "mixer_types": ["lightning", "attention"],
}


@pytest.mark.parametrize(
    ("architecture", "config", "reason"),
    [
        ("LlamaForCausalLM", {"model_type": "llama"}, "no recurrent layers beside attention"),
        (
            "MambaForCausalLM",
            {"model_type": "mamba", "state_size": 16, "num_hidden_layers": 2},
            "AttentionArch|no recurrent layers|SSM rows",
        ),
        ("Gemma2ForCausalLM", {"model_type": "gemma2", "sliding_window": 64}, "no recurrent layers"),
        ("MiniCPMSALAForCausalLM", SALA, "keeps MHA rows, and beside lightning layers only MLA rows"),
        ("JetNemotronForCausalLM", NEXT, "read and write SGLang's pool themselves"),
    ],
)
def test_a_model_that_is_not_served_is_named_with_the_reason(
    architecture: str, config: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    said = refusal("--model-path", write_config(tmp_path, architecture, **config), *ON)
    assert f"--hybrid-mem S1 does not serve {architecture}" in said
    assert any(part in said for part in reason.split("|"))
    assert "falcon-h1" in said


def test_recurrent_layers_without_an_adapter_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(models.KINDS, "lightning")
    model = write_config(tmp_path, "BailingMoeV2_5ForCausalLM", family=demo_family("ling-2.5"))
    said = refusal("--model-path", model, *ON)
    assert "--hybrid-mem S1 does not serve BailingMoeV2_5ForCausalLM" in said
    assert "LightningAttentionBackend, which has no adapter" in said


def test_s2_is_refused_where_no_conv_line_is_kept(tmp_path: Path) -> None:
    """With nothing to pack it would be S1."""
    model = write_config(tmp_path, "BailingMoeV2_5ForCausalLM", family=demo_family("ling-2.5"))
    said = refusal("--model-path", model, "--hybrid-mem", "S2", "--hybrid-grid", "16")
    assert "S2 packs conv states and this model keeps none: use --hybrid-mem S1" in said


def test_an_untested_architecture_starts_with_one_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing but its name is new: its layers are of a kind that others are tested with."""
    model = write_config(tmp_path, "Qwen3NextFinetuneForCausalLM", **NEXT)
    record = resolved("--model-path", model, "--skip-tokenizer-init", *ON, "--hybrid-grid", "64")
    said = [line for line in capsys.readouterr().err.splitlines() if "sglang-hybrid verify" in line]
    assert len(said) == 1 and "Qwen3NextFinetuneForCausalLM" in said[0] and "gated-delta" in said[0]
    from sglang.srt.arg_groups.overrides import model_config_of

    kind = served.kind_of(model_config_of(record))
    assert kind is models.KINDS["gated-delta"]


@pytest.mark.parametrize("field", ["short_conv_layer_ids", "ngram_context_len", "indexer_n_heads"])
def test_state_that_our_pages_do_not_hold_is_refused(
    field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the next generation of Qwen has beside its gated delta rule."""
    index = {
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 1024,
        "indexer_compress_ratio": 2,
    }
    values = {"short_conv_layer_ids": [0], "ngram_context_len": 2, "indexer_n_heads": 4}
    model = write_config(tmp_path, "Qwen3NextForCausalLM", **{**NEXT, **index, field: values[field]})
    said = refusal("--model-path", model, *ON, "--hybrid-grid", "64")
    assert "its requests keep" in said and "which the plugin's pages do not hold" in said


def test_a_form_of_attention_without_pages_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.arg_groups.overrides import model_config_of
    from sglang.srt.configs.model_config import AttentionArch

    family = demo_family("falcon-h1")
    record = resolved("--model-path", write_config(tmp_path, family=family), "--skip-tokenizer-init", *ON)
    model = model_config_of(record)
    assert served.why_not_served(model) is None
    monkeypatch.setattr(model, "attention_arch", AttentionArch.MLA)
    assert "its attention keeps MLA rows" in str(served.why_not_served(model))


def test_tested_architectures_are_those_of_demo_models() -> None:
    assert {"FalconH1ForCausalLM", "GraniteMoeHybridForCausalLM", "Qwen3_5ForCausalLM"} <= set(
        models.tested()
    )
    assert models.tested(exact=True) == ("FalconH1ForCausalLM",)
