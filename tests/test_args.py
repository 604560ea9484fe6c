"""The options on every way in, and what they derive."""

import logging
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.arguments import parse, resolved, view, write_config
from tests.support.refusal import refusal

pytest.importorskip("sglang")

from sglang_hybrid.engine import args, resolve

pytestmark = pytest.mark.usefixtures("kept")

QUIET = "--skip-tokenizer-init"


@pytest.fixture
def said() -> Iterator[list[str]]:
    """Messages of the resolution steps; the root logger is not ours (`prepare_server_args`)."""
    lines: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("sglang_hybrid.engine.resolve")
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


def fields(record: Any) -> tuple[Any, ...]:
    return record.hybrid_mem, record.hybrid_grid, record.hybrid_budget_bytes, record.hybrid_kernels


def test_command_line(model: str) -> None:
    record = parse(
        *("--model-path", model, "--hybrid-mem", "S1", "--hybrid-grid", "16"),
        *("--hybrid-budget-bytes", "8G", "--hybrid-kernels", "torch"),
    )
    assert type(record) is args.HybridServerArgs
    assert fields(record) == ("S1", 16, 8_000_000_000, "torch")


def test_config_file(model: str, tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(f"model-path: {model}\nhybrid-mem: S1\nhybrid-grid: 16\nhybrid-budget-bytes: 512Mi\n")
    assert fields(parse("--config", str(path))) == ("S1", 16, 512 << 20, None)


def test_command_line_wins_over_config_file(model: str, tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(f"model-path: {model}\nhybrid-mem: S1\nhybrid-grid: 16\n")
    assert parse("--config", str(path), "--hybrid-grid", "32").hybrid_grid == 32


def test_engine_call(model: str) -> None:
    parse("--model-path", "none")
    from sglang.srt.entrypoints.engine import Engine

    record = Engine.server_args_class(model_path=model, hybrid_mem="S1", hybrid_grid=16)
    assert fields(record) == ("S1", 16, None, None)
    with pytest.raises(TypeError):
        Engine.server_args_class(model_path=model, hybrid_memory="S1")


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    shown = capsys.readouterr().out
    plain = ("grid", "budget-bytes", "attention-share", "trace", "kernels")
    for flag in (*plain, "mem {S0,S1,S2,D0}", "conv-slots {pow2,tight}"):
        assert f"--hybrid-{flag}" in shown


@pytest.mark.parametrize("bad", ["--hybrid-mem S3", "--hybrid-grid many", "--hybrid-budget-bytes 8g"])
def test_bad_value_ends_the_parser(bad: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse("--model-path", model, *bad.split())
    assert ended.value.code == 2
    assert f"argument {bad.split()[0]}:" in capsys.readouterr().err.splitlines()[-1]


def test_derived(model: str) -> None:
    record = resolved("--model-path", model, QUIET, "--hybrid-mem", "S1", "--hybrid-grid", "16")
    now = view(record)
    assert (now.page_size, now.radix_cache_backend) == (16, "hybrid_grid")
    assert now.mamba_radix_cache_strategy == "no_buffer"
    assert now.uses_mamba_radix_cache is True
    assert now.disable_overlap_schedule is False
    assert now.cuda_graph_config.prefill.backend == "disabled"
    assert args.settings(record) == args.HybridSettings("S1", 16, 16, None, "auto", None, {})


def test_trace(model: str, tmp_path: Path) -> None:
    target = str(tmp_path / "trace.jsonl")
    record = resolved("--model-path", model, QUIET, "--hybrid-mem", "S1", "--hybrid-trace", target)
    assert args.settings(record).trace == target


def test_attention_share(model: str) -> None:
    record = resolved("--model-path", model, QUIET, "--hybrid-mem", "D0", "--hybrid-attention-share", "0.3")
    assert args.settings(record).options == {"attention_share": 0.3}
    assert args.settings(resolved("--model-path", model, QUIET, "--hybrid-mem", "D0")).options == {}


def test_conv_slots(model: str) -> None:
    for kind, options in (("tight", {"conv_slots": "tight"}), ("pow2", {"conv_slots": "pow2"})):
        record = resolved("--model-path", model, QUIET, "--hybrid-mem", "S2", "--hybrid-conv-slots", kind)
        assert args.settings(record).options == options


def test_default_grid(model: str) -> None:
    record = resolved("--model-path", model, QUIET, "--hybrid-mem", "S1")
    assert view(record).page_size == args.DEFAULT_GRID == 512
    assert args.settings(record).grid == 512
    assert record.hybrid_grid is None  # the record stays the user's input


@pytest.mark.parametrize(
    ("mem", "flags", "grid"),
    [
        ("S0", "", 512),
        ("S1", "", 512),
        ("S2", "", 2048),
        ("S2", "--hybrid-conv-slots tight", 1664),
        ("S2", "--hybrid-grid 4096", 4096),
        ("D0", "", None),
    ],
)
def test_default_grid_holds_the_state(
    mem: str, flags: str, grid: int | None, tmp_path: Path, said: list[str]
) -> None:
    """A KV row of 64 bytes and a conv line of 26112: its slot is a whole page of 512 tokens."""
    model = write_config(tmp_path, num_key_value_heads=1, head_dim=16, mamba_n_heads=64, mamba_d_ssm=2048)
    record = resolved("--model-path", model, QUIET, "--hybrid-mem", mem, *flags.split())
    assert args.settings(record).grid == grid
    assert view(record).page_size == (grid or 16)
    raised = grid in (1664, 2048)
    assert [line.split(":")[0] for line in said if "grid" in line] == [f"--hybrid-grid is {grid}"] * raised


def test_a_page_size_is_a_grid_that_somebody_named(tmp_path: Path) -> None:
    model = write_config(tmp_path, num_key_value_heads=1, head_dim=16, mamba_n_heads=64, mamba_d_ssm=2048)
    said = refusal("--model-path", model, "--hybrid-mem", "S2", "--page-size", "512")
    assert "use --hybrid-mem S1, or --hybrid-grid 2048 or larger" in said


@pytest.mark.parametrize("mem", ["S1", "D0"])
@pytest.mark.parametrize(
    "flags",
    [
        "--mamba-radix-cache-strategy extra_buffer",
        "--mamba-radix-cache-strategy extra_buffer_lazy",
        "--max-mamba-cache-size 0",
        "--mamba-full-memory-ratio 0.9 --max-mamba-cache-size 64 --mamba-radix-cache-strategy extra_buffer",
    ],
)
def test_what_sizes_a_slot_pool_is_ignored(mem: str, flags: str, model: str, said: list[str]) -> None:
    """One warning, and everything as without them."""
    plain, copied = (
        view(resolved("--model-path", model, QUIET, "--hybrid-mem", mem, *extra.split()))
        for extra in ("", flags)
    )
    (warning,) = [line for line in said if line.startswith("Ignored: ")]
    for flag in re.findall(r"--\S+ \S+", flags):
        assert flag in warning
    assert "--hybrid-budget-bytes, by default what --mem-fraction-static leaves" in warning
    assert ("--hybrid-attention-share" in warning) == (mem == "D0")
    for field in (*resolve.SLOT_POOL, "mem_fraction_static", "page_size", "disable_overlap_schedule"):
        assert getattr(copied, field) == getattr(plain, field)


@pytest.mark.parametrize(
    "flags",
    [
        "--mamba-backend flashinfer",
        "--linear-attn-backend flashinfer",
        "--linear-attn-decode-backend flashinfer --linear-attn-prefill-backend flashkda",
    ],
)
def test_what_chooses_kernels_of_slots_is_ignored(flags: str, model: str, said: list[str]) -> None:
    copied = view(resolved("--model-path", model, QUIET, "--hybrid-mem", "S1", *flags.split()))
    (warning,) = [line for line in said if line.startswith("Ignored: ")]
    assert all(flag in warning for flag in re.findall(r"--\S+ \S+", flags))
    assert warning.endswith("--hybrid-kernels chooses among them.")
    assert {name: getattr(copied, name) for name in resolve.STATE_KERNELS} == resolve.STATE_KERNELS


@pytest.mark.parametrize(
    ("mem", "grid", "page", "step"),
    [("S0", None, 512, 512), ("S2", 16, 16, 16), ("D0", None, 16, None), ("D0", 1792, 16, 1792)],
)
def test_page_of_each_organization(mem: str, grid: int | None, page: int, step: int | None) -> None:
    assert args.grid_or_default(mem, grid) == step
    assert args.page_size_for(mem, step) == page


@pytest.mark.parametrize(
    ("chunk", "legal"), [(3, 8), (8, 8), (12, 8), (20, 16), (4096, 4096), (-1, -1), (None, 4096)]
)
def test_chunk_in_whole_pages(chunk: int | None, legal: int, model: str, said: list[str]) -> None:
    """Stock refuses anything else with an assertion.  One warning names both numbers."""
    given = () if chunk is None else ("--chunked-prefill-size", str(chunk))
    now = view(resolved("--model-path", model, QUIET, "--hybrid-mem", "S1", "--hybrid-grid", "8", *given))
    assert now.chunked_prefill_size == legal
    changed = [f"chunked_prefill_size changed from {chunk} to {legal}"] if chunk not in (legal, None) else []
    assert [line.split(":")[0] for line in said] == changed


def test_default_chunk_in_whole_pages(model: str, said: list[str]) -> None:
    now = view(resolved("--model-path", model, QUIET, "--hybrid-mem", "S1", "--hybrid-grid", "1000"))
    assert now.chunked_prefill_size == 4000
    assert len(said) == 1
    assert "from 4096 to 4000" in said[0]


def test_result_passes_the_stock_check(model: str) -> None:
    resolved("--model-path", model, QUIET, "--hybrid-mem", "S1", "--hybrid-grid", "1000").check_server_args()


def test_user_may_turn_overlap_off(model: str) -> None:
    record = resolved("--model-path", model, QUIET, "--hybrid-mem", "S1", "--disable-overlap-schedule")
    assert view(record).disable_overlap_schedule is True


def test_reaches_children_by_pickle(model: str) -> None:
    record = resolved("--model-path", model, QUIET, "--hybrid-mem", "S1", "--hybrid-budget-bytes", "1G")
    child = pickle.loads(pickle.dumps(record))
    assert type(child) is args.HybridServerArgs
    assert args.settings(child) == args.settings(record)
    child.resolve_once()  # does nothing twice


def test_off_is_stock(model: str) -> None:
    now = view(resolved("--model-path", model, QUIET))
    assert (now.page_size, now.radix_cache_backend, now.disable_prefill_cuda_graph) == (1, None, False)
    assert args.published_organization() is None
    with pytest.raises(ValueError, match="hybrid memory is off"):
        args.settings(parse("--model-path", model))


def test_off_keeps_stock_validation(model: str) -> None:
    with pytest.raises(AssertionError, match="no_buffer only supports page_size=1"):
        resolved(
            *("--model-path", model, QUIET, "--page-size", "16"),
            *("--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule"),
        )


def test_stock_record_is_off() -> None:
    """A record that was built before plugins were loaded has no such field."""
    assert args.organization(object()) is None
    assert args.extra_fields(object()) == {}
