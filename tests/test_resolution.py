"""What a start resolves to on an A100, an H100 and a B200, without one: every family and organization.

A family that is served is one more row of FAMILIES and one config in `tests/data/checkpoints`.
"""

from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.gpu_resolution import Case, Outcome, resolve_on_gpu

pytest.importorskip("sglang")

CHECKPOINTS = Path(__file__).parent / "data" / "checkpoints"
MACHINES = ("sm_80", "sm_90", "sm_100")
ORGANIZATIONS = ("S0", "S1", "S2", "D0")


class Family(NamedTuple):
    """Attention backends that SGLang takes by itself on `MACHINES`, and the default grid under S2."""

    checkpoint: str
    stock: tuple[str, str, str]
    packed_grid: int = 512


FAMILIES = (
    Family("falcon-h1-7b", ("flashinfer", "fa3", "triton")),
    Family("granite-4.0-h-micro", ("flashinfer", "fa3", "flashinfer")),
    Family("qwen3.5-4b-finetune-text", ("flashinfer", "fa3", "trtllm_mha")),
    # On a B200 SGLang has an override for these that also sets a page of one token.
    Family("qwen3.6-27b", ("flashinfer", "fa3", "triton")),
    Family("qwen3.6-35b-a3b", ("flashinfer", "fa3", "triton")),
    Family("qwen3-coder-next-80b", ("flashinfer", "fa3", "triton")),
    Family("lfm2.5-1.2b", ("flashinfer", "fa3", "flashinfer")),
    Family("nemotron-3-nano-30b", ("flashinfer", "fa3", "trtllm_mha"), 1024),
)
ILLEGAL = {"S0": ("fa3", "trtllm_mha")} | dict.fromkeys(("S1", "S2", "D0"), ("trtllm_mha",))

MATRIX = [(family, machine, mem) for family in FAMILIES for machine in MACHINES for mem in ORGANIZATIONS]

QWEN, FALCON = "qwen3.5-4b-finetune-text", "falcon-h1-7b"
FLAGS = {
    "decode alone": (FALCON, "sm_90", "--hybrid-mem S0 --decode-attention-backend triton"),
    "prefill alone": (FALCON, "sm_90", "--hybrid-mem S0 --prefill-attention-backend triton"),
    # SGLang fills in its default beside them, and would give trtllm_mha's page to it.
    "both alone": (
        QWEN,
        "sm_100",
        "--hybrid-mem S1 --prefill-attention-backend triton --decode-attention-backend flashinfer",
    ),
    "no flashinfer": (FALCON, "sm_90 without flashinfer", "--hybrid-mem S0"),
    "named": (FALCON, "sm_90", "--hybrid-mem S0 --attention-backend fa3"),
    "decode named": (FALCON, "sm_90", "--hybrid-mem S0 --decode-attention-backend fa3"),
    "a grid that is no power of two": (FALCON, "sm_90", "--hybrid-mem S1 --hybrid-grid 640"),
    "such a grid, and fa3 named": (
        FALCON,
        "sm_90",
        "--hybrid-mem S1 --hybrid-grid 640 --attention-backend fa3",
    ),
    "off": (QWEN, "sm_100", ""),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[object, Outcome]:
    """All of this file's starts, resolved in one process: its imports take longer than they do."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for file in CHECKPOINTS.glob("*.json"):
        (folder / file.stem).mkdir()
        (folder / file.stem / "config.json").write_text(file.read_text())
    cases: dict[object, Case] = {
        (family, machine, mem): Case(machine, str(folder / family.checkpoint), ("--hybrid-mem", mem))
        for family, machine, mem in MATRIX
    }
    for name, (checkpoint, machine, flags) in FLAGS.items():
        cases[name] = Case(machine, str(folder / checkpoint), tuple(flags.split()))
    return dict(zip(cases, resolve_on_gpu(list(cases.values())), strict=True))


@pytest.mark.parametrize(
    ("family", "machine", "mem"), MATRIX, ids=lambda value: getattr(value, "checkpoint", value)
)
def test_starts_without_a_further_flag(
    family: Family, machine: str, mem: str, outcomes: dict[object, Outcome]
) -> None:
    found = outcomes[family, machine, mem]
    assert found.refused is None
    stock = family.stock[MACHINES.index(machine)]
    replaced = stock in ILLEGAL[mem]
    assert found.attention == ["flashinfer" if replaced else stock] * 2
    said = [line for line in found.log if "attention-backend" in line]
    assert len(said) == replaced
    if replaced:
        assert said[0].startswith(
            f"INFO: --attention-backend is flashinfer: SGLang's default here, {stock}, "
        )
    grid = family.packed_grid if mem == "S2" else 512
    assert found.page == (16 if mem == "D0" else grid)
    assert found.grid == (None if mem == "D0" else grid)
    assert any("--hybrid-grid is" in line for line in found.log) == (mem == "S2" and grid != 512)
    assert (found.prefill_graph, found.decode_graph) == ("disabled", "full")
    assert found.overlap
    assert found.chunk == 8192


def test_the_side_that_nobody_named_is_chosen(outcomes: dict[object, Outcome]) -> None:
    assert outcomes["decode alone"].attention == ["flashinfer", "triton"]
    assert outcomes["prefill alone"].attention == ["triton", "flashinfer"]


def test_a_default_that_serves_neither_side_sets_no_page(outcomes: dict[object, Outcome]) -> None:
    found = outcomes["both alone"]
    assert found.refused is None
    assert (found.attention, found.page) == (["triton", "flashinfer"], 512)


def test_triton_where_flashinfer_is_not_installed(outcomes: dict[object, Outcome]) -> None:
    assert outcomes["no flashinfer"].attention == ["triton", "triton"]


@pytest.mark.parametrize(
    ("name", "flag"), [("named", "--attention-backend"), ("decode named", "--decode-attention-backend")]
)
def test_what_the_user_named_is_refused_and_not_replaced(
    name: str, flag: str, outcomes: dict[object, Outcome]
) -> None:
    said = outcomes[name].refused
    assert said is not None and said.startswith(f"Refusal: {flag} fa3 is not supported with --hybrid-mem S0")
    assert outcomes[name].log == []


def test_fa3_needs_a_grid_that_is_a_power_of_two(outcomes: dict[object, Outcome]) -> None:
    """`normal_decode_set_metadata` asserts it, when a decode step is captured."""
    found = outcomes["a grid that is no power of two"]
    assert (found.refused, found.attention, found.page) == (None, ["flashinfer"] * 2, 640)
    assert [line for line in found.log if "attention-backend is flashinfer" in line]
    said = outcomes["such a grid, and fa3 named"].refused
    assert said is not None and said.startswith("Refusal: --attention-backend fa3 is not supported with ")
    assert "--hybrid-grid 640" in said and "use --hybrid-grid 1024, or one of triton, flashinfer" in said


def test_off_leaves_the_default_alone(outcomes: dict[object, Outcome]) -> None:
    found = outcomes["off"]
    assert (found.refused, found.attention, found.page) == (None, ["trtllm_mha"] * 2, 64)
    assert found.log == []
