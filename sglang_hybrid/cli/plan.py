"""`sglang-hybrid plan MODEL --memory 40GiB --traffic T`: which memory fits a model, a device and traffic.

MODEL is a built-in name, a Hugging Face directory or a config.json.  T is a profile (`rag`, `chat`, `agents`,
`no-sharing`), figures of one (`rate=4,input=3000`, alone or after a name), a JSON object or file of them, or
a Mooncake trace (JSON lines).  The ledger sorts out what cannot start; the rest is simulated on the core that
serves, under a roofline of the device.  A plan is judged by the mean time of a request, queueing included.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from pathlib import Path

from sglang_hybrid.cli.ledger import SSM_DTYPES, choice, load, size, whole
from sglang_hybrid.cli.ledger_report import DTYPES
from sglang_hybrid.cli.plan_report import About, lines, report
from sglang_hybrid.geometry import GeometryError
from sglang_hybrid.models import KINDS, HybridShape
from sglang_hybrid.models.fields import ConfigError
from sglang_hybrid.models.public import PUBLIC
from sglang_hybrid.planner.candidates import Machine
from sglang_hybrid.planner.plan import NothingFits, plan
from sglang_hybrid.radix.eviction import EVICTIONS
from sglang_hybrid.radix.policy import DEFAULT_POLICY
from sglang_hybrid.simulator.cost import StepCost, Weights
from sglang_hybrid.simulator.devices import DEVICES, Device
from sglang_hybrid.simulator.traffic import Profile, TrafficError
from sglang_hybrid.simulator.traffic_read import read_traffic

STATIC_PART = 0.9
"""Part of a device's memory for weights and state; the rest is for activations, graphs and the allocator."""

MOST_RUNNING = 64
"""Requests at once, about the source's 63: with many more, answers only slow each other down."""

PREFILL_TOKENS = 8192

PARAMETERS = {
    "falcon-h1-7b": (7.59e9, 7.59e9),
    "qwen3-next-80b": (80e9, 3e9),
    "granite-4.0-h-small": (32e9, 9e9),
    "granite-4.0-h-tiny": (7e9, 1e9),
    "granite-4.0-h-micro": (3e9, 3e9),
    "granite-4.0-h-1b": (1.5e9, 1.5e9),
    "kimi-linear-48b": (48e9, 3e9),
    # Active ones of Kimi-K3 and all of Ling: assumed.
    "kimi-k3": (2.8e12, 50e9),
    "ling-2.6-flash": (104e9, 7.4e9),
    "ling-3.0-flash": (104e9, 7.4e9),
    "qwen3-coder-next-80b": (80e9, 3e9),
    "qwen3.8-2.4t": (2.4e12, 95e9),
    "nemotron-3-nano-30b": (31.6e9, 3.6e9),
    "nemotron-3-super-120b": (120e9, 12e9),
    "granite-4.0-h-350m": (0.34e9, 0.34e9),
}
"""Parameters, and those that compute on a token, where a model's name does not say them well enough."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser to those of `sglang-hybrid`."""
    parser = subparsers.add_parser(
        "plan",
        help="which organization, grid, headroom and placement fit a model, its memory and its traffic",
        description=__doc__,
        epilog=f"built-in names: {', '.join(PUBLIC)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    # Values stay text here: run() checks them and says in one sentence what is legal.
    parser.add_argument("model", metavar="MODEL", help="built-in name, model directory or config.json")
    parser.add_argument("--memory", metavar="SIZE", required=True, help="of one device: 40GiB, 80G")
    parser.add_argument("--traffic", metavar="T", default="rag", help="profile or trace (default: rag)")
    parser.add_argument("--rate", metavar="R", help="requests a second, instead of the traffic's own")
    parser.add_argument(
        "--device",
        metavar="NAME",
        help=f"{', '.join(DEVICES)} (default: the first of them that has the memory)",
    )
    parser.add_argument("--tp", metavar="N", default="1", help="tensor-parallel size (default: 1)")
    parser.add_argument("--kv-dtype", metavar="TYPE", default="bf16", help="of attention KV (default: bf16)")
    parser.add_argument("--ssm-dtype", metavar="TYPE", default="bf16", help="of SSM states (default: bf16)")
    parser.add_argument(
        "--budget", metavar="BYTES", help="for state, instead of what weights leave of 0.9 of the memory"
    )
    parser.add_argument(
        "--parameters", metavar="P[,A]", help="of the model, and those that compute on a token: 30e9,3e9"
    )
    parser.add_argument(
        "--max-running", metavar="N", default=str(MOST_RUNNING), help=f"at once (default: {MOST_RUNNING})"
    )
    parser.add_argument(
        "--eviction",
        metavar="NAME",
        default=DEFAULT_POLICY.eviction,
        help=f"the server's --hybrid-eviction: {', '.join(EVICTIONS)} (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the plan; exit status 2 with one sentence for input that makes none."""
    try:
        machine, about = machine_of(
            args.model,
            memory=args.memory,
            device=args.device,
            tp=args.tp,
            kv_dtype=args.kv_dtype,
            ssm_dtype=args.ssm_dtype,
            budget=args.budget,
            parameters=args.parameters,
            max_running=args.max_running,
            eviction=args.eviction,
        )
        traffic = read_traffic(args.traffic)
        if args.rate is not None:
            traffic = traffic.at_rate(number("--rate", args.rate))
        conversations = isinstance(traffic, Profile) and traffic.turns > 1
        found = plan(machine, traffic, conversations, workers=os.cpu_count() or 1)
    except (ConfigError, GeometryError, NothingFits, TrafficError) as error:
        print(f"sglang-hybrid plan: {error}", file=sys.stderr)
        return 2
    answer = report(found, about)
    print(json.dumps(answer, indent=2) if args.json else "\n".join(lines(answer)))
    return 0


def machine_of(
    model: str,
    *,
    memory: str,
    device: str | None = None,
    tp: str = "1",
    kv_dtype: str = "bf16",
    ssm_dtype: str = "bf16",
    budget: str | None = None,
    parameters: str | None = None,
    max_running: str = str(MOST_RUNNING),
    eviction: str = DEFAULT_POLICY.eviction,
) -> tuple[Machine, About]:
    """One rank of the model on the device.  Raises `ConfigError`."""
    name, source, shape = load(model)
    ranks = whole("--tp", tp)
    kv = DTYPES[choice("--kv-dtype", kv_dtype, tuple(DTYPES))]
    ssm = DTYPES[choice("--ssm-dtype", ssm_dtype, SSM_DTYPES)]
    has = size("--memory", re.sub(r"(?<=[kMGTi])B$", "", memory))
    chosen = _device(device, has)
    active, weight_bytes = _weights(name, model, parameters)
    left = int(has * STATIC_PART - weight_bytes / ranks)
    if budget is None and left <= 0:
        raise ConfigError(
            f"--memory {memory} leaves nothing beside weights of {weight_bytes / ranks / 1e9:.1f} GB a rank: "
            f"use {1.3 * weight_bytes / ranks / STATIC_PART / 2**30:.0f}GiB or more, or a --tp above {ranks}"
        )
    geometry = shape.geometry(ranks, kv_bytes=kv[1], ssm_bytes=ssm[1], conv_bytes=2)
    cost = StepCost.of(
        chosen, Weights(active / ranks, weight_bytes / ranks, _pair_flops(shape) / ranks), geometry
    )
    bytes_left = left if budget is None else size("--budget", re.sub(r"(?<=[kMGTi])B$", "", budget))
    running = whole("--max-running", max_running)
    order = choice("--eviction", eviction, tuple(EVICTIONS))
    machine = Machine(geometry, shape.chunk, bytes_left, cost, running, PREFILL_TOKENS, order)
    folder = Path(model).parent if Path(model).is_file() else Path(model)
    path = PUBLIC[name].repository if name in PUBLIC else str(folder)
    return machine, About(
        name,
        source,
        path,
        shape.kind in KINDS,
        chosen,
        has,
        STATIC_PART,
        weight_bytes,
        ranks,
        kv_dtype,
        ssm_dtype,
    )


def _device(name: str | None, memory: int) -> Device:
    if name is None:
        enough = [one for one in DEVICES.values() if one.memory >= memory]
        if not enough:
            most = max(DEVICES.values(), key=lambda one: one.memory)
            raise ConfigError(
                f"--memory {memory} is more than one device has: use {most.memory // 10**9}G ({most.name})"
            )
        return min(enough, key=lambda one: one.memory)
    found = {one.lower(): one for one in DEVICES}.get(name.lower())
    if found is None:
        raise ConfigError(f"--device {name} is not known: use one of {', '.join(DEVICES)}")
    if memory > DEVICES[found].memory:
        raise ConfigError(
            f"--memory {memory} is more than a {found} has: use {DEVICES[found].memory} bytes or less"
        )
    return DEVICES[found]


def _weights(name: str, model: str, given: str | None) -> tuple[float, float]:
    """Parameters that compute on a token, and bytes of all."""
    if given is not None:
        parts = [number("--parameters", part) for part in given.split(",")]
        if len(parts) > 2 or parts[-1] > parts[0] or parts[-1] < 1e6:
            raise ConfigError(f"--parameters {given} is no count: use 7.6e9, or 30e9,3e9 where 3e9 compute")
        return parts[-1], 2 * parts[0]
    if name in PUBLIC:
        total, active = PARAMETERS.get(name) or _named(name)
        return active, 2 * total
    folder = Path(model) if Path(model).is_dir() else Path(model).parent
    stored = float(sum(file.stat().st_size for file in folder.glob("*.safetensors")))
    index = folder / "model.safetensors.index.json"
    if not stored and index.is_file():
        try:
            stored = float(json.loads(index.read_text(encoding="utf-8"))["metadata"]["total_size"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{index} does not say its total_size ({error}): give --parameters") from error
    if not stored:
        raise ConfigError(f"there are no weights beside {model}: give --parameters, like 7.6e9")
    return stored / 2, stored


def _named(name: str) -> tuple[float, float]:
    """Billions in a model's name: all, and those that compute on a token."""
    total = re.search(r"(?<![\w.])(\d+(?:\.\d+)?)([bm])(?![a-z])", name)
    active = re.search(r"-a(\d+(?:\.\d+)?)b", name)
    assert total is not None, f"{name} belongs in PARAMETERS"
    count = float(total[1]) * (1e9 if total[2] == "b" else 1e6)
    return count, float(active[1]) * 1e9 if active else count


def _pair_flops(shape: HybridShape) -> float:
    """FLOPs of all attention layers for one query and one key: both products of every head."""
    return float(2 * shape.kv_row * shape.query_heads * len(shape.attention) * (2 if shape.latent else 1))


def number(flag: str, text: str) -> float:
    """A positive number.  Raises `ConfigError`."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e15:
        raise ConfigError(f"{flag} {text} is no number above 0")
    return value
