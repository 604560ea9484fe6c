"""`python -m bench.chaos`: requests that are aborted, dropped, flushed and preempted, on the least memory.

A live server of each organization at its smallest legal budget, with SGLang's own forced retraction.  No
scheduler may end, every answered request equals a cold run (a sample is compared), and the counters are
back at their baseline after every wave.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import requests

from bench.server import BenchServer
from bench.storm import Storm, difference, sample
from sglang_hybrid.cli.demo_model import write_demo_model
from sglang_hybrid.geometry import ModelGeometry
from sglang_hybrid.models import hybrid_shape
from sglang_hybrid.pools.factory import ORGANIZATIONS, make_organization, smallest_budget

GRID = 16
CONTEXT = 4096
SAMPLED = 0.1
AMPLE = 8
FP32 = 4
ENV = {
    "SGLANG_MAMBA_CONV_DTYPE": "float32",
    "SGLANG_HYBRID_POISON": "1",
    "SGLANG_TEST_RETRACT": "1",
    "SGLANG_TEST_RETRACT_INTERVAL": "7",
    "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "4",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}
"""Expecting answers of four tokens the scheduler admits more than fits; freed pages are poisoned."""


def geometry(model: Path) -> ModelGeometry:
    """State of the demo model in fp32."""
    shape = hybrid_shape(json.loads((model / "config.json").read_text()), str(model))
    return shape.geometry(1, kv_bytes=FP32, ssm_bytes=FP32, conv_bytes=FP32)


def storm(
    model: Path, name: str, budget: int, grid: int, count: int, seed: int, flags: list[str]
) -> dict[str, Any]:
    """One organization: what happened, and what was wrong with it."""
    organization = make_organization(name, geometry(model), grid, budget)
    begun = time.monotonic()
    args = [
        *("--hybrid-mem", name, "--hybrid-grid", str(grid), "--hybrid-budget-bytes", str(budget)),
        *("--chunked-prefill-size", str(grid), "--max-running-requests", "8"),
        *_common(model),
        *flags,
    ]
    with BenchServer(args, ENV) as server:
        most = int(server.info()["max_total_num_tokens"])
        clients = Storm(server.url, seed, grid, most)
        clients.run(count)
        memory = clients.memory() if server.alive() else {}
        log = server.log()
    retracted = log.count("Retract requests") + log.count("Testing retraction")
    compared, different = compare(model, clients, seed)
    return {
        "organization": name,
        "grid": grid,
        "budget_bytes": budget,
        "pages": organization.usage().pages_total,
        "seed": seed,
        "requests": count,
        **{what: clients.done[what] for what in sorted(clients.done)},
        "retractions": retracted,
        "compared": compared,
        "different": len(different),
        "counters": {what: value for what, value in memory.items() if what.startswith("count_")},
        "wrong": [*clients.wrong, *different],
        "seconds": round(time.monotonic() - begun, 1),
    }


@contextmanager
def storm_server(model: Path, name: str) -> Iterator[tuple[BenchServer, Storm]]:
    """A server of this organization with ample memory, and clients that nothing was asked of yet."""
    budget = AMPLE * smallest_budget(name, geometry(model), GRID)
    args = [
        *("--hybrid-mem", name, "--hybrid-grid", str(GRID), "--hybrid-budget-bytes", str(budget)),
        *("--chunked-prefill-size", str(4 * GRID), "--max-running-requests", "8"),
        *_common(model),
    ]
    calm = {name: value for name, value in ENV.items() if "TEST" not in name}
    with BenchServer(args, calm) as server:
        yield server, Storm(server.url, 0, GRID, min(400, int(server.info()["max_total_num_tokens"])))


def compare(model: Path, clients: Storm, seed: int) -> tuple[int, list[str]]:
    """A part of the answers against a server without the plugin's memory and without a cache."""
    args = ["--disable-radix-cache", "--max-total-tokens", "8192", "--max-mamba-cache-size", "16"]
    chosen = sample(clients.answers, SAMPLED, seed) if clients.answers else []
    different = []
    with BenchServer([*args, "--chunked-prefill-size", str(CONTEXT), *_common(model)], ENV_COLD) as server:
        for answer in chosen:
            body: Any = {
                "input_ids": list(answer.prompt),
                "sampling_params": {
                    "temperature": 0,
                    "max_new_tokens": len(answer.ids),
                    "ignore_eos": True,
                },
                "return_logprob": True,
                "top_logprobs_num": 2,
            }
            cold = requests.post(f"{server.url}/generate", json=body, timeout=120).json()
            found = difference(answer, cold)
            if found is not None:
                different.append(f"{len(answer.prompt)} tokens from {answer.prompt[:4]}: {found}")
    return len(chosen), different


ENV_COLD = {name: value for name, value in ENV.items() if "TEST" not in name and "CLIP" not in name}


def _common(model: Path) -> list[str]:
    return [
        *("--model-path", str(model), "--dtype", "float32", "--context-length", str(CONTEXT)),
        *("--skip-server-warmup", "--random-seed", "0", "--log-level-http", "warning"),
    ]


def main() -> None:
    options = argparse.ArgumentParser(prog="python -m bench.chaos", description=__doc__.splitlines()[0])
    options.add_argument("--organization", default=",".join(ORGANIZATIONS), help="comma-separated names")
    options.add_argument("--requests", type=int, default=2000, help="for each organization (default 2000)")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--grid", type=int, default=GRID, help=f"grid step in tokens (default {GRID})")
    options.add_argument("--budget-bytes", type=int, help="default: the smallest legal budget")
    options.add_argument("--flags", default="", help="further arguments of the server, in one string")
    options.add_argument("--json", action="store_true", help="one JSON object an organization")
    chosen = options.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        model = write_demo_model(Path(folder) / "model", vocab=512, context=CONTEXT)
        for name in chosen.organization.split(","):
            least = smallest_budget(name, geometry(model), chosen.grid)
            found = storm(
                model,
                name,
                chosen.budget_bytes or least,
                chosen.grid,
                chosen.requests,
                chosen.seed,
                chosen.flags.split(),
            )
            failed |= bool(found["wrong"])
            print(json.dumps(found) if chosen.json else _lines(found), flush=True)
    sys.exit(failed)


def _lines(found: dict[str, Any]) -> str:
    return "\n".join(f"{name:>20}  {value}" for name, value in found.items()) + "\n"


if __name__ == "__main__":
    main()
