"""The stand-in for CUDA graphs (`tests/support/graphs`): what it refuses, what a replay does, what it sees.

`tests/engine/test_graphs` serves through it.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from sglang_hybrid.kernels.launch import Launch
from tests.support.graphs.recording import CaptureError, Pool, Recording, ReplayError
from tests.test_decode_step import batch, delta_step, mamba2_step

X = torch.tensor([3.0, 0.0, -2.0, 1.0])
HOST = np.ones(4, dtype=np.float32)


@pytest.mark.parametrize(
    "function",
    [
        # The host reads.
        lambda: X[0].item(),
        lambda: int(X[0]),
        lambda: bool(X[1] > 0),
        lambda: X.tolist(),
        lambda: X.numpy(),
        lambda: X.cpu(),
        lambda: torch.equal(X, X),
        lambda: torch.allclose(X, X),
        # A shape depends on data.
        lambda: X[X > 0],
        lambda: X.nonzero(),
        lambda: X.masked_select(X > 0),
        lambda: X.unique(),
        lambda: X.repeat_interleave(X.abs().long()),
        lambda: X.clone().index_put_((X > 0,), torch.zeros(())),
        # The host writes.
        lambda: torch.tensor([1, 2]),
        lambda: X[torch.tensor(1)],
        lambda: torch.as_tensor([1.0]),
        lambda: torch.from_numpy(HOST) + X,
        lambda: X.to("meta"),
        # Random numbers.
        lambda: torch.randn(3),
        lambda: X.clone().uniform_(),
        lambda: X.abs().multinomial(1),
        lambda: torch.nn.functional.dropout(X, 0.5),
        # Memory that is not the graph's and that nobody keeps.
        lambda: torch.utils.dlpack.from_dlpack(np.ones(4, dtype=np.float32)) + X,
    ],
)
def test_a_capture_refuses(function: Callable[[], Any]) -> None:
    with pytest.raises(CaptureError):
        Recording.capture(function, Pool())


@pytest.mark.parametrize(
    "function",
    [
        lambda: torch.where(X > 0, X, 0.0),
        lambda: X.masked_fill(X > 0, 1.0),
        lambda: X[1:] + X.view(2, 2)[1, 0],
        lambda: torch.arange(4) + torch.zeros(4, dtype=torch.int64),
        lambda: X.index_select(0, torch.ones(2, dtype=torch.int64)),
    ],
)
def test_a_capture_accepts(function: Callable[[], Any]) -> None:
    graph = Recording.capture(function, Pool())
    assert torch.equal(graph.replay(), function())


def test_a_replay_computes_from_what_lies_in_memory_now() -> None:
    """Inputs and state that changed, a buffer written in parts, results in their place."""
    given, state, weight = torch.randn(4), torch.zeros(4), torch.randn(4, 4)

    def step() -> torch.Tensor:
        out = torch.empty(2, 4)
        torch.matmul(weight, given, out=out[0])
        out[1] = out[0].relu() + state
        state.add_(out[1])
        return out

    graph = Recording.capture(step, Pool())
    place = graph.output.data_ptr()
    for _ in range(2):
        given.normal_()
        before = state.clone()
        got = graph.replay()
        want = weight @ given
        assert got.data_ptr() == place
        assert torch.allclose(got, torch.stack([want, want.relu() + before]))
        assert torch.allclose(state, before + want.relu() + before)


def test_nothing_lives_on_in_a_graphs_memory() -> None:
    """What a step kept for the next in a tensor of its own is gone: another graph's replay overwrote it."""
    kept: list[torch.Tensor] = []

    def step() -> torch.Tensor:
        kept.append(X * 2)
        return kept[0] + 1

    pool = Pool()
    first = Recording.capture(step, pool)
    assert torch.equal(first.replay(), X * 2 + 1)
    second = Recording.capture(step, pool)
    assert second.replay().isnan().all()
    assert torch.equal(first.replay(), X * 2 + 1)


def test_memory_that_is_not_written_is_garbage() -> None:
    graph = Recording.capture(lambda: (torch.empty(3), torch.empty(3, dtype=torch.int64)), Pool())
    floats, ints = graph.replay()
    assert floats.isnan().all() and (ints > 1 << 60).all()


def test_memory_that_was_given_back_is_an_error() -> None:
    holder = [torch.ones(3)]
    graph = Recording.capture(lambda: holder[0] + 1, Pool())
    assert torch.equal(graph.replay(), torch.full((3,), 2.0))
    holder.clear()
    with pytest.raises(ReplayError, match="given back"):
        graph.replay()


STEPS = pytest.mark.parametrize("step", [mamba2_step, delta_step])


def held(step: Any) -> Any:
    """The backend under a decode step of `test_decode_step`."""
    return step.func.__self__


@STEPS
def test_a_replayed_layer_equals_an_eager_one(step: Callable[[str], Any]) -> None:
    """Captured on rows 1, 2 and a padding row, replayed on others: the same outputs, the same arena."""
    eager = step("torch")
    made = held(eager)
    arenas = made.requests.arenas.kv_buffers
    for buffer in arenas:
        buffer.view(torch.float32).normal_()
    begun = [buffer.clone() for buffer in arenas]
    graph = Recording.capture(eager, Pool())

    def again(run: Callable[[], Any], *rows: int) -> tuple[Any, list[torch.Tensor]]:
        for buffer, kept in zip(arenas, begun):
            buffer.copy_(kept)
        made.init_forward_metadata_out_graph(batch(*rows))
        out = run().clone()
        return out, [buffer.clone() for buffer in arenas]

    for rows in ((3, 4, 0), (1, 0, 0), (4, 2, 1)):
        (out, after), (want, wanted) = again(graph.replay, *rows), again(eager, *rows)
        assert torch.equal(out, want)
        assert all(torch.equal(left, right) for left, right in zip(after, wanted))
    stale, _ = again(graph.replay, 1, 2, 0)
    assert not torch.equal(stale, want)


def test_maps_in_new_tensors_are_seen() -> None:
    """A preparation that makes tensors, instead of filling those that the graph reads."""
    eager = mamba2_step("torch")
    made = held(eager)

    def prepare(*rows: int) -> None:
        index = torch.tensor(rows)
        made.forward_metadata = type(made.forward_metadata)(*(table[index] for table in made._tables()))

    def run() -> torch.Tensor:
        return eager.func(*eager.args[:-1], made.forward_metadata)

    prepare(1, 2, 0)
    graph = Recording.capture(run, Pool())
    graph.replay()
    prepare(3, 4, 0)
    with pytest.raises(ReplayError, match="given back"):
        graph.replay()


def test_a_launch_is_recorded_as_a_value() -> None:
    """Its arguments at the capture, tensors by their place; what its interpreter computes is no operation."""
    given, result = torch.randn(4), torch.zeros(4)

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def run(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor, factor: int, **options: int) -> None:
                y.copy_(torch.tensor(factor * x.numpy()))
                out.copy_(y + len(grid))

            return run

    def step() -> torch.Tensor:
        y = torch.empty(4)
        args = {"x": given, "y": y, "out": result, "factor": 3}
        Launch(Kernel(), (1, 1), args, warps=1).run()
        args["factor"] = 5
        return y * 2

    graph = Recording.capture(step, Pool())
    assert str(graph) == "1 operations and 1 launches"
    given.normal_()
    assert torch.equal(graph.replay(), given * 3 * 2)
    assert torch.equal(result, given * 3 + 2)
