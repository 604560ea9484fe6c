"""A fifth organization from outside the package, by public names alone (CONTRIBUTING, How to add)."""

import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

from bench import simulate as bench
from bench.falcon import geometry
from sglang_hybrid.cli.main import main
from sglang_hybrid.cli.plan import machine_of
from sglang_hybrid.engine.args import organization_class
from sglang_hybrid.geometry import GeometryError, ModelGeometry, PageGeometry, block_bytes
from sglang_hybrid.ledger import Cost, Demand, MemberAccount, Waste
from sglang_hybrid.planner.candidates import choices
from sglang_hybrid.pools.factory import ORGANIZATIONS, make_organization, register
from sglang_hybrid.pools.organization import Checkpoint
from sglang_hybrid.pools.shared import SharedPool
from sglang_hybrid.radix.policy import DEFAULT_POLICY
from tests.core.driver import Driver
from tests.core.worlds import SMALL, World


def spare_bytes(pages: PageGeometry) -> int:
    """Of the last member page.  Raises `GeometryError` when the conv line does not fit there."""
    model, line = pages.model, pages.model.conv_line_bytes
    rows = model.stripes * model.ssm_rows - (pages.members - 1) * pages.rows_per_page
    spare = pages.page_bytes - rows * model.ssm_row_bytes
    if not pages.members or spare < line:
        raise GeometryError(f"S3 finds {spare} bytes for a conv line of {line}: use another --hybrid-grid")
    return spare


class TailAccount(MemberAccount):
    def __init__(self, model: ModelGeometry, grid: int) -> None:
        super().__init__(model, grid)
        spare_bytes(self.pages)

    def state_pages(self, checkpoints: int) -> int:
        return checkpoints * self.members

    def cost(self, demand: Demand) -> Cost:
        unused = self.members * self.page_bytes - self.model.checkpoint_bytes
        return self.priced(demand, Waste(0, self.tail(demand), demand.checkpoints * unused))


class ConvInTail(SharedPool):
    """S3: as S1, with the conv line at the end of the last member page instead of a page of its own."""

    name = "S3"
    summary = "like S1, with the conv state behind the last rows"
    prices = TailAccount

    def __init__(self, model: ModelGeometry, grid: int, budget_bytes: int) -> None:
        pages = PageGeometry(model, block_bytes(model, grid))
        spare_bytes(pages)
        self.members = pages.members
        super().__init__(model, grid, budget_bytes, pages.page_bytes)

    def unit_equivalent(self, checkpoints: int) -> int:
        return checkpoints * self.members

    def take_checkpoint(self) -> Checkpoint | None:
        pages = self.unit_pool.allocate(self.members)
        return None if pages is None else Checkpoint(tuple(pages), pages[-1], tuple(pages))

    def conv_lines(self, pages: int) -> tuple[int, int, int]:
        return pages, self.page_bytes, self.page_bytes - self.model.conv_line_bytes


@pytest.fixture(autouse=True)
def fifth() -> Iterator[None]:
    with patch.dict(ORGANIZATIONS):
        register(ConvInTail)
        yield


def test_random_histories_keep_every_rule() -> None:
    done: Counter[str] = Counter()
    for seed in range(12):
        chance = random.Random(seed)
        model = replace(SMALL, ssm_rows=chance.choice([2, 5, 6, 7]))
        driver = Driver(World("S3", pages=chance.choice([8, 12, 20]), model=model).build(), DEFAULT_POLICY)
        for _ in range(400):
            driver.step(chance)
        driver.drain()
        done += driver.done + driver.reached()
    assert done["hits"] and done["forks"] and done["preempt"] and done["checkpoints"], done


def test_a_trace_is_served_and_more_of_it_reused(capsys: pytest.CaptureFixture[str]) -> None:
    """For heads that leave room in their last page at the trace's grid of 512."""
    argv = ["--pages", "40", "--requests", "400", "--organization", "S1,S3", "--json"]
    model = replace(geometry(), ssm_rows=2944)
    with patch("sys.argv", ["simulate", *argv]), patch("bench.falcon.geometry", return_value=model):
        bench.main()
    paged, tail = json.loads(capsys.readouterr().out)["rows"]
    assert (tail["organization"], tail["served"] + tail["refused"]) == ("S3", 400)
    assert tail["adopted_tokens"] > paged["adopted_tokens"] > 0


def test_it_lies_where_its_layout_says() -> None:
    """A page a checkpoint less than S1, and the line ends with the page."""
    model, grid = geometry(), 576
    budget = 300 * block_bytes(model, grid) * model.arenas
    tail, paged = (make_organization(name, model, grid, budget) for name in ("S3", "S1"))
    assert (tail.checkpoint_place(), paged.checkpoint_place()) == ("3 pages", "4 pages")
    checkpoint, layout = tail.allocate_checkpoint(), tail.layout()
    assert checkpoint is not None
    begin = checkpoint.line * layout.line_bytes + layout.line_offset
    last = checkpoint.pages[-1] * layout.state_page_bytes
    rows = model.stripes * model.ssm_rows * model.ssm_row_bytes - 2 * layout.state_page_bytes
    assert last + rows <= begin and begin + model.conv_line_bytes == last + layout.state_page_bytes


def test_ledger_planner_and_rules_know_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ledger", "falcon-h1-7b", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["organizations"]["S3"]
    assert (found["grid"], found["refused"]) == (576, None)
    assert found["kib_total"] == sum(found[f"{kind}_kib"] for kind in ("attention", "state")) * 44
    machine, _ = machine_of("falcon-h1-7b", memory="40GiB")
    assert {one.grid for one in choices(machine).candidates if one.memory == "S3"} == {576, 1024}
    assert organization_class("S3") is ConvInTail


BY_NAME = r'([=!]= |\b(if|and|or) [\w.]+ in \()"(S0|S1|S2|D0)"'
CLASSES = ("SharedPool", *(kind.__name__ for kind in ORGANIZATIONS.values()))
BY_CLASS = rf"isinstance\([^)]*\b({'|'.join(CLASSES)})\b"


def test_nobody_asks_for_an_organization_by_name_or_class() -> None:
    package = Path(bench.__file__).parents[1] / "sglang_hybrid"
    for path in package.rglob("*.py"):
        asked = re.search(f"{BY_NAME}|{BY_CLASS}", path.read_text())
        assert asked is None, f"{path.name} asks {asked and asked[0]}"
