"""`sglang-hybrid models`: which public checkpoints are served, and what a checkpoint of their state weighs.

One row a checkpoint whose config the package knows whole.  Read from SGLang's own configuration of it, by the
rules that a start with `--hybrid-mem` uses; nothing is downloaded, no weights are read.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_hybrid.geometry import GRID_STEP, GeometryError
from sglang_hybrid.models import hybrid_shape, tested
from sglang_hybrid.models.public import PUBLIC, PublicModel

if TYPE_CHECKING:
    from sglang_hybrid.engine.model_rules import RankState

RANKS = (1, 2, 4, 8)
LARGEST_GRID = 16_384
PAGES = 64
"""Blocks and states of an arena in which a grid is tried."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser to those of `sglang-hybrid`."""
    parser = subparsers.add_parser(
        "models",
        help="which public checkpoints are served, bytes of their state, least grid",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON array")


def run(args: argparse.Namespace) -> int:
    """Print the table; exit status 2 where SGLang is not installed."""
    try:
        import sglang  # noqa: F401
    except ImportError as error:
        print(f"sglang-hybrid models: it asks SGLang's own configuration ({error})", file=sys.stderr)
        return 2
    table = rows()
    print(json.dumps(table, indent=2) if args.json else "\n".join(_lines(table)))
    return 0


def rows() -> list[dict[str, Any]]:
    """One object a checkpoint; see `row`."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    with tempfile.TemporaryDirectory() as place:
        return [row(name, model, Path(place) / name) for name, model in PUBLIC.items() if model.whole]


def row(name: str, model: PublicModel, directory: Path) -> dict[str, Any]:
    """`kind`, `attention` (form of KV), `served`, `tested` by end-to-end tests of this package, `reason` why
    not served; `tp`: for each size that splits the model bytes of a rank's checkpoint, least grid of S1, S2.
    """
    from sglang_hybrid.engine.served import architecture, why_not_served

    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(model.config))
    facts, shape = _facts(directory, 1), hybrid_shape(model.config, name)
    reason = why_not_served(facts.model)
    return {
        "name": name,
        "repository": model.repository,
        "kind": shape.kind,
        "attention": facts.model.attention_arch.name,
        "served": reason is None,
        "tested": reason is None and architecture(facts.model) in tested(),
        "reason": reason,
        "tp": {
            str(tp): _rank(directory, tp) if reason is None and shape.divides(tp) else None for tp in RANKS
        },
    }


def _facts(directory: Path, tp: int) -> Any:
    from sglang.srt.server_args import prepare_server_args

    from sglang_hybrid.engine.rules import Facts

    argv = ["--model-path", str(directory), "--skip-tokenizer-init", "--hybrid-mem", "S1"]
    return Facts(prepare_server_args([*argv, "--tp-size", str(tp)]))


def _rank(directory: Path, tp: int) -> dict[str, Any]:
    from sglang_hybrid.engine.model_rules import rank_state

    state = rank_state(_facts(directory, tp))
    each = state.model.ssm_bytes + state.model.conv_bytes
    return {
        "checkpoint_bytes": len(state.model.recurrent_layers) * each,
        "least_grid": {name: least_grid(name, state) for name in ("S1", "S2")},
    }


def least_grid(organization: str, state: RankState) -> int | None:
    """Smallest grid, in steps of `GRID_STEP`, whose pages hold the model's state; None: there is none."""
    from sglang_hybrid.pools import factory
    from sglang_hybrid.pools.arena import check_alignment

    model = state.model
    for grid in range(GRID_STEP, LARGEST_GRID + 1, GRID_STEP):
        budget = PAGES * model.arenas * (grid * model.kv_row_bytes + model.checkpoint_bytes)
        try:
            laid = factory.make_organization(organization, model, grid, budget)
            check_alignment(laid.layout(), state.shape, model)
        except GeometryError:
            continue
        return grid
    return None


def _lines(table: list[dict[str, Any]]) -> list[str]:
    """The table for people, at tensor-parallel size 1."""
    lines = [f"{'checkpoint':<26}{'layers':<14}{'KV':<6}{'served':<9}{'MiB':>8}{'S1':>7}{'S2':>7}"]
    for one in table:
        rank = one["tp"]["1"]
        state = "tested" if one["tested"] else "yes" if one["served"] else "no"
        mib, grids = (f"{rank['checkpoint_bytes'] / 2**20:.1f}", rank["least_grid"]) if rank else ("-", {})
        lines.append(
            f"{one['name']:<26}{one['kind']:<14}{one['attention']:<6}{state:<9}{mib:>8}"
            f"{grids.get('S1') or '-':>7}{grids.get('S2') or '-':>7}"
        )
    lines += [f"{one['name']}: {one['reason']}" for one in table if one["reason"]]
    return lines
