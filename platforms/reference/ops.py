"""The mathematics of the models, in numpy: every op as its docstring in `core.platform` says, and nothing faster.

Matrix products run in the compute dtype; norms, angles, softmax and sampling in float64.
"""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...core.platform import AttentionSpec, Batch, MoESpec, RopeSpec, StateSpec, StepResult
from .attention import LayerCache, paged_attention
from .moe import act_mul, moe
from .quant import Dense, Experts, QuantLinear
from .sampling import best_ids, choose, log_softmax


@dataclass(frozen=True)
class State:
    """K and V of every layer, and the last sampled token of each sequence slot. The arrays are changed in place."""

    spec: StateSpec
    layers: tuple[LayerCache, ...]
    last: np.ndarray


class Ops:
    """One step's view of the state and the batch."""

    def __init__(self, state: State, batch: Batch) -> None:
        self.state, self.batch = state, batch
        self.seqs = batch.seqs[batch.rows]  # sequence slot of each token
        self.last = state.last[self.seqs]

    def embed(self, ids: np.ndarray, weight: Dense | QuantLinear) -> np.ndarray:
        return weight.rows(np.where(ids < 0, self.last, ids))

    def linear(self, x: np.ndarray, weight: Dense | QuantLinear, bias: Dense | None = None) -> np.ndarray:
        out = weight.product(x)
        return out if bias is None else out + bias.values

    def rms_norm(self, x: np.ndarray, weight: Dense, eps: float) -> np.ndarray:
        wide = x.astype(np.float64)
        scale = 1 / np.sqrt(np.mean(wide ** 2, axis=-1, keepdims=True) + eps)
        return (wide * scale * weight.values).astype(x.dtype)

    def rope(self, x: np.ndarray, spec: RopeSpec) -> np.ndarray:
        angles = self.batch.positions[:, None, None] * np.array(spec.inv_freq)
        cos, sin = spec.scale * np.cos(angles), spec.scale * np.sin(angles)
        half = len(spec.inv_freq)
        first, second, rest = np.split(x, [half, 2 * half], axis=-1)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1).astype(x.dtype)

    def attention(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, layer: int, spec: AttentionSpec) -> np.ndarray:
        cache = self.state.layers[layer]
        cache.write(self.batch.slots, k, v)
        return paged_attention(q, cache, self.batch, spec)

    def act_mul(self, gate: np.ndarray, up: np.ndarray, kind: str) -> np.ndarray:
        return act_mul(gate, up, kind)

    def moe(self, x: np.ndarray, router_logits: np.ndarray, w13: Experts, w2: Experts, spec: MoESpec,
            bias: Dense | None = None) -> np.ndarray:
        return moe(x, router_logits, w13, w2, spec, bias)

    def all_reduce(self, x: np.ndarray) -> np.ndarray:
        return x

    def sample(self, logits: np.ndarray, softcap: float | None = None) -> StepResult:
        batch, sampling = self.batch, self.batch.sampling
        logits = logits.astype(np.float64)
        if softcap is not None:
            logits = softcap * np.tanh(logits / softcap)
        inputs = np.where(batch.tokens < 0, self.last, batch.tokens)[batch.logit_rows]
        tokens = choose(logits, batch.targets, sampling, inputs)
        sampled = batch.targets == -1
        self.state.last[self.seqs[batch.logit_rows[sampled]]] = tokens[sampled]
        if sampling.top_logprobs is None:
            return StepResult(tokens)
        logprobs = log_softmax(logits).astype(np.float32)
        top = best_ids(logits, len(sampling.top_logprobs))
        return StepResult(tokens, logprobs[np.arange(len(tokens)), tokens], top, np.take_along_axis(logprobs, top, 1))
