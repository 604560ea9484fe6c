"""Forced retraction: every few steps a running request loses everything and resumes."""

from tests.support.configs import RETRACTED
from tests.support.park import on
from tests.support.tokens import T
from tests.support.witness import Witness

PROMPTS = (T(1, 19), T(2, 25), T(3, 33), T(4, 40))


@on(
    *("forced-retract", "granite-s2", "qwen-s2", "s0-small", "s2-small", "d0-small"),
    *("lfm2-s2", "lfm2-s0", "lfm2-s1", "lfm2-d0"),
    *("kimi-s1", "kimi-s2", "kimi-s0", "kimi-d0"),
    *("ling-s1", "ling-s0", "ling-d0"),
    *RETRACTED,
)
def test_retracted_requests_equal_cold(witness: Witness) -> None:
    """HB-16's right values, with two short requests that take what the retracted ones gave up."""
    for _ in range(2):
        mark = witness.server.log_mark()
        running = [witness.submit(prompt, 24) for prompt in PROMPTS]
        witness.server.wait_until(
            lambda mark=mark: "Testing retraction" in witness.server.log_since(mark), "retraction"
        )
        late = [(T(5, 9), witness.submit(T(5, 9), 12)), (T(6, 17), witness.submit(T(6, 17), 12))]
        for prompt, future in zip(PROMPTS, running, strict=True):
            witness.check(future.result(60), prompt, 24, exact=False)
        for prompt, future in late:
            witness.check(future.result(60), prompt, 12, exact=False)


@on("forced-retract")
def test_a_wave_under_forced_retraction(witness: Witness) -> None:
    """Twelve requests over a shared prefix, more than may run."""
    shared = T(7, 35)
    mark = witness.server.log_mark()
    witness.together([shared + T(50 + i, 2 + 3 * i) for i in range(12)], 21)
    assert "Testing retraction" in witness.server.log_since(mark)
