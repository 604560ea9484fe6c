"""Servers on one GPU, asked the same: stock SGLang, and S1 on each attention backend (`bench.gpu`)."""

from __future__ import annotations

import math
import random
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from sglang_hybrid.cli.verify_compare import Answer
from sglang_hybrid.cli.verify_runs import Asks, Prompt
from sglang_hybrid.cli.verify_server import Server

FIRST_ID, LAST_ID = 5, 500
WAVE = 25
"""Requests that are sent together."""
ANSWERS = (8, 33, 16, 40)
"""Output tokens of one wave after another."""
POISON = {"SGLANG_HYBRID_POISON": "1"}
"""What is freed holds NaN: whoever reads it answers with NaN."""


class Setting(NamedTuple):
    """Where the comparison runs.  `near_tie`: nats between the two best tokens that rounding may swap."""

    grid: int
    requests: int
    dtype: str
    backends: tuple[str, ...]
    graphs: bool
    near_tie: float


GPU = Setting(512, 200, "bfloat16", ("fa3", "flashinfer", "triton"), graphs=True, near_tie=0.25)
DRY = Setting(64, 24, "float32", ("torch_native",), graphs=False, near_tie=2e-3)
"""As far as a machine without a GPU can go."""


class Arm(NamedTuple):
    """A server by name, its arguments and environment."""

    name: str
    args: list[str]
    env: dict[str, str]


def waves(setting: Setting) -> list[list[Prompt]]:
    """Prompts in the order in which they are sent: shared contexts of one to three grid steps with questions
    of up to half a step, and one in four alone; the first wave makes the contexts' checkpoints."""
    chance = random.Random(20)

    def ids(count: int) -> Prompt:
        return tuple(chance.randrange(FIRST_ID, LAST_ID) for _ in range(count))

    contexts = [ids(setting.grid * (1 + i % 3) + 3 * i) for i in range(8)]
    prompts = [context + ids(7) for context in contexts]
    while len(prompts) < setting.requests:
        shared = () if chance.random() < 0.25 else chance.choice(contexts)
        prompts.append(shared + ids(chance.randrange(1, setting.grid // 2)))
    rest = prompts[len(contexts) :]
    return [prompts[: len(contexts)], *(rest[i : i + WAVE] for i in range(0, len(rest), WAVE))]


def answers(server: Asks, sent: Sequence[Sequence[Prompt]]) -> list[Answer]:
    """Greedy answers in the order of the prompts."""
    found: list[Answer] = []
    for index, wave in enumerate(sent):
        found += server.ask(wave, ANSWERS[index % len(ANSWERS)])
    return found


class Compared(NamedTuple):
    """`tokens` were equal; `wrong` names each run with another token or a logprob that is no number."""

    tokens: int
    near_ties: int
    cached: int
    wrong: list[str]


def compare(got: Sequence[Answer], want: Sequence[Answer], near_tie: float) -> Compared:
    """Token by token, until a near tie of the reference swaps: from there on a run has another context."""
    tokens, ties, wrong = 0, 0, []
    for run, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        if not all(map(math.isfinite, mine.logprobs)) or len(mine.logprobs) != len(theirs.logprobs):
            wrong.append(f"request {run}: logprobs {mine.logprobs[:4]}")
            continue
        for place, (a, b) in enumerate(zip(mine.ids, theirs.ids, strict=True)):
            if a == b:
                tokens += 1
            elif theirs.gaps[place] <= near_tie:
                ties += 1
                break
            else:
                wrong.append(
                    f"request {run}, {mine.cached} tokens cached, output token {place}: {a} instead of {b}, "
                    f"which was ahead by {theirs.gaps[place]:.3f}"
                )
                break
    return Compared(tokens, ties, sum(answer.cached for answer in got), wrong)


def arms(model: Path, setting: Setting, pages: int) -> list[Arm]:
    """The reference first."""
    common = [
        *("--model-path", str(model), "--dtype", setting.dtype, "--context-length", str(8 * setting.grid)),
        *("--max-running-requests", "32", "--chunked-prefill-size", str(4 * setting.grid)),
        *("--skip-server-warmup", "--random-seed", "0", "--decode-log-interval", "1"),
        *("--log-level-http", "warning", "--watchdog-timeout", "120"),
    ]
    if setting.graphs:
        common += ["--cuda-graph-max-bs-decode", "32"]
    pools = ["--max-total-tokens", str(64 * setting.grid), "--max-mamba-cache-size", "160"]
    made = [Arm("stock", [*common, *pools, "--mem-fraction-static", "0.5"], {})]
    for backend in setting.backends:
        ours = [*("--hybrid-mem", "S1", "--hybrid-grid", str(setting.grid)), "--attention-backend", backend]
        made.append(Arm(f"S1 on {backend}", [*common, *ours, "--hybrid-budget-bytes", str(pages)], POISON))
    return made


@contextmanager
def started(arms: Sequence[Arm], seconds: float) -> Iterator[list[Server]]:
    """All servers, started at once: a start is mostly imports, compilation and graphs.

    Raises TimeoutError when one is not there after `seconds`, VerifyError when one ended.
    """
    servers = [Server(arm.args, arm.env) for arm in arms]
    end = time.monotonic() + seconds
    with ThreadPoolExecutor(len(arms)) as pool, ExitStack() as stack:
        starting = [pool.submit(server.__enter__) for server in servers]
        stack.push(partial(_stop, servers))
        yield [future.result(max(0.0, end - time.monotonic())) for future in starting]


def _stop(servers: Sequence[Server], kind: type[BaseException] | None, *about: Any) -> None:
    """End them, those too that are still starting: their threads then see it, and end."""
    for server in servers:
        if hasattr(server, "process"):
            server.__exit__(kind, *about)


def without_graph(log: str) -> list[str]:
    """Decode steps that ran outside a graph, by the server's own log."""
    return [line for line in log.splitlines() if re.search(r"Decode batch.*cuda graph: False", line)]


def decode_steps(log: str) -> int:
    return len(re.findall(r"Decode batch", log))
