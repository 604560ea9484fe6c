"""Fixtures of the engine tests: servers that are shared, a cold reference, a client that checks."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cold import Cold
from tests.support.park import ServerPark
from tests.support.server import LiveServer
from tests.support.server_config import FAULTS
from tests.support.witness import Witness

PASSED = pytest.StashKey[bool]()


@pytest.fixture(scope="session")
def park(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerPark]:
    """Every server of the session; ended with it."""
    names = (getattr(item, "callspec", None) for item in request.session.items)
    upcoming = [call.params["server"] for call in names if call is not None and "server" in call.params]
    stock = bool(request.config.getoption("--stock"))
    servers = ServerPark(tmp_path_factory.mktemp("engine"), upcoming, stock)
    yield servers
    servers.close()


@pytest.fixture(scope="session")
def cold(park: ServerPark) -> Cold:
    """Cold runs."""
    return park.cold


@pytest.fixture
def server(request: pytest.FixtureRequest, park: ServerPark) -> LiveServer:
    """The running server of the configuration that `on(...)` names."""
    return park.get(request.param)


@pytest.fixture
def witness(
    request: pytest.FixtureRequest, park: ServerPark, server: LiveServer, cold: Cold
) -> Iterator[Witness]:
    """A checking client on an empty cache. When the test passed, BASE must hold after it."""
    config = park.config(request.node.callspec.params["server"])
    client = Witness(server, cold, config, exact=not park.stock)
    client.flush()
    yield client
    if request.node.stash.get(PASSED, False):
        client.base()


@pytest.fixture
def fault() -> Iterator[Callable[[str], None]]:
    """Take a guard out, plant a fault or preempt, until the test ends."""
    planted: list[Path] = []

    def plant(name: str) -> None:
        planted.append(FAULTS / name)
        planted[-1].touch()

    yield plant
    for path in planted:
        path.unlink()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Add the end of the server's log to a failed test's report."""
    report = yield
    if report.when == "call":
        item.stash[PASSED] = report.passed
    if report.failed:
        for name, value in getattr(item, "funcargs", {}).items():
            if isinstance(value, LiveServer):
                report.sections.append((f"log of {name} ({value.log_path.stem})", value.log_tail()))
    return report
