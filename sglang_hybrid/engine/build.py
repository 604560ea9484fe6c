"""Factories that SGLang's pool configurator and tree registry call instead of their own.

Order in a scheduler process: `profile_available_bytes`, `handle_max_mamba_cache`, `config_from_budget`,
`resolve_max_num_reqs`, `init_pools` (all of `KVCacheConfigurator`, while the model runner starts), then
`make_tree_cache`.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable
from typing import Any, NamedTuple

from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.mem_cache.kv_cache_configurator import _InitializedPools
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MHATokenToKVPool
from sglang.srt.runtime_context import get_context, get_parallel, get_schedule
from sglang.srt.utils.common import get_available_gpu_memory, get_cpu_ids_by_node

from sglang_hybrid.engine.admission import GridPrefillAdder, longest_request
from sglang_hybrid.engine.args import settings
from sglang_hybrid.engine.budget_rules import beyond_free
from sglang_hybrid.engine.cache import GridPrefixCache
from sglang_hybrid.engine.mla_pool import GridMLAPool
from sglang_hybrid.engine.requests import GridRequests, checkpoint_capacity
from sglang_hybrid.engine.rules import Refusal
from sglang_hybrid.engine.served import architecture, kind_of, why_not_served
from sglang_hybrid.engine.start_report import budget_line, state_lines
from sglang_hybrid.engine.tokens import GridTokens
from sglang_hybrid.engine.unit_tails import Poison
from sglang_hybrid.geometry import SCAN_CHUNK
from sglang_hybrid.pools.arena import Arenas, StateShape
from sglang_hybrid.pools.factory import default_grid, make_organization
from sglang_hybrid.pools.organization import Need, Organization

logger = logging.getLogger(__name__)

POISON_ENV = "SGLANG_HYBRID_POISON"
"""Set to 1, what is freed is filled (`unit_tails.Poison`): a test's proof that nobody reads it."""

UNBOUNDED_STATES = 1 << 24
"""`max_mamba_cache_size` while SGLang sizes its pools: the organization sets the limit, not a slot count."""


class Plan(NamedTuple):
    """What sizing decided, for the steps that follow it."""

    shape: StateShape
    organization: Organization


_plans: dict[int, Plan] = {}
"""By id of the configurator that is at work: it has slots and takes no attribute of ours."""


class GridKVPool(MHATokenToKVPool):
    """KV of the attention layers as views of the arenas, K and V of a token side by side."""

    def __init__(self, *, arenas: Arenas, **kwargs: Any) -> None:
        self.arenas = arenas
        super().__init__(**kwargs)
        self.kv_cache_layout = "hybrid"

    def _create_buffers(self) -> None:
        # SGLang stores float8 as bytes, and `store_cache` wants one dtype for what it is given and the cache.
        rows = [self.arenas.kv(arena).view(self.store_dtype) for arena in range(self.layer_num)]
        self.k_buffer = [row[:, 0] for row in rows]
        self.v_buffer = [row[:, 1] for row in rows]
        self._init_data_ptrs_and_strides()

    def _clear_buffers(self) -> None:
        del self.k_buffer, self.v_buffer

    def get_kv_size_bytes(self) -> tuple[int, int]:
        """(K, V) bytes; the arenas also hold recurrent state, which is counted here too."""
        total = sum(buffer.numel() for buffer in self.arenas.kv_buffers)
        return total // 2, total - total // 2


def profile_available_bytes(original: Callable[..., Any], self: Any, pre_model_load_memory: Any) -> int:
    """The user's budget where there is one; else what `--mem-fraction-static` leaves, as in stock SGLang.

    The fraction is of what was free before the weights were loaded, so that another process that takes
    memory meanwhile would end the start, however little the budget asks for.

    Raises:
        Refusal: the budget is more than what is free now.
    """
    budget = settings().budget_bytes
    if budget is None:
        rest: int = original(self, pre_model_load_memory)
        return rest
    gc.collect()  # what the loading of weights left behind counts as taken
    sentence = beyond_free(budget, free_bytes(self.device, self.gpu_id), self.device)
    if sentence is not None:
        raise Refusal(sentence)
    self._handle_max_mamba_cache(budget)  # SGLang asks it from within the original
    return budget


def free_bytes(device: str, gpu: int) -> int:
    """Bytes that a rank can take of the device now, the least of all ranks, which all call this at one point.

    On a CPU all ranks take from one memory, whichever NUMA node it lies in; SGLang's figure is one node's.
    """
    parallel = get_parallel()
    free = get_available_gpu_memory(
        device, gpu, distributed=parallel.launch_world_size > 1, cpu_group=parallel.world_group.cpu_group
    )
    if device == "cpu":
        free *= len(get_cpu_ids_by_node()) / parallel.tp_size
    return int(free * (1 << 30))


def handle_max_mamba_cache(original: Callable[..., Any], self: Any, total_rest_memory: float) -> float:
    """Take no static share for a slot pool: attention and state live in one budget."""
    get_context().override("sglang_hybrid", max_mamba_cache_size=UNBOUNDED_STATES)
    return total_rest_memory


def config_from_budget(
    original: Callable[..., Any], self: Any, budget_bytes: int, *, cap_tokens: int | None = None
) -> Any:
    """Turn the byte budget into the organization's own whole number of blocks."""
    config = original(self, budget_bytes, cap_tokens=cap_tokens)
    asked = settings()
    shape = state_shape(self)
    budget = int(asked.budget_bytes or budget_bytes)

    def lay_out(state: StateShape) -> Organization:
        model = state.geometry(*layer_sets(self))
        grid = asked.grid or default_grid(asked.mem, model, scan_chunk(self))
        return make_organization(asked.mem, model, grid, budget, **asked.options)

    organization = lay_out(shape)
    _plans[id(self)] = Plan(shape, organization)
    # SGLang refuses longer requests by this number, and names it.
    config.max_total_num_tokens = longest_request(organization)
    logger.info(budget_line(organization, checkpoint_capacity(organization)))
    for line in state_lines(shape, organization, checkpoint_capacity, lay_out):
        logger.info(line)
    return config


def resolve_max_num_reqs(original: Callable[..., Any], self: Any, token_capacity: int) -> int:
    """Never more running requests than the budget has a unit and a live state for."""
    limit: int = original(self, token_capacity)
    organization = _plans[id(self)].organization
    most = most_running(organization, settings().policy.headroom)
    if most < limit:
        asked = get_schedule().max_running_requests
        log = logger.warning if asked is not None else logger.info
        log(
            "max_running_requests is %d instead of %d: a running request needs at least one attention unit "
            "and one live state, and %s holds %d pages; raise --hybrid-budget-bytes to run more.",
            most,
            limit,
            organization.name,
            organization.usage().pages_total,
        )
    running = min(limit, most)
    logger.info("Up to %d requests run at once; the memory has room for %d at their start.", running, most)
    return running


def init_pools(
    original: Callable[..., Any],
    self: Any,
    *,
    sizes: Any,
    req_to_token_pool: Any,
    token_to_kv_pool_allocator: Any,
) -> Any:
    """Arenas, request pool, KV pool and token allocator of the organization."""
    shape, organization = _plans.pop(id(self))
    model = organization.model
    arenas = Arenas(organization.layout(), shape, model, self.device)
    params = self.mambaish_config.mamba2_cache_params
    requests = GridRequests(
        organization=organization,
        arenas=arenas,
        size=sizes.max_running_requests,
        mamba_size=checkpoint_capacity(organization),
        mamba_spec_state_size=0,
        max_context_len=self.model_config.context_len + 4,
        device=self.device,
        enable_memory_saver=False,
        cache_params=params,
        mamba_layer_ids=list(model.recurrent_layers),
        enable_mamba_extra_buffer=False,
        enable_overlap_schedule=not get_schedule().disable_overlap_schedule,
        start_layer=self.layer_info.start_layer,
    )
    slots = arenas.slots - organization.unit_tokens
    kv = HybridLinearKVPool(
        size=slots,
        dtype=self.kv_cache_dtype,
        page_size=organization.unit_tokens,
        head_num=shape.kv_heads,
        head_dim=shape.kv_dim,
        use_mla=shape.kv_parts == 1,
        full_attention_layer_ids=list(model.attention_layers),
        device=self.device,
        mamba_pool=requests.mamba_pool,
        start_layer=self.layer_info.start_layer,
        full_kv_pool=_kv_pool(self, arenas, slots, organization.unit_tokens),
    )
    if os.environ.get(POISON_ENV) == "1":
        requests.tails.poison = Poison(organization, arenas)
    tokens = GridTokens(organization, requests, self.kv_cache_dtype, self.device, kv)
    return _InitializedPools(
        req_to_token_pool=requests, token_to_kv_pool=kv, token_to_kv_pool_allocator=tokens
    )


def _kv_pool(configurator: Any, arenas: Arenas, slots: int, page_size: int) -> GridKVPool | GridMLAPool:
    """The attention layers' own pool: keys and values, or latent rows."""
    shared: dict[str, Any] = {
        "arenas": arenas,
        "size": slots,
        "page_size": page_size,
        "dtype": configurator.kv_cache_dtype,
        "layer_num": arenas.model.arenas,
        "device": configurator.device,
        "enable_memory_saver": False,
    }
    if arenas.shape.kv_parts == 2:
        return GridKVPool(head_num=arenas.shape.kv_heads, head_dim=arenas.shape.kv_dim, **shared)
    model = configurator.model_config
    return GridMLAPool(kv_lora_rank=model.kv_lora_rank, qk_rope_head_dim=model.qk_rope_head_dim, **shared)


def prefill_adder_class(original: Callable[..., Any], self: Any) -> type[GridPrefillAdder]:
    """Around `Scheduler.get_prefill_adder_class`."""
    return GridPrefillAdder


def make_tree_cache(context: Any) -> GridPrefixCache:
    """Tree factory; also the last place where a missing hook can still end the start.

    Raises:
        SeamError: a hook did not take, or the pools are not ours.
    """
    from sglang_hybrid.engine import observe, seams

    seams.assert_applied()
    params = context.params
    requests, tokens = params.req_to_token_pool, params.token_to_kv_pool_allocator
    for pool, kind in ((requests, GridRequests), (tokens, GridTokens)):
        if not isinstance(pool, kind):
            raise seams.SeamError(f"the tree factory expected a {kind.__name__}, found {type(pool).__name__}")
    cache = GridPrefixCache(requests, tokens, params.enable_metrics, settings().policy)
    observe.connect(cache, settings().trace)
    return cache


def most_running(organization: Organization, headroom: float = 0.0) -> int:
    """Requests that can run at once, with one unit and one live state each: as many as `Admission` lets.

    Beside others the last must also find the headroom, and room to leave a boundary.
    """
    beside = organization.share(headroom).plus(organization.displaced(1))
    most = 1
    while organization.capacity_fits(Need(most + 1, most + 1).plus(beside)):
        most += 1
    return most


def layer_sets(configurator: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(attention layers, recurrent layers) of this rank's stage, model layer ids."""
    config, info = configurator.mambaish_config, configurator.layer_info

    def here(layers: Any) -> tuple[int, ...]:
        return tuple(layer for layer in layers if info.start_layer <= layer < info.end_layer)

    return here(config.full_attention_layer_ids), here(config.mamba2_cache_params.layers)


def scan_chunk(configurator: Any) -> int:
    """Tokens of a chunk of the model's scan; D0's native grid is a multiple of it."""
    return int(getattr(configurator.mambaish_config, "mamba_chunk_size", SCAN_CHUNK))


def state_shape(configurator: Any) -> StateShape:
    """Shapes and dtypes of this rank's state, from SGLang's own per-rank cache parameters."""
    params = configurator.mambaish_config.mamba2_cache_params
    model = configurator.model_config
    kind = kind_of(model)
    if kind is None or len(params.shape.conv) != 1:
        raise ValueError(f"{architecture(model)} is not served: {why_not_served(model)}")
    dims = kind.dims(params.shape.temporal, params.shape.conv[0])
    latent = model.attention_arch == AttentionArch.MLA
    return StateShape(
        kv_parts=1 if latent else 2,
        kv_heads=1 if latent else model.get_num_kv_heads(get_parallel().attn_tp_size),
        kv_dim=model.kv_lora_rank + model.qk_rope_head_dim if latent else model.head_dim,
        kv_dtype=configurator.kv_cache_dtype,
        **dims._asdict(),
        ssm_dtype=params.dtype.temporal,
        conv_dtype=params.dtype.conv,
    )
