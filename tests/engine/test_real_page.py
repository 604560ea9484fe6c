"""The default grid of 512 with pages as large as a real model's: 1 MiB of fp32, states of three pages."""

from tests.support.park import on
from tests.support.tokens import T
from tests.support.witness import Witness


@on("g512")
def test_page_geometry(witness: Witness) -> None:
    now = witness.pools()
    if now is not None:
        assert now.raw["grid"] == 512
        assert now.raw["budget_bytes"] // (now.total + 1) == 1 << 20


@on("g512")
def test_hits_of_long_prompts(witness: Witness) -> None:
    """HB-01 and HB-03 (c) at the default grid."""
    base = T(1, 1600)
    for tokens in (0, 1536, 1536):
        witness.hit_is(witness.ask(base, 4), tokens)
    for d, tokens in ((500, 0), (513, 512), (1100, 1024)):
        witness.hit_is(witness.ask(base[:d] + T(20 + d, 700), 2), tokens)
    witness.hit_is(witness.ask(T(3, 512)), 0)
    witness.hit_is(witness.ask(T(3, 512)), 0)
    witness.cached_exactly()


@on("g512")
def test_decode_crosses_a_real_boundary(witness: Witness) -> None:
    prompt = T(4, 505)
    reply = witness.ask(prompt, 20)
    witness.hit_is(witness.ask([*prompt, *reply.ids, 4], 3), 512)


@on("g512")
def test_a_wave_of_long_prompts(witness: Witness) -> None:
    """Two states of a batch lie at different places of one 2048-token chunk."""
    prompts = [T(5, 700), T(6, 1100)]
    witness.together(prompts, 6)
    for prompt, tokens in zip(prompts, (512, 1024), strict=True):
        witness.hit_is(witness.ask(prompt + T(30, 3)), tokens)
