"""A CUDA graph's rules on a CPU: one run of a function is recorded, and replayed into the same memory.

Recorded are the operations of torch that compute or write, each with the tensors that it read and wrote, and
each Triton launch of ours as the value that it is (`kernels.launch.Launch`). Nothing of Python runs at a
replay: a branch, a number and an address are those of the capture.

A capture refuses what CUDA refuses or would get wrong: results that the host waits for, shapes that depend
on data, copies from the host, random numbers. What it allocates belongs to a pool that all graphs of a
runner share; a replay first overwrites the whole pool, so that nothing lives on in it from an earlier
replay. What it read from outside the pool it does not keep alive, as a graph does not: memory that is gone
at a replay is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, Protocol
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from sglang_hybrid.kernels.launch import Launch

HOST_CALLS = frozenset(
    ("tolist", "numpy", "__array__", "cpu", "tensor", "as_tensor", "from_numpy", "frombuffer")
)
"""Names of Python calls that move values between host and device and that no operation shows on a CPU."""
WAITING = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
UNSET = frozenset(("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"))
GARBAGE_FLOAT = 0xFF
"""Every byte of it: NaN in fp32, fp16, bf16 and fp8."""
GARBAGE_INT = 0x7F
"""Every byte of it: an index far out of range."""


class CaptureError(RuntimeError):
    """What a captured function did that a CUDA graph cannot hold."""


class ReplayError(RuntimeError):
    """Memory that a graph reads or writes is gone."""


def tensors(tree: Any) -> list[torch.Tensor]:
    """Tensors among the leaves, in order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def address(tensor: torch.Tensor) -> int:
    """Identity of the storage under a tensor, for as long as that lives."""
    return tensor.untyped_storage()._cdata


class Pool:
    """Memory that captures allocate; kept until the pool goes."""

    def __init__(self) -> None:
        self._bytes: dict[int, tuple[torch.Tensor, int]] = {}

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return address(tensor) in self._bytes

    def add(self, tensor: torch.Tensor) -> None:
        """Take over the storage of a tensor that an operation has just made."""
        flat = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        self._bytes[address(tensor)] = flat, GARBAGE_FLOAT if tensor.is_floating_point() else GARBAGE_INT

    def overwrite(self, newest: int | None = None) -> None:
        """Garbage everywhere, or in the `newest` storages: a replay of any graph may write any of it."""
        everything = list(self._bytes.values())
        for flat, garbage in everything if newest is None else everything[len(everything) - newest :]:
            flat.fill_(garbage)


class Outside(NamedTuple):
    """A tensor over memory that is not of the pool and that a graph does not keep alive."""

    storage: StorageWeakRef
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Outside:
        storage = StorageWeakRef(tensor.untyped_storage())
        return cls(storage, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def tensor(self) -> torch.Tensor:
        """The same bytes. Raises ReplayError if they were given back."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage is None:
            raise ReplayError(
                f"memory of a {self.dtype} tensor {list(self.size)} from before the capture is given back"
            )
        empty = torch.empty(0, dtype=self.dtype)
        return empty.set_(storage, self.offset, self.size, self.stride)


def live(tree: Any) -> Any:
    """Arguments with their tensors back."""
    return tree_map(
        lambda leaf: leaf.tensor() if isinstance(leaf, Outside) else leaf,
        tree,
        is_leaf=lambda leaf: isinstance(leaf, Outside),
    )


class Step(Protocol):
    """What a replay does again."""

    def replay(self) -> None: ...


class Operation(NamedTuple):
    """An operation of torch; `made` are its results in the pool, by their place among all its results."""

    function: Any
    args: Any
    kwargs: Any
    made: tuple[tuple[int, torch.Tensor], ...]

    def replay(self) -> None:
        got = tensors(self.function(*live(self.args), **live(self.kwargs)))
        for place, kept in self.made:
            assert got[place].shape == kept.shape, f"{self.function}: a shape changed"
            kept.copy_(got[place])


class Launched(NamedTuple):
    """A Triton launch; `args` are its arguments with tensors as in `Operation`."""

    launch: Any
    args: Any

    def replay(self) -> None:
        self.launch._replace(args=live(self.args)).run()


class Recording:
    """A graph: steps, and the objects that its function returned."""

    capturing = False
    """Whether a capture is under way in this process."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.steps: list[Step] = []
        self.output: Any = None

    @classmethod
    def capture(cls, function: Callable[[], Any], pool: Pool) -> Recording:
        """Run `function` once and record it. Raises CaptureError."""
        graph = cls(pool)
        with graph._capturing():
            graph.output = function()
        try:
            for step in graph.steps:
                live((step.args, getattr(step, "kwargs", None)))  # type: ignore[attr-defined]
        except ReplayError as error:
            raise CaptureError(f"allocated outside of the graph's pool: {error}") from error
        return graph

    def __str__(self) -> str:
        launches = sum(isinstance(step, Launched) for step in self.steps)
        return f"{len(self.steps) - launches} operations and {launches} launches"

    def replay(self) -> Any:
        """Do it again in the same memory; the returned object is the capture's, with new contents."""
        with torch.inference_mode():
            self.pool.overwrite()
            for step in self.steps:
                step.replay()
        return self.output

    @contextmanager
    def _capturing(self) -> Iterator[None]:
        run = Launch.run

        def record(launch: Launch) -> None:
            args = {name: self._kept(value) for name, value in launch.args.items()}
            self.steps.append(Launched(launch._replace(args={}), args))
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                run(launch)

        with ExitStack() as modes:
            modes.enter_context(torch.inference_mode())
            modes.enter_context(mock.patch.object(Launch, "run", record))
            modes.enter_context(mock.patch.object(Recording, "capturing", True))
            modes.enter_context(_HostCalls())
            modes.enter_context(_Operations(self))
            yield

    def _kept(self, value: Any) -> Any:
        """A tensor of the pool as it is, one from outside without its memory, anything else as it is."""
        if not isinstance(value, torch.Tensor):
            return value
        return value if value in self.pool else Outside.of(value)

    def add(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Record one operation that was just carried out."""
        known = {address(tensor) for tensor in tensors((args, kwargs))}
        kept_args, kept_kwargs = tree_map(self._kept, (args, kwargs))
        made = []
        for place, tensor in enumerate(tensors(result)):
            if address(tensor) not in known and tensor not in self.pool:
                self.pool.add(tensor)
                made.append((place, tensor))
        if function.overloadpacket.__name__ in UNSET:
            # A kernel will write it. What was there before it does, no one may rely on.
            self.pool.overwrite(newest=len(made))
        elif made or function._schema.is_mutable:
            self.steps.append(Operation(function, kept_args, kept_kwargs, tuple(made)))


class _Operations(TorchDispatchMode):
    """Refuses or records every operation."""

    def __init__(self, graph: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = graph

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        refuse_operation(func, args, kwargs)
        with self:  # an operation that consists of others may hide one that waits
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        result = func(*args, **kwargs)
        if len({tensor.device for tensor in tensors((args, kwargs, result))}) > 1:
            raise CaptureError(f"{func} copies between devices")
        self.graph.add(func, args, kwargs, result)
        return result


class _HostCalls(TorchFunctionMode):
    """Refuses the Python calls that no operation shows."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in HOST_CALLS:
            raise CaptureError(f"{name} moves values between host and device")
        return func(*args, **(kwargs or {}))


def refuse_operation(function: Any, args: Any, kwargs: Any) -> None:
    """Raise CaptureError for an operation that no graph can hold."""
    name = function.overloadpacket.__name__
    if torch.Tag.nondeterministic_seeded in function.tags:
        raise CaptureError(f"{name} draws random numbers")
    if name == "lift_fresh":
        raise CaptureError(f"{name} copies from the host")
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        # Only a mask makes the shape of an index depend on data.
        if any(t.dtype in (torch.bool, torch.uint8) for t in tensors(args[1])):
            raise CaptureError(f"{name} by a mask: its shape depends on data")
    elif any(tag in function.tags for tag in WAITING):
        raise CaptureError(f"{name} makes the host wait for its result")
