"""Hits of every placement by its documented formula, over random requests one at a time."""

import random

import pytest

from sglang_hybrid.radix.placement import checkpoint_weight
from sglang_hybrid.radix.policy import Policy
from tests.core.serve import serve
from tests.core.shadow import VOCABULARY, Shadow
from tests.core.worlds import GRID, NAMES, World
from tests.support.expect import ChosenGrid, DenseGrid, sparse


def expected(name: str, shadow: Shadow) -> DenseGrid:
    if name == "all":
        return DenseGrid(GRID)
    weight = checkpoint_weight(shadow.organization)
    return ChosenGrid(GRID, keeps=sparse(weight) if name == "sparse" else lambda depth: False)


@pytest.mark.parametrize("checkpoints", ["all", "branch", "sparse"])
@pytest.mark.parametrize("name", NAMES)
def test_hits_follow_the_formula(name: str, checkpoints: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.core.serve.Audit", lambda shadow: lambda: None)  # far too many pages for it
    world = World(name, pages=4000, units=4000, states=1500)
    for seed in range(3):
        chance = random.Random(seed)
        shadow = Shadow(world.build(), Policy(checkpoints=checkpoints))
        rule = expected(checkpoints, shadow)
        known = [[chance.randrange(VOCABULARY) for _ in range(70)]]
        for _ in range(40):
            parent = chance.choice(known)
            tail = [chance.randrange(VOCABULARY) for _ in range(1 + chance.randrange(12))]
            prompt = parent[: chance.randrange(len(parent))] + tail
            chunk = chance.choice([GRID, 3 * GRID, 1 << 20])
            request = serve(shadow, prompt, 1 + chance.randrange(15), chunk=chunk)
            assert request.hit == rule.hit(prompt), (seed, prompt)
            answered = request.tokens[: request.limit]
            rule.commit(prompt, answered[len(prompt) :])
            known.append(answered)
            taken = sum(node.checkpoint is not None for node in shadow.tree.nodes())
            assert taken == rule.nodes()
