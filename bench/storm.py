"""Clients that behave badly: they share prefixes, mix keys, abort, go away, flush, and ask too much."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import requests

VOCABULARY = 500
STEMS = 6
CLIENTS = 8
WAVE = 100
"""Requests between two looks at a drained server."""
TIMEOUT = 180.0
KEYS: tuple[dict[str, str], ...] = (
    {},
    {},
    {"extra_key": "a"},
    {"extra_key": "b"},
    {"cache_salt": "a"},
    {"extra_key": "ab", "cache_salt": "c"},
    {"extra_key": "a", "cache_salt": "bc"},
)
"""Two of them are equal when joined into one string."""


@dataclass(frozen=True)
class Answer:
    """A request that ran to its end."""

    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached: int


@dataclass
class Storm:
    """Everything that clients did to one server, and what came of it.  `seed` fixes what they choose."""

    url: str
    seed: int
    grid: int
    most_tokens: int
    """Prompt and answer together that the server holds; some prompts are longer."""
    done: Counter[str] = field(default_factory=Counter)
    answers: list[Answer] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        chance = random.Random(self.seed)
        self._stems = [_tokens(chance, self.most_tokens) for _ in range(STEMS)]
        self._lock = threading.Lock()

    def run(self, count: int) -> None:
        """`count` requests in waves; the server is drained, looked at and sometimes flushed after each."""
        sent = 0
        while sent < count and not self.wrong:
            wave = min(WAVE, count - sent)
            workers = [
                threading.Thread(target=self._client, args=(sent, wave, number)) for number in range(CLIENTS)
            ]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            sent += wave
            self.check_drained()
            if random.Random(f"{self.seed}/{sent}").random() < 0.5:
                self.flush()

    # -- one client -------------------------------------------------------------------------

    def _client(self, first: int, count: int, number: int) -> None:
        for index in range(first + number, first + count, CLIENTS):
            try:
                self._request(index, random.Random(f"{self.seed}/{index}"))
            except Exception as error:  # a client's thread must not die silently
                self._fault(f"request {index}: {error!r}")
                return

    def _request(self, index: int, chance: random.Random) -> None:
        prompt = self._prompt(chance)
        new = 1 + chance.randrange(self.grid + self.grid // 2)
        rid = f"storm-{self.seed}-{index}-"
        body: dict[str, Any] = {
            "input_ids": prompt,
            "rid": rid,
            "sampling_params": {"temperature": 0, "max_new_tokens": new, "ignore_eos": True},
            "return_logprob": True,
            **chance.choice(KEYS),
        }
        what = chance.choices(("answer", "abort", "drop", "flush", "abort_all"), (70, 14, 12, 3, 1))[0]
        self._count(what)
        if what == "drop":
            self._drop(body, chance)
            return
        timer: threading.Timer | None = None
        if what != "answer":
            timer = threading.Timer(chance.random() * 0.3, self._disturb, (what, rid))
            timer.start()
        self._finish(requests.post(f"{self.url}/generate", json=body, timeout=TIMEOUT), body)
        if timer is not None:
            timer.join()

    def good(self, index: int) -> None:
        """One request that nothing disturbs."""
        chance = random.Random(f"{self.seed}/good/{index}")
        body: dict[str, Any] = {
            "input_ids": self._prompt(chance),
            "sampling_params": {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True},
            "return_logprob": True,
        }
        try:
            self._finish(requests.post(f"{self.url}/generate", json=body, timeout=TIMEOUT), body)
        except requests.RequestException as error:
            self._fault(f"good request {index}: {error!r}")

    def _prompt(self, chance: random.Random) -> list[int]:
        stem = chance.choice(self._stems)
        shared = chance.randrange(self.most_tokens)
        tail = _tokens(chance, 1 + chance.randrange(self.grid))
        prompt = stem[:shared] + tail
        if chance.random() < 0.03:
            return (prompt + stem)[: self.most_tokens + chance.randrange(4)]  # at the limit, and beyond it
        return prompt[: max(1, self.most_tokens - 8 - chance.randrange(self.grid))]

    def _disturb(self, what: str, rid: str) -> None:
        try:
            if what == "flush":
                # A busy server refuses.
                requests.post(f"{self.url}/flush_cache", params={"timeout": 0}, timeout=TIMEOUT)
                return
            body = {"abort_all": True} if what == "abort_all" else {"rid": rid}
            answer = requests.post(f"{self.url}/abort_request", json=body, timeout=TIMEOUT)
            if answer.status_code != 200:
                self._fault(f"abort of {rid}: {answer.status_code} {answer.text[:200]}")
        except requests.RequestException as error:
            self._fault(f"{what}: {error!r}")

    def _drop(self, body: dict[str, Any], chance: random.Random) -> None:
        """Go away after some parts of a stream, or before the first."""
        with requests.post(
            f"{self.url}/generate", json={**body, "stream": True}, stream=True, timeout=TIMEOUT
        ) as answer:
            lines = answer.iter_lines()
            for _ in range(chance.randrange(4)):
                if next(lines, None) is None:
                    return

    def _finish(self, answer: requests.Response, body: dict[str, Any]) -> None:
        if answer.status_code != 200:
            # An abort answers by its own status too; a server's fault is neither.
            known = 400 <= answer.status_code < 500 or "bort" in answer.text
            self._count("refused" if known else "failed")
            if not known or "Out of memory" in answer.text:
                self._fault(f"{answer.status_code} {answer.text[:300]} for {len(body['input_ids'])} tokens")
            return
        reply = answer.json()
        meta = reply["meta_info"]
        reason = meta["finish_reason"]
        if reason["type"] == "abort":
            self._count("aborted")
            if "emory" in reason.get("message", ""):
                self._fault(f"aborted for memory: {reason}")
            return
        self._count("answered")
        self._count("cached_tokens", meta["cached_tokens"])
        self._count("hits", meta["cached_tokens"] > 0)
        logprobs = tuple(entry[0] for entry in meta["output_token_logprobs"])
        with self._lock:
            self.answers.append(
                Answer(tuple(body["input_ids"]), tuple(reply["output_ids"]), logprobs, meta["cached_tokens"])
            )

    # -- the server -------------------------------------------------------------------------

    def memory(self) -> dict[str, Any]:
        """The plugin's counters."""
        info = requests.get(f"{self.url}/server_info", timeout=TIMEOUT).json()
        found: dict[str, Any] = info["internal_states"][0]["hybrid"]
        return found

    def check_drained(self) -> None:
        """Nobody holds, pins or retains anything; every page is free or cached."""
        deadline = time.monotonic() + 60
        while True:
            now = self.memory()
            bad = {name: now[name] for name in _ZERO if now[name]}
            if now["pages_free"] + now["pages_cached"] != now["pages_total"]:
                bad["pages"] = (now["pages_free"], now["pages_cached"], now["pages_total"])
            if not bad:
                return
            if time.monotonic() > deadline:
                self._fault(f"not at its baseline after a drain: {bad}")
                return
            time.sleep(0.1)

    def flush(self) -> None:
        """Empty the drained server; all pages must be free then."""
        answer = requests.post(f"{self.url}/flush_cache", params={"timeout": 60}, timeout=TIMEOUT)
        now = self.memory()
        self._count("flushed")
        if answer.status_code != 200 or now["pages_free"] != now["pages_total"]:
            self._fault(f"flush: {answer.status_code}, {now['pages_free']} of {now['pages_total']} free")

    def _count(self, what: str, number: int = 1) -> None:
        with self._lock:
            self.done[what] += number

    def _fault(self, what: str) -> None:
        with self._lock:
            self.wrong.append(what)


_ZERO = (
    "pages_held",
    "pages_reclaiming",
    "protected_tokens",
    "requests_running",
    "pins",
    "checkpoints_retained",
)


def _tokens(chance: random.Random, count: int) -> list[int]:
    return [5 + chance.randrange(VOCABULARY) for _ in range(count)]


TOLERANCE = 1e-3
NEAR_TIE = 0.05


def difference(answer: Answer, cold: dict[str, Any]) -> str | None:
    """None when the answer equals a cold run (`top_logprobs_num` 2); what follows a near tie may differ."""
    meta = cold["meta_info"]
    for place, (got, want) in enumerate(zip(answer.ids, cold["output_ids"], strict=True)):
        best, second = (entry[0] for entry in meta["output_top_logprobs"][place][:2])
        off = abs(answer.logprobs[place] - meta["output_token_logprobs"][place][0])
        if got != want and best - second < NEAR_TIE and off <= NEAR_TIE + TOLERANCE:
            return None
        if got != want or off > TOLERANCE:
            return f"token {place} is {got} ({off:.4f} off), cold {want}, after a hit of {answer.cached}"
    return None


def sample(answers: Sequence[Answer], share: float, seed: int) -> list[Answer]:
    """A part of the answers, at least one; without those to the same question."""
    once = {(one.prompt, len(one.ids)): one for one in answers}
    count = min(len(once), max(1, int(share * len(answers))))
    return random.Random(seed).sample(list(once.values()), count)
