"""A client that knows what must come back: output as cold, hits by the formula, pools balanced."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from tests.support.balance import Pools, check_base, pools
from tests.support.cold import Cold, equal_cold
from tests.support.expect import NO_KEY, DenseGrid, Key
from tests.support.reply import Reply
from tests.support.server import LiveServer
from tests.support.server_config import ServerConfig


@dataclass
class Witness:
    """Sends requests to `server` and asserts of each reply what the case conventions promise.

    I1 a hit is a multiple of the grid, I2 never above the formula, I3 below the prompt's length, I4 zero for
    prompts of at most one grid step, I5 output = cold. With `exact` the hit equals the formula, which holds
    while nothing is evicted.
    """

    server: LiveServer
    cold: Cold
    config: ServerConfig
    exact: bool
    expected: DenseGrid = field(init=False)

    def __post_init__(self) -> None:
        self.expected = self.config.expected()

    @property
    def G(self) -> int:
        """The grid, in tokens."""
        return self.config.grid

    # -- asking -----------------------------------------------------------------------------------

    def ask(
        self,
        prompt: Sequence[int],
        m: int = 1,
        *,
        key: Key = NO_KEY,
        exact: bool | None = None,
        start: int | None = None,
        **extra: Any,
    ) -> Reply:
        """One request alone: checked, then remembered as committed. `start` is `logprob_start_len`."""
        reply = self.server.generate(prompt, m, **key_fields(key), **start_field(start), **extra)
        self.check(reply, prompt, m, key=key, exact=exact, start=start)
        return reply

    def together(
        self, prompts: Sequence[Sequence[int]], m: int = 1, *, keys: Sequence[Key] | None = None, **extra: Any
    ) -> list[Reply]:
        """Several prompts in one HTTP request.

        Whether one sees what another just committed depends on the batches they land in, so only bounds are
        checked; the bound of each counts the others as committed.
        """
        keys = keys or [NO_KEY] * len(prompts)
        fields = {
            "extra_key": [key[0] or "" for key in keys],
            "cache_salt": [key[1] or "" for key in keys],
        }
        body = {name: values for name, values in fields.items() if any(values)}
        replies = self.server.generate_batch(prompts, m, **body, **extra)
        for prompt, reply, key in zip(prompts, replies, keys, strict=True):
            self.expected.commit(prompt, reply.ids, key)
        for prompt, reply, key in zip(prompts, replies, keys, strict=True):
            self.check(reply, prompt, m, key=key, exact=False, commit=False)
        return replies

    def submit(self, prompt: Sequence[int], m: int = 1, *, key: Key = NO_KEY, **extra: Any) -> Future[Reply]:
        """One request in the background; the caller checks its reply."""
        return self.server.submit(prompt, m, **key_fields(key), **extra)

    def begin(self, prompt: Sequence[int], m: int, **extra: Any) -> Future[Reply]:
        """One request in the background that already runs; the caller checks its reply."""
        return self.server.begin(prompt, m, **extra)

    # -- checking ---------------------------------------------------------------------------------

    def check(
        self,
        reply: Reply,
        prompt: Sequence[int],
        m: int,
        *,
        key: Key = NO_KEY,
        exact: bool | None = None,
        start: int | None = None,
        commit: bool = True,
    ) -> None:
        """Assert I1 to I5 of one finished request, and remember it as committed."""
        what = f"prompt of {len(prompt)} tokens, first {list(prompt[:3])}, key {key}"
        assert reply.reason == "length", f"{what}: {reply.reason} {reply.message}"
        assert reply.prompt_tokens == len(prompt), what
        formula = self.expected.hit(prompt, key, start)
        self.check_bounds(reply.cached, formula, prompt, what)
        self.check_reuse(reply, what)
        if self.config.hybrid and (self.exact if exact is None else exact):
            assert reply.cached == formula, f"{what}: hit {reply.cached}, the formula says {formula}"
        self.check_output(reply, prompt, m, what)
        if commit:
            self.expected.commit(prompt, reply.ids, key)

    def check_bounds(self, cached: int, formula: int, prompt: Sequence[int], what: str) -> None:
        """I1 to I4 of a hit. Without the plugin there is no grid, and SGLang may match to the token."""
        if not self.config.hybrid:
            assert cached < len(prompt)
            return
        assert cached % self.G == 0, f"{what}: a hit of {cached} is off the grid"
        assert cached <= formula, f"{what}: hit {cached} is above what was ever committed ({formula})"
        assert cached <= len(prompt) - 1, f"{what}: hit {cached} leaves nothing to compute"
        assert len(prompt) > self.G or cached == 0, f"{what}: a prompt of one grid step hit {cached}"

    def check_reuse(self, reply: Reply, what: str) -> None:
        """The reply's own account of its reuse agrees with itself and with the hit."""
        if not self.config.hybrid:
            return
        first = reply.meta["hybrid"][0]
        assert first["j_adopt"] == reply.cached <= first["attention"] <= first["r_max"], f"{what}: {first}"
        assert first["gap_r"] == first["r_max"] - reply.cached, f"{what}: {first}"
        assert first["gap_r"] == 0 or first["lost_tokens"] == first["gap_r"], f"{what}: {first}"

    def check_output(self, reply: Reply, prompt: Sequence[int], m: int, what: str = "output") -> None:
        """I5: ids and logprobs as in a cold run."""
        equal_cold(reply, self.cold.ask(self.config.model, prompt, m), what)

    def equal(self, reply: Reply, cold: Reply) -> None:
        """I5 for a request whose cold run the caller has made."""
        equal_cold(reply, cold)

    def hit_is(self, reply: Reply, tokens: int) -> None:
        """Assert a hit of so many tokens (a test's own right value; nothing to assert without the plugin)."""
        if self.config.hybrid:
            assert reply.cached == tokens, f"hit {reply.cached}, must be {tokens}"

    # -- the server's state -----------------------------------------------------------------------

    def pools(self) -> Pools | None:
        """The plugin's counters on the drained server; None without the plugin."""
        self.server.wait_idle()
        return pools(self.server) if self.config.hybrid else None

    def counter(self, name: str) -> int:
        """One of the plugin's counters since start (`count_NAME` of `/server_info`)."""
        now = self.pools()
        return 0 if now is None else int(now.raw[f"count_{name}"])

    def cached_exactly(self) -> None:
        """Assert that the cache holds each committed boundary once: one checkpoint, nothing twice."""
        now = self.pools()
        if now is not None:
            nodes = self.expected.nodes()
            assert now.checkpoints == nodes, (
                f"{now.checkpoints} checkpoints for {nodes} boundaries: {now.raw}"
            )

    def evicted(self) -> None:
        """Assert that something was evicted: otherwise a test of pressure proves nothing."""
        now = self.pools()
        if now is not None:
            assert now.checkpoints < self.expected.nodes(), f"INCONCLUSIVE: nothing was evicted: {now.raw}"

    def flush(self) -> None:
        """Empty the server's cache and what is expected of it."""
        self.server.flush()
        self.expected.clear()

    def base(self) -> None:
        """BASE; and if decode steps are captured, none went another way."""
        check_base(self.server, self.config.hybrid)
        if self.config.graphs:
            eager = [size for size, graph in self.server.decode_batches(0) if not graph]
            assert not eager, f"decode batches of {eager} were not replayed"


def key_fields(key: Key) -> dict[str, str]:
    """Body fields of a key."""
    return {name: value for name, value in zip(("extra_key", "cache_salt"), key, strict=True) if value}


def start_field(start: int | None) -> dict[str, int]:
    """Body field of `logprob_start_len`."""
    return {} if start is None else {"logprob_start_len": start}
