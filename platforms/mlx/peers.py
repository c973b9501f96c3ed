"""MLX's own operators, for `isthmus bench kernels`."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

DTYPES = {"f32": mx.float32, "bf16": mx.bfloat16, "f16": mx.float16}


def peer(op: str, dtype: str, **case: Any) -> Callable[[int], None] | None:
    """A function that does the op so many times; None for what MLX has no operator for."""
    make = MAKERS.get(op)
    if make is None:
        return None
    call = make(lambda *shape: mx.random.normal(shape).astype(DTYPES[dtype]), **case)

    def repeated(count: int) -> None:
        mx.eval([call() for _ in range(count)])
    return repeated


def _linear(random: Any, tokens: int, inputs: int, outputs: int) -> Callable[[], Any]:
    x, weight = random(tokens, inputs), random(outputs, inputs)
    return lambda: x @ weight.T


def _embed(random: Any, tokens: int, vocab: int, width: int) -> Callable[[], Any]:
    table, ids = random(vocab, width), mx.arange(tokens) % vocab
    return lambda: table[ids]


def _rms_norm(random: Any, tokens: int, width: int) -> Callable[[], Any]:
    x, weight = random(tokens, width), random(width)
    return lambda: mx.fast.rms_norm(x, weight, 1e-5)


def _rope(random: Any, tokens: int, heads: int, head_dim: int) -> Callable[[], Any]:
    x = random(1, heads, tokens, head_dim)
    return lambda: mx.fast.rope(x, head_dim, traditional=False, base=10_000.0, scale=1.0, offset=0)


def _act_mul(random: Any, tokens: int, width: int) -> Callable[[], Any]:
    gate, up = random(tokens, width), random(tokens, width)
    return lambda: gate * mx.sigmoid(gate) * up


def _attention(random: Any, rows: int, tokens: int, context: int, heads: int, kv_heads: int,
               head_dim: int) -> Callable[[], Any]:
    """Over K and V that lie in a row: without pages."""
    q = random(rows, heads, tokens, head_dim)
    k, v = (random(rows, kv_heads, context, head_dim) for _ in "kv")
    mask = "causal" if tokens > 1 else None
    return lambda: mx.fast.scaled_dot_product_attention(q, k, v, scale=head_dim ** -0.5, mask=mask)


def _sample(random: Any, rows: int, vocab: int, width: int) -> Callable[[], Any]:
    x, head = random(rows, width), random(vocab, width)
    return lambda: mx.argmax(x @ head.T, axis=-1)


MAKERS = {"linear": _linear, "embed": _embed, "rms_norm": _rms_norm, "rope": _rope, "act_mul": _act_mul,
          "attention": _attention, "sample": _sample}
