"""`sglang-hybrid verify`: does a run that resumes from the cache say what a run from the start says?

Starts servers on a model directory (or asks a running one), sends the same prompts cold, as hits of
every depth, in chunks, in company, after preemption and as conversations, and compares each answer
with the cold one of the first server, token by token and logprob by logprob.  Exit status 0: nothing
differs; 1: something does, or a part could not be exercised; 2: it could not be run.

With --exact every bit counts and the servers run with --hybrid-exact.  Without it ids must be equal
and logprobs within 1e-3; where the cold run's two best tokens were closer than that can tell apart,
another token is counted as a near tie and the rest of that run is not compared.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sglang_hybrid.cli.verify_compare import Report
from sglang_hybrid.cli.verify_runs import Plan, References, Verifier
from sglang_hybrid.cli.verify_server import Client, Server, VerifyError
from sglang_hybrid.pools.factory import ORGANIZATIONS

DEMO = "demo"
DEMO_GRID = 16
DEMO_ARGS = ("--hybrid-budget-bytes", "256Mi", "--context-length", "1024", "--max-running-requests", "32")
CHUNK_STEPS = 3
"""Grid steps of a prefill chunk when nobody names chunk sizes."""
AUTO = "auto"
WHOLE = "whole"
STATE_DTYPES = (AUTO, "float32", "bfloat16", "float16")
RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "7"}
"""SGLang's own switch for tests: every seventh forward, a decode step preempts requests."""


class Setup(NamedTuple):
    """One server to start.  `chunk` in tokens, or in grid steps; None for whole prompts.  A chunking server
    also preempts."""

    organization: str
    dtype: str
    chunk: int | None
    in_steps: bool = False

    @property
    def name(self) -> str:
        steps = " grid steps" if self.in_steps else ""
        chunk = WHOLE if self.chunk is None else f"chunks of {self.chunk}{steps}, preempting"
        return f"{self.organization} {'' if self.dtype == AUTO else self.dtype + ' state, '}{chunk}"

    def args(self, model: str, grid: int | None, exact: bool) -> list[str]:
        """Arguments of the launcher, host and port left out.  Without a grid the server takes its default."""
        chunk = self.chunk or -1
        if self.in_steps:
            assert grid is not None and self.chunk is not None
            chunk = self.chunk * grid
        return [
            "--model-path", model,
            "--hybrid-mem", self.organization,
            *(["--hybrid-grid", str(grid)] if grid is not None else []),
            "--chunked-prefill-size", str(chunk),
            "--random-seed", "0",
            "--skip-server-warmup",
            "--log-level-http", "warning",
            *(["--hybrid-exact"] if exact else []),
            *(["--mamba-ssm-dtype", self.dtype] if self.dtype != AUTO else []),
            *(["--enable-mixed-chunk"] if self.chunk else []),
        ]  # fmt: skip


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser to those of `sglang-hybrid`."""
    parser = subparsers.add_parser(
        "verify",
        help="compare resumed with recomputed runs of a model, token by token",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--model", metavar="DIR", help=f"model directory, or {DEMO!r} for the built-in demo model"
    )
    where.add_argument("--url", help="a running server that nobody else uses: its cache is flushed")
    parser.add_argument(
        "--organizations", default="S1", help=f"servers to start, of {','.join(ORGANIZATIONS)} (default: S1)"
    )
    parser.add_argument("--exact", action="store_true", help="demand equal bits; start servers in exact mode")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument(
        "--grid",
        type=int,
        help="tokens of a grid step (default: what the first server chooses for the model, or the running "
        f"one has; demo {DEMO_GRID})",
    )
    parser.add_argument("--steps", type=int, default=8, help="longest prompt in grid steps (default: 8)")
    parser.add_argument("--tokens", type=int, default=4, help="tokens of a short answer (default: 4)")
    parser.add_argument(
        "--chunk-sizes",
        help=f"prefill chunks, a server each: tokens, or {WHOLE!r} (default: three grid steps; and {WHOLE!r} "
        "for the first organization)",
    )
    parser.add_argument(
        "--state-dtypes",
        help=f"dtypes of the state, of {','.join(STATE_DTYPES)} (default: {AUTO}; demo exact: fp32 and bf16)",
    )
    parser.add_argument(
        "--server-args", default="", help="further arguments of each server, one string: '--tp-size 2'"
    )


def run(args: argparse.Namespace) -> int:
    """Verify and print; see the module's words for the exit status."""
    report = Report(args.exact)
    try:
        if args.url:
            _running(args, report)
        else:
            _started(args, report)
    except VerifyError as error:
        print(f"sglang-hybrid verify: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(report.json()))
    else:
        print("\n".join(report.lines()))
        print("ok" if report.ok() else "NOT ok")
    return 0 if report.ok() else 1


def _plan(args: argparse.Namespace, grid: int) -> Plan:
    for name, value in (("--grid", grid), ("--steps", args.steps), ("--tokens", args.tokens)):
        if value < 1:
            raise VerifyError(f"{name} {value} must be at least 1")
    return Plan(grid, args.steps, args.tokens)


def _running(args: argparse.Namespace, report: Report) -> None:
    client = Client(args.url)
    info = client.info()
    grid = args.grid or _grid_of(info)
    if not grid:
        raise VerifyError(f"{args.url} runs without --hybrid-mem; start it with it, or give --grid")
    if args.exact and not info.get("hybrid_exact"):
        raise VerifyError(f"{args.url} runs without --hybrid-exact; start it with it, or leave out --exact")
    plan = _plan(args, grid)
    _verify("running", client, plan, References(client), report, preempts=False)


def _started(args: argparse.Namespace, report: Report) -> None:
    # Whoever ends the command wants its server ended too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    demo = args.model == DEMO
    grid: int | None = args.grid if args.grid is not None else DEMO_GRID if demo else None
    _plan(args, 1 if grid is None else grid)
    setups = list(_setups(args, demo))
    with tempfile.TemporaryDirectory(prefix="sglang-hybrid-verify-") as folder:
        model, extra = args.model, shlex.split(args.server_args)
        if demo:
            model, extra = _write_demo(folder), [*DEMO_ARGS, *extra]
        elif not (Path(model) / "config.json").is_file():
            raise VerifyError(f"--model {model} is no model directory: it has no config.json")
        references: dict[str, References] = {}
        for number, setup in enumerate(setups, 1):
            print(f"[{number}/{len(setups)}] {setup.name}", file=sys.stderr, flush=True)
            command = [*setup.args(model, grid, args.exact), *extra]
            with Server(command, RETRACT if setup.chunk else {}) as server:
                grid = grid or _grid_of(server.info())
                if grid is None:
                    raise VerifyError(f"{setup.name}: the server does not say its grid; give --grid")
                plan = _plan(args, grid)
                known = references.setdefault(setup.dtype, References(server))
                _verify(setup.name, server, plan, known, report, preempts=setup.chunk is not None)


def _grid_of(info: dict[str, Any]) -> int | None:
    """Grid of the server with this `/server_info`; None when it runs without the hybrid memory."""
    grid = (info["internal_states"][0].get("hybrid") or {}).get("grid")
    return None if grid is None else int(grid)


def _verify(
    name: str, client: Client, plan: Plan, references: References, report: Report, preempts: bool
) -> None:
    Verifier(name, client, plan, references, report).all()
    tallies = [tally for (server, _), tally in report.tallies.items() if server == name]
    if not any(tally.cached_tokens for tally in tallies):
        report.missing.append(f"{name}: nothing was served from the cache")
    if preempts and not any(tally.preempted for tally in tallies):
        report.missing.append(f"{name}: no request was preempted")


def _setups(args: argparse.Namespace, demo: bool) -> Iterator[Setup]:
    """All servers; the first of each state dtype takes whole prompts if any does, and is the reference."""
    dtypes = _words(args.state_dtypes or ("float32,bfloat16" if demo and args.exact else AUTO))
    organizations = _words(args.organizations)
    for kind, legal, given in (
        ("--organizations", tuple(ORGANIZATIONS), organizations),
        ("--state-dtypes", STATE_DTYPES, dtypes),
    ):
        for word in given:
            if word not in legal:
                raise VerifyError(f"{kind} {word} is unknown; legal: {', '.join(legal)}")
    if args.chunk_sizes:
        chunks = sorted({_chunk(text) for text in _words(args.chunk_sizes)}, key=lambda chunk: chunk or 0)
        for dtype in dtypes:
            for organization in organizations:
                yield from (Setup(organization, dtype, chunk) for chunk in chunks)
        return
    for dtype in dtypes:
        yield Setup(organizations[0], dtype, None)
        for organization in organizations:
            yield Setup(organization, dtype, CHUNK_STEPS, in_steps=True)


def _words(text: str) -> Sequence[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _chunk(text: str) -> int | None:
    if text == WHOLE:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise VerifyError(f"--chunk-sizes {text} must be a number of tokens or {WHOLE!r}")
    return int(text)


def _write_demo(folder: str) -> str:
    from sglang_hybrid.cli.demo_model import write_demo_model

    return str(write_demo_model(Path(folder) / "model"))
