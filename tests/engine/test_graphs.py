"""Decode through SGLang's own graph runner: captured once a batch size, replayed with the maps of each step.

`tests/support/graphs` records on a CPU what a CUDA graph would hold, refuses what it would, and overwrites
its memory before each replay. All servers here prefill eagerly and decode by replay, padded and not, over
whole pages of KV. `test_organizations`, `test_retract` and `test_waves` run on them too.
"""

from collections.abc import Callable

import pytest

from tests.support.graphs.faults import BAKED, PADDING, STALE
from tests.support.park import on
from tests.support.tokens import T
from tests.support.witness import Witness

RECORDED = (
    *("graphs", "graphs-s0", "graphs-s2", "graphs-d0"),
    *("granite-s1", "granite-s2", "granite-d0", "qwen-s1", "qwen-s2", "qwen-d0"),
    *("lfm2-s2", "kimi-s1", "ling-s1"),
)


@on(*RECORDED)
def test_batches_that_grow_and_shrink(witness: Witness) -> None:
    """Six prompts end one after another: batches of 6 to 1, padded to 8, 5 and 2."""
    mark = witness.server.log_mark()
    prompts = [T(10 + i, 3 + 5 * i) for i in range(6)]
    running = [witness.submit(prompt, 4 + 5 * i) for i, prompt in enumerate(prompts)]
    for i, (prompt, future) in enumerate(zip(prompts, running)):
        witness.check(future.result(), prompt, 4 + 5 * i, exact=False)
    sizes = {running for running, _ in witness.server.decode_batches(mark)}
    assert {1, 3} <= sizes or "SGLANG_TEST_RETRACT" in witness.config.env, (
        f"INCONCLUSIVE: decode batches of {sizes}"
    )


@on(*RECORDED)
def test_hits_and_forks_at_boundaries(witness: Witness) -> None:
    """An answer over two boundaries is found again; two continue from one of its checkpoints, together."""
    prompt = T(1, 3 * witness.G + 2)
    first = witness.ask(prompt, 2 * witness.G + 3)
    whole = [*prompt, *first.ids]
    witness.hit_is(witness.ask([*whole, *T(2, 5)], witness.G + 2, exact=False), 5 * witness.G)
    witness.together([whole[: 4 * witness.G] + T(3 + i, 1 + i) for i in range(3)], witness.G + 4)


@on("graphs")
@pytest.mark.parametrize("name", [STALE, BAKED, PADDING])
def test_a_planted_fault_changes_an_answer(witness: Witness, fault: Callable[[str], None], name: str) -> None:
    """Three requests, padded to five rows; the honest server passes."""
    prompts = [T(20 + i, 9 + 4 * i) for i in range(3)]
    witness.together(prompts, 12)
    witness.flush()
    fault(name)
    prompts.reverse()  # other rows, so that stale maps are wrong ones
    replies = witness.server.generate_batch(prompts, 12)
    cold = [witness.cold.ask(witness.config.model, prompt, 12) for prompt in prompts]
    assert [reply.ids for reply in replies] != [reply.ids for reply in cold]
    witness.flush()
