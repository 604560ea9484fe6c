"""Does the demo model do its job: does its state remember, does a wrong state show, are tokens far apart?

Measured with transformers' model on the written checkpoint.  What token 0 does through the
state alone: after a prompt, replace nothing but the recurrent state by the state of a prompt that
differs in token 0.  KV and conv windows stay, so attention cannot carry the difference.  A model whose
recurrent layers keep nothing but conv windows is asked for the last token's way through these.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch

DISTANCE = 200
"""Tokens between the changed token and the place where its influence is read."""

CONTINUATION = 16
"""Greedy tokens compared between the right and the zeroed state."""


@dataclass(frozen=True)
class DemoReport:
    """`reach`: tokens from the one that changes to where its influence is read.  `influence`: largest change
    of a log-probability there, the least over prompts.  `kl`: the same as a divergence in nats, mean.
    `zeroed_differ`: share of prompts whose greedy continuation changes when the state is zeroed at
    `DISTANCE`.  `gap_share`: share of
    greedy steps whose top-1/top-2 logit gap is at least 0.05.  `distinct`: mean number of different
    tokens in `CONTINUATION` greedy steps."""

    reach: int
    influence: float
    kl: float
    zeroed_differ: float
    gap_share: float
    distinct: float

    def lines(self) -> list[str]:
        """The report for people, one line a fact."""
        return [
            f"a token at distance {self.reach}, through the recurrent state alone: "
            f"log-probabilities move by at least {self.influence:.3f} (KL {self.kl:.3g} nats)",
            f"zeroed state at position {DISTANCE}: greedy continuation changes for "
            f"{self.zeroed_differ:.0%} of prompts",
            f"top-1/top-2 gap of at least 0.05 at {self.gap_share:.1%} of greedy steps; "
            f"{self.distinct:.1f} different tokens in {CONTINUATION} steps",
        ]


def _recurrent(cache: Any) -> tuple[int, list[torch.Tensor]]:
    """(tokens that a state reaches back, states): of recurrent layers, else of short convolutions."""
    layers = [layer for layer in cache.layers if hasattr(layer, "recurrent_states")]
    states = [layer.recurrent_states[0] for layer in layers]
    kept = [state for state in states if state is not None]  # an MLP or expert block of its own keeps none
    return (DISTANCE, kept) if kept else (1, [layer.conv_states[0] for layer in layers])


def _prefill(model: Any, prompts: torch.Tensor) -> Any:
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    model(prompts, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache


def _greedy(model: Any, cache: Any, token: torch.Tensor, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Continue from `cache` (consumed) with `token` [B] -> (ids [B, steps], logits [B, steps, vocab])."""
    ids, logits = [], []
    for _ in range(steps):
        last = model(token[:, None], past_key_values=cache, use_cache=True).logits[:, -1].float()
        token = last.argmax(-1)
        ids.append(token)
        logits.append(last)
    return torch.stack(ids, 1), torch.stack(logits, 1)


@torch.no_grad()
def measure(directory: str, prompts: int = 8, seed: int = 0) -> DemoReport:
    """Measure the checkpoint in `directory` over `prompts` random prompts of `DISTANCE` tokens.

    Raises what transformers raises when the checkpoint cannot be loaded.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    vocab = model.config.get_text_config().vocab_size
    ids = torch.randint(5, vocab, (prompts, DISTANCE + 1), generator=generator)
    right = _prefill(model, ids[:, :DISTANCE])
    reach, _ = _recurrent(right)
    other, changed = ids.clone(), DISTANCE - reach
    step = 1 + ids[:, changed + 1] % 100
    other[:, changed] = 5 + (ids[:, changed] - 5 + step) % (vocab - 5)
    swapped, zeroed = copy.deepcopy(right), copy.deepcopy(right)
    foreign = _prefill(model, other[:, :DISTANCE])
    for mine, theirs in zip(_recurrent(swapped)[1], _recurrent(foreign)[1], strict=True):
        mine.copy_(theirs)
    for mine in _recurrent(zeroed)[1]:
        mine.zero_()
    said, logits = _greedy(model, right, ids[:, DISTANCE], CONTINUATION)
    said_zeroed, _ = _greedy(model, zeroed, ids[:, DISTANCE], CONTINUATION)
    _, logits_swapped = _greedy(model, swapped, ids[:, DISTANCE], 1)

    log_right = logits[:, 0].log_softmax(-1)
    log_swapped = logits_swapped[:, 0].log_softmax(-1)
    top = logits.topk(2, dim=-1).values
    return DemoReport(
        reach=reach,
        influence=float((log_right - log_swapped).abs().amax(-1).min()),
        kl=float((log_right.exp() * (log_right - log_swapped)).sum(-1).mean()),
        zeroed_differ=float((said != said_zeroed).any(1).float().mean()),
        gap_share=float(((top[..., 0] - top[..., 1]) >= 0.05).float().mean()),
        distinct=sum(len(set(row)) for row in said.tolist()) / prompts,
    )
