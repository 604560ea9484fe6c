"""`python -m bench.gpu`: what only a GPU can show, in under four minutes (`make gpu`).

kernels: every case of the kernels' tables on the device, against float64.
servers: 200 mixed requests to stock SGLang and to S1 on fa3, flashinfer and triton, decode in CUDA graphs;
the greedy tokens are equal but where rounding may swap the two best.  Freed pages hold NaN meanwhile.
times: the bench of the kernels at two batch sizes.

Each part ends with a line; the exit status is 1 when one failed.  A part that cannot run says why.
`--dry-run` goes as far as a machine without a GPU can: a case of each table in Triton's interpreter, two
servers on the CPU platform.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from bench import gpu_servers
from bench.gpu_servers import DRY, GPU, Setting

ROOT = Path(__file__).parents[1]
SECONDS = {"kernels": 80, "servers": 110, "times": 40}
"""Longest of each part on a GPU: together under four minutes."""
PATIENCE = 20
"""Times as long in a dry run."""
TIMES = ("--batch", "1,64", "--shape", "Falcon-H1-7B bf16,Falcon-H1-7B fp32")


class Outcome(NamedTuple):
    """`verdict`: passed, failed or skipped."""

    verdict: str
    said: str


def cuda() -> bool:
    """Whether torch sees a GPU."""
    import torch

    return bool(torch.cuda.is_available())


def kernels(dry: bool) -> Outcome:
    """A process for each table, since most of the time is compilation."""
    if not dry and not cuda():
        return Outcome("skipped", "no CUDA device is visible")
    from tests.support.triton_tables import TABLES

    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if dry:
        environment["TRITON_INTERPRET"] = "1"
    running = []
    for table in TABLES.values():
        names = [next(iter(table.cases()))] if dry else []
        command = [sys.executable, "-m", table.__name__, "--device", "cpu" if dry else "cuda", *names]
        running.append(
            subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    end = time.monotonic() + SECONDS["kernels"] * (PATIENCE if dry else 1)
    verdicts: dict[str, str] = {}
    try:
        for name, process in zip(TABLES, running, strict=True):
            said, errors = process.communicate(timeout=max(1.0, end - time.monotonic()))
            if process.returncode not in (0, 1) or not said:
                return Outcome("failed", f"{name} ended with {process.returncode}: {errors[-2000:]}")
            for line in said.splitlines():
                verdicts |= {f"{name}: {case}": verdict for case, verdict in json.loads(line).items()}
    except subprocess.TimeoutExpired:
        return Outcome("failed", f"the tables were not done in {SECONDS['kernels']} s")
    finally:
        for process in running:
            process.kill()
    wrong = {case: verdict for case, verdict in verdicts.items() if verdict != "passed"}
    if wrong:
        case, verdict = next(iter(wrong.items()))
        return Outcome("failed", f"{len(wrong)} of {len(verdicts)} cases, first {case}:\n{verdict}")
    return Outcome("passed", f"{len(verdicts)} cases in {len(TABLES)} tables")


def servers(dry: bool) -> Outcome:
    """Stock and S1 on the same requests."""
    if importlib.util.find_spec("sglang") is None:
        return Outcome("skipped", "sglang is not importable here")
    if not dry and not cuda():
        return Outcome("skipped", "no CUDA device is visible")
    setting, left_out = (DRY, "") if dry else here(GPU)
    from sglang_hybrid.cli.demo_model import FALCON_7B_LAYER, write_demo_model
    from sglang_hybrid.cli.demo_shape import DemoShape

    shape = DemoShape() if dry else FALCON_7B_LAYER
    with tempfile.TemporaryDirectory(prefix="hybrid-gpu-") as place:
        context = 8 * setting.grid
        model = write_demo_model(
            place, shape=shape, dtype=setting.dtype, vocab=512, context=context, layers=1 if dry else 4
        )
        arms = gpu_servers.arms(model, setting, budget(shape.kv_heads * shape.head_dim, setting, dry))
        sent = gpu_servers.waves(setting)
        with gpu_servers.started(arms, SECONDS["servers"] * (PATIENCE if dry else 1)) as running:
            want = gpu_servers.answers(running[0], sent)
            told = [f"{sum(len(answer.ids) for answer in want)} tokens of stock"]
            for arm, server in zip(arms[1:], running[1:], strict=True):
                got = gpu_servers.answers(server, sent)
                found = gpu_servers.compare(got, want, setting.near_tie)
                log = Path(server.log.name).read_text(errors="replace")
                outside = gpu_servers.without_graph(log) if setting.graphs else []
                if found.wrong or outside or not found.cached:
                    first = (found.wrong + outside + ["nothing came from the cache"])[0]
                    return Outcome("failed", f"{arm.name}, {len(found.wrong)} runs: {first}")
                told.append(
                    f"{arm.name}: {found.tokens} equal, {found.near_ties} near ties, {found.cached} cached, "
                    f"{gpu_servers.decode_steps(log)} decode steps"
                )
    return Outcome("passed", "; ".join(told) + left_out)


def here(setting: Setting) -> tuple[Setting, str]:
    """Without the backends that this GPU or environment lacks, and a clause that names them."""
    import torch

    major, _ = torch.cuda.get_device_capability()
    lacks = {"fa3": major not in (8, 9), "flashinfer": importlib.util.find_spec("flashinfer") is None}
    missing = [name for name in setting.backends if lacks.get(name)]
    left = tuple(name for name in setting.backends if name not in missing)
    clause = f"; left out, since they do not run here: {', '.join(missing)}" if missing else ""
    return setting._replace(backends=left), clause


def budget(kv_width: int, setting: Setting, dry: bool) -> int:
    """Bytes for 512 pages of each layer: contexts stay, most of what follows is evicted."""
    return 512 * setting.grid * 2 * kv_width * (4 if dry else 2) * (1 if dry else 4)


def times(dry: bool) -> Outcome:
    """Printed as it comes."""
    if dry or not cuda():
        return Outcome("skipped", "no CUDA device is visible")
    command = [sys.executable, "-m", "bench.kernels", *TIMES]
    try:
        done = subprocess.run(command, cwd=ROOT, timeout=SECONDS["times"])
    except subprocess.TimeoutExpired:
        return Outcome("passed", f"cut off after {SECONDS['times']} s; python -m bench.kernels goes on")
    return Outcome("passed" if done.returncode == 0 else "failed", f"ended with {done.returncode}")


PARTS: dict[str, Callable[[bool], Outcome]] = {"kernels": kernels, "servers": servers, "times": times}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts named, by default all; exit status 1 when one failed."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (default: all)")
    parser.add_argument("--dry-run", action="store_true", help="as far as a machine without a GPU can")
    options = parser.parse_args(argv)
    for name in options.parts:
        if name not in PARTS:
            parser.error(f"{name} is no part; choose among {', '.join(PARTS)}")
    failed = False
    for name in options.parts or PARTS:
        begin = time.monotonic()
        try:
            outcome = PARTS[name](options.dry_run)
        except Exception as error:
            outcome = Outcome("failed", f"{type(error).__name__}: {error}")
        failed |= outcome.verdict == "failed"
        print(f"{name}: {outcome.verdict}, {time.monotonic() - begin:.0f} s: {outcome.said}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
