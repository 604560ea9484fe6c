"""What a byte budget becomes, what is refused and how, and the source's arithmetic (docs/paper.md)."""

import copy
import random
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hybrid.geometry import (
    GeometryError,
    ModelGeometry,
    PageGeometry,
    block_bytes,
    ceil_div,
    conv_slot_bytes,
    native_grid,
)
from sglang_hybrid.pools.dual import DualPools
from sglang_hybrid.pools.factory import make_organization
from sglang_hybrid.pools.organization import Need, Organization
from sglang_hybrid.pools.shared import CoarsePages, PackedConv, PagedCheckpoints, SharedPool
from tests.core.driver import Driver
from tests.core.serve import serve
from tests.core.shadow import Shadow
from tests.core.worlds import CONV_ONLY, FALCON_7B, NAMES, SMALL, SSM_ONLY, STRIPED, World
from tests.support.tokens import T

KIB = 1024
BIG = 1 << 40
"""Bytes enough for anything about Falcon-H1-7B."""


def smallest(name: str, model: ModelGeometry, grid: int) -> int:
    """Least legal budget, as the refusal of an impossible one names it."""
    with pytest.raises(GeometryError) as refusal:
        make_organization(name, model, grid, 0)
    return named(refusal.value, r"use (\d+) or more")


def named(refusal: GeometryError, pattern: str) -> int:
    found = re.search(pattern, str(refusal))
    assert found, f"no legal value in: {refusal}"
    return int(found.group(1))


# -- the smallest budget --------------------------------------------------------------------


@pytest.mark.parametrize("grid", [16, 32, 64])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "model", [SMALL, STRIPED, CONV_ONLY, SSM_ONLY], ids=["small", "stripes", "conv", "ssm"]
)
def test_the_smallest_legal_budget_serves_a_hit(name: str, grid: int, model: ModelGeometry) -> None:
    if (name, model) == ("S2", SSM_ONLY):
        with pytest.raises(GeometryError, match="use --hybrid-mem S1"):
            make_organization(name, model, grid, BIG)
        return
    budget = smallest(name, model, grid)
    shadow = Shadow(make_organization(name, model, grid, budget))
    tail = shadow.organization.unit_tokens
    assert serve(shadow, T(1, grid)).hit == 0
    assert serve(shadow, T(1, grid) + T(2, tail - 1)).hit == grid
    assert serve(shadow, T(3, grid - 3), 3).hit == 0


@pytest.mark.parametrize("name", ["S0", "S1", "S2"])
def test_one_byte_less_than_the_smallest_budget_is_refused(name: str) -> None:
    budget = smallest(name, FALCON_7B, 512)
    with pytest.raises(GeometryError, match=f"use {budget} or more"):
        make_organization(name, FALCON_7B, 512, budget - 1)


# -- refusals name a legal value ------------------------------------------------------------

MODELS = st.builds(
    lambda arenas, recurrent, kv, rows, row, conv: ModelGeometry(
        tuple(range(arenas)), tuple(range(recurrent)), kv, rows, row, conv if rows * row else max(conv, 8)
    ),
    st.integers(1, 3),
    st.integers(1, 7),
    st.sampled_from([8, 24, 64]),
    st.integers(0, 9),
    st.sampled_from([8, 40, 512]),
    st.sampled_from([0, 8, 24, 200, 1032]),
)


@settings(max_examples=150, deadline=None, database=None, derandomize=True)
@given(MODELS, st.sampled_from(NAMES), st.integers(1, 80), st.integers(0, 200_000))
def test_an_impossible_grid_or_budget_is_refused_with_one_that_works(
    model: ModelGeometry, name: str, grid: int, budget: int
) -> None:
    enough = 64 * model.arenas * max(model.checkpoint_bytes, 512 * model.kv_row_bytes)
    try:
        make_organization(name, model, grid, enough)
    except GeometryError as refusal:
        if "keeps none" in str(refusal):
            assert "use --hybrid-mem S1" in str(refusal)
            return
        legal = named(refusal, r"(?:use|or) (?:--hybrid-grid )?(\d+)(?: or larger)?$")
        assert legal > grid
        grid = legal
    try:
        organization = make_organization(name, model, grid, budget)
    except GeometryError as refusal:
        legal = named(refusal, r"use (\d+) or more")
        assert legal > budget
        budget = legal
        organization = make_organization(name, model, grid, budget)
    assert organization.used_bytes() <= budget
    pieces = Need(organization.units_per_block + 1, 2)
    assert organization.capacity_fits(pieces) and organization.fits(pieces)


@settings(max_examples=100, deadline=None, database=None, derandomize=True)
@given(st.floats(0.001, 0.999), st.sampled_from([16, 48, 1792]), st.sampled_from([SMALL, STRIPED, FALCON_7B]))
def test_d0_names_a_budget_for_every_share(share: float, grid: int, model: ModelGeometry) -> None:
    with pytest.raises(GeometryError) as refusal:
        DualPools(model, grid, 0, attention_share=share)
    pools = DualPools(model, grid, named(refusal.value, r"use (\d+) or more"), attention_share=share)
    assert pools.capacity_fits(Need(pools.units_per_block + 1, 2))


def test_d0_refuses_shares_and_grids_that_leave_no_pool() -> None:
    for share in (0.0, 1.0, -1.0, 7.0):
        with pytest.raises(GeometryError, match="use a value between 0 and 1"):
            DualPools(SMALL, 16, BIG, attention_share=share)
    with pytest.raises(GeometryError, match="use 32"):
        DualPools(SMALL, 20, BIG)


# -- could_fit is never optimistic ----------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("model", [SMALL, CONV_ONLY], ids=["small", "conv"])
def test_whatever_could_fit_promises_is_found(name: str, model: ModelGeometry) -> None:
    for seed in range(4):
        chance = random.Random(seed)
        driver = Driver(World(name, pages=20, units=12, states=5, model=model).build())
        for _ in range(150):
            driver.step(chance)
        for units in range(0, 22, 3):
            for checkpoints in range(5):
                copy.deepcopy(driver).do("probe", units, checkpoints)


@pytest.mark.parametrize("name", NAMES)
def test_what_fits_an_empty_budget_could_fit_a_cached_one(name: str) -> None:
    shadow = Shadow(World(name, pages=20, units=20, states=6).build())
    for seed in range(12):
        serve(shadow, T(seed, 9 + seed))
    for units in range(25):
        for checkpoints in range(3):
            need = Need(units, checkpoints)
            fits, could = shadow.organization.capacity_fits(need), shadow.organization.could_fit(need)
            # Several states at once may open a slab each: they are asked for one by one.
            assert could == fits or (name == "S2" and checkpoints > 1 and not could)


# -- the source's arithmetic ----------------------------------------------------------------


def kib(organization: Organization, need: Need) -> float:
    assert isinstance(organization, SharedPool)
    return organization.pages_for(need) * organization.page_bytes / KIB


def test_geometry_of_falcon_h1_7b() -> None:
    pages = PageGeometry(FALCON_7B, block_bytes(FALCON_7B, 512))
    assert (pages.page_bytes, pages.members) == (512 * KIB, 3)
    assert FALCON_7B.checkpoint_bytes == 1_594_368 == 1557 * KIB
    assert conv_slot_bytes(FALCON_7B) == 32 * KIB and conv_slot_bytes(FALCON_7B, "tight") == 21 * KIB
    assert PackedConv(FALCON_7B, 512, BIG).slabs.slots_per_page == 16
    assert PackedConv(FALCON_7B, 512, BIG, conv_slots="tight").slabs.slots_per_page == 24
    assert CoarsePages(FALCON_7B, 512, BIG).slots_per_unit == 1557
    assert native_grid(FALCON_7B, 16, 256) == 1792


def test_allocation_arithmetic_of_the_source() -> None:
    model, need = FALCON_7B, Need(units=16, checkpoints=4)
    coarse, paged, packed = (kind(model, 512, BIG) for kind in (CoarsePages, PagedCheckpoints, PackedConv))
    assert [kib(o, need) for o in (coarse, paged, packed)] == [31_140, 16_384, 14_848]
    assert coarse.page_bytes / KIB - 512 == 1045 and 16 * 1045 == 16_720
    assert kib(paged, Need(0, 4)) - 4 * 1557 == 1964
    for blocks in range(0, 40, 3):
        for states in range(0, 40, 3):
            need = Need(blocks, states)
            slabs = ceil_div(states, 16)
            assert kib(coarse, need) == 1557 * (blocks + states)
            assert kib(paged, need) == 512 * blocks + 2048 * states
            assert kib(packed, need) == 512 * blocks + 1536 * states + 512 * slabs
            assert kib(coarse, need) - kib(paged, need) == 1045 * blocks - 491 * states
            assert kib(paged, need) - kib(packed, need) == 512 * (states - slabs)


@pytest.mark.parametrize(("state", "pages", "extra", "saved"), [(1024, 2, 0, 512), (2500, 5, 60, 1988)])
def test_general_form_of_the_arithmetic(state: int, pages: int, extra: int, saved: int) -> None:
    """Checkpoints of C KiB and blocks of 512 KiB; conv counts as part of the state here."""
    model = ModelGeometry((0,), (0,), KIB, state, KIB, 0)
    coarse, paged = CoarsePages(model, 512, BIG), PagedCheckpoints(model, 512, BIG)
    assert kib(paged, Need(0, 1)) == pages * 512 == state + extra
    assert kib(coarse, Need(1, 0)) - kib(paged, Need(1, 0)) == saved


def test_packing_is_refused_when_a_slot_is_more_than_a_quarter_of_a_page() -> None:
    model = replace(FALCON_7B, conv_bytes=200 * KIB)
    with pytest.raises(GeometryError, match=r"slot of 262144 .* a page of 524288 .* 1024 or larger"):
        PackedConv(model, 512, BIG)
    assert PackedConv(model, 1024, BIG).slabs.slots_per_page == 4
    assert PackedConv(replace(FALCON_7B, conv_bytes=128 * KIB), 512, BIG).slabs.slots_per_page == 4


@pytest.mark.parametrize(
    ("model", "grid", "kind", "slots"),
    [
        (FALCON_7B, 512, "pow2", 16),
        (FALCON_7B, 512, "tight", 24),
        (FALCON_7B, 500, "pow2", 15),
        (FALCON_7B, 500, "tight", 23),
        (replace(SMALL, conv_bytes=12), 9, "pow2", 4),
    ],
)
def test_every_line_lies_in_a_slot_of_its_own_page(
    model: ModelGeometry, grid: int, kind: str, slots: int
) -> None:
    """Where a slot does not divide its page as well."""
    page = block_bytes(model, grid)
    pool = PackedConv(model, grid, 300 * page * model.arenas, conv_slots=kind)
    layout, taken = pool.layout(), []
    while (checkpoint := pool.allocate_checkpoint()) is not None:
        taken.append(checkpoint)
    assert pool.slabs.slots_per_page == slots and pool.slabs.slabs == ceil_div(len(taken), slots) > 3
    begins = {}
    for checkpoint in taken:
        first = checkpoint.line * layout.line_bytes + layout.line_offset
        assert 0 < checkpoint.line < layout.lines
        assert checkpoint.pages[-1] * page <= first <= (checkpoint.pages[-1] + 1) * page - pool.slot_bytes
        begins[first] = checkpoint
    assert len(begins) == len(taken)
    assert all(b - a >= pool.slot_bytes for a, b in zip(sorted(begins), sorted(begins)[1:], strict=False))
    assert (layout.lines - 1) * layout.line_bytes + pool.slot_bytes <= layout.state_pages * page
    for checkpoint in taken:
        pool.release(checkpoint)
    pool.check_integrity()
    assert pool.slabs.slabs == 0


def test_d0_is_feasible_only_when_both_sides_are() -> None:
    one_layer = replace(FALCON_7B, attention_layers=(0,), recurrent_layers=(0,))
    pools = DualPools(one_layer, 1792, 200 * 1557 * KIB)
    units, states = pools.unit_pool.size, pools.state_pool.size
    assert pools.capacity_fits(Need(units, states))
    assert not pools.capacity_fits(Need(units + 1, 0)) and not pools.capacity_fits(Need(0, states + 1))
    assert units == 100 * 1557 // 16 - 1 and states == 100 - 1


def test_equal_budgets_become_the_organizations_own_whole_pieces() -> None:
    budget = 300 * 512 * KIB * FALCON_7B.arenas
    for name in NAMES:
        organization = make_organization(name, FALCON_7B, 1792 if name == "D0" else 512, budget)
        assert 0 <= budget - organization.used_bytes() < 2 * 1557 * KIB * FALCON_7B.arenas
    assert make_organization("S2", FALCON_7B, 512, budget).unit_pool.size == 299
