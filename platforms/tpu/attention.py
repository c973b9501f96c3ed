"""Paged attention: where K and V are kept, how one step's tokens are written, and which code reads them.

A layer's cache is [pages, page_size, ranks * 2 * kv_heads * head_dim]: for each rank K of all its heads, then V. The
Pallas kernel reads it where it can (`attention_kernel.refusal`); the composed path here does everywhere else, with the
same online softmax over chunks of context, as many as the step's longest context needs and no more.
"""
from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from ...core.platform import AttentionSpec, Batch
from .attention_kernel import HIDDEN, Items, ragged_attention, refusal
from .quant import precision

CONTEXT = 128    # context positions of a chunk, at least one page
QUERIES = 64     # queries of a prefill row that share a chunk
TOKEN_WISE = 16  # with so few tokens every one reads its context by itself


class AttentionPlan:
    """What all layers of a step share. `mode` is the platform's: "mosaic", "interpret" or "composed"."""

    def __init__(self, batch: Batch, mode: str) -> None:
        self.batch, self.mode = batch, mode
        self.items = Items.of(batch) if mode != "composed" else None

    def write(self, cache: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        """Put k and v [T, kv_heads, d] at the batch's slots."""
        new = jnp.concatenate([part.reshape(len(part), -1) for part in (k, v)], 1).astype(cache.dtype)
        return cache.reshape(-1, cache.shape[2]).at[self.batch.slots].set(new).reshape(cache.shape)

    def attend(self, q: jax.Array, cache: jax.Array, spec: AttentionSpec) -> jax.Array:
        """[T, heads, d] -> [T, heads, d]."""
        if self._kernel_takes(q, cache):
            return ragged_attention(q, cache, self.batch, self.items, spec, self.mode == "interpret")
        if len(q) <= TOKEN_WISE:
            return self._each_token(q, cache, spec, len(q))
        return self._prefill_rows(q, cache, spec, self._each_token(q, cache, spec, min(self.batch.seqs.size, len(q))))

    def _kernel_takes(self, q: jax.Array, cache: jax.Array) -> bool:
        if self.items is None or q.dtype != cache.dtype or not self.items.fits(self.batch.pages):
            return False
        _, heads, dim = q.shape
        return self.mode == "interpret" or refusal(cache.shape[2] // (2 * dim), dim, cache.shape[1], q.dtype) is None

    def _each_token(self, q: jax.Array, cache: jax.Array, spec: AttentionSpec, count: int) -> jax.Array:
        """The first `count` tokens, each by itself; where those are not all, only rows of one token. Zeros elsewhere.

        Rows of one token come first, so row b's is token b.
        """
        b = self.batch
        tokens, heads, dim = q.shape
        kv_heads = cache.shape[2] // (2 * dim)
        place = jnp.arange(count)
        mine = place < b.starts[-1]
        if count < tokens:
            mine &= (b.starts[1:] - b.starts[:-1])[:count] == 1
        positions = jnp.where(mine, b.positions[:count], -1)[:, None]
        q = q[:count].reshape(count, kv_heads, heads // kv_heads, dim)
        out = online(q, cache, b.pages[b.rows[:count]], positions, spec).reshape(count, heads, dim)
        return jnp.pad(out, ((0, tokens - count), (0, 0), (0, 0)))

    def _prefill_rows(self, q: jax.Array, cache: jax.Array, spec: AttentionSpec, out: jax.Array) -> jax.Array:
        """Rows of several tokens, `QUERIES` tokens at a time, put into `out`."""
        b = self.batch
        tokens, heads, dim = q.shape
        kv_heads = cache.shape[2] // (2 * dim)
        filled = jnp.pad(q, ((0, QUERIES), (0, 0), (0, 0)))

        def block(carry: tuple) -> tuple:
            row, start, out = carry
            stop = b.starts[row + 1]
            place = start + jnp.arange(QUERIES)
            position = place - stop + b.lengths[row]
            positions = jnp.where((place < stop) & (stop - b.starts[row] > 1), position, -1)
            some = lax.dynamic_slice_in_dim(filled, start, QUERIES)
            some = some.reshape(1, QUERIES, kv_heads, -1, dim).transpose(0, 2, 1, 3, 4)
            shared = some.shape[3]
            some = some.reshape(1, kv_heads, QUERIES * shared, dim)
            new = online(some, cache, b.pages[row][None], jnp.repeat(positions, shared)[None], spec)
            new = new.reshape(kv_heads, QUERIES, shared, dim).transpose(1, 0, 2, 3).reshape(QUERIES, heads, dim)
            old = lax.dynamic_slice_in_dim(out, start, QUERIES)
            out = lax.dynamic_update_slice_in_dim(out, jnp.where(positions[:, None, None] >= 0, new, old), start, 0)
            done = start + QUERIES >= stop
            return row + done, jnp.where(done, stop, start + QUERIES), out

        first = jnp.sum(b.starts[1:] - b.starts[:-1] == 1)
        out = jnp.pad(out, ((0, QUERIES), (0, 0), (0, 0)))
        carry = (first, b.starts[first], out)
        return lax.while_loop(lambda carry: carry[1] < b.starts[-1], block, carry)[2][:tokens]


def online(q: jax.Array, cache: jax.Array, pages: jax.Array, positions: jax.Array, spec: AttentionSpec) -> jax.Array:
    """Attention of n groups of queries, each over its own pages, chunk by chunk.

    q [n, kv_heads, R, d]; pages [n, P]; positions [n, 1 or R], -1 for a query that sees nothing and gets zeros.
    """
    count, kv_heads, rows, dim = q.shape
    page = cache.shape[1]
    per = max(1, CONTEXT // page)
    chunk = per * page
    pages = jnp.pad(pages, ((0, 0), (0, -pages.shape[1] % per)))
    longest = positions.max(1)[:, None, None]

    def fold(number: jax.Array, carry: tuple) -> tuple:
        best, total, values = carry
        these = lax.dynamic_slice_in_dim(pages, number * per, per, 1)
        kv = cache[these].reshape(count, chunk, 2, kv_heads, dim)
        at = number * chunk + jnp.arange(chunk)
        age = positions[:, :, None] - at
        seen = (age >= 0) if spec.window is None else (age >= 0) & (age < spec.window)
        v = jnp.where((at[None, :, None] <= longest)[..., None], kv[:, :, 1], 0)  # other places may hold NaN
        scores = jnp.einsum("nkrd,nckd->nkrc", q.astype(kv.dtype), kv[:, :, 0], precision=precision(kv.dtype),
                            preferred_element_type=jnp.float32) * spec.scale
        if spec.softcap is not None:
            scores = spec.softcap * jnp.tanh(scores / spec.softcap)
        scores = jnp.where(seen[:, None], scores, HIDDEN)
        top = jnp.maximum(best, scores.max(-1))
        weights = jnp.where(seen[:, None], jnp.exp(scores - top[..., None]), 0)
        fade = jnp.exp(best - top)
        add = jnp.einsum("nkrc,nckd->nkrd", weights.astype(v.dtype), v, precision=precision(v.dtype),
                         preferred_element_type=jnp.float32)
        return top, total * fade + weights.sum(-1), values * fade[..., None] + add

    start = (jnp.full((count, kv_heads, rows), HIDDEN), jnp.zeros((count, kv_heads, rows)),
             jnp.zeros((count, kv_heads, rows, dim)))
    high = (positions.max() + chunk) // chunk
    low = 0
    if spec.window is not None:
        earliest = jnp.where(positions < 0, jnp.iinfo(jnp.int32).max, positions).min()
        low = jnp.minimum(jnp.maximum(earliest - spec.window + 1, 0) // chunk, high)
    _, total, values = lax.fori_loop(low, high, fold, start)
    return (values / jnp.maximum(total, 1e-30)[..., None]).astype(q.dtype)
