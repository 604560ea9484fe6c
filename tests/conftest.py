"""Order of the tests: fast ones first, then the engine tests grouped by server configuration."""

import signal
from collections.abc import Iterator

import pytest

from tests.support.arguments import kept_process, write_config
from tests.support.configs import CONFIGS
from tests.support.proofs import proof_of, report


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="also run the tests that are marked long")
    parser.addoption(
        "--stock",
        action="store_true",
        help="engine tests with the plugin's flag off: output must equal cold, hits are not checked",
    )


def pytest_configure(config: pytest.Config) -> None:
    # Whoever ends a run wants its servers ended too: let fixtures be torn down.
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def server_name(item: pytest.Item) -> str | None:
    """Name of the shared configuration that a test runs on."""
    callspec = getattr(item, "callspec", None)
    return None if callspec is None else callspec.params.get("server")


def place(item: pytest.Item) -> tuple[int, int]:
    """Sort key: folder, then configuration."""
    in_engine = "tests/engine/" in item.path.as_posix()
    name = server_name(item)
    return in_engine, -1 if name is None else list(CONFIGS).index(name)


@pytest.hookimpl(tryfirst=True)
def pytest_itemcollected(item: pytest.Item) -> None:
    """Tests of one configuration stay in one worker, which has the server; others go where there is time."""
    if "tests/engine/" in item.path.as_posix():
        item.add_marker("engine")
    if proof_of(item.nodeid.partition("::")[0]) is not None:
        item.add_marker("proof")
    name = server_name(item)
    if name is not None:
        # A family's configurations share its cold server.
        model = CONFIGS[name].model
        item.add_marker(pytest.mark.xdist_group(name if model == "tiny" else model))
    elif "tests/core/" not in item.path.as_posix():
        item.add_marker(pytest.mark.xdist_group(item.path.stem))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--long"):
        left_out = [item for item in items if item.get_closest_marker("long")]
        items[:] = [item for item in items if not item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=left_out)
    items.sort(key=place)


@pytest.fixture
def kept() -> Iterator[None]:
    """What parsing and resolution do to the process is undone after the test."""
    with kept_process():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with Falcon-H1's config.json alone."""
    return write_config(tmp_path_factory.mktemp("falcon"))


def pytest_unconfigure(config: pytest.Config) -> None:
    """With `-m proof`, the last lines: what was proved."""
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is None or config.option.markexpr != "proof" or config.option.collectonly:
        return
    kinds = ("passed", "failed", "error")
    for line in report((each.nodeid, kind) for kind in kinds for each in terminal.stats.get(kind, [])):
        terminal.write_line(line)
