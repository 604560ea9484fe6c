"""Ints of the host on a device, by copies that nothing waits for.

`torch.tensor(values, device="cuda")` waits: for the copy, and so for everything its stream still has to do.
A copy from pinned memory does not.  The caching host allocator keeps pinned memory from being used again
before the copy is done.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def upload(values: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """`values`, a tensor of the host, on `device`: one copy, pinned where there is a GPU, not waited for."""
    if torch.device(device).type == "cuda":
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


def upload_lists(lists: Sequence[Sequence[int]], device: torch.device | str) -> list[torch.Tensor]:
    """Each list as int64 on `device`, one copy for all of them; the tensors share their memory."""
    packed = torch.tensor([value for values in lists for value in values], dtype=torch.int64)
    return list(torch.split(upload(packed, device), [len(values) for values in lists]))
