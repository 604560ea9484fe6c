"""Admission, pins and placement through SGLang's own requests and prefill adder: no engine is started."""

from array import array
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.managers import schedule_batch, schedule_policy
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.managers.schedule_policy import AddReqResult
from sglang.srt.mem_cache import common
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_hybrid.engine.admission import GridPrefillAdder
from sglang_hybrid.engine.cache import GridPrefixCache
from sglang_hybrid.engine.observe import report
from sglang_hybrid.engine.requests import GridRequests, PageMaps
from sglang_hybrid.engine.tokens import GridTokens
from sglang_hybrid.pools.pages import IntegrityError
from sglang_hybrid.radix.coming import MOST_PASSED_OVER
from sglang_hybrid.radix.policy import Policy
from tests.core.worlds import NAMES, World
from tests.support.publish_faults import FAULTS as PUBLISH_FAULTS

GRID = 8
PROMPT = 20
POLICIES = (
    Policy(),
    Policy(headroom=0.9, retention=1, checkpoints="branch"),
    Policy(checkpoints="sparse"),
)


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """What these calls read of a published configuration."""
    serving = SimpleNamespace(strip_thinking_cache=False)
    schedule = SimpleNamespace(schedule_policy="fcfs", schedule_low_priority_values_first=False)
    features = SimpleNamespace(enable_encoder_swa_bounded_replay=False)
    for module in (schedule_batch, common):
        monkeypatch.setattr(module, "get_serving", lambda: serving)
    monkeypatch.setattr(common, "get_spec", lambda: SimpleNamespace(speculative_algorithm=None))
    monkeypatch.setattr(schedule_policy, "get_schedule", lambda: schedule)
    monkeypatch.setattr(schedule_policy, "get_exec", lambda: SimpleNamespace(features=features))


class Pools:
    """Request pool, token allocator and cache of a scheduler, without tensors behind them."""

    def __init__(self, policy: Policy, world: World = World("S1", pages=60, grid=GRID)) -> None:  # noqa: B008
        organization = world.build()
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
        self.cache = GridPrefixCache(self.requests, self.tokens, enable_metrics=False, policy=policy)
        self.running: list[Any] = []

    def adder(self, chunk: int | None = None) -> GridPrefillAdder:
        """Of a pass in which `running` decode."""
        batch = SimpleNamespace(reqs=self.running, batch_size=lambda: len(self.running))
        return GridPrefillAdder(self.tokens.page_size, self.cache, self.tokens, batch, 0.5, 4096, chunk)

    def admits(self, req: Any, adder: GridPrefillAdder) -> bool:
        offer(req, self, adder)
        return req in adder.can_run_list

    def forget(self, req: Any) -> None:
        """Admitted, and never run."""
        self.cache.unlock(req.lock)
        req.lock = None

    def prefill(self, req: Any, end: int) -> None:
        """What the scheduler does for a batch of one, up to token `end`."""
        assert self.requests.alloc([req]) is not None
        start, whole = torch.tensor([req.prefix_len]), torch.tensor([end])
        count = end - req.prefix_len
        assert self.tokens.alloc_extend(start, start, whole, whole, start, count) is not None
        self.requests.alloc_aux_to_lengths(
            req_pool_indices_cpu=torch.tensor([req.kv.req_pool_idx]), target_seq_lens_cpu=whole
        )
        req.kv.kv_committed_len = req.kv.kv_allocated_len = req.prefix_len = end
        self.cache.checkpoint(req, up_to=end)

    def retract(self, req: Any) -> None:
        release_kv_cache(req, self.cache, checkpoint=False)
        req.reset_for_retract()


def request(rid: str, salt: str | None = None, tokens: int = PROMPT, new: int = 4) -> Any:
    sampling = SamplingParams(max_new_tokens=new)
    sampling.normalize(None)
    ids = array("q", range(5, 5 + tokens))
    return Req(rid, "", ids, sampling, vocab_size=512, cache_salt=salt)


def serve_in_two_chunks() -> None:
    """A request that publishes twice, and its end."""
    pools = Pools(Policy())
    req = request("chunked")
    assert pools.admits(req, pools.adder(chunk=GRID))
    pools.prefill(req, GRID)
    pools.prefill(req, PROMPT)
    req.output_ids.append(7)
    req.finished_reason = FINISH_LENGTH(1)
    release_kv_cache(req, pools.cache, checkpoint=True)
    pools.cache.check_integrity()
    assert pools.tokens.verify_byte_accounting() == []
    assert pools.cache.protected_size() == 0


@pytest.mark.parametrize("fault", [None, *PUBLISH_FAULTS])
def test_a_fault_in_publishing_is_seen_through_the_adapters(fault: str | None) -> None:
    """SGLang's requests, in the memory of a server: publish, lock the new path, unlock the old one."""
    if fault is None:
        serve_in_two_chunks()
        return
    with PUBLISH_FAULTS[fault](), pytest.raises((IntegrityError, AssertionError)):
        serve_in_two_chunks()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_from_its_first_chunk_to_its_resumption(policy: Policy) -> None:
    pools = Pools(policy)
    first = request("first")
    adder = pools.adder(chunk=2 * GRID)
    assert pools.admits(first, adder) and first.extend_end == 2 * GRID
    pools.prefill(first, 2 * GRID)
    for chunk, end in ((3, 2 * GRID + 3), (GRID, PROMPT)):  # the second ends inside a unit
        first.init_next_round_input()
        adder = pools.adder(chunk)
        assert (adder.add_chunked_req(first) is first) is (end < PROMPT)
        assert first.extend_end == end
        beside = request(f"beside-{end}", f"{end}")
        if end == PROMPT:
            assert pools.admits(beside, adder) is (policy.headroom == 0.0)
            if beside.lock is not None:
                pools.forget(beside)
        pools.prefill(first, end)
    first.output_ids.append(7)
    pools.running = [first]
    assert adder._get_running_request_total_token_offset(first) == 0, "its last unit has room"
    pools.retract(first)
    assert list(pools.cache.pins) == ["first"]
    assert pools.cache.lifetime.kept().checkpoints == 1
    pools.running = []
    assert pools.admits(first, pools.adder(chunk=64)) and first.prefix_len == 2 * GRID
    pools.prefill(first, PROMPT + 1)
    assert not pools.cache.pins
    first.output_ids.append(7)
    first.finished_reason = FINISH_LENGTH(2)
    release_kv_cache(first, pools.cache, checkpoint=True)
    found = report(pools.cache)
    assert (found["pins"], found["checkpoints_retained"]) == (0, 0)
    assert (found["count_admission_waits"] > 0) is (policy.headroom > 0)
    assert found["checkpoints_cached"] == (1 if policy.checkpoints == "branch" else 2)
    assert pools.tokens.verify_byte_accounting() == []
    pools.cache.check_integrity()


def test_what_is_given_up_is_logged_by_request(caplog: pytest.LogCaptureFixture) -> None:
    pools = Pools(Policy())
    first = request("first")
    assert pools.admits(first, pools.adder(chunk=64))
    pools.prefill(first, PROMPT)
    first.output_ids.append(7)
    pools.retract(first)
    (pinned,) = pools.cache.pins.values()
    while pinned.owner is not None:
        assert pools.cache.lifetime.evict_next()
    assert "Preempted request first gives up its checkpoint at token 16" in caplog.text
    assert not pools.cache.pins and pools.cache.lifetime.counts.pins_given_up == 1
    pools.cache.release_aborted_request(SimpleNamespace(rid="first"))


def test_a_pass_steps_over_those_whose_prefix_it_has_just_admitted() -> None:
    pools = Pools(Policy())
    adder = pools.adder(chunk=200)
    burst = [request(f"burst-{index}") for index in range(MOST_PASSED_OVER + 1)]
    first, *others = burst
    assert pools.admits(first, adder)
    for req in others[:-1]:
        assert offer(req, pools, adder) is AddReqResult.CONTINUE and req.lock is None
    assert offer(others[-1], pools, adder) is AddReqResult.OTHER, "a pass looks at no more than so many"
    assert report(pools.cache)["count_prefix_waits"] == MOST_PASSED_OVER
    stranger = request("stranger", "salted")
    assert pools.admits(stranger, adder)
    pools.forget(stranger)
    pools.prefill(first, GRID)
    assert not pools.admits(others[0], pools.adder(chunk=200)), "its second boundary is still to come"
    pools.prefill(first, PROMPT)
    adder = pools.adder(chunk=200)
    assert pools.admits(others[0], adder) and others[0].prefix_len == 2 * GRID
    assert pools.admits(others[1], adder), "what they compute is shared by nobody"


class Victims:
    """A running batch that may be preempted; what left it is kept."""

    def __init__(self, pools: Pools, reqs: list[Any]) -> None:
        self.pools, self.reqs = pools, reqs
        self.preempted: list[Any] = []

    def batch_size(self) -> int:
        return len(self.reqs)

    def release_req(self, index: int, remaining: int) -> None:
        self.preempted.append(self.reqs[index])
        self.pools.retract(self.reqs[index])

    def filter_batch(self, keep_indices: list[int]) -> None:
        self.reqs = [self.reqs[index] for index in keep_indices]


@pytest.mark.parametrize(
    ("wait", "most", "preempted"), [("prefix", None, False), ("never", None, True), ("never", 0, False)]
)
def test_nobody_is_preempted_for_a_request_that_cannot_start(
    wait: str, most: int | None, preempted: bool
) -> None:
    """Whether it waits for a prefix, or this pass takes no more, is asked before SGLang preempts for it."""
    pools = Pools(Policy(wait=wait))
    decoding, prefilling, urgent = request("decoding", "salted"), request("prefilling"), request("urgent")
    assert pools.admits(decoding, pools.adder(chunk=64))
    pools.prefill(decoding, PROMPT)
    decoding.output_ids.append(7)
    assert pools.admits(prefilling, pools.adder(chunk=GRID))
    pools.prefill(prefilling, GRID)  # its second boundary is still to come
    decoding.priority, urgent.priority = 0, 100
    batch = Victims(pools, [decoding])
    adder = GridPrefillAdder(
        GRID, pools.cache, pools.tokens, batch, 0.5, 4096, 64, prefill_max_requests=most,
        priority_scheduling_preemption_threshold=0,
    )  # fmt: skip
    asked = adder.preempt_to_schedule(urgent)
    assert asked is (most is None), "the loop goes on to `add_one_req`, and from there to the next request"
    assert bool(batch.preempted) is bool(adder.preempt_list) is preempted
    admitted = pools.admits(urgent, adder) if asked else False
    assert admitted is preempted, "preempted for nothing, or not preempted for it"
    assert report(pools.cache)["pins"] == preempted


@pytest.mark.parametrize(
    "policy", [Policy(wait="never"), Policy(headroom=0.3, retention=1)], ids=["bare", "kept"]
)
@pytest.mark.parametrize("name", NAMES)
def test_whoever_is_preempted_makes_room_for_who_asked(name: str, policy: Policy) -> None:
    """Requests of random lengths run until one more is refused; then an urgent one asks."""
    begun = 0
    for seed in range(120):
        dice = Random(seed)
        world = World(name, pages=dice.randint(20, 40), grid=GRID, units=100, states=dice.randint(4, 8))
        pools = Pools(policy, world)
        for number in range(6):
            salt = dice.choice(["shared", f"{number}"])
            req = request(f"{number}", salt, dice.randint(4, 60), dice.randint(1, 40))
            if not pools.admits(req, pools.adder(chunk=256)):
                break
            pools.prefill(req, len(req.origin_input_ids))
            req.output_ids.append(7)
            req.priority = dice.randint(0, 2)
            pools.running.append(req)
        urgent = request("urgent", dice.choice(["shared", "own"]), dice.randint(4, 220), dice.randint(1, 40))
        urgent.priority = 9
        batch = Victims(pools, pools.running)
        adder = GridPrefillAdder(
            pools.tokens.page_size, pools.cache, pools.tokens, batch, 0.5, 4096, 256,
            priority_scheduling_preemption_threshold=0,
        )  # fmt: skip
        asked = adder.preempt_to_schedule(urgent)
        assert not pools.cache.failed and bool(batch.preempted) is asked
        if asked:
            assert pools.admits(urgent, adder), f"seed {seed}: preempted for nothing"
            pools.prefill(urgent, len(urgent.origin_input_ids))
            pools.cache.check_integrity()
            begun += 1
    assert 20 < begun < 115, f"INCONCLUSIVE: hardly anybody is preempted, or everybody: {begun}"


def test_without_waiting_all_are_admitted() -> None:
    pools = Pools(Policy(wait="never"))
    adder = pools.adder(chunk=200)
    assert pools.admits(request("first"), adder) and pools.admits(request("second"), adder)
    assert report(pools.cache)["count_prefix_waits"] == 0


def offer(req: Any, pools: Pools, adder: GridPrefillAdder) -> AddReqResult:
    req.init_next_round_input(pools.cache)
    return adder.add_one_req(req, has_chunked_req=False, truncation_align_size=None)


def test_a_decode_step_lets_go_in_the_order_of_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in that of rows, which tells who came to which row: equal histories give equal evictions."""
    pools = Pools(Policy())
    requests = [request(f"in-order-{index}", f"{index}") for index in range(3)]
    for req in requests:
        assert pools.admits(req, pools.adder(chunk=64))
        pools.prefill(req, PROMPT)
    rows = [req.kv.req_pool_idx for req in reversed(requests)]
    settled: list[Any] = []
    monkeypatch.setattr(pools.cache.live, "settle", settled.append)
    pools.requests._forked = set(rows)
    pools.requests.alloc_aux_to_lengths(
        req_pool_indices_cpu=torch.tensor(rows), target_seq_lens_cpu=torch.full((3,), PROMPT + 1)
    )
    assert settled == [pools.requests.state(row) for row in rows]
