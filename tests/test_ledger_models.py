"""Models of the ledger: public figures, configs in their spellings, and SGLang's own shapes."""

import importlib
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hybrid.cli import main as cli
from sglang_hybrid.models import HybridShape, hybrid_shape
from sglang_hybrid.models.public import PUBLIC

KIB = 1024


def shape(name: str) -> HybridShape:
    return hybrid_shape(PUBLIC[name].config, name)


FAMILIES_MD = {
    "qwen3-next-80b": (48, 2048, 36, 12, 2048),
    "qwen3.5-9b": (48, 2048, 24, 8, 4096),
    "qwen3.5-27b": (60, 3072, 48, 16, 4096),
    "qwen3.5-35b-a3b": (48, 2048, 30, 10, 2048),
    "nemotron-h-8b": (60, 4096, 24, 4, 4096),
    "nemotron-nano-9b-v2": (72, 5120, 27, 4, 4096),
    "nemotron-3-nano-30b": (36, 2048, 23, 6, 1024),
    "granite-4.0-h-small": (49.5, 4096, 36, 4, 4096),
    "granite-4.0-h-tiny": (19.5, 1536, 36, 4, 2048),
    "kimi-linear-48b": (72, 2048, 20, 7, 1152),
    "lfm2-1.2b": (8, 0, 10, 6, 2048),
    "lfm2-8b-a1b": (8, 0, 18, 6, 2048),
    "falcon-h1-34b": (30, 4096, 72, 72, 2048),
}
"""(conv KiB, fp32 state KiB, recurrent layers, attention layers, bytes of a KV row)."""


@pytest.mark.parametrize("name", FAMILIES_MD)
def test_public_sizes(name: str) -> None:
    model = shape(name).geometry(1, kv_bytes=2, ssm_bytes=4, conv_bytes=2)
    layers = len(model.recurrent_layers), len(model.attention_layers)
    sizes = model.conv_bytes / KIB, model.ssm_bytes / KIB
    assert (*sizes, *layers, model.kv_row_bytes) == FAMILIES_MD[name]


def test_a_directory_a_file_and_a_repository_are_models(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def geometry(model: str) -> Any:
        assert cli.main(["ledger", model, "--json"]) == 0
        return json.loads(capsys.readouterr().out)["geometry"]

    file = tmp_path / "config.json"
    # A wrapper with a vision part: what counts is in its text_config.
    file.write_text(json.dumps(PUBLIC["qwen3.5-9b"].config))
    known = geometry("qwen3.5-9b")
    for model in (str(tmp_path), str(file), "Qwen/Qwen3.5-9B"):
        assert geometry(model) == known


def spelled(name: str, drop: str, **other: Any) -> dict[str, Any]:
    return {key: value for key, value in PUBLIC[name].config.items() if key != drop} | other


@pytest.mark.parametrize(
    ("name", "config"),
    [
        (
            "lfm2-1.2b",
            spelled(
                "lfm2-1.2b",
                "layer_types",
                full_attn_idxs=[2, 5, 8, 10, 12, 14],
            ),
        ),
        (
            "qwen3-next-80b",
            spelled(
                "qwen3-next-80b",
                "full_attention_interval",
                layer_types=[*["linear_attention"] * 3, "full_attention"] * 12,
            ),
        ),
        (
            "nemotron-h-8b",
            spelled(
                "nemotron-h-8b",
                "hybrid_override_pattern",
                layers_block_type=[
                    {"M": "mamba", "-": "mlp", "*": "attention"}[letter]
                    for letter in PUBLIC["nemotron-h-8b"].config["hybrid_override_pattern"]
                ],
            ),
        ),
        ("falcon-h1-7b", spelled("falcon-h1-7b", "head_dim", hidden_size=1536, mamba_d_head="auto")),
        ("granite-4.0-h-small", spelled("granite-4.0-h-small", "", head_dim=None, mamba_d_head=64)),
    ],
)
def test_spellings_of_one_config(name: str, config: dict[str, Any]) -> None:
    assert hybrid_shape(config, name) == shape(name)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", ("is no readable JSON", "config.json")),
        ("[1]", ("holds a list", "an object")),
        ('{"model_type": "llama"}', ("'llama'", "falcon_h1")),
        (json.dumps(spelled("falcon-h1-7b", "mamba_n_heads")), ("mamba_n_heads", "lacks it")),
        (json.dumps(spelled("falcon-h1-7b", "", mamba_n_heads="24")), ("mamba_n_heads '24'", "1 or more")),
        (json.dumps(spelled("falcon-h1-7b", "", mamba_n_heads=25)), ("25 recurrent heads", "3072")),
        (json.dumps(spelled("falcon-h1-7b", "", mamba_d_head=64)), ("mamba_d_head 64", "use 128")),
        (json.dumps(spelled("granite-4.0-h-tiny", "", layer_types=["mamba"] * 40)), ("0 attention", "both")),
        (json.dumps(spelled("granite-4.0-h-tiny", "", layer_types=["mamba"])), ("1 layers", "is 40")),
        (json.dumps(spelled("granite-4.0-h-tiny", "", layer_types=["rnn"] * 40)), ("'rnn'", "mamba")),
        (
            json.dumps(spelled("kimi-linear-48b", "", linear_attn_config=3)),
            ("linear_attn_config 3", "section"),
        ),
        (
            json.dumps(spelled("lfm2-1.2b", "layer_types", full_attn_idxs=[16])),
            ("layer 16", "last one is 15"),
        ),
    ],
)
def test_bad_configs_are_one_sentence(
    text: str, words: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(text)
    assert cli.main(["ledger", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and str(tmp_path) in err
    assert all(word in err for word in words), err


SGLANG = {
    "falcon_h1": ("falcon_h1", "FalconH1Config"),
    "qwen3_next": ("qwen3_next", "Qwen3NextConfig"),
    "qwen3_5_text": ("qwen3_5", "Qwen3_5TextConfig"),
    "qwen3_5_moe_text": ("qwen3_5", "Qwen3_5MoeTextConfig"),
    "nemotron_h": ("nemotron_h", "NemotronHConfig"),
    "granitemoehybrid": ("granitemoehybrid", "GraniteMoeHybridConfig"),
    "kimi_linear": ("kimi_linear", "KimiLinearConfig"),
    "lfm2": ("lfm2", "Lfm2Config"),
    "lfm2_moe": ("lfm2_moe", "Lfm2MoeConfig"),
    "bailing_hybrid": ("bailing_hybrid", "BailingHybridConfig"),
}
"""Module of `sglang.srt.configs` and class of each family."""


@pytest.mark.parametrize(
    ("name", "tp"), [(name, tp) for name in PUBLIC for tp in (1, 2, 4, 8) if shape(name).divides(tp)]
)
def test_shapes_are_sglangs(name: str, tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = shape(name).geometry(tp, kv_bytes=2, ssm_bytes=2, conv_bytes=2)
    config = dict(PUBLIC[name].config.get("text_config", PUBLIC[name].config))
    module, kind = SGLANG[config.pop("model_type")]
    theirs = importlib.import_module(f"sglang.srt.configs.{module}")
    # Qwen3.5 inherits its state from Qwen3-Next's module.
    owner = importlib.import_module("sglang.srt.configs.qwen3_next") if "qwen" in module else theirs
    monkeypatch.setattr(owner, "get_parallel", lambda: SimpleNamespace(attn_tp_size=tp))
    if "qwen" in module:
        monkeypatch.setattr(owner, "linear_attn_tp_size", lambda: tp)
        monkeypatch.setattr(owner, "_is_cpu", False)
    served = getattr(theirs, kind)(**config)
    params = served.mamba2_cache_params
    assert tuple(params.layers) == model.recurrent_layers
    assert tuple(served.full_attention_layer_ids) == model.attention_layers
    assert [2 * math.prod(conv) for conv in params.shape.conv] == [model.conv_bytes]
    assert 2 * math.prod(params.shape.temporal) == model.ssm_bytes
    assert getattr(served, "mamba_chunk_size", 256) == shape(name).chunk
