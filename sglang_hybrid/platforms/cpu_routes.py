"""Routes that SGLang serves on an accelerator only: refused where a request would end the scheduler.

They are the operator's, and each reaches a call of `torch.cuda` in the scheduler.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from sglang.srt.managers.tokenizer_control_mixin import TokenizerControlMixin

from sglang_hybrid.engine.door import RequestRefused

PROFILED = ("CPU", "GPU")
"""Activities that torch's profiler takes here; it finds no events of the second."""


def _not_served(what: str, why: str) -> RequestRefused:
    return RequestRefused(f"{what} is not served on the CPU platform: {why}.", HTTPStatus.NOT_IMPLEMENTED)


def _refusing(name: str, why: str) -> Callable[..., Any]:
    @functools.wraps(getattr(TokenizerControlMixin, name))
    async def refused(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise _not_served(f"/{name}", why)

    return refused


NOT_SERVED = {
    "release_memory_occupation": "the pages lie in host memory and are not given back while the server runs",
    "resume_memory_occupation": "the pages lie in host memory and are not given back while the server runs",
}

_execute_profile = TokenizerControlMixin._execute_profile


@functools.wraps(_execute_profile)
async def execute_profile(self: Any, req: Any) -> Any:
    """As SGLang's, for what can be profiled here; its own refusal is a 400."""
    for activity in req.activities or ():
        if activity not in PROFILED:
            raise _not_served(f"/start_profile of {activity}", f"legal: {', '.join(PROFILED)}")
    try:
        return await _execute_profile(self, req)
    except RuntimeError as error:
        raise RequestRefused(str(error)) from error


def install() -> None:
    """In the process that takes requests, before it has a tokenizer manager.  Idempotent."""
    TokenizerControlMixin._execute_profile = execute_profile
    for name, why in NOT_SERVED.items():
        setattr(TokenizerControlMixin, name, _refusing(name, why))
