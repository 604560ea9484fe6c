"""Reuse depth: R_max, J_adopt, Gap_R and their cause, against workloads that know them by construction.

`Oracle` keeps whole texts and compares them token by token; of the tree it sees only which boundaries
have a checkpoint now.  It shares nothing with the fingerprints that it judges.
"""

import random
from array import array
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from unittest.mock import patch

import pytest

from sglang_hybrid.radix.history import (
    FINGERPRINTS_PER_BLOCK,
    LEAST_BLOCKS,
    Cause,
    History,
    Recent,
    Reuse,
    Trail,
)
from sglang_hybrid.radix.interfaces import Placement
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
    placed: Callable[[int], bool] = lambda block: True
    """Whether the placement wants a checkpoint there."""

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
            boundary = key, tuple(prompt[:r_max])
            if self.taken[boundary]:
                cause = Cause.EVICTED
            else:
                cause = Cause.REFUSED if self.placed(r_max // GRID) else Cause.NEVER_TAKEN
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


def run(shadow: Shadow, oracle: Oracle, key: Hashable, prompt: Sequence[int], new: int = 1) -> Reuse:
    """Serve one request, and compare what its admission found."""
    expected = oracle.expect(key, prompt)
    request = shadow.submit(prompt, new, key)
    assert request is not None
    prefill(shadow, request)
    while request in shadow.running:
        assert shadow.prepare_decode([request]) == [request]
        shadow.launch()
        shadow.process()
    (found,) = request.reuses
    assert found == expected, f"{len(prompt)} tokens under {key}"
    assert found.j_adopt == request.hit
    oracle.commit(key, request)
    return found


class Generator:
    """Prompts that repeat, go on from, leave or join earlier ones, under the same key or another."""

    def __init__(self, seed: int, keys: Sequence[Hashable]) -> None:
        self.chance = random.Random(seed)
        self.keys = keys
        self.texts: list[tuple[Hashable, Text]] = []

    def fresh(self, most: int) -> Text:
        return tuple(self.chance.randrange(1 << 30) for _ in range(self.chance.randint(1, most)))

    def __call__(self) -> tuple[Hashable, Text]:
        draw, chance = self.chance.random(), self.chance
        key, text = chance.choice(self.texts[-12:]) if self.texts else (self.keys[0], ())
        if draw < 0.3 or not text:
            key, text = chance.choice(self.keys), self.fresh(40)
        elif draw < 0.5:
            pass  # again
        elif draw < 0.65:
            text += self.fresh(12)
        elif draw < 0.8:
            text = text[: chance.randrange(len(text))] + self.fresh(20)
        elif draw < 0.85:
            changed = self.fresh(8)
            text = changed + text[len(changed) :]
        else:
            key = chance.choice(self.keys)
        self.texts.append((key, text[:44]))
        return self.texts[-1]


def workload(name: str, requests: int, keys: Sequence[Hashable] = KEYS) -> list[Reuse]:
    """Memory for a few of them only.  Raises AssertionError at the first record that is wrong."""
    shadow = Shadow(World(name, pages=40, units=60, states=9).build())
    oracle, generate = Oracle(shadow), Generator(7, keys)
    return [run(shadow, oracle, *generate()) for _ in range(requests)]


@pytest.mark.parametrize("name", NAMES)
def test_generated_workload(name: str) -> None:
    """300 requests an organization: every record is right, and every cause that memory can have is seen."""
    causes = Counter(found.cause for found in workload(name, 300))
    wanted = {None, *Cause} - {Cause.NEVER_TAKEN}
    assert set(causes) == wanted and min(causes.values()) >= 3, causes


class Even(Placement):
    """What the oracle's `placed` says below."""

    def keeps(self, depth: int) -> bool:
        return depth % 2 == 0


def workload_under_policy(name: str, requests: int) -> list[Reuse]:
    """Memory for everything.  Raises AssertionError at the first record that is wrong."""
    shadow = Shadow(World(name, pages=9000, units=9000, states=3000).build())
    oracle = Oracle(shadow, placed=lambda block: block % 2 == 0)
    shadow.live.placement = Even(shadow.organization)
    found, generate = [], Generator(8, KEYS)
    for _ in range(requests):
        key, prompt = generate()
        found.append(run(shadow, oracle, key, prompt, new=9))
        generate.texts[-1] = key, oracle.texts[key][-1]  # the next turn sends the answer back
    return found


@pytest.mark.parametrize("name", NAMES)
def test_generated_workload_under_policy(name: str) -> None:
    """100 more: the causes of a placement."""
    causes = Counter(found.cause for found in workload_under_policy(name, 100))
    assert set(causes) == {None, *Cause} - {Cause.EVICTED, Cause.REFUSED}, causes


@pytest.mark.parametrize("name", NAMES)
def test_control_arm_without_sharing(name: str) -> None:
    """Prompts that have nothing in common read 0 everywhere, however short memory is."""
    shadow = Shadow(World(name, pages=40, units=60, states=9).build())
    for number in range(100):
        prompt = [number << 32 | position for position in range(1 + 7 * number % 40)]
        found = run(shadow, Oracle(shadow), KEYS[number % 3], prompt)
        assert found[1:] == (0, 0, 0, 0, None)


def test_isolated_requests_resume_their_own_state() -> None:
    """ISOLATE: a salt a request.  Nobody reuses another's text; a preempted one finds its own."""
    shadow = Shadow(World("S1", pages=60).build())
    prompt = list(range(22))
    for number in range(3):
        request = shadow.submit(prompt, 9, (None, f"salt {number}"))
        assert request is not None
        prefill(shadow, request)
        shadow.preempt(request)
        prefill(shadow, request)
        first, again = request.reuses
        assert first[1:4] == (0, 0, 0)
        assert first.cause == (Cause.OTHER_KEY if number else None)
        assert (again.r_max, again.j_adopt, again.gap_r) == (20, 20, 0)
        shadow.abort(request)


def test_keys_never_collide_by_concatenation() -> None:
    """(key, salt) pairs that join to one string are as many keys."""
    pairs = [("ab", None), (None, "ab"), ("a", "b"), ("b", "a"), ("", "ab"), ("ab", ""), (None, None)]
    pairs += [("None", "ab"), ("('a', 'b')", None), ("a", None), (None, "a")]
    shadow = Shadow(World("S1", pages=200).build())
    oracle, prompt = Oracle(shadow), list(range(18))
    for pair in pairs:
        assert run(shadow, oracle, pair, prompt)[1:4] == (0, 0, 0)
    for pair in pairs:
        assert run(shadow, oracle, pair, prompt)[1:4] == (16, 16, 16)


def prefill(shadow: Shadow, request: Request) -> None:
    assert shadow.prepare_extend(1 << 20) == [request]
    shadow.launch()
    shadow.process()


# -- memory of the history ------------------------------------------------------------------


def test_the_history_is_bounded_by_the_pool() -> None:
    """What is forgotten counts as never computed, unless it is still there."""
    shadow = Shadow(World("S1", pages=60).build())
    history = shadow.live.history
    assert history.most == FINGERPRINTS_PER_BLOCK * LEAST_BLOCKS
    key, first = KEYS[0], list(range(18))
    data = array("q", first).tobytes()
    run(shadow, Oracle(shadow), key, first)
    for number in range(2, 200):
        text = array("q", [number << 32 | position for position in range(400)]).tobytes()
        none = shadow.tree.match(key, text, 0)
        _, trail = history.admit(key, text, 400, 399, none)
        history.computed(trail, text, 400, ())
        assert len(history) <= history.most
    found, _ = history.admit(key, data, 18, 17, shadow.tree.match(key, data, 4))
    assert found[:4] == (18, 16, 16, 16)  # from the tree alone
    text = array("q", [2 << 32 | position for position in range(400)]).tobytes()
    found, _ = history.admit(key, text, 400, 399, shadow.tree.match(key, text, 99))
    assert found[1:] == (0, 0, 0, 0, None)


def test_what_is_asked_for_is_forgotten_last() -> None:
    shadow = Shadow(World("S1", pages=60).build())
    history, key, prompt = shadow.live.history, KEYS[0], list(range(18))
    data = array("q", prompt).tobytes()
    none = shadow.tree.match(key, data, 0)
    _, trail = history.admit(key, data, 18, 17, none)
    history.computed(trail, data, 18, ())
    for number in range(2, 100):
        text = array("q", [number << 32 | position for position in range(400)]).tobytes()
        _, trail = history.admit(key, text, 400, 399, none)
        history.computed(trail, text, 400, ())
        found, _ = history.admit(key, data, 18, 17, none)
        assert (found.r_max, found.cause) == (16, Cause.NEVER_TAKEN)


@pytest.mark.parametrize("grid", [1, 2, 7, 8, 9, 10, 16, 37])
def test_pieces_of_any_grid(grid: int) -> None:
    """Text beyond the last boundary is compared in whole pieces; the last of a block may be shorter."""
    shadow = Shadow(World("S0", pages=60, grid=grid).build())
    history, key = shadow.live.history, KEYS[0]
    text = array("q", range(3 * grid + 1))
    none = shadow.tree.match(key, b"", 0)
    _, trail = history.admit(key, text.tobytes(), 3 * grid + 1, 3 * grid, none)
    history.computed(trail, text.tobytes(), 3 * grid + 1, ())
    step = -(-grid // 8)
    for shared in range(3 * grid + 1):
        other = text[:shared] + array("q", [-1] * (3 * grid + 1 - shared))
        found, _ = history.admit(key, other.tobytes(), len(other), len(other) - 1, none)
        assert found.r_max == shared // grid * grid
        if not found.gap_r:
            assert found.lost == shared % grid // step * step


# -- faults ---------------------------------------------------------------------------------


FAULTS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "keys are joined": lambda: patch.object(Trail, "keyed", lambda self, piece: hash(self.chain[piece])),
    "what found no memory is not noted": lambda: patch.object(History, "refused", lambda self, *_: None),
    "nothing beyond the last boundary": lambda: patch.object(History, "_beyond", lambda self, *_: 0),
    "other keys are not looked at": lambda: patch.object(Recent, "get", only_keyed),
    "a fingerprint stands for its own block only": lambda: patch.object(History, "extend", unchained),
    "what is superseded is evicted": lambda: patch.object(History, "superseded", lambda self, *_: None),
    "what was taken is never lost": lambda: patch.object(History, "_fate", lambda self, *_: Cause.REFUSED),
}


def only_keyed(self: Recent, key: int) -> int | None:
    """Boundaries by text alone are the ones remembered without a fate."""
    found = self._young.get(key, self._old.get(key))
    return found or None


def unchained(self: History, trail: Trail, tokens: bytes, length: int) -> None:
    for piece in range(len(trail.chain), self._pieces_in(length) + 1):
        start, end = self._tokens(piece - 1) * 8, self._tokens(piece) * 8
        trail.chain.append(hash(tokens[start:end]))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_turns_the_workload_red(fault: str) -> None:
    with FAULTS[fault](), pytest.raises(AssertionError):
        workload("S1", 120)
        workload_under_policy("S1", 100)
