"""A decode step allocates nothing and waits for nothing: its operations, traced one by one.

A captured graph takes the layers' outputs from its own memory; traced is what runs between two replays, and
what a layer does under capture.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sglang_hybrid.engine.gdn_mixer import HybridGDNBackend
from sglang_hybrid.engine.mixer import HybridMamba2Backend
from sglang_hybrid.engine.requests import GridRequests, PageMaps
from sglang_hybrid.engine.unit_tails import UnitTails
from sglang_hybrid.kernels import choose
from sglang_hybrid.kernels.launch import Launch
from sglang_hybrid.kernels.samples import Mixer, make_cell

WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique", "transfer")
"""Operations whose result the host needs, or that move data between host and device."""
ROWS = 5
MIXER = Mixer(heads=4, dim=8, size=32, groups=1, kv_heads=1, kv_dim=8)


class Trace(TorchDispatchMode):
    """Records every operation and every storage that an operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []
        self.made: list[torch.Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name, inputs = str(func.overloadpacket.__name__), tensors((args, kwargs))
        if name in ("index", "index_put", "index_put_") and any(t.dtype == torch.bool for t in inputs[1:]):
            name = "nonzero"  # what a mask as an index becomes, inside
        if len({tensor.device for tensor in (*inputs, *tensors(result))}) > 1:
            name = "transfer"
        self.operations.append(name)
        given = {storage(tensor) for tensor in inputs}
        self.made += [tensor for tensor in tensors(result) if storage(tensor) not in given]
        return result

    def waits(self) -> list[str]:
        """Operations that wait."""
        return [name for name in self.operations if any(name.startswith(wait) for wait in WAITS)]


def tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def backend(route: str, kind: type = HybridMamba2Backend) -> Any:
    """A mixer's backend over an arena of S2, without a model runner."""
    cell = make_cell(MIXER, "S2", torch.float32, grid=512, batch=ROWS, conv_dtype=torch.float32)
    requests = object.__new__(GridRequests)
    requests.arenas, requests.mamba_map = cell.arenas, {0: 0}
    requests.tails = UnitTails(cell.organization, cell.arenas)
    requests.maps = PageMaps(ROWS, cell.src_map.shape[1], "cpu")
    requests.maps.src_pages.copy_(cell.src_map)
    requests.maps.dst_pages.copy_(cell.dst_map)
    requests.maps.src_lines.copy_(cell.src_line)
    requests.maps.dst_lines.copy_(cell.dst_line)
    made = object.__new__(kind)
    made.device = "cpu"
    made.attach(SimpleNamespace(req_to_token_pool=requests))
    made.route = choose(route, "cuda")
    return made


def batch(*rows: int) -> Any:
    """What metadata preparation reads of a decode batch."""
    return SimpleNamespace(
        req_pool_indices=torch.tensor(rows), forward_mode=SimpleNamespace(is_decode_or_idle=lambda: True)
    )


@pytest.mark.parametrize("prepare", ["init_forward_metadata", "init_forward_metadata_out_graph"])
def test_metadata_goes_into_static_buffers(prepare: str) -> None:
    """Eager and captured alike; the buffers keep their place from one step to the next."""
    made = backend("torch")
    places = []
    for rows in ((2, 4), (3, 1), (1, 0, 0)):
        step = batch(*rows)
        with Trace() as trace:
            getattr(made, prepare)(step)
        assert not trace.made and not trace.waits(), trace.operations
        for table, view in zip(made._tables(), made.forward_metadata, strict=True):
            assert torch.equal(view, table[list(rows)])
        places.append([view.data_ptr() for view in made.forward_metadata])
    assert places[0] == places[1] == places[2]


def test_a_larger_captured_batch_gets_larger_buffers() -> None:
    made = backend("torch")
    made.init_cuda_graph_state(2 * ROWS, 2 * ROWS)
    made.init_forward_metadata_out_graph(batch(*[1] * 2 * ROWS), in_capture=True)
    kept = made.forward_metadata.src_lines.data_ptr()
    made.init_cuda_graph_state(ROWS, ROWS)
    made.init_forward_metadata_out_graph(batch(1))
    assert made.forward_metadata.src_lines.data_ptr() == kept


def mixer() -> Any:
    """The parameters that a decode step reads of a MambaMixer2."""
    return SimpleNamespace(
        tp_size=1, intermediate_size=MIXER.inner, groups_ssm_state_size=MIXER.size, n_groups=1,
        head_dim=MIXER.dim, activation="silu", A=-torch.rand(4), D=torch.rand(4), dt_bias=torch.rand(4),
        conv1d=SimpleNamespace(weight=torch.rand(MIXER.channels, 1, 4), bias=torch.rand(MIXER.channels)),
    )  # fmt: skip


def delta_layer() -> Any:
    """The parameters that a decode step reads of a gated delta rule layer, four heads over one of keys."""
    return SimpleNamespace(
        layer_id=0, q_dim=MIXER.size, k_dim=MIXER.size, v_dim=MIXER.inner, num_q_heads=1, num_k_heads=1,
        num_v_heads=4, head_q_dim=MIXER.size, head_k_dim=MIXER.size, head_v_dim=MIXER.dim, bias=None,
        activation="silu", conv_weights=torch.rand(MIXER.channels, 4),
        A_log=torch.rand(4), dt_bias=torch.rand(4), lower_bound=None,
    )  # fmt: skip


def mamba2_step(route: str) -> Callable[[], object]:
    """A decode step of three requests, the last a padding row."""
    made, given = backend(route), mixer()
    made.init_forward_metadata_out_graph(batch(1, 2, 0))
    row = torch.randn(3, MIXER.inner + MIXER.channels + MIXER.heads)
    _, conv_in, dt = torch.split(row, [MIXER.inner, MIXER.channels, MIXER.heads], 1)
    return partial(made._decode, given, 0, conv_in, dt, made.forward_metadata)


def delta_step(route: str, raw: bool = False) -> Callable[[], object]:
    """Likewise; from `raw` projections, as a fused decode step on CUDA brings them."""
    made, given = backend(route, HybridGDNBackend), delta_layer()
    made.init_forward_metadata_out_graph(batch(1, 2, 0))
    qkvz, ba = torch.randn(3, MIXER.channels + MIXER.inner), torch.randn(3, 2 * MIXER.heads)
    if raw:
        return partial(made.forward_decode, given, None, (qkvz, ba), None, None)
    b, a = ba.chunk(2, 1)
    return partial(made.forward_decode, given, None, qkvz[:, : MIXER.channels], a, b)


def traced(step: Callable[[], object]) -> tuple[Trace, list[Launch]]:
    """The operations and launches of a layer's decode step; the launches are not run."""
    launches: list[Launch] = []

    def record(launch: Launch) -> None:
        launches.append(launch)

    with mock.patch.object(Launch, "run", record), Trace() as trace:
        step()
    return trace, launches


@pytest.mark.parametrize(
    ("step", "kernel"),
    [
        (mamba2_step, "state_update_kernel"),
        (delta_step, "delta_update_kernel"),
        (partial(delta_step, raw=True), "delta_update_kernel"),
    ],
    ids=["mamba2", "delta", "delta, raw"],
)
def test_a_layer_makes_its_outputs_and_nothing_else(step: Callable[[str], Any], kernel: str) -> None:
    trace, launches = traced(step("triton"))
    assert [tuple(made.shape) for made in trace.made] == [(3, MIXER.channels), (3, MIXER.heads, MIXER.dim)]
    assert not trace.waits(), trace.operations
    assert [launch.kernel.__name__ for launch in launches] == ["conv_update_kernel", kernel]
    read = {storage(value) for launch in launches for value in launch.args.values() if torch.is_tensor(value)}
    assert {storage(made) for made in trace.made} <= read


@pytest.mark.parametrize("step", [mamba2_step, delta_step])
def test_the_torch_route_waits_for_nothing_either(step: Callable[[str], Any]) -> None:
    """It allocates, as the reference may."""
    trace, launches = traced(step("torch"))
    assert not trace.waits(), trace.operations
    assert not launches and trace.made


def test_the_trace_sees() -> None:
    """Each wait and each allocation that would break the tests above is seen."""
    values, out = torch.tensor([3, 0, 2]), torch.empty(2, dtype=torch.int64)
    for wait in (lambda: values[0].item(), lambda: values[values > 0], lambda: values.to("meta")):
        with Trace() as trace:
            wait()
        assert trace.waits()
    with Trace() as trace:
        torch.index_select(values, 0, torch.tensor([0, 1]))
    assert trace.made
    rows = torch.tensor([0, 1])
    with Trace() as trace:
        torch.index_select(values, 0, rows, out=out)
        out[:1]
    assert not trace.made


def preparing(states: dict[int, Any]) -> tuple[GridRequests, list[int]]:
    """A request pool whose tables have no values, and the rows that it publishes."""
    published: list[int] = []
    requests = object.__new__(GridRequests)
    requests.organization = SimpleNamespace(grid=8)
    requests.maps = PageMaps(64, 3, "meta")
    requests._forked, requests._unwritten = set(), set()
    requests.state = states.__getitem__
    requests._request = lambda row: row
    requests.cache = SimpleNamespace(
        publication=lambda row, start: row, published=lambda row, duplicates: published.append(row)
    )
    requests.memory = SimpleNamespace(
        step_units=0, prepare_decode=lambda settling, leaving, crossing: [()] * len(leaving)
    )
    return requests, published


def test_tables_change_for_requests_that_leave_a_boundary_alone() -> None:
    """Of 60 running requests two stand on a boundary: two rows are written, and none while none does."""
    piece = SimpleNamespace(members=(1, 2, 3), line=5, pages=(1, 2, 3))
    states = {row: SimpleNamespace(source=None, live=piece, units=[]) for row in range(1, 61)}
    requests, published = preparing(states)
    rows, starts = torch.arange(1, 61), torch.full((60,), 11)
    with Trace() as trace:
        requests._prepare_decode(rows, starts)
    assert not any(made.device.type == "meta" for made in trace.made)
    assert not any(name.startswith(("index_put", "copy")) for name in trace.operations)
    starts[7] = starts[50] = 16
    with Trace() as trace:
        requests._prepare_decode(rows, starts)
    assert published == [8, 51]
    assert {made.shape[0] for made in trace.made if made.device.type == "meta"} == {2}
