"""S0, S2 and D0 on little memory, and cases that every organization answers in its own way.

`s0-small`, `s2-small` and `d0-small` have the bytes of a few requests, and are forced to retract too. They
run HB-16 (`test_retract`), HB-13, HB-20, a random load with aborts (`test_pressure`), and here HB-07, HB-18,
HB-26 and HB-29. S0 pays a page for each block, S2 mixes tight lines of many checkpoints on a slab, D0
has KV idle while states are short. S1 answers on `tight`; hits by the formula and waves of all four are in
`test_organizations`.
"""

import re
import time
from pathlib import Path

from tests.support.balance import pools
from tests.support.budget import StateBytes
from tests.support.park import on
from tests.support.tokens import T
from tests.support.witness import Witness

SMALL = ("s0-small", "s2-small", "d0-small")


@on("g8", *SMALL)
def test_report_of_the_budget(witness: Witness) -> None:
    """One target, each organization's own whole pieces of it: the log and /server_info have all figures."""
    now = witness.pools()
    if now is None:
        return
    raw, config = now.raw, witness.config
    model = Path(witness.server.info()["model_path"])
    target = config.budget_bytes(model)
    state = StateBytes.of(model)
    sizes = state.pools(config.organization, witness.G, target, config.share)
    used = state.layers * sum(pages * size for pages, size in sizes)
    assert (raw["organization"], raw["grid"], raw["budget_bytes"]) == (config.organization, witness.G, target)
    assert (raw["used_bytes"], raw["lost_bytes"]) == (used, target - used)
    assert now.total == sum(pages - 1 for pages, _ in sizes)
    said = (
        f"{config.organization}: grid {witness.G}, budget {target} bytes, used {used}, lost {target - used};"
    )
    assert said in witness.server.log_since()
    if config.organization == "D0":
        assert raw["attention_share"] == config.share
        assert [raw["units_total"] + 1, raw["checkpoints_total"] + 1] == [pages for pages, _ in sizes]


@on("s2", "s2-small")
def test_report_of_the_slabs(witness: Witness) -> None:
    """Lines share slab pages, four or, tight, five to one; how full they are is reported."""
    for i in range(5):
        witness.ask(T(i, (20 + 8 * i) * witness.G // 8))
    now = witness.pools()
    if now is not None:
        lines, slots = now.raw["checkpoints_allocated"], now.raw["slots_per_page"]
        assert slots == StateBytes.of(Path(witness.server.info()["model_path"])).slots(
            witness.G, witness.config.tight
        )
        assert 0 <= now.raw["slabs"] - -(-lines // slots) <= 1  # a live state's line may have opened one
        assert now.raw["slab_occupancy"] == lines / (now.raw["slabs"] * slots)


@on("tight", *SMALL)
def test_the_newest_chain_can_be_branched(witness: Witness) -> None:
    """HB-07: chains of eight boundaries push each other out; the newest keeps its end and can be branched."""
    k = witness.G // 8
    chains = [T(s, 65 * k) for s in range(1, 9)]
    for chain in chains:
        witness.ask(chain, exact=False)
    witness.evicted()
    newest, oldest = chains[-1], chains[0]
    branch = witness.ask(newest[: 40 * k] + T(20, 9 * k), exact=False)
    if (
        witness.config.organization != "S0"
    ):  # whose few pages keep the ends of other chains, and no inner boundary
        witness.hit_is(branch, 40 * k)
    witness.hit_is(witness.ask(newest, exact=False), 64 * k)
    witness.hit_is(witness.ask(newest[: 40 * k] + T(22, 9 * k), exact=False), 40 * k)
    for prompt in (oldest, oldest[: 24 * k] + T(21, 9 * k), chains[1]):
        witness.ask(prompt, exact=False)
    now = witness.pools()
    if now is not None:
        assert now.raw["count_evicted_checkpoints"] + now.raw["count_evicted_leaf_blocks"] > 0, now.raw


def announced(witness: Witness) -> int:
    """Most running requests, as the log promised at start."""
    said = re.search(r"max_running_requests is (\d+) instead of (\d+):", witness.server.log_since())
    if not witness.config.hybrid:
        return witness.config.running
    assert said, "no warning that fewer requests run than were asked for"
    assert int(said[2]) == witness.config.asked
    return int(said[1])


@on(*SMALL)
def test_a_burst_waits_for_memory(witness: Witness) -> None:
    """HB-18: sixteen at once on memory for few states; then with a full cache; then all with one hit."""
    most = announced(witness)

    def burst(prompts: list[list[int]]) -> None:
        mark = witness.server.log_mark()
        witness.together(prompts, 16)
        assert witness.server.most_running(mark) <= most

    distinct = [T(100 + i, 41) for i in range(16)]
    burst(distinct)
    for i in range(6):
        witness.ask(T(200 + i, 33), exact=False)
    burst(distinct)
    shared = T(300, 4 * witness.G + 1)
    witness.ask(shared, exact=False)
    burst([shared[:-1] + T(310 + i, 9) for i in range(16)])
    witness.evicted()


@on("d0-small")
def test_states_are_the_limit_while_kv_is_idle(witness: Witness) -> None:
    """HB-18, HB-28: at the peak of a burst /server_info shows which of the two pools is full."""
    if not witness.config.hybrid:
        return
    futures = [witness.submit(T(100 + i, 33), 60) for i in range(16)]
    seen = []
    while not all(future.done() for future in futures):
        raw = pools(witness.server).raw
        seen.append((raw["checkpoints_total"] - raw["checkpoints_allocated"], raw["units_free"]))
        time.sleep(0.02)
    for i, future in enumerate(futures):
        witness.check(future.result(), T(100 + i, 33), 60, exact=False)
    total = pools(witness.server).raw["units_total"]
    assert any(states == 0 and units > total // 8 for states, units in seen), f"of {total} units: {seen}"


@on("tight", *SMALL)
def test_prompts_that_end_inside_a_page(witness: Witness) -> None:
    """HB-26: a page is a grid step (D0: a unit, of which a step has several); keys are cut to whole steps."""
    k = witness.G // 8
    a = T(1, 8 * k)
    prompts = [a, a[: 4 * k], a[: 5 * k], a[: 7 * k], [*a, 3], a + T(2, 9), [*a, 3]]
    for prompt, tokens in zip(prompts, (0, 0, 0, 0, 8, 8, 8), strict=True):
        witness.hit_is(witness.ask(prompt), tokens * k)
    for i in range(20):
        witness.ask(T(30 + i, (9 + i) * k), exact=False)
    witness.evicted()
    for prompt in prompts:
        witness.ask(prompt, exact=False)


@on(*SMALL)
def test_as_many_run_as_announced(witness: Witness) -> None:
    """HB-29: 64 were asked for, the log says how many fit, and so many run.

    A few less when SGLang reserves much for tokens to come: its estimate rises with each retraction.
    """
    config = witness.config
    most = announced(witness)
    if config.hybrid:
        model = Path(witness.server.info()["model_path"])
        state, budget = StateBytes.of(model), config.budget_bytes(model)
        assert most == state.most_running(config.organization, witness.G, budget, config.share, config.tight)
    mark = witness.server.log_mark()
    witness.together([T(10 + i, 2) for i in range(2 * most)], 2)
    if config.hybrid:
        assert 0.9 * most - 1 <= witness.server.most_running(mark) <= most
