"""SGLang's own server test kits from its wheel, driven against the hybrid memory."""

import random
import re
import unittest
from functools import partial
from typing import Any
from unittest import mock

from sglang.test import kl_multiturn_utils as kl
from sglang.test.kits import (
    abort_timeout_kit,
    basic_api_contract_kit,
    pause_generation_kit,
    radix_cache_server_kit,
)

from tests.support.park import on
from tests.support.witness import Witness

KL = 1e-5
"""Mean KL divergence of what decode said to what a prefill of the same tokens says, in nats."""


def drive(witness: Witness, mixin: type, **attributes: Any) -> None:
    """Run every test of a kit's mixin against the server."""
    fields = {"base_url": witness.server.url, "process": witness.server.process, **attributes}
    case = type(mixin.__name__, (mixin, unittest.TestCase), fields)
    names = unittest.TestLoader().getTestCaseNames(case)
    assert names
    for name in names:
        getattr(case(name), name)()


def random_ids(count: int, length: int, seed: int) -> list[list[int]]:
    """Prompts over the whole vocabulary."""
    rng = random.Random(seed)
    return [[rng.randint(300, 31_999) for _ in range(length)] for _ in range(count)]


@on("public")
def test_basic_api_contract(witness: Witness) -> None:
    drive(witness, basic_api_contract_kit.BasicAPIContractMixin)


@on("public")
def test_abort_all(witness: Witness) -> None:
    drive(witness, abort_timeout_kit.AbortAllMixin, abort_all_max_new_tokens=8000, abort_all_sleep=1.0)


@on("public")
def test_pause_generation(witness: Witness) -> None:
    drive(
        witness,
        pause_generation_kit.PauseResumeInPlaceMixin,
        pause_max_new_tokens=150,
        pause_duration=1.5,
        pause_ignore_eos=True,
    )


@on("queue")
def test_waiting_timeout(witness: Witness) -> None:
    drive(witness, abort_timeout_kit.WaitingTimeoutMixin, waiting_timeout_max_new_tokens=1000)


@on("chunk8")
def test_running_timeout(witness: Witness) -> None:
    drive(
        witness,
        abort_timeout_kit.RunningTimeoutTwoWaveMixin,
        running_timeout_sleep=1.5,
        running_timeout_max_new_tokens=4000,
    )
    # The kit accepts both ends. 64,000 tokens were asked for; the timeout lets far fewer be made.
    decoded = re.findall(r"Decode batch, #running-req: \d+, #full token: (\d+)", witness.server.log_since())
    assert max(map(int, decoded)) < 8 * 4000


@on("public", "s0-ample", "s2-ample", "d0-ample")
def test_multi_turn_logprobs(witness: Witness) -> None:
    """Three turns; what decode said equals what a cold prefill says."""
    kl.test_input_output_logprobs_match_helper(
        witness.server.url,
        "demo",
        KL,
        random_ids(4, 150, 1),
        turn_suffixes=[random_ids(4, 70, 2), random_ids(4, 33, 3)],
        assert_decode_cached_tokens=kl.make_mamba_decode_assert(witness.G) if witness.config.hybrid else None,
        max_new_tokens=40,
    )


@on("public")
def test_prefill_hits_of_branches(witness: Witness) -> None:
    """Three prefixes with three branches each, two more turns, branches interleaved."""
    prefixes = [prefix for prefix in random_ids(3, 100, 4) for _ in range(3)]
    suffixes = random_ids(9, 50, 5)
    anything = lambda *args: None  # noqa: E731 - without the plugin, hits are SGLang's own business
    hybrid = witness.config.hybrid
    kl.test_input_output_logprobs_match_prefill_cache_hit_helper(
        witness.server.url,
        "demo",
        KL,
        prefix_input_ids=prefixes,
        full_input_ids=[prefix + suffix for prefix, suffix in zip(prefixes, suffixes, strict=True)],
        turn_suffixes=[random_ids(9, 40, 6), random_ids(9, 21, 7)],
        assert_prefill_cached_tokens=kl.make_mamba_prefill_assert(witness.G) if hybrid else anything,
        assert_decode_cached_tokens=kl.make_mamba_decode_assert(witness.G) if hybrid else anything,
        branches_per_group=3,
        max_new_tokens=30,
    )


@on("public")
def test_decode_hits_of_branches(witness: Witness) -> None:
    """The same first turn three times, then branches that go on from what decode left."""
    anything = lambda *args: None  # noqa: E731
    kl.test_input_output_logprobs_match_decode_cache_hit_helper(
        witness.server.url,
        "demo",
        KL,
        [prompt for prompt in random_ids(3, 100, 8) for _ in range(3)],
        turn_suffixes=[random_ids(9, 40, 9), random_ids(9, 21, 10)],
        assert_decode_cached_tokens=kl.make_mamba_decode_assert(witness.G)
        if witness.config.hybrid
        else anything,
        branches_per_group=3,
        max_new_tokens=30,
    )


@on("public", "s0-ample", "s2-ample", "d0-ample")
def test_random_radix_tree(witness: Witness) -> None:
    """400 prompts of a random tree at once, or 60: chunks, forks, evictions, retractions."""
    random.seed(0)
    kit = radix_cache_server_kit
    tree = kit.gen_radix_tree if witness.config.name == "public" else partial(kit.gen_radix_tree, 60, 128)
    with mock.patch.object(kit, "gen_radix_tree", tree):
        kit.run_radix_attention_test(witness.server.url)
    witness.server.wait_idle()
