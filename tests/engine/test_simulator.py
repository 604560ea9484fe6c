"""The simulator and the real scheduler make the same decisions: reuse is equal, token for token."""

import json
import random
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest

from sglang_hybrid.models import hybrid_shape
from sglang_hybrid.pools.factory import make_organization
from sglang_hybrid.radix.history import Cause
from sglang_hybrid.simulator import passes
from sglang_hybrid.simulator.cost import StepCost, Weights
from sglang_hybrid.simulator.job import Chunk
from sglang_hybrid.simulator.request import Request
from sglang_hybrid.simulator.run import simulate
from sglang_hybrid.simulator.scheduler import Scheduler
from sglang_hybrid.simulator.setting import ENGINE, Setting
from tests.support.metrics import trace_of
from tests.support.park import ServerPark, on
from tests.support.reply import Reply, replies_of
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


# -- several at once ----------------------------------------------------------------------------


class Wave(NamedTuple):
    """Prompts of one HTTP request, each with the most tokens that its answer may have."""

    size: int
    stems: int
    """New contexts, which several of its prompts share."""
    stem: tuple[int, int]
    own: tuple[int, int]
    new: tuple[int, int]


LOADS: Mapping[str, tuple[int, tuple[Wave, ...]]] = {
    # Memory runs out while answers grow: requests are preempted.  Then it is short of prompts.
    "tight": (4, (Wave(12, 1, (17, 30), (1, 12), (120, 200)), Wave(16, 2, (17, 100), (1, 60), (1, 60)))),
    # Prompts of several chunks: eight run, the others wait, behind a new context among them.
    "s2": (0, 2 * (Wave(24, 3, (60, 300), (1, 60), (1, 30)),)),
}
"""A seed, and waves of which each is sent once the one before it is answered."""


class Asked(NamedTuple):
    """A request of a wave.  `stops` end its answer before it is as long as its sender allows."""

    text: Text
    most: int
    stops: Sequence[int]


class Watched(Scheduler):
    """Remembers its prefills as SGLang logs them: sequences, tokens computed, tokens adopted."""

    def __init__(self, setting: Setting, requests: Sequence[Request]) -> None:
        super().__init__(setting, requests, records=True)
        self.prefills: list[tuple[int, int, int]] = []

    def _prefill(self, chunks: list[Chunk]) -> None:
        fresh = [job for job, _ in chunks if job.state.live is None]
        computed = sum(end - job.position for job, end in chunks)
        self.prefills.append((len(chunks), computed, sum(job.position for job in fresh)))
        super()._prefill(chunks)


def ask(wave: Wave, begin: int, chance: random.Random, said: list[Text]) -> list[Asked]:
    """Turns that go on, prompts behind contexts that are new with this wave, prompts of their own."""
    asked = []
    for index in range(begin, begin + wave.size):
        lot, text = chance.random(), Text()
        if said and lot < 0.3:
            text = said.pop(chance.randrange(len(said)))
        elif lot < 0.8:
            stem = chance.randrange(wave.stems)
            text = text.then(("stem", begin, stem), T(400 + begin + stem, chance.randint(*wave.stem)))
        text = text.then(("own", index), T(20 + index, chance.randint(*wave.own)))
        stops = range(5 + index % 40, 512, 40) if chance.random() < 0.4 else ()
        asked.append(Asked(text, chance.randint(*wave.new), stops))
    return asked


def serve(witness: Witness, prefix: str) -> tuple[list[Request], list[Reply]]:
    """What was sent as the simulator knows it, and what came back; ids are `prefix` and the place."""
    seed, waves = LOADS[witness.config.name]
    chance = random.Random(seed)
    said: list[Text] = []
    requests: list[Request] = []
    replies: list[Reply] = []
    for number, wave in enumerate(waves):
        asked = ask(wave, len(requests), chance, said)
        sampling = [
            {"temperature": 0, "max_new_tokens": one.most}
            | ({"stop_token_ids": list(one.stops)} if one.stops else {"ignore_eos": True})
            for one in asked
        ]
        rids = [f"{prefix}{index}-" for index in range(len(requests), len(requests) + wave.size)]
        body = {"input_ids": [one.text.ids for one in asked], "sampling_params": sampling, "rid": rids}
        for one, reply in zip(asked, replies_of(witness.server.post("/generate", body)), strict=True):
            answer, new = ("answer", len(requests)), reply.meta["completion_tokens"]
            limit = one.most if one.stops else None
            requests.append(Request(1e6 * number, one.text.segments, new, answer=answer, limit=limit))
            replies.append(reply)
            if reply.ids and len(one.text.ids) + new < 200:
                said.append(one.text.then(answer, reply.ids))
        del said[:-6]
        witness.server.wait_idle()
    return requests, replies


PARTIAL = (str(Cause.OFF_GRID), str(Cause.BELOW_GRID))
"""Causes about less than a block, which the simulator does not look into."""

TOTALS = ("evicted_dead_blocks", "evicted_checkpoints", "checkpoints_published", "forks", "prefix_waits")


def ends(witness: Witness, prefix: str, count: int) -> list[str]:
    """Ids that begin so, in the order in which their requests ended."""

    server = witness.server
    server.wait_until(lambda: len(trace_of(server, prefix)) == count, "the records of the trace")
    return list(trace_of(server, prefix))


@on("tight", "s2")
def test_decisions_of_several_at_once(
    witness: Witness, park: ServerPark, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What several running requests do to each other.

    Equal are the prefill batches one by one (so who is admitted with whom, in which chunks), each request's
    reuse depths, their cause and its preemptions, the order in which requests end, and what is evicted,
    published, forked and waited for in total.  Not looked at: time, other organizations and policies than
    those of these servers, mixed chunks, requests that arrive while others run.
    """
    config, prefix = witness.config, f"several-{witness.config.name}-"
    before, mark = witness.pools(), witness.server.log_mark()
    requests, replies = serve(witness, prefix)
    after = witness.pools()
    assert before is not None and after is not None
    clip = config.env.get("SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION", passes.MOST_EXPECTED)
    monkeypatch.setattr(passes, "MOST_EXPECTED", int(clip))
    twin = Watched(setting(witness, park), requests)
    records = twin.run().records
    assert records is not None and len(records) == len(requests)

    assert twin.prefills == witness.server.prefill_batches(mark)
    for one in sorted(records):
        first, *again = replies[one.arrival].meta["hybrid"]
        served = tuple(first[field] for field in FIELDS)
        assert (one.prompt, one.r_max, one.attention, one.j_adopt) == served, one
        assert one.cause == (None if first["cause"] in PARTIAL else first["cause"]), one
        assert one.preemptions == len(again), one
    order = ends(witness, prefix, len(requests))
    assert order == [f"{prefix}{one.arrival}-" for one in records]
    memory = twin.core.memory
    counts = {f"evicted_{field}": value for field, value in memory.lifetime.counts._asdict().items()}
    counts |= memory.live.counts._asdict()
    real = {field: after.raw[f"count_{field}"] - before.raw[f"count_{field}"] for field in TOTALS}
    assert {field: counts[field] for field in TOTALS} == real
    adopting = sum(one.j_adopt > 0 for one in records)
    assert adopting > 4 and real["prefix_waits"], f"INCONCLUSIVE: {adopting} reuse anything, {real}"
    if config.name == "tight":
        assert twin.outcome.preemptions > 2, "INCONCLUSIVE: hardly anybody is preempted"
