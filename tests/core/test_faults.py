"""The property run notices a broken guard: each fault, planted alone, turns it red."""

import pytest

from sglang_hybrid.pools.pages import IntegrityError
from sglang_hybrid.radix.live_state import OutOfState
from tests.core.content import ContentError
from tests.core.faults import FAULTS
from tests.core.test_property import replay

HISTORIES = 120
"""Histories (of 500 operations) within which a fault must be noticed; most are within the first."""


def run(organization: str) -> None:
    for seed in range(HISTORIES):
        replay(organization, seed)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_turns_the_property_run_red(name: str) -> None:
    organization, plant = FAULTS[name]
    with plant(), pytest.raises((IntegrityError, ContentError, OutOfState, AssertionError)) as caught:
        run(organization)
    assert caught.value.__notes__, "the failure does not say how to repeat it"


def test_at_least_eight_faults_are_planted() -> None:
    assert len(FAULTS) >= 8
