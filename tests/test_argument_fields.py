"""Every field of SGLang's arguments is refused, replaced, served by an engine configuration or neutral."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.support.argument_fields import NEUTRAL, TESTED
from tests.support.arguments import write_config
from tests.support.configs import CONFIGS

pytest.importorskip("sglang")

from sglang_hybrid.engine import input_rules, model_rules, resolve

RULED = {rule.field for rule in (*input_rules.INPUT_RULES, *model_rules.MODEL_RULES)}
REPLACED = {*resolve.SLOT_POOL, *resolve.STATE_KERNELS}
LEFT_ALONE = [name for group in NEUTRAL.values() for name in group.split()]


def theirs() -> set[str]:
    """Fields of the stock record."""
    from sglang.srt.arg_groups.arg_utils import record_fields

    from sglang_hybrid.engine.args import HybridServerArgs

    return {field.name for field in record_fields(HybridServerArgs) if not field.name.startswith("hybrid_")}


def without_a_place(fields: Iterable[str]) -> set[str]:
    """Those that a rule, a replacement, a configuration or a reason says nothing of."""
    return set(fields) - RULED - REPLACED - set(TESTED) - set(LEFT_ALONE)


def test_every_field_has_a_place() -> None:
    """A field that the next SGLang adds turns this red: read what it does, then refuse, test or list it."""
    assert without_a_place(theirs()) == set()
    assert without_a_place({"a_field_of_the_next_sglang"}) == {"a_field_of_the_next_sglang"}


def test_no_place_is_of_a_field_that_is_gone() -> None:
    ours = {name for name in RULED if name.startswith("hybrid_")}
    assert (RULED | REPLACED | set(TESTED) | set(LEFT_ALONE)) - ours <= theirs()


def test_no_field_has_two_places() -> None:
    assert [name for name, count in Counter(LEFT_ALONE).items() if count > 1] == []
    assert not set(LEFT_ALONE) & (RULED | REPLACED | set(TESTED))
    assert not REPLACED & RULED


@pytest.mark.parametrize("field", TESTED)
def test_the_configuration_has_the_flag(field: str, tmp_path: Path) -> None:
    name, flag = TESTED[field]
    config = CONFIGS[name]
    observed = ["--enable-metrics"] if config.observed else []  # as `ServerPark.spawn` does
    assert flag in config.args(Path(write_config(tmp_path))) + observed
