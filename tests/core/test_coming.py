"""What running prefills are about to publish, and who waits for it."""

from array import array

from sglang_hybrid.radix.coming import Coming
from sglang_hybrid.radix.history import History, Trail
from sglang_hybrid.radix.policy import Policy
from sglang_hybrid.radix.tree import GridTree
from tests.core.shadow import Shadow
from tests.core.worlds import World

GRID = 4


def text(*blocks: int) -> bytes:
    return array("q", [block for block in blocks for _ in range(GRID)]).tobytes()


class Texts:
    def __init__(self) -> None:
        self.history = History(GridTree(World("S1", pages=60, grid=GRID).build(), 8))
        self.coming = Coming(self.history)

    def trail(self, *blocks: int, namespace: str = "") -> Trail:
        trail = Trail(namespace)
        self.history.extend(trail, text(*blocks), len(blocks) * GRID)
        return trail


def test_the_deepest_shared_checkpoint_is_found() -> None:
    texts = Texts()
    coming, first = texts.coming, texts.trail(1, 2, 3, 4)
    coming.begin(first, 0, 4, {2, 4})
    assert coming.deepest(texts.trail(1, 2, 3, 4, 5), 0, 5) == 4
    assert coming.deepest(texts.trail(1, 2, 3, 9), 0, 4) == 2, "none is left at the third block"
    assert coming.deepest(texts.trail(1, 9), 0, 2) == 0
    assert coming.deepest(texts.trail(9, 2, 3, 4), 0, 4) == 0, "a fingerprint stands for all before it"
    assert coming.deepest(texts.trail(1, 2, namespace="other"), 0, 2) == 0
    assert coming.deepest(texts.trail(1, 2, 3, 4), 2, 4) == 4, "it could start from the second now"
    assert coming.deepest(texts.trail(1, 2, 3, 4), 0, 3) == 2, "the last block cannot be reused"


def test_what_is_published_or_ended_is_not_coming() -> None:
    texts = Texts()
    coming, first, second = texts.coming, texts.trail(1, 2, 3), texts.trail(1, 2, 7)
    coming.begin(first, 0, 3, {1, 2, 3})
    coming.begin(second, 1, 3, {2, 3})
    other = texts.trail(1, 2, 8)
    coming.passed(first, 1)
    assert coming.deepest(other, 1, 3) == 2
    coming.end(first)
    assert coming.deepest(other, 1, 3) == 2, "the second computes it too"
    coming.passed(second, 2)
    assert coming.deepest(other, 1, 3) == 0 and coming
    coming.passed(second, 3)
    assert not coming
    coming.end(second)
    coming.begin(first, 3, 3, {3})
    assert not coming, "nothing is left to compute"


def burst(policy: Policy, chunk: int) -> tuple[Shadow, list[int]]:
    """Four prompts behind the same four blocks, sent at once; the hit of each."""
    shadow = Shadow(World("S1", pages=200, grid=GRID).build(), policy)
    requests = [shadow.submit([1, 2, 0, 1] * GRID + [index] * 3, 1) for index in range(4)]
    while shadow.waiting or shadow.running:
        if not shadow.prepare_extend(chunk):
            shadow.prepare_decode(shadow.decodable())
        shadow.launch()
        shadow.process()
    return shadow, [request.hit for request in requests if request is not None]


def test_of_a_burst_behind_a_new_context_one_computes_it() -> None:
    for chunk in (3, GRID, 100):
        shadow, hits = burst(Policy(), chunk)
        assert hits == [0, 4 * GRID, 4 * GRID, 4 * GRID], hits
        assert shadow.live.prefix_waits == 3
        shadow, hits = burst(Policy(wait="never"), chunk)
        assert hits == [0, 0, 0, 0] and not shadow.live.prefix_waits


def test_who_waits_is_not_held_up_by_who_does_not_come() -> None:
    """The one that computes ends before it gets there, in the middle of its prompt."""
    shadow = Shadow(World("S1", pages=200, grid=GRID).build())
    first, second = (shadow.submit([1, 2, 0, 1] * GRID + [index], 1) for index in range(2))
    assert first is not None and second is not None
    assert shadow.prepare_extend(2 * GRID) == [first]
    shadow.launch()
    assert shadow.prepare_extend(GRID) == [first], "the second still waits"
    shadow.launch()
    shadow.abort(first)
    assert shadow.prepare_extend(100) == [second] and second.hit == 2 * GRID


def test_a_request_that_may_not_publish_is_not_waited_for() -> None:
    shadow = Shadow(World("S1", pages=200, grid=GRID).build())
    private, other = (shadow.submit([1, 2, 0, 1] * GRID + [7], 1, private=index == 0) for index in range(2))
    assert shadow.prepare_extend(100) == [private, other]
