"""One validator for every tensor a kernel takes: name, shape it has, shape it needs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

INDEX_DTYPES = (torch.int32, torch.int64)


class KernelError(ValueError):
    """A tensor that an operation cannot take; the message names it, its shape and the shape needed."""


def need_shape(name: str, tensor: torch.Tensor, shape: Sequence[int | None]) -> None:
    """Raise `KernelError` unless `tensor` has `shape`; None stands for any length.

    Shapes are host metadata: this never waits for the device.
    """
    has = tuple(tensor.shape)
    if len(has) != len(shape) or any(want is not None and want != got for want, got in zip(shape, has)):
        wanted = ", ".join("*" if want is None else str(want) for want in shape)
        raise KernelError(f"{name} has shape {list(has)}, needs [{wanted}]")


def need_dtype(name: str, tensor: torch.Tensor, dtypes: Sequence[torch.dtype]) -> None:
    """Raise `KernelError` unless the dtype of `tensor` is one of `dtypes`."""
    if tensor.dtype not in dtypes:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise KernelError(f"{name} is {str(tensor.dtype).removeprefix('torch.')}, needs {names}")


def need_index(name: str, tensor: torch.Tensor, shape: Sequence[int | None]) -> None:
    """Raise `KernelError` unless `tensor` is an int32 or int64 tensor of `shape`."""
    need_shape(name, tensor, shape)
    need_dtype(name, tensor, INDEX_DTYPES)


def need_groups(heads: int, groups: int, names: str = "B and C", of: str = "x") -> None:
    """Raise `KernelError` unless every group of `names` serves the same number of heads of `of`."""
    if groups < 1 or heads % groups:
        raise KernelError(f"{names} have {groups} groups, which must divide the {heads} heads of {of}")


def need_activation(activation: str | None) -> None:
    """Raise `KernelError` for an activation other than None, "silu" and "swish"."""
    if activation not in (None, "silu", "swish"):
        raise KernelError(f"activation is {activation!r}, needs None, 'silu' or 'swish'")
