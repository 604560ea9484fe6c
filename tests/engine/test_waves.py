"""Several requests in one prefill batch (HB-09), and waves that share prefixes."""

from itertools import permutations

import pytest

from tests.support.expect import NO_KEY
from tests.support.gate import wave
from tests.support.park import on
from tests.support.tokens import T
from tests.support.witness import Witness

ORDERS = list(permutations(range(3)))


@on("g8", "g16")
@pytest.mark.parametrize("order", ORDERS, ids=lambda order: "".join("abc"[i] for i in order))
def test_states_of_a_batch_lie_on_each_requests_own_grid(witness: Witness, order: tuple[int, ...]) -> None:
    """HB-09: the wave begins at flat positions off the grid; follow-ups find the right states."""
    k = witness.G // 8
    prompts = [T(1, 19 * k), T(2, 25 * k), T(3, 37 * k)]
    wave(witness, [prompts[i] for i in order], 4)
    for i, tokens in enumerate((16, 24, 32)):
        witness.hit_is(witness.ask(prompts[i] + T(50 + i, 3)), tokens * k)


@on("g8", "g16", "s0-ample", "s2-ample", "d0-ample")
def test_a_hit_in_front_of_a_batch(witness: Witness) -> None:
    """HB-09, last sentence: the first of the wave begins with a hit of two grid steps."""
    k = witness.G // 8
    known = T(4, 17 * k)
    prompts = [known + T(60, 5), T(1, 19 * k), T(2, 25 * k), T(3, 37 * k)]
    replies = wave(witness, prompts, 4, prepare=lambda: witness.ask(known))
    witness.hit_is(replies[0], 16 * k)
    for i, tokens in enumerate((16, 16, 24, 32)):
        witness.hit_is(witness.ask(prompts[i] + T(50 + i, 3)), tokens * k)


@on("g8")
def test_waves_over_one_prefix(witness: Witness) -> None:
    """Three waves share 40 tokens: the first computes them, the others reuse them, all at once."""
    shared = T(1, 42)
    for round_ in range(3):
        prompts = [shared + T(100 + 10 * round_ + i, 3 + 5 * i) for i in range(6)]
        replies = witness.together(prompts, 6)
        if round_:
            for reply in replies:
                witness.hit_is(reply, 40)
    witness.cached_exactly()


@on("g8")
def test_one_wave_of_equal_prompts(witness: Witness) -> None:
    """Eight times the same prompt at once: each computes it or reuses it, and one copy stays."""
    prompt = T(1, 61)
    witness.together([prompt] * 8, 12)
    witness.cached_exactly()
    witness.hit_is(witness.ask(prompt), 56)


@on("g8")
def test_more_requests_than_may_run(witness: Witness) -> None:
    """Forty requests for eight places, all lengths around the grid."""
    prompts = [T(10 + i, 1 + 3 * i) for i in range(40)]
    witness.together(prompts, 9)
    for prompt in prompts[::3]:
        witness.ask(prompt, 9)


@on("g8", "chunk8", "mixed12", "s0-ample", "s2-ample", "d0-ample", "granite-s1", "qwen-s1")
def test_of_a_burst_behind_a_new_context_one_computes_it(witness: Witness) -> None:
    """The others wait for its checkpoint; a request under another salt waits for nobody.

    A chunk that the first fills leaves nobody else to ask: they wait without being counted.
    """
    k = witness.G // 8
    before = witness.counter("prefix_waits")
    context = T(1, 42 * k)
    prompts = [context + T(60 + i, 3 + i) for i in range(5)]
    replies = witness.together([*prompts, prompts[0]], 4, keys=[NO_KEY] * 5 + [(None, "salt")])
    assert sorted(reply.cached for reply in replies) == [0, 0, *[40 * k] * 4]
    witness.hit_is(replies[-1], 0)
    waited = witness.counter("prefix_waits") - before
    assert waited == 4 if witness.config.chunk > len(context) else waited <= 4
    witness.cached_exactly()


@on("chunk3")
def test_who_waits_for_an_aborted_prefill_goes_on(witness: Witness) -> None:
    """The prompt that computes the shared context is aborted in its middle."""
    context = T(1, 600)
    mark = witness.server.log_mark()
    first = witness.submit(context + T(60, 5), 2, rid="computes-")
    witness.server.wait_until(lambda: bool(witness.server.prefill_batches(mark)), "its first chunk")
    others = [(context[:40] + T(61 + i, 5), 2) for i in range(3)]
    waiting = [witness.submit(prompt, m) for prompt, m in others]
    witness.server.abort("computes-")
    assert first.result().reason == "abort"
    for (prompt, m), future in zip(others, waiting, strict=True):
        witness.check_output(future.result(), prompt, m)
