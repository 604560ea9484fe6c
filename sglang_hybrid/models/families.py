"""One row a family of models: how its config is read and what tests it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang_hybrid.models import readers
from sglang_hybrid.models.fields import ConfigError, Fields
from sglang_hybrid.models.shape import HybridShape

SECTIONS = ("text_config", "llm_config")
"""Where a config with a vision or audio half keeps its language model."""


@dataclass(frozen=True)
class Family:
    """`read`: config of these `model_types` -> shape.

    `architectures`: names in config.json that its end-to-end tests serve, through the small model that
    `demo` (`module:DemoFamily`) makes.  `exact`: `sglang-hybrid verify --exact` has passed.
    """

    name: str
    model_types: tuple[str, ...]
    read: Callable[[Fields], HybridShape]
    architectures: tuple[str, ...] = ()
    demo: str | None = None
    exact: bool = False


FAMILIES: dict[str, Family] = {}
"""By the name that `sglang-hybrid demo-model --family` takes."""


def add_family(family: Family) -> Family:
    """Enter a family.  Raises ValueError where another one has its name."""
    if family.name in FAMILIES:
        raise ValueError(f"family {family.name!r} is already entered")
    FAMILIES[family.name] = family
    return family


def tested(*, exact: bool = False) -> tuple[str, ...]:
    """Architectures with end-to-end tests of ours; `exact`: those proven exact."""
    rows = [one for one in FAMILIES.values() if one.demo is not None and (one.exact or not exact)]
    return tuple(dict.fromkeys(name for one in rows for name in one.architectures))


def family_of(model_type: object) -> Family | None:
    """The first family with this `model_type`."""
    return next((one for one in FAMILIES.values() if model_type in one.model_types), None)


def hybrid_shape(config: dict[str, Any], where: str) -> HybridShape:
    """The shape that a config describes; `where` names it in messages.

    Raises `ConfigError` for a family, a field or a value that gives no hybrid geometry.
    """
    for section in SECTIONS:
        inner = config.get(section)
        if isinstance(inner, dict):
            config = {"model_type": config.get("model_type")} | inner
    model_type = config.get("model_type")
    family = family_of(model_type)
    if family is None:
        known = dict.fromkeys(name for one in FAMILIES.values() for name in one.model_types)
        raise ConfigError(f"{where}: model_type {model_type!r} is no known hybrid family: {', '.join(known)}")
    shape = family.read(Fields(config, str(model_type), where))
    if not shape.attention or not shape.recurrent:
        raise ConfigError(
            f"{where}: {len(shape.attention)} attention and {len(shape.recurrent)} recurrent layers make no "
            "hybrid model: give one with both"
        )
    return shape


_DEMO = "sglang_hybrid.cli.demo_families:"
_MOE = "sglang_hybrid.cli.demo_moe:"

for _family in (
    Family(
        "falcon-h1",
        ("falcon_h1",),
        readers.falcon_h1,
        ("FalconH1ForCausalLM",),
        _DEMO + "FALCON_H1",
        exact=True,
    ),
    Family(
        "granite-4",
        ("granitemoehybrid",),
        readers.granite,
        ("GraniteMoeHybridForCausalLM",),
        _DEMO + "GRANITE_4",
    ),
    Family(
        "granite-4-moe",
        ("granitemoehybrid",),
        readers.granite,
        ("GraniteMoeHybridForCausalLM",),
        _MOE + "GRANITE_4_MOE",
    ),
    Family(
        "nemotron-h",
        ("nemotron_h",),
        readers.nemotron_h,
        ("NemotronHForCausalLM",),
        _MOE + "NEMOTRON_H",
    ),
    Family(
        "nemotron-h-moe",
        ("nemotron_h",),
        readers.nemotron_h,
        ("NemotronHForCausalLM",),
        _MOE + "NEMOTRON_H_MOE",
    ),
    Family(
        "qwen3.5",
        ("qwen3_5", "qwen3_5_text"),
        readers.gated_delta,
        ("Qwen3_5ForCausalLM",),
        _DEMO + "QWEN3_5",
    ),
    Family(
        "qwen3.5-moe",
        ("qwen3_5_moe", "qwen3_5_moe_text"),
        readers.gated_delta,
        ("Qwen3_5MoeForCausalLM",),
        _MOE + "QWEN3_5_MOE",
    ),
    Family(
        "qwen3.5-vl",
        ("qwen3_5", "qwen3_5_text"),
        readers.gated_delta,
        ("Qwen3_5ForConditionalGeneration",),
        _MOE + "QWEN3_5_VL",
    ),
    Family(
        "qwen3.5-vl-moe",
        ("qwen3_5_moe", "qwen3_5_moe_text"),
        readers.gated_delta,
        ("Qwen3_5MoeForConditionalGeneration",),
        _MOE + "QWEN3_5_VL_MOE",
    ),
    Family(
        "qwen3-next",
        ("qwen3_next",),
        readers.gated_delta,
        ("Qwen3NextForCausalLM",),
        _MOE + "QWEN3_NEXT",
    ),
    Family(
        "kimi-linear",
        ("kimi_linear",),
        readers.kimi_linear,
        ("KimiLinearForCausalLM",),
        _DEMO + "KIMI_LINEAR",
    ),
    Family(
        "ling-2.5",
        ("bailing_hybrid",),
        readers.bailing_hybrid,
        ("BailingMoeV2_5ForCausalLM",),
        _DEMO + "LING_2_5",
    ),
    Family(
        "ling-2.5-moe",
        ("bailing_hybrid",),
        readers.bailing_hybrid,
        ("BailingMoeV2_5ForCausalLM",),
        _MOE + "LING_2_5_MOE",
    ),
    Family("lfm2", ("lfm2", "lfm2_vl"), readers.lfm2, ("Lfm2ForCausalLM",), _DEMO + "LFM2"),
    Family("lfm2-moe", ("lfm2_moe",), readers.lfm2, ("Lfm2MoeForCausalLM",), _DEMO + "LFM2_MOE"),
):
    add_family(_family)
