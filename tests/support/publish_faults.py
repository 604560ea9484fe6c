"""Faults planted in `Memory.publish`: publish, lock the new path, unlock the old one, hand over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

from sglang_hybrid.radix.live import LiveStates
from sglang_hybrid.radix.live_state import LiveState
from sglang_hybrid.radix.memory import Memory
from sglang_hybrid.radix.tree import GridTree


@contextmanager
def _without(kind: type, step: str, instead: Callable[..., Any]) -> Iterator[None]:
    """`Memory.publish` does not take one of its steps; everybody else does."""
    publish = Memory.publish

    def faulty(self: Memory, state: LiveState, *rest: Any) -> Any:
        with patch.object(kind, step, instead):
            return publish(self, state, *rest)

    with patch.object(Memory, "publish", faulty):
        yield


@contextmanager
def _stays() -> Iterator[None]:
    publish = Memory.publish

    def faulty(self: Memory, state: LiveState, *rest: Any) -> Any:
        before = state.lease.node
        found = publish(self, state, *rest)
        state.lease.node = before
        return found

    with patch.object(Memory, "publish", faulty):
        yield


FAULTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "the_new_path_is_not_locked": lambda: _without(GridTree, "lock", lambda self, node: node),
    "the_old_path_stays_locked": lambda: _without(GridTree, "unlock", lambda self, node: None),
    "published_blocks_stay_the_request_s_own": lambda: _without(
        LiveStates, "handed_over", lambda self, published: None
    ),
    "the_lease_stays_on_the_old_path": _stays,
}
