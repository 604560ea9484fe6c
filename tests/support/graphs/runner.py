"""SGLang's `DecodeCudaGraphRunner` on a CPU, and the recordings that it captures and replays."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.model_executor.runner_backend.base_cuda_graph_backend import BaseCudaGraphBackend
from sglang.srt.runtime_context import get_flags

from tests.support.graphs import faults
from tests.support.graphs.recording import Pool, Recording
from tests.support.planted.planted_faults import FOLDER

logger = logging.getLogger(__name__)

WARMUPS = 2
"""Runs of a shape before its capture, as in `FullCudaGraphBackend.capture_one`."""


class RecordedGraphRunner(DecodeCudaGraphRunner):
    """The runner itself. What it asks of a CUDA device module it finds in `torch.cpu` and here."""

    device_module = SimpleNamespace(
        Event=torch.cpu.Event,
        synchronize=torch.cpu.synchronize,
        is_current_stream_capturing=lambda: Recording.capturing,
    )

    def __init__(self, model_runner: Any, **kwargs: Any) -> None:
        get_flags().capture.enable_torch_compile = False
        super().__init__(model_runner, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "device_module":
            super().__setattr__(name, value)


class RecordingBackend(BaseCudaGraphBackend):
    """A recording for each shape; all of one runner share a pool, as its CUDA graphs do."""

    def __init__(self, cuda_graph_runner: Any, *, enable_memory_saver: bool = False) -> None:
        self._pool = Pool()
        self._graphs: dict[Any, Recording] = {}
        faults_in = os.environ.get(FOLDER)
        self._faulty: dict[Any, Recording] = {}
        """Captured with a fault beside the honest ones, where tests plant any."""
        self._baked = None if faults_in is None else Path(faults_in) / faults.BAKED

    @contextmanager
    def capture_session(self, stream: Any) -> Iterator[None]:
        yield

    def capture_one(
        self,
        shape_key: Any,
        forward_fn: Callable[[], Any],
        capture_inputs: Any = None,
        post_warmup_hook: Callable[[], None] | None = None,
    ) -> None:
        for _ in range(WARMUPS):
            forward_fn()
            if post_warmup_hook is not None:
                post_warmup_hook()
        self._graphs[shape_key] = Recording.capture(forward_fn, self._pool)
        logger.info("Recorded %s: %s.", shape_key, self._graphs[shape_key])
        if self._baked is not None:
            with mock.patch.object(faults.Baking, "now", True):
                self._faulty[shape_key] = Recording.capture(forward_fn, self._pool)

    def can_run(self, forward_batch: Any, shape_key: Any) -> bool:
        return shape_key in self._graphs

    @contextmanager
    def replay_session(self) -> Iterator[None]:
        yield

    def replay(self, shape_key: Any, static_forward_batch: Any, **kwargs: Any) -> Any:
        faulty = self._baked is not None and self._baked.exists()
        return (self._faulty if faulty else self._graphs)[shape_key].replay()

    def cleanup(self) -> None:
        self._graphs.clear()
        self._faulty.clear()
        self._pool = Pool()
