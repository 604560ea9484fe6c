"""What accelerators can do at best, by their data sheets."""

from __future__ import annotations

from typing import NamedTuple


class Device(NamedTuple):
    """Peaks of one device: dense BF16 FLOP/s, bytes/s of its memory, bytes of it, and where they stand."""

    name: str
    flops: float
    bandwidth: float
    memory: int
    source: str


_AMPERE = "NVIDIA A100 Tensor Core GPU data sheet (SXM)"
_HOPPER = "NVIDIA {} Tensor Core GPU data sheet (SXM); its BF16 figure with sparsity, halved"
_BLACKWELL = "NVIDIA Blackwell architecture brief (HGX B200, one of its GPUs)"

DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        Device("A100-40GB", 312e12, 1.555e12, 40 << 30, _AMPERE),
        Device("A100-80GB", 312e12, 2.039e12, 80 << 30, _AMPERE),
        Device("H100", 989.5e12, 3.35e12, 80 << 30, _HOPPER.format("H100")),
        Device("H200", 989.5e12, 4.8e12, 141_000_000_000, _HOPPER.format("H200")),
        Device("B200", 2.25e15, 8e12, 180_000_000_000, _BLACKWELL),
    )
}
