"""The console script ``sglang-hybrid``.

A command is a module of this package with two functions: ``add_parser(subparsers)`` adds its sub-parser, and
``run(args) -> int`` does the work and returns the exit status.
"""

import argparse
import sys
from collections.abc import Sequence

from sglang_hybrid import __version__
from sglang_hybrid.cli import check, demo_model, ledger, models, plan, verify

COMMANDS = {
    "check": check,
    "demo-model": demo_model,
    "ledger": ledger,
    "models": models,
    "plan": plan,
    "verify": verify,
}


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line, every command included."""
    parser = argparse.ArgumentParser(
        prog="sglang-hybrid",
        description="Tools of the SGLang plugin for hybrid models. Serving itself is "
        "`python -m sglang.launch_server --model-path M --hybrid-mem S1`.",
    )
    parser.add_argument("--version", action="version", version=f"sglang-hybrid {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in COMMANDS.values():
        module.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; ``argv`` defaults to the process's arguments. Returns the exit status."""
    args = build_parser().parse_args(argv)
    return COMMANDS[args.command].run(args)


if __name__ == "__main__":
    sys.exit(main())
