"""Each refused combination: one sentence that names the value given and a legal choice."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sglang_hybrid.cli.demo_families import FAMILIES, DemoFamily
from tests.support.arguments import kept_process, parse, resolved, view, write_config

pytest.importorskip("sglang")

from sglang_hybrid.engine import exact_rules, refusals, rules
from sglang_hybrid.engine.args import settings

ON = ("--hybrid-mem", "S1")


class Row(NamedTuple):
    """Arguments beside --hybrid-mem S1, what the sentence must name, and the choice it must offer."""

    argv: str
    value: str
    choice: str


ROWS = (
    Row("--hybrid-kernels flashinfer", "--hybrid-kernels flashinfer", "torch"),
    Row("--hybrid-kernels triton", "--hybrid-kernels triton", "torch"),
    Row("--hybrid-headroom 1", "--hybrid-headroom 1.0", "such as 0.1"),
    Row("--hybrid-headroom -0.1", "--hybrid-headroom -0.1", "0 <= f < 1"),
    Row("--hybrid-headroom nan", "--hybrid-headroom nan", "0 <= f < 1"),
    Row("--hybrid-retention 0", "--hybrid-retention 0", "such as 1"),
    Row("--hybrid-grid 0", "--hybrid-grid 0", "512"),
    Row("--hybrid-grid -8", "--hybrid-grid -8", "512"),
    Row("--hybrid-budget-bytes 0", "--hybrid-budget-bytes 0", "8G"),
    Row("--hybrid-trace /no/such/trace.jsonl", "there is no folder /no/such", "trace.jsonl"),
    Row("--hybrid-trace /", "it exists and is no file", "trace.jsonl"),
    Row("--hybrid-trace tcp://127.0.0.1", "has the form tcp://HOST:PORT", "tcp://127.0.0.1:5599"),
    Row("--hybrid-trace tcp://127.0.0.1:70000", "a port from 1 to 65535", "tcp://127.0.0.1:5599"),
    Row("--hybrid-trace tcp://203.0.113.7:5599", "cannot be bound", "tcp://127.0.0.1:5599"),
    Row("--hybrid-trace ipc:///tmp/trace", "neither a path nor an address", "tcp://127.0.0.1:5599"),
    Row("--page-size 64", "--page-size 64", "--hybrid-grid 64"),
    Row(
        "--hybrid-grid 16 --page-size 1",
        "--page-size 1 conflicts with --hybrid-grid 16",
        "leave --page-size out",
    ),
    Row("--radix-cache-backend flexkv", "--radix-cache-backend flexkv", "hybrid_grid"),
    Row("--mamba-radix-cache-strategy extra_buffer", "extra_buffer", "no_buffer"),
    Row("--max-mamba-cache-size 0", "--max-mamba-cache-size 0", "--hybrid-budget-bytes"),
    Row("--max-total-tokens 8192", "--max-total-tokens 8192", "--hybrid-budget-bytes"),
    Row("--mamba-full-memory-ratio 0.5", "--mamba-full-memory-ratio 0.5", "--hybrid-budget-bytes"),
    Row("--mamba-max-states-per-path 3", "--mamba-max-states-per-path 3", "legal: -1"),
    Row("--disable-radix-cache", "--disable-radix-cache", "leave it out"),
    Row("--speculative-algorithm NGRAM", "--speculative-algorithm NGRAM", "leave it out"),
    Row("--disaggregation-mode decode", "--disaggregation-mode decode", "null"),
    Row("--enable-pdmux", "--enable-pdmux", "leave it out"),
    Row("--enable-hierarchical-cache", "--enable-hierarchical-cache", "leave it out"),
    Row("--hicache-storage-backend file", "--hicache-storage-backend file", "leave it out"),
    Row("--enable-lmcache", "--enable-lmcache", "leave it out"),
    Row("--enable-flexkv", "--enable-flexkv", "leave it out"),
    Row("--enable-unified-cache-external-linker", "--enable-unified-cache-external-linker", "leave it out"),
    Row("--enable-unified-memory", "--enable-unified-memory", "leave it out"),
    Row("--enable-page-major-kv-layout", "--enable-page-major-kv-layout", "leave it out"),
    Row("--enable-int8-mamba-checkpoint", "--enable-int8-mamba-checkpoint", "leave it out"),
    Row(
        "--enable-mamba-cache-stochastic-rounding", "--enable-mamba-cache-stochastic-rounding", "leave it out"
    ),
    Row("--enable-streaming-session", "--enable-streaming-session", "leave it out"),
    Row("--enable-session-radix-cache", "--enable-session-radix-cache", "leave it out"),
    Row("--radix-eviction-policy lfu", "--radix-eviction-policy lfu", "lru"),
    Row("--pp-size 2", "--pp-size 2", "legal: 1"),
    Row("--dcp-size 2 --tp-size 2", "--dcp-size 2", "legal: 1"),
    Row("--attn-cp-size 2 --tp-size 2", "--attn-cp-size 2", "legal: 1"),
    Row("--enable-prefill-cp", "--enable-prefill-cp", "leave it out"),
    Row("--enable-kv-cache-sharding", "--enable-kv-cache-sharding", "leave it out"),
    Row("--prefill-only-disable-kv-cache", "--prefill-only-disable-kv-cache", "leave it out"),
    Row("--dllm-algorithm LowConfidence", "--dllm-algorithm LowConfidence", "leave it out"),
    Row("--enable-hisparse", "--enable-hisparse", "leave it out"),
    Row("--enable-two-batch-overlap", "--enable-two-batch-overlap", "leave it out"),
    Row("--enable-mis", "--enable-mis", "leave it out"),
    Row("--enable-linear-replayssm", "--enable-linear-replayssm", "leave it out"),
    Row("--enable-linear-replayssm-spec", "--enable-linear-replayssm-spec", "leave it out"),
    Row("--kv-cache-dtype nvfp4", "--kv-cache-dtype nvfp4", "auto"),
    Row("--kv-cache-dtype fp4_mx_block16", "--kv-cache-dtype fp4_mx_block16", "auto"),
    Row("--kv-cache-dtype mxfp8", "--kv-cache-dtype mxfp8", "fp8_e4m3"),
    Row(
        "--attention-backend trtllm_mha",
        "--attention-backend trtllm_mha",
        "triton, flashinfer, fa3, torch_native",
    ),
    Row("--prefill-attention-backend fa4", "--prefill-attention-backend fa4", "fa3"),
    Row("--decode-attention-backend intel_amx", "--decode-attention-backend intel_amx", "torch_native"),
    Row("--cuda-graph-backend-prefill breakable", "breakable", "--cuda-graph-backend-prefill disabled"),
    Row(
        '--cuda-graph-config {"prefill":{"backend":"full"}}',
        "prefill backend full",
        '{"backend": "disabled"}',
    ),
    Row("--enable-memory-saver", "--enable-memory-saver", "leave it out"),
    Row("--kv-events-config {}", "--kv-events-config {}", "leave it out"),
    Row("--use-ray", "--use-ray", "leave it out"),
)


@pytest.fixture(autouse=True)
def _kept() -> Iterator[None]:
    with kept_process():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_config(tmp_path_factory.mktemp("falcon"))


def sentence(*argv: str) -> str:
    """The refusal of a command line: exactly one sentence on one line."""
    with pytest.raises(rules.Refusal) as caught:
        resolved(*argv, "--skip-tokenizer-init")
    text = str(caught.value)
    assert re.fullmatch(r"[^\n]+\.", text)
    return text


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.argv)
def test_refused(row: Row, model: str) -> None:
    said = sentence("--model-path", model, *ON, *row.argv.split())
    assert row.value in said
    assert row.choice in said


def test_every_rule_has_a_row() -> None:
    ours = {"hybrid_mem", "hybrid_checkpoints", "hybrid_wait", "hybrid_attention_share", "hybrid_conv_slots"}
    planted = {"model_path", "mem_fraction_static", "cuda_graph_config"}  # tests of their own below
    rowed = {match.replace("-", "_") for row in ROWS for match in re.findall(r"--([a-z0-9-]+)", row.argv)}
    ruled = {rule.field for rule in (*refusals.INPUT_RULES, *refusals.MODEL_RULES)}
    assert ruled - ours - planted <= rowed


def test_every_rule_names_a_real_option() -> None:
    """`flag_of` spells a flag from the field; the parser must know it by that spelling."""
    import argparse

    from sglang.srt.server_args import ServerArgs

    parse("--model-path", "none")
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    known = set(parser._option_string_actions)
    for rule in (*refusals.INPUT_RULES, *refusals.MODEL_RULES):
        assert rules.flag_of(rule.field) in known


def test_organization_not_built(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "BUILT_ORGANIZATIONS", ("S1",))
    said = sentence("--model-path", model, "--hybrid-mem", "S2")
    assert said == "--hybrid-mem S2 is not built yet; legal: S1."


def test_dual_page_is_its_unit(model: str) -> None:
    said = sentence("--model-path", model, "--hybrid-mem", "D0", "--page-size", "64")
    assert "--page-size 64" in said
    assert "--page-size 16" in said


def test_coarse_slots_need_a_backend_that_indexes_by_token(model: str) -> None:
    said = sentence("--model-path", model, "--hybrid-mem", "S0", "--attention-backend", "fa3")
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
    said = sentence("--model-path", model, "--hybrid-mem", mem, *argv.split())
    assert value in said
    assert choice in said


@pytest.mark.parametrize("mem", refusals.BUILT_ORGANIZATIONS)
def test_the_named_budget_is_the_least(mem: str, model: str) -> None:
    """HB-29: asked, available and the flag to change are named; the named value starts, one less does not."""
    argv = ("--model-path", model, "--hybrid-mem", mem, "--hybrid-grid", "16", "--hybrid-budget-bytes")
    named = re.search(r"--hybrid-budget-bytes 1000 .* use (\d+) or more", sentence(*argv, "1000"))
    assert named
    resolved(*argv, named[1], "--skip-tokenizer-init")
    below = int(named[1]) - 1
    if mem == "D0":
        below = below * 9 // 10  # its two sides are rounded apart
    assert f"use {named[1]} or more" in sentence(*argv, str(below))


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
            except rules.Refusal as refusal:
                reasons.append(str(refusal))
            found = re.search(r"use (\d+) or more", reasons[-1])
            assert found and int(found[1]) > budget
            budget = int(found[1])
        assert len(reasons) == 2, reasons
        assert f"serves no prompt of more than {grid} tokens" in reasons[1]
        assert "serves no prompt" in sentence(*argv, str(budget - 1))


def test_budget_beyond_the_machine(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.utils import common

    monkeypatch.setattr(common, "get_device_memory_capacity", lambda device: 1024.0)
    argv = ("--model-path", model, *ON, "--hybrid-budget-bytes")
    said = sentence(*argv, "1Gi")
    assert "--hybrid-budget-bytes 1073741824 is more than the 1073741824 bytes" in said
    assert "use less, such as 536870912" in said
    resolved(*argv, "536870912", "--skip-tokenizer-init")


@pytest.mark.parametrize("share", ["0", "1", "-0.5", "1.5", "nan", "inf"])
def test_share_leaves_both_pools(share: str, model: str) -> None:
    said = sentence("--model-path", model, "--hybrid-mem", "D0", f"--hybrid-attention-share={share}")
    assert f"--hybrid-attention-share {float(share)} leaves D0 one pool" in said
    assert "between 0 and 1, like 0.5" in said


@pytest.mark.parametrize("mem", ["S0", "S1", "S2"])
def test_share_is_for_dual_pools(mem: str, model: str) -> None:
    said = sentence("--model-path", model, "--hybrid-mem", mem, "--hybrid-attention-share", "0.5")
    assert f"--hybrid-attention-share 0.5 has no meaning with --hybrid-mem {mem}" in said
    assert said.endswith("leave it out, or use --hybrid-mem D0.")


@pytest.mark.parametrize("mem", ["S0", "S1", "D0"])
def test_conv_slots_are_for_packing(mem: str, model: str) -> None:
    said = sentence("--model-path", model, "--hybrid-mem", mem, "--hybrid-conv-slots", "tight")
    assert f"--hybrid-conv-slots tight has no meaning with --hybrid-mem {mem}" in said
    assert said.endswith("leave it out, or use --hybrid-mem S2.")


@pytest.mark.parametrize("share", ["0.5", "0.0001", "0.9999"])
def test_share_of_unknown_or_ample_bytes(share: str, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a budget only the scheduler knows the bytes; with one the parent knows both sides."""
    from sglang.srt.utils import common

    monkeypatch.setattr(common, "get_device_memory_capacity", lambda device: 1e6)
    argv = ("--model-path", model, "--hybrid-mem", "D0", "--hybrid-attention-share", share)
    for more in ((), ("--hybrid-budget-bytes", "100G")):
        resolved(*argv, *more, "--skip-tokenizer-init")


@pytest.mark.parametrize("mem", refusals.BUILT_ORGANIZATIONS)
def test_every_built_organization_passes(mem: str, model: str) -> None:
    record = resolved("--model-path", model, "--skip-tokenizer-init", "--hybrid-mem", mem)
    assert view(record).radix_cache_backend == "hybrid_grid"


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_every_served_family_passes(family: DemoFamily, tmp_path: Path) -> None:
    """Its layers and its state are laid out in the parent, from config.json alone."""
    model = write_config(tmp_path, family=family)
    record = resolved("--model-path", model, "--skip-tokenizer-init", *ON, "--hybrid-grid", "64")
    assert view(record).page_size == 64
    assert "S2 does not pack" in sentence("--model-path", model, "--hybrid-mem", "S2", "--hybrid-grid", "4")


def test_served_families_are_those_with_a_demo_model() -> None:
    assert set(refusals.SERVED) == {family.model for family in FAMILIES.values()}


@pytest.mark.parametrize(
    "extra",
    [
        "--hybrid-grid 16",
        "--hybrid-budget-bytes 1000",
        "--hybrid-attention-share 0.5",
        "--hybrid-conv-slots tight",
        "--hybrid-trace trace.jsonl",
        "--hybrid-kernels torch",
        "--hybrid-headroom 0.1",
        "--hybrid-retention 2",
        "--hybrid-checkpoints branch",
        "--hybrid-wait never",
    ],
)
def test_option_without_the_switch(extra: str, model: str) -> None:
    said = sentence("--model-path", model, *extra.split())
    assert f"{extra} has no effect without --hybrid-mem; add --hybrid-mem S1" in said


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("LlamaForCausalLM", {"model_type": "llama"}),
        ("MambaForCausalLM", {"model_type": "mamba", "state_size": 16, "num_hidden_layers": 2}),
        ("Gemma2ForCausalLM", {"model_type": "gemma2", "sliding_window": 64}),
        ("Qwen3NextForCausalLM", {"model_type": "qwen3_next", "full_attention_interval": 4}),
    ],
)
def test_model_not_served(architecture: str, config: dict[str, Any], tmp_path: Path) -> None:
    """Plain attention, pure SSM, sliding windows, and a hybrid that has no adapter yet."""
    model = write_config(tmp_path, architecture, **config)
    said = sentence("--model-path", model, *ON)
    assert architecture in said
    assert ", ".join(refusals.SERVED) in said


def test_experts_are_not_served(tmp_path: Path) -> None:
    """One architecture, with and without: those without are."""
    family = FAMILIES["granite-4"]
    model = write_config(tmp_path / "8", family=family, num_local_experts=8, num_experts_per_tok=2)
    said = sentence("--model-path", model, *ON)
    assert "GraniteMoeHybridForCausalLM without experts, not with 8 (num_local_experts" in said
    assert said.endswith("serve a dense one, or leave --hybrid-mem out for stock SGLang.")
    resolved("--model-path", write_config(tmp_path / "0", family=family), *ON, "--skip-tokenizer-init")


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
    monkeypatch.setattr(refusals, "why_not", lambda name, device: None)
    model = write_config(tmp_path, mamba_d_head=64, mamba_d_ssm=6 * 64)
    argv = ("--model-path", model, *flags.split(), "--hybrid-kernels", "flashinfer")
    if reason is None:
        resolved(*argv, "--skip-tokenizer-init")
    else:
        said = sentence(*argv)
        assert said.startswith("--hybrid-kernels flashinfer is not served with --hybrid-mem S1: ")
        assert re.search(reason, said)


def test_flashinfer_knows_no_delta_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "why_not", lambda name, device: None)
    model = write_config(tmp_path, family=FAMILIES["qwen3.5"])
    said = sentence("--model-path", model, *ON, "--hybrid-kernels", "flashinfer")
    assert "--hybrid-kernels flashinfer is not served with --hybrid-mem S1" in said
    assert "delta rule" in said and said.endswith("use auto.")


def test_post_capture_sizing(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.arg_groups import overrides

    monkeypatch.setattr(overrides, "post_capture_kv_sizing_planned", lambda server_args: True)
    said = sentence("--model-path", model, *ON)
    assert "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING=1" in said
    assert "set it to 0" in said


def test_page_size_forced_by_another_step(model: str) -> None:
    from sglang.srt.arg_groups.overrides import declare_resolution

    record = resolved("--model-path", model, *ON)
    declare_resolution(record, "a later step", page_size=64)
    with pytest.raises(rules.Refusal, match=r"page size 64 .* needs 512"):
        refusals.refuse_resolved(record)


def test_engine_values_are_checked_too(model: str) -> None:
    """`sgl.Engine` bypasses argparse: choices and types come through here."""
    from sglang.srt.server_args import ServerArgs

    parse("--model-path", "none")
    for fields, said in (
        ({"hybrid_mem": "S9"}, r"--hybrid-mem S9 is unknown; legal: .*S1"),
        ({"hybrid_mem": "S1", "hybrid_kernels": "cuda"}, r"--hybrid-kernels cuda is unknown; legal: auto"),
        ({"hybrid_mem": "S1", "hybrid_grid": "16"}, r"--hybrid-grid '16' must be a whole number"),
        ({"hybrid_mem": "D0", "hybrid_attention_share": True}, r"attention-share True leaves D0 one"),
        ({"hybrid_mem": "D0", "hybrid_attention_share": "0.5"}, r"attention-share '0.5' leaves D0 one"),
        (
            {"hybrid_mem": "S2", "hybrid_conv_slots": "wide"},
            r"conv-slots wide is unknown; legal: pow2, tight",
        ),
        ({"hybrid_mem": "S1", "hybrid_checkpoints": "some"}, r"some is unknown; legal: all, branch, sparse"),
        ({"hybrid_mem": "S1", "hybrid_wait": "some"}, r"some is unknown; legal: prefix, never"),
        ({"hybrid_mem": "S1", "hybrid_headroom": "0.1"}, r"--hybrid-headroom '0.1' must be a part"),
        ({"hybrid_mem": "S1", "hybrid_retention": 1.5}, r"--hybrid-retention 1.5 must be a whole number"),
        ({"hybrid_mem": "S1", "hybrid_grid": True}, r"--hybrid-grid True must be a whole number"),
    ):
        with pytest.raises(rules.Refusal, match=said):
            ServerArgs(model_path=model, **fields).resolve_once()


@pytest.mark.parametrize(
    "same",
    [
        "--hybrid-grid 16 --page-size 16",
        "--page-size 512",
        "--radix-cache-backend hybrid_grid",
        "--mamba-radix-cache-strategy no_buffer",
        "--mamba-radix-cache-strategy auto",
        "--radix-eviction-policy lru",
        "--cuda-graph-backend-prefill disabled",
        "--attention-backend torch_native",
        "--hybrid-kernels torch",
        "--disable-overlap-schedule",
        "--kv-cache-dtype bf16",
    ],
)
def test_equal_to_ours_is_no_conflict(same: str, model: str) -> None:
    record = resolved("--model-path", model, "--skip-tokenizer-init", *ON, *same.split())
    assert view(record).radix_cache_backend == "hybrid_grid"


def test_off_refuses_nothing(model: str) -> None:
    record = resolved(
        "--model-path", model, "--skip-tokenizer-init", "--disable-radix-cache", "--pp-size", "1"
    )
    assert view(record).disable_radix_cache is True


def test_plain_speech_only_on_a_command_line(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Uncaught, a refusal of the launcher is one line; other exceptions keep their own hook."""
    seen: list[type[BaseException]] = []
    sys.excepthook = mine = lambda kind, value, trace: seen.append(kind)
    engine = parse("--model-path", model)
    engine._launch_command = "Engine(model_path='x')"
    rules.speak_plainly(engine)
    assert sys.excepthook is mine
    rules.speak_plainly(parse("--model-path", model))
    sys.excepthook(rules.Refusal, rules.Refusal("no."), None)
    sys.excepthook(KeyError, KeyError("x"), None)
    assert capsys.readouterr().err == "sglang_hybrid: error: no.\n"
    assert seen == [KeyError]


EXACT = (*ON, "--hybrid-exact")


@pytest.mark.parametrize(
    ("argv", "value", "choice"),
    [
        ("--tp-size 2", "--tp-size 2", "--tp-size 1"),
        ("--attention-backend triton", "--attention-backend triton", "legal: torch_native"),
        ("--kv-cache-dtype fp8_e4m3", "--kv-cache-dtype fp8_e4m3", "--kv-cache-dtype auto"),
        ("--enable-torch-compile", "--enable-torch-compile", "leave it out"),
        ("--enable-lora --max-lora-rank 8 --lora-target-modules all", "--enable-lora", "leave it out"),
    ],
)
def test_exact_mode_takes_only_what_is_proven(argv: str, value: str, choice: str, model: str) -> None:
    said = sentence("--model-path", model, *EXACT, *argv.split())
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
    monkeypatch.setattr(exact_rules, "SERVED_EXACT", ("AnotherForCausalLM",))
    assert "not proven for FalconH1ForCausalLM" in sentence("--model-path", model, *EXACT)


def test_exact_mode_needs_the_hybrid_memory(model: str) -> None:
    said = sentence("--model-path", model, "--hybrid-exact")
    assert said.startswith("--hybrid-exact has no effect without --hybrid-mem")
