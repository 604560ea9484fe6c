"""The simulator's parts: keys without tokens, the roofline, the device table."""

import pytest

from sglang_hybrid.simulator.cost import StepCost, Weights
from sglang_hybrid.simulator.devices import DEVICES
from sglang_hybrid.simulator.keys import DIGEST_BYTES, key_of
from sglang_hybrid.simulator.outcome import weighted_median
from tests.core.worlds import FALCON_7B


def test_keys_tell_contents_apart_by_block() -> None:
    base = key_of([("a", 10), ("b", 10)], 4)
    assert len(base) == 5 * DIGEST_BYTES
    same = key_of([("a", 10), ("b", 11)], 4)
    assert same[: 5 * DIGEST_BYTES] == base
    for changed in ([("a", 10), ("c", 10)], [("a", 9), ("b", 11)], [("a", 10), ("b", 4), ("c", 6)]):
        other = key_of(changed, 4)
        shared = [one for one in range(5) if other[one * 8 :][:8] == base[one * 8 :][:8]]
        assert shared == ([0, 1] if len(changed) == 2 else [0, 1, 2]), changed
    assert len({key_of([(name, 4)], 4) for name in (0, 1, -1, -2, "0", ("a", 1))}) == 6


def test_roofline() -> None:
    device = DEVICES["A100-40GB"]
    cost = StepCost.of(device, Weights(7.6e9, 15.2e9), FALCON_7B)
    assert cost.kv_bytes == 44 * 1024 and cost.state_bytes == 44 * 1_594_368
    decode = cost.step(1, 1, 1000, 1000) - cost.overhead
    assert decode == pytest.approx((15.2e9 + 1000 * 44 * 1024 + 2 * cost.state_bytes) / cost.bandwidth)
    prefill = cost.step(8192, 1, 8192, 0) - cost.overhead
    assert prefill == pytest.approx(2 * 7.6e9 * 8192 / cost.flops, rel=0.02)
    steps = [cost.step(9, 9, context, context) for context in range(500, 500 + 9 * 40, 9)]
    assert cost.decode(9, 500, 40) == pytest.approx(sum(steps))
    for seconds in (0.0, 0.01, 0.1, 2.0):
        fewest = cost.steps_until(9, 500, seconds)
        assert cost.decode(9, 500, fewest) >= seconds
        assert fewest == 1 or cost.decode(9, 500, fewest - 1) < seconds


def test_devices_name_their_sources() -> None:
    assert set(DEVICES) == {"A100-40GB", "A100-80GB", "H100", "H200", "B200"}
    for name, device in DEVICES.items():
        assert device.name == name and "NVIDIA" in device.source
        assert device.flops > 1e14 and device.bandwidth > 1e12 and device.memory >= 40 << 30


def test_medians_are_weighted_by_time() -> None:
    assert weighted_median({0: 1.0, 5: 3.0, 9: 1.0}) == 5
    assert weighted_median({}) == 0
