"""Statistics against values from tables and from scipy."""

import numpy as np
import pytest
from scipy import stats

from bench.statistics import (
    Interval,
    bootstrap_interval,
    holm,
    relative,
    sign_flip_p,
    sign_test_p,
    t_interval,
)

EFFECTS = [0.12, -0.03, 0.08, 0.2, 0.05, 0.11, 0.02, 0.09]


def test_effects_are_taken_per_seed() -> None:
    """Their mean is not the effect of the means: 50 %, not 10 %."""
    assert relative([2.0, 9.0], [1.0, 9.0]) == [1.0, 0.0]
    with pytest.raises(ValueError, match="1 and 2 runs are not paired"):
        relative([1.0], [1.0, 2.0])


def test_t_interval() -> None:
    """Five values, t = 2.776: mean 3, s = sqrt(2.5)."""
    low, high = t_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (low, high) == pytest.approx((3 - 1.9632, 3 + 1.9632), abs=1e-3)
    of_scipy = stats.ttest_1samp(EFFECTS, 0).confidence_interval(0.95)
    assert t_interval(EFFECTS) == pytest.approx(tuple(of_scipy))
    assert t_interval([1.0]) == (float("-inf"), float("inf"))


def test_bootstrap_interval() -> None:
    found = bootstrap_interval(EFFECTS)
    of_scipy = stats.bootstrap((EFFECTS,), np.mean, method="percentile", rng=np.random.default_rng(0))
    assert found == pytest.approx(tuple(of_scipy.confidence_interval), abs=0.006)
    assert found == bootstrap_interval(EFFECTS)
    assert bootstrap_interval([2.0, 2.0]) == Interval(2.0, 2.0)


def test_sign_flip_test() -> None:
    of_scipy = stats.permutation_test((EFFECTS,), np.mean, permutation_type="samples", n_resamples=10_000)
    assert sign_flip_p(EFFECTS) == of_scipy.pvalue
    assert sign_flip_p([1.0] * 12) == 2 / 2**12
    assert sign_flip_p([0.0] * 4) == 1.0
    assert sign_flip_p([1.0, -1.0]) == 1.0


def test_sign_test() -> None:
    assert sign_test_p(EFFECTS) == pytest.approx(stats.binomtest(7, 8).pvalue)
    assert sign_test_p([1.0, 1.0, -1.0, 0.0]) == 1.0
    assert sign_test_p([1.0] * 10) == 2 / 1024
    assert sign_test_p([0.0]) == 1.0


def test_holm_on_the_textbooks_example() -> None:
    adjusted = holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005})
    assert adjusted == pytest.approx({"d": 0.02, "a": 0.03, "c": 0.06, "b": 0.06})
    assert holm({"a": 0.6, "b": 0.7}) == {"a": 1.0, "b": 1.0}
