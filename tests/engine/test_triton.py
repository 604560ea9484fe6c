"""The Triton kernels under SGLang's scheduler, in the interpreter: output as cold, where torch computes."""

from tests.support.park import on
from tests.support.tokens import T
from tests.support.witness import Witness


@on("triton", "triton-qwen")
def test_a_short_prompt_a_hit_and_a_crossing(witness: Witness) -> None:
    """Prefill over two boundaries, a fork of the second, decode over two more, a hit on what decode left."""
    prompt = T(1, 19)
    witness.hit_is(witness.ask(prompt, 2), 0)
    crossing = witness.ask(prompt, 14)
    witness.hit_is(crossing, 16)
    witness.hit_is(witness.ask([*prompt, *crossing.ids], 2), 32)
    witness.together([T(1, 20), T(2, 5), T(3, 9)], 3)
    assert "Recurrent state goes through triton kernels." in witness.server.log_since()
