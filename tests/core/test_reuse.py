"""Reuse depth: R_max, J_adopt, Gap_R and their cause, against workloads that know them by construction.

`Oracle` keeps whole texts and compares them token by token; of the tree it sees only which boundaries
have a checkpoint now.  It shares nothing with the fingerprints that it judges.
"""

import random
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import pytest

from sglang_hybrid.radix.history import Cause, Reuse
from sglang_hybrid.radix.tree import Node
from tests.core.request import Request
from tests.core.shadow import Shadow
from tests.core.worlds import GRID, NAMES, World
from tests.support.expect import common_prefix

KEYS: tuple[Hashable, ...] = ((None, None), ("tenant", None), (None, "salt"))
Text = tuple[int, ...]


@dataclass
class Oracle:
    """What the requests so far have computed, as they were built."""

    shadow: Shadow
    texts: dict[Hashable, list[Text]] = field(default_factory=dict)
    taken: dict[tuple[Hashable, Text], bool] = field(default_factory=dict)
    """Of each boundary: whether its last computing left a checkpoint."""

    def expect(self, key: Hashable, prompt: Sequence[int]) -> Reuse:
        """What an admission of this prompt must find now."""
        usable = len(prompt) - 1
        offered, blocks = self._in_tree()
        shared = self._shared(prompt, self.texts.get(key, ()))
        r_max = min(shared, usable) // GRID * GRID
        depths = range(r_max, 0, -GRID)
        j_adopt = next((d for d in depths if (key, tuple(prompt[:d])) in offered), 0)
        attention = next((d for d in depths if (key, tuple(prompt[:d])) in blocks), 0)
        anywhere = max((self._shared(prompt, texts) for texts in self.texts.values()), default=0)
        elsewhere = min(anywhere, usable) // GRID * GRID
        if r_max > j_adopt:
            cause = Cause.EVICTED if self.taken[key, tuple(prompt[:r_max])] else Cause.REFUSED
            return Reuse(len(prompt), r_max, attention, j_adopt, r_max - j_adopt, cause)
        if elsewhere > r_max:
            return Reuse(len(prompt), r_max, attention, j_adopt, elsewhere - r_max, Cause.OTHER_KEY)
        beyond = min(shared, usable) - r_max
        cause_beyond = None if not beyond else Cause.OFF_GRID if r_max else Cause.BELOW_GRID
        return Reuse(len(prompt), r_max, attention, j_adopt, beyond, cause_beyond)

    @staticmethod
    def _shared(prompt: Sequence[int], texts: Sequence[Text]) -> int:
        return max((common_prefix(prompt, text) for text in texts), default=0)

    def commit(self, key: Hashable, request: Request) -> None:
        """The request is done: everything it computed is known from now on."""
        text = tuple(request.tokens[: request.end])
        self.texts.setdefault(key, []).append(text)
        offered, _ = self._in_tree()
        for depth in range(request.hit + GRID, len(text) + 1, GRID):
            self.taken[key, text[:depth]] = (key, text[:depth]) in offered

    def _in_tree(self) -> tuple[set[tuple[Hashable, Text]], set[tuple[Hashable, Text]]]:
        """(boundaries with a checkpoint, boundaries with KV) that are there now."""
        offered, blocks = set(), set()
        texts: dict[Node, tuple[Hashable, Text]] = {}
        for node in self.shadow.tree.nodes():  # parents first
            assert node.parent is not None
            key, above = texts.get(node.parent, (node.parent.key, ()))
            text = above + tuple(memoryview(node.key).cast("q"))
            texts[node] = (key, text)
            blocks.update((key, text[:depth]) for depth in range(len(above) + GRID, len(text) + 1, GRID))
            if node.checkpoint is not None:
                offered.add((key, text))
        return offered, blocks


def run(shadow: Shadow, oracle: Oracle, key: Hashable, prompt: Sequence[int]) -> Reuse:
    """Serve one request of one token, and compare what its admission found."""
    expected = oracle.expect(key, prompt)
    request = shadow.submit(prompt, 1, key)
    assert request is not None
    while request in shadow.waiting or request in shadow.running:
        assert shadow.prepare_extend(1 << 20) == [request]
        shadow.launch()
        shadow.process()
    (found,) = request.reuses
    assert found == expected, f"{len(prompt)} tokens under {key}"
    assert found.j_adopt == request.hit
    oracle.commit(key, request)
    return found


class Generator:
    """Prompts that repeat, go on from, or leave earlier ones, under the same key or another."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.texts: list[tuple[Hashable, Text]] = []

    def fresh(self, most: int) -> Text:
        return tuple(self.chance.randrange(1 << 30) for _ in range(self.chance.randint(1, most)))

    def __call__(self) -> tuple[Hashable, Text]:
        draw, chance = self.chance.random(), self.chance
        key, text = chance.choice(self.texts[-12:]) if self.texts else (KEYS[0], ())
        if draw < 0.3 or not text:
            key, text = chance.choice(KEYS), self.fresh(40)
        elif draw < 0.5:
            pass  # again
        elif draw < 0.65:
            text += self.fresh(12)
        elif draw < 0.85:
            text = text[: chance.randrange(len(text))] + self.fresh(20)
        else:
            key = chance.choice(KEYS)
        self.texts.append((key, text[:44]))
        return self.texts[-1]


@pytest.mark.parametrize("name", NAMES)
def test_generated_workload(name: str) -> None:
    """300 requests an organization, memory for a few of them: every record is right."""
    shadow = Shadow(World(name, pages=40, units=60, states=9).build())
    oracle, generate = Oracle(shadow), Generator(7)
    causes = Counter(run(shadow, oracle, *generate()).cause for _ in range(300))
    wanted = {None, *Cause} - {Cause.NEVER_TAKEN, Cause.NON_CANONICAL}
    assert set(causes) == wanted and min(causes.values()) >= 3, causes
