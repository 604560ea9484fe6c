"""The servers of a test session: one under test, one cold reference, and the next one on its way."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.cold import Cold
from tests.support.configs import CONFIGS, MODELS
from tests.support.nursery import Nursery
from tests.support.server import LiveServer
from tests.support.server_config import ENV, ServerConfig, cold_config


def on(*names: str) -> pytest.MarkDecorator:
    """Run a test on these shared configurations: its `witness` fixture talks to each in turn."""
    servers = [pytest.param(name, marks=pytest.mark.long) if CONFIGS[name].long else name for name in names]
    return pytest.mark.parametrize("server", servers, indirect=True)


class ServerPark:
    """Starts servers on demand and ends them as soon as another configuration is wanted.

    `upcoming` names configurations in the order in which tests will ask; the one after the current is spawned
    ahead, since most of a start is imports that leave a core idle. Beside other workers no core is idle, and
    which configuration comes next is not known.
    """

    def __init__(self, directory: Path, upcoming: Sequence[str], stock: bool) -> None:
        self.directory = directory
        self.stock = stock
        self.cold = Cold(self._start_cold)
        self._upcoming = [] if "PYTEST_XDIST_WORKER" in os.environ else list(dict.fromkeys(upcoming))
        self._current: tuple[str, LiveServer] | None = None
        self._next: tuple[str, LiveServer] | None = None
        self._starts = 0
        self._nurseries: dict[frozenset[tuple[str, str]], Nursery] = {}

    def model_dir(self, model: str) -> Path:
        """Folder of a demo model, written at its first use."""
        from sglang_hybrid.cli.demo_model import write_demo_model

        path = self.directory / "models" / model
        if not path.exists():
            write_demo_model(path, **MODELS[model])
        return path

    def config(self, name: str) -> ServerConfig:
        """The configuration of that name, or its stock twin under `--stock`."""
        config = CONFIGS[name]
        return config.without_plugin() if self.stock else config

    def get(self, name: str) -> LiveServer:
        """A healthy server of a shared configuration; a dead one is replaced."""
        if self._current is not None and self._current[0] == name and self._current[1].alive():
            return self._current[1]
        self._end_current()
        if self._next is not None and self._next[0] == name:
            server, self._next = self._next[1], None
        else:
            self._end_next()
            server = self.spawn(self.config(name))
        self._current = (name, server)
        server.wait_ready()
        self._spawn_after(name)
        return server

    def spawn(self, config: ServerConfig) -> LiveServer:
        """A server process of any configuration, which the caller waits for and ends."""
        self._starts += 1
        log = self.directory / f"{self._starts:02d}-{config.name}.log"
        args = config.args(self.model_dir(config.model))
        if config.observed and config.hybrid:
            args += ["--enable-metrics", "--hybrid-trace", str(log.with_suffix(".jsonl"))]
        server = LiveServer(args, log, {**ENV, **config.environment}, self._nursery_for(config))
        server.spawn()
        return server

    def _nursery_for(self, config: ServerConfig) -> Nursery:
        """One for each environment that more than SGLang and the plugin may read."""
        outer = {name: value for name, value in config.environment.items() if not name.startswith("SGLANG_")}
        key = frozenset(outer.items())
        if key not in self._nurseries:
            log = self.directory / f"nursery-{len(self._nurseries)}.log"
            self._nurseries[key] = Nursery(log, {**ENV, **outer})
        return self._nurseries[key]

    @contextmanager
    def serve(self, config: ServerConfig) -> Iterator[LiveServer]:
        """A server for one test alone."""
        server = self.spawn(config)
        try:
            server.wait_ready()
            yield server
        finally:
            server.stop()

    def close(self) -> None:
        """End everything."""
        self._end_current()
        self._end_next()
        self.cold.stop()
        for nursery in self._nurseries.values():
            nursery.close()

    def _start_cold(self, model: str) -> LiveServer:
        context = max(config.context for config in CONFIGS.values() if config.model == model)
        server = self.spawn(cold_config(model, context))
        server.wait_ready()
        return server

    def _spawn_after(self, name: str) -> None:
        later = self._upcoming[self._upcoming.index(name) + 1 :] if name in self._upcoming else []
        if later and self._next is None:
            self._next = (later[0], self.spawn(self.config(later[0])))

    def _end_current(self) -> None:
        if self._current is not None:
            self._current[1].stop()
            self._current = None

    def _end_next(self) -> None:
        if self._next is not None:
            self._next[1].stop()
            self._next = None
