"""Prometheus: files beside SGLang's own, in its multiprocess folder, each replaced as a whole.

Separate gauges written one after another would be torn by a scrape: then bytes do not add up to the
budget.  So all values of one kind go into one file in `prometheus_client`'s own format, which is put
in place by a rename.  The scheduler writes at most every `INTERVAL` seconds and when it falls idle; a
scrape costs it nothing.
"""

from __future__ import annotations

import importlib
import os
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

INTERVAL = 0.25
"""Seconds between two writes while requests run."""

PREFIX = "sglang:hybrid_"

_VALUE = struct.Struct("dd")
"""Value and time, as `prometheus_client.mmap_dict` keeps them."""


class Sample(NamedTuple):
    """One line of /metrics."""

    kind: str
    """counter, gauge or histogram."""
    name: str
    help: str
    labels: Mapping[str, str]
    value: float
    suffix: str = ""
    """Of a histogram's lines: _bucket, _sum; a counter's is added here."""


def histogram(
    name: str,
    text: str,
    labels: Mapping[str, str],
    bounds: Sequence[float],
    counts: Sequence[int],
    total: int,
) -> Iterable[Sample]:
    """A histogram's lines; `counts` are of each bucket alone, as files keep them."""
    for bound, count in zip(bounds, counts, strict=True):
        le = "+Inf" if bound == float("inf") else str(bound)
        yield Sample("histogram", name, text, {**labels, "le": le}, count, "_bucket")
    yield Sample("histogram", name, text, labels, total, "_sum")


class _File:
    """The values of one kind.  Its lines are fixed by the first write."""

    def __init__(self, folder: str, kind: str, keys: Sequence[str]) -> None:
        prefix = "gauge_mostrecent" if kind == "gauge" else kind
        self._path = os.path.join(folder, f"{prefix}_hybrid{os.getpid()}.db")
        # prometheus_client lays the file out; later only values are put in.
        library = _library()
        layout = library.MmapedDict(self._spare)
        for key in keys:
            layout.write_value(key, 0.0, 0.0)
        layout.close()
        with open(self._spare, "rb") as file:
            image = file.read()
        self._image = bytearray(image[: struct.unpack_from("i", image)[0]])
        laid_out = library.MmapedDict.read_all_values_from_file(self._spare)
        self._places = {key: place for key, _, _, place in laid_out}

    @property
    def _spare(self) -> str:
        return self._path + ".new"

    def write(self, values: Mapping[str, float], now: float) -> None:
        for key, value in values.items():
            _VALUE.pack_into(self._image, self._places[key], value, now)
        with open(self._spare, "wb") as file:
            file.write(self._image)
        os.replace(self._spare, self._path)


class Exporter:
    """Writes the samples that `collect` gives; a folder that cannot be written costs an export, no more."""

    def __init__(
        self, folder: str, labels: Mapping[str, str], collect: Callable[[], Iterable[Sample]]
    ) -> None:
        self.failed = 0
        self._folder = folder
        self._labels = labels
        self._collect = collect
        self._files: dict[str, _File] = {}
        self._keys: list[str] = []
        """Of the samples, which are the same in the same order every time."""
        self._stale = True
        self._next = 0.0

    def changed(self) -> None:
        """Something may have changed: write, unless that was done a moment ago."""
        self._stale = True
        if time.monotonic() >= self._next:
            self.write()

    def idle(self) -> None:
        """Nothing will change for a while: write once more, since what follows the last call is not known."""
        if self._stale:
            self._stale = False
            self.write()

    def write(self) -> None:
        self._next = time.monotonic() + INTERVAL
        samples = list(self._collect())
        if not self._keys:
            self._keys = [self._key(sample) for sample in samples]
        kinds: dict[str, dict[str, float]] = {}
        for sample, key in zip(samples, self._keys, strict=True):
            kinds.setdefault(sample.kind, {})[key] = sample.value
        try:
            for kind, values in kinds.items():
                if kind not in self._files:
                    self._files[kind] = _File(self._folder, kind, list(values))
                self._files[kind].write(values, time.time())
        except OSError:
            self.failed += 1

    def _key(self, sample: Sample) -> str:
        name = PREFIX + sample.name
        labels = {**self._labels, **sample.labels}
        suffix = "_total" if sample.kind == "counter" else sample.suffix
        key = _library().mmap_key(name, name + suffix, list(labels), list(labels.values()), sample.help)
        return str(key)


def _library() -> Any:
    """Untyped, and not to be imported before SGLang has set the folder in the environment."""
    return importlib.import_module("prometheus_client.mmap_dict")
