"""Seconds of a step by the roofline of a device: what it must read, what it must compute."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from sglang_hybrid.geometry import ModelGeometry
from sglang_hybrid.simulator.devices import Device

COMPUTE_PART, BANDWIDTH_PART = 0.54, 0.9
"""Parts of a device's peaks that serving reaches, fitted to the paper's A100."""

OVERHEAD = 2e-3
"""Seconds of a step beside its kernels, from there too."""


@dataclass(frozen=True)
class Weights:
    """What a model costs beside its state: parameters that compute on a token, their bytes, and FLOPs of
    attention for one pair of query and key, all layers together."""

    parameters: float
    bytes: float
    pair_flops: float = 0.0


@dataclass(frozen=True)
class StepCost:
    """overhead + max(weights / BW, 2 P T / F) + bytes of KV and states / BW + FLOPs of attention / F."""

    flops: float
    """Reached, per second."""
    bandwidth: float
    """Reached, bytes per second."""
    weights: Weights
    kv_bytes: float
    """Of one token, all layers."""
    state_bytes: float
    """Of one request's recurrent state, all layers; a step reads and writes it."""
    overhead: float = OVERHEAD

    @classmethod
    def of(
        cls, device: Device, weights: Weights, model: ModelGeometry, overhead: float = OVERHEAD
    ) -> StepCost:
        """The cost of a model on a device at the usual parts of its peaks."""
        return cls(
            device.flops * COMPUTE_PART,
            device.bandwidth * BANDWIDTH_PART,
            weights,
            model.kv_row_bytes * model.arenas,
            model.checkpoint_bytes * model.arenas,
            overhead,
        )

    def step(self, tokens: int, rows: int, context: int, pairs: float) -> float:
        """Seconds to compute `tokens` of `rows` requests that read `context` tokens of KV for `pairs` of
        query and key."""
        compute = 2 * self.weights.parameters * tokens / self.flops
        memory = context * self.kv_bytes + 2 * rows * self.state_bytes
        return (
            self.overhead
            + max(self.weights.bytes / self.bandwidth, compute)
            + memory / self.bandwidth
            + pairs * self.weights.pair_flops / self.flops
        )

    def growth(self, rows: int) -> float:
        """Seconds by which a decode step of `rows` requests is longer than the one before it."""
        return rows * (self.kv_bytes / self.bandwidth + self.weights.pair_flops / self.flops)

    def decode(self, rows: int, context: int, steps: int) -> float:
        """Seconds of `steps` decode steps one after another; `context` is what the first one reads."""
        first = self.step(rows, rows, context, context)
        return steps * first + self.growth(rows) * steps * (steps - 1) / 2

    def steps_until(self, rows: int, context: int, seconds: float) -> int:
        """Fewest decode steps, at least one, that take these seconds or longer."""
        first, growth = self.step(rows, rows, context, context), self.growth(rows)
        if growth > 0:
            slope = first - growth / 2
            steps = int((sqrt(slope * slope + 2 * growth * max(seconds, 0.0)) - slope) / growth)
        else:
            steps = int(seconds / first)
        steps = max(1, steps - 1)
        while self.decode(rows, context, steps) < seconds:
            steps += 1
        return steps
