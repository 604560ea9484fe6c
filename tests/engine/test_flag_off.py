"""With the flag off the plugin changes nothing: the same server as without it."""

from dataclasses import replace
from typing import Any

from tests.support.cold import equal_cold
from tests.support.configs import CONFIGS
from tests.support.park import ServerPark
from tests.support.reply import Reply
from tests.support.server import LiveServer
from tests.support.tokens import T

PLATFORM = "sglang_hybrid_cpu"
"""SGLANG_PLUGINS names what is loaded; with the platform alone the CPU is served and the plugin is gone."""

OWN_PREFIX = "hybrid_"
MEMORY = ("--mem-fraction-static", "0.2")
"""Without it SGLang takes what is free at that moment, and others start servers too."""
SNAPSHOTS = ("--mamba-radix-cache-strategy", "extra_buffer", "--mamba-track-interval", "64")
"""Stock's own choice on a GPU; the platform's default, no_buffer, has its server in `test_platform`."""
BRANCH = 384
"""Last chunk of 64 in the 400 tokens that some prompts of the conversation share."""
OF_THE_PROCESS = {
    "port",
    "nccl_port",
    "startup_time",
    "launch_command",
    "internal_states",
    "zmq_to_scheduler",
}
"""Differ between any two starts."""

OF_THE_MOMENT = {"last_gen_throughput", "memory_usage", "step_time_dict", "startup_time"}


def conversation(server: LiveServer) -> list[Reply]:
    """Hits of every kind, batches, decode, keys."""
    replies = []
    for prompt in (T(1, 43), T(1, 43), T(1, 20) + T(2, 30), T(3, 700), T(3, 400) + T(4, 9), third(5)):
        replies.append(server.generate(prompt, 12, top_logprobs_num=2))
    turn = [*T(1, 43), *replies[0].ids, *T(5, 4)]
    replies.append(server.generate(turn, 6))
    replies += server.generate_batch([T(6, 40), T(6, 40) + T(7, 5), T(8, 3)], 8, extra_key=["a", "b", "a"])
    return replies


def third(seed: int) -> list[int]:
    """It finds the state that the second of three prompts left where it parted from the first."""
    return [*T(3, 400), *T(seed, 30)]


def settings(info: dict[str, Any]) -> dict[str, Any]:
    """/server_info without what differs between any two starts."""
    kept = {name: value for name, value in info.items() if name not in OF_THE_PROCESS}
    (state,) = info["internal_states"]
    kept["state"] = {
        name: value for name, value in state.items() if name not in OF_THE_MOMENT | OF_THE_PROCESS
    }
    return kept


def test_flag_off_equals_uninstalled(park: ServerPark) -> None:
    stock = CONFIGS["g8"].without_plugin()
    off = replace(stock, name="flag-off", flags=(*stock.flags, *MEMORY, *SNAPSHOTS))
    gone = replace(off, name="uninstalled", env={"SGLANG_PLUGINS": PLATFORM})
    # Started together: most of a start waits for one core.
    servers = [park.spawn(off), park.spawn(gone)]
    try:
        for server in servers:
            server.wait_ready()
        with_plugin, without = (conversation(server) for server in servers)
        for a, b in zip(with_plugin, without, strict=True):
            assert (a.ids, a.logprobs, a.gaps, a.cached) == (b.ids, b.logprobs, b.gaps, b.cached)
        assert any(reply.cached for reply in with_plugin)
        for server in servers:
            hit = server.generate(third(6), 100, top_logprobs_num=2)
            turn = [*third(6), *hit.ids, *T(7, 4)]
            later = server.generate(turn, 8, top_logprobs_num=2)
            assert hit.cached == BRANCH and later.cached == 512, "a snapshot of prefill, one of decode"
            server.flush()
            equal_cold(hit, server.generate(third(6), 100, top_logprobs_num=2))
            server.flush()
            equal_cold(later, server.generate(turn, 8, top_logprobs_num=2))

        info_off, info_gone = (settings(server.info()) for server in servers)
        own = [name for name in info_off if name not in info_gone]
        assert "hybrid_mem" in own
        for name in own:
            assert name.startswith(OWN_PREFIX)
            assert info_off.pop(name) in (None, False)
            assert info_off["state"].pop(name, None) in (None, False)
        assert info_off == info_gone
    finally:
        for server in servers:
            server.stop()
