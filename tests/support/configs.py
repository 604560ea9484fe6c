"""Models and server configurations that the engine tests share.

A start costs half a minute on two cores, so a test joins an existing configuration if it can. Tests run
grouped by configuration, in the order of `CONFIGS`; what takes longest comes early, so that no worker is left
with it at the end.
"""

from collections.abc import Mapping
from typing import Any

from sglang_hybrid.cli.demo_model import FALCON_7B_LAYER
from sglang_hybrid.cli.demo_shape import DemoShape
from tests.support.server_config import FAULTS, FP8, HOPEFUL, RETRACT, Memory, ServerConfig

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
        # The same, and what was used longest ago goes first.
        ServerConfig(
            "lru",
            memory=Memory(tokens=512, spare=8),
            flags=("--hybrid-eviction", "lru"),
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
        # No conv line, which S2 refuses; latent KV and Mamba2's recurrence with a decay that no weight sets.
        *(
            ServerConfig(
                f"ling-{name}",
                organization=name.upper(),
                grid=grid,
                model="ling-moe" if name == "s0" else "ling",
                memory=Memory(tokens=2048, spare=32),
                chunk=chunk,
                context=1024,
                graphs=name != "s0",  # as for LFM2
                flags=flags,
                env=RETRACT,
                long=name != "s1",
            )
            for name, grid, chunk, flags in (
                ("s1", 8, 20, ("--enable-mixed-chunk",)),
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
    "ling": {"family": "ling-2.5", "vocab": 512, "context": 4096},
    "ling-moe": {"family": "ling-2.5-moe", "vocab": 512, "context": 4096},
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
