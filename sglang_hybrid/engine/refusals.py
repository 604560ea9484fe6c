"""What the hybrid memory cannot serve, refused in the parent before weights load.

The tables (`input_rules.py`, `model_rules.py`, `exact_rules.py`) have one row a combination; each answers
with one sentence that names the value given and a legal choice.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from sglang_hybrid.engine.args import published_organization
from sglang_hybrid.engine.exact_rules import EXACT_RULES
from sglang_hybrid.engine.input_rules import INPUT_RULES
from sglang_hybrid.engine.model_rules import MODEL_RULES
from sglang_hybrid.engine.rules import Facts, Rule, flag_of, refuse

RECOMMENDED = "S1"
"""The organization a sentence proposes to somebody who named none."""


def refuse_orphans(extras: dict[str, Any], record: Any) -> None:
    """Refuse our options without `--hybrid-mem`: they would silently do nothing."""
    for field, value in extras.items():
        shown = flag_of(field) if value is True else f"{flag_of(field)} {value}"
        refuse(
            f"{shown} has no effect without --hybrid-mem; add --hybrid-mem {RECOMMENDED}.",
            record,
        )


def refuse_input(record: Any) -> None:
    """Apply INPUT_RULES.  Raises Refusal with the first sentence."""
    _apply(INPUT_RULES, record)


def refuse_model(facts: Facts) -> None:
    """Apply what MODEL_RULES say of the model itself, before its state is looked at."""
    _apply((rule for rule in MODEL_RULES if rule.field == "model_path"), facts.record)


def refuse_resolved(record: Any) -> None:
    """Apply MODEL_RULES, then INPUT_RULES again: a model's override may have switched something on."""
    exact = EXACT_RULES if record.hybrid_exact else ()
    _apply((*MODEL_RULES, *INPUT_RULES, *exact), record)


def _apply(rules: Iterable[Rule], record: Any) -> None:
    facts = Facts(record)
    for rule in rules:
        sentence = rule.check(facts)
        if sentence is not None:
            refuse(sentence, record)


def way_out_is_refused(said: str) -> str | None:
    """Our sentence where SGLang sends a client to an option that is refused here; None otherwise.

    `said` is SGLang's own text, of which the first sentence tells what was asked.
    """
    named = set(re.findall(r"--[a-z][a-z0-9-]+", said))
    asked = SimpleNamespace(mem=published_organization(), now=lambda field: True, given=lambda field: True)
    for rule in INPUT_RULES:
        sentence = rule.check(asked) if flag_of(rule.field) in named else None  # type: ignore[arg-type]
        if sentence is not None:
            first = said.split(". ")[0].rstrip(".")
            reason = sentence.removesuffix("; leave it out.").rstrip(".")
            return f"{first}, but {reason}; send the request to a server without --hybrid-mem."
    return None
