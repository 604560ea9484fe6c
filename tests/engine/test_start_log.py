"""What a server's log says of its memory, against figures from config.json alone."""

import re

from sglang_hybrid.geometry import UNIT_TOKENS
from tests.support.budget import StateBytes
from tests.support.park import ServerPark, on
from tests.support.witness import Witness


@on("g8", "s0", "s2", "d0")
def test_a_start_says_what_a_checkpoint_takes(witness: Witness, park: ServerPark) -> None:
    """fp32 states, as on a GPU by default: the log says what bf16 would give, and how many requests run."""
    config, log = witness.config, witness.server.log_since()
    model = park.model_dir(config.model)
    state, budget = StateBytes.of(model), config.budget_bytes(model)
    page, w, grid = state.page(config.grid), state.w(config.grid), config.grid
    takes = {
        "S0": "1 page",
        "S1": f"{w} pages",
        "S2": f"{w - 1} pages and one of the {state.slots(grid, config.tight)} conv slots of another",
        "D0": "1 state page",
    }[config.organization]
    units = f"{grid // UNIT_TOKENS} unit" if config.organization == "D0" else "1 page"
    size = state.ssm_rows * state.ssm_row + state.conv
    assert (
        f"A checkpoint is {size} bytes (SSM float32, conv float32) in each of {state.layers} arenas and "
        f"takes {takes}; a block of {grid} tokens is {page} bytes and takes {units}"
    ) in log
    half = size - state.ssm_rows * state.ssm_row // 2
    found = re.search(
        rf"With --mamba-ssm-dtype bfloat16 a checkpoint would be {half} bytes and take .*: "
        r"(\d+) checkpoints would fit instead of (\d+)\.",
        log,
    )
    assert found is not None and int(found[1]) > int(found[2])
    most = state.most_running(config.organization, grid, budget, config.share, config.tight)
    running = min(config.running, most)
    assert f"Up to {running} requests run at once; the memory has room for {most} at their start." in log
