"""Feed-forward: activations, and experts as one wide layer whose inner values the routing weighs."""
from __future__ import annotations

import numpy as np
from isthmus.core.platform import MoESpec, Unsupported
from openvino import opset15 as opset

from .graph import KEEP, Tensor, integers, node_of

ACTIVATIONS = {"silu": opset.swish, "gelu_tanh": lambda node: opset.gelu(node, "tanh"),
               "gelu": lambda node: opset.gelu(node, "erf"), "sigmoid": opset.sigmoid}


def act_mul(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    if kind not in ACTIVATIONS:
        raise Unsupported(f"activation {kind!r}; there are: {', '.join(ACTIVATIONS)}")
    return Tensor(ACTIVATIONS[kind](gate.node)) * up


def best(values: Tensor, count: int) -> Tensor:
    """[T, n] -> where the `count` largest are, the lower place first among equals."""
    places = opset.topk(values.node, np.int32(count), -1, "max", "value", stable=True).output(1)
    hot = opset.one_hot(places, integers(values.shape[-1]), np.True_, np.False_, -1)
    return Tensor(opset.reduce_logical_or(hot, integers(1)))


def route(logits: Tensor, spec: MoESpec, bias: np.ndarray | None) -> Tensor:
    """Router logits [T, experts] -> the weight of each expert, 0 for those not chosen."""
    scores = Tensor(opset.softmax(logits.node, -1) if spec.scoring == "softmax" else opset.sigmoid(logits.node))
    grouped = (scores if bias is None else scores + bias).reshape(KEEP, spec.groups, spec.experts // spec.groups)
    told = opset.topk(grouped.node, np.int32(1 if bias is None else 2), -1, "max", "value").output(0)
    seen = best(Tensor(opset.reduce_sum(told, integers(-1))), spec.top_groups).reshape(KEEP, spec.groups, 1)
    choice = grouped.where(seen, -np.inf).reshape(KEEP, spec.experts)
    shares = scores.where(best(choice, spec.top_k), 0.0)
    if spec.renormalize:
        total = Tensor(opset.reduce_sum(shares.node, integers(-1), keep_dims=True)) + 1e-20
        shares = Tensor(opset.divide(shares.node, total.node))
    return shares * spec.scale


def moe(x: Tensor, logits: Tensor, w13: np.ndarray, w2: np.ndarray, spec: MoESpec, bias: np.ndarray | None) -> Tensor:
    """x [T, D] -> gate and up [T, experts, 2F] -> hidden [T, experts, F], weighed -> [T, D]."""
    width, model = w13.shape[1] // 2, x.shape[1]
    inner = Tensor(opset.matmul(x.node, node_of(w13.reshape(-1, model)), False, True))
    inner = inner.reshape(KEEP, spec.experts, 2 * width)
    shares = route(logits, spec, bias).reshape(KEEP, spec.experts, 1)
    hidden = act_mul(inner[:, :, :width], inner[:, :, width:], spec.act) * shares
    last = Tensor(node_of(w2)).transpose(1, 0, 2).reshape(model, -1)
    return Tensor(opset.matmul(hidden.reshape(KEEP, -1).node, last.node, False, True))
