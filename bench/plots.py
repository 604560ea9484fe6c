"""The source's figures redrawn: throughput over headroom, depth and retention, sharing and retention.

An opaque white ground, dark lines that differ in marker and stroke, and bars that differ in hatching: legible
in print, in grey, and on a dark screen.  Every figure names its units, its workload and its seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.effects import BUDGETS, HEADROOMS, Runs, at, retained, under_load
from bench.statistics import t_interval

WORKLOAD = "8 shared contexts, 3,332 input tokens on average, 3 req/s; Falcon-H1-7B, A100-40GB"
LINES: dict[str, dict[str, Any]] = {
    "S2": {"color": "#0b3d91", "marker": "o", "linestyle": "-"},
    "D0": {"color": "#b33000", "marker": "s", "linestyle": "--"},
}
BARS: tuple[dict[str, Any], ...] = (
    {"color": "#dbe4f0", "edgecolor": "#0b3d91", "hatch": ""},
    {"color": "#5b7fb5", "edgecolor": "#0b3d91", "hatch": "//"},
)
PUBLISHED: dict[str, Any] = {"color": "#b33000", "marker": "D", "linestyle": "none", "markersize": 7}
PUBLISHED_THROUGHPUT = {"SHARE": (513.70, 592.07), "ISOLATE": (371.42, 374.52)}


def draw(runs: Runs, seeds: Sequence[int], folder: Path) -> list[Path]:
    """Write the three figures; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    figures = {
        "throughput-over-headroom.png": throughput_over_headroom(runs, seeds),
        "depth-and-retention.png": depth_and_retention(runs, seeds),
        "sharing-and-retention.png": sharing_and_retention(runs, seeds),
    }
    for name, figure in figures.items():
        figure.savefig(folder / name, dpi=150, facecolor="white", transparent=False)
    return [folder / name for name in figures]


def throughput_over_headroom(runs: Runs, seeds: Sequence[int]) -> Figure:
    """One panel a byte budget."""
    figure, panels = _figure(
        "Throughput up to the last arrival, over admission headroom", seeds, len(BUDGETS), WORKLOAD
    )
    for panel, budget in zip(panels, BUDGETS):
        for organization, style in LINES.items():
            values = [under_load(runs, at(organization, budget, f)) for f in HEADROOMS]
            panel.errorbar(
                HEADROOMS,
                [fmean(one) for one in values],
                yerr=_errors(values),
                capsize=3,
                label=organization,
                **style,
            )
        panel.set_title(f"b{budget} ({budget * 1568 // 512} S2 pages)")
        panel.set_xlabel("headroom f (part of all blocks)")
        panel.set_xticks(HEADROOMS)
    panels[0].set_ylabel("output tokens per second")
    panels[0].legend()
    return figure


def depth_and_retention(runs: Runs, seeds: Sequence[int]) -> Figure:
    figure, (panel,) = _figure(
        "Reuse depth, with and without retention", seeds, 1, f"S2, 254 pages, f = 0. {WORKLOAD}"
    )
    names = {"j_adopt": "adopted (J_adopt)", "attention": "attention KV still there"}
    _bars(
        panel,
        list(names.values()),
        [
            [runs(retained(retention=retention), figure=depth) for depth in names]
            for retention in (False, True)
        ],
    )
    panel.set_ylabel("tokens per request, first admission")
    _legend_above(panel)
    return figure


def sharing_and_retention(runs: Runs, seeds: Sequence[int]) -> Figure:
    figure, (panel,) = _figure(
        "Throughput with and without retention", seeds, 1, f"S2, 254 pages, f = 0. {WORKLOAD}"
    )
    arms = {"SHARE": False, "ISOLATE": True}
    _bars(
        panel,
        list(arms),
        [[runs(retained(isolate, retention)) for isolate in arms.values()] for retention in (False, True)],
    )
    places = [place + shift for place in range(len(arms)) for shift in (-0.2, 0.2)]
    published = [value for name in arms for value in PUBLISHED_THROUGHPUT[name]]
    panel.plot(places, published, label="published", **PUBLISHED)
    panel.set_ylabel("output tokens per second")
    _legend_above(panel)
    return figure


def _figure(title: str, seeds: Sequence[int], panels: int, workload: str) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(4 + 3 * panels, 4.6), layout="constrained")
    figure.patch.set_alpha(1.0)
    axes = figure.subplots(1, panels, sharey=True, squeeze=False)[0]
    figure.suptitle(title, fontsize=12)
    figure.supxlabel(
        f"{_wrap(workload, 70 if panels == 1 else 130)}\n"
        f"simulated; mean and 95 % t interval, seeds {seeds[0]} to {seeds[-1]} ({len(seeds)})",
        fontsize=8,
    )
    for panel in axes:
        panel.grid(axis="y", color="#cccccc", linewidth=0.6)
        panel.set_axisbelow(True)
    return figure, list(axes)


def _wrap(text: str, width: int) -> str:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return "\n".join(lines)


def _bars(panel: Axes, groups: Sequence[str], values: Sequence[Sequence[Sequence[float]]]) -> None:
    """Two bars a group: without and with retention."""
    for shift, label, arm, style in zip((-0.2, 0.2), ("without retention", "with retention"), values, BARS):
        places = [place + shift for place in range(len(groups))]
        means = [fmean(one) for one in arm]
        panel.bar(places, means, 0.36, yerr=_errors(arm), capsize=4, label=label, ecolor="#222222", **style)
    panel.set_xticks(range(len(groups)), groups)


def _errors(values: Sequence[Sequence[float]]) -> list[list[float]]:
    """Below and above the means, for `yerr`."""
    intervals: list[Any] = [(fmean(one), *t_interval(one)) for one in values]
    return [[mean - low for mean, low, _ in intervals], [high - mean for mean, _, high in intervals]]


def _legend_above(panel: Axes) -> None:
    low, high = panel.get_ylim()
    panel.set_ylim(0, high + 0.25 * (high - low))
    panel.legend(loc="upper right", framealpha=1.0)
