"""The simulator and the real scheduler make the same decisions: reuse is equal, token for token."""

import json
import random
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from sglang_hybrid.cli.families import hybrid_shape
from sglang_hybrid.pools.factory import make_organization
from sglang_hybrid.simulator.cost import StepCost, Weights
from sglang_hybrid.simulator.request import Request
from sglang_hybrid.simulator.run import simulate
from sglang_hybrid.simulator.setting import ENGINE, Setting
from tests.support.park import ServerPark, on
from tests.support.reply import Reply
from tests.support.tokens import T
from tests.support.witness import Witness

ALONE = 200
"""Requests that are served one after another."""

FIELDS = ("prompt_tokens", "r_max", "attention", "j_adopt")

COST = StepCost(1e12, 1e12, Weights(1e9, 1e9), 1.0, 1.0)
"""Any: nothing that is compared depends on how long a step takes."""


@dataclass
class Text:
    """A prompt as token ids and as what the simulator knows of it."""

    ids: list[int] = field(default_factory=list)
    segments: tuple[tuple[Hashable, int], ...] = ()

    def then(self, name: Hashable, ids: Sequence[int]) -> "Text":
        return Text([*self.ids, *ids], (*self.segments, (name, len(ids))))


def setting(witness: Witness, park: ServerPark) -> Setting:
    """The simulator's twin of a running server."""
    config = witness.config
    folder = park.model_dir(config.model)
    shape = hybrid_shape(json.loads((folder / "config.json").read_text()), config.model)
    model = shape.geometry(1, kv_bytes=4, ssm_bytes=4, conv_bytes=4)
    budget = config.budget_bytes(folder)
    return Setting(
        organization=lambda: make_organization(config.organization, model, config.grid, budget),
        cost=COST,
        serving=ENGINE,
        most_running=config.running,
        prefill_tokens=config.chunk,
    )


def conversations(witness: Witness, count: int) -> tuple[list[Request], list[Reply]]:
    """Serve prompts one after another: shared beginnings, branches inside them, turns that go on."""
    chance = random.Random(11)
    open_ones: list[Text] = []
    requests, replies = [], []
    for index in range(count):
        if open_ones and chance.random() < 0.5:
            begun = open_ones.pop(chance.randrange(len(open_ones)))
        else:
            stem = chance.randrange(12)
            begun = Text().then(("stem", stem), T(stem, chance.randrange(1, 160)))
        text = begun.then(("own", index), T(20 + index, chance.randrange(1, 60)))
        new = chance.randrange(1, 20)
        reply = witness.server.generate(text.ids, new)
        requests.append(Request(at=1e6 * index, segments=text.segments, new=new, answer=("answer", index)))
        replies.append(reply)
        if chance.random() < 0.8:
            # The last token that was generated is read when it is sent back.
            open_ones.append(text.then(("answer", index), reply.ids))
        if len(open_ones) > 12:
            del open_ones[0]
    return requests, replies


@on("s2")
def test_reuse_of_requests_served_one_after_another(witness: Witness, park: ServerPark) -> None:
    requests, replies = conversations(witness, ALONE)
    outcome = simulate(setting(witness, park), requests, records=True)
    assert outcome.served == ALONE and outcome.records is not None
    served = [tuple(reply.meta["hybrid"][0][name] for name in FIELDS) for reply in replies]
    simulated = [(one.prompt, one.r_max, one.attention, one.j_adopt) for one in outcome.records]
    assert simulated == served
    assert [reply.cached for reply in replies] == [one.j_adopt for one in outcome.records]
    assert sum(one.j_adopt for one in outcome.records) > 0
    gaps = sum(one.gap_r > 0 for one in outcome.records)
    assert gaps > 10, f"INCONCLUSIVE: only {gaps} requests lost anything to eviction"
