"""Feed-forward: activations, and routing tokens to experts."""
from __future__ import annotations

from functools import partial

import torch
from torch.nn import functional as F

from ...core.platform import MoESpec
from .quant import Experts

ACTIVATIONS = {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh"), "gelu": F.gelu,
               "sigmoid": torch.sigmoid}


def act_mul(gate: torch.Tensor, up: torch.Tensor, kind: str) -> torch.Tensor:
    return ACTIVATIONS[kind](gate) * up


def route(logits: torch.Tensor, spec: MoESpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Router logits [T, experts] -> chosen experts [T, top_k] and their weights [T, top_k], float32."""
    logits = logits.float()
    scores = torch.sigmoid(logits) if spec.scoring == "sigmoid" else torch.softmax(logits, -1)
    # A stable sort, not topk: the lower expert wins a tie.
    weights, chosen = (part[:, :spec.top_k] for part in scores.sort(dim=-1, descending=True, stable=True))
    if spec.renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return chosen, weights * spec.scale


def moe(x: torch.Tensor, logits: torch.Tensor, w13: Experts, w2: Experts, spec: MoESpec) -> torch.Tensor:
    """Tokens sorted by expert; each used expert computes its slice, results are added up in float32."""
    chosen, weights = route(logits, spec)
    order = chosen.flatten().argsort(stable=True)
    tokens = order // spec.top_k
    counts = chosen.flatten().bincount(minlength=spec.experts).tolist()
    parts = []
    for expert, rows in enumerate(x[tokens].split(counts)):
        if len(rows):
            gate, up = w13.parts[expert].product(rows).chunk(2, -1)
            parts.append(w2.parts[expert].product(act_mul(gate, up, spec.act)))
    scaled = torch.cat(parts).float() * weights.flatten()[order, None]
    return torch.zeros(x.shape, dtype=torch.float32).index_add_(0, tokens, scaled).to(x.dtype)
