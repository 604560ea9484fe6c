"""A start that is refused, in this process."""

import re

import pytest

from tests.support.arguments import resolved

ON = ("--hybrid-mem", "S1")


def refusal(*argv: str) -> str:
    """The refusal of a command line: exactly one sentence on one line."""
    from sglang_hybrid.engine.rules import Refusal

    with pytest.raises(Refusal) as caught:
        resolved(*argv, "--skip-tokenizer-init")
    text = str(caught.value)
    assert re.fullmatch(r"[^\n]+\.", text)
    return text
