"""The demo model remembers, shows a wrong state, speaks clearly, and is a checkpoint like any other."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_hybrid.cli import demo_model
from sglang_hybrid.cli.demo_families import KV_RANK, KV_ROPE, demo_family
from sglang_hybrid.cli.demo_measure import measure
from sglang_hybrid.cli.demo_model import FALCON_7B_LAYER, write_demo_model
from sglang_hybrid.cli.demo_shape import DemoShape
from sglang_hybrid.cli.demo_tokenizer import FIRST_BYTE, FIRST_NAMED


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo_model(tmp_path_factory.mktemp("demo") / "model")


SIZES: tuple[dict[str, Any], ...] = (
    {},
    {"vocab": 512, "context": 4096},
    {"family": "granite-4", "vocab": 512, "context": 4096},
    {"family": "qwen3.5", "vocab": 512, "context": 4096},
    {"family": "lfm2", "vocab": 512, "context": 4096},
    {"family": "kimi-linear", "vocab": 512, "context": 4096},
    {"family": "lfm2-moe", "vocab": 512, "context": 4096},
)


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: sizes.get("family", f"vocab {sizes.get('vocab')}"))
def test_state_remembers_and_a_wrong_one_shows(sizes: dict[str, Any], tmp_path: Path) -> None:
    report = measure(str(write_demo_model(tmp_path, **sizes)), prompts=4 if "family" in sizes else 12)
    assert report.influence > 0.05 and report.kl > 1e-3
    assert report.zeroed_differ == 1.0
    assert report.gap_share > 0.9
    assert report.distinct > 8


def test_measure_sees_a_model_that_forgets(tmp_path: Path) -> None:
    """The measurement itself can fail.  What is left took the way over attention into a later state."""
    from safetensors.torch import load_file, save_file

    weights_file = write_demo_model(tmp_path, vocab=512) / "model.safetensors"
    weights = load_file(weights_file)
    for name in weights:
        if name.endswith("A_log"):
            weights[name] = torch.full_like(weights[name], 1.0)
    save_file(weights, weights_file, metadata={"format": "pt"})
    assert measure(str(tmp_path), prompts=4).influence < 0.01


def test_same_seed_same_bytes(tmp_path: Path) -> None:
    first, again, other = (tmp_path / name for name in ("first", "again", "other"))
    for path, seed in ((first, 3), (again, 3), (other, 4)):
        write_demo_model(path, seed=seed, vocab=512)
    for file in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (first / file).read_bytes() == (again / file).read_bytes()
    assert (first / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()


def test_tokenizer_keeps_bytes_and_ids(model_dir: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    assert tokenizer.is_fast and len(tokenizer) == 32_000
    text = "Grüße, \n\t<12 <99> 世界! a  b"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == [FIRST_BYTE + value for value in text.encode()] and tokenizer.decode(ids) == text
    every_byte = list(range(FIRST_BYTE, FIRST_NAMED))
    assert sorted(tokenizer.convert_tokens_to_ids(tokenizer.convert_ids_to_tokens(every_byte))) == every_byte
    said = [FIRST_NAMED, 31_999, 5_000, FIRST_NAMED]
    assert tokenizer.encode(tokenizer.decode(said), add_special_tokens=False) == said


def test_chat_template_extends_turn_by_turn(model_dir: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "<400><401>"}]
    asked = tokenizer.apply_chat_template(
        turns[:1], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    both = tokenizer.apply_chat_template(turns, tokenize=True, return_dict=False)
    assert both[: len(asked) + 2] == [*asked, 400, 401]
    assert tokenizer.convert_ids_to_tokens(both[-2]) == "<|im_end|>"


def test_specials_and_bytes_are_never_said(model_dir: Path) -> None:
    from safetensors.torch import load_file

    head = load_file(model_dir / "model.safetensors")["lm_head.weight"]
    assert not head[:FIRST_NAMED].any() and head[FIRST_NAMED:].any(1).all()


def test_generation_config_is_greedy(model_dir: Path) -> None:
    config = json.loads((model_dir / "generation_config.json").read_text())
    assert config["eos_token_id"] == 2 and not config.get("do_sample", False)


def test_every_size_is_a_flag(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    demo_model.add_parser(parser.add_subparsers())
    flags = (
        "--layers 3 --hidden 32 --intermediate 48 --vocab 400 --heads 2 --kv-heads 1 --head-dim 16"
        " --ssm-heads 4 --ssm-head-dim 8 --ssm-state 16 --ssm-groups 2 --conv-width 3 --context 1024"
    )
    args = parser.parse_args(
        ["demo-model", str(tmp_path), "--no-measure", "--dtype", "bfloat16", *flags.split()]
    )
    assert demo_model.run(args) == 0
    config = json.loads((tmp_path / "config.json").read_text())
    want = {
        "num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 48, "vocab_size": 400,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "mamba_n_heads": 4,
        "mamba_d_head": 8, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_d_conv": 3, "mamba_d_ssm": 32,
        "max_position_embeddings": 1024, "dtype": "bfloat16",
    }  # fmt: skip
    assert {name: config[name] for name in want} == want


def test_falcon_layer_has_the_geometry_of_the_real_one() -> None:
    shape = FALCON_7B_LAYER
    assert 2 * shape.kv_heads * shape.head_dim * 2 * 512 == 512 << 10  # bf16 KV of one grid step
    assert shape.ssm_width * shape.ssm_state * 2 == 3 * (512 << 10)  # bf16 state: three pages
    assert shape.conv_channels * (shape.conv_width - 1) * 2 == 21_504  # bf16 conv window


@pytest.mark.parametrize(
    ("sizes", "word"),
    [
        ({"family": "llama"}, "needs one of falcon-h1, granite-4, "),
        ({"attention_every": 2}, "every layer of a Falcon-H1 is both"),
        ({"family": "granite-4", "attention_every": 0}, "layers of a Granite-4 are attention or recurrent"),
        ({"family": "qwen3.5", "attention_every": 6}, "every 6th of 5 layers"),
        ({"family": "granite-4", "head_dim": 128}, "4 x 128, 256"),
        ({"family": "kimi-linear", "ssm_state": 32}, "square states"),
        ({"family": "ling-2.5", "ssm_state": 32}, "square states"),
        ({"family": "ling-2.5", "ssm_heads": 8}, "8 and 4 for 4 heads"),
        ({"family": "ling-2.5", "layers": 5}, "5 layers in groups of 3"),
        ({"family": "lfm2", "head_dim": 128}, "4 x 128 and 256"),
        ({"family": "lfm2-moe", "attention_every": 0}, "layers of a Liquid LFM2 are attention or recurrent"),
        ({"vocab": 200}, "vocabulary of 200"),
        ({"heads": 3}, "2 KV heads"),
        ({"ssm_groups": 4}, "4 groups"),
        ({"layers": 0}, "at least 1"),
        ({"conv_width": 1}, "conv width of 1"),
    ],
)
def test_a_geometry_that_makes_no_model_is_named(sizes: dict[str, Any], word: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=word):
        write_demo_model(tmp_path / "model", **sizes)
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(("family", "rows"), [("granite-4", 204), ("qwen3.5", 170)])
def test_families_with_separate_layers_cut_their_states(family: str, rows: int) -> None:
    """The proportions that `demo_families` promises: fp32, grid 16, two stripes that pages cut anywhere."""
    shape = demo_family(family).shape
    page = 2 * shape.kv_heads * shape.head_dim * 4 * 16
    assert page == 32 << 10 and page // (shape.ssm_state * 4) == rows
    assert shape.ssm_width % rows and 2 * shape.ssm_width > rows
    assert shape.attention == (False, True, False, True, False)
    assert 2 * shape.conv_channels * (shape.conv_width - 1) * 4 <= page // 4


def test_kimi_linear_has_the_page_of_the_others() -> None:
    """The proportions that `KIMI_LINEAR` promises: fp32, latent rows of 2 KiB."""
    shape, row = demo_family("kimi-linear").shape, (KV_RANK + KV_ROPE) * 4
    assert 16 * row == 32 << 10 and 2 * shape.ssm_width * shape.ssm_state * 4 <= 16 * row
    assert 8 * row // (shape.ssm_state * 4) == 170 and shape.ssm_width < 170 < 2 * shape.ssm_width
    assert 2 * 3 * shape.ssm_width * (shape.conv_width - 1) * 4 <= 16 * row // 4


def test_ling_has_the_page_of_the_others() -> None:
    """The proportions that `LING_2_5` promises: those of Kimi-Linear without a conv line."""
    shape, kimi = demo_family("ling-2.5").shape, demo_family("kimi-linear").shape
    assert (shape.ssm_width, shape.ssm_state) == (kimi.ssm_width, kimi.ssm_state)
    assert shape.attention == (False, False, True) * 2


def test_a_family_without_a_class_of_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its memory is measured with the reference of the tests: what was said 200 tokens ago still shows, where
    attention says nothing."""
    from tests.support.ling import Ling

    parser = argparse.ArgumentParser()
    demo_model.add_parser(parser.add_subparsers())
    given = ["demo-model", str(tmp_path), "--family", "ling-2.5", "--vocab", "512", "--context", "4096"]
    assert demo_model.run(parser.parse_args(given)) == 0
    assert "not measured: transformers has no class of this family" in capsys.readouterr().out
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["BailingMoeV2_5ForCausalLM"] and config["dtype"] == "float32"
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == 2
    model = Ling(tmp_path)
    model.weights = {
        name: torch.zeros_like(weight) if name.endswith("kv_b_proj.weight") else weight
        for name, weight in model.weights.items()
    }
    ids = torch.randint(5, 512, (201,), generator=torch.Generator().manual_seed(0)).tolist()
    changed = [ids[0] + 1 if ids[0] < 511 else 5, *ids[1:]]
    said, other = (model(one)[-1].log_softmax(-1) for one in (ids, changed))
    assert float((said - other).abs().max()) > 0.05


def test_short_convolutions_fill_an_eighth_of_a_page() -> None:
    """The proportions that `LFM2` promises: fp32, a grid of 16."""
    shape = demo_family("lfm2").shape
    page = 2 * shape.kv_heads * shape.head_dim * 4 * 16
    assert page == 32 << 10 and 2 * shape.hidden * (shape.conv_width - 1) * 4 == page // 8


def test_defaults_fill_three_pages_of_the_small_grid() -> None:
    """The proportions that DemoShape promises: fp32, a grid of 8."""
    shape = DemoShape()
    page = 2 * shape.kv_heads * shape.head_dim * 4 * 8
    assert shape.ssm_width * shape.ssm_state * 4 == 3 * page
    assert shape.conv_channels * (shape.conv_width - 1) * 4 <= page // 4
