"""The budget a user gives against the memory there is, with figures of free memory that a test makes up."""

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.arguments import kept_process, resolved

pytest.importorskip("sglang")

from sglang.srt import runtime_context
from sglang.srt.mem_cache import kv_cache_configurator

from sglang_hybrid.engine import build
from sglang_hybrid.engine.rules import Refusal

GIB = 1 << 30
BEFORE = 4.0
"""GiB free before the weights were loaded."""


@pytest.fixture(scope="module")
def records(model: str) -> Iterator[dict[str, Any]]:
    """Resolved without and with a budget of one GiB."""
    start = ("--model-path", model, "--skip-tokenizer-init", "--hybrid-mem", "S1", "--hybrid-grid", "16")
    start += ("--mem-fraction-static", "0.5")
    with kept_process():
        yield {"none": resolved(*start), "1Gi": resolved(*start, "--hybrid-budget-bytes", "1Gi")}
    runtime_context.reset_context()


Profile = Callable[..., int]


@pytest.fixture
def profile(records: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Profile:
    """Bytes for the pools by SGLang's own sizing with our function around it, as in a scheduler process."""

    def run(budget: str, free: float, device: str = "cpu", nodes: int = 1, ranks: int = 1) -> int:
        """`free`: GiB of a NUMA node or of an accelerator after the weights, the least of all ranks."""

        def asked(device: str, gpu: int, distributed: bool = False, cpu_group: Any = None) -> float:
            assert distributed == (ranks > 1)
            return free

        runtime_context.publish(records[budget], role="scheduler")
        for module in (kv_cache_configurator, build):
            monkeypatch.setattr(module, "get_available_gpu_memory", asked)
        monkeypatch.setattr("gc.collect", lambda: 0)  # half a second among all that pytest holds
        monkeypatch.setattr(build, "get_cpu_ids_by_node", lambda: ["0"] * nodes)
        parallel = SimpleNamespace(
            world_group=SimpleNamespace(cpu_group=None), launch_world_size=ranks, tp_size=ranks
        )
        monkeypatch.setattr(build, "get_parallel", lambda: parallel)
        monkeypatch.setattr(kv_cache_configurator, "get_parallel", lambda: parallel)
        configurator = SimpleNamespace(
            device=device, gpu_id=0, mambaish_config=object(), post_capture_kv_active=False,
            model_config=SimpleNamespace(is_multimodal=False),
        )  # fmt: skip
        configurator._handle_max_mamba_cache = partial(build.handle_max_mamba_cache, None, configurator)
        original = kv_cache_configurator.KVCacheConfigurator._profile_available_bytes
        return build.profile_available_bytes(original, configurator, BEFORE)

    return run


def test_without_a_budget_the_fraction_decides(profile: Profile) -> None:
    assert profile("none", free=3.0) == GIB
    with pytest.raises(ValueError, match="Loaded weights leave no GPU memory"):
        profile("none", free=1.9)


@pytest.mark.parametrize("free", [3.0, 1.9, 1.1])
def test_a_budget_that_fits_starts_whatever_the_fraction_leaves(profile: Profile, free: float) -> None:
    """Another process took memory while the weights were loaded."""
    assert profile("1Gi", free) == GIB
    assert runtime_context.get_schedule().max_mamba_cache_size == build.UNBOUNDED_STATES


@pytest.mark.parametrize(
    ("device", "nodes", "ranks", "least"),
    [("cpu", 1, 1, 1.0), ("cpu", 2, 1, 0.5), ("cpu", 1, 2, 2.0), ("cuda", 2, 4, 1.0)],
)
def test_a_budget_that_does_not_fit_is_refused_in_one_sentence(
    profile: Profile, device: str, nodes: int, ranks: int, least: float
) -> None:
    """CPU ranks share one memory, that of all NUMA nodes; an accelerator is a rank's own."""
    assert profile("1Gi", least + 2**-20, device, nodes, ranks) == GIB
    with pytest.raises(Refusal) as caught:
        profile("1Gi", least, device, nodes, ranks)
    assert str(caught.value) == (
        f"--hybrid-budget-bytes {GIB} does not fit: the {device} has {GIB} bytes free for each rank beside "
        "the weights; use less, or end what else takes memory there."
    )
