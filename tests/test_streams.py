"""The overlap loop on a device whose streams run in any order that events and waits allow.

`tests/support/streams` has the device and the loop. The order of the same loop without streams gives the
right tokens. Whatever else the streams do between two waits, the answers are those; with one wait left out,
a wrong token shows.
"""

import random
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.managers import schedule_batch
from sglang.srt.mem_cache import common

from tests.support.streams.device import NAME, Device, DeviceTensor, Event
from tests.support.streams.loop import (
    CLEARED,
    COPY_WAITS,
    EDGES,
    FORWARD_WAITS,
    HOST_WAITS,
    TABLES_READ,
    Loop,
)

STEPS = 200
SEED = 1
"""Of the requests."""
SHOWN_BY = {FORWARD_WAITS: 0, TABLES_READ: 0, COPY_WAITS: 0, HOST_WAITS: 0, CLEARED: 0}
"""Missing edge -> seed of an order that shows it soon."""


@pytest.fixture(autouse=True, scope="module")
def _settings() -> Any:
    """What SGLang's calls read of a published configuration."""
    with pytest.MonkeyPatch.context() as patch:
        serving = SimpleNamespace(strip_thinking_cache=False, stream_interval=1, weight_version=None)
        for module in (schedule_batch, common):
            patch.setattr(module, "get_serving", lambda: serving)
        patch.setattr(common, "get_spec", lambda: SimpleNamespace(speculative_algorithm=None))
        yield


def loop(device: Device, memory: str, missing: str | None = None) -> Loop:
    with device.active():
        return Loop(device, SEED, memory, missing)


@cache
def right(memory: str, steps: int) -> dict[str, list[int]]:
    """Answers where everything runs at once, in the order in which it was called."""
    reference = loop(Device(None), memory)
    reference.run(steps + 2)
    assert reference.hits > 2 and reference.retracted > 2, "INCONCLUSIVE"
    return reference.answers


@pytest.mark.parametrize(
    ("memory", "order", "steps"),
    [
        ("S1", 0, STEPS),
        ("S0", 1, 40),
        ("S2", 2, 40),
        ("D0", 3, 40),
        *(
            pytest.param(memory, order, STEPS, marks=pytest.mark.long)
            for memory in ("S0", "S1", "S2", "D0")
            for order in (4, 5, 6)
        ),
    ],
)
def test_no_order_changes_a_token(memory: str, order: int, steps: int) -> None:
    assert loop(Device(random.Random(order)), memory).run(steps, right(memory, steps)) is None


@pytest.mark.parametrize("missing", EDGES)
def test_a_missing_edge_shows(missing: str) -> None:
    wrong = loop(Device(random.Random(SHOWN_BY[missing])), "S1", missing).run(STEPS, right("S1", STEPS))
    assert wrong is not None


def device(ahead: str = "") -> Device:
    """One on which a single stream runs ahead, until someone waits."""
    made = Device(random.Random(0))
    made.chance = SimpleNamespace(randrange=lambda _: 1, sample=lambda streams, _: streams)  # type: ignore[assignment]
    made.ahead = {ahead}
    return made


def test_nothing_runs_until_someone_waits() -> None:
    """Not even for the host: an unfinished copy is garbage, a blocking one waits for its stream."""
    lazy = device()
    with lazy.active():
        x = torch.full((3,), 2.0, device=NAME)
        y = x * 3
        early = y.to("cpu", non_blocking=True)
        assert isinstance(y, DeviceTensor) and early.isnan().all()
        done = Event(lazy)
        done.record()
        done.synchronize()
        assert early.tolist() == [6.0] * 3
        assert (y + 1).cpu().tolist() == [7.0] * 3
        assert int((y + 2)[0]) == 8


@pytest.mark.parametrize("waits", [True, False])
def test_a_stream_waits_for_an_event(waits: bool) -> None:
    """The forward stream runs ahead: it reads what the schedule stream has not written, unless it waits."""
    made = device("forward")
    with made.active():
        table, out = torch.zeros(2, device=NAME), torch.zeros(2, device=NAME)
        made.synchronize()
        written = Event(made)
        table.fill_(5.0)
        written.record()
        with made.on(made.forward):
            if waits:
                made.forward.wait_event(written)
            out.copy_(table)
        made.synchronize()
        assert out.cpu().tolist() == [5.0 if waits else 0.0] * 2


def test_memory_is_given_back_in_its_streams_order() -> None:
    """A temporary of the schedule stream, which nobody holds while the forward stream still reads it."""
    made = device("schedule")
    with made.active():
        out = torch.zeros(2, device=NAME)
        temporary = torch.full((2,), 5.0, device=NAME)
        made.forward.wait_stream(made.schedule)
        with made.on(made.forward):
            out.copy_(temporary)
        del temporary
        torch.zeros(1, device=NAME)
        made.synchronize()
        assert out.cpu().isnan().all()


def test_a_copy_from_the_host_takes_the_values_of_the_call() -> None:
    lazy, host = device(), torch.ones(2)
    with lazy.active():
        there = host.to(NAME, non_blocking=True)
        host.fill_(9.0)
        assert there.cpu().tolist() == [1.0] * 2
