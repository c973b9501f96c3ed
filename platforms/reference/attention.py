"""Paged attention: the memory of K and V, the write to slots, and a dense softmax per row."""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...core.platform import AttentionSpec, Batch, LayerState, StateSpec
from .kept import Kept, allocate


@dataclass(frozen=True)
class LayerCache:
    """K and V of one layer, each [pages, page_size, kv_heads, head_dim]."""

    k: Kept
    v: Kept

    @classmethod
    def allocate(cls, spec: StateSpec, layer: LayerState, pages: int) -> LayerCache:
        shape = pages, spec.page_size, layer.kv_heads, layer.head_dim
        return cls(allocate(spec.dtype, shape, layer.k_scale), allocate(spec.dtype, shape, layer.v_scale))

    @property
    def parts(self) -> tuple[np.ndarray, ...]:
        """All memory, pages first: K's, then V's."""
        return self.k.parts + self.v.parts

    def write(self, slots: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
        """Put k and v [T, kv_heads, d] at slots [T]; slot = page * page_size + offset."""
        at = np.divmod(slots, self.parts[0].shape[1])
        self.k.put(at, k)
        self.v.put(at, v)

    def read(self, pages: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """The first `length` tokens of a row with this page table: k and v [length, kv_heads, d] in float64."""
        used = pages[:-(-length // self.parts[0].shape[1])]
        k, v = (np.concatenate(kept.get(used))[:length] for kept in (self.k, self.v))
        return k, v


def paged_attention(q: np.ndarray, cache: LayerCache, batch: Batch, spec: AttentionSpec) -> np.ndarray:
    """q [T, heads, d] -> [T, heads, d]; tokens that no row owns give zeros."""
    out = np.zeros_like(q)
    for row in np.flatnonzero(batch.lengths):
        mine = slice(batch.starts[row], batch.starts[row + 1])
        k, v = cache.read(batch.pages[row], batch.lengths[row])
        out[mine] = attend(q[mine].astype(np.float64), k, v, batch.positions[mine], spec)
    return out


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, positions: np.ndarray, spec: AttentionSpec) -> np.ndarray:
    """One row: q [n, heads, d] at `positions` [n]; k and v [length, kv_heads, d] from position 0 on."""
    shared = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, shared, axis=1), np.repeat(v, shared, axis=1)
    scores = np.einsum("nhd,mhd->hnm", q, k) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * np.tanh(scores / spec.softcap)
    age = positions[:, None] - np.arange(len(k))
    seen = age >= 0 if spec.window is None else (age >= 0) & (age < spec.window)
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hnm,mhd->nhd", weights, v)
