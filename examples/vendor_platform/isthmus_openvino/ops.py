"""The mathematics of the models as nodes of a graph."""
from __future__ import annotations

import numpy as np
from isthmus.core.platform import AttentionSpec, Batch, MoESpec, RopeSpec
from openvino import opset15 as opset

from .attention import paged_attention
from .graph import Tensor, Trace, integers, node_of
from .moe import act_mul, moe


class Ops:
    """Made for one trace. The state is no part of it: each step hands it to the graph's inputs."""

    def __init__(self) -> None:
        self.trace = Trace()
        feeds = {name: self.trace.feed(name, (-1,)) for name in ("tokens", "logit_rows")}
        self.batch = Batch(*[None] * len(Batch._fields))._replace(**feeds)  # the rest is the host's business

    def embed(self, ids: Tensor, weight: np.ndarray) -> Tensor:
        return Tensor(node_of(weight))[ids]

    def linear(self, x: Tensor, weight: np.ndarray, bias: np.ndarray | None = None) -> Tensor:
        out = Tensor(opset.matmul(x.node, node_of(weight), False, True))
        return out if bias is None else out + bias

    def rms_norm(self, x: Tensor, weight: np.ndarray, eps: float) -> Tensor:
        mean = Tensor(opset.reduce_mean((x * x).node, integers(-1), keep_dims=True))
        return x * Tensor(opset.divide(node_of(weight), opset.sqrt((mean + eps).node)))

    def rope(self, x: Tensor, spec: RopeSpec) -> Tensor:
        half = len(spec.inv_freq)
        cos, sin = (self.trace.feed(
            (turn, spec), (-1, 1, half), np.float32, lambda state, arrays, turn=turn: spec.scale * turn(
                arrays["positions"][:, None, None] * np.array(spec.inv_freq))) for turn in (np.cos, np.sin))
        first, second, rest = x[:, :, :half], x[:, :, half:2 * half], x[:, :, 2 * half:]
        turned = [(first * cos - second * sin).node, (second * cos + first * sin).node]
        return Tensor(opset.concat(turned + [rest.node] * (2 * half < x.shape[-1]), -1))

    def attention(self, q: Tensor, k: Tensor, v: Tensor, layer: int, spec: AttentionSpec) -> Tensor:
        return paged_attention(self.trace, q, k, v, layer, spec)

    def act_mul(self, gate: Tensor, up: Tensor, kind: str) -> Tensor:
        return act_mul(gate, up, kind)

    def moe(self, x: Tensor, router_logits: Tensor, w13: np.ndarray, w2: np.ndarray, spec: MoESpec,
            bias: np.ndarray | None = None) -> Tensor:
        return moe(x, router_logits, w13, w2, spec, bias)

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def sample(self, logits: Tensor, softcap: float | None = None) -> Tensor:
        self.trace.sampled = True
        return logits if softcap is None else Tensor(opset.tanh((logits * (1 / softcap)).node)) * softcap
