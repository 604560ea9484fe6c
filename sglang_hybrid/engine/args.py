"""The `--hybrid-*` options, as fields of SGLang's own argument record.

`HybridServerArgs` takes the place of `sglang.srt.server_args.ServerArgs` (`plugin.py`), so the same
fields serve `python -m sglang.launch_server`, `sglang serve`, a `--config` file and `sgl.Engine`.
The record travels to the children by pickle, which imports this module before any plugin is loaded
there: nothing here may need a hook.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

from sglang.srt.arg_groups.arg_utils import NS, A, Arg
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.common import human_readable_int

from sglang_hybrid.geometry import CONV_SLOTS, DEFAULT_ATTENTION_SHARE, DEFAULT_GRID
from sglang_hybrid.pools.factory import ORGANIZATIONS, own_options
from sglang_hybrid.pools.organization import Organization
from sglang_hybrid.radix.eviction import EVICTIONS
from sglang_hybrid.radix.placement import PLACEMENTS
from sglang_hybrid.radix.policy import DEFAULT_POLICY, WAITS, Policy

KERNELS = ("auto", "triton", "flashinfer", "torch")

RADIX_BACKEND = "hybrid_grid"
"""Name under which the grid tree is registered (`sglang.srt.mem_cache.registry`)."""
MAMBA_STRATEGY = "no_buffer"
"""The stock strategy that arms neither snapshot slots nor tracking: forks need none of it."""

_FLAG_FIELDS = (
    "hybrid_grid",
    "hybrid_budget_bytes",
    "hybrid_attention_share",
    "hybrid_conv_slots",
    "hybrid_trace",
    "hybrid_kernels",
    "hybrid_exact",
    "hybrid_headroom",
    "hybrid_retention",
    "hybrid_checkpoints",
    "hybrid_wait",
    "hybrid_eviction",
)


class HybridServerArgs(ServerArgs, kw_only=True, dict=True):  # type: ignore[call-arg]
    """SGLang's arguments and ours.  With `hybrid_mem` None nothing of this package takes part."""

    hybrid_mem: A[
        Optional[str],  # noqa: UP045 - the record's own spelling; SGLang unwraps it for argparse
        Arg(
            help="One memory for attention KV and recurrent state, and prefix reuse at grid boundaries. "
            + "; ".join(f"{name}: {kind.summary}" for name, kind in ORGANIZATIONS.items())
            + ". Unset: stock SGLang.",
            choices=list(ORGANIZATIONS),
        ),
        NS("hybrid"),
    ] = None
    hybrid_grid: A[
        Optional[int],  # noqa: UP045
        Arg(
            help="Tokens between two checkpoint boundaries, which is also the page size of S0, S1 and S2 "
            f"(default {DEFAULT_GRID}, or the next that the model's state goes with; D0: the model's own). A "
            "prompt of up to one grid step is never reused. Needs --hybrid-mem.",
            resolvable=True,
        ),
        NS("hybrid"),
    ] = None
    hybrid_budget_bytes: A[
        Optional[int],  # noqa: UP045
        Arg(
            help="Bytes of device memory for KV and recurrent state together, per rank; suffixes as in "
            "--max-total-tokens (8G, 512Mi). Default: what --mem-fraction-static leaves. Needs --hybrid-mem.",
            type_parser=human_readable_int,
        ),
        NS("hybrid"),
    ] = None
    hybrid_attention_share: A[
        Optional[float],  # noqa: UP045
        Arg(
            help="Part of the budget that D0's attention pool gets, between 0 and 1 (default "
            f"{DEFAULT_ATTENTION_SHARE}); checkpoints get the rest. Needs --hybrid-mem D0.",
        ),
        NS("hybrid"),
    ] = None
    hybrid_conv_slots: A[
        Optional[str],  # noqa: UP045
        Arg(
            help="Conv slots of S2's slab pages. pow2: the next power of two that holds a conv state (the "
            "default); tight: the next whole KiB, so that more fit a page. Needs --hybrid-mem S2.",
            choices=list(CONV_SLOTS),
        ),
        NS("hybrid"),
    ] = None
    hybrid_trace: A[
        Optional[str],  # noqa: UP045
        Arg(
            help="Where to write one record a request (reuse depth and its cause, never token text): a path "
            "for lines of JSON, or tcp://HOST:PORT for a ZMQ publisher. Needs --hybrid-mem.",
        ),
        NS("hybrid"),
    ] = None
    hybrid_kernels: A[
        Optional[str],  # noqa: UP045
        Arg(
            help="Kernels that read and write paged recurrent state: auto takes the fastest that this device "
            "runs (default auto). Needs --hybrid-mem.",
            choices=list(KERNELS),
            resolvable=True,
        ),
        NS("hybrid"),
    ] = None
    hybrid_exact: A[
        bool,
        Arg(
            help="Make a run that resumes from the cache equal to one computed from the start, bit for bit "
            "(CPU platform only, and slower). Needs --hybrid-mem.",
        ),
        NS("hybrid"),
    ] = False
    hybrid_headroom: A[
        Optional[float],  # noqa: UP045
        Arg(
            help="Part f of all blocks (0 <= f < 1; D0: of each pool) that must be free beyond the need of a "
            "waiting or preempted request before it is admitted, unless nothing runs. More of it preempts "
            f"less and runs less at once. Default {DEFAULT_POLICY.headroom:g}. Needs --hybrid-mem.",
        ),
        NS("hybrid"),
    ] = None
    hybrid_retention: A[
        Optional[int],  # noqa: UP045
        Arg(
            help="Keep a checkpoint that so many distinct requests wanted while the one that made it runs. "
            "Default: off. Needs --hybrid-mem.",
        ),
        NS("hybrid"),
    ] = None
    hybrid_checkpoints: A[
        Optional[str],  # noqa: UP045
        Arg(
            help="Where checkpoints are taken. all: at every boundary, while memory is worth it; branch: at "
            "the ends of prompts and answers and where paths part; sparse: there, and at a spacing that "
            f"grows with the depth. Default {DEFAULT_POLICY.checkpoints}. Needs --hybrid-mem.",
            choices=list(PLACEMENTS),
        ),
        NS("hybrid"),
    ] = None
    hybrid_wait: A[
        Optional[str],  # noqa: UP045
        Arg(
            help="What a waiting request does while a running prefill computes a prefix that it shares. "
            "prefix: it waits for the checkpoint, and others go first; never: it computes the same too. "
            f"Default {DEFAULT_POLICY.wait}. Needs --hybrid-mem.",
            choices=list(WAITS),
        ),
        NS("hybrid"),
    ] = None
    hybrid_eviction: A[
        Optional[str],  # noqa: UP045
        Arg(
            help="What is evicted first when memory is short. demand: the checkpoint that is least likely to "
            "be asked for again; lru: what was used longest ago. Installed packages may add names. "
            f"Default {DEFAULT_POLICY.eviction}. Needs --hybrid-mem.",
            choices=list(EVICTIONS),
        ),
        NS("hybrid"),
    ] = None


class HybridSettings(NamedTuple):
    """What resolution decided.  `grid` is None for a D0 whose grid follows from the model.

    `options` are the organization's own (`pools.factory.make_organization`).
    """

    mem: str
    grid: int | None
    page_size: int
    budget_bytes: int | None
    kernels: str
    trace: str | None
    options: dict[str, Any]
    exact: bool = False
    policy: Policy = DEFAULT_POLICY


def organization(record: Any) -> str | None:
    """The record's `hybrid_mem`; None for a stock record too, which lacks the field."""
    return getattr(record, "hybrid_mem", None)


def extra_fields(record: Any) -> dict[str, Any]:
    """Our other fields that the user set, by field name."""
    values = {name: getattr(record, name, None) for name in _FLAG_FIELDS}
    return {name: value for name, value in values.items() if value is not None and value is not False}


def grid_or_default(mem: str, grid: int | None) -> int | None:
    """The grid in tokens before the model is known (`resolve.adapt` may raise a default); None without one
    where it follows from the model's geometry."""
    return grid if grid is not None else organization_class(mem).usual_grid


def page_size_for(mem: str, grid: int | None) -> int:
    """SGLang's page size in tokens: one attention unit of the organization."""
    return organization_class(mem).page_tokens(grid or DEFAULT_GRID)


def organization_class(mem: str) -> type[Organization]:
    """The organization's class; the interface's own for a name that is unknown, which a rule refuses."""
    return ORGANIZATIONS.get(mem, Organization)


def organization_options(record: Any) -> dict[str, Any]:
    """Keyword arguments of single organizations that the user set."""
    options = {name: getattr(record, f"hybrid_{name}", None) for name in own_options()}
    return {name: value for name, value in options.items() if value is not None}


def published_organization() -> str | None:
    """The running process's organization; None when it is off or no record is published yet.

    Source symbol: `get_server_args` of `sglang.srt.runtime_context`, which raises ValueError before
    `publish`.
    """
    from sglang.srt.runtime_context import get_server_args

    try:
        return organization(get_server_args())
    except ValueError:
        return None


def published_exact() -> bool:
    """Whether the running process serves in exact mode; False before `publish`."""
    return published_organization() is not None and settings().exact


def policy_of(record: Any) -> Policy:
    """What the user chose about the life of a checkpoint; the core's defaults otherwise."""
    given = {name: getattr(record, f"hybrid_{name}", None) for name in Policy._fields}
    return DEFAULT_POLICY._replace(**{name: value for name, value in given.items() if value is not None})


def settings(record: Any | None = None) -> HybridSettings:
    """Resolved settings of `record`, by default the published one.

    The record's own fields stay the user's input for ever: a default or a derived value is only in
    the declarations (`resolution_result` of `sglang.srt.arg_groups.overrides`).

    Raises:
        ValueError: the hybrid memory is off, or nothing is published.
    """
    from sglang.srt.arg_groups.overrides import resolution_result

    if record is None:
        from sglang.srt.runtime_context import get_server_args

        record = get_server_args()
    mem = organization(record)
    if mem is None:
        raise ValueError("hybrid memory is off: --hybrid-mem was not given")
    grid = grid_or_default(mem, resolution_result(record, "hybrid_grid"))
    return HybridSettings(
        mem=mem,
        grid=grid,
        page_size=page_size_for(mem, grid),
        budget_bytes=resolution_result(record, "hybrid_budget_bytes"),
        kernels=resolution_result(record, "hybrid_kernels") or "auto",
        trace=resolution_result(record, "hybrid_trace"),
        options=organization_options(record),
        exact=bool(record.hybrid_exact),
        policy=policy_of(record),
    )
