"""One way to start a server of the engine tests: its arguments, its environment, what it promises."""

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.budget import StateBytes
from tests.support.expect import ChosenGrid, DenseGrid, sparse

PLANTED = Path(__file__).parent / "planted"
"""Folder of plugins: whole-page attention, a platform with decode graphs, and faults that are in while a file
of their name lies in `FAULTS`."""
_FAULTS = tempfile.TemporaryDirectory(prefix="hybrid-faults-")
FAULTS = Path(_FAULTS.name)

WHOLE_PAGES = "whole_pages"
"""Attention backend of the first: it reads whole pages, as a GPU's does."""

ENV: Mapping[str, str] = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_MAMBA_CONV_DTYPE": "float32",
    "SGLANG_HYBRID_POISON": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": os.pathsep.join([str(PLANTED), os.environ.get("PYTHONPATH", "")]),
}
"""Environment of every server; a configuration may add to it."""

GRAPH_BATCHES = (1, 2, 5, 8)
"""Batch sizes of captured decode steps; others are padded."""

HOPEFUL = {"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "8"}
"""A scheduler that expects answers of eight tokens: it admits more than fits, and retracts."""

RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "3"}
"""Every third step a request that does not run alone loses everything."""


@dataclass(frozen=True)
class Memory:
    """A budget in the words of docs/cases.md: K tokens, `spare` cached checkpoints, beside R live states."""

    tokens: int = 8192
    spare: int = 512


AMPLE = Memory()

TINY_WEIGHT = 4
"""S1 pages of the tiny model's checkpoint at grid 8."""


@dataclass(frozen=True)
class ServerConfig:
    """One way to start a server. `memory` None leaves the budget to SGLang's memory fraction."""

    name: str
    organization: str = "S1"
    grid: int = 8
    model: str = "tiny"
    hybrid: bool = True
    memory: Memory | None = AMPLE
    chunk: int = 256
    running: int = 8
    context: int = 4096
    flags: tuple[str, ...] = ()
    observed: bool = False
    """With metrics and a trace beside the log."""
    native_grid: bool = False
    """Leave `--hybrid-grid` out: a D0 finds `grid` by itself."""
    asked: int | None = None
    """`--max-running-requests` when it is not `running`: more than the memory holds."""
    share: float | None = None
    """D0: attention's part of the budget."""
    tight: bool = False
    """S2: tight conv slots."""
    attention: str = WHOLE_PAGES
    """Attention backend."""
    long: bool = False
    """Its tests run with `--long` only."""
    graphs: bool = False
    """Decode steps through SGLang's graph runner (`tests/support/graphs`)."""
    env: Mapping[str, str] = field(default_factory=dict, hash=False)

    def args(self, model_dir: Path) -> list[str]:
        """Arguments of `sglang.launch_server`, host and port left out."""
        args = [
            "--model-path", str(model_dir),
            "--dtype", "float32",
            "--context-length", str(self.context),
            "--chunked-prefill-size", str(self.chunk),
            "--max-running-requests", str(self.asked or self.running),
            "--skip-server-warmup",
            "--random-seed", "0",
            "--enable-cache-report",
            "--sleep-on-idle",
            "--load-snapshot-publish-interval", "1",
            "--log-level-http", "warning",
            *self.flags,
        ]  # fmt: skip
        if self.graphs:
            args += ["--cuda-graph-bs-decode", *map(str, GRAPH_BATCHES), "--decode-log-interval", "1"]
        if self.hybrid:
            args += ["--attention-backend", self.attention, "--hybrid-mem", self.organization]
            if not self.native_grid:
                args += ["--hybrid-grid", str(self.grid)]
            if self.share is not None:
                args += ["--hybrid-attention-share", str(self.share)]
            if self.tight:
                args += ["--hybrid-conv-slots", "tight"]
            if self.memory is not None:
                args += ["--hybrid-budget-bytes", str(self.budget_bytes(model_dir))]
        return args

    @property
    def environment(self) -> Mapping[str, str]:
        """What it adds to `ENV`."""
        return {**self.env, **({"SGLANG_HYBRID_TEST_GRAPHS": "1"} if self.graphs else {})}

    def budget_bytes(self, model_dir: Path) -> int:
        """Value of `--hybrid-budget-bytes` for `memory` and the live states of R requests."""
        assert self.memory is not None
        state = StateBytes.of(model_dir)
        pages = state.pages(self.grid, self.memory.tokens, self.memory.spare, self.running)
        return state.budget(self.grid, pages)

    def expected(self) -> DenseGrid:
        """What its placement promises while nothing is evicted."""
        if "--hybrid-checkpoints" not in self.flags:
            return DenseGrid(self.grid)
        if "branch" in self.flags:
            return ChosenGrid(self.grid)
        return ChosenGrid(self.grid, keeps=sparse(TINY_WEIGHT))

    def without_plugin(self) -> "ServerConfig":
        """The same server with the flag off: stock pools of the same number of tokens."""
        memory = self.memory or AMPLE
        pools = (
            "--max-total-tokens", str(max(memory.tokens, 1024)),
            "--max-mamba-cache-size", str(memory.spare + 2 * self.running),
        )  # fmt: skip
        return ServerConfig(
            name=f"stock-{self.name}",
            grid=self.grid,
            model=self.model,
            hybrid=False,
            chunk=self.chunk,
            running=self.running,
            context=self.context,
            flags=(*(flag for flag in self.flags if not flag.startswith("--hybrid")), *pools),
            env=self.env,
        )


FP8 = ("--kv-cache-dtype", "fp8_e4m3")


def cold_config(model: str, context: int) -> ServerConfig:
    """The reference: flag off, radix cache off."""
    return ServerConfig(
        name=f"cold-{model}",
        model=model,
        hybrid=False,
        chunk=context,
        context=context,
        running=8,
        flags=(
            "--disable-radix-cache",
            "--max-total-tokens",
            str(2 * context),
            "--max-mamba-cache-size",
            "16",
            *(FP8 if model == "fp8" else ()),
        ),
    )
