"""The head in torch: one decoder layer behind the sum of two projections, as `isthmus.core.models.draft_heads` computes
it. Source: Li et al. 2024, EAGLE."""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Head(nn.Module):
    """words: of a config.json, with hidden_size, num_attention_heads, num_key_value_heads, intermediate_size,
    rms_norm_eps and rope_theta. Its parameters are named as EAGLE's checkpoints name them."""

    def __init__(self, words: dict):
        super().__init__()
        width, self.heads, self.kv_heads = (words[key] for key in (
            "hidden_size", "num_attention_heads", "num_key_value_heads"))
        self.size, self.eps, inner = width // self.heads, words["rms_norm_eps"], words["intermediate_size"]

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False)
        self.fc = linear(2 * width, width)
        layer = nn.Module()
        layer.self_attn, layer.mlp = nn.Module(), nn.Module()
        for name, inputs, outputs in (("q", width, width), ("k", width, self.kv_heads * self.size),
                                      ("v", width, self.kv_heads * self.size), ("o", width, width)):
            setattr(layer.self_attn, f"{name}_proj", linear(inputs, outputs))
        for name, inputs, outputs in (("gate", width, inner), ("up", width, inner), ("down", inner, width)):
            setattr(layer.mlp, f"{name}_proj", linear(inputs, outputs))
        layer.post_attention_layernorm = nn.RMSNorm(width, self.eps)
        self.layers = nn.ModuleList([layer])
        self.theta = float(words["rope_theta"])

    def forward(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Embeddings of t(p) and hidden states h(p - 1), [B, T, hidden], h(0) at place 0: guesses of h(p)."""
        x, (batch, count, _) = self.fc(torch.cat([embedded, hidden], -1)), embedded.shape
        attn, mlp = self.layers[0].self_attn, self.layers[0].mlp
        q, k, v = (part(x).view(batch, count, -1, self.size).transpose(1, 2)
                   for part in (attn.q_proj, attn.k_proj, attn.v_proj))
        angles = torch.arange(count)[:, None] * self.theta ** (-torch.arange(0, self.size, 2) / self.size)
        y = F.scaled_dot_product_attention(turned(q, angles), turned(k, angles), v, is_causal=True, enable_gqa=True)
        x = x + attn.o_proj(y.transpose(1, 2).reshape(batch, count, -1))
        y = self.layers[0].post_attention_layernorm(x)
        return x + mlp.down_proj(F.silu(mlp.gate_proj(y)) * mlp.up_proj(y))


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary embedding, the first half of each head with the second."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)
