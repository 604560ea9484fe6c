"""Refused for the model, the device or what SGLang derived: known in the parent, before weights load."""

import re
from pathlib import Path
from typing import Any

import pytest

from sglang_hybrid.cli.demo_families import demo_family, demo_names
from sglang_hybrid.models.families import FAMILIES
from tests.support.arguments import resolved, view, write_config
from tests.support.refusal import ON, refusal

pytest.importorskip("sglang")

from sglang_hybrid.engine import input_rules, refusals, rules

pytestmark = pytest.mark.usefixtures("kept")


def test_coarse_slots_need_a_backend_that_indexes_by_token(model: str) -> None:
    said = refusal("--model-path", model, "--hybrid-mem", "S0", "--attention-backend", "fa3")
    assert "--attention-backend fa3" in said
    assert said.endswith("legal: triton, flashinfer, torch_native.")


def test_coarse_slots_refuse_a_page_table_that_sglang_chose(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a Hopper GPU the default is fa3, for prefill or for decode alone as well."""
    from sglang.srt.arg_groups import overrides

    others = [record_of(model, mem) for mem in ("S1", "S2", "D0")]
    coarse = record_of(model, "S0")
    for chosen, flag in (
        (("fa3", "fa3"), "--attention-backend"),
        (("fa3", "triton"), "--prefill-attention-backend"),
        (("triton", "fa3"), "--decode-attention-backend"),
    ):
        monkeypatch.setattr(overrides, "attention_backends_of", lambda view, chosen=chosen: chosen)
        with pytest.raises(
            rules.Refusal, match=rf"^{flag} fa3 .* S0: .* legal: triton, flashinfer, torch_native"
        ):
            refusals.refuse_resolved(coarse)
        for record in others:
            refusals.refuse_resolved(record)


def record_of(model: str, mem: str) -> Any:
    return resolved("--model-path", model, "--skip-tokenizer-init", "--hybrid-mem", mem)


def test_triton_attention_indexes_coarse_slots_by_token() -> None:
    """It splits a slot in page and offset, with strides that put both together again wherever pages lie."""
    import torch
    from sglang.kernels.ops.attention.decode_attention import _extract_kv_strides

    page, rows = 512, 1557  # S0 of Falcon-H1-7B: a page has more rows than a block
    keys = torch.empty((3 * rows, 2, 2, 4), device="meta")[:, 0]
    slot, _, per_page, per_token = _extract_kv_strides(keys, page)
    for at in (0, 511, 512, rows, rows + 511, 2 * rows + 300):
        assert at // page * per_page + at % page * per_token == at * slot


@pytest.mark.parametrize("family", demo_names())
def test_every_served_family_passes(family: str, tmp_path: Path) -> None:
    """Its layers and its state are laid out in the parent, from config.json alone."""
    model = write_config(tmp_path, FAMILIES[family].architectures[0], demo_family(family))
    record = resolved("--model-path", model, "--skip-tokenizer-init", *ON, "--hybrid-grid", "64")
    assert view(record).page_size == 64
    said = refusal("--model-path", model, "--hybrid-mem", "S2", "--hybrid-grid", "4")
    assert "S2 does not pack" in said or "S2 packs conv states and this model keeps none" in said


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--hybrid-mem S1 --hybrid-grid 15", r"cuts a head of 64 rows .*use 'triton'"),
        ("--hybrid-mem S1 --hybrid-grid 16", None),
        ("--hybrid-mem S0", None),
    ],
)
def test_flashinfer_needs_whole_heads_a_page(
    flags: str, reason: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the device were there: what is left is the page format."""
    monkeypatch.setattr(input_rules, "why_not", lambda name, device: None)
    model = write_config(tmp_path, mamba_d_head=64, mamba_d_ssm=6 * 64)
    argv = ("--model-path", model, *flags.split(), "--hybrid-kernels", "flashinfer")
    if reason is None:
        resolved(*argv, "--skip-tokenizer-init")
    else:
        said = refusal(*argv)
        assert said.startswith("--hybrid-kernels flashinfer is not served with --hybrid-mem S1: ")
        assert re.search(reason, said)


def test_flashinfer_knows_no_delta_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_rules, "why_not", lambda name, device: None)
    model = write_config(tmp_path, family=demo_family("qwen3.5"))
    said = refusal("--model-path", model, *ON, "--hybrid-kernels", "flashinfer")
    assert "--hybrid-kernels flashinfer is not served with --hybrid-mem S1" in said
    assert "these layers are gated-delta" in said and said.endswith("use auto.")


def test_post_capture_sizing(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.arg_groups import overrides

    monkeypatch.setattr(overrides, "post_capture_kv_sizing_planned", lambda server_args: True)
    said = refusal("--model-path", model, *ON)
    assert "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING=1" in said
    assert "set it to 0" in said


def test_page_size_forced_by_another_step(model: str) -> None:
    from sglang.srt.arg_groups.overrides import declare_resolution

    record = resolved("--model-path", model, *ON)
    declare_resolution(record, "a later step", page_size=64)
    with pytest.raises(rules.Refusal, match=r"page size 64 .* needs 512"):
        refusals.refuse_resolved(record)
