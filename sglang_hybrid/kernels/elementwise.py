"""silu and softplus whose result for an element does not depend on where the element lies.

torch's own take a vector loop for most elements and a scalar one for the last few; on a CPU the two
round differently, so a token's value would depend on the size of its batch.  Built from exp, log1p
and exact arithmetic they do not, and prefill and decode agree.
"""

from __future__ import annotations

import torch


def silu(x: torch.Tensor) -> torch.Tensor:
    """x sigmoid(x), elementwise, in x's dtype (use fp32)."""
    return x / (1 + torch.exp(-x))


def softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + exp(x)), elementwise, in x's dtype (use fp32); exact far out, where torch goes over to x."""
    return x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))
