"""Paged attention cases whose memory is poisoned wherever no token may look, and what is right for them in float64."""
from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

POISON = {torch.float32: float("nan"), torch.bfloat16: float("inf"), torch.float16: float("nan")}
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@dataclass
class Case:
    """Rows with `counts` new tokens at the end of contexts of `lengths`; K and V dense by row, and in pages."""

    lengths: list[int]
    counts: list[int]
    heads: int
    kv_heads: int
    width: int
    page_size: int
    dtype: torch.dtype = torch.float32
    v_width: int = 0
    padding: int = 0          # tokens after the last row's
    window: int | None = None  # pages wholly before it are given back: their entries are 0
    magnitude: float = 1.0
    seed: int = 0
    stored: torch.dtype | None = None
    k_dense: list[np.ndarray] = field(init=False)
    v_dense: list[np.ndarray] = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        self.v_width = self.v_width or self.width
        stored = self.stored or self.dtype
        needed = [-(-length // self.page_size) for length in self.lengths]
        pages = 1 + sum(needed) + 1
        order = (torch.randperm(pages - 1, generator=generator) + 1).tolist()
        self.k = torch.full((pages, self.page_size, self.kv_heads, self.width), float("nan")).to(stored)
        self.v = torch.full((pages, self.page_size, self.kv_heads, self.v_width), float("nan")).to(stored)
        if stored in POISON:
            self.k.fill_(POISON[stored])
            self.v.fill_(POISON[stored])
        self.table = torch.zeros(len(self.lengths), max(needed) + 1, dtype=torch.int32)
        self.k_dense, self.v_dense = [], []
        for row, (length, count, want) in enumerate(zip(self.lengths, self.counts, needed, strict=True)):
            mine = [order.pop() for _ in range(want)]
            k = (torch.randn(length, self.kv_heads, self.width, generator=generator) * self.magnitude).to(stored)
            v = torch.randn(length, self.kv_heads, self.v_width, generator=generator).to(stored)
            gone = 0 if self.window is None else max(0, length - count - self.window + 1) // self.page_size
            for n in range(gone * self.page_size, length):
                self.k[mine[n // self.page_size], n % self.page_size] = k[n]
                self.v[mine[n // self.page_size], n % self.page_size] = v[n]
            self.table[row, gone:want] = torch.tensor(mine[gone:], dtype=torch.int32)
            self.k_dense.append(k.double().numpy())
            self.v_dense.append(v.double().numpy())
        tokens = sum(self.counts) + self.padding
        self.q = torch.randn(tokens, self.heads, self.width, generator=generator).to(self.dtype)

    @property
    def starts(self) -> np.ndarray:
        return np.cumsum([0, *self.counts]).astype(np.int32)

    def right(self, scale: float, softcap: float | None = None, sinks: np.ndarray | None = None,
              trees: dict[int, np.ndarray] | None = None, positions: np.ndarray | None = None,
              ) -> tuple[np.ndarray, np.ndarray]:
        """out [T, heads, dv] and lse [T, heads]; trees: by row, seen [count, count] among the step's tokens."""
        q = self.q.double().numpy()
        out = np.zeros((len(q), self.heads, self.v_width))
        lse = np.tile(np.full(self.heads, -np.inf) if sinks is None else sinks.astype(np.float64), (len(q), 1))
        for row, (length, count) in enumerate(zip(self.lengths, self.counts, strict=True)):
            if not length:
                continue
            for i in range(count):
                t = self.starts[row] + i
                base = length - count
                where = np.arange(length)
                seen = where <= base + i
                at = base + i
                if trees is not None and row in trees:
                    seen = np.concatenate([np.full(base, True), trees[row][i]])
                    where[base:] = positions[self.starts[row]:self.starts[row + 1]]
                    at = positions[t]
                if self.window is not None:
                    seen = seen & (where > at - self.window)
                for head in range(self.heads):
                    kv_head = head // (self.heads // self.kv_heads)
                    scores = self.k_dense[row][seen, kv_head] @ q[t, head] * scale
                    if softcap is not None:
                        scores = softcap * np.tanh(scores / softcap)
                    logits = scores if sinks is None else np.append(scores, sinks[head])
                    if not len(logits):
                        continue
                    peak = logits.max()
                    total = np.exp(logits - peak).sum()
                    lse[t, head] = peak + np.log(total)
                    out[t, head] = np.exp(scores - lse[t, head]) @ self.v_dense[row][seen, kv_head]
        return out, lse


def check(found: torch.Tensor, right: np.ndarray, tolerance: float) -> None:
    """Equal to `tolerance`, infinities included, NaN nowhere."""
    got = found.double().cpu().numpy()
    assert got.shape == right.shape
    np.testing.assert_allclose(got, right, rtol=tolerance, atol=tolerance, equal_nan=False)
