"""SGLang's output streamer, told that a request's reuse is one value and not one a token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer

from sglang_hybrid.engine.reuse import META_KEY


class GridOutputStreamer(SchedulerOutputStreamer):
    """Sends it with the first part of a streamed answer, and with an answer that comes as a whole."""

    def is_request_level_customized_info_key(self, key: str) -> bool:
        return key == META_KEY


def output_streamer_class(original: Callable[..., Any], self: Any) -> type[GridOutputStreamer]:
    """Around `Scheduler.get_output_streamer_class`."""
    return GridOutputStreamer
