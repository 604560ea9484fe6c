"""A port for a server that is to be started."""

from __future__ import annotations

import random
import socket

LOOPBACK = "127.0.0.1"
PORTS = range(10_000, 22_000)
"""Below the ports that a system hands out by itself: it would give a free one to any connection before the
server, seconds later, binds it.  Below those too that SGLang takes for itself (from 22,000)."""
ATTEMPTS = 64
SYSTEM_RANDOM = random.SystemRandom()
"""Processes that seeded `random` alike would choose one port, and one would talk to the other's server."""


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on now.

    Raises `OSError` when none of `ATTEMPTS` is free.  SGLang has such a function of its own,
    `sglang.srt.utils.network.get_free_port_below_ephemeral`, which brings torch along.
    """
    for port in SYSTEM_RANDOM.sample(PORTS, ATTEMPTS):
        with socket.socket() as probe:
            try:
                probe.bind((LOOPBACK, port))
            except OSError:
                continue
            return port
    raise OSError(f"{ATTEMPTS} ports between {PORTS[0]} and {PORTS[-1]} are taken: end what listens there")
