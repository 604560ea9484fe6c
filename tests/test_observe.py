"""Records and reports of a scheduler's cache, over the real core and without an engine."""

from array import array
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_hybrid.engine import observe
from sglang_hybrid.engine.cache import GridPrefixCache
from sglang_hybrid.engine.metrics import Exporter
from sglang_hybrid.engine.reuse import META_KEY
from sglang_hybrid.pools.organization import Need
from sglang_hybrid.radix.live_state import LiveState
from tests.core.worlds import GRID, NAMES, World


class Kept:
    """A trace that keeps its records."""

    written = dropped = 0

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def put(self, record: dict[str, Any]) -> None:
        self.records.append(record)


def cache_of(name: str = "S1") -> GridPrefixCache:
    """A cache whose pools are of no use here."""
    organization = World(name, pages=60, units=80, states=20).build()
    stub = SimpleNamespace(connect=lambda cache: None)
    tokens = SimpleNamespace(connect=lambda cache: None, organization=organization, device="cpu")
    cache = GridPrefixCache(stub, tokens, enable_metrics=False)
    cache.reuse.trace = Kept()  # type: ignore[assignment]
    return cache


def request(rid: str, tokens: range, salt: str | None = None) -> Any:
    return SimpleNamespace(
        rid=rid, tokens=array("q", tokens), salt=salt, customized_info=None, cached_tokens=0,
        skip_radix_cache_insert=False, retracted_stain=False,
        output_ids=[1, 2], finished=lambda: True,
        finished_reason=SimpleNamespace(to_json=lambda: {"type": "length"}),
    )  # fmt: skip


def admit(cache: GridPrefixCache, req: Any) -> LiveState:
    """What the scheduler does to admit a request, as far as records are concerned."""
    key = RadixKey(req.tokens, None, limit=len(req.tokens) - 1, cache_salt=req.salt)
    found = cache.match_prefix(MatchPrefixParams(key=key, req=req))
    req.lock, req.full_untruncated_fill_ids = cache.lock(found.last_device_node), req.tokens
    req.cached_tokens = found.device_prefix_len
    state = cache.admitted(req)
    cache.begun(req)
    return state


def compute(cache: GridPrefixCache, req: Any, state: LiveState) -> None:
    """Its prefill, published: KV and a checkpoint at the deepest boundary."""
    organization, blocks = cache.organization, len(req.tokens) // GRID
    state.units = organization.allocate_units(blocks * organization.units_per_block) or []
    checkpoint = organization.allocate_checkpoint()
    assert checkpoint is not None
    state.kept[blocks * GRID] = checkpoint
    data = req.tokens.tobytes()
    cache.memory.publish(state, data, len(req.tokens), len(req.tokens))
    cache.memory.finish(state)


@pytest.fixture
def cache() -> Iterator[GridPrefixCache]:
    cache = cache_of()
    req = request("first", range(18))
    compute(cache, req, admit(cache, req))
    cache.reuse.left(req)
    yield cache


def records(cache: GridPrefixCache) -> list[dict[str, Any]]:
    trace = cache.reuse.trace
    assert isinstance(trace, Kept)
    return trace.records


def test_a_reply_and_the_trace_tell_the_same(cache: GridPrefixCache) -> None:
    req = request("second", range(18))
    admit(cache, req)
    (found,) = req.customized_info[META_KEY]
    assert (found["r_max"], found["attention"], found["j_adopt"], found["cause"]) == (16, 16, 16, "off_grid")
    cache.reuse.left(req)
    first, second = records(cache)
    assert first["rid"] == "first" and first["r_max"] == 0
    assert second == {
        "rid": "second", "time": second["time"], "key": None, **found,
        "cached_tokens": 16, "output_tokens": 2, "finish": "length", "resumes": [],
    }  # fmt: skip
    cache.reuse.left(req)
    assert len(records(cache)) == 2


def test_other_keys_are_for_the_operator(cache: GridPrefixCache) -> None:
    req = request("salted", range(18), "pepper")
    admit(cache, req)
    (found,) = req.customized_info[META_KEY]
    assert (found["r_max"], found["lost_tokens"], found["cause"]) == (0, 0, None)
    cache.reuse.left(req)
    record = records(cache)[-1]
    assert (record["lost_tokens"], record["cause"]) == (16, "other_key")
    assert len(record["key"]) == 16 and "pepper" not in str(record)


def test_a_preempted_request_has_one_record(cache: GridPrefixCache) -> None:
    req = request("away", range(18))
    req.finished = lambda: False
    admit(cache, req)
    cache.reuse.left(req)
    assert len(records(cache)) == 1
    admit(cache, req)
    assert len(req.customized_info[META_KEY]) == 2
    req.finished = lambda: True
    cache.reuse.left(req)
    assert len(records(cache)) == 2 and len(records(cache)[-1]["resumes"]) == 1
    assert (cache.reuse.admitted_first, cache.reuse.admitted_again) == (2, 1)
    assert cache.reuse.depths["j_adopt"].total == cache.reuse.resumed_tokens == 16


def test_a_preempted_request_that_is_aborted_has_its_record(cache: GridPrefixCache) -> None:
    req = request("gone", range(18))
    req.finished = lambda: False
    admit(cache, req)
    cache.reuse.left(req)
    for _ in range(2):
        cache.release_aborted_request(SimpleNamespace(rid="gone"))
    assert [record["finish"] for record in records(cache)] == ["length", "abort"]


def test_flush_forgets_what_was_computed(cache: GridPrefixCache) -> None:
    cache.reset()
    req = request("after", range(18))
    admit(cache, req)
    assert req.customized_info[META_KEY][0]["r_max"] == 0


def test_the_binding_resource(cache: GridPrefixCache) -> None:
    cache.refused("admission", Need(units=10_000, checkpoints=1))
    assert observe.report(cache)["refused_last"] == "admission_attention"
    cache.refused("decode", Need(units=1, checkpoints=10_000))
    assert observe.report(cache)["refusals"] == {"admission_attention": 1, "decode_checkpoint": 1}


@pytest.mark.parametrize("name", NAMES)
def test_samples(name: str, tmp_path: Any) -> None:
    """Bytes add up to the budget, no line is there twice, and every write has the same lines."""
    cache = cache_of(name)
    before = list(observe.samples(cache))
    req = request("one", range(18))
    compute(cache, req, admit(cache, req))
    after = list(observe.samples(cache))
    for samples in (before, after):
        assert sum(s.value for s in samples if s.name == "bytes") == cache.organization.budget_bytes
    lines = [(s.name, s.suffix, tuple(s.labels.items())) for s in after]
    assert len(set(lines)) == len(lines)
    assert lines == [(s.name, s.suffix, tuple(s.labels.items())) for s in before]
    exporter = Exporter(str(tmp_path), {}, lambda: observe.samples(cache))
    exporter.write()
    exporter.write()
    assert exporter.failed == 0
    report = observe.report(cache)
    assert sum(report["bytes"].values()) == report["budget_bytes"]
    cached = {s.labels["kind"]: s.value for s in after if s.labels.get("state") == "cached"}
    assert min(cached.values()) > 0
