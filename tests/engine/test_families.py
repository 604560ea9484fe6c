"""Every family on the CPU platform with the flag off: it says what transformers says."""

import pytest
import torch

from tests.support.configs import SAME_KINDS
from tests.support.park import ServerPark, on
from tests.support.tokens import T
from tests.support.witness import Witness

TOKENS = 16


@on("granite-s1", "qwen-s1", "lfm2-s2", "lfm2-s1", "kimi-s1", *SAME_KINDS)
@pytest.mark.parametrize("length", [100, 7])
def test_stock_says_what_transformers_says(witness: Witness, park: ServerPark, length: int) -> None:
    """The cold reference itself, teacher-forced in fp32."""
    from transformers import AutoModelForCausalLM

    model, prompt = witness.config.model, T(9, length)
    cold = witness.cold.ask(model, prompt, TOKENS)
    reference = AutoModelForCausalLM.from_pretrained(park.model_dir(model), dtype=torch.float32)
    said = torch.tensor(cold.ids)
    with torch.no_grad():
        logits = reference(torch.tensor([[*prompt, *cold.ids]])).logits[0].log_softmax(-1)
    want = logits[length - 1 : -1].gather(1, said[:, None])[:, 0]
    assert float((torch.tensor(cold.logprobs) - want).abs().max()) < 1e-3
