"""`python -m bench.serving`: the real SGLang, stock against S0, S1, S2 and D0, at equal state bytes.

All servers run at once (on a CPU about 2.5 GB each), idle but for the one that is measured, and get the same
requests from SGLang's own client (`sglang.bench_serving`): many clients, one request of each at a time.
*shared*: questions behind 8 contexts, the source's workload (for the demo model at an eighth of its lengths);
*control*: the same lengths, nothing in common.  Each repetition has a seed of its own and another order of
the arms; ratios are paired by repetition.  Options behind `--` go to every server.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench import serving_client as client
from bench.paired import mean_figures, paired_ratio, rotated
from bench.server import BenchServer
from bench.serving_arms import (
    STOCK,
    Arm,
    Held,
    Setting,
    demo_setting,
    held,
    model_setting,
)
from bench.statistics import CONFIDENCE
from bench.workloads import SharedContexts, control
from sglang_hybrid.pools.factory import ORGANIZATIONS
from sglang_hybrid.simulator.request import Request

ARMS = (STOCK, *ORGANIZATIONS)
FIRST_SEED = 61000
WARM_SEED = 60000
TIMES = ("output_tokens_per_s", "mean_ttft_ms", "mean_tpot_ms", "mean_e2e_ms")
COMPARED = ("prefilled_tokens", "computed_tokens", "reused_tokens", "running", "waiting", *TIMES)
SHOWN = (*COMPARED[:3], "recomputed_tokens", "retractions", *COMPARED[3:], "same_answers")

Workloads = dict[str, Sequence[Sequence[Request]] | None]
"""Requests of each repetition; None: the client's own dataset."""
Runs = dict[str, dict[str, list[dict[str, float]]]]
"""Workload -> arm -> figures of its repetitions."""


def workload(count: int, scale: int) -> SharedContexts:
    """The source's workload, lengths divided by `scale`."""
    paper = SharedContexts()
    return replace(
        paper,
        count=count,
        context_tokens=paper.context_tokens // scale,
        mean_input=paper.mean_input / scale,
        mean_new=paper.mean_new / scale,
        context_limit=paper.context_limit // scale,
        most_new=paper.most_new // scale,
    )


def run_all(
    servers: Mapping[str, BenchServer],
    workloads: Workloads,
    vocabulary: int,
    arguments: Sequence[str],
    repetitions: int,
) -> Runs:
    """Every workload on every server.  `same_answers`: the part equal to the reference's, word for word."""
    reference = reference_of(servers)
    found: Runs = {name: {arm: [] for arm in servers} for name in workloads}
    for repetition in range(repetitions):
        seed = FIRST_SEED + repetition
        # The control goes first every other time.
        for name in list(workloads) if repetition % 2 == 0 else list(workloads)[::-1]:
            requests = workloads[name]
            made = None if requests is None else client.rows(requests[repetition], seed, vocabulary)
            answers = {}
            for arm in rotated(list(servers), repetition):
                figures, answers[arm] = client.measure(servers[arm], made, arguments, seed)
                found[name][arm].append(figures)
                print(
                    f"{repetition + 1}/{repetitions} {name} {arm}: {figures['prefilled_tokens']:.0f} "
                    f"prefilled, {figures['output_tokens_per_s']:.0f} tokens/s",
                    file=sys.stderr,
                )
            for arm, texts in answers.items():
                same = [one == other for one, other in zip(texts, answers[reference], strict=True)]
                found[name][arm][-1]["same_answers"] = sum(same) / len(same)
    return found


def reference_of(arms: Iterable[str]) -> str:
    """Stock, or the first of the arms where it is not among them."""
    names = list(arms)
    return STOCK if STOCK in names else names[0]


def compare(runs: Mapping[str, list[dict[str, float]]], reference: str) -> dict[str, Any]:
    """Means of the arms, and their ratios to `reference`, paired by repetition."""
    ratios: dict[str, Any] = {}
    for arm, own in runs.items():
        if arm == reference:
            continue
        ratios[arm] = {}
        for name in COMPARED:
            interval = paired_ratio([run[name] for run in own], [run[name] for run in runs[reference]])
            ratios[arm][name] = None if interval is None else interval._asdict()
    return {**{arm: mean_figures(own) for arm, own in runs.items()}, "ratios": ratios}


def report(
    setting: Setting, pools: Mapping[str, Held], runs: Runs, options: argparse.Namespace
) -> dict[str, Any]:
    """The JSON object."""
    reference = reference_of(pools)
    first, *others = runs
    answer = compare(runs[first], reference)
    for arm, memory in pools.items():
        answer[arm] |= memory._asdict()
    return {
        "workload": first,
        "reference": reference,
        "confidence": CONFIDENCE,
        "seeds": [FIRST_SEED + repetition for repetition in range(options.repetitions)],
        "balanced": options.repetitions % len(pools) == 0,
        "quick": options.quick,
        "grid": setting.grid,
        "budget_bytes": setting.budget_bytes,
        "clients": setting.clients,
        "load_average": round(os.getloadavg()[1], 2),
        **answer,
        **{name: compare(runs[name], reference) for name in others},
        "runs": runs,
    }


# -- the command ----------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        prog="python -m bench.serving",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument(
        "--arms",
        default=",".join(ARMS),
        help=f"comma list (default {','.join(ARMS)}); +FLAG or +FLAG=VALUE adds a flag, named without "
        "--hybrid- for an organization, without -- for stock: S1+exact, stock+mamba-full-memory-ratio=2",
    )
    options.add_argument("--model-path", help="a model of yours (default: the demo model)")
    options.add_argument(
        "--state-bytes",
        default="2,4,2",
        help="for --model-path: bytes of an element of KV, SSM and conv state (default 2,4,2)",
    )
    options.add_argument(
        "--grid", type=int, help="of S0 to S2; D0 keeps its own (default 64, --model-path: 512)"
    )
    options.add_argument("--pages", type=int, default=254, help="budget in S2 pages (default 254)")
    options.add_argument("--clients", type=int, default=24, help="requests at a time (default 24)")
    options.add_argument("--requests", type=int, default=40, help="of a run (default 40)")
    options.add_argument("--repetitions", type=int, default=5, help="each with a seed of its own (default 5)")
    options.add_argument(
        "--quick", action="store_true", help="stock and S2 only, 2 repetitions of 24 requests, unless given"
    )
    options.add_argument(
        "--client",
        default="",
        help="options of sglang.bench_serving in one string; --dataset-name replaces our requests",
    )
    options.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    return options


def chosen(argv: Sequence[str]) -> tuple[argparse.Namespace, list[Arm], list[str]]:
    """Options, arms, and what goes to the servers.  Exits with status 2 for what cannot be."""
    words = list(argv)
    at = words.index("--") if "--" in words else len(words)
    own, passed = words[:at], words[at + 1 :]
    options = parser()
    if "--quick" in own:
        options.set_defaults(arms=f"{STOCK},S2", repetitions=2, requests=24)
    found = options.parse_args(own)
    try:
        arms = [Arm.parse(text) for text in found.arms.split(",")]
    except ValueError as error:
        options.error(f"--arms: {error}")
    if len({arm.name for arm in arms}) < len(arms):
        options.error(f"--arms {found.arms} names one twice")
    for name in ("pages", "clients", "requests", "repetitions"):
        if getattr(found, name) < 1:
            options.error(f"--{name} {getattr(found, name)} is too small: use 1 or more")
    sizes = found.state_bytes.split(",")
    if len(sizes) != 3 or not all(size.isdigit() and int(size) for size in sizes):
        options.error(f"--state-bytes {found.state_bytes} is not three sizes: use three such as 2,4,2")
    found.state_bytes = tuple(int(size) for size in sizes)
    return found, arms, passed


def settle(options: argparse.Namespace, folder: Path, passed: Sequence[str]) -> Setting:
    """What the servers have in common."""
    common = {
        "pages": options.pages,
        "clients": options.clients,
        "passed": tuple(passed),
    }
    if options.model_path is None:
        return demo_setting(folder / "demo", options.grid, **common)
    return model_setting(Path(options.model_path), options.grid or 512, options.state_bytes, **common)


def main(argv: Sequence[str] | None = None) -> None:
    options, arms, passed = chosen(sys.argv[1:] if argv is None else argv)
    arguments = [*("--max-concurrency", str(options.clients)), *options.client.split()]
    # The client's parser refuses what it does not know before a server starts.
    client.client_options(arguments)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        setting = settle(options, Path(folder), passed)
        paper = workload(options.requests, setting.scale)
        shared = [paper.requests(FIRST_SEED + repetition) for repetition in range(options.repetitions)]
        workloads: Workloads = {"shared": shared, "control": [control(requests) for requests in shared]}
        if "--dataset-name" in options.client:
            workloads = {"client": None}
        servers = {arm.name: BenchServer(setting.args(arm), setting.env) for arm in arms}
        for server in servers.values():
            stack.callback(server.stop)
        for server in servers.values():
            stack.enter_context(server)
        pools = {arm.name: held(arm, setting, servers[arm.name]) for arm in arms}
        warm = client.rows(paper.requests(WARM_SEED)[:8], WARM_SEED, setting.vocabulary)
        for server in servers.values():
            client.measure(server, warm, arguments, WARM_SEED)
        runs = run_all(servers, workloads, setting.vocabulary, arguments, options.repetitions)
    answer = report(setting, pools, runs, options)
    print(json.dumps(answer) if options.json else "\n".join(lines(answer, list(servers))))


def lines(answer: Mapping[str, Any], arms: Sequence[str]) -> list[str]:
    """Two tables, ratios behind the figures they belong to."""
    head = (
        f"{answer['budget_bytes']} bytes of state, grid {answer['grid']}, {answer['clients']} clients, seeds "
        f"{answer['seeds'][0]} to {answer['seeds'][-1]}, load {answer['load_average']}; in brackets the "
        f"ratio to {answer['reference']} and its {answer['confidence']:.0%} interval"
    )
    table = [head]
    for name in ("workload", "control"):
        part = answer if name == "workload" else answer.get("control")
        if part is None:
            continue
        table += ["", answer["workload"] if name == "workload" else name]
        for figure in SHOWN:
            for arm in arms:
                table.append(
                    f"  {figure:<20}{arm:<16}{part[arm][figure]:>12.2f}  {_ratio(part, arm, figure)}"
                )
    return table


def _ratio(part: Mapping[str, Any], arm: str, figure: str) -> str:
    interval = part["ratios"].get(arm, {}).get(figure)
    if interval is None:
        return ""
    if interval["low"] is None:
        return f"({interval['ratio']:.3f})"
    return f"({interval['ratio']:.3f}, {interval['low']:.3f} to {interval['high']:.3f})"


if __name__ == "__main__":
    main()
