"""Requests that end early, wherever they are (HB-22), and flushing."""

import threading

import pytest
import requests

from tests.support.park import on
from tests.support.server import generate_body
from tests.support.tokens import T
from tests.support.witness import Witness


def warm(witness: Witness) -> list[int]:
    """A prompt to match, a token longer than four grid steps."""
    return T(1, 4 * witness.G + 1)


def queued(witness: Witness, i: int) -> list[int]:
    """A prompt that matches the warm one, as the lookup of a waiting request will find."""
    return warm(witness) + T(20 + i, 6)


@on("g8", "s0-ample", "s2-ample", "d0-ample")
def test_abort_in_the_queue(witness: Witness) -> None:
    """HB-22: rounds of five queued requests that had a match; nothing of it stays taken."""
    witness.ask(warm(witness))
    blockers = [witness.begin(T(90 + i, 12), 900, rid=f"blocker-{i}-") for i in range(8)]
    for round_ in range(30 if witness.config.organization == "S1" else 6):
        names = [f"queued-{round_}-{i}-" for i in range(5)]
        waiting = [witness.submit(queued(witness, i), 2, rid=name) for i, name in enumerate(names)]
        witness.server.wait_waiting(5)
        for name in names:
            witness.server.abort(name)
        for future in waiting:
            reply = future.result(10)
            assert reply.reason == "abort" and reply.message, reply
    for i, blocker in enumerate(blockers):
        witness.server.abort(f"blocker-{i}-")
        assert blocker.result(10).reason == "abort"
    witness.base()
    witness.hit_is(witness.ask(queued(witness, 0)), 4 * witness.G)


@on("queue")
def test_queue_limit_and_waiting_timeout(witness: Witness) -> None:
    """HB-22 with at most two queued, and with a short waiting timeout: each loser gets its reason."""
    witness.ask(warm(witness))
    for round_ in range(3):
        blocker = witness.begin(T(9, 12), 3000, rid=f"blocker-{round_}-")
        waiting = [witness.submit(queued(witness, i), 2) for i in range(5)]
        replies = [future.result(20) for future in waiting]
        assert all(reply.reason in ("abort", "http") and reply.message for reply in replies), replies
        full = [reply for reply in replies if "queue is full" in reply.message]
        late = [reply for reply in replies if "timeout" in reply.message]
        assert (len(full), len(late)) == (3, 2), replies
        witness.server.abort(f"blocker-{round_}-")
        assert blocker.result(10).reason == "abort"
        witness.base()
    witness.hit_is(witness.ask(queued(witness, 0)), 4 * witness.G)


@on("g8", "s0-ample", "s2-ample")
def test_abort_in_prefill(witness: Witness) -> None:
    """A prompt of twelve chunks or more is aborted between two of them; what it published may be reused."""
    prompt = T(1, 3000)
    for round_ in range(3):
        witness.flush()
        mark = witness.server.log_mark()
        future = witness.submit(prompt, 4, rid=f"prefill-{round_}-")
        witness.server.wait_until(
            lambda mark=mark, chunks=round_: len(witness.server.prefill_batches(mark)) > chunks,
            "a chunk",
            pause=0.005,
        )
        witness.server.abort(f"prefill-{round_}-")
        assert future.result(30).reason == "abort"
        done = sum(new for _, new, _ in witness.server.prefill_batches(mark))
        assert done < len(prompt), "INCONCLUSIVE: the prompt was through before the abort"
        witness.base()
        witness.expected.commit(prompt, [0])
        witness.ask(prompt[:300], 3, exact=False)


@on("g8", "s0-ample", "s2-ample", "d0-ample")
def test_abort_in_decode(witness: Witness) -> None:
    """Aborted at many points of a decode, on and off a boundary."""
    prompt = T(2, 2 * witness.G + 5)
    for stop in (1, 3, 4, 11, 12, 27, witness.G - 5):
        rid = f"decode-{stop}-"
        for count, _ in enumerate(witness.server.stream(prompt, 2000, rid=rid), 1):
            if count == stop:
                witness.server.abort(rid)
        witness.base()
    cold = witness.cold.ask(witness.config.model, prompt, 40)
    witness.expected.commit(prompt, cold.ids)
    witness.ask(prompt, 40, exact=False)
    witness.ask([*prompt, *cold.ids, 4], 3)


@on("g8")
def test_a_client_that_goes_away(witness: Witness) -> None:
    """A broken connection in the middle of a stream counts as an abort."""
    body = generate_body(T(3, 40), 3000, stream=True)
    with requests.post(witness.server.url + "/generate", json=body, stream=True, timeout=30) as answer:
        next(answer.iter_lines())
    witness.server.wait_idle()
    witness.base()


@on("g8", "s0-ample", "s2-ample", "d0-ample")
def test_abort_everything_at_once(witness: Witness) -> None:
    """Running, prefilling and queued requests end together."""
    futures = [witness.begin(T(99, 20), 3000)]
    futures += [witness.submit(T(100 + i, 30 + 50 * i), 3000) for i in range(20)]
    witness.server.wait_until(lambda: sum(witness.server.load()) == 21, "all to arrive")
    answer = witness.server.request("POST", "/abort_request", json={"abort_all": True})
    assert answer.status_code == 200
    assert {future.result(30).reason for future in futures} == {"abort"}
    witness.base()


@on("g8", "s0-ample", "s2-ample", "d0-ample")
def test_flush(witness: Witness) -> None:
    """A flush empties everything, twice is as good as once, and the same prompt starts from nothing."""
    prompt = T(4, 5 * witness.G + 3)
    for _ in range(2):
        witness.hit_is(witness.ask(prompt, 9), 0)
        witness.hit_is(witness.ask(prompt, 9), 5 * witness.G)
        witness.flush()
        witness.flush()
        now = witness.pools()
        if now is not None:
            assert (now.free, now.checkpoints) == (now.total, 0), now.raw


@on("g8")
def test_flush_of_a_busy_server_is_refused(witness: Witness) -> None:
    """And harms nothing: the running request equals cold, and its prefix is still there."""
    prompt = T(5, 26)
    future = witness.begin(prompt, 300)
    answer = witness.server.request("POST", "/flush_cache", params={"timeout": 0})
    assert answer.status_code != 200
    witness.check(future.result(), prompt, 300)
    witness.hit_is(witness.ask(prompt), 24)


@on("g8")
@pytest.mark.parametrize("seed", range(2))
def test_a_storm_of_clients(witness: Witness, seed: int) -> None:
    """Ten clients at once, some of which abort: whoever finishes equals cold."""
    shared = T(6 + seed, 60)
    failures: list[BaseException] = []

    def client(number: int) -> None:
        try:
            for turn in range(6):
                prompt = shared[: 7 * (number % 8)] + T(200 + 10 * number + turn, 9 + 3 * turn)
                rid = f"storm-{seed}-{number}-{turn}-"
                future = witness.submit(prompt, 6 + number, rid=rid)
                if (number + turn) % 3 == 0:
                    witness.server.abort(rid)
                reply = future.result(60)
                if reply.reason == "length":
                    witness.check_output(reply, prompt, 6 + number)
                else:
                    assert reply.reason == "abort", reply
        except BaseException as error:
            failures.append(error)

    clients = [threading.Thread(target=client, args=(number,)) for number in range(10)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    if failures:
        raise failures[0]
