"""Decode leaves a checkpoint at every boundary it crosses, and crossing does not disturb the output."""

from tests.support.park import on
from tests.support.tokens import T
from tests.support.witness import Witness


@on("g8", "g16", "s0-ample", "s2-ample", "d0-ample")
def test_every_crossing_of_decode_can_be_resumed(witness: Witness) -> None:
    """Cut one long answer at many places and go on: each resumes at the boundary before the cut."""
    prompt = T(1, witness.G + 5)
    answer = witness.ask(prompt, 5 * witness.G).ids
    for cut in range(0, len(answer), 7 * witness.G // 8):
        witness.ask([*prompt, *answer[:cut], 4, *T(60 + cut, 3)], 3)
    witness.cached_exactly()


@on("g8")
def test_crossings_out_of_step(witness: Witness) -> None:
    """Eight requests cross in eight different steps of one running batch; each then resumes on its own."""
    prompts = [T(20 + i, 13 + i) for i in range(8)]
    replies = witness.together(prompts, 30)
    for i, (prompt, reply) in enumerate(zip(prompts, replies, strict=True)):
        witness.ask([*prompt, *reply.ids, *T(80 + i, 2)], 12)
    witness.cached_exactly()


@on("g8")
def test_a_conversation(witness: Witness) -> None:
    """Ten turns, each the whole history and a little more."""
    history = T(1, 11)
    for turn in range(10):
        reply = witness.ask(history, 13)
        history = [*history, *reply.ids, *T(100 + turn, 5)]
    witness.cached_exactly()


@on("g8")
def test_exactly_on_the_grid(witness: Witness) -> None:
    """Prompts and answers that end on a boundary, one before it and one after it."""
    for n in (15, 16, 17):
        for m in (1, 7, 8, 9, 16, 17):
            prompt = T(10 * n + m, n)
            reply = witness.ask(prompt, m)
            witness.ask([*prompt, *reply.ids, 4], 2)
    witness.cached_exactly()
