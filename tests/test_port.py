"""Ports for servers that bind them some seconds later."""

import random
import socket
from pathlib import Path

import pytest

from sglang_hybrid.cli import port
from sglang_hybrid.cli.port import PORTS, free_port

EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def test_no_connection_is_given_a_port_of_the_range() -> None:
    if not EPHEMERAL.exists():
        pytest.skip("needs Linux, which tells the ports that it hands out by itself")
    assert PORTS[-1] < int(EPHEMERAL.read_text().split()[0])
    assert all(free_port() in PORTS for _ in range(100))


def test_processes_with_one_seed_choose_different_ports() -> None:
    """Workers of a test session that both called SGLang's `set_random_seed`."""
    chosen = set()
    for _ in range(10):
        random.seed(42)
        chosen.add(free_port())
    assert len(chosen) > 1


def test_a_port_that_somebody_listens_on_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind((port.LOOPBACK, free_port()))
        taken.listen()
        number = taken.getsockname()[1]
        other = free_port()
        monkeypatch.setattr(port.SYSTEM_RANDOM, "sample", lambda ports, count: [number, other])
        assert free_port() == other
        monkeypatch.setattr(port.SYSTEM_RANDOM, "sample", lambda ports, count: [number])
        with pytest.raises(OSError, match="end what listens there"):
            free_port()
