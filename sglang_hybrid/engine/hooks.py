"""The one list of names of SGLang that we wrap or replace; registering and checking both read it.

A wrapped function first asks whether the hybrid memory is on in this process and otherwise calls the
original with its arguments untouched; only when it is on is the adapter behind it imported.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_hybrid.models import KINDS

SCHEDULER = "sglang.srt.managers.scheduler"
ENGINE = "sglang.srt.entrypoints.engine"
TOKENIZER = "sglang.srt.managers.tokenizer_manager"
OLLAMA = "sglang.srt.entrypoints.ollama.serving"
TOKENIZE = "sglang.srt.entrypoints.openai.serving_tokenize"
CONTROL = "sglang.srt.managers.tokenizer_control_mixin"
REQUESTS = "sglang.srt.managers.io_struct"


class Hook(NamedTuple):
    """One hook.  `target` and `function` are dotted names, `function` with a colon before the attribute.

    `needs` is a module without which the hook has nothing to do in a process: it is registered only
    where that module is loaded when plugins are.  So a command line that is only parsed, or refused,
    does not import the scheduler.  `direct` functions gate themselves (they run before the record is
    published); the others are gated here.
    """

    target: str
    function: str
    kind: HookType
    needs: str | None = None
    direct: bool = False


_CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
_ARGS = "sglang_hybrid.engine.args:HybridServerArgs"

HOOKS: tuple[Hook, ...] = (
    Hook("sglang.srt.server_args.ServerArgs", _ARGS, HookType.REPLACE, direct=True),
    # Bound when engine.py is imported.  Imported later, it binds the replaced class by itself.
    Hook(f"{ENGINE}.Engine.server_args_class", _ARGS, HookType.REPLACE, ENGINE, direct=True),
    Hook(
        "sglang.srt.arg_groups.mamba_hook.validate_mamba_no_buffer",
        "sglang_hybrid.engine.resolve:allow_no_buffer",
        HookType.AROUND,
        direct=True,
    ),
    Hook(f"{_CONFIGURATOR}._init_pools", "sglang_hybrid.engine.build:init_pools", HookType.AROUND, SCHEDULER),
    Hook(
        f"{_CONFIGURATOR}._profile_available_bytes",
        "sglang_hybrid.engine.build:profile_available_bytes",
        HookType.AROUND,
        SCHEDULER,
    ),
    Hook(
        f"{_CONFIGURATOR}._handle_max_mamba_cache",
        "sglang_hybrid.engine.build:handle_max_mamba_cache",
        HookType.AROUND,
        SCHEDULER,
    ),
    Hook(
        f"{_CONFIGURATOR}.config_from_budget",
        "sglang_hybrid.engine.build:config_from_budget",
        HookType.AROUND,
        SCHEDULER,
    ),
    Hook(
        f"{_CONFIGURATOR}.resolve_max_num_reqs",
        "sglang_hybrid.engine.build:resolve_max_num_reqs",
        HookType.AROUND,
        SCHEDULER,
    ),
    Hook(
        "sglang.srt.layers.attention.attention_registry.attn_backend_wrapper",
        "sglang_hybrid.engine.hooks:build_attention",
        HookType.AROUND,
        SCHEDULER,
    ),
    Hook(
        f"{SCHEDULER}.Scheduler.get_internal_state",
        "sglang_hybrid.engine.observe:internal_state",
        HookType.AFTER,
        SCHEDULER,
    ),
    Hook(
        f"{SCHEDULER}.Scheduler.get_output_streamer_class",
        "sglang_hybrid.engine.streamer:output_streamer_class",
        HookType.AROUND,
        SCHEDULER,
    ),
    Hook(
        f"{SCHEDULER}.Scheduler.get_prefill_adder_class",
        "sglang_hybrid.engine.build:prefill_adder_class",
        HookType.AROUND,
        SCHEDULER,
    ),
    *(
        Hook(f"{SCHEDULER}.Scheduler.{name}", f"sglang_hybrid.engine.door:{ours}", HookType.AROUND, SCHEDULER)
        for name, ours in (
            ("process_input_requests", "arriving"),
            ("handle_generate_request", "handled"),
            ("handle_embedding_request", "handled"),
            ("_add_request_to_queue", "queued"),
        )
    ),
    Hook(
        f"{SCHEDULER}.Scheduler._get_new_batch_prefill_raw",
        "sglang_hybrid.engine.last_line:prefill_prepared",
        HookType.AROUND,
        SCHEDULER,
    ),
)

DOOR: tuple[Hook, ...] = (
    # SGLang's routes are made when its HTTP server is imported, after this.
    Hook(
        "fastapi.routing.APIRoute.get_route_handler",
        "sglang_hybrid.engine.door:routed",
        HookType.AROUND,
        direct=True,
    ),
    *(
        Hook(
            f"{REQUESTS}.{record}.normalize_batch_and_arguments",
            "sglang_hybrid.engine.door:normalized",
            HookType.AROUND,
        )
        for record in ("GenerateReqInput", "EmbeddingReqInput")
    ),
    *(
        Hook(f"{TOKENIZER}.TokenizerManager.{name}", f"sglang_hybrid.engine.door:{ours}", HookType.AROUND)
        for name, ours in (
            ("_create_tokenized_object", "tokenized"),
            ("generate_request", "answered"),
            ("score_request", "read"),
        )
    ),
    Hook(
        f"{TOKENIZE}.OpenAIServingDetokenize._handle_non_streaming_request",
        "sglang_hybrid.engine.door:detokenized",
        HookType.AROUND,
    ),
    *(
        Hook(f"{OLLAMA}.OllamaServing.{name}", "sglang_hybrid.engine.door:read", HookType.AROUND)
        for name in ("handle_chat", "handle_generate")
    ),
    *(
        Hook(
            f"{CONTROL}.TokenizerControlMixin.{name}_expert_distribution_record",
            "sglang_hybrid.engine.door:recorded",
            HookType.AROUND,
        )
        for name in ("start", "stop", "dump")
    ),
)
"""In the process that takes requests.  It loads plugins before it loads its tokenizer manager."""

TREE_FACTORY = "sglang_hybrid.engine.build:make_tree_cache"

EXACT_ATTENTION = "sglang_hybrid.engine.exact:ExactAttention"


def published_on() -> bool:
    """Whether this process runs with the hybrid memory on.

    Raises:
        SeamError: it does, but something failed when the plugin registered itself here, or the
            arguments were resolved without it.
    """
    from sglang_hybrid.engine.args import published_organization
    from sglang_hybrid.engine.seams import check_failures, check_resolved

    if published_organization() is None:
        return False
    check_failures()
    check_resolved()
    return True


@functools.cache
def entry(hook: Hook) -> Any:
    """The object to register for `hook`: always the same one, so that a check can look for it."""
    if hook.direct:
        return pkgutil.resolve_name(hook.function)
    if hook.kind is HookType.AROUND:
        return _gated_around(hook.function)
    if hook.kind is HookType.AFTER:
        return _gated_after(hook.function)
    raise ValueError(f"{hook.target}: a {hook.kind.value} hook has no way back to stock and must be direct")


def _gated_around(function: str) -> Callable[..., Any]:
    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not published_on():
            return original(*args, **kwargs)
        return pkgutil.resolve_name(function)(original, *args, **kwargs)

    return around


def _gated_after(function: str) -> Callable[..., Any]:
    def after(result: Any, *args: Any, **kwargs: Any) -> Any:
        # None tells the registry to keep the result.
        return pkgutil.resolve_name(function)(result, *args, **kwargs) if published_on() else None

    return after


def make_tree_cache(context: Any) -> Any:
    """The registered tree factory: proves that all hooks are live, then imports the adapter.

    Raises:
        SeamError: see `seams.assert_applied`; a raise here ends the scheduler, and with it the start.
    """
    from sglang_hybrid.engine.seams import assert_applied

    assert_applied()
    return pkgutil.resolve_name(TREE_FACTORY)(context)


def install_door() -> None:
    """Put the hooks of `DOOR` in place.  Idempotent; imports the tokenizer manager."""
    for hook in DOOR:
        if hook.target not in HookRegistry._hooks:
            HookRegistry.register(hook.target, entry(hook), hook.kind)
    HookRegistry.apply_hooks()


def register_tree() -> None:
    """Name our tree to SGLang; only a scheduler builds one.  Raises ValueError if the name is taken."""
    from sglang.srt.mem_cache.registry import register_radix_cache_backend

    from sglang_hybrid.engine.args import RADIX_BACKEND

    register_radix_cache_backend(RADIX_BACKEND, make_tree_cache)


def is_live(hook: Hook) -> bool:
    """Whether calling `hook.target` now really reaches our function.

    The registry's own `_patched` would not do: a plugin applied later may have assigned over it.
    """
    ours = entry(hook)
    current = pkgutil.resolve_name(hook.target)
    if hook.kind is HookType.REPLACE:
        return current is ours
    if hook.target not in HookRegistry._patched:
        return False
    return any(ours in _captured(layer) for layer in _layers(current))


def _layers(function: Any) -> Iterator[Any]:
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def _captured(function: Any) -> list[Any]:
    """What a wrapper of `HookRegistry` closes over: the original and the hook."""
    return [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]


@contextmanager
def _backends_swapped(exact: bool) -> Iterator[tuple[type, ...]]:
    """Our state backends under the stock names, for as long as the wrapper looks them up."""
    stock: list[tuple[Any, str, Any]] = []
    ours: list[type] = []
    try:
        for kind in KINDS.values():
            serving = kind.exact if exact else kind.adapter
            if serving is None:  # refused by `exact_rules`; a stock one that is built is found out below
                continue
            module_name, name = kind.backend.split(":")
            module = importlib.import_module(module_name)
            stock.append((module, name, getattr(module, name)))
            ours.append(pkgutil.resolve_name(serving))
            setattr(module, name, ours[-1])
        yield tuple(ours)
    finally:
        for module, name, original in stock:
            setattr(module, name, original)


def build_attention(original: Callable[..., Any], runner: Any, full_attn_backend: Any) -> Any:
    """Around `attn_backend_wrapper`: have it build our state backend instead of the stock one.

    The wrapper imports the classes inside its body, so a swap for the length of the call is enough;
    models keep the stock name, of which ours is a subclass, for their `isinstance`.

    Raises:
        SeamError: it built something else, or recurrent layers of the model do not call it.
    """
    from sglang.srt.configs.hybrid_arch import mambaish_config

    from sglang_hybrid.engine.args import published_exact
    from sglang_hybrid.engine.seams import SeamError
    from sglang_hybrid.engine.served import check_layers, kind_of

    exact = published_exact()
    if exact:
        full_attn_backend = pkgutil.resolve_name(EXACT_ATTENTION)(runner)
    with _backends_swapped(exact) as ours:
        backend = original(runner, full_attn_backend)
    built = getattr(backend, "linear_attn_backend", None)
    if not isinstance(built, ours):
        raise SeamError(
            f"attn_backend_wrapper: expected a state backend among {[kind.__name__ for kind in ours]}, "
            f"found {type(built).__name__}"
        )
    kind = kind_of(runner.model_config)
    if kind is None or not isinstance(built, pkgutil.resolve_name(kind.backend)):
        raise SeamError(
            f"attn_backend_wrapper: expected {kind and kind.backend} for {type(runner.model).__name__}, "
            f"found {type(built).__name__}"
        )
    check_layers(kind, runner.model, mambaish_config(runner.model_config).mamba2_cache_params.layers)
    return backend
