"""BASE: what must hold whenever a server has drained. The one place that knows the names of the counters."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.support.server import LiveServer

STATE_KEY = "hybrid"
"""Key of the plugin's counters in each element of /server_info's `internal_states`."""

ALIVE_WITHIN = 10.0
"""Seconds in which an idle server must answer a request of five tokens."""


@dataclass(frozen=True)
class Pools:
    """The plugin's counters of one rank, in pages, checkpoints and tokens."""

    total: int
    free: int
    held: int
    cached: int
    checkpoints: int
    reclaiming: int
    protected_tokens: int
    raw: Mapping[str, Any]

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> "Pools | None":
        """From /server_info; None on a server without the plugin's flag."""
        state = info["internal_states"][0].get(STATE_KEY)
        if state is None:
            return None
        return cls(
            total=state["pages_total"],
            free=state["pages_free"],
            held=state["pages_held"],
            cached=state["pages_cached"],
            checkpoints=state["checkpoints_cached"],
            reclaiming=state["pages_reclaiming"],
            protected_tokens=state["protected_tokens"],
            raw=state,
        )


def pools(server: LiveServer) -> Pools:
    """The plugin's counters now. Fails on a server without them."""
    found = Pools.of(server.info())
    assert found is not None, "the server does not report the plugin's counters"
    return found


def check_base(server: LiveServer, hybrid: bool) -> None:
    """Drained: nothing held, every page free or cached, no lock, and a short request is answered at once.

    SGLang's own leak check runs by itself when the server is idle, and ends the server on a finding.
    """
    server.wait_idle()
    if hybrid:
        now = pools(server)
        assert now.held == 0, f"{now.held} pages are held on an idle server: {now.raw}"
        assert now.reclaiming == 0, f"{now.reclaiming} pages are stuck in a reclaim: {now.raw}"
        assert now.protected_tokens == 0, (
            f"{now.protected_tokens} tokens are locked on an idle server: {now.raw}"
        )
        assert now.free + now.cached == now.total, f"pages are missing: {now.raw}"
    reply = server.generate([5, 6, 7, 8, 9], 1, timeout=ALIVE_WITHIN)
    assert reply.reason == "length" and len(reply.ids) == 1, reply
    server.wait_idle()
    server.check_alive()
