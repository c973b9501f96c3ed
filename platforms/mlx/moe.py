"""Feed-forward: activations, and routing tokens to experts."""
from __future__ import annotations

import math
from collections.abc import Callable

import mlx.core as mx

from ...core.platform import MoESpec
from .quant import Experts, Vector

SORTED = 64  # (token, expert) pairs from which on they are ordered by expert, so that each expert is read once


def _silu(x: mx.array) -> mx.array:
    return x * mx.sigmoid(x)


def _gelu_tanh(x: mx.array) -> mx.array:
    return 0.5 * x * (1 + mx.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


def _gelu(x: mx.array) -> mx.array:
    return 0.5 * x * (1 + mx.erf(x * math.sqrt(0.5)))


# silu: Elfwing et al. 2017; gelu, by tanh and exact: Hendrycks and Gimpel 2016.
ACTIVATIONS: dict[str, Callable[[mx.array], mx.array]] = {
    "silu": _silu, "gelu_tanh": _gelu_tanh, "gelu": _gelu, "sigmoid": mx.sigmoid}


def act_mul(gate: mx.array, up: mx.array, kind: str) -> mx.array:
    """In float32 inside."""
    return (ACTIVATIONS[kind](gate.astype(mx.float32)) * up).astype(up.dtype)


def outside_hidden(scores: mx.array, spec: MoESpec, corrected: bool) -> mx.array:
    """Scores [T, experts] for the choice, -inf outside the best groups of each token."""
    grouped = scores.reshape(scores.shape[0], spec.groups, -1)
    best = mx.topk(grouped, 2, axis=-1).sum(axis=-1) if corrected else grouped.max(axis=-1)
    order = mx.argsort(-best, axis=-1)
    place = mx.argsort(order, axis=-1)  # of each group among all, the best is 0
    return mx.where((place < spec.top_groups)[..., None], grouped, -math.inf).reshape(scores.shape)


def route(logits: mx.array, spec: MoESpec, bias: Vector | None) -> tuple[mx.array, mx.array]:
    """Router logits [T, experts] -> chosen experts [T, top_k] and their weights [T, top_k], float32."""
    logits = logits.astype(mx.float32)
    scores = mx.sigmoid(logits) if spec.scoring == "sigmoid" else mx.softmax(logits, axis=-1)
    choice = scores if bias is None else scores + bias.values
    # MLX's sort merges and is stable, so the lower expert wins a tie, and the lower group.
    if spec.groups > 1:
        choice = outside_hidden(choice, spec, bias is not None)
    chosen = mx.argsort(-choice, axis=-1)[:, :spec.top_k]
    weights = mx.take_along_axis(scores, chosen, axis=-1)
    if spec.renormalize:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
    return chosen, weights * spec.scale


def moe(x: mx.array, logits: mx.array, w13: Experts, w2: Experts, spec: MoESpec,
        bias: Vector | None = None) -> mx.array:
    """Each (token, expert) pair is one row of a gathered product; the results are added up in float32."""
    chosen, weights = route(logits, spec, bias)
    pairs = chosen.flatten()
    many = pairs.size >= SORTED
    order = mx.argsort(pairs) if many else mx.arange(pairs.size)
    experts = pairs[order] if many else pairs
    rows = mx.expand_dims(mx.take(x, order // spec.top_k, axis=0), 1)
    gate, up = mx.split(w13.matrices.gathered(rows, experts, many), 2, axis=-1)
    out = w2.matrices.gathered(act_mul(gate, up, spec.act), experts, many)[:, 0]
    if many:
        out = mx.take(out, mx.argsort(order), axis=0)
    out = out.astype(mx.float32).reshape(*chosen.shape, -1)
    return (out * weights[..., None]).sum(axis=1).astype(x.dtype)
