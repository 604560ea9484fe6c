"""Prefill chunks below, equal to and above the grid, on it and off it (HB-11); mixed chunks."""

import re

from tests.support.configs import SAME_KINDS
from tests.support.park import on
from tests.support.tokens import T
from tests.support.witness import Witness

CHUNKED = (
    "chunk3",
    "chunk8",
    "mixed12",
    "g16-chunk40",
    "granite-s1",
    "qwen-s1",
    "lfm2-s2",
    "lfm2-s0",
    "lfm2-s1",
    "kimi-s1",
    "kimi-s0",
    "ling-s0",
    *SAME_KINDS,
)


def chunk_in_force(witness: Witness) -> None:
    """Assert that the server uses the chunk size it was given, or logged both numbers."""
    given, used = witness.config.chunk, witness.server.info()["chunked_prefill_size"]
    if given != used:
        lines = witness.server.log_since().splitlines()
        told = [line for line in lines if {str(given), str(used)} <= set(re.findall(r"\d+", line))]
        assert [line for line in told if "chunk" in line and "server_args=" not in line], (given, used)
    largest = max((new for _, new, _ in witness.server.prefill_batches(0)), default=0)
    assert largest <= used, f"a prefill of {largest} tokens in spite of a chunk size of {used}"


@on(*CHUNKED)
def test_a_prompt_of_many_chunks(witness: Witness) -> None:
    """HB-11."""
    k = witness.G // 8
    prompt = T(1, 45 * k)
    witness.hit_is(witness.ask(prompt, 6), 0)
    witness.hit_is(witness.ask(prompt + T(7, 4)), 40 * k)
    witness.together([T(2, 45 * k), T(3, 45 * k)], 6)
    witness.hit_is(witness.ask(T(2, 45 * k)), 40 * k)
    witness.hit_is(witness.ask(T(3, 45 * k)), 40 * k)
    witness.cached_exactly()
    if not witness.config.flags:
        chunk_in_force(witness)


@on(*CHUNKED)
def test_hits_between_chunks(witness: Witness) -> None:
    """Prompts that begin with a hit anywhere on the grid and go on in chunks that do not fit it."""
    k = witness.G // 8
    base = T(4, 70 * k)
    witness.ask(base, 2)
    for d in (3, 8, 13, 31, 40, 64):
        witness.ask(base[: d * k] + T(100 + d, 37 * k), 3)
    witness.cached_exactly()


@on(*CHUNKED, "s0-ample", "s2-ample", "d0-ample")
def test_a_wave_of_chunked_prompts(witness: Witness) -> None:
    """Chunks of one prompt share batches with the last chunk of another and with decode."""
    k = witness.G // 8
    prompts = [T(20 + i, (9 + 7 * i) * k) for i in range(8)]
    witness.together(prompts, 11)
    for prompt in prompts:
        witness.ask([*prompt, 4], 2)
    witness.cached_exactly()


@on("mixed12")
def test_decode_rides_in_prefill_batches(witness: Witness) -> None:
    """Mixed chunks: a running decode takes its steps inside another prompt's chunks, across boundaries."""
    running = T(30, 10)
    future = witness.begin(running, 60)
    mark = witness.server.log_mark()
    long = witness.ask(T(31, 200), 4)
    assert long.reason == "length"
    reply = future.result()
    witness.check(reply, running, 60)
    # With one decode row in each, a batch of 12 has room for 11 tokens of the prompt.
    batches = witness.server.prefill_batches(mark)
    assert any(0 < new < 12 for _, new, _ in batches[:-1]), f"INCONCLUSIVE: no mixed batch in {batches}"
    witness.ask([*running, *reply.ids, 4], 2)
    witness.cached_exactly()
