"""What a start says of a checkpoint: Falcon-H1-7B in each organization, the figures by hand."""

import pytest
import torch

pytest.importorskip("sglang")

from sglang_hybrid.engine.requests import checkpoint_capacity
from sglang_hybrid.engine.start_report import budget_line, state_lines
from sglang_hybrid.pools.arena import StateShape
from sglang_hybrid.pools.factory import default_grid, make_organization
from sglang_hybrid.pools.organization import Organization

LAYERS = tuple(range(44))
FALCON = StateShape(
    kv_heads=2,
    kv_dim=128,
    kv_dtype=torch.bfloat16,
    heads=24,
    head_dim=128,
    state_size=256,
    ssm_dtype=torch.float32,
    channels=3584,
    window=3,
    conv_dtype=torch.bfloat16,
)
SSM, CONV = 24 * 128 * 256, 3584 * 3 * 2
PAGE = 512 * 1024
BUDGET = 44 * 1000 * PAGE


def said(mem: str, shape: StateShape) -> list[str]:
    def lay_out(state: StateShape) -> Organization:
        model = state.geometry(LAYERS, LAYERS)
        return make_organization(mem, model, default_grid(mem, model, 256), BUDGET)

    return list(state_lines(shape, lay_out(shape), checkpoint_capacity, lay_out))


@pytest.mark.parametrize(
    ("mem", "wide", "narrow", "fit"),
    [
        # 999 pages without the sink, of 7 and of 4 a checkpoint.
        ("S1", "7 pages", "4 pages", (249, 142)),
        # Pages of the checkpoint, in rows of 1 KiB: 3,093 and 1,557.
        ("S0", "1 page", "1 page", (327, 164)),
        # Slots of 32 KiB: 6 n + ceil(n / 16) <= 999, and 3 n likewise.
        (
            "S2",
            "6 pages and one of the 16 conv slots of another",
            "3 pages and one of the 16 conv slots of another",
            (326, 164),
        ),
    ],
)
def test_a_checkpoint_and_what_bf16_would_give(
    mem: str, wide: str, narrow: str, fit: tuple[int, int]
) -> None:
    first, second = said(mem, FALCON)
    assert first == (
        f"A checkpoint is {4 * SSM + CONV} bytes (SSM float32, conv bfloat16) in each of 44 arenas and takes "
        f"{wide}; a block of 512 tokens is {PAGE} bytes and takes 1 page."
    )
    assert second == (
        f"With --mamba-ssm-dtype bfloat16 a checkpoint would be {2 * SSM + CONV} bytes and take {narrow}: "
        f"{fit[0]} checkpoints would fit instead of {fit[1]}."
    )


def test_a_dual_pool_says_its_grid_too() -> None:
    first, second = said("D0", FALCON)
    assert "takes 1 state page; a block of 3328 tokens" in first and "takes 208 units" in first
    assert "take 1 state page at a grid of 1792: " in second


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_narrow_state_has_nothing_to_gain(dtype: torch.dtype) -> None:
    (only,) = said("S1", FALCON._replace(ssm_dtype=dtype))
    assert f"(SSM {str(dtype)[6:]}, conv bfloat16)" in only


def test_a_state_of_a_window_alone() -> None:
    (only,) = said("S1", FALCON._replace(state_size=0))
    assert f"A checkpoint is {CONV} bytes (conv bfloat16)" in only and "takes 1 page;" in only


def test_budget_line() -> None:
    model = FALCON.geometry(LAYERS, LAYERS)
    made = make_organization("S1", model, 512, BUDGET + 5)
    assert budget_line(made, 142) == (
        f"S1: grid 512, budget {BUDGET + 5} bytes, used {BUDGET}, lost 5; holds 999 units of 512 tokens or "
        "142 checkpoints."
    )
