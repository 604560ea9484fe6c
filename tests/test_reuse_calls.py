"""Reuse records through SGLang's own objects and calls, on pools without tensors: no engine is started."""

from array import array
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers import schedule_batch
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.managers.scheduler_components import output_streamer
from sglang.srt.managers.tokenizer_manager import unwrap_from_pickle
from sglang.srt.mem_cache import common
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_hybrid.engine.cache import GridPrefixCache
from sglang_hybrid.engine.requests import GridRequests, PageMaps
from sglang_hybrid.engine.streamer import GridOutputStreamer
from sglang_hybrid.engine.tokens import GridTokens
from sglang_hybrid.radix.account import Resource
from tests.core.worlds import World


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """What these calls read of a published configuration."""
    serving = SimpleNamespace(strip_thinking_cache=False, stream_interval=1, weight_version=None)
    for module in (schedule_batch, output_streamer, common):
        monkeypatch.setattr(module, "get_serving", lambda: serving)
    plain = SimpleNamespace(speculative_algorithm=None)
    monkeypatch.setattr(common, "get_spec", lambda: plain)
    monkeypatch.setattr(
        output_streamer, "get_parallel", lambda: SimpleNamespace(dp_rank=None, attn_tp_rank=0)
    )
    quiet = SimpleNamespace(enable_request_time_stats_logging=False)
    monkeypatch.setattr(output_streamer, "get_observability", lambda: quiet)


class Pools:
    """Request pool, token allocator and cache of a scheduler."""

    def __init__(self) -> None:
        organization = World("S1", pages=60, grid=8).build()
        self.requests = object.__new__(GridRequests)
        ReqToTokenPool.__init__(
            self.requests, size=8, max_context_len=256, device="cpu", enable_memory_saver=False
        )
        rows = self.requests.req_to_token.shape[0]
        self.requests.organization = organization
        self.requests.maps = PageMaps(rows, organization.members, "cpu")
        self.requests.states_by_row, self.requests._requests = [None] * rows, [None] * rows
        self.requests.batch = None
        self.requests._forked, self.requests._unwritten = set(), set()
        self.tokens = GridTokens(organization, self.requests, torch.float32, "cpu", SimpleNamespace())
        self.cache = GridPrefixCache(self.requests, self.tokens, enable_metrics=False)
        self.records: list[dict[str, Any]] = []
        self.cache.reuse.trace = SimpleNamespace(put=self.records.append)  # type: ignore[assignment]

    def prefill(self, req: Any) -> None:
        """What the scheduler does for a batch of one."""
        req.init_next_round_input(self.cache)
        req.lock = self.cache.lock(req.last_node)
        start, end = req.prefix_len, len(req.full_untruncated_fill_ids)
        assert self.requests.alloc([req]) is not None
        prefix, whole = torch.tensor([start]), torch.tensor([end])
        assert self.tokens.alloc_extend(prefix, prefix, whole, whole, prefix, end - start) is not None
        self.requests.alloc_aux_to_lengths(
            req_pool_indices_cpu=torch.tensor([req.kv.req_pool_idx]), target_seq_lens_cpu=whole
        )
        req.kv.kv_committed_len = req.kv.kv_allocated_len = end
        self.cache.checkpoint(req, up_to=end)
        req.output_ids.append(7)

    def finish(self, req: Any) -> None:
        req.finished_reason = FINISH_LENGTH(len(req.output_ids))
        release_kv_cache(req, self.cache, checkpoint=True)

    def retract(self, req: Any) -> None:
        release_kv_cache(req, self.cache, checkpoint=False)
        req.reset_for_retract()


def request(rid: str, salt: str | None = None, stream: bool = False) -> Any:
    sampling = SamplingParams(max_new_tokens=4)
    sampling.normalize(None)
    ids = array("q", range(5, 25))
    return Req(rid, "", ids, sampling, vocab_size=512, cache_salt=salt, stream=stream)


@pytest.fixture
def pools() -> Iterator[Pools]:
    pools = Pools()
    yield pools
    assert pools.tokens.verify_byte_accounting() == []
    pools.cache.check_integrity()


def test_a_request_from_match_to_release(pools: Pools) -> None:
    for rid, salt in (("first", None), ("again", None), ("salted", "pepper")):
        req = request(rid, salt)
        pools.prefill(req)
        pools.finish(req)
    found = [(r["rid"], r["r_max"], r["j_adopt"], r["lost_tokens"], r["cause"]) for r in pools.records]
    assert found == [
        ("first", 0, 0, 0, None),
        ("again", 16, 16, 3, "off_grid"),
        ("salted", 0, 0, 16, "other_key"),
    ]
    assert [record["output_tokens"] for record in pools.records] == [1, 1, 1]
    assert req.customized_info["hybrid"][0]["cause"] is None


def test_a_retracted_request_comes_back(pools: Pools) -> None:
    """Under a salt of its own: ISOLATE, and still its own state is resumed."""
    req = request("away", "pepper")
    pools.prefill(req)
    pools.retract(req)
    assert pools.records == []
    pools.prefill(req)
    pools.finish(req)
    (record,) = pools.records
    assert (record["j_adopt"], [again["j_adopt"] for again in record["resumes"]]) == (0, [16])
    assert [one["j_adopt"] for one in req.customized_info["hybrid"]] == [0, 16]


def test_a_retracted_request_that_is_aborted(pools: Pools) -> None:
    req = request("gone")
    pools.prefill(req)
    pools.retract(req)
    pools.cache.release_aborted_request(req.cache_request_handle)
    assert [record["finish"] for record in pools.records] == ["abort"]


def test_what_admission_refuses_names_its_resource(pools: Pools) -> None:
    budget = pools.tokens.create_prefill_budget(pools.cache)
    asked = {"extend_input_len": 10, "max_new_tokens": 4, "input_tokens": 10, "chunk_limit": 256}
    assert budget.check_prefill(total_tokens=100, **asked)[0]
    assert pools.cache.refusals.last is None
    assert not budget.check_prefill(total_tokens=10_000, **asked)[0]
    assert pools.cache.refusals.last == ("admission", Resource.ATTENTION)


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_has_it_once(pools: Pools, stream: bool) -> None:
    """With the first part of a streamed answer, or with the whole; a neighbour without one has none."""
    sent: list[Any] = []
    streamer = GridOutputStreamer(
        send_to_detokenizer=SimpleNamespace(send_output=sent.append), tree_cache=pools.cache,
        server_args=None, is_generation=True, disaggregation_mode=DisaggregationMode.NULL,
        spec_algorithm=SimpleNamespace(is_none=lambda: True, is_some=lambda: False),
        enable_hicache_storage=lambda: False,
    )  # fmt: skip
    req, neighbour = request("mine", stream=stream), request("other", stream=stream)
    pools.prefill(req)
    neighbour.output_ids.append(7)
    streamer.stream_output([neighbour, req], False)
    pools.finish(req)
    neighbour.finished_reason = FINISH_LENGTH(1)
    streamer.stream_output([neighbour, req], False)
    payloads = [unwrap_from_pickle(payload.customized_info) for payload in sent]
    assert len(payloads) == 1 + stream
    assert payloads[0] == {"hybrid": [[], req.customized_info["hybrid"]]}
    assert payloads[1:] == [None] * stream
