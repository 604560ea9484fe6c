"""Each refused combination: one sentence that names the value given and a legal choice."""

import re
import sys
from typing import NamedTuple

import pytest

from tests.support.arguments import parse, resolved, view
from tests.support.refusal import ON, refusal

pytest.importorskip("sglang")

from sglang_hybrid.engine import input_rules, model_rules, rules
from sglang_hybrid.pools.factory import ORGANIZATIONS

pytestmark = pytest.mark.usefixtures("kept")


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
    Row("--max-total-tokens 8192", "--max-total-tokens 8192", "--hybrid-budget-bytes"),
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
    Row('--cuda-graph-config {"decode":{"backend":"breakable"}}', "decode backend breakable", '"full"'),
    Row("--cuda-graph-backend-decode breakable", "--cuda-graph-backend-decode breakable", "full, disabled"),
    Row("--debug-cuda-graph", "--debug-cuda-graph", "leave it out"),
    Row("--enable-torch-compile", "--enable-torch-compile", "leave it out"),
    Row("--tp-size 2 --attn-dp-size 2", "--attn-dp-size 2", "legal: 1"),
    # SGLang turns it into --attn-dp-size 2.
    Row("--tp-size 2 --dp-size 2 --enable-dp-attention", "--attn-dp-size 2", "legal: 1"),
    Row("--enable-prefill-delayer", "--enable-prefill-delayer", "leave it out"),
    Row("--enable-deterministic-inference", "--enable-deterministic-inference", "leave it out"),
    Row("--rl-on-policy-target fsdp", "--rl-on-policy-target fsdp", "leave it out"),
    Row("--enable-single-batch-overlap", "--enable-single-batch-overlap", "leave it out"),
    Row("--enable-layernorm-sp", "--enable-layernorm-sp", "leave it out"),
    Row("--enable-attn-tp-input-scattered", "--enable-attn-tp-input-scattered", "leave it out"),
    Row("--enable-nvidia-megakernel", "--enable-nvidia-megakernel", "leave it out"),
    Row("--enable-amd-monokernel", "--enable-amd-monokernel", "leave it out"),
    Row("--elastic-ep-backend mooncake", "--elastic-ep-backend mooncake", "leave it out"),
    Row("--is-embedding", "--is-embedding", "leave it out"),
    Row("--encoder-only", "--encoder-only", "leave it out"),
    Row("--language-only", "--language-only", "leave it out"),
    Row("--enable-return-routed-experts", "--enable-return-routed-experts", "leave it out"),
    Row("--strip-thinking-cache", "--strip-thinking-cache", "leave it out"),
    Row("--model-impl transformers", "--model-impl transformers", "auto, sglang"),
    Row("--kv-canary log", "--kv-canary log", "none"),
    Row("--decoupled-spec-role verifier", "--decoupled-spec-role verifier", "null"),
    Row("--startup-weight-load-mode overlap", "--startup-weight-load-mode overlap", "serial"),
    Row("--enable-memory-saver", "--enable-memory-saver", "leave it out"),
    Row("--kv-events-config {}", "--kv-events-config {}", "leave it out"),
    Row("--use-ray", "--use-ray", "leave it out"),
)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.argv)
def test_refused(row: Row, model: str) -> None:
    said = refusal("--model-path", model, *ON, *row.argv.split())
    assert row.value in said
    assert row.choice in said


@pytest.mark.parametrize("name", ["SGLANG_USE_HND_KVCACHE", "SGLANG_FLASHINFER_AUTOTUNE_EXTEND"])
def test_refused_environment(name: str, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    said = refusal("--model-path", model, *ON)
    assert said.startswith(f"{name}=1 is not supported with --hybrid-mem S1: ")
    assert said.endswith("unset it or set it to 0.")


def test_every_rule_has_a_row() -> None:
    ours = {"hybrid_mem", "hybrid_checkpoints", "hybrid_wait", "hybrid_eviction"}
    ours |= {"hybrid_attention_share", "hybrid_conv_slots"}
    planted = {"model_path", "mem_fraction_static", "cuda_graph_config"}  # test_model_rules.py
    rowed = {match.replace("-", "_") for row in ROWS for match in re.findall(r"--([a-z0-9-]+)", row.argv)}
    ruled = {rule.field for rule in (*input_rules.INPUT_RULES, *model_rules.MODEL_RULES)}
    assert ruled - ours - planted <= rowed


def test_every_rule_names_a_real_option() -> None:
    """`flag_of` spells a flag from the field; the parser must know it by that spelling."""
    import argparse

    from sglang.srt.server_args import ServerArgs

    parse("--model-path", "none")
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    known = set(parser._option_string_actions)
    for rule in (*input_rules.INPUT_RULES, *model_rules.MODEL_RULES):
        assert rules.flag_of(rule.field) in known


def test_dual_page_is_its_unit(model: str) -> None:
    said = refusal("--model-path", model, "--hybrid-mem", "D0", "--page-size", "64")
    assert "--page-size 64" in said
    assert "--page-size 16" in said


@pytest.mark.parametrize("mem", ["S0", "S1", "D0"])
def test_conv_slots_are_for_packing(mem: str, model: str) -> None:
    said = refusal("--model-path", model, "--hybrid-mem", mem, "--hybrid-conv-slots", "tight")
    assert f"--hybrid-conv-slots tight has no meaning with --hybrid-mem {mem}" in said
    assert said.endswith("leave it out, or use --hybrid-mem S2.")


@pytest.mark.parametrize("mem", ORGANIZATIONS)
def test_every_built_organization_passes(mem: str, model: str) -> None:
    record = resolved("--model-path", model, "--skip-tokenizer-init", "--hybrid-mem", mem)
    assert view(record).radix_cache_backend == "hybrid_grid"


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
        "--hybrid-eviction lru",
    ],
)
def test_option_without_the_switch(extra: str, model: str) -> None:
    said = refusal("--model-path", model, *extra.split())
    assert f"{extra} has no effect without --hybrid-mem; add --hybrid-mem S1" in said


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
        ({"hybrid_mem": "S1", "hybrid_eviction": "fifo"}, r"-eviction fifo is unknown; legal: demand, lru"),
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
