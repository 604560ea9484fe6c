"""Servers that are compared at equal state bytes: stock SGLang and the organizations."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from bench.server import BenchServer
from sglang_hybrid.cli.demo_model import write_demo_model
from sglang_hybrid.geometry import ModelGeometry, block_bytes
from sglang_hybrid.models import hybrid_shape
from sglang_hybrid.pools.factory import ORGANIZATIONS

STOCK = "stock"
RATIO = "--mamba-full-memory-ratio"
STOCK_RATIO = 0.9
"""Stock's default for `RATIO`: bytes of states over bytes of KV."""

SCALE = 8
"""The demo's lengths are the source's divided by this: Falcon-H1-7B's scan chunk of 256 tokens (also stock's
track interval), the grid of 512, D0's of 1792.  A checkpoint is three pages and a conv line in both."""
DEMO_CHUNK = 256 // SCALE
DEMO_GRID = 512 // SCALE
DEMO_CONTEXT = 8192 // SCALE
DEMO_SHAPE: dict[str, Any] = {"kv_heads": 1, "head_dim": 64, "ssm_heads": 12}
DEMO_FLAGS = ["--dtype", "float32", "--context-length", str(DEMO_CONTEXT), "--mem-fraction-static", "0.9"]
"""Pools are given in bytes; a smaller fraction of what is free would count what the other servers take."""
DEMO_STOCK_FLAGS = ["--mamba-radix-cache-strategy", "extra_buffer", "--mamba-track-interval", str(DEMO_CHUNK)]
"""Stock's own choice where it has Triton kernels, at the demo's chunk."""
DEMO_ENV = {"SGLANG_MAMBA_CONV_DTYPE": "float32", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

_LIMITS = re.compile(r"max_total_num_tokens=(\d+).*?max_running_requests=(\d+)")
_SLOTS = re.compile(r"Mamba Cache is allocated.*?max_mamba_cache_size: (\d+)")
_GIGABYTES = re.compile(r"(?:conv_state|ssm_state|K|V) size: ([\d.]+) ?GB")


class StockPools(NamedTuple):
    """Stock's two pools: whole recurrent states, and tokens of KV; each has one more for padding."""

    slots: int
    tokens: int

    def state_bytes(self, model: ModelGeometry) -> int:
        """Padding included, as the organizations' sink pages are in their budget."""
        per_slot, per_token = stock_bytes(model)
        return (self.slots + 1) * per_slot + (self.tokens + 1) * per_token


def stock_bytes(model: ModelGeometry) -> tuple[int, int]:
    """Bytes of one state and of one token in stock's pools, all layers."""
    state = len(model.recurrent_layers) * (model.ssm_rows * model.ssm_row_bytes + model.conv_bytes)
    return state, len(model.attention_layers) * model.kv_row_bytes


def stock_pools(model: ModelGeometry, budget_bytes: int, ratio: float) -> StockPools:
    """The pools that together come closest to the budget from below, split by stock's rule (`RATIO`).

    Raises `ValueError` when there would be no state or no token.
    """
    per_slot, per_token = stock_bytes(model)
    slots = int(budget_bytes * ratio / (1 + ratio)) // per_slot - 1
    tokens = (budget_bytes - (slots + 1) * per_slot) // per_token - 1
    if slots < 1 or tokens < 1:
        raise ValueError(
            f"{budget_bytes} bytes, split by {RATIO} {ratio}, hold {slots} states of {per_slot} bytes and "
            f"{tokens} tokens of {per_token} beside the padding: needs at least one of each"
        )
    return StockPools(slots, tokens)


class Arm(NamedTuple):
    """`stock` or an organization, and further flags of its server."""

    name: str
    memory: str
    flags: tuple[str, ...]

    @property
    def stock(self) -> bool:
        return self.memory == STOCK

    @property
    def ratio(self) -> float:
        """How stock's bytes are split."""
        return float(self.flags[self.flags.index(RATIO) + 1]) if RATIO in self.flags else STOCK_RATIO

    @classmethod
    def parse(cls, text: str) -> Arm:
        """`S1`, `S1+exact+headroom=0.1` (flags without `--hybrid-`), `stock+page-size=16` (without `--`).

        Raises `ValueError` for an unknown memory and for a split that is none.
        """
        memory, *more = text.split("+")
        if memory not in (STOCK, *ORGANIZATIONS):
            raise ValueError(f"{memory} is unknown; choose among {STOCK}, {', '.join(ORGANIZATIONS)}")
        prefix = "--" if memory == STOCK else "--hybrid-"
        flags: list[str] = []
        for one in more:
            flag, given, value = one.partition("=")
            flags += [prefix + flag, value] if given else [prefix + flag]
        arm = cls(text, memory, tuple(flags))
        if arm.stock and not 0 < arm.ratio < float("inf"):
            raise ValueError(f"{RATIO} {arm.ratio} leaves a pool empty: use a value above 0")
        return arm


@dataclass(frozen=True)
class Setting:
    """What all arms have in common.  `scale`: what the source's lengths are divided by."""

    model_dir: str
    model: ModelGeometry
    vocabulary: int
    grid: int
    budget_bytes: int
    clients: int
    flags: tuple[str, ...] = ()
    stock_flags: tuple[str, ...] = ()
    passed: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    scale: int = 1

    def args(self, arm: Arm) -> list[str]:
        """Arguments of its `sglang.launch_server`; what the user named comes last, and wins.

        Chunks of a prefill end on every arm's boundaries: 28 grid steps are 8 of D0's, which keeps its own
        grid, at the source's proportions.
        """
        args = [
            *("--model-path", self.model_dir, "--chunked-prefill-size", str(28 * self.grid)),
            *("--max-running-requests", str(self.clients), "--skip-server-warmup", "--sleep-on-idle"),
            *("--random-seed", "0", "--log-level-http", "warning", "--decode-log-interval", "4"),
        ]
        if arm.stock:
            pools = stock_pools(self.model, self.budget_bytes, arm.ratio)
            args += ["--max-mamba-cache-size", str(pools.slots), "--max-total-tokens", str(pools.tokens)]
            args += self.stock_flags
        else:
            args += ["--hybrid-mem", arm.memory, "--hybrid-budget-bytes", str(self.budget_bytes)]
            # One whose grid follows from the model keeps its own.
            args += ["--hybrid-grid", str(self.grid)] if ORGANIZATIONS[arm.memory].usual_grid else []
        return [*args, *self.flags, *arm.flags, *self.passed]


def demo_setting(folder: Path, grid: int | None, **more: Any) -> Setting:
    """The demo model, written to `folder`; lengths are the source's over `SCALE`."""
    path = write_demo_model(folder, context=DEMO_CONTEXT, **DEMO_SHAPE)
    config = _config(path) | {"mamba_chunk_size": DEMO_CHUNK}
    (path / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    return model_setting(
        path,
        grid or DEMO_GRID,
        (4, 4, 4),
        flags=tuple(DEMO_FLAGS),
        stock_flags=tuple(DEMO_STOCK_FLAGS),
        env=DEMO_ENV,
        scale=SCALE,
        **more,
    )


def model_setting(
    path: Path, grid: int, element_bytes: tuple[int, int, int], *, pages: int, **more: Any
) -> Setting:
    """A model in a folder, one rank; bytes of an element of KV, SSM and conv state; a budget in S2 pages."""
    config = _config(path)
    kv, ssm, conv = element_bytes
    model = hybrid_shape(config, str(path)).geometry(1, kv_bytes=kv, ssm_bytes=ssm, conv_bytes=conv)
    return Setting(
        model_dir=str(path),
        model=model,
        vocabulary=int(config.get("text_config", config)["vocab_size"]),
        grid=grid,
        budget_bytes=pages * block_bytes(model, grid) * model.arenas,
        **more,
    )


def _config(path: Path) -> dict[str, Any]:
    return dict(json.loads((path / "config.json").read_text()))


class Held(NamedTuple):
    """What a started server says of its memory."""

    state_bytes: int
    most_running: int


def held(arm: Arm, setting: Setting, server: BenchServer) -> Held:
    """Bytes of its pools, and the most requests that it runs at once.

    Raises `RuntimeError` when the pools are not of equal bytes: they differ from the budget by more than a
    state, or by more than stock's log allows, which rounds to 0.01 GB a tensor.
    """
    log, info = server.log(), server.info()
    limits = _LIMITS.search(log)
    if limits is None:
        raise RuntimeError(f"{arm.name}: the log says nothing of max_total_num_tokens")
    if not arm.stock:
        total = sum(_leaves(info["internal_states"][0]["hybrid"]["bytes"]))
        return Held(_checked(arm, setting, total), int(limits[2]))
    slots = _SLOTS.search(log)
    if slots is None:
        raise RuntimeError(f"{arm.name}: the log says nothing of max_mamba_cache_size")
    total = StockPools(int(slots[1]), int(limits[1])).state_bytes(setting.model)
    logged = sum(float(size) for size in _GIGABYTES.findall(log)) * (1 << 30)
    if abs(logged - total) > 0.03 * total + (1 << 30) / 25:
        raise RuntimeError(
            f"{arm.name}: its pools take {logged:.0f} bytes, {total} were computed: give the sizes of its "
            "elements by --state-bytes"
        )
    return Held(_checked(arm, setting, total), int(limits[2]))


def _checked(arm: Arm, setting: Setting, total: int) -> int:
    if abs(total - setting.budget_bytes) > stock_bytes(setting.model)[0]:
        raise RuntimeError(f"{arm.name}: its pools hold {total} bytes, the budget is {setting.budget_bytes}")
    return total


def _leaves(tree: Any) -> list[int]:
    if isinstance(tree, Mapping):
        tree = list(tree.values())
    return [leaf for part in tree for leaf in _leaves(part)] if isinstance(tree, list) else [int(tree)]
