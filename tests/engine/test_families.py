"""Every family on the CPU platform with the flag off: it says what transformers says."""

from pathlib import Path

import pytest
import torch

from tests.support.configs import SAME_KINDS
from tests.support.ling import Ling
from tests.support.park import ServerPark, on
from tests.support.tokens import T
from tests.support.witness import Witness

TOKENS = 16


def logits(model_dir: Path, family: str, ids: list[int]) -> torch.Tensor:
    """[T, vocab] of one sequence in fp32: transformers, or ours where it has no class."""
    from transformers import AutoModelForCausalLM

    if family.startswith("ling"):
        return Ling(model_dir)(ids)
    reference = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.no_grad():
        found: torch.Tensor = reference(torch.tensor([ids])).logits[0]
    return found


@on("granite-s1", "qwen-s1", "lfm2-s2", "lfm2-s1", "kimi-s1", "ling-s1", "ling-s0", *SAME_KINDS)
@pytest.mark.parametrize("length", [100, 7])
def test_stock_says_what_transformers_says(witness: Witness, park: ServerPark, length: int) -> None:
    """The cold reference itself, teacher-forced in fp32."""
    model, prompt = witness.config.model, T(9, length)
    cold = witness.cold.ask(model, prompt, TOKENS)
    said = torch.tensor(cold.ids)
    reference = logits(park.model_dir(model), model, [*prompt, *cold.ids]).log_softmax(-1)
    want = reference[length - 1 : -1].gather(1, said[:, None])[:, 0]
    assert float((torch.tensor(cold.logprobs) - want).abs().max()) < 1e-3
