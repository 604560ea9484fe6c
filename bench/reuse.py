"""`python -m bench.reuse`: prefix reuse with and without the plugin, same requests, same state bytes.

Three workloads on the demo model, one request at a time: prompts that share a context and differ in
a short question, conversations whose next turn repeats the last with its answer, and prompts that
share nothing.  Stock SGLang splits the bytes into its two pools by its own default ratio.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bench.server import BenchServer
from sglang_hybrid.cli.demo_model import write_demo_model
from sglang_hybrid.geometry import ModelGeometry
from sglang_hybrid.pools.factory import ORGANIZATIONS, make_organization

GRID = 64
BUDGET = 256 << 20
STOCK_MAMBA_SHARE = 0.9 / 1.9
"""Stock's default `--mamba-full-memory-ratio` of 0.9, as a part of the whole."""
NEW_TOKENS = 8
ENV = {"SGLANG_MAMBA_CONV_DTYPE": "float32", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

Generate = Callable[[list[int]], list[int]]


class Result(NamedTuple):
    """One workload on one server; tokens summed over its requests, memory when it ended.

    A page is the KV of GRID tokens in all layers, the size of an S1 page over all arenas.
    """

    requests: int
    prompt_tokens: int
    cached_tokens: int
    prefilled_tokens: int
    pages_cached: int


def shared_context(rng: np.random.Generator, generate: Generate) -> None:
    """4 contexts of 1,000 tokens, 8 questions of 40 tokens to each, interleaved."""
    contexts = [_tokens(rng, 1000) for _ in range(4)]
    for _ in range(8):
        for context in contexts:
            generate(context + _tokens(rng, 40))


def conversation(rng: np.random.Generator, generate: Generate) -> None:
    """4 users with a system prompt of 300 tokens in common, 5 turns of 100 tokens each."""
    system = _tokens(rng, 300)
    histories = [list(system) for _ in range(4)]
    for _ in range(5):
        for history in histories:
            history += _tokens(rng, 100)
            history += generate(history)


def no_sharing(rng: np.random.Generator, generate: Generate) -> None:
    """16 prompts of 1,000 tokens with nothing in common."""
    for _ in range(16):
        generate(_tokens(rng, 1000))


WORKLOADS = {"shared context": shared_context, "conversation": conversation, "no sharing": no_sharing}


def _tokens(rng: np.random.Generator, count: int) -> list[int]:
    return [int(token) for token in rng.integers(300, 30000, count)]


def demo_geometry(model_dir: Path) -> ModelGeometry:
    """State of the demo model in fp32, from its config.json."""
    config = json.loads((model_dir / "config.json").read_text())
    layers = tuple(range(config["num_hidden_layers"]))
    rows, size = config["mamba_n_heads"] * config["mamba_d_head"], config["mamba_d_state"]
    channels = rows + 2 * config["mamba_n_groups"] * size
    return ModelGeometry(
        attention_layers=layers,
        recurrent_layers=layers,
        kv_row_bytes=2 * config["num_key_value_heads"] * config["head_dim"] * 4,
        ssm_rows=rows,
        ssm_row_bytes=size * 4,
        conv_bytes=channels * (config["mamba_d_conv"] - 1) * 4,
    )


def arguments(memory: str, model_dir: Path, model: ModelGeometry) -> list[str]:
    """Server arguments for "stock" or an organization, at BUDGET bytes of state."""
    common = [
        *("--model-path", str(model_dir), "--dtype", "float32", "--enable-metrics"),
        *("--chunked-prefill-size", "2048", "--max-running-requests", "4", "--skip-server-warmup"),
    ]
    if memory != "stock":
        return [
            *common,
            *("--hybrid-mem", memory, "--hybrid-grid", str(GRID), "--hybrid-budget-bytes", str(BUDGET)),
        ]
    slots = int(BUDGET * STOCK_MAMBA_SHARE) // (model.arenas * model.checkpoint_bytes)
    tokens = int(BUDGET * (1 - STOCK_MAMBA_SHARE)) // (model.arenas * model.kv_row_bytes)
    return [*common, "--max-mamba-cache-size", str(slots), "--max-total-tokens", str(tokens)]


def pages_cached(memory: str, server: BenchServer, model: ModelGeometry) -> int:
    """Pages' worth of bytes that hold cached prefixes on the idle server."""
    return round(_bytes_cached(memory, server, model) / (GRID * model.kv_row_bytes * model.arenas))


def _bytes_cached(memory: str, server: BenchServer, model: ModelGeometry) -> int:
    if memory == "stock":
        tokens = server.gauge("sglang:kv_evictable_tokens")
        states = server.gauge("sglang:mamba_evictable_tokens")
        return int(tokens * model.kv_row_bytes + states * model.checkpoint_bytes) * model.arenas
    report = server.info()["internal_states"][0]["hybrid"]
    organization = make_organization(memory, model, GRID, BUDGET)
    if organization.unit_pool is organization.state_pool:
        return int(report["pages_cached"] * organization.layout().kv_page_bytes * model.arenas)
    units = report["units_allocated"] * organization.layout().kv_page_bytes
    states = report["checkpoints_cached"] * organization.layout().state_page_bytes
    return int(units + states) * model.arenas


def measure(memory: str, model_dir: Path, model: ModelGeometry, seed: int) -> dict[str, Result]:
    """All workloads on one server, flushed in between."""
    import requests

    results = {}
    with BenchServer(arguments(memory, model_dir, model), ENV) as server:
        for name, workload in WORKLOADS.items():
            counts = [0, 0, 0]

            def generate(prompt: list[int], counts: list[int] = counts) -> list[int]:
                reply = server.generate(prompt, NEW_TOKENS)
                counts[0] += 1
                counts[1] += len(prompt)
                counts[2] += reply["meta_info"]["cached_tokens"]
                ids: list[int] = reply["output_ids"]
                return ids

            workload(np.random.default_rng(seed), generate)
            print(f"{memory}: {name} done", file=sys.stderr)
            total, prompt, cached = counts
            results[name] = Result(
                total, prompt, cached, prompt - cached, pages_cached(memory, server, model)
            )
            requests.post(f"{server.url}/flush_cache", params={"timeout": 30}, timeout=60).raise_for_status()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.reuse", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--memory",
        default="stock,S1",
        help=f"comma list of stock, {', '.join(ORGANIZATIONS)} (default stock,S1)",
    )
    options = parser.parse_args()
    kinds = options.memory.split(",")
    unknown = [kind for kind in kinds if kind not in ("stock", *ORGANIZATIONS)]
    if unknown:
        parser.error(f"--memory {unknown[0]} is unknown; choose among stock, {', '.join(ORGANIZATIONS)}")
    with tempfile.TemporaryDirectory() as folder:
        model_dir = write_demo_model(Path(folder) / "demo")
        model = demo_geometry(model_dir)
        table = {kind: measure(kind, model_dir, model, options.seed) for kind in kinds}
    if options.json:
        print(
            json.dumps(
                {
                    "grid": GRID,
                    "budget_bytes": BUDGET,
                    "seed": options.seed,
                    **{
                        kind: {name: row._asdict() for name, row in rows.items()}
                        for kind, rows in table.items()
                    },
                }
            )
        )
        return
    print(f"{'workload':<16}{'memory':<8}{'prompt':>9}{'cached':>9}{'prefilled':>11}{'pages cached':>14}")
    for name in WORKLOADS:
        for kind in kinds:
            row = table[kind][name]
            print(
                f"{name:<16}{kind:<8}{row.prompt_tokens:>9}{row.cached_tokens:>9}{row.prefilled_tokens:>11}"
                f"{row.pages_cached:>14}"
            )


if __name__ == "__main__":
    main()
