"""Traffic that is read: a Mooncake trace, or a profile by name, in words or from a file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from sglang_hybrid.simulator.request import Request
from sglang_hybrid.simulator.traffic import LIMITS, PROFILES, Profile, TrafficError

HASHED_TOKENS = 512
"""Tokens behind one of a Mooncake trace's ids."""

LEAST_REQUESTS = 60
"""A shorter trace says too little."""

FIGURES = tuple(name for name, _, _ in LIMITS)
WHOLE = ("contexts", "context", "limit")
"""Of a profile: all that can be set, and those that are whole numbers."""


@dataclass(frozen=True)
class Trace:
    """Requests of a Mooncake trace.  Seeds are windows of it: the k-th begins at another request."""

    name: str
    all: tuple[Request, ...]
    skipped: int = 0
    """Requests longer than the limit."""
    rate: float = 0.0

    def at_rate(self, rate: float) -> Trace:
        stretch = self.rate / rate
        return replace(self, rate=rate, all=tuple(replace(one, at=one.at * stretch) for one in self.all))

    def unshared(self) -> None:
        return None

    def requests(self, seed: int, count: int) -> list[Request]:
        """Windows are spread over the trace by the golden ratio, so that few of them overlap."""
        spare = max(0, len(self.all) - count)
        start = int(spare * (seed * (math.sqrt(5) - 1) / 2 % 1))
        window = self.all[start : start + count]
        return [replace(one, at=one.at - window[0].at) for one in window]

    def describe(self) -> str:
        mean_in = sum(one.prompt for one in self.all) / len(self.all)
        mean_out = sum(one.new for one in self.all) / len(self.all)
        left = f", {self.skipped} longer ones left out" if self.skipped else ""
        return (
            f"{self.name}: {len(self.all)} requests at {self.rate:.3g} requests/s, {mean_in:.0f} tokens in, "
            f"{mean_out:.0f} out{left}"
        )


def read_trace(path: Path, limit: int) -> Trace:
    """A Mooncake trace, requests of up to `limit` tokens.  Raises `TrafficError`."""
    requests, skipped = [], 0
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                request = _trace_request(line, f"{path}, line {number}")
                if request.prompt + request.new <= limit:
                    requests.append(request)
                else:
                    skipped += 1
    except (OSError, UnicodeDecodeError) as error:
        raise TrafficError(f"{path} cannot be read ({error}): give a trace of JSON lines") from error
    if len(requests) < LEAST_REQUESTS:
        raise TrafficError(
            f"{path} has {len(requests)} requests of up to {limit} tokens: give a trace of {LEAST_REQUESTS} "
            "or more, or a profile"
        )
    requests.sort(key=lambda request: request.at)
    seconds = requests[-1].at - requests[0].at
    if seconds <= 0:
        raise TrafficError(f"all requests of {path} arrive at once: give a trace with timestamps")
    return Trace(path.name, tuple(requests), skipped, len(requests) / seconds)


def _trace_request(line: str, where: str) -> Request:
    try:
        row = json.loads(line)
        prompt, new = int(row["input_length"]), max(1, int(row["output_length"]))
        starts = range(0, prompt, HASHED_TOKENS)
        segments = tuple(
            (("hash", one), min(HASHED_TOKENS, prompt - start)) for one, start in zip(row["hash_ids"], starts)
        )
        if sum(tokens for _, tokens in segments) != prompt:
            raise ValueError(f"{len(row['hash_ids'])} hash_ids for {prompt} tokens")
        return Request(at=row["timestamp"] / 1000, segments=segments, new=new)
    except (KeyError, TypeError, ValueError) as error:
        raise TrafficError(
            f"{where} is no request of a Mooncake trace ({error}): it needs timestamp, input_length, "
            "output_length and one of hash_ids for each 512 tokens"
        ) from error


def read_traffic(text: str) -> Profile | Trace:
    """A profile's name, `key=value,...`, both, a JSON object, a .json file of one, or a trace's path.

    Raises `TrafficError`.
    """
    if text.startswith("{"):
        return _from_json(text, "--traffic")
    path = Path(text)
    if path.suffix == ".json" and path.is_file():
        return _from_json(path.read_text(encoding="utf-8"), text)
    first, *rest = text.split(",")
    if "=" in first:
        first, rest = "", [first, *rest]
    if not first or first in PROFILES:
        values = dict(pair.partition("=")[::2] for pair in rest)
        return _profile(PROFILES[first] if first else Profile(), values, "--traffic")
    if not path.is_file():
        raise TrafficError(
            f"--traffic {text} is neither a file nor a profile: use {', '.join(PROFILES)}, key=value,... or "
            "a Mooncake trace"
        )
    return read_trace(path, Profile.limit)


def _from_json(text: str, where: str) -> Profile:
    try:
        values = json.loads(text)
    except ValueError as error:
        raise TrafficError(f"{where} is no JSON object ({error})") from error
    base = values.pop("profile", None) if isinstance(values, dict) else None
    if not isinstance(values, dict) or not (base is None or base in PROFILES):
        raise TrafficError(
            f"{where} is no object of a profile's figures, with `profile` one of {', '.join(PROFILES)}, "
            "or none"
        )
    return _profile(PROFILES[base] if base else Profile(), values, where)


def _profile(base: Profile, values: Mapping[str, object], where: str) -> Profile:
    given: dict[str, float] = {}
    for name, value in values.items():
        if name not in FIGURES:
            raise TrafficError(f"{where}: a profile has no {name!r}: use {', '.join(FIGURES)}")
        kind = int if name in WHOLE else float
        try:
            given[name] = kind(str(value))
        except ValueError as error:
            whole = "whole number" if name in WHOLE else "number"
            raise TrafficError(f"{where}: {name}={value} is no {whole}") from error
    if not all(math.isfinite(one) for one in given.values()):
        raise TrafficError(f"{where}: the figures of a profile are finite numbers")
    return replace(base, **given)  # type: ignore[arg-type]  # whole where the field is
