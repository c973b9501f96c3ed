"""torch's own operators for the ops of the neck, for `isthmus bench kernels`: what a platform's kernels must beat."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

DTYPES = {"f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
CACHED, MOST_COPIES = 64 << 20, 32  # bytes of weights used in turn, so that no cache holds them


class Peers:
    """Of one device. wait: until it has done what it was given."""

    def __init__(self, device: str, wait: Callable[[], None] = lambda: None):
        self.device, self.wait = device, wait

    def peer(self, op: str, dtype: str, **case: Any) -> Callable[[int], None] | None:
        """A function that does the op so many times; None for what torch has no operator for."""
        make = getattr(self, f"_{op}", None)
        if make is None:
            return None
        call = make(DTYPES[dtype], **case)

        def repeated(count: int) -> None:
            with torch.inference_mode():
                for i in range(count):
                    call(i)
            self.wait()
        return repeated

    def _random(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float32, device=self.device).to(dtype)

    def _linear(self, dtype: torch.dtype, tokens: int, inputs: int, outputs: int) -> Callable[[int], Any]:
        copies = max(2, min(MOST_COPIES, CACHED // (inputs * outputs * dtype.itemsize) + 1))
        x, weights = self._random(dtype, tokens, inputs), [self._random(dtype, outputs, inputs) for _ in range(copies)]
        return lambda i: F.linear(x, weights[i % copies])

    def _embed(self, dtype: torch.dtype, tokens: int, vocab: int, width: int) -> Callable[[int], Any]:
        table = self._random(dtype, vocab, width)
        ids = torch.arange(tokens, device=self.device) % vocab
        return lambda i: F.embedding(ids, table)

    def _rms_norm(self, dtype: torch.dtype, tokens: int, width: int) -> Callable[[int], Any]:
        x, weight = self._random(dtype, tokens, width), self._random(dtype, width)
        return lambda i: F.rms_norm(x, (width,), weight, 1e-5)

    def _rope(self, dtype: torch.dtype, tokens: int, heads: int, head_dim: int) -> Callable[[int], Any]:
        x, cos = self._random(dtype, tokens, heads, head_dim), self._random(dtype, tokens, 1, head_dim)
        half = head_dim // 2
        return lambda i: x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * cos

    def _act_mul(self, dtype: torch.dtype, tokens: int, width: int) -> Callable[[int], Any]:
        gate, up = self._random(dtype, tokens, width), self._random(dtype, tokens, width)
        return lambda i: F.silu(gate) * up

    def _attention(self, dtype: torch.dtype, rows: int, tokens: int, context: int, heads: int, kv_heads: int,
                   head_dim: int) -> Callable[[int], Any]:
        """Over K and V that lie in a row: without pages."""
        q = self._random(dtype, rows, heads, tokens, head_dim)
        k, v = (self._random(dtype, rows, kv_heads, context, head_dim) for _ in "kv")
        return lambda i: F.scaled_dot_product_attention(q, k, v, is_causal=tokens > 1, enable_gqa=True)

    def _sample(self, dtype: torch.dtype, rows: int, vocab: int, width: int) -> Callable[[int], Any]:
        x, head = self._random(dtype, rows, width), self._random(dtype, vocab, width)
        return lambda i: F.linear(x, head).argmax(-1)
