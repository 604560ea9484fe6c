"""Triton kernels equal their float64 references and touch nothing else, case by case.

The tables live in `tests.support.triton_*`.  Everywhere they run in Triton's interpreter, in one process;
where a GPU is visible they run there too.
"""

from __future__ import annotations

import pytest
import torch

from tests.support.interpreted import PASSED, verdicts
from tests.support.triton_tables import cases

CASES = cases()


@pytest.mark.parametrize("name", CASES)
def test_in_the_interpreter(name: str) -> None:
    verdict = verdicts("tests.support.triton_tables")[name]
    assert verdict == PASSED, verdict


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible")
@pytest.mark.parametrize("name", CASES if torch.cuda.is_available() else [*CASES][:1])
def test_on_the_gpu(name: str) -> None:
    CASES[name]("cuda")
