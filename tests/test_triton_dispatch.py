"""A route is chosen by name and device, and refused with a reason where it does not run."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

from sglang_hybrid import kernels
from sglang_hybrid.kernels import ROUTES, KernelError, choose
from sglang_hybrid.kernels.dispatch import operations
from sglang_hybrid.models import KINDS

OPERATIONS = tuple(operations())
"""Those of every kind of recurrent layer among them."""


@pytest.mark.parametrize("name", ["auto", "torch"])
def test_a_cpu_gets_the_torch_route(name: str) -> None:
    route = choose(name, "cpu")
    assert route.name == "torch" and route.state_update is kernels.state_update
    assert route.copy_checkpoints is kernels.copy_checkpoints


@pytest.mark.parametrize("name", ["auto", "triton"])
def test_cuda_gets_triton(name: str) -> None:
    route = choose(name, "cuda:0")
    assert route.name == "triton"
    assert {name for kind in KINDS.values() for name in (kind.step, kind.scan) if name} < set(OPERATIONS)
    for operation in OPERATIONS:
        function, reference = getattr(route, operation), getattr(kernels, operation)
        assert function.__module__.startswith("sglang_hybrid.kernels.triton_")
        assert inspect.signature(function) == inspect.signature(reference), operation


def test_torch_may_be_asked_for_on_cuda() -> None:
    assert choose("torch", "cuda").conv_update is kernels.conv_update


def test_triton_needs_a_device_or_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(KernelError, match="on a CUDA device, not on cpu: use 'torch', or set TRITON"):
        choose("triton", "cpu")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose("triton", "cpu").name == "triton"
    assert choose("auto", "cpu").name == "torch"


def test_flashinfer_needs_a_device() -> None:
    with pytest.raises(KernelError, match="'flashinfer' run on a CUDA device, not on cpu: use 'torch'"):
        choose("flashinfer", "cpu")


def test_an_unknown_route_is_refused() -> None:
    with pytest.raises(KernelError, match="kernels are 'cuda', needs one of auto, triton, flashinfer, torch"):
        choose("cuda", "cuda")
    assert ROUTES == ("auto", "triton", "flashinfer", "torch")


def test_triton_is_not_imported_before_it_is_chosen() -> None:
    """A CPU without Triton serves; asking for Triton there says what is missing."""
    code = """
import importlib.abc, importlib.util, sys
find = importlib.util.find_spec
class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Blocker())
importlib.util.find_spec = lambda name, *rest: None if name == "triton" else find(name, *rest)
from sglang_hybrid.kernels import KernelError, choose
assert choose("auto", "cpu").name == "torch"
try:
    choose("triton", "cuda")
except KernelError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "need the package triton, which is not installed; use 'torch'" in done.stdout
