"""SGLang's own benchmark client, `python -m sglang.bench_serving`, fed with our requests.

Symbols leaned on, all of `sglang.benchmark`: `serving.cli_main` (its parser, reached by letting it parse),
`serving.run_benchmark`, `datasets.DATASET_MAPPING`, `datasets.common.BaseDataset` and `DatasetRow`.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import statistics
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

from bench.server import BenchServer
from sglang_hybrid.simulator.request import Request

ROWS = "rows of bench.serving"
"""Name under which our rows join SGLang's datasets."""

_PREFILL = re.compile(r"Prefill batch.*?#new-token: (\d+), #cached-token: (\d+)")
_DECODE = re.compile(r"Decode batch.*?#running-req: (\d+).*?#queue-req: (\d+)")
_RETRACTED = re.compile(r"Retract requests\..*?#retracted_reqs: (\d+)")


def client_options(arguments: Sequence[str]) -> Namespace:
    """What `python -m sglang.bench_serving ARGUMENTS` would run with: its own parser, its own refusals."""
    from sglang.benchmark import serving

    taken: list[Namespace] = []
    argv, run = sys.argv, serving.run_benchmark
    sys.argv, serving.run_benchmark = ["sglang.bench_serving", *arguments], taken.append
    try:
        serving.cli_main()
    finally:
        sys.argv, serving.run_benchmark = argv, run
    return taken[0]


def prompt_tokens(request: Request, seed: int, vocabulary: int) -> list[int]:
    """Its text: equal content, equal tokens.  The lowest ids are special in most models, and left out."""
    tokens: list[int] = []
    for content, count in request.segments:
        chance = Random(f"{seed}/{content!r}")
        tokens += [chance.randrange(vocabulary // 50, vocabulary) for _ in range(count)]
    return tokens


def rows(requests: Sequence[Request], seed: int, vocabulary: int) -> list[Any]:
    """Requests as rows of SGLang's client."""
    from sglang.benchmark.datasets.common import DatasetRow

    made = []
    for request in requests:
        tokens = prompt_tokens(request, seed, vocabulary)
        salt = {} if request.salt is None else {"cache_salt": repr(request.salt)}
        made.append(
            DatasetRow(prompt=tokens, prompt_len=len(tokens), output_len=request.new, extra_request_body=salt)
        )
    return made


@contextlib.contextmanager
def _dataset(made: Sequence[Any]) -> Iterator[None]:
    """Our rows among SGLang's datasets."""
    from sglang.benchmark.datasets import DATASET_MAPPING
    from sglang.benchmark.datasets.common import BaseDataset

    class Rows(BaseDataset):
        @classmethod
        def from_args(cls, args: Namespace) -> Rows:
            return cls()

        def load(self, tokenizer: Any, model_id: str | None = None) -> list[Any]:
            return list(made)

    DATASET_MAPPING[ROWS] = Rows
    try:
        yield
    finally:
        del DATASET_MAPPING[ROWS]


def send(url: str, made: Sequence[Any] | None, arguments: Sequence[str], seed: int) -> dict[str, Any]:
    """One run of SGLang's client against `url`; its result.

    `made`: our rows, None for the dataset that `arguments` name.  Raises `RuntimeError` with the first
    failed request's error.
    """
    from sglang.benchmark import serving

    options = client_options(
        [
            *("--backend", "sglang", "--base-url", url, "--warmup-requests", "0", "--flush-cache"),
            *("--cache-report", "--disable-tqdm", "--output-file", os.devnull, "--seed", str(seed)),
            *arguments,
        ]
    )
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.ExitStack() as stack:
        if made is not None:
            stack.enter_context(_dataset(made))
            options.dataset_name, options.num_prompts = ROWS, len(made)
        result: dict[str, Any] = serving.run_benchmark(options)
    failed = [error for error in result["errors"] if error]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(result['errors'])} requests failed: {failed[0]}")
    return result


def measure(
    server: BenchServer, made: Sequence[Any] | None, arguments: Sequence[str], seed: int
) -> tuple[dict[str, float], list[str]]:
    """Figures of one run on an empty cache, and the answers' texts.

    Tokens: `prefilled` is what the first admission of each request had to compute, `recomputed` what came on
    top after retractions, `computed` both, by the server's own log of prefill batches.  `running` and
    `waiting` are medians over the logged decode steps.
    """
    before = len(server.log())
    result = send(server.url, made, arguments, seed)
    return figures(result, server.log()[before:]), list(result["generated_texts"])


def figures(result: dict[str, Any], log: str) -> dict[str, float]:
    """`measure`'s figures from the client's result and what the server logged meanwhile."""
    report = result["cache_report"]
    prompt, reused = report["total_prompt_tokens"], report["total_cached_tokens"]
    computed = sum(int(new) for new, _ in _PREFILL.findall(log))
    steps = [(int(running), int(waiting)) for running, waiting in _DECODE.findall(log)]
    times = {
        f"{statistic}_{name}_ms": result[f"{statistic}_{name}{'_latency' if name == 'e2e' else ''}_ms"]
        for name in ("ttft", "tpot", "e2e")
        for statistic in ("mean", "p99")
    }
    return {
        "requests": result["completed"],
        "prompt_tokens": prompt,
        "reused_tokens": reused,
        "prefilled_tokens": prompt - reused,
        "recomputed_tokens": computed - (prompt - reused),
        "computed_tokens": computed,
        "output_tokens": result["total_output_tokens"],
        "retractions": sum(int(count) for count in _RETRACTED.findall(log)),
        "running": statistics.median(running for running, _ in steps) if steps else 0,
        "waiting": statistics.median(waiting for _, waiting in steps) if steps else 0,
        "seconds": result["duration"],
        "output_tokens_per_s": result["output_throughput"],
        **times,
    }
