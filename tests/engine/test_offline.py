"""`sgl.Engine` with keyword arguments, no HTTP: the same flags, the same answers."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.cold import Cold, equal_cold
from tests.support.configs import CONFIGS
from tests.support.park import ServerPark
from tests.support.reply import replies_of
from tests.support.server_config import ENV
from tests.support.tokens import T

PROGRAM = Path(__file__).with_name("offline_program.py")


def run_offline(park: ServerPark, calls: list[dict[str, Any]]) -> dict[str, Any]:
    """Answers of an engine with the settings of configuration `g8`."""
    config = park.config("g8")
    model = park.model_dir(config.model)
    engine: dict[str, Any] = {
        "dtype": "float32",
        "context_length": config.context,
        "chunked_prefill_size": config.chunk,
        "max_running_requests": config.running,
        "max_total_tokens": 8192,
        "max_mamba_cache_size": 64,
        "random_seed": 0,
        "log_level": "warning",
    }
    if config.hybrid:
        del engine["max_total_tokens"], engine["max_mamba_cache_size"]
        engine |= {
            "hybrid_mem": "S1",
            "hybrid_grid": config.grid,
            "hybrid_budget_bytes": config.budget_bytes(model),
        }
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(model), json.dumps({"engine": engine, "calls": calls})],
        capture_output=True, text=True, timeout=240, env={**os.environ, **ENV},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-5000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_offline_batch(park: ServerPark, cold: Cold) -> None:
    """A batch, the same batch again, one prompt under two salts: output = cold, hits by the formula."""
    prompts = [T(1, 19), T(2, 25), T(3, 37), T(4, 300)]
    sampling = {"temperature": 0, "max_new_tokens": 14, "ignore_eos": True}

    def call(ids: list[list[int]], **extra: Any) -> dict[str, Any]:
        return {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, **extra}

    salted = [call([T(3, 37)], cache_salt=salt) for salt in "aba"]
    bad = [] if park.stock else [call([[5, 6], [5, -5]]), call([[]]), call([[5]], top_logprobs_num=[513])]
    result = run_offline(park, [*bad, call(prompts), call(prompts), *salted])
    refused = [answer["refused"] for answer in result["answers"][: len(bad)]]
    for sentence, named in zip(refused, ("id -5", "at least 1", "513"), strict=False):
        assert named in sentence, refused
    result["answers"] = result["answers"][len(bad) :]
    replies = [replies_of(answer) for answer in result["answers"]]
    for sent, got in zip([prompts, prompts, *[[T(3, 37)]] * 3], replies, strict=True):
        for prompt, reply in zip(sent, got, strict=True):
            equal_cold(reply, cold.ask("tiny", prompt, 14))
    hits = [[reply.cached for reply in got] for got in replies]
    if not park.stock:
        assert hits == [[0, 0, 0, 0], [16, 24, 32, 296], [0], [0], [32]]
        assert result["hybrid"]["grid"] == CONFIGS["g8"].grid
