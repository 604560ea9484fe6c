"""`sglang-hybrid ledger MODEL`: what a model's attention blocks and checkpoints cost in each organization.

MODEL is a built-in name, a Hugging Face directory or a config.json.  Nothing is downloaded and no
weights are read.  The arithmetic is that of the pools.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from decimal import Decimal
from pathlib import Path

from sglang_hybrid.cli.ledger_report import DTYPES, Question, report
from sglang_hybrid.cli.ledger_table import table
from sglang_hybrid.geometry import CONV_SLOTS, DEFAULT_ATTENTION_SHARE, DEFAULT_GRID, GeometryError
from sglang_hybrid.models import HybridShape, hybrid_shape
from sglang_hybrid.models.fields import ConfigError
from sglang_hybrid.models.public import PUBLIC

SUFFIXES = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
SUFFIXES |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "": 1}

EXAMPLE = (16, 4)
"""Attention blocks and checkpoints when nobody says otherwise: the source's example."""


SSM_DTYPES = tuple(name for name in DTYPES if not name.startswith("fp8"))


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser to those of `sglang-hybrid`."""
    parser = subparsers.add_parser(
        "ledger",
        help="bytes of a model's state, and what each memory organization makes of them",
        description=__doc__,
        epilog=f"built-in names: {', '.join(PUBLIC)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    # Values stay text here: run() checks them and says in one sentence what is legal.
    parser.add_argument("model", metavar="MODEL", help="built-in name, model directory or config.json")
    parser.add_argument(
        "--attention-blocks", metavar="N", help=f"blocks of one grid step (default: {EXAMPLE[0]})"
    )
    parser.add_argument("--checkpoints", metavar="N", help=f"checkpoints (default: {EXAMPLE[1]})")
    parser.add_argument(
        "--tokens",
        metavar="N",
        help="instead: one sequence of N tokens, a checkpoint at every boundary that it reaches "
        "(or --checkpoints of them)",
    )
    parser.add_argument("--tp", metavar="N", default="1", help="tensor-parallel size (default: 1)")
    parser.add_argument(
        "--grid",
        metavar="TOKENS",
        help=f"tokens between two boundaries (default: {DEFAULT_GRID} or the next legal one; D0: its own)",
    )
    parser.add_argument("--ssm-dtype", metavar="TYPE", default="bf16", help="bf16 (default), fp16 or fp32")
    parser.add_argument(
        "--kv-dtype", metavar="TYPE", default="bf16", help="bf16 (default), fp16, fp32 or fp8"
    )
    parser.add_argument(
        "--budget",
        metavar="BYTES",
        help="bytes for all layers of one rank, as --hybrid-budget-bytes: 8G, 512Mi",
    )
    parser.add_argument(
        "--attention-share",
        metavar="F",
        default=str(DEFAULT_ATTENTION_SHARE),
        help=f"part of D0's budget that attention gets (default: {DEFAULT_ATTENTION_SHARE})",
    )
    parser.add_argument(
        "--conv-slots",
        metavar="KIND",
        default=CONV_SLOTS[0],
        help=f"conv slots of S2: {' or '.join(CONV_SLOTS)} (default: {CONV_SLOTS[0]})",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the ledger; exit status 2 with one sentence for input that makes none."""
    try:
        name, source, shape = load(args.model)
        answer = {"model": name, "source": source} | report(shape, question(args))
    except (ConfigError, GeometryError) as error:
        print(f"sglang-hybrid ledger: {error}", file=sys.stderr)
        return 2
    print(json.dumps(answer, indent=2) if args.json else "\n".join(table(answer)))
    return 0


def load(model: str) -> tuple[str, str, HybridShape]:
    """(name, where its figures come from, shape) of a built-in name, a directory or a file.

    A built-in name wins over a file of that name; write `./NAME` for the file.  Raises `ConfigError`.
    """
    for name, public in PUBLIC.items():
        if model.lower() in (name, public.repository.lower()):
            return name, public.source(), hybrid_shape(public.config, name)
    path = Path(model)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        missing = f"directory {model} has no config.json" if path.is_dir() else f"there is no file {model}"
        raise ConfigError(f"{missing}, and no built-in model is called so: {', '.join(PUBLIC)}")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} is no readable JSON ({error}): give a Hugging Face config.json") from error
    if not isinstance(config, dict):
        raise ConfigError(
            f"{file} holds a {type(config).__name__}: give a Hugging Face config.json, an object"
        )
    return model, str(file), hybrid_shape(config, str(file))


def question(args: argparse.Namespace) -> Question:
    """The options, checked.  Raises `ConfigError`."""
    if args.tokens is not None and args.attention_blocks is not None:
        raise ConfigError(
            f"--tokens {args.tokens} and --attention-blocks {args.attention_blocks} both set the blocks: "
            "give one of them"
        )
    tokens = optional("--tokens", args.tokens)
    blocks = optional("--attention-blocks", args.attention_blocks, 0)
    checkpoints = optional("--checkpoints", args.checkpoints, 0)
    if tokens is None:
        blocks = EXAMPLE[0] if blocks is None else blocks
        checkpoints = EXAMPLE[1] if checkpoints is None else checkpoints
    if tokens is None and not blocks and not checkpoints:
        raise ConfigError(
            "--attention-blocks 0 and --checkpoints 0 ask for nothing: make one of them 1 or more"
        )
    return Question(
        tp=whole("--tp", args.tp),
        grid=optional("--grid", args.grid),
        ssm_dtype=choice("--ssm-dtype", args.ssm_dtype, SSM_DTYPES),
        kv_dtype=choice("--kv-dtype", args.kv_dtype, tuple(DTYPES)),
        blocks=blocks,
        checkpoints=checkpoints,
        tokens=tokens,
        budget_bytes=None if args.budget is None else size("--budget", args.budget),
        options={
            "attention_share": share("--attention-share", args.attention_share),
            "conv_slots": choice("--conv-slots", args.conv_slots, CONV_SLOTS),
        },
    )


def whole(flag: str, text: str, least: int = 1) -> int:
    """A whole number.  Raises `ConfigError`."""
    if not re.fullmatch(r"\d{1,15}", text, re.ASCII) or int(text) < least:
        raise ConfigError(f"{flag} {text} is no whole number: use {least} or more")
    return int(text)


def optional(flag: str, text: str | None, least: int = 1) -> int | None:
    """As `whole`; None stays None."""
    return None if text is None else whole(flag, text, least)


def size(flag: str, text: str) -> int:
    """Bytes, with the suffixes of SGLang's `human_readable_int`.  Raises `ConfigError`."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)(Ki|Mi|Gi|Ti|k|M|G|T|)", text, re.ASCII)
    value = int(Decimal(match[1]) * SUFFIXES[match[2]]) if match else 0
    if value < 1:
        raise ConfigError(f"{flag} {text} is no size in bytes: use a number like 8000000000, 8G or 512Mi")
    return value


def share(flag: str, text: str) -> float:
    """A part of one, neither nothing nor all.  Raises `ConfigError`."""
    if not re.fullmatch(r"0?\.\d{1,9}", text, re.ASCII) or float(text) == 0:
        raise ConfigError(f"{flag} {text} is no part of one: use a value between 0 and 1, like 0.5")
    return float(text)


def choice(flag: str, text: str, legal: tuple[str, ...]) -> str:
    """One of the legal names.  Raises `ConfigError`."""
    if text not in legal:
        raise ConfigError(f"{flag} {text} is not supported: use one of {', '.join(legal)}")
    return text
