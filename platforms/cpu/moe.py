"""Feed-forward: activations, and routing tokens to experts."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional as F

from ...core.platform import MoESpec
from .quant import Experts, Vector

ACTIVATIONS = {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh"), "gelu": F.gelu,
               "sigmoid": torch.sigmoid}


@dataclass(frozen=True)
class Share(Experts):
    """Some of a layer's experts, with their numbers; other ranks have the others."""

    held: range


def act_mul(gate: torch.Tensor, up: torch.Tensor, kind: str) -> torch.Tensor:
    return ACTIVATIONS[kind](gate) * up


def outside_hidden(scores: torch.Tensor, spec: MoESpec, corrected: bool) -> torch.Tensor:
    """Scores [T, experts] for the choice, -inf outside the best groups of each token."""
    grouped = scores.unflatten(-1, (spec.groups, -1))
    best = grouped.topk(2).values.sum(-1) if corrected else grouped.amax(-1)
    hidden = torch.ones_like(best, dtype=torch.bool)
    hidden.scatter_(-1, best.argsort(dim=-1, descending=True, stable=True)[:, :spec.top_groups], False)
    return grouped.masked_fill(hidden[..., None], -torch.inf).flatten(1)


def route(logits: torch.Tensor, spec: MoESpec, bias: Vector | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Router logits [T, experts] -> chosen experts [T, top_k] and their weights [T, top_k], float32."""
    logits = logits.float()
    scores = torch.sigmoid(logits) if spec.scoring == "sigmoid" else torch.softmax(logits, -1)
    choice = scores if bias is None else scores + bias.values
    if spec.groups > 1:
        choice = outside_hidden(choice, spec, bias is not None)
    # A stable sort, not topk: the lower expert wins a tie.
    chosen = choice.argsort(dim=-1, descending=True, stable=True)[:, :spec.top_k]
    weights = scores.gather(-1, chosen)
    if spec.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return chosen, weights * spec.scale


def moe(x: torch.Tensor, logits: torch.Tensor, w13: Experts, w2: Experts, spec: MoESpec,
        bias: Vector | None = None) -> torch.Tensor:
    """Tokens sorted by expert; only the used experts compute, each on its slice, and results are added up in float32.

    One product for each used expert is faster than `torch.nn.functional.grouped_mm` at every number of tokens, because
    it reads the blocked order (README), and it serves quantized experts too. Of a `Share` the result is its part.
    """
    chosen, weights = route(logits, spec, bias)
    order = chosen.flatten().argsort(stable=True)
    counts = chosen.flatten().bincount(minlength=spec.experts).tolist()
    if isinstance(w13, Share):
        before, counts = sum(counts[:w13.held.start]), counts[w13.held.start:w13.held.stop]
        order = order[before:before + sum(counts)]
        if not len(order):
            return torch.zeros_like(x)
    tokens = order // spec.top_k
    gate, up = _grouped(x[tokens], w13, counts).chunk(2, -1)
    y = _grouped(act_mul(gate, up, spec.act), w2, counts)
    scaled = y.float().mul_(weights.flatten()[order, None])
    return torch.zeros(x.shape, dtype=torch.float32).index_add_(0, tokens, scaled).to(x.dtype)


def _grouped(x: torch.Tensor, experts: Experts, counts: Sequence[int]) -> torch.Tensor:
    """Rows of x in order of experts, `counts` for each -> the rows' products with their expert."""
    return torch.cat([part.product(rows) for part, rows in zip(experts.parts, x.split(counts), strict=True)
                      if len(rows)])
