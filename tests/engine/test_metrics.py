"""What an operator sees (HB-28): bytes by kind, reuse depth and causes, in /metrics, replies and trace."""

import threading
from typing import Any

from tests.support.balance import pools
from tests.support.metrics import Scrape, scrape, trace_of
from tests.support.park import on
from tests.support.reply import Reply
from tests.support.tokens import T
from tests.support.witness import Witness


def drained(witness: Witness) -> Scrape:
    """/metrics of an idle server, which has written its last values before it went to sleep."""
    witness.server.wait_idle()
    found: list[Scrape] = []

    def settled() -> bool:
        found.append(scrape(witness.server))
        return found[-1].bytes() == pools(witness.server).raw["bytes"]

    witness.server.wait_until(settled, "/metrics to show what /server_info does")
    return found[-1]


def grown(before: Scrape, after: Scrape, name: str, **labels: str) -> int:
    return int(after.total(name, **labels) - before.total(name, **labels))


def depth(reply: Reply) -> dict[str, Any]:
    (one,) = reply.meta["hybrid"]
    return dict(one)


def record_of(witness: Witness, reply: Reply) -> dict[str, Any]:
    """The request's record, once the trace has it."""
    rid = reply.meta["id"]
    witness.server.wait_until(lambda: rid in trace_of(witness.server, rid), "the request's record")
    return trace_of(witness.server, rid)[rid]


@on("kv256", "s0", "s2", "d0")
def test_bytes_add_up_at_any_moment(witness: Witness) -> None:
    """The sum is the budget in every scrape, under load too; usage is there when idle, 0 after a flush."""
    budget = pools(witness.server).raw["budget_bytes"]
    seen: list[Scrape] = []
    done = threading.Event()

    def keep_scraping() -> None:
        while not done.is_set():
            seen.append(scrape(witness.server))

    scraper = threading.Thread(target=keep_scraping)
    scraper.start()
    try:
        for round_ in range(6):
            futures = [witness.submit(T(10 * round_ + i, 40), 30) for i in range(2)]
            for future in futures:
                assert future.result().reason == "length"
    finally:
        done.set()
        scraper.join()
    assert len(seen) >= 10
    for one in seen:
        assert sum(one.bytes().values()) == budget == one.total("budget_bytes"), one.bytes()
    assert max(one.bytes()["checkpoint_held"] for one in seen) > 0
    assert max(one.bytes()["attention_held"] for one in seen) > 0

    idle = drained(witness).bytes()
    assert idle["attention_held"] == idle["checkpoint_held"] == idle["any_reclaiming"] == 0
    assert idle["attention_cached"] > 0 and idle["checkpoint_cached"] > 0
    witness.flush()
    flushed = drained(witness)
    kinds = ("attention_cached", "attention_dead", "checkpoint_cached")
    assert [flushed.bytes()[kind] for kind in kinds] == [0, 0, 0]
    free = {kind: size for kind, size in flushed.bytes().items() if kind.endswith("free")}
    assert sum(free.values()) + flushed.bytes()["any_wasted"] == budget
    largest = flushed.total("largest_allocatable_bytes", kind="attention")
    room = free["attention_free"] or free["any_free"]
    # A page of S0 is as large as a checkpoint, and one block's rows use a part of it.
    assert 0 < largest < room if witness.config.organization == "S0" else largest == room
    assert flushed.total("largest_allocatable_bytes", kind="checkpoint") > 0


@on("d0")
def test_kv_matched_and_state_missing(witness: Witness) -> None:
    """HB-13 and HB-28: D0 keeps A's KV when its states are pushed out, and a counter says what that costs."""
    a = T(1, 33)
    witness.ask(a)
    witness.server.generate_batch([T(11 + i, 17) for i in range(130)], 1)
    before = drained(witness)
    assert before.bytes()["attention_dead"] > 0
    second = witness.ask(a, exact=False)
    after = drained(witness)
    missing = 32 - second.cached
    assert missing > 0, "INCONCLUSIVE: the states have survived"
    assert depth(second) == {
        "prompt_tokens": 33, "r_max": 32, "attention": 32, "j_adopt": second.cached,
        "gap_r": missing, "lost_tokens": missing, "cause": "evicted",
    }  # fmt: skip
    assert grown(before, after, "state_missing_tokens_total") == missing
    assert grown(before, after, "lost_tokens_total", cause="evicted") == missing
    assert grown(before, after, "gaps_total") == grown(before, after, "gaps_total", cause="evicted") == 1
    witness.hit_is(witness.ask(a, exact=False), 32)


@on("tight")
def test_states_are_the_limit(witness: Witness) -> None:
    """HB-18 at its peak: many short requests hold states, and hardly any KV."""
    futures = [witness.submit(T(20 + i, 5), 8) for i in range(48)]
    peak: list[dict[str, int]] = []
    while not all(future.done() for future in futures):
        peak.append(scrape(witness.server).bytes())
    assert all(future.result().reason == "length" for future in futures)
    top = max(peak, key=lambda one: one["checkpoint_held"])
    assert top["checkpoint_held"] > top["attention_held"] > 0, top
    assert drained(witness).total("requests_running") == 0


@on("kv256")
def test_kv_is_the_limit(witness: Witness) -> None:
    """HB-20: one long request fills the memory with KV; the other waits for that."""
    before = drained(witness)
    first = witness.begin(T(1, 200), 40)
    second = witness.submit(T(2, 200), 1)
    assert first.result().reason == second.result().reason == "length"
    after = drained(witness)
    assert grown(before, after, "refusals_total", at="admission", resource="attention") > 0
    assert pools(witness.server).raw["refused_last"] == "admission_attention"


@on("kv256", "s0", "s2", "d0")
def test_cached_tokens_add_up(witness: Witness) -> None:
    """HB-28: replies, our counters, SGLang's counter and the trace tell the same sum."""
    before = drained(witness)
    shared = T(1, 5 * witness.G + 3)
    replies = [witness.ask(shared + T(100 + i, 7), 3, exact=False) for i in range(4)]
    replies += [witness.ask(T(50 + i, 9), 1, exact=False) for i in range(4)]
    total = sum(reply.cached for reply in replies)
    assert total > 0
    after = drained(witness)
    assert grown(before, after, "cached_tokens_total") == total
    assert grown(before, after, "j_adopt_tokens_sum") == total
    assert grown(before, after, "sglang:cached_tokens_total") == total
    assert grown(before, after, "admissions_total", admission="first") == len(replies)
    assert grown(before, after, "r_max_tokens_count") == len(replies)
    assert grown(before, after, "prompt_tokens_total") == sum(reply.prompt_tokens for reply in replies)
    assert sum(record_of(witness, reply)["cached_tokens"] for reply in replies) == total


@on("kv256")
def test_the_trace_tells_what_the_reply_does(witness: Witness) -> None:
    """One record a request: the reply's depths, its key by a digest, no token and no salt."""
    prompt = T(3, 30)
    replies = [witness.ask(prompt, 4, exact=False), witness.ask(prompt, 4, exact=False, rid="mine")]
    for reply in replies:
        record = record_of(witness, reply)
        assert {name: record[name] for name in depth(reply)} == depth(reply)
        assert (record["output_tokens"], record["finish"], record["resumes"]) == (4, "length", [])
        assert set(record) == {
            *depth(reply), "rid", "time", "key", "cached_tokens", "output_tokens", "finish", "resumes",
        }  # fmt: skip
    assert replies[1].meta["id"] == "mine_0"  # the first of a batch of one
    assert depth(replies[1])["gap_r"] == 0 and depth(replies[1])["cause"] == "off_grid"


@on("kv256")
def test_a_client_does_not_learn_of_other_keys(witness: Witness) -> None:
    """What somebody else sent under another salt shows in the operator's trace, and not in the reply."""
    prompt = T(4, 30)
    for salt in ("one", "two"):
        reply = witness.ask(prompt, 1, key=(None, salt), exact=False)
        assert depth(reply)["r_max"] == depth(reply)["lost_tokens"] == 0
        assert depth(reply)["cause"] is None
        record = record_of(witness, reply)
        assert record["key"] not in (None, salt)
    assert (record["cause"], record["lost_tokens"]) == ("other_key", 24)
    assert record["r_max"] == 0


@on("kv256")
def test_resumes_are_listed(witness: Witness) -> None:
    """A preempted request is admitted again: one more element in the reply, one record in the trace."""
    before = drained(witness)
    replies = [future.result() for future in [witness.submit(T(i, 24), 216) for i in (1, 2)]]
    after = drained(witness)
    again = grown(before, after, "admissions_total", admission="resumed")
    assert again > 0, "INCONCLUSIVE: nothing was retracted"
    assert sum(len(reply.meta["hybrid"]) for reply in replies) == 2 + again
    for reply in replies:
        assert reply.meta["hybrid"][0]["j_adopt"] == reply.cached
        record = record_of(witness, reply)
        assert record["resumes"] == reply.meta["hybrid"][1:]
        assert record["output_tokens"] == 216
    resumed = sum(one["j_adopt"] for reply in replies for one in reply.meta["hybrid"][1:])
    assert grown(before, after, "resumed_tokens_total") == resumed


@on("kv256")
def test_a_preempted_request_that_is_aborted_has_its_record(witness: Witness) -> None:
    rids = ["outgrow-1-", "outgrow-2-"]
    futures = [witness.begin(T(1 + i, 24), 216, rid=rid) for i, rid in enumerate(rids)]
    witness.server.wait_until(
        lambda: witness.server.load()[1] == 1 or all(f.done() for f in futures), "a retraction"
    )
    for rid in rids:
        witness.server.abort(rid)
    reasons = {future.result().reason for future in futures}
    assert reasons == {"abort"}, "INCONCLUSIVE: a request had ended"
    for rid in rids:
        witness.server.wait_until(
            lambda rid=rid: rid in trace_of(witness.server, rid), "the aborted request's record"
        )
        assert trace_of(witness.server, rid)[rid]["finish"] == "abort"


@on("kv256")
def test_a_streamed_answer_tells_it_at_once(witness: Witness) -> None:
    """Its first part has the reuse, and so have those that follow."""
    parts = list(witness.server.stream(T(5, 20), 12))
    assert len(parts) > 1
    assert all(part["meta_info"]["hybrid"][0]["prompt_tokens"] == 20 for part in parts)
