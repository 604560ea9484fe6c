"""The ledger: docs/paper.md's figures, and the pools' own arithmetic."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_hybrid.cli import main as cli
from sglang_hybrid.cli.ledger_table import number
from sglang_hybrid.geometry import (
    CONV_SLOTS,
    DEFAULT_GRID,
    GRID_STEP,
    GeometryError,
    ModelGeometry,
    conv_slot_bytes,
)
from sglang_hybrid.ledger import Demand, DualAccount, PackedAccount, PagedAccount, break_even
from sglang_hybrid.models import HybridShape, hybrid_shape
from sglang_hybrid.models.public import PUBLIC
from sglang_hybrid.pools.dual import DualPools
from sglang_hybrid.pools.factory import ORGANIZATIONS, default_grid, make_organization, smallest_budget
from sglang_hybrid.pools.organization import Need

KIB = 1024
BF16 = {"kv_bytes": 2, "ssm_bytes": 2, "conv_bytes": 2}


def shape(name: str) -> HybridShape:
    return hybrid_shape(PUBLIC[name].config, name)


def falcon() -> ModelGeometry:
    """The paper's model."""
    return shape("falcon-h1-7b").geometry(1, **BF16)


def checkpoint_of(ssm_kib: int, conv_kib: int) -> ModelGeometry:
    """One layer with a KV row of 1 KiB and a state of this size, in rows of 1 KiB."""
    return ModelGeometry((0,), (0,), KIB, ssm_kib, KIB, conv_kib * KIB)


def ask(*args: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The answer of `sglang-hybrid ledger ARGS --json`."""
    assert cli.main(["ledger", *args, "--json"]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


# -- the source's figures ---------------------------------------------------------------------


def test_published_example(capsys: pytest.CaptureFixture[str]) -> None:
    answer = ask("falcon-h1-7b", "--attention-blocks", "16", "--checkpoints", "4", capsys=capsys)
    geometry, costs = answer["geometry"], answer["organizations"]
    assert (geometry["block_kib"], geometry["ssm_kib"], geometry["conv_kib"]) == (512, 1536, 21)
    assert (geometry["checkpoint_kib"], geometry["checkpoint_bytes"]) == (1557, 1_594_368)
    assert (geometry["members"], geometry["native_grid"]) == (3, 1792)
    assert {name: costs[name]["kib"] for name in ORGANIZATIONS} == {
        "S0": 31_140,
        "S1": 16_384,
        "S2": 14_848,
        "D0": 14_420,
    }
    assert {name: costs[name]["kib_total"] for name in ("S0", "S2")} == {"S0": 31_140 * 44, "S2": 14_848 * 44}
    assert costs["S0"]["page_kib"] == 1557
    assert costs["S0"]["waste"]["attention_padding"] == costs["S0"]["waste"]["total"] == 16_720
    assert costs["S1"]["waste"]["checkpoint_rounding"] == costs["S1"]["waste"]["total"] == 1964
    assert (costs["S2"]["slabs"], costs["S2"]["waste"]["total"]) == (1, 512 - 4 * 21)
    assert (costs["D0"]["attention_kib"], costs["D0"]["state_kib"]) == (8192, 4 * 1557)
    even = answer["break_even"]
    assert (even["fraction"], even["s1_saves_kib"]) == ("491/1045", 14_756)
    assert even["ratio"] == pytest.approx(0.47, abs=0.0005)
    assert answer["packing"]["pays"]
    slots = {key: answer["packing"][key] for key in ("power_of_two", "tight")}
    assert {key: (slot["slot_kib"], slot["slots_per_page"]) for key, slot in slots.items()} == {
        "power_of_two": (32, 16),
        "tight": (21, 24),
    }


def test_tight_slots(capsys: pytest.CaptureFixture[str]) -> None:
    """48 lines fill two slabs of 24 slots, or three of 16."""
    for kind, slabs in (("pow2", 3), ("tight", 2)):
        answer = ask("falcon-h1-7b", "--checkpoints", "48", "--conv-slots", kind, capsys=capsys)
        packed = answer["organizations"]["S2"]
        assert (packed["slabs"], packed["state_kib"]) == (slabs, 48 * 1536 + slabs * 512)


@pytest.mark.parametrize("blocks", [0, 1, 7, 16, 1000])
@pytest.mark.parametrize("checkpoints", [0, 1, 2, 16, 17, 33])
def test_allocation_arithmetic(blocks: int, checkpoints: int) -> None:
    demand, slabs = Demand.of_blocks(blocks, checkpoints, 512), -(-checkpoints // 16)
    accounts = {name: kind.prices(falcon(), 512) for name, kind in ORGANIZATIONS.items()}
    cost = {name: account.cost(demand).total // KIB for name, account in accounts.items()}
    assert cost == {
        "S0": 1557 * (blocks + checkpoints),
        "S1": 512 * blocks + 2048 * checkpoints,
        "S2": 512 * blocks + 1536 * checkpoints + 512 * slabs,
        "D0": 16 * 32 * blocks + 1557 * checkpoints,
    }
    even = break_even(falcon(), 512)
    saving = even.saved_per_block * blocks - even.extra_per_checkpoint * checkpoints
    assert saving == (cost["S0"] - cost["S1"]) * KIB
    assert cost["S1"] - cost["S2"] == 512 * (checkpoints - slabs)


@pytest.mark.parametrize(
    ("checkpoint", "pages", "extra", "saved"),
    [(1024, 2, 0, 512), (2500, 5, 60, 1988), (1536, 3, 0, 1024), (512, 1, 0, 0), (200, 1, 0, 0)],
)
def test_generalised_checkpoint_size(checkpoint: int, pages: int, extra: int, saved: int) -> None:
    """(C - A) x_A - (ceil(C / A) A - C) x_R, where C is at least a page; A = 512."""
    model = checkpoint_of(checkpoint, 0)
    assert PagedAccount(model, 512).state_pages(1) == pages
    even = break_even(model, 512)
    assert (even.saved_per_block, even.extra_per_checkpoint) == (saved * KIB, extra * KIB)
    assert even.ratio == (extra / saved if saved else None)
    pool = make_organization("S1", model, 512, 64 * 512 * KIB)
    checkpoint_pages = pool.allocate_checkpoint()
    assert checkpoint_pages is not None and len(checkpoint_pages.pages) == pages


def test_a_conv_state_of_200_kib_is_not_packed_into_pages_of_512() -> None:
    model = checkpoint_of(1536, 200)
    assert conv_slot_bytes(model) == 256 * KIB
    assert PagedAccount(model, 512).state_pages(1) == 4
    for kind in CONV_SLOTS:
        with pytest.raises(GeometryError, match=r"conv line of 204800 bytes.*use --hybrid-mem S1"):
            PackedAccount(model, 512, conv_slots=kind)
    # The larger page that the message offers packs it.
    with pytest.raises(GeometryError, match=r"--hybrid-grid 1024 or larger"):
        PackedAccount(model, 1023)
    assert PackedAccount(model, 1024).slots == 4


def test_packing_does_not_pay_for_one_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    one, two = (ask("falcon-h1-7b", "--checkpoints", n, capsys=capsys)["packing"] for n in "12")
    assert (one["pays"], one["power_of_two"]["saved_kib"]) == (False, 0)
    assert (two["pays"], two["power_of_two"]["saved_kib"]) == (True, 512)


def test_packing_says_why_it_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    answer = ask("kimi-linear-48b", "--grid", "512", capsys=capsys)
    assert not answer["packing"]["pays"]
    assert answer["organizations"]["S2"]["kib"] is None
    for said in (answer["organizations"]["S2"], answer["packing"]["power_of_two"]):
        assert "conv line of 221184 bytes: its slot of 262144" in said["refused"]


def test_a_default_grid_is_a_legal_one(capsys: pytest.CaptureFixture[str]) -> None:
    """Two KV heads make pages of 512 KiB at grid 512, where a slot of 256 KiB is not packed."""
    name = "nemotron-3-nano-30b"
    costs = ask(name, capsys=capsys)["organizations"]
    assert {key: costs[key]["grid"] for key in ("S0", "S1", "S2")} == {"S0": 512, "S1": 512, "S2": 1024}
    # The same tokens in blocks of 1024.
    assert costs["S2"]["attention_kib"] == costs["S1"]["attention_kib"] == 16 * 512
    assert ask(name, "--conv-slots", "tight", capsys=capsys)["organizations"]["S2"]["grid"] == 576


@pytest.mark.parametrize("name", PUBLIC)
def test_a_default_grid_is_the_smallest_legal_one(name: str) -> None:
    for tp in (1, 2, 4):
        if not shape(name).divides(tp):
            continue
        model = shape(name).geometry(tp, **BF16)
        for organization in ("S0", "S1", "S2"):
            grid = default_grid(organization, model, shape(name).chunk)
            if organization == "S2" and not model.conv_bytes:
                with pytest.raises(GeometryError, match="this model keeps none: use --hybrid-mem S1"):
                    smallest_budget(organization, model, grid)
                continue
            smallest_budget(organization, model, grid)
            for smaller in range(DEFAULT_GRID, grid, GRID_STEP):
                with pytest.raises(GeometryError, match="--hybrid-grid"):
                    smallest_budget(organization, model, smaller)


# -- the pools' arithmetic --------------------------------------------------------------------


@pytest.mark.parametrize("organization", ORGANIZATIONS)
@pytest.mark.parametrize("name", PUBLIC)
def test_costs_are_what_the_pool_takes(name: str, organization: str) -> None:
    model = shape(name).geometry(1, **BF16)
    account, budget = ORGANIZATIONS[organization].prices, 3 * 10**10
    try:
        pool = make_organization(organization, model, 512, budget)
    except GeometryError as error:
        with pytest.raises(GeometryError) as said:
            account(model, 512)
        assert str(said.value) == str(error)
        return
    for blocks, checkpoints in ((16, 4), (3, 0), (0, 17)):
        demand = Demand.of_blocks(blocks, checkpoints, 512)
        pool.reset()
        assert pool.allocate_units(blocks * pool.units_per_block) is not None
        assert None not in [pool.allocate_checkpoint() for _ in range(checkpoints)]
        layout = pool.layout()
        if layout.shared:
            taken = pool.usage().pages_held * layout.kv_page_bytes
        else:
            taken = (pool.unit_pool.size - pool.unit_pool.free) * layout.kv_page_bytes
            taken += (pool.state_pool.size - pool.state_pool.free) * layout.state_page_bytes
        cost = account(model, 512).cost(demand)
        assert cost.total == taken
        assert cost.total == cost.useful + sum(cost.waste)
        assert min(cost.waste) >= 0


@pytest.mark.parametrize("organization", ORGANIZATIONS)
@pytest.mark.parametrize("name", ["falcon-h1-7b", "qwen3-next-80b", "nemotron-nano-9b-v2", "lfm2-1.2b"])
@pytest.mark.parametrize("budget", [10**9, 4 * 2**30 + 12_345, 3 * 10**10])
def test_a_budget_becomes_what_the_pool_makes_of_it(name: str, organization: str, budget: int) -> None:
    model = shape(name).geometry(1, **BF16)
    demand = Demand.of_blocks(16, 4, 512)
    capacity = ORGANIZATIONS[organization].prices(model, 512).capacity(demand, budget)
    pool = make_organization(organization, model, 512, budget)
    assert (capacity.used_bytes, capacity.pages) == (pool.used_bytes(), pool.unit_pool.size)
    assert capacity.lost_bytes == budget - pool.used_bytes() >= 0
    layout = pool.layout()
    sinks = layout.kv_page_bytes + (0 if layout.shared else layout.state_page_bytes)
    assert capacity.sink_bytes == model.arenas * sinks

    def fits(times: int) -> bool:
        return pool.capacity_fits(Need(times * 16 * pool.units_per_block, times * 4))

    assert capacity.fits == fits(1)
    assert fits(capacity.holds) and not fits(capacity.holds + 1)


@pytest.mark.parametrize("organization", ORGANIZATIONS)
def test_a_budget_that_starts_no_pool_holds_nothing(organization: str) -> None:
    """Beside its sinks a pool takes a block, one more unit and two checkpoints to start."""
    demand, started = Demand.of_blocks(0, 1, 512), []
    for arena_kib in range(2000, 12_000, 16):
        budget = 44 * arena_kib * KIB
        try:
            fits = make_organization(organization, falcon(), 512, budget).capacity_fits(Need(0, 1))
        except GeometryError:
            fits = False
        assert ORGANIZATIONS[organization].prices(falcon(), 512).capacity(demand, budget).fits == fits
        started += [arena_kib] if fits else []
    # D0: what half of the arena has beside whole units goes to the state, 291 x 16 + 3 x 1557 and 1 more.
    least = {"S0": 5 * 1557, "S1": 11 * 512, "S2": 10 * 512, "D0": 9328}[organization]
    assert started[0] == -(-least // 16) * 16


def test_d0_starts_with_a_block_and_a_unit() -> None:
    budget, demand = 44 * 10_000 * KIB, Demand.of_blocks(0, 1, 512)
    for units, fits in ((33, False), (34, True)):
        share = (units * 16 + 8) / 10_000
        assert DualAccount(falcon(), 512, attention_share=share).capacity(demand, budget).fits is fits
        if fits:
            assert DualPools(falcon(), 512, budget, attention_share=share).capacity_fits(Need(0, 1))
        else:
            with pytest.raises(GeometryError, match="33 and 2"):
                DualPools(falcon(), 512, budget, attention_share=share)


def test_d0_needs_both_sides_at_once() -> None:
    """16 x_A16 <= M_A and 1557 x_R <= M_R, beside a sink unit and a sink state."""
    demand = Demand.of_blocks(16, 4, 512)
    attention, state = (512 + 1) * 16 * KIB, (4 + 1) * 1557 * KIB
    budget = 44 * (attention + state)
    share = attention / (attention + state)
    exact = DualAccount(falcon(), 1792, attention_share=share + 1e-9)
    assert exact.capacity(demand, budget).fits
    assert DualPools(falcon(), 1792, budget, attention_share=share + 1e-9).capacity_fits(Need(512, 4))
    for other in (share - 0.002, share + 0.002):
        assert not DualAccount(falcon(), 1792, attention_share=other).capacity(demand, budget).fits
    assert not exact.capacity(demand, budget - 44).fits


def test_d0_feasible_shares_are_the_ones_that_fit(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("falcon-h1-7b", "--attention-blocks", "100", "--checkpoints", "4", "--budget", "3G")
    part = ask(*asked, capsys=capsys)["organizations"]["D0"]["budget"]
    assert not part["feasible"]
    least, largest = part["feasible_shares"]
    for share, feasible in ((least - 0.001, False), (least, True), (largest, True), (largest + 0.001, False)):
        answer = ask(*asked, "--attention-share", f"{share:.3f}", capsys=capsys)
        assert answer["organizations"]["D0"]["budget"]["feasible"] is feasible
    tight = ask("falcon-h1-7b", "--budget", "500M", capsys=capsys)["organizations"]["D0"]["budget"]
    assert tight["feasible_shares"] is None


def test_lost_budget_is_a_kind_of_waste(capsys: pytest.CaptureFixture[str]) -> None:
    budget = 44 * 10_000 * KIB
    costs = ask("falcon-h1-7b", "--budget", str(budget), capsys=capsys)["organizations"]
    lost = {name: costs[name]["waste"]["lost_budget"] for name in ("S0", "S1")}
    assert lost == {"S0": 10_000 - 6 * 1557, "S1": 10_000 - 19 * 512}


# -- options ----------------------------------------------------------------------------------


def test_tokens_set_blocks_and_checkpoints(capsys: pytest.CaptureFixture[str]) -> None:
    answer = ask("falcon-h1-7b", "--tokens", "8000", capsys=capsys)
    assert answer["demand"] == {"tokens": 8000, "attention_blocks": 16, "checkpoints": 15}
    costs = answer["organizations"]
    assert costs["S1"]["kib"] == 16 * 512 + 15 * 2048
    assert costs["S1"]["waste"]["attention_tail"] == 192
    # D0 has its own grid: 8000 // 1792 boundaries, 500 units of 16 tokens.
    assert (costs["D0"]["checkpoints"], costs["D0"]["kib"]) == (4, 8000 + 4 * 1557)
    short = ask("falcon-h1-7b", "--tokens", "100", capsys=capsys)
    assert short["demand"] == {"tokens": 100, "attention_blocks": 1, "checkpoints": 0}
    given = ask("falcon-h1-7b", "--tokens", "8000", "--checkpoints", "2", capsys=capsys)
    assert given["organizations"]["D0"]["checkpoints"] == given["demand"]["checkpoints"] == 2


def test_a_grid_is_everybodys(capsys: pytest.CaptureFixture[str]) -> None:
    answer = ask("falcon-h1-7b", "--tokens", "4096", "--grid", "256", capsys=capsys)
    costs = answer["organizations"]
    assert {name: costs[name]["grid"] for name in ORGANIZATIONS} == dict.fromkeys(ORGANIZATIONS, 256)
    assert costs["S1"]["kib"] == 16 * 256 + 16 * (6 + 1) * 256
    assert costs["D0"]["kib"] == 4096 + 16 * 1557
    odd = ask("falcon-h1-7b", "--grid", "500", capsys=capsys)["organizations"]["D0"]
    assert odd["refused"].endswith("use 512")


@pytest.mark.parametrize(
    ("args", "row_bytes", "ssm", "conv"),
    [
        (("--tp", "2"), 512, 768, 12),  # one group is copied to each rank: (3072 / 2 + 2 x 256) x 3 x 2
        (("--tp", "4"), 512, 384, 7.5),  # and each rank keeps at least one KV head
        (("--ssm-dtype", "fp32"), 1024, 3072, 21),
        (("--kv-dtype", "fp8"), 512, 1536, 21),
        (("--kv-dtype", "float32", "--ssm-dtype", "float16"), 2048, 1536, 21),
    ],
)
def test_ranks_and_dtypes(
    args: tuple[str, ...], row_bytes: int, ssm: int, conv: float, capsys: pytest.CaptureFixture[str]
) -> None:
    geometry = ask("falcon-h1-7b", *args, capsys=capsys)["geometry"]
    assert geometry["kv_row_kib"] * KIB == row_bytes
    assert (geometry["ssm_kib"], geometry["conv_kib"]) == (ssm, conv)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("falcon-9",), ("falcon-9", "falcon-h1-7b")),
        (("falcon-h1-7b", "--tp", "5"), ("--tp 5", "1, 2, 4, 6, 12")),
        (("falcon-h1-7b", "--tp", "0"), ("--tp 0", "1 or more")),
        (("falcon-h1-7b", "--grid", "1.5"), ("--grid 1.5", "1 or more")),
        (("falcon-h1-7b", "--attention-blocks", "-1"), ("--attention-blocks -1", "0 or more")),
        (("falcon-h1-7b", "--checkpoints", ""), ("--checkpoints ", "0 or more")),
        (("falcon-h1-7b", "--attention-blocks", "0", "--checkpoints", "0"), ("--checkpoints 0", "1 or more")),
        (("falcon-h1-7b", "--tokens", "9", "--attention-blocks", "1"), ("--tokens 9", "one of them")),
        (("falcon-h1-7b", "--ssm-dtype", "fp8"), ("--ssm-dtype fp8", "bf16")),
        (("falcon-h1-7b", "--kv-dtype", "int4"), ("--kv-dtype int4", "fp8")),
        (("falcon-h1-7b", "--budget", "8Q"), ("--budget 8Q", "8G")),
        (("falcon-h1-7b", "--attention-share", "1"), ("--attention-share 1", "0.5")),
    ],
)
def test_bad_input_is_one_sentence(
    args: tuple[str, ...], words: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["ledger", *args]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert all(word in err for word in words), err


@pytest.mark.parametrize("name", PUBLIC)
def test_the_table_has_the_figures(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    answer = ask(name, "--budget", "8G", capsys=capsys)
    assert cli.main(["ledger", name, "--budget", "8G"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for organization, cost in answer["organizations"].items():
        line = next(line for line in lines if line.startswith(f"  {organization} "))
        if cost["refused"]:
            assert line == f"  {organization} refused: {cost['refused']}"
        else:
            assert number(cost["kib"]) in line.split() and number(cost["page_kib"]) in line.split()


def test_the_table_reads(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ledger", "falcon-h1-7b", "--budget", "6G"]) == 0
    out = capsys.readouterr().out
    rows = [" ".join(line.split()) for line in out.splitlines()]
    assert "S0 512 4 1,557 24,912 6,228 31,140 1,338.0 46% 16,720 0 0 0" in rows
    assert "S2 512 4 512 8,192 6,656 14,848 638.0 97% 0 0 0 428" in rows
    assert "S2 5,997,854,720 2,145,280 23,068,672 259 9 times" in rows
    for sentence in (
        "S1 is cheaper than S0 above 491/1045 = 0.470 blocks a checkpoint; here by 14,756 KiB",
        "conv line of 21 KiB: packing pays",
        "8,192 KiB for attention and 6,228 for state, both at once: feasible at an attention share of 0.5",
    ):
        assert sentence in out


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (PUBLIC["lfm2-1.2b"].config, "S1 costs what S0 costs"),
        (
            PUBLIC["falcon-h1-7b"].config | {"mamba_d_ssm": 128, "mamba_n_heads": 1},
            "S1 is never cheaper than S0, a checkpoint is smaller than a block; here it is dearer by 2,048",
        ),
        (PUBLIC["falcon-h1-7b"].config, "S1 is cheaper than S0 above 491/1045"),
    ],
)
def test_break_even_in_words(
    config: dict[str, Any], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert cli.main(["ledger", str(tmp_path)]) == 0
    assert sentence in capsys.readouterr().out


def test_it_needs_neither_torch_nor_sglang() -> None:
    code = (
        "import sys; from sglang_hybrid.cli.main import main; main(['ledger', 'falcon-h1-7b']);"
        "print({'torch', 'sglang', 'transformers', 'numpy'} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr == "set()\n"
