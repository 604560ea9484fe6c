"""Little memory: KV without state (HB-13), requests at the limit (HB-20), eviction under load."""

import random
import re
import time

import pytest

from tests.support.park import on
from tests.support.tokens import T
from tests.support.witness import Witness

K = 256
"""Tokens of configuration `kv256`, beside two live states and two checkpoints."""


@on("kv256", "d0-small")
def test_a_hit_needs_the_state_and_not_only_kv(witness: Witness) -> None:
    """HB-13: others push A's states out; a hit is as long as a state survives, not as long as KV does."""
    k = witness.G // 8
    a = T(1, 33 * k)
    witness.hit_is(witness.ask(a), 0)
    for i in range(11, 23):
        witness.ask(T(i, 9 * k), exact=False)
    witness.evicted()
    before = witness.pools()
    if before is not None and witness.config.organization == "D0":
        # Nothing but checkpoints was short: all KV is there.
        assert before.raw["blocks_cached"] == witness.expected.nodes() > before.checkpoints, before.raw
    witness.ask(a, exact=False)
    witness.hit_is(witness.ask(a, exact=False), 32 * k)
    after = witness.pools()
    if before is not None and after is not None:
        assert after.raw["blocks_cached"] <= before.raw["blocks_cached"] + 4, "A's KV is stored twice"


@on("kv256")
def test_the_whole_memory_for_one_request(witness: Witness) -> None:
    """HB-20 (i)."""
    begun, mark = time.monotonic(), witness.server.log_mark()
    for i in range(4):
        witness.ask(T(20 + i, 120), exact=False)
    witness.ask(T(9, 238), 4, exact=False)
    assert time.monotonic() - begun < 30
    assert witness.server.prefilled(mark) <= 4 * 120 + 238, "a prompt was computed twice"


@on("kv256")
def test_two_requests_that_do_not_fit_together(witness: Witness) -> None:
    """HB-20 (ii): the second joins or waits, and both finish as cold."""
    begun, mark = time.monotonic(), witness.server.log_mark()
    first = witness.begin(T(1, 120), 120)
    second = witness.submit(T(2, 120), 120)
    witness.check(first.result(30), T(1, 120), 120, exact=False)
    witness.check(second.result(30), T(2, 120), 120, exact=False)
    assert time.monotonic() - begun < 30
    # At most one of them is retracted, and computed again with what it had said by then.
    assert witness.server.prefilled(mark) <= 3 * 120 + 120, "computed again and again"


@on("kv256")
def test_retraction_of_one_of_two(witness: Witness) -> None:
    """Two short prompts are admitted together and outgrow the memory in decode."""
    outgrow(witness, [T(1, 24), T(2, 24)], 216)


@on("tight")
def test_retraction_of_several(witness: Witness) -> None:
    """Eight of them, some of which are retracted more than once."""
    prompts = [T(40 + i, 24 + i) for i in range(8)]
    outgrow(witness, prompts, 150)
    for prompt in prompts:
        witness.ask(prompt, 5, exact=False)


def outgrow(witness: Witness, prompts: list[list[int]], m: int) -> None:
    """Let all prompts run at once, though their answers will not fit together."""
    mark = witness.server.log_mark()
    futures = [witness.begin(prompt, m) for prompt in prompts]
    for prompt, future in zip(prompts, futures, strict=True):
        witness.check(future.result(60), prompt, m, exact=False)
    if witness.config.hybrid:
        assert "Retract requests" in witness.server.log_since(mark), "INCONCLUSIVE: nothing was retracted"


@on("kv256")
def test_prompts_at_the_limit(witness: Witness) -> None:
    """HB-20 (iii): at every length around the limit a prompt completes, or is refused with both numbers."""
    lengths = {n: serves(witness, n) for n in (*range(K - 8, K + 3), *range(K + 16, 2 * K + 1, 16))}
    most = max(n for n, served in lengths.items() if served)
    lengths |= {n: serves(witness, n) for n in range(most + 1, most + 16) if n not in lengths}
    served = [n for n in lengths if lengths[n]]
    refused = [n for n in lengths if not lengths[n]]
    assert lengths[K - 8], "a prompt of K - 8 tokens must fit"
    assert not refused or max(served) < min(refused), f"served {served}, refused {refused}"
    if witness.config.hybrid:
        assert refused, "INCONCLUSIVE: every length was served"


@on("s0-small", "s2-small", "d0-small")
def test_the_longest_prompt_is_the_named_one(witness: Witness) -> None:
    """HB-20 (iii): the limit that a refusal names is served to the token, whatever else is cached."""
    if not witness.config.hybrid:
        pytest.skip("stock pools of this size hold every prompt")
    refusal = witness.submit(T(3, 3000), 1).result(30)
    limit = min(int(x) for x in re.findall(r"\d+", refusal.message) if int(x) > witness.G)
    assert [serves(witness, limit + i) for i in (-2, 1, -1, 2)] == [True, False, True, False], refusal.message


def serves(witness: Witness, n: int) -> bool:
    """Whether a prompt of n tokens completes; if not, its refusal must name n and the limit."""
    reply = witness.submit(T(3, n), 1).result(30)
    five_tokens(witness)
    if reply.reason == "length":
        witness.check(reply, T(3, n), 1, exact=False)
        return True
    numbers = [int(x) for x in re.findall(r"\d+", reply.message)]
    assert n in numbers, f"the refusal of {n} tokens does not name them: {reply.message}"
    numbers.remove(n)  # once: the limit may be the same number
    assert any(x != reply.status for x in numbers), f"no limit in the refusal of {n} tokens: {reply.message}"
    return False


@on("kv256")
def test_cancelling_what_waits_for_memory(witness: Witness) -> None:
    """HB-20 (iv), and HB-22 with a queued request that fails admission for KV."""
    if not witness.config.hybrid:
        pytest.skip("stock pools of this size hold both requests")
    for round_ in range(6):
        blocker = witness.begin(T(4, 120), 100)
        waiter = witness.submit(T(5, K - 2), 1, rid=f"waiter-{round_}-")
        witness.server.wait_waiting(1)
        witness.server.abort(f"waiter-{round_}-")
        assert waiter.result(10).reason == "abort"
        five_tokens(witness)
        witness.check(blocker.result(30), T(4, 120), 100, exact=False)


def five_tokens(witness: Witness) -> None:
    """A short request answers within ten seconds, whatever else goes on."""
    reply = witness.server.generate(T(6, 5), 1, timeout=10)
    witness.check_output(reply, T(6, 5), 1)


@pytest.mark.parametrize(
    ("server", "seed"),
    [("tight", 0), ("tight", 1), ("tight", 2), ("s0-small", 3), ("s2-small", 4), ("d0-small", 5)],
    indirect=["server"],
)
def test_eviction_under_a_random_load(witness: Witness, seed: int) -> None:
    """Prompts that branch off each other at random, one after another, in waves, and some of them aborted."""
    rng = random.Random(seed)
    k = witness.G // 8
    known = [T(1, 50 * k)]
    for step in range(25):
        parent = rng.choice(known)[: 100 * k]  # it must not grow past what the memory serves
        prompts = [
            parent[: rng.randint(0, len(parent))] + T(100 + step * 8 + i, rng.randint(1, 60 * k))
            for i in range(rng.choice((1, 1, 5)))
        ]
        m = rng.randint(1, 20)
        if len(prompts) == 1:
            reply = witness.ask(prompts[0], m, exact=False)
            known.append([*prompts[0], *reply.ids])
        elif rng.random() < 0.5:
            witness.together(prompts, m)
            known += prompts
        else:
            known += some_aborted(witness, prompts, m, rng)
    witness.evicted()


def some_aborted(witness: Witness, prompts: list[list[int]], m: int, rng: random.Random) -> list[list[int]]:
    """Prompts at once, two of which are aborted wherever they are by then; returns those that finished."""
    futures = [witness.submit(prompt, m, rid=f"random-{i}-") for i, prompt in enumerate(prompts)]
    for i in rng.sample(range(len(prompts)), 2):
        time.sleep(rng.random() / 20)
        witness.server.abort(f"random-{i}-")
    replies = [future.result(60) for future in futures]
    for prompt, reply in zip(prompts, replies, strict=True):
        witness.expected.commit(prompt, [*reply.ids, 0])
    finished = [(p, r) for p, r in zip(prompts, replies, strict=True) if r.reason == "length"]
    for prompt, reply in finished:
        witness.check(reply, prompt, m, exact=False, commit=False)
    assert all(reply.reason in ("length", "abort") for reply in replies), replies
    return [prompt for prompt, _ in finished]
