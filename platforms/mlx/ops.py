"""The mathematics of the models, in MLX. What every layer needs alike is computed once per step, here."""
from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from ...core.platform import AttentionSpec, Batch, MoESpec, RopeSpec, StateSpec
from .attention import AttentionPlan, allocate, write
from .moe import act_mul, moe
from .quant import DTYPES, Experts, Matrix, Vector

STRIDE = 4096  # positions are a * STRIDE + b, so that two tables of STRIDE rows reach 16 million of them


@dataclass
class State:
    """K and V of every layer, and the last sampled token of each sequence slot. A step takes the arrays out and puts
    the new ones in, so that no other reference keeps MLX from writing in place."""

    spec: StateSpec
    pages: int
    caches: list[mx.array]
    last: mx.array

    @classmethod
    def allocate(cls, spec: StateSpec, pages: int) -> State:
        caches = [allocate(pages, spec.page_size, layer, DTYPES[spec.dtype]) for layer in spec.layers]
        state = cls(spec, pages, caches, mx.zeros((spec.seqs,), mx.int32))
        mx.eval(caches, state.last)
        return state

    def paged(self, cache: mx.array) -> mx.array:
        """[2 * kv_heads, pages, page_size, d]."""
        return cache.reshape(cache.shape[0], self.pages, self.spec.page_size, -1)

    def copy_pages(self, src: list[int], dst: list[int]) -> None:
        for i, cache in enumerate(self.caches):
            paged = self.paged(cache)
            paged[:, mx.array(dst)] = paged[:, mx.array(src)]
            self.caches[i] = paged.reshape(cache.shape)
        mx.eval(self.caches)

    def export_pages(self, pages: list[int]) -> bytes:
        some = [self.paged(cache)[:, mx.array(pages)].view(mx.uint8) for cache in self.caches]
        return b"".join(np.array(part).tobytes() for part in some)

    def import_pages(self, pages: list[int], data: bytes) -> None:
        start = 0
        for i, cache in enumerate(self.caches):
            paged = self.paged(cache)
            shape = (paged.shape[0], len(pages), *paged.shape[2:])
            size = int(np.prod(shape)) * cache.itemsize
            part = mx.array(np.frombuffer(data, np.uint8, size, start).reshape(*shape[:-1], -1)).view(cache.dtype)
            paged[:, mx.array(pages)] = part
            self.caches[i] = paged.reshape(cache.shape)
            start += size
        mx.eval(self.caches)


@dataclass(frozen=True)
class Logits:
    """What `Ops.sample` gives: raw logits [L, V] in float32 after a soft cap. The step samples from them."""

    values: mx.array


class Turns:
    """Cosines and sines of rotary angles to float32 precision at any position, from tables computed in float64.

    cos(p f) and sin(p f) follow from p = a * STRIDE + b by the addition theorems; float32 angles would be off by 1e-2
    radians at a position of 10^5.
    """

    def __init__(self) -> None:
        self.tables: dict[RopeSpec, tuple[mx.array, ...]] = {}

    def periods(self, spec: RopeSpec) -> mx.array:
        """[rotated / 2] positions per radian, as `mx.fast.rope` takes them."""
        return mx.array((1 / np.maximum(spec.inv_freq, 1e-30)).astype(np.float32))

    def at(self, positions: mx.array, spec: RopeSpec) -> tuple[mx.array, mx.array]:
        """positions [T] -> cosine and sine, [T, 1, rotated / 2] each, with the spec's factor."""
        if spec not in self.tables:
            self.tables[spec] = self._build(spec)
        coarse_cos, coarse_sin, fine_cos, fine_sin = self.tables[spec]
        a, b = positions // STRIDE, positions % STRIDE
        ca, sa, cb, sb = coarse_cos[a], coarse_sin[a], fine_cos[b], fine_sin[b]
        return (ca * cb - sa * sb)[:, None], (sa * cb + ca * sb)[:, None]

    def _build(self, spec: RopeSpec) -> tuple[mx.array, ...]:
        fine = np.arange(STRIDE, dtype=np.float64)[:, None] * np.array(spec.inv_freq)
        coarse = fine * STRIDE
        parts = (spec.scale * np.cos(coarse), spec.scale * np.sin(coarse), np.cos(fine), np.sin(fine))
        tables = tuple(mx.array(part.astype(np.float32)) for part in parts)
        mx.eval(tables)
        return tables


class Ops:
    """One step's view of the state and the batch, built inside the trace. `batch` has MLX arrays."""

    def __init__(self, caches: list[mx.array], batch: Batch, plan: AttentionPlan, turns: Turns) -> None:
        self.caches, self.batch, self.plan, self.turns = caches, batch, plan, turns
        self.angles: dict[RopeSpec, tuple[mx.array, mx.array]] = {}

    def embed(self, ids: mx.array, weight: Matrix) -> mx.array:
        return weight.rows(ids)

    def linear(self, x: mx.array, weight: Matrix, bias: Vector | None = None) -> mx.array:
        y = weight.product(x)
        return y if bias is None else y + bias.values

    def rms_norm(self, x: mx.array, weight: Vector, eps: float) -> mx.array:
        return mx.fast.rms_norm(x, weight.values, eps)

    def rope(self, x: mx.array, spec: RopeSpec) -> mx.array:
        rotated = 2 * len(spec.inv_freq)
        if rotated < x.shape[-1]:
            return mx.concatenate([self.rope(x[..., :rotated], spec), x[..., rotated:]], axis=-1)
        if self.plan.device.metal:
            turned = mx.fast.rope(x[:, :, None], rotated, traditional=False, base=None, scale=1.0,
                                  offset=self.batch.positions, freqs=self.turns.periods(spec))[:, :, 0]
            return turned if spec.scale == 1 else turned * spec.scale
        if spec not in self.angles:
            self.angles[spec] = self.turns.at(self.batch.positions, spec)
        cos, sin = self.angles[spec]
        first, second = mx.split(x.astype(mx.float32), 2, axis=-1)
        turned = mx.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
        return turned.astype(x.dtype)

    def attention(self, q: mx.array, k: mx.array, v: mx.array, layer: int, spec: AttentionSpec) -> mx.array:
        self.caches[layer] = write(self.caches[layer], self.batch.slots, k, v)
        return self.plan.attend(q, self.caches[layer], spec)

    def act_mul(self, gate: mx.array, up: mx.array, kind: str) -> mx.array:
        return act_mul(gate, up, kind)

    def moe(self, x: mx.array, router_logits: mx.array, w13: Experts, w2: Experts, spec: MoESpec,
            bias: Vector | None = None) -> mx.array:
        return moe(x, router_logits, w13, w2, spec, bias)

    def all_reduce(self, x: mx.array) -> mx.array:
        return x

    def sample(self, logits: mx.array, softcap: float | None = None) -> Logits:
        logits = logits.astype(mx.float32)
        return Logits(logits if softcap is None else mx.tanh(logits / softcap) * softcap)
