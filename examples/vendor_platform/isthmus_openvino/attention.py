"""Paged attention. The graph reads K and V where they lie in the host's memory; what a step adds goes in afterwards."""
from __future__ import annotations

import numpy as np
from isthmus.core.platform import AttentionSpec
from openvino import opset15 as opset

from .graph import KEEP, Tensor, Trace

HIDDEN = -3e38  # finite, so that a row that sees nothing is no NaN


def paged_attention(trace: Trace, q: Tensor, k: Tensor, v: Tensor, layer: int, spec: AttentionSpec) -> Tensor:
    """All rows at once, filled up to the longest: q [T, heads, d] -> [B, kv_heads, heads / kv_heads, Q, d] and back."""
    heads, kv_heads, dim = q.shape[1], k.shape[1], q.shape[2]
    keys, values = (context(trace, new, layer, which) for which, new in enumerate((k, v)))
    grid = q[trace.feed("grid", (-1, -1))].reshape(KEEP, KEEP, kv_heads, heads // kv_heads, dim)
    scores = Tensor(opset.matmul(grid.transpose(0, 2, 3, 1, 4).node, keys.node, False, True)) * spec.scale
    if spec.softcap is not None:
        scores = Tensor(opset.tanh((scores * (1 / spec.softcap)).node)) * spec.softcap
    reach = spec.window or np.iinfo(np.int32).max
    seen = trace.feed(("seen", reach), (-1, 1, 1, -1, -1), bool,
                      lambda state, arrays: (arrays["age"] >= 0) & (arrays["age"] < reach))
    weights = opset.softmax(scores.where(seen, HIDDEN).node, -1)
    out = Tensor(opset.matmul(weights, values.node, False, False)).transpose(0, 3, 1, 2, 4)
    return out.reshape(-1, heads, dim)[trace.feed("place", (-1,))]


def context(trace: Trace, new: Tensor, layer: int, which: int) -> Tensor:
    """K or V of every row's context, [B, kv_heads, 1, C, d]: what is in memory, or written in this step; else 0."""
    trace.written[layer, which] = new.node
    memory = trace.feed(("memory", layer, which), (-1, *new.shape[1:]), np.float32,
                        lambda state, arrays: state.layers[layer][which])
    is_fresh, inside = (trace.feed(name, (-1, -1, 1, 1), bool) for name in ("is_fresh", "inside"))
    fresh, slots = (trace.feed(name, (-1, -1)) for name in ("fresh", "slots"))
    both = new[fresh].where(is_fresh, memory[slots]).where(inside, 0.0)  # NaN times weight 0 would be NaN
    return both.transpose(0, 2, 1, 3).reshape(KEEP, KEEP, 1, -1, new.shape[2])
