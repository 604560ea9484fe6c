"""A device whose operations are queued, stream by stream, and run in any order that events and waits allow.

Its tensors name "meta" as their device, so that whatever makes one or copies to one, under `Device.active`,
comes here. An operation on them is queued on the current stream and returns at once; what it makes holds
garbage until it has run. Views are made at once, for they touch no bytes. Copies from the host take the
values at the call, as a driver does that stages pageable memory; copies to the host run when their stream
gets there, and whoever does not wait for that reads garbage. An operation whose result the host needs waits
for its own stream.

A tensor that nobody holds gives its bytes back in the order of the stream that made it, as CUDA's caching
allocator does: garbage is written there, which another stream that still reads will meet.
"""

from __future__ import annotations

import random
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

NAME = "meta"
"""Device that its tensors name."""
MANY = 40
"""Operations after which, on average, other streams run ahead than before."""


class Marker(NamedTuple):
    """A place in a stream: after its first `tasks` tasks."""

    stream: Stream
    tasks: int

    def reached(self) -> bool:
        return self.stream.done >= self.tasks


class Stream:
    """A queue of tasks and of places in other streams that must be reached first."""

    def __init__(self, device: Device, name: str) -> None:
        self.device, self.name = device, name
        self.tasks: deque[Callable[[], object] | Marker] = deque()
        self.done = self.issued = 0

    def add(self, task: Callable[[], object] | Marker) -> None:
        self.tasks.append(task)
        self.issued += 1

    def here(self) -> Marker:
        return Marker(self, self.issued)

    def wait_event(self, event: Event) -> None:
        """What is queued from now on runs after the event's last record."""
        if event.marker is not None:
            self.device.queue(event.marker, self)

    def wait_stream(self, other: Stream) -> None:
        self.device.queue(other.here(), self)

    def runnable(self) -> bool:
        return bool(self.tasks) and (not isinstance(self.tasks[0], Marker) or self.tasks[0].reached())

    def run_one(self) -> None:
        task = self.tasks.popleft()
        if not isinstance(task, Marker):
            with torch.no_grad(), _disable_current_modes():
                task()
        self.done += 1


class Event:
    """`torch.cuda.Event`, as far as a scheduler uses it."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.marker: Marker | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.marker = (stream or self.device.current).here()

    def synchronize(self) -> None:
        """The host waits."""
        if self.marker is not None:
            self.device.run_until(self.marker)


class DeviceTensor(torch.Tensor):
    """`held` has the bytes, `block` the storage that this one is part of."""

    held: torch.Tensor
    block: object
    owner: Device

    @staticmethod
    def __new__(cls, real: torch.Tensor, block: object, device: Device) -> DeviceTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls, real.size(), strides=real.stride(), storage_offset=real.storage_offset(),
            dtype=real.dtype, device=torch.device(NAME),
        )  # fmt: skip
        made.held, made.block, made.owner = real, block, device
        return made

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        one = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, DeviceTensor))
        return one.owner.carry_out(func, args, kwargs)


class Block:
    """Identity of a storage, for as long as a tensor over it lives."""


class Device:
    """Streams and what they still have to do. `chance` None runs everything at once: the reference."""

    def __init__(self, chance: random.Random | None) -> None:
        self.chance = chance
        self.streams = [Stream(self, name) for name in ("schedule", "forward", "copy")]
        self.schedule, self.forward, self.copy = self.streams
        self.current = self.schedule
        self.ahead: set[str] = set()
        """Streams that at present run whatever they may; the others run nothing until someone waits."""

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """Make a stream the current one."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def active(self) -> Iterator[None]:
        with torch.no_grad(), _Factories(self):
            yield

    # -- order ------------------------------------------------------------------------------

    def queue(self, task: Callable[[], object] | Marker, stream: Stream | None = None) -> None:
        (stream or self.current).add(task)
        if self.chance is None:
            for one in self.streams:
                self._run(one)
            return
        if self.chance.randrange(MANY) == 0:
            self.ahead = {one.name for one in self.streams if self.chance.random() < 0.5}
        for one in self.chance.sample(self.streams, len(self.streams)):
            if one.name in self.ahead:
                self._run(one)

    def _run(self, stream: Stream) -> None:
        while stream.runnable():
            stream.run_one()

    def run_until(self, marker: Marker) -> None:
        """The least that is needed to get there."""
        while not marker.reached():
            head = marker.stream.tasks[0]
            if isinstance(head, Marker) and not head.reached():
                self.run_until(head)
            else:
                marker.stream.run_one()

    def synchronize(self) -> None:
        for stream in self.streams:
            self.run_until(stream.here())

    # -- memory -----------------------------------------------------------------------------

    def wrap(self, real: torch.Tensor, block: object | None = None) -> DeviceTensor:
        if block is None:
            block = Block()
            weakref.finalize(block, self._give_back, real, self.current).atexit = False
        return DeviceTensor(real, block, self)

    def _give_back(self, real: torch.Tensor, stream: Stream) -> None:
        stream.add(lambda: garbage(real))

    # -- operations -------------------------------------------------------------------------

    def carry_out(self, func: Any, args: Any, kwargs: Any) -> Any:
        """One operation with a tensor of the device among its arguments, or that makes one."""
        name = func.overloadpacket.__name__
        to = torch.device(kwargs.get("device") or NAME).type
        if name == "_to_copy" and isinstance(args[0], DeviceTensor) and to != NAME:
            return self._to_host(args[0], kwargs)
        if name == "copy_" and not isinstance(args[0], DeviceTensor):
            host, source = args[0], args[1].held
            self.queue(lambda: host.copy_(source))
            self.run_until(self.current.here())
            return host
        block = next(
            (one.block for one in tree_leaves((args, kwargs)) if isinstance(one, DeviceTensor)), None
        )
        if torch.Tag.data_dependent_output in func.tags or name in ("nonzero", "masked_select", "_unique2"):
            self.run_until(self.current.here())
            with _disable_current_modes():
                found = func(*real(args), **real(kwargs))
            return tree_map(lambda leaf: self.wrap(leaf) if isinstance(leaf, torch.Tensor) else leaf, found)
        inputs, named = real(args), real(kwargs)
        returns = func._schema.returns
        alias = returns[0].alias_info if returns else None
        if alias is not None and not alias.is_write:
            made = func(*inputs, **named)
            return tree_map(lambda leaf: self.wrap(leaf, block), made)
        if func._schema.is_mutable:
            self.queue(lambda: func(*inputs, **named))
            return kwargs.get("out", args[0])
        shapes = func(*shaped(inputs), **{**shaped(named), **({"device": NAME} if "device" in named else {})})
        outputs = [
            garbage(torch.empty_strided(one.size(), one.stride(), dtype=one.dtype)) for one in leaves(shapes)
        ]
        if not name.startswith(("empty", "new_empty")):

            def run() -> None:
                for kept, got in zip(outputs, leaves(func(*inputs, **named))):
                    kept.copy_(got)

            self.queue(run)
        waiting = iter([self.wrap(output) for output in outputs])
        return tree_map(lambda leaf: next(waiting) if isinstance(leaf, torch.Tensor) else leaf, shapes)

    def _to_host(self, source: DeviceTensor, kwargs: Any) -> torch.Tensor:
        host = garbage(torch.empty(source.shape, dtype=kwargs.get("dtype") or source.dtype))
        bytes_ = source.held
        self.queue(lambda: host.copy_(bytes_))
        if not kwargs.get("non_blocking"):
            self.run_until(self.current.here())
        return host


class _Factories(TorchDispatchMode):
    """Sends to the device what makes a tensor there out of none of its tensors."""

    def __init__(self, device: Device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        named = kwargs.get("device")
        if any(isinstance(leaf, DeviceTensor) for leaf in tree_leaves((args, kwargs))) or (
            named is not None and torch.device(named).type == NAME
        ):
            return self.device.carry_out(func, args, kwargs)
        return func(*args, **kwargs)


def leaves(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def real(tree: Any) -> Any:
    """Arguments of the operation on real bytes; tensors of the host as they are at this moment."""

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, DeviceTensor):
            return leaf.held
        if isinstance(leaf, torch.Tensor):
            return leaf.clone()
        if isinstance(leaf, torch.device) or leaf == NAME:
            return torch.device("cpu")
        return leaf

    return tree_map(convert, tree)


def shaped(tree: Any) -> Any:
    """The same without bytes."""
    return tree_map(
        lambda leaf: (
            torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device=NAME)
            if isinstance(leaf, torch.Tensor)
            else leaf
        ),
        tree,
    )


def garbage(tensor: torch.Tensor) -> torch.Tensor:
    """NaN; in ints 1, which is a row and a page of somebody."""
    return tensor.fill_(float("nan") if tensor.is_floating_point() else 1)
