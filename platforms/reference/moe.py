"""Feed-forward: activations, and routing tokens to experts."""
from __future__ import annotations

import math

import numpy as np

from ...core.platform import MoESpec, Unsupported
from .quant import Dense, Experts

erf = np.vectorize(math.erf, otypes=[np.float64])


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.tanh(0.5 * x))  # never overflows


def softmax(x: np.ndarray) -> np.ndarray:
    """Over the last axis."""
    exp = np.exp(x - x.max(axis=-1, keepdims=True))
    return exp / exp.sum(axis=-1, keepdims=True)


def activation(x: np.ndarray, kind: str) -> np.ndarray:
    """silu (Elfwing et al. 2017) and gelu, exact or by tanh (Hendrycks and Gimpel 2016); float64 in and out."""
    if kind == "silu":
        return x * sigmoid(x)
    if kind == "gelu_tanh":
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3)))
    if kind == "gelu":
        return 0.5 * x * (1 + erf(x / math.sqrt(2)))
    if kind == "sigmoid":
        return sigmoid(x)
    raise Unsupported(f"activation {kind!r}; there are: silu, gelu_tanh, gelu, sigmoid")


def act_mul(gate: np.ndarray, up: np.ndarray, kind: str) -> np.ndarray:
    return (activation(gate.astype(np.float64), kind) * up).astype(gate.dtype)


def best(values: np.ndarray, count: int) -> np.ndarray:
    """Places of the `count` largest along the last axis, the lower place first among equals."""
    return np.argsort(-values, axis=-1, kind="stable")[..., :count]


def outside_hidden(scores: np.ndarray, spec: MoESpec, corrected: bool) -> np.ndarray:
    """Scores [T, experts] for the choice, -inf outside the best groups of each token."""
    grouped = scores.reshape(len(scores), spec.groups, -1)
    told = np.take_along_axis(grouped, best(grouped, 2 if corrected else 1), axis=-1).sum(axis=-1)
    hidden = np.ones(told.shape, bool)
    np.put_along_axis(hidden, best(told, spec.top_groups), False, axis=-1)
    return np.where(hidden[..., None], -np.inf, grouped).reshape(scores.shape)


def route(logits: np.ndarray, spec: MoESpec, bias: Dense | None) -> tuple[np.ndarray, np.ndarray]:
    """Router logits [T, experts] -> chosen experts [T, top_k], best first, and their weights [T, top_k]."""
    scores = {"softmax": softmax, "sigmoid": sigmoid}[spec.scoring](logits.astype(np.float64))
    choice = scores if bias is None else scores + bias.values
    chosen = best(outside_hidden(choice, spec, bias is not None), spec.top_k)
    weights = np.take_along_axis(scores, chosen, axis=-1)
    if spec.renormalize:
        weights /= weights.sum(axis=-1, keepdims=True) + 1e-20
    return chosen, weights * spec.scale


def moe(x: np.ndarray, router_logits: np.ndarray, w13: Experts, w2: Experts, spec: MoESpec,
        bias: Dense | None = None) -> np.ndarray:
    chosen, weights = route(router_logits, spec, bias)
    out = np.zeros(x.shape, np.float64)
    for expert in np.unique(chosen):
        tokens, place = np.nonzero(chosen == expert)
        gate, up = np.split(w13.expert(expert).product(x[tokens]), 2, axis=-1)
        out[tokens] += weights[tokens, place, None] * w2.expert(expert).product(act_mul(gate, up, spec.act))
    return out.astype(x.dtype)
