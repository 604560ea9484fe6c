"""Stock SGLang serves on a plain CPU with `--model-path` alone, and says what transformers says."""

import importlib.metadata
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_hybrid.cli.demo_model import write_demo_model
from sglang_hybrid.kernels import KernelError
from sglang_hybrid.platforms import cpu, snapshot_ops, stock_ops
from tests.support.recurrence import MixerInputs, convolve, relative_error, scan
from tests.support.reply import Reply
from tests.support.server import LiveServer


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without an accelerator, whatever this one has."""
    monkeypatch.delenv(cpu.ENGINE_SWITCH, raising=False)
    monkeypatch.setattr(cpu, "_available", lambda module: False)


@pytest.mark.usefixtures("bare")
def test_activates_on_a_plain_cpu() -> None:
    assert cpu.activate() == cpu.PLATFORM_CLASS


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("name", ["cuda", "xpu", "mtia"])
def test_leaves_a_machine_with_an_accelerator_alone(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(cpu, "_available", lambda module: module is getattr(torch, name))
    assert cpu.visible_accelerator() == name and cpu.activate() is None


@pytest.mark.usefixtures("bare")
def test_leaves_apple_silicon_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_available", lambda module: module is torch.backends.mps)
    assert cpu.activate() is None


def test_a_device_extension_counts_once_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "npu", SimpleNamespace(is_available=lambda: True), raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cpu.visible_accelerator() == "npu"


def test_a_driver_that_raises_is_no_accelerator() -> None:
    def broken() -> bool:
        raise RuntimeError("driver")

    assert not cpu._available(SimpleNamespace(is_available=broken))
    assert not cpu._available(None)
    assert cpu._available(SimpleNamespace(is_available=lambda: True))


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(("value", "ours"), [("1", False), ("0", True), ("", True)])
def test_sglangs_own_cpu_engine_goes_first(monkeypatch: pytest.MonkeyPatch, value: str, ours: bool) -> None:
    monkeypatch.setenv(cpu.ENGINE_SWITCH, value)
    assert (cpu.activate() is not None) is ours


def test_entry_point_names_the_activation() -> None:
    (entry,) = importlib.metadata.entry_points(group="sglang.srt.platforms", name="sglang_hybrid_cpu")
    assert entry.load() is cpu.activate


# -- the adapters over kernels/, called as MambaMixer2 calls them ---------------------------------


def test_prefill_convolution_in_a_stock_pool() -> None:
    torch.manual_seed(1)
    x, weight, bias, pool = torch.randn(9, 5), torch.randn(5, 4), torch.randn(5), torch.randn(4, 5, 3)
    before = pool.clone()
    y = stock_ops.causal_conv1d_fn(
        x.t(), weight, bias, activation="silu", conv_states=pool,
        has_initial_state=torch.tensor([True, False]), cache_indices=torch.tensor([2, 3], dtype=torch.int32),
        query_start_loc=torch.tensor([0, 4, 9], dtype=torch.int32), seq_lens_cpu=[4, 5],
    )  # fmt: skip
    first, window = convolve(x[:4], weight, bias, True, before[2])
    second, fresh = convolve(x[4:], weight, bias, True, torch.zeros(5, 3))
    assert relative_error(y.t(), torch.cat([first, second])) < 1e-6
    assert torch.equal(pool[2], window[-1]) and torch.equal(pool[3], fresh[-1])
    assert torch.equal(pool[1], before[1])


def test_scan_and_update_in_a_stock_pool() -> None:
    torch.manual_seed(2)
    inputs = MixerInputs.random(8, 4, 2, 6, 16, torch.float32)
    pool = torch.randn(4, 4, 6, 16)
    before = pool.clone()
    slots = torch.tensor([3, 1], dtype=torch.int32)
    out = torch.empty(1, 7, 4, 6)
    nothing, states, tracked = stock_ops.mamba_chunk_scan_combined(
        inputs.x[None, :7], inputs.dt[None, :7], inputs.a, inputs.b[None, :7], inputs.c[None, :7],
        chunk_size=4, D=inputs.d, z=None, dt_bias=inputs.dt_bias, seq_idx=None, chunk_indices=None,
        chunk_offsets=None, cu_seqlens=torch.tensor([0, 5, 7], dtype=torch.int32), initial_states=pool[slots],
        return_varlen_states=True, return_final_states=False, return_track_states=True, track_seq_idx=None,
        track_end_locs=None, dt_softplus=True, dt_limit=(0.0, float("inf")), out=out, state_dtype=pool.dtype,
    )  # fmt: skip
    assert nothing is None and tracked is None
    plain = MixerInputs(**{**vars(inputs), "z": None})
    for row, (low, high) in enumerate(((0, 5), (5, 7))):
        want_y, want = scan(plain.part(low, high), before[slots[row]], torch.float32)
        assert relative_error(out[0, low:high], want_y) < 2e-6
        assert relative_error(states[row], want[-1]) < 2e-6
    decoded = torch.empty(1, 4, 6)
    one = plain.part(7, 8)
    assert one.d is not None and one.dt_bias is not None
    stock_ops.selective_state_update(
        pool, one.x, one.dt[..., None].expand(-1, -1, 6), one.a[:, None, None].expand(-1, 6, 16),
        one.b, one.c, one.d[:, None].expand(-1, 6), z=None, dt_bias=one.dt_bias[:, None].expand(-1, 6),
        dt_softplus=True, state_batch_indices=slots[:1], out=decoded,
    )  # fmt: skip
    want_y, want = scan(one, before[3], torch.float32)
    assert relative_error(decoded[0], want_y[0]) < 2e-6 and relative_error(pool[3], want[0]) < 2e-6
    assert torch.equal(pool[:3], before[:3])


def test_snapshots_of_a_prefill() -> None:
    """States at whole chunks of an extend, where those are chunks of the flat row and where they are not."""
    torch.manual_seed(3)
    inputs = MixerInputs.random(21, 4, 2, 6, 16, torch.float32)
    first = torch.randn(2, 4, 6, 16)
    out = torch.empty(1, 21, 4, 6)
    before, ends, tracked = stock_ops.mamba_chunk_scan_combined(
        inputs.x[None], inputs.dt[None], inputs.a, inputs.b[None], inputs.c[None], chunk_size=4, D=inputs.d,
        dt_bias=inputs.dt_bias, cu_seqlens=torch.tensor([0, 10, 21], dtype=torch.int32), initial_states=first,
        return_varlen_states=True, return_track_states=True, track_end_locs=torch.tensor([14, 18]),
        dt_softplus=True, out=out, state_dtype=torch.float32,
    )  # fmt: skip
    assert before is not None and tracked is not None
    plain = MixerInputs(**{**vars(inputs), "z": None})
    _, want = scan(plain.part(0, 10), first[0], torch.float32)
    # What `_track_mamba_state_extend` reads: rows of the squeezed first, all of the squeezed third.
    for chunk in (1, 2):
        assert relative_error(before.squeeze(0)[chunk], want[4 * chunk - 1]) < 2e-6
    assert relative_error(ends[0], want[-1]) < 2e-6
    want_y, want = scan(plain.part(10, 21), first[1], torch.float32)
    for got, steps in zip(tracked.squeeze(0), (4, 8), strict=True):
        assert relative_error(got, want[steps - 1]) < 2e-6
    assert relative_error(ends[1], want[-1]) < 2e-6 and relative_error(out[0, 10:], want_y) < 2e-6


def test_snapshots_of_a_decode_step() -> None:
    torch.manual_seed(4)
    conv, ssm = torch.randn(2, 6, 5, 3), torch.randn(2, 6, 4, 7)
    kept = conv.clone(), ssm.clone()
    sources, targets = torch.tensor([1, 2, 3], dtype=torch.int32), torch.tensor([4, 5, 0])
    mask = torch.tensor([True, False, True])
    snapshot_ops.track_mamba_states_all_layers(conv, ssm, sources, mask, targets, 2)
    for states, old in zip((conv, ssm), kept, strict=True):
        assert torch.equal(states[:, 4], old[:, 1])
        assert torch.equal(states[:, [0, 1, 2, 3, 5]], old[:, [0, 1, 2, 3, 5]]), (
            "only the masked of the batch"
        )
    snapshot_ops.track_mamba_states_if_needed(conv[1], ssm[1], sources, mask, targets, 3)
    for states, old in zip((conv, ssm), kept, strict=True):
        assert torch.equal(states[1, 0], old[1, 3]) and torch.equal(states[0, 0], old[0, 0])
    freed = torch.tensor([-1, 2, -1])
    before = ssm.clone()
    snapshot_ops.track_mamba_states_if_needed(
        conv[0], ssm[0], sources, mask, freed, 3, check_freed_slots=True
    )
    assert torch.equal(ssm, before)


def test_pinning_needs_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler pins the mask of a decode step without asking."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.pin_memory)
    monkeypatch.setattr(snapshot_ops, "replace_functions", lambda table: None)
    snapshot_ops.install()
    mask = torch.tensor([True, False])
    assert mask.pin_memory() is mask


def test_what_the_platform_cannot_do_is_refused() -> None:
    x = torch.zeros(1, 2, 1, 4)
    call: dict[str, Any] = {
        "cu_seqlens": torch.tensor([0, 2]), "out": x.clone(), "return_varlen_states": True,
        "return_track_states": True,
    }  # fmt: skip
    bc = torch.zeros(1, 2, 1, 8)
    with pytest.raises(KernelError, match="varlen"):
        stock_ops.mamba_chunk_scan_combined(
            x, x[..., 0], torch.zeros(1), bc, bc, 64, **{**call, "return_varlen_states": False}
        )
    pool, slots = torch.zeros(2, 1, 4, 8), torch.tensor([1])
    with pytest.raises(KernelError, match="A has shape"):
        stock_ops.selective_state_update(
            pool, x[0, :1], x[0, :1, :, 0, None].expand(-1, -1, 4), torch.zeros(1, 4, 8),
            bc[0, :1], bc[0, :1], state_batch_indices=slots, out=x[0, :1].clone(),
        )  # fmt: skip
    with pytest.raises(KernelError, match="cache_seqlens"):
        stock_ops.causal_conv1d_update(torch.zeros(1, 5), torch.zeros(2, 5, 3), torch.zeros(5, 4))


# -- one server, started with nothing but its model ----------------------------------------------

PROMPTS = [
    [5 + (seed * 1009 + i * 31 + (i * i) % 97) % 507 for i in range(n)] for seed, n in ((1, 100), (2, 7))
]
TOKENS = 16


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo_model(tmp_path_factory.mktemp("platform") / "model", vocab=512, context=4096)


@pytest.fixture(scope="module")
def server(model_dir: Path) -> Iterator[LiveServer]:
    live = LiveServer(
        ["--model-path", str(model_dir)], model_dir.parent / "server.log", {"OMP_NUM_THREADS": "1"}
    )
    try:
        live.start()
        yield live
    finally:
        live.stop()


def reference_logprobs(model_dir: Path, prompt: Sequence[int], said: Sequence[int]) -> torch.Tensor:
    """What transformers gives each of `said` after `prompt`, teacher-forced, in fp32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *said]])).logits[0].float().log_softmax(-1)
    return logits[len(prompt) - 1 : -1].gather(1, torch.tensor(said)[:, None])[:, 0]


def check(model_dir: Path, prompt: Sequence[int], reply: Reply) -> None:
    assert len(reply.ids) == TOKENS
    want = reference_logprobs(model_dir, prompt, reply.ids)
    assert float((torch.tensor(reply.logprobs) - want).abs().max()) < 1e-4


@pytest.mark.engine
def test_defaults_are_those_that_work(server: LiveServer) -> None:
    info = server.info()
    names = ("device", "attention_backend", "sampling_backend", "mamba_radix_cache_strategy", "dtype")
    assert [info[name] for name in names] == ["cpu", "torch_native", "pytorch", "no_buffer", "float32"]
    assert "conv_state" in server.log_since(), "the log line that sizes the state is gone"


@pytest.mark.engine
def test_says_what_transformers_says(server: LiveServer, model_dir: Path) -> None:
    for prompt in PROMPTS:
        check(model_dir, prompt, server.generate(prompt, TOKENS))
    for prompt, reply in zip(PROMPTS, server.generate_batch(PROMPTS, TOKENS), strict=True):
        check(model_dir, prompt, reply)


@pytest.mark.engine
def test_stock_prefix_hit_says_the_same(server: LiveServer, model_dir: Path) -> None:
    server.flush()
    first = server.generate(PROMPTS[0], TOKENS)
    longer = [*PROMPTS[0], *first.ids, 7, 8, 9]
    hit = server.generate(longer, TOKENS)
    assert hit.cached >= len(PROMPTS[0])
    check(model_dir, longer, hit)
