"""Policies come by their interface alone: one is from outside the package, and none has a back door."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import bench
from sglang_hybrid import radix
from sglang_hybrid.pools.organization import Checkpoint, Need
from sglang_hybrid.pools.pages import IntegrityError
from sglang_hybrid.radix.eviction import EVICTIONS, DemandEviction
from sglang_hybrid.radix.interfaces import Placement, Victim
from sglang_hybrid.radix.placement import PLACEMENTS
from tests.core.serve import checkpoint_at, node_at, scheduler, serve
from tests.support.tokens import T

TOY = '''
from sglang_hybrid.radix.eviction import ByStamp
from sglang_hybrid.radix.interfaces import Placement


class Newest(ByStamp):
    """What came last goes first."""

    def reset(self):
        super().reset()
        self.count = 0

    def offered(self, node, kind):
        self.count += 1
        self.stamp(node.checkpoint, -self.count)


class Even(Placement):
    def keeps(self, depth):
        return depth % 2 == 0
'''
DECLARED = """
[sglang_hybrid.evictions]
newest = toy:Newest
lru = toy:Newest
[sglang_hybrid.placements]
even = toy:Even
"""
SERVE = """
import json
from bench.falcon import queued
from bench.trace import Request
from sglang_hybrid.radix.eviction import EVICTIONS, Lru
from sglang_hybrid.radix.placement import PLACEMENTS
assert EVICTIONS["lru"] is Lru, "a built-in name was taken over"
requests = [Request(512 * 6 + 9, 8, (*range(10 * n, 10 * n + 6), -n)) for n in (1, 2, 3, 4, 5, 1, 2)]
found = {}
for eviction in ("demand", "newest"):
    for placement in ("all", "even"):
        scheduler = queued(requests, "S2", 70, 1, EVICTIONS[eviction], PLACEMENTS[placement])
        scheduler.run()
        scheduler.core.check_integrity()
        found[f"{eviction} {placement}"] = scheduler.outcome.adopted_tokens
        nodes = [node for node in scheduler.core.memory.tree.nodes() if node.checkpoint is not None]
        assert placement == "all" or all(node.depth % 2 == 0 for node in nodes)
print(json.dumps({"names": [list(EVICTIONS), list(PLACEMENTS)], **found}))
"""


@pytest.fixture
def outside(tmp_path: Path) -> dict[str, str]:
    """Environment in which another package with two policies is installed."""
    (tmp_path / "toy.py").write_text(TOY)
    about = tmp_path / "toy-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1\n")
    (about / "entry_points.txt").write_text(DECLARED)
    paths = (str(tmp_path), str(Path(bench.__file__).parents[1]), os.environ.get("PYTHONPATH", ""))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def test_another_package_adds_an_order_and_a_placement(outside: dict[str, str]) -> None:
    done = subprocess.run([sys.executable, "-c", SERVE], env=outside, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["names"] == [[*EVICTIONS, "newest"], [*PLACEMENTS, "even"]]
    assert found["newest all"] != found["demand all"], "the order that was named did not serve"


def test_commands_take_its_name(outside: dict[str, str]) -> None:
    plan = (sys.executable, "-m", "sglang_hybrid.cli.main", "plan", "falcon-h1-7b", "--memory", "40GiB")
    said = {
        name: subprocess.run([*plan, "--eviction", name, "--rate", "0"], env=outside, capture_output=True)
        for name in ("newest", "oldest")
    }
    assert said["oldest"].stderr.endswith(b"oldest is not supported: use one of demand, lru, newest\n")
    assert b"rate" in said["newest"].stderr, "refused for something else: the name is known"


# -- nobody goes behind the interface --------------------------------------------------------

FILES = [
    *(Path(radix.__file__).parent / name for name in ("eviction.py", "placement.py", "interfaces.py")),
    *sorted((Path(bench.__file__).parent / "policies").glob("*.py")),
    Path(bench.__file__).parent / "release_order.py",
]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_policy_reads_no_private_name_of_another(path: Path) -> None:
    tree = ast.parse(path.read_text())
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    private = [one for one in ast.walk(tree) if isinstance(one, ast.Attribute) and is_private(one.attr)]
    own |= {one.attr for one in private if isinstance(one.ctx, ast.Store)}
    for one in private:
        of_self = isinstance(one.value, ast.Name) and one.value.id == "self"
        assert of_self and one.attr in own, f"{path.name}:{one.lineno} reads {ast.unparse(one)}"
    for one in ast.walk(tree):
        if isinstance(one, ast.ImportFrom):
            assert not any(is_private(alias.name) for alias in one.names), f"{path.name}:{one.lineno}"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_lifetime_is_mechanism() -> None:
    """No policy hides in a subclass of it."""
    for path in [*Path(bench.__file__).parent.rglob("*.py"), *Path(radix.__file__).parents[1].rglob("*.py")]:
        assert not re.search(r"^class \w+\([^)]*\bLifetime\b", path.read_text(), re.MULTILINE), path


# -- a policy that is wrong ------------------------------------------------------------------


@pytest.mark.parametrize("what", ["gone", "inner", "held"])
def test_what_may_not_go_is_not_evicted(what: str) -> None:
    """A policy that names the wrong thing is an error at once: nothing of anybody's is overwritten."""
    shadow = scheduler("S1")
    serve(shadow, T(1, 17))
    checkpoint, inner = checkpoint_at(shadow, T(1, 17), 3), node_at(shadow, T(1, 17), 2)
    chosen: Victim = checkpoint
    if what == "gone":
        shadow.tree.evict_checkpoint(checkpoint)
        taken = shadow.organization.allocate_checkpoint()
        assert taken is not None and set(taken.pages) & set(checkpoint.pages), "its pages are another's"
    elif what == "inner":
        chosen = inner
    else:
        shadow.organization.hold(checkpoint)
    answers = iter([chosen])
    shadow.lifetime.policy.next = lambda relief, limit: next(answers, None)  # type: ignore[method-assign]
    with pytest.raises(IntegrityError):
        shadow.lifetime.make_room(Need(units=shadow.organization.units_free() + 1))


def test_a_placement_is_told_of_what_it_learns_from() -> None:
    told: list[tuple[str, int]] = []

    class Listening(Placement):
        def came(self, node):  # type: ignore[no-untyped-def]
            told.append(("came", node.depth))

        def published(self, prompt_end, answer_end):  # type: ignore[no-untyped-def]
            told.append(("published", answer_end.depth if answer_end else prompt_end.depth))

    shadow = scheduler("S1")
    shadow.live.placement = Listening(shadow.organization)
    serve(shadow, T(1, 13), 8)
    assert told[0] == ("published", 3) and told[-1] == ("published", 5) and "came" not in dict(told)
    told.clear()
    serve(shadow, [*T(1, 9), *T(2, 8)], 1)
    assert told[0] == ("came", 2) and told[-1] == ("published", 4)


def test_an_order_is_told_of_pins_and_retention() -> None:
    told: list[tuple[str, Checkpoint]] = []

    class Listening(DemandEviction):
        def kept(self, checkpoint):  # type: ignore[no-untyped-def]
            told.append(("kept", checkpoint))

        def let_go(self, checkpoint):  # type: ignore[no-untyped-def]
            told.append(("let go", checkpoint))

    shadow = scheduler("S1")
    serve(shadow, T(1, 13))
    shadow.lifetime.policy = Listening(shadow.tree)
    one = checkpoint_at(shadow, T(1, 13), 3)
    shadow.lifetime.pin(one)
    shadow.lifetime.retain(one)
    shadow.lifetime.unpin(one)
    shadow.lifetime.unretain(one)
    assert told == [("kept", one), ("kept", one), ("let go", one), ("let go", one)]
