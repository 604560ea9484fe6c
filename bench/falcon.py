"""Falcon-H1-7B, which the simulated benches serve: its memories at equal bytes, and what a step costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from bench.trace import Request
from bench.workloads import of_trace
from sglang_hybrid.geometry import DEFAULT_GRID, SCAN_CHUNK, ModelGeometry, block_bytes
from sglang_hybrid.models import hybrid_shape
from sglang_hybrid.models.public import PUBLIC
from sglang_hybrid.pools.factory import default_grid, make_organization
from sglang_hybrid.pools.organization import Organization
from sglang_hybrid.radix.interfaces import EvictionPolicy, Placement
from sglang_hybrid.radix.tree import GridTree
from sglang_hybrid.simulator.cost import StepCost, Weights
from sglang_hybrid.simulator.devices import DEVICES
from sglang_hybrid.simulator.scheduler import Scheduler
from sglang_hybrid.simulator.setting import ENGINE, Setting

MODEL = "falcon-h1-7b"
CONFIG = PUBLIC[MODEL].config
PARAMETERS = 7.6e9


def geometry() -> ModelGeometry:
    """Falcon-H1-7B-Instruct in bf16."""
    return hybrid_shape(CONFIG, MODEL).geometry(1, kv_bytes=2, ssm_bytes=2, conv_bytes=2)


def organization(name: str, pages: int) -> Organization:
    """At the bytes of `pages` S2 pages beside the sink."""
    model = geometry()
    budget = (pages + 1) * block_bytes(model, DEFAULT_GRID) * model.arenas
    return make_organization(name, model, default_grid(name, model, SCAN_CHUNK), budget)


def weights() -> Weights:
    """In bf16.  A product with K and one with V, of every query head of every layer, two FLOPs a
    multiplication."""
    pair = 4.0 * CONFIG["num_attention_heads"] * CONFIG["head_dim"] * CONFIG["num_hidden_layers"]
    return Weights(PARAMETERS, 2 * PARAMETERS, pair)


def step_cost(device: str) -> StepCost:
    """On a device of the table."""
    return StepCost.of(DEVICES[device], weights(), geometry())


def queued(
    rows: Iterable[Request],
    name: str,
    pages: int,
    most_running: int,
    eviction: Callable[[GridTree], EvictionPolicy] | None = None,
    placement: Callable[[Organization], Placement] | None = None,
) -> Scheduler:
    """SGLang's scheduler with the plugin, and a trace that waits for it from the start: no device matters."""
    setting = Setting(
        partial(organization, name, pages),
        step_cost("H100"),
        serving=ENGINE,
        most_running=most_running,
        eviction=eviction,
        placement=placement,
    )
    return Scheduler(setting, of_trace(rows, 0))
