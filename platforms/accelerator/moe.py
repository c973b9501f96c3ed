"""Feed-forward: activations, and routing tokens to experts, composed of torch operators."""
from __future__ import annotations

from functools import partial

import torch
from torch.nn import functional as F

from ...core.platform import MoESpec
from .quant import Experts

ACTIVATIONS = {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh"), "gelu": F.gelu,
               "sigmoid": torch.sigmoid}
DIRECT = 16  # choices up to which each gets a copy of its expert's weights, and no count has to reach the host


def act_mul(gate: torch.Tensor, up: torch.Tensor, kind: str) -> torch.Tensor:
    return ACTIVATIONS[kind](gate) * up


def route(logits: torch.Tensor, spec: MoESpec, bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Router logits [T, experts] -> chosen experts [T, top_k] and their weights [T, top_k], float32."""
    logits = logits.float()
    scores = torch.sigmoid(logits) if spec.scoring == "sigmoid" else torch.softmax(logits, -1)
    choice = scores if bias is None else scores + bias
    if spec.groups > 1:
        grouped = choice.unflatten(-1, (spec.groups, -1))
        best = grouped.amax(-1) if bias is None else grouped.topk(2, -1).values.sum(-1)
        worst = ranked(best)[:, spec.top_groups:]
        choice = grouped.scatter(1, worst[..., None].expand(-1, -1, grouped.shape[-1]), -torch.inf).flatten(1)
    # A stable sort, not topk: the lower expert wins a tie.
    chosen = ranked(choice)[:, :spec.top_k]
    weights = scores.gather(1, chosen)
    if spec.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return chosen, weights * spec.scale


def ranked(scores: torch.Tensor) -> torch.Tensor:
    """Places of the last axis, the largest first, the lower place first among equals."""
    return scores.sort(dim=-1, descending=True, stable=True).indices


def moe(x: torch.Tensor, logits: torch.Tensor, w13: Experts, w2: Experts, spec: MoESpec,
        bias: torch.Tensor | None = None) -> torch.Tensor:
    """[T, D] -> [T, D], results of a token's experts added up in float32.

    A few choices each take their expert's weights, and the host learns nothing. With more of them the host waits for
    the number of tokens of each expert; a platform with a grouped kernel does not. Where other ranks have some of the
    experts, the result is the part of those that are here.
    """
    chosen, weights = route(logits, spec, bias)
    held = w13.held or range(spec.experts)
    if chosen.numel() <= DIRECT:
        here = (chosen >= held.start) & (chosen < held.stop)
        chosen = (chosen - held.start).clamp(0, len(held) - 1)
        return _direct(x, chosen, torch.where(here, weights, 0), w13, w2, spec)
    order = chosen.flatten().argsort(stable=True)
    counts = chosen.flatten().bincount(minlength=spec.experts).tolist()
    before = sum(counts[:held.start])
    counts = counts[held.start:held.stop]
    order = order[before:before + sum(counts)]
    tokens = order // spec.top_k
    parts = [x[:0].float()]
    for expert, rows in enumerate(x[tokens].split(counts)):
        if len(rows):
            gate, up = F.linear(rows, w13.weight.matrix(expert)).chunk(2, -1)
            parts.append(F.linear(act_mul(gate, up, spec.act), w2.weight.matrix(expert)).float())
    scaled = torch.cat(parts) * weights.flatten()[order, None]
    return torch.zeros(x.shape, dtype=torch.float32, device=x.device).index_add_(0, tokens, scaled).to(x.dtype)


def _direct(x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, w13: Experts, w2: Experts,
            spec: MoESpec) -> torch.Tensor:
    flat = chosen.flatten()
    rows = x.repeat_interleave(spec.top_k, 0)[:, :, None]
    gate, up = (w13.weight.matrix(flat) @ rows)[..., 0].chunk(2, -1)
    y = (w2.weight.matrix(flat) @ act_mul(gate, up, spec.act)[:, :, None])[..., 0]
    return (y.float().unflatten(0, (len(x), -1)) * weights[..., None]).sum(1).to(x.dtype)
