"""The planner's answer: plain data for `--json`, and its lines on a terminal."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any, NamedTuple

from sglang_hybrid.cli.ledger_table import columns
from sglang_hybrid.planner.candidates import Candidate
from sglang_hybrid.planner.plan import Against, Plan, account_of
from sglang_hybrid.planner.race import NOISE, Interval
from sglang_hybrid.pools.factory import ORGANIZATIONS, own_options
from sglang_hybrid.radix.policy import DEFAULT_POLICY
from sglang_hybrid.simulator.devices import Device

FLAG_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"}
"""Short spellings in the words of SGLang's flags."""


class About(NamedTuple):
    """What the report says of model and machine."""

    model: str
    source: str
    path: str
    """For `--model-path`."""
    served: bool
    """By the plugin."""
    device: Device
    memory: int
    static_part: float
    """Of it, for weights and state."""
    weight_bytes: float
    tp: int
    kv_dtype: str
    ssm_dtype: str


def report(plan: Plan, about: About) -> dict[str, Any]:
    """Everything that is told.  Excesses are parts: 0.1 when a request takes 10 % longer."""
    best, machine = plan.best, plan.machine
    return {
        "model": about.model,
        "source": about.source,
        "served_by_the_plugin": about.served,
        "device": about.device.name,
        "device_source": about.device.source,
        "memory_bytes": about.memory,
        "weight_bytes": int(about.weight_bytes),
        "static_part": about.static_part,
        "tp": about.tp,
        "budget_bytes": machine.budget,
        "traffic": plan.traffic.describe(),
        "recommended": {
            "memory": best.memory,
            "grid": best.grid,
            "conv_slot_bytes": account_of(machine, best).conv_slot_bytes,
            **dict.fromkeys(own_options()),
            **best.own,
            "headroom": best.headroom,
            "checkpoints": best.checkpoints,
        },
        "reasons": reasons(plan),
        "ledger": [
            {
                "memory": line.memory,
                "grid": line.grid,
                "pages": line.capacity.pages,
                "checkpoints": line.capacity.checkpoints,
                "request_bytes": line.request_bytes,
                "requests_at_once": line.capacity.holds,
                "checkpoint_in_blocks": round(line.checkpoint_blocks, 2),
            }
            for line in plan.ledger
        ],
        "predicted": {name: _rounded(one) for name, one in plan.figures.items()},
        "seeds": plan.seeds,
        "requests": plan.requests,
        "simulations": plan.simulations,
        "other_memories": {
            name: {"candidate": one.candidate.report(), "excess": _rounded(one.excess)}
            for name, one in plan.memories.items()
        },
        "changes": [
            {
                "circumstances": one.circumstances,
                "candidate": one.candidate.report() if one.candidate else None,
                "gain": round(one.gain, 4),
            }
            for one in plan.changes
        ],
        "left_out": plan.left_out,
        "command": command(plan, about),
    }


def _rounded(one: Interval) -> dict[str, float]:
    return {name: float(f"{value:.5g}") for name, value in one._asdict().items()}


# -- reasons ------------------------------------------------------------------------------------


def reasons(plan: Plan) -> dict[str, str]:
    """One line for each choice, by its name."""
    best = plan.best
    why = {
        "memory": _memory(plan),
        "grid": _against(plan, "grid", "{} tokens"),
        "headroom": _against(plan, "headroom", "f = {:g}"),
        "checkpoints": _against(plan, "checkpoints", "{}"),
    }
    for name, (_, reason) in ORGANIZATIONS[best.memory].settled(plan.machine.model, best.grid).items():
        why[name] = reason
    for name in best.weighed:
        why[name] = _against(plan, name, "{:g}")
    return why


def _longer(one: Against, name: str) -> str:
    """`S1 takes 5.2 % longer (3.1 to 7.4)`, in few words."""
    mean, low, high = (100 * part for part in one.excess)
    if abs(one.excess.mean) <= NOISE or one.excess.low <= 0 <= one.excess.high:
        return f"{name} as good" if abs(mean) < 0.05 else f"{name} {mean:+.1f} %, within noise"
    return f"{name} {mean:+.1f} % ({low:+.1f} to {high:+.1f})"


def _memory(plan: Plan) -> str:
    ranked = sorted(plan.memories.values(), key=lambda one: one.excess.mean)
    told = [_longer(one, f"{one.candidate.memory} (grid {one.candidate.grid})") for one in ranked]
    return "a request with the others, each at its best: " + "; ".join(told)


def _against(plan: Plan, choice: str, form: str) -> str:
    others = plan.against[choice]
    if not others:
        return "nothing else starts here"
    if all(abs(one.excess.mean) <= NOISE for one in others):
        return "no other value changes the time of a request"
    return "a request with " + "; ".join(
        _longer(one, form.format(one.candidate.value(choice))) for one in others
    )


def words(one: Candidate) -> str:
    """A candidate in short: `S2, grid 512, f 0.1, branch`."""
    own = "".join(f", {name.replace('_', ' ')} {value:g}" for name, value in one.weighed.items())
    return f"{one.memory}, grid {one.grid}{own}, f {one.headroom:g}, {one.checkpoints}"


def said(value: Any) -> str:
    """A value as its flag takes it."""
    return value if isinstance(value, str) else f"{value:g}"


# -- command ------------------------------------------------------------------------------------


def command(plan: Plan, about: About) -> list[str]:
    """Arguments of the server; what is a default of the plugin is left out."""
    best, machine = plan.best, plan.machine
    argv = ["python", "-m", "sglang.launch_server", "--model-path", about.path, "--hybrid-mem", best.memory]
    if best.grid != machine.default_grid(best):
        argv += ["--hybrid-grid", str(best.grid)]
    argv += ["--hybrid-budget-bytes", str(machine.budget)]
    for option in ORGANIZATIONS[best.memory].options:
        value = best.own[option.name]
        if value != option.default:
            argv += [option.flag, said(value)]
    if best.headroom != DEFAULT_POLICY.headroom:
        argv += ["--hybrid-headroom", f"{best.headroom:g}"]
    if best.checkpoints != DEFAULT_POLICY.checkpoints:
        argv += ["--hybrid-checkpoints", best.checkpoints]
    if machine.eviction != DEFAULT_POLICY.eviction:
        argv += ["--hybrid-eviction", machine.eviction]
    argv += ["--mamba-ssm-dtype", FLAG_DTYPES.get(about.ssm_dtype, about.ssm_dtype)]
    if about.kv_dtype.startswith("fp8"):
        argv += ["--kv-cache-dtype", "fp8_e4m3" if about.kv_dtype == "fp8" else about.kv_dtype]
    if about.tp > 1:
        argv += ["--tp-size", str(about.tp)]
    argv += ["--max-running-requests", str(machine.most_running)]
    return [*argv, "--chunked-prefill-size", str(machine.prefill_tokens)]


# -- terminal -----------------------------------------------------------------------------------


def lines(answer: dict[str, Any]) -> Iterator[str]:
    """Lines of the report."""
    gib = 2**30
    yield f"{answer['model']}: {answer['source']}"
    if not answer["served_by_the_plugin"]:
        yield "The plugin does not serve this family yet: the plan is for comparison only."
    ranks = f", one of {answer['tp']} ranks" if answer["tp"] > 1 else ""
    memory, weights, budget = (answer[f"{name}_bytes"] / gib for name in ("memory", "weight", "budget"))
    yield (
        f"{answer['device']}{ranks}: {budget:.1f} GiB for state ({answer['static_part']:g} of {memory:.1f} "
        f"GiB less weights of {weights:.1f} GiB)"
    )
    yield f"Traffic {answer['traffic']}"
    yield ""
    yield "Recommended, and why:"
    yield from _choices(answer)
    yield ""
    yield "Ledger (a request of mean length, its live state and one checkpoint):"
    yield from _ledger(answer)
    yield ""
    yield (
        f"Predicted, by simulation of {answer['requests']} requests on {answer['seeds']} seeds "
        "(mean, 95 % interval):"
    )
    yield from _predicted(answer["predicted"])
    yield ""
    yield "It would change:"
    yield from _changes(answer["changes"])
    if answer["left_out"]:
        yield f"Left out, since they do not start: {len(answer['left_out'])}, such as {answer['left_out'][0]}"
    yield ""
    yield "Launch:"
    yield "  " + shlex.join(answer["command"])


def _choices(answer: dict[str, Any]) -> Iterator[str]:
    flags = {"memory": "--hybrid-mem", "grid": "--hybrid-grid"}
    flags |= {name: option.flag for name, option in own_options().items()}
    flags |= {"headroom": "--hybrid-headroom", "checkpoints": "--hybrid-checkpoints"}
    for name, flag in flags.items():
        value = answer["recommended"][name]
        if value is not None:
            yield f"  {flag} {said(value)}".ljust(32) + answer["reasons"][name]


def _ledger(answer: dict[str, Any]) -> Iterator[str]:
    head = ["", "pages", "states", "MiB a request", "requests at once", "a checkpoint, in blocks"]
    rows = [
        [
            f"{line['memory']}, grid {line['grid']}",
            f"{line['pages']:,}",
            "-" if line["checkpoints"] is None else f"{line['checkpoints']:,}",
            f"{line['request_bytes'] / 2**20:.0f}",
            f"{line['requests_at_once']:,}",
            f"{line['checkpoint_in_blocks']:.2f}",
        ]
        for line in answer["ledger"]
    ]
    yield from columns([head, *rows])


FIGURES = {
    "throughput": ("output tokens a second", 1.0, ".0f"),
    "capacity": ("the same at twice the rate", 1.0, ".0f"),
    "latency": ("seconds a request, queueing included", 1.0, ".2f"),
    "first_token": ("seconds to the first token", 1.0, ".2f"),
    "hit_rate": ("prompt tokens from the cache, %", 100.0, ".1f"),
    "running": ("requests running (median)", 1.0, ".0f"),
    "waiting": ("requests waiting (median)", 1.0, ".0f"),
}


def _predicted(figures: dict[str, dict[str, float]]) -> Iterator[str]:
    rows = []
    for name, (what, times, form) in FIGURES.items():
        mean, low, high = (times * figures[name][one] for one in ("mean", "low", "high"))
        rows.append([what, format(mean, form), f"{format(max(low, 0.0), form)} to {format(high, form)}"])
    yield from columns(rows)


def _changes(changes: list[dict[str, Any]]) -> Iterator[str]:
    moved = [one for one in changes if one["candidate"]]
    for one in moved:
        percent = 100 * one["gain"]
        gain = "this one does not start" if percent == 100 else f"a request takes {percent:.0f} % less"
        yield f"  {one['circumstances']}: {words(Candidate.of(**one['candidate']))} ({gain})"
    stays = [one["circumstances"] for one in changes if not one["candidate"]]
    if stays:
        yield f"  not {', '.join(stays)}"
