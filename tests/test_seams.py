"""A start ends when a hook did not take."""

import inspect
import pkgutil
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.support.arguments import kept_process, parse

pytest.importorskip("sglang")

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_hybrid.engine import hooks, seams, served
from sglang_hybrid.engine.hooks import HOOKS, Hook
from sglang_hybrid.engine.seams import SeamError
from sglang_hybrid.models import RecurrentKind


@pytest.fixture(autouse=True)
def _kept() -> Iterator[None]:
    with kept_process():
        parse("--model-path", "none")  # loads plugins
        yield
        seams.clear_failures()


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module of somebody else's, with one function to hook; the registry forgets it afterwards."""
    module = types.ModuleType("toy_target")
    module.twice = lambda value, *, plus=0: 2 * value + plus  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "toy_target", module)
    monkeypatch.setattr(HookRegistry, "_hooks", HookRegistry._hooks.copy())
    monkeypatch.setattr(HookRegistry, "_patched", set(HookRegistry._patched))
    return module


def hooked(toy: types.ModuleType, function: str, kind: HookType) -> Hook:
    hook = Hook("toy_target.twice", function, kind)
    HookRegistry.register(hook.target, hooks.entry(hook), hook.kind)
    HookRegistry.apply_hooks()
    return hook


def add_hundred(original: Callable[..., int], *args: Any, **kwargs: Any) -> int:
    return original(*args, **kwargs) + 100


def add_thousand(result: int, *args: Any, **kwargs: Any) -> int:
    return result + 1000


# -- hooks ----------------------------------------------------------------------------------


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.target.rsplit(".", 1)[-1])
def test_hook_has_its_function(hook: Hook) -> None:
    function = pkgutil.resolve_name(hook.function)
    first = {HookType.AROUND: "original", HookType.AFTER: "result"}.get(hook.kind)
    if first is not None:
        assert next(iter(inspect.signature(function).parameters)) == first


@pytest.mark.parametrize("kind", [HookType.AROUND, HookType.AFTER])
def test_off_passes_through(toy: types.ModuleType, kind: HookType) -> None:
    """The adapter is not even imported: this one does not exist."""
    hook = hooked(toy, "no_such_module:function", kind)
    assert toy.twice(3, plus=1) == 7
    assert hooks.is_live(hook)


@pytest.mark.parametrize(
    ("function", "kind", "result"),
    [("add_hundred", HookType.AROUND, 107), ("add_thousand", HookType.AFTER, 1007)],
)
def test_on_reaches_the_adapter(
    toy: types.ModuleType, monkeypatch: pytest.MonkeyPatch, function: str, kind: HookType, result: int
) -> None:
    hooked(toy, f"{__name__}:{function}", kind)
    monkeypatch.setattr(hooks, "published_on", lambda: True)
    assert toy.twice(3, plus=1) == result


def test_live_means_reached(toy: types.ModuleType) -> None:
    hook = Hook("toy_target.twice", f"{__name__}:add_hundred", HookType.AROUND)
    assert not hooks.is_live(hook)
    hooked(toy, hook.function, hook.kind)
    assert hooks.is_live(hook)
    under = toy.twice
    toy.twice = lambda value: value  # another plugin assigns over it
    assert not hooks.is_live(hook)
    toy.twice = HookRegistryWrapped(under)  # another plugin wraps it and calls on
    assert hooks.is_live(hook)


class HookRegistryWrapped:
    """A wrapper as `functools.wraps` leaves it."""

    def __init__(self, wrapped: Callable[..., Any]) -> None:
        self.__wrapped__ = wrapped


def test_a_recorded_failure_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    seams.record_failure("tree factory", ValueError("'hybrid_grid' is already registered"))
    with pytest.raises(SeamError, match="tree factory: ValueError: 'hybrid_grid' is already registered"):
        seams.check_parent()
    monkeypatch.setattr("sglang_hybrid.engine.args.published_organization", lambda: "S1")
    with pytest.raises(SeamError, match="already registered"):
        hooks.published_on()


def test_arguments_resolved_without_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_hybrid.engine.args import HybridServerArgs

    record = HybridServerArgs(model_path="none", hybrid_mem="S1")
    monkeypatch.setattr("sglang.srt.runtime_context.get_server_args", lambda: record)
    with pytest.raises(SeamError, match=r"expected hybrid_grid, found None: .* before load_plugins"):
        hooks.published_on()


def test_a_failure_is_nobodys_business_when_off() -> None:
    seams.record_failure("tree factory", ValueError("taken"))
    assert hooks.published_on() is False


# -- state backends -------------------------------------------------------------------------


class Stock:
    pass


class Ours(Stock):
    pass


class Layer(torch.nn.Module):
    pass


class Decoder(torch.nn.Module):
    def __init__(self, layer_idx: int, mixer: torch.nn.Module) -> None:
        super().__init__()
        self.layer_idx, self.mixer = layer_idx, mixer


def runner_of(recurrent: list[int], mixers: list[torch.nn.Module], monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model runner whose config names these recurrent layers, and whose model has these mixers."""
    config = types.SimpleNamespace(mamba2_cache_params=types.SimpleNamespace(layers=recurrent))
    monkeypatch.setattr("sglang.srt.configs.hybrid_arch.mambaish_config", lambda model: config)
    model = torch.nn.Sequential(*(Decoder(index, mixer) for index, mixer in enumerate(mixers)))
    return types.SimpleNamespace(model=model, model_config=None)


@pytest.fixture
def backends(toy: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    toy.Stock = Stock  # type: ignore[attr-defined]
    kind = RecurrentKind(
        "toy", "toy_target:Stock", f"{__name__}:Ours", (f"{__name__}:Layer",), "state_update", "paged_scan"
    )
    monkeypatch.setattr(hooks, "KINDS", {"toy": kind})
    monkeypatch.setattr(served, "kind_of", lambda model: kind)
    return toy


def test_our_backend_is_built_and_the_name_restored(backends: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrapper(runner: Any, full: Any) -> Any:
        return types.SimpleNamespace(linear_attn_backend=backends.Stock(), full=full)

    runner = runner_of([1], [torch.nn.Identity(), Layer()], monkeypatch)
    built = hooks.build_attention(wrapper, runner, "full")
    assert type(built.linear_attn_backend) is Ours
    assert built.full == "full"
    assert backends.Stock is Stock


def test_another_backend_ends_the_start(backends: Any) -> None:
    with pytest.raises(SeamError, match=r"expected a state backend among \['Ours'\], found Stock"):
        hooks.build_attention(lambda *_: types.SimpleNamespace(linear_attn_backend=Stock()), None, None)
    with pytest.raises(ZeroDivisionError):
        hooks.build_attention(lambda *_: 1 // 0, None, None)
    assert backends.Stock is Stock


@pytest.mark.parametrize(
    ("recurrent", "mixers", "found"),
    [
        ([0, 1], [Layer(), torch.nn.Identity()], r"layers \[0, 1\], found them in layers \[0\]"),
        ([0], [Layer(), Layer()], r"layers \[0\], found them in layers \[0, 1\]"),
        ([1], [Layer(), torch.nn.Identity()], r"layers \[1\], found them in layers \[0\]"),
    ],
)
def test_a_layer_past_our_backend_ends_the_start(
    recurrent: list[int],
    mixers: list[torch.nn.Module],
    found: str,
    backends: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each recurrent layer of the loaded model must hold a module that calls the backend."""
    runner = runner_of(recurrent, mixers, monkeypatch)
    with pytest.raises(SeamError, match=f"Sequential: expected a Layer in each of the recurrent {found}"):
        hooks.build_attention(
            lambda *_: types.SimpleNamespace(linear_attn_backend=backends.Stock()), runner, None
        )
