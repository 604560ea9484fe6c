"""One call for a whole simulation."""

from __future__ import annotations

from collections.abc import Iterable

from sglang_hybrid.simulator.outcome import Outcome
from sglang_hybrid.simulator.request import Request
from sglang_hybrid.simulator.scheduler import Scheduler
from sglang_hybrid.simulator.setting import Setting


def simulate(setting: Setting, requests: Iterable[Request], *, records: bool = False) -> Outcome:
    """Serve requests, which come in order of arrival; equal arguments give equal outcomes.

    `records` keeps one `Record` for each request that was served.  Raises `ValueError` for requests out of
    order, and for a setting that cannot serve.
    """
    return Scheduler(setting, requests, records=records).run()
