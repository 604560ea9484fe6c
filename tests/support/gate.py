"""GATE: make several requests share one prefill batch, and prove that they did."""

from collections.abc import Callable, Sequence
from functools import partial

from tests.support.reply import Reply
from tests.support.tokens import T
from tests.support.witness import Witness

GATE_CHUNKS = 8
GATE_SEED = 500
TRIES = 4


def wave(
    witness: Witness,
    prompts: Sequence[Sequence[int]],
    m: int,
    prepare: Callable[[], object] | None = None,
) -> list[Reply]:
    """Queue `prompts` behind an unrelated prompt of eight chunks, so that one batch takes them all.

    `prepare` runs first, on an empty cache. Each reply is checked against cold. A wave not taken in one
    batch proves nothing: it is flushed and sent again, and the test fails as inconclusive when that never
    succeeds.
    """
    seen: list[int] = []
    for attempt in range(TRIES):
        if attempt:
            witness.flush()
        if prepare is not None:
            prepare()
        gate_prompt = T(GATE_SEED + attempt, GATE_CHUNKS * witness.config.chunk)
        mark = witness.server.log_mark()
        gate = witness.submit(gate_prompt, 1)
        witness.server.wait_until(partial(has_begun, witness, mark), "the gate's first chunk", pause=0.005)
        replies = witness.together(prompts, m)
        blocked = gate.result()
        assert blocked.reason == "length", blocked
        witness.expected.commit(gate_prompt, blocked.ids)
        seen = [new_seqs for new_seqs, _, _ in witness.server.prefill_batches(mark)]
        if max(seen) >= len(prompts):
            return replies
    raise AssertionError(
        f"INCONCLUSIVE: the wave of {len(prompts)} was never one batch, new sequences were {seen}"
    )


def has_begun(witness: Witness, mark: int) -> bool:
    """Whether a prefill batch ran since the mark."""
    return bool(witness.server.prefill_batches(mark))
