"""The heads in torch, as `isthmus.core.models.draft_heads` and `.eagle3` compute them. Their parameters are named as
EAGLE's checkpoints name them. Sources: Li et al. 2024, EAGLE; Li et al. 2025, EAGLE-3."""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Kept = list[tuple[Tensor, Tensor]]


class Layer(nn.Module):
    """A decoder layer without norms before its attention. words: of a config.json, with hidden_size,
    num_attention_heads, num_key_value_heads, intermediate_size, rms_norm_eps and rope_theta. inputs: what attention
    takes, in widths of the model."""

    def __init__(self, words: dict, inputs: int = 1):
        super().__init__()
        width, heads, kv_heads = (words[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
        self.size, self.theta, inner = width // heads, float(words["rope_theta"]), words["intermediate_size"]
        self.self_attn, self.mlp = nn.Module(), nn.Module()
        for name, wide, outputs in (("q", inputs * width, width), ("k", inputs * width, kv_heads * self.size),
                                    ("v", inputs * width, kv_heads * self.size), ("o", width, width)):
            setattr(self.self_attn, f"{name}_proj", nn.Linear(wide, outputs, bias=False))
        for name, wide, outputs in (("gate", width, inner), ("up", width, inner), ("down", inner, width)):
            setattr(self.mlp, f"{name}_proj", nn.Linear(wide, outputs, bias=False))
        self.post_attention_layernorm = nn.RMSNorm(width, words["rms_norm_eps"])

    def forward(self, taken: Tensor, x: Tensor, kept: Kept | None = None) -> Tensor:
        """What attention takes, [B, T, inputs * hidden], and what it is added to, [B, T, hidden]. kept: K and V of the
        passes before this one over the same places, to which this one's are added, see `seen`."""
        attn, mlp, (batch, count, _) = self.self_attn, self.mlp, x.shape
        q, k, v = (part(taken).view(batch, count, -1, self.size).transpose(1, 2)
                   for part in (attn.q_proj, attn.k_proj, attn.v_proj))
        angles = torch.arange(count)[:, None] * self.theta ** (-torch.arange(0, self.size, 2) / self.size)
        kept = [] if kept is None else kept
        kept.append((turned(k, angles), v))
        k, v = (torch.cat(parts, 2) for parts in zip(*kept, strict=True))
        y = F.scaled_dot_product_attention(turned(q, angles), k, v, seen(count, len(kept)), enable_gqa=True)
        x = x + attn.o_proj(y.transpose(1, 2).reshape(batch, count, -1))
        y = self.post_attention_layernorm(x)
        return x + mlp.down_proj(F.silu(mlp.gate_proj(y)) * mlp.up_proj(y))


class Head(nn.Module):
    """Of EAGLE-1: one layer behind the sum of two projections, and a matrix for a small vocabulary."""

    def __init__(self, words: dict):
        super().__init__()
        self.fc = nn.Linear(2 * words["hidden_size"], words["hidden_size"], bias=False)
        self.layers = nn.ModuleList([Layer(words)])
        self.lm_head = nn.Linear(words["hidden_size"], words["draft_vocab_size"], bias=False)

    def forward(self, embedded: Tensor, hidden: Tensor, kept: Kept | None = None) -> Tensor:
        """Embeddings of t(p) and hidden states h(p - 1), [B, T, hidden], h(0) at place 0: guesses of h(p)."""
        x = self.fc(torch.cat([embedded, hidden], -1))
        return self.layers[0](x, x, kept)


class Head3(nn.Module):
    """Of EAGLE-3: one layer that takes both side by side. words: with draft_vocab_size, the size of its vocabulary."""

    def __init__(self, words: dict):
        super().__init__()
        width, eps = words["hidden_size"], words["rms_norm_eps"]
        self.fc = nn.Linear(3 * width, width, bias=False)
        self.midlayer = Layer(words, 2)
        self.midlayer.input_layernorm, self.midlayer.hidden_norm = nn.RMSNorm(width, eps), nn.RMSNorm(width, eps)
        self.norm, self.lm_head = nn.RMSNorm(width, eps), nn.Linear(width, words["draft_vocab_size"], bias=False)

    def forward(self, embedded: Tensor, before: Tensor, kept: Kept | None = None) -> Tensor:
        """Embeddings of t(p), and `fc` of what three layers said of p - 1, or what this gave there: [B, T, hidden]."""
        taken = torch.cat([self.midlayer.input_layernorm(embedded), self.midlayer.hidden_norm(before)], -1)
        return self.midlayer(taken, before, kept)

    def logits(self, x: Tensor) -> Tensor:
        """Of the token after: [..., draft_vocab_size]."""
        return self.lm_head(self.norm(x))


def later(x: Tensor) -> Tensor:
    """[B, T, hidden]: what stood a place before; place 0 keeps its own."""
    return torch.cat([x[:, :1], x[:, :-1]], 1)


def seen(count: int, passes: int) -> Tensor:
    """Which keys each place sees in pass number `passes`, the number of drafted tokens before and with its own: those
    of the first pass up to where the model has been, and one of each later pass, a place further each. Bool [T,
    passes * T]. Source: the training-time test of EAGLE-3."""
    behind = torch.arange(count)[:, None] - torch.arange(count) - passes + 1
    return torch.cat([behind >= 0, *(behind == -i for i in range(1, passes))], 1)


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary embedding, the first half of each head with the second."""
    a, b = x.chunk(2, -1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
