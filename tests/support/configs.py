"""Models and server configurations that the engine tests share.

A start costs half a minute on two cores, so a test joins an existing configuration if it can. Tests run
grouped by configuration, in the order of `CONFIGS`; what takes longest comes early, so that no worker is left
with it at the end.
"""

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_hybrid.cli.demo_model import FALCON_7B_LAYER
from sglang_hybrid.cli.demo_shape import DemoShape
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


SMALL: Mapping[str, Any] = {
    "memory": Memory(tokens=512, spare=8),
    "asked": 64,
    # Forced so rarely that memory runs out in between.
    "env": {**HOPEFUL, **RETRACT, "SGLANG_TEST_RETRACT_INTERVAL": "10"},
}
"""Little memory for S0, S2 and D0, and more requests asked for than may run."""

OTHER: Mapping[str, Any] = {"model": "public", "chunk": 104, "flags": ("--enable-mixed-chunk",)}
"""Ample memory for S0, S2 and D0, the public vocabulary, chunks off the grid."""

CONFIGS: Mapping[str, ServerConfig] = {
    config.name: config
    for config in (
        # A public server: default budget, long vocabulary, tokenizer and chat template.
        ServerConfig(
            "public",
            grid=16,
            model="public",
            memory=Memory(tokens=16384, spare=256),
            running=32,
            chunk=2048,
            context=16384,
            # Whole pages of a context of 16,384 tokens take a CPU minutes a test.
            attention="torch_native",
        ),
        # The other organizations likewise; D0 on the grid that it derives.
        ServerConfig("s0-ample", organization="S0", **OTHER),
        ServerConfig("s2-ample", organization="S2", **OTHER),
        ServerConfig(
            "d0-ample",
            organization="D0",
            **{**OTHER, "grid": 64, "memory": Memory(tokens=8192, spare=128), "chunk": 800, "context": 8192},
            native_grid=True,
            share=0.4,
            attention="torch_native",
        ),
        # Ample memory: hits follow the formula exactly.
        ServerConfig("g8"),
        ServerConfig("g16", grid=16),
        # Chunks below, equal to and above the grid; 12 and 40 are off it.
        ServerConfig("chunk3", chunk=3),
        ServerConfig("chunk8", chunk=8, env={"SGLANG_REQ_RUNNING_TIMEOUT": "6"}),
        ServerConfig("mixed12", chunk=12, flags=("--enable-mixed-chunk",)),
        ServerConfig("g16-chunk40", grid=16, chunk=40, attention="torch_native"),
        ServerConfig("forced-retract", chunk=20, env=RETRACT),
        # Little memory.
        ServerConfig(
            "tight",
            memory=Memory(tokens=512, spare=8),
            observed=True,
            env=HOPEFUL,
        ),
        # The same bytes for others, and retraction beyond what they force.
        ServerConfig("s0-small", organization="S0", **SMALL),
        ServerConfig(
            "d0-small",
            organization="D0",
            **{**SMALL, "grid": 32, "memory": Memory(tokens=1024, spare=0)},
            share=0.75,
            chunk=48,
        ),
        ServerConfig(
            "kv256",
            attention="torch_native",
            memory=Memory(tokens=256, spare=2),
            running=2,
            observed=True,
            env=HOPEFUL,
        ),
        ServerConfig(
            "queue",
            running=1,
            flags=("--max-queued-requests", "2"),
            env={"SGLANG_REQ_WAITING_TIMEOUT": "1"},
        ),
        # The other organizations, the same bytes.
        ServerConfig("s0", organization="S0", memory=Memory(tokens=2048, spare=64), observed=True),
        ServerConfig(
            "s2",
            organization="S2",
            memory=Memory(tokens=2048, spare=64),
            observed=True,
            env={"SGLANG_HYBRID_TEST_FAULTS": str(FAULTS)},
        ),
        ServerConfig("d0", organization="D0", grid=16, memory=Memory(tokens=2048, spare=64), observed=True),
        # The Triton kernels, interpreted: a millisecond a program, so a few tokens.
        *(
            ServerConfig(
                name,
                organization=organization,
                model=model,
                memory=Memory(tokens=1024, spare=32),
                flags=("--hybrid-kernels", "triton"),
                env={"TRITON_INTERPRET": "1"},
            )
            for name, organization, model in (("triton", "S2", "tiny"), ("triton-qwen", "S1", "qwen"))
        ),
        # Placements that keep less than every boundary; with them, headroom and retention.
        *(
            ServerConfig(
                name,
                flags=(
                    *("--hybrid-checkpoints", name),
                    *("--hybrid-headroom", "0.1", "--hybrid-retention", "1"),
                ),
            )
            for name in ("branch", "sparse")
        ),
        # Little memory again, another model: beside the others each would start a cold server again.
        ServerConfig(
            "s2-small",
            organization="S2",
            **{**SMALL, "grid": 16, "memory": Memory(tokens=768, spare=8)},
            model="odd",
            tight=True,
        ),
        # Decode through recorded graphs, and faults to plant in them (test_graphs.py).
        # Without poison: a fault would write NaN into KV, which stays there.
        ServerConfig(
            "graphs",
            context=512,
            graphs=True,
            env={"SGLANG_HYBRID_TEST_FAULTS": str(FAULTS), "SGLANG_HYBRID_POISON": "0"},
        ),
        *(
            ServerConfig(f"graphs-{name.lower()}", organization=name, context=512, graphs=True, grid=grid)
            for name, grid in (("S0", 8), ("S2", 8), ("D0", 16))
        ),
        # Families whose attention and recurrent layers are different sets: chunks off the grid by mixing and
        # (D0) by size, forced retraction.
        *(
            ServerConfig(
                f"{model}-{name}",
                organization=name.upper(),
                grid=grid,
                model=model,
                memory=Memory(tokens=2048, spare=64),
                chunk=chunk,
                context=1024,
                flags=flags,
                graphs=True,
                env=env,
            )
            for model in ("granite", "qwen")
            for name, grid, chunk, flags, env in (
                ("s1", 16, 48, ("--enable-mixed-chunk",), {}),
                ("s2", 16, 256, (), RETRACT),
                ("d0", 48, 32, (), {}),
            )
        ),
        # Short convolutions: a checkpoint is its conv line.  One configuration in every run, the others when
        # asked for.
        *(
            ServerConfig(
                f"lfm2-{name}",
                organization=name.upper(),
                grid=grid,
                model="lfm2-moe" if name == "s1" else "lfm2",
                memory=Memory(tokens=1536, spare=8),
                chunk=chunk,
                context=1024,
                graphs=name != "s1",  # SGLang's experts on a CPU ask the host which of them are needed
                flags=flags,
                env=RETRACT,
                long=name != "s2",
            )
            for name, grid, chunk, flags in (
                ("s2", 16, 40, ("--enable-mixed-chunk",)),
                ("s0", 16, 12, ()),
                ("s1", 16, 256, ("--enable-mixed-chunk",)),
                ("d0", 48, 32, ()),
            )
        ),
        # Latent KV, a decay a key channel: likewise.  At a grid of 8 pages cut the states.
        *(
            ServerConfig(
                f"kimi-{name}",
                organization=name.upper(),
                grid=grid,
                model="kimi",
                memory=Memory(tokens=2048, spare=32),
                chunk=chunk,
                context=1024,
                graphs=True,
                flags=flags,
                env=RETRACT,
                long=name != "s1",
            )
            for name, grid, chunk, flags in (
                ("s1", 8, 20, ("--enable-mixed-chunk",)),
                ("s2", 16, 256, ()),
                ("s0", 16, 12, ()),
                ("d0", 48, 32, ()),
            )
        ),
        # Families of the same kinds of layers: each in one organization, in turn; the others are long.
        *(
            ServerConfig(
                f"{model}-{name}",
                organization=name.upper(),
                grid=grid,
                model=model,
                memory=Memory(tokens=2048, spare=64),
                chunk=chunk,
                flags=flags,
                env=env,
                long=name != short,
            )
            for model, short in (
                ("granite-4-moe", "s0"),
                ("nemotron-h", ""),
                ("nemotron-h-moe", "d0"),
                ("qwen3.5-moe", ""),
                ("qwen3.5-vl", "s1"),
                ("qwen3.5-vl-moe", ""),
                ("qwen3-next", ""),
            )
            for name, grid, chunk, flags, env in (
                ("s0", 16, 48, (), RETRACT),
                ("s1", 16, 48, ("--enable-mixed-chunk",), {}),
                ("s2", 16, 256, (), RETRACT),
                ("d0", 48, 32, (), {}),
            )
        ),
        # Exact mode with a state that loses bits, and faults to plant (test_exact.py).
        ServerConfig(
            "exact",
            memory=Memory(tokens=512, spare=8),
            chunk=72,
            attention="torch_native",
            flags=("--hybrid-exact", "--mamba-ssm-dtype", "bfloat16"),
            env={"SGLANG_HYBRID_TEST_FAULTS": str(FAULTS)},
        ),
        # KV in eight bits: 32 tokens fill the page of 8 in fp32, and the bits of any state may be NaN in it.
        ServerConfig("fp8", grid=32, model="fp8", flags=FP8),
        # The default grid with pages as large as those of a real model.
        ServerConfig("g512", grid=512, model="real-page", memory=Memory(tokens=16384, spare=24), chunk=2048),
    )
}

MODELS: Mapping[str, Mapping[str, Any]] = {
    "tiny": {"vocab": 512, "context": 4096},
    "granite": {"family": "granite-4", "vocab": 512, "context": 4096},
    "qwen": {"family": "qwen3.5", "vocab": 512, "context": 4096},
    "kimi": {"family": "kimi-linear", "vocab": 512, "context": 4096},
    "lfm2": {"family": "lfm2", "vocab": 512, "context": 4096},
    "lfm2-moe": {"family": "lfm2-moe", "vocab": 512, "context": 4096},
    **{
        family: {"family": family, "vocab": 512, "context": 4096}
        for family in (
            *("granite-4-moe", "nemotron-h", "nemotron-h-moe"),
            *("qwen3.5-moe", "qwen3.5-vl", "qwen3.5-vl-moe", "qwen3-next"),
        )
    },
    "public": {},
    # The tiny model again, for a cold server of its own.
    "fp8": {"vocab": 512, "context": 4096},
    # A conv line of 5,376 bytes: slots of 8 KiB or, tight, of 6, which do not divide a page of 32.
    "odd": {"shape": DemoShape(ssm_groups=2), "vocab": 512, "context": 4096},
    "real-page": {"shape": FALCON_7B_LAYER, "vocab": 512, "context": 4096},
}
"""Keyword arguments of `write_demo_model` for each model by name."""

SAME_KINDS = tuple(
    f"{model}-{name}"
    for model in (
        *("granite-4-moe", "nemotron-h", "nemotron-h-moe"),
        *("qwen3.5-moe", "qwen3.5-vl", "qwen3.5-vl-moe", "qwen3-next"),
    )
    for name in ("s0", "s1", "s2", "d0")
)
"""Configurations of families whose recurrent layers are of a kind that another family has."""
RETRACTED = tuple(name for name in SAME_KINDS if CONFIGS[name].env)
"""Those that are forced to retract."""
