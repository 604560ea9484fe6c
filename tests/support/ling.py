"""Ling-2.5 in plain torch, from its checkpoint alone: transformers has no class of it.

Lightning attention is written as a sum over all earlier tokens, latent attention with keys and values of all
heads: neither has a state, a scan or a latent row.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.nn.functional import linear, silu

Weights = dict[str, torch.Tensor]


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm of the last dimension."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotated(x: torch.Tensor, theta: float, *, pairs: bool) -> torch.Tensor:
    """Rotary positions of [T, ..., dim]: of neighbours (`pairs`) or of the two halves."""
    tokens, dim = x.shape[0], x.shape[-1]
    angle = torch.arange(tokens)[:, None] * theta ** (-torch.arange(0, dim, 2) / dim)
    angle = angle.view(tokens, *[1] * (x.dim() - 2), dim // 2)
    turned = torch.polar(torch.ones_like(angle), angle)
    if pairs:
        couples = torch.view_as_complex(x.reshape(*x.shape[:-1], dim // 2, 2))
        return torch.view_as_real(couples * turned).flatten(-2)
    first, second = x.chunk(2, -1)
    both = torch.complex(first.contiguous(), second.contiguous()) * turned
    return torch.cat([both.real, both.imag], -1)


def slopes(heads: int, layer: int, layers: int) -> torch.Tensor:
    """ALiBi's slopes of `heads` (a power of two), from full in the first layer to almost none in the last."""
    steps = 2.0 ** (-8 / heads * torch.arange(1, heads + 1))
    return steps * (1 - layer / (layers - 1) + 1e-5)


def mlp(weights: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    """Gated by silu."""
    gate, up, down = (weights[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
    return linear(silu(linear(x, gate)) * linear(x, up), down)


class Ling:
    """`self(ids)`: logits `[T, vocab]` of one sequence."""

    def __init__(self, directory: Path) -> None:
        self.config: dict[str, Any] = json.loads((directory / "config.json").read_text())
        self.weights: Weights = load_file(directory / "model.safetensors")
        self.eps: float = self.config["rms_norm_eps"]

    @torch.no_grad()
    def __call__(self, ids: list[int]) -> torch.Tensor:
        x = self.weights["model.word_embeddings.weight"][ids]
        for layer in range(self.config["num_hidden_layers"]):
            prefix = f"model.layers.{layer}."
            own = {
                name.removeprefix(prefix): weight
                for name, weight in self.weights.items()
                if name.startswith(prefix)
            }
            mixer = {
                name.removeprefix("attention."): weight
                for name, weight in own.items()
                if name.startswith("attention.")
            }
            normed = rms(x, own["input_layernorm.weight"], self.eps)
            latent = (layer + 1) % self.config["layer_group_size"] == 0
            x = x + (self.latent(mixer, normed) if latent else self.lightning(mixer, normed, layer))
            normed = rms(x, own["post_attention_layernorm.weight"], self.eps)
            x = x + (self.experts(own, normed) if "mlp.gate.weight" in own else mlp(own, "mlp", normed))
        return linear(rms(x, self.weights["model.norm.weight"], self.eps), self.weights["lm_head.weight"])

    def experts(self, weights: Weights, x: torch.Tensor) -> torch.Tensor:
        """The best experts of the best groups by a biased sigmoid, weighted by that without the bias."""
        config, bias = self.config, weights["mlp.gate.expert_bias"]
        scores = linear(x, weights["mlp.gate.weight"]).sigmoid()
        groups, each = config["n_group"], len(bias) // config["n_group"]
        biased = (scores + bias).view(-1, groups, each)
        open_groups = biased.topk(2, -1).values.sum(-1).topk(config["topk_group"], -1).indices
        closed = torch.ones(len(x), groups, dtype=torch.bool).scatter(1, open_groups, False)
        biased = biased.masked_fill(closed[..., None], float("-inf")).flatten(1)
        chosen = biased.topk(config["num_experts_per_tok"], -1).indices
        part = scores.gather(1, chosen)
        part = config["routed_scaling_factor"] * part / part.sum(-1, keepdim=True)
        share = torch.zeros_like(scores).scatter(1, chosen, part)
        every = torch.stack([mlp(weights, f"mlp.experts.{i}", x) for i in range(len(bias))], 1)
        return (share[..., None] * every).sum(1) + mlp(weights, "mlp.shared_experts", x)

    def lightning(self, weights: Weights, x: torch.Tensor, layer: int) -> torch.Tensor:
        """y_t = sum over s <= t of exp(-slope (t - s)) (q_t . k_s) v_s / sqrt(dim), normed by head, gated."""
        config, tokens = self.config, x.shape[0]
        heads, dim, theta = config["num_attention_heads"], config["head_dim"], config["rope_theta"]
        row = silu(linear(x, weights["query_key_value.weight"])).view(tokens, 3, heads, dim)
        turned = int(dim * config["partial_rotary_factor"])
        q, k = (
            rms(row[:, i], weights[f"{name}_layernorm.weight"], self.eps)
            for i, name in enumerate(("query", "key"))
        )
        q, k = (
            torch.cat([rotated(one[..., :turned], theta, pairs=False), one[..., turned:]], -1)
            for one in (q, k)
        )
        back = torch.arange(tokens)[:, None] - torch.arange(tokens)
        slope = slopes(heads, layer, config["num_hidden_layers"])
        decay = torch.where(back >= 0, torch.exp(-slope[:, None, None] * back), 0.0)
        y = torch.einsum("thd,shd,hts,she->the", q, k, decay, row[:, 2]) / math.sqrt(dim)
        y = y.reshape(tokens, config["group_norm_size"], -1)
        normed = rms(y, torch.ones(()), self.eps).flatten(1) * weights["g_norm.weight"]
        return linear(normed * linear(x, weights["g_proj.weight"]).sigmoid(), weights["dense.weight"])

    def latent(self, weights: Weights, x: torch.Tensor) -> torch.Tensor:
        """Causal attention whose keys and values of all heads are made from the latent rows."""
        config, tokens, theta = self.config, x.shape[0], self.config["rope_theta"]
        heads, dim, rope = (
            config[name] for name in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim")
        )
        queries = rms(linear(x, weights["q_a_proj.weight"]), weights["q_a_layernorm.weight"], self.eps)
        q = linear(queries, weights["q_b_proj.weight"]).view(tokens, heads, dim + rope)
        row = linear(x, weights["kv_a_proj_with_mqa.weight"])
        rank = config["kv_lora_rank"]
        inner = rms(row[:, :rank], weights["kv_a_layernorm.weight"], self.eps)
        k, v = linear(inner, weights["kv_b_proj.weight"]).view(tokens, heads, 2 * dim).chunk(2, -1)
        shared = rotated(row[:, None, rank:], theta, pairs=True).expand(tokens, heads, rope)
        q = torch.cat([q[..., :dim], rotated(q[..., dim:], theta, pairs=True)], -1)
        scores = torch.einsum("thd,shd->hts", q, torch.cat([k, shared], -1)) / math.sqrt(dim + rope)
        later = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        y = torch.einsum("hts,shd->thd", scores.masked_fill(later, float("-inf")).softmax(-1), v)
        return linear(y.flatten(1), weights["dense.weight"])
