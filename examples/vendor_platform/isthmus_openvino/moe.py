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


def route(logits: Tensor, spec: MoESpec) -> Tensor:
    """Router logits [T, experts] -> the weight of each expert, 0 for those not chosen."""
    scores = opset.softmax(logits.node, -1) if spec.scoring == "softmax" else opset.sigmoid(logits.node)
    best = opset.topk(scores, np.int32(spec.top_k), -1, "max", "value", stable=True)
    chosen = opset.one_hot(best.output(1), integers(spec.experts), np.float32(1), np.float32(0), -1)
    shares = opset.multiply(scores, opset.reduce_sum(chosen, integers(1)))
    if spec.renormalize:
        shares = opset.divide(shares, opset.reduce_sum(shares, integers(-1), keep_dims=True))
    return Tensor(shares) * spec.scale


def moe(x: Tensor, router_logits: Tensor, w13: np.ndarray, w2: np.ndarray, spec: MoESpec) -> Tensor:
    """x [T, D] -> gate and up [T, experts, 2F] -> hidden [T, experts, F], weighed -> [T, D]."""
    width, model = w13.shape[1] // 2, x.shape[1]
    inner = Tensor(opset.matmul(x.node, node_of(w13.reshape(-1, model)), False, True))
    inner = inner.reshape(KEEP, spec.experts, 2 * width)
    shares = route(router_logits, spec).reshape(KEEP, spec.experts, 1)
    hidden = act_mul(inner[:, :, :width], inner[:, :, width:], spec.act) * shares
    last = Tensor(node_of(w2)).transpose(1, 0, 2).reshape(model, -1)
    return Tensor(opset.matmul(hidden.reshape(KEEP, -1).node, last.node, False, True))
