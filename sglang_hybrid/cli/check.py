"""`sglang-hybrid check`: is the installed SGLang the one that this plugin was written against?

Prints a line for each name of SGLang that the plugin hooks, replaces, subclasses, calls or reads.  Exit
status 0: all are as in the tested versions; 1: one differs; 2: SGLang cannot be imported.
"""

from __future__ import annotations

import argparse
import sys


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser to those of `sglang-hybrid`."""
    parser = subparsers.add_parser(
        "check",
        help="compare the installed SGLang with what the plugin needs of it",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quiet", action="store_true", help="print only what differs, and the last line")


def run(args: argparse.Namespace) -> int:
    """Compare and print; see the module's words for the exit status."""
    try:
        import sglang.version  # noqa: F401

        from sglang_hybrid.engine import seams
        from sglang_hybrid.engine.seam_table import SEAMS, TESTED
    except ImportError as error:
        print(f"sglang-hybrid check: SGLang cannot be imported: {error}", file=sys.stderr)
        return 2
    found = {seam.path: seams.difference(seam) for seam in SEAMS}
    for path, line in found.items():
        if line is not None:
            print(f"differs  {line}")
        elif not args.quiet:
            print(f"same     {path}")
    differing = sum(line is not None for line in found.values())
    version = seams.sglang_version()
    tested = "a tested version" if seams.is_tested() else f"not tested; tested: {', '.join(TESTED)}"
    print(f"SGLang {version} ({tested}): {differing} of {len(found)} seams differ")
    return 1 if differing else 0
