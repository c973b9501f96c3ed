"""Pallas kernel: attention of prefill and decode rows in one launch, over pages that stay where they are in HBM.

A work item is one row's tokens in one block of queries, so a block that holds many decode rows is several items that
follow each other; each writes only its own tokens. K and V come page by page into one of two buffers while the other
is computed on, with an online softmax (Milakov and Gimelshein 2018; Dao et al. 2022). Only pages that an item can see
are read. Idea of ragged items: Pallas' ragged paged attention (Jevin Jiang et al.), vLLM on TPU.
"""
from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ...core.platform import AttentionSpec, Batch
from .quant import precision

LANES = 128
CONTEXT = 128        # context positions in a buffer, unless that takes more than `PAGES`
PAGES = 8            # pages in a buffer at most: each is a copy of its own
SCALARS = 768 << 10  # bytes of page tables and work items that scalar memory takes
HIDDEN = -1e30       # score of a position that is not seen; finite, so that no difference of two is NaN


def refusal(kv_heads: int, head_dim: int, page_size: int, dtype: jnp.dtype) -> str | None:
    """Why the kernel cannot take a model's attention on a TPU; None = it can."""
    rows = 32 // jnp.dtype(dtype).itemsize
    if page_size % rows:
        return f"pages of {page_size} tokens are no multiple of {rows}, the rows of a {jnp.dtype(dtype)} tile"
    if head_dim % (LANES // 2):
        return f"head_dim {head_dim} is no multiple of {LANES // 2}"
    if 2 * kv_heads * head_dim % LANES:
        return f"K and V of {kv_heads} x {head_dim} do not fill whole lanes of {LANES}"
    return None


@dataclass(frozen=True)
class Items:
    """Work items of one step, shared by all layers: row and query block of each, and how many there are."""

    rows: jax.Array
    blocks: jax.Array
    count: jax.Array
    size: int  # queries in a block

    @classmethod
    def of(cls, batch: Batch) -> Items:
        tokens, rows = len(batch.tokens), len(batch.seqs)
        size = 8 if tokens <= 64 else 32
        first = batch.starts[:-1] // size
        counts = jnp.where(batch.starts[1:] > batch.starts[:-1], (batch.starts[1:] - 1) // size - first + 1, 0)
        ends = jnp.cumsum(counts)
        number = jnp.arange(pl.cdiv(tokens, size) + rows, dtype=jnp.int32)
        row = jnp.minimum(jnp.sum(number[:, None] >= ends[None], 1), rows - 1).astype(jnp.int32)
        block = jnp.minimum(first[row] + number - (ends - counts)[row], pl.cdiv(tokens, size) - 1)
        return cls(row, block.astype(jnp.int32), ends[-1], size)

    def fits(self, pages: jax.Array) -> bool:
        """Does scalar memory hold the items and the page table?"""
        return 4 * (2 * len(self.rows) + 3 * len(pages) + pages.size) <= SCALARS


def ragged_attention(q: jax.Array, cache: jax.Array, batch: Batch, items: Items, spec: AttentionSpec,
                     interpret: bool = False) -> jax.Array:
    """q [T, heads, d], cache [pages, page_size, 2 * kv_heads * d] (K of all heads, then V) -> [T, heads, d].

    Tokens that no row owns get undefined values.
    """
    tokens, heads, dim = q.shape
    _, page, width = cache.shape
    kv_heads = width // (2 * dim)
    shared, size = heads // kv_heads, items.size
    blocks, per = pl.cdiv(tokens, size), max(1, min(PAGES, CONTEXT // page, batch.pages.shape[1]))
    # [kv_heads, blocks, heads of the group * queries, d]: a KV head's queries are one matrix
    q = jnp.pad(q, ((0, blocks * size - tokens), (0, 0), (0, 0)))
    q = q.reshape(blocks, size, kv_heads, shared, dim).transpose(2, 0, 3, 1, 4)
    q = q.reshape(kv_heads, blocks, shared * size, dim)
    view = pl.BlockSpec((kv_heads, 1, shared * size, dim), lambda i, rows, blocks, *_: (0, blocks[i], 0, 0))
    out = pl.pallas_call(
        partial(_kernel, spec=spec, size=size, per=per, width=batch.pages.shape[1]),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5, grid=(items.count,),
            in_specs=[view, pl.BlockSpec(memory_space=pl.ANY)], out_specs=view,
            scratch_shapes=[pltpu.VMEM((2, per, page, width), cache.dtype), pltpu.SemaphoreType.DMA((2,)),
                            pltpu.VMEM((kv_heads, shared * size, 1), jnp.float32),
                            pltpu.VMEM((kv_heads, shared * size, 1), jnp.float32),
                            pltpu.VMEM((kv_heads, shared * size, dim), jnp.float32)]),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype), interpret=interpret,
    )(items.rows, items.blocks, batch.starts, batch.lengths, batch.pages.reshape(-1), q, cache)
    out = out.reshape(kv_heads, blocks, shared, size, dim).transpose(1, 3, 0, 2, 4)
    return out.reshape(blocks * size, heads, dim)[:tokens]


def _kernel(rows, blocks, starts, lengths, pages, q, cache, out, buffer, arrived, best, total, values, *,
            spec: AttentionSpec, size: int, per: int, width: int) -> None:
    item = pl.program_id(0)
    row, block = rows[item], blocks[item]
    first, stop = jnp.maximum(starts[row], block * size), jnp.minimum(starts[row + 1], (block + 1) * size)
    shift = lengths[row] - starts[row + 1]  # from a token's place in the batch to its position
    chunk = per * buffer.shape[2]
    low = 0 if spec.window is None else lax.div(jnp.maximum(first + shift - spec.window + 1, 0), chunk)
    used = pl.cdiv(stop + shift, buffer.shape[2])
    high = pl.cdiv(stop + shift, chunk)

    def each_page(number: jax.Array, act: str) -> None:
        for place in range(per):
            @pl.when(number * per + place < used)
            def _(place: int = place) -> None:
                page = pages[row * width + number * per + place]
                copy = pltpu.make_async_copy(cache.at[page], buffer.at[number % 2, place], arrived.at[number % 2])
                getattr(copy, act)()

    best[...] = jnp.full_like(best, HIDDEN)
    total[...] = jnp.zeros_like(total)
    values[...] = jnp.zeros_like(values)
    each_page(low, "start")
    token = block * size + lax.broadcasted_iota(jnp.int32, (q.shape[2], 1), 0) % size
    mine = (token >= first) & (token < stop)

    def fold(number: jax.Array, _: None) -> None:
        @pl.when(number + 1 < high)
        def _() -> None:
            each_page(number + 1, "start")
        each_page(number, "wait")
        at = number * chunk + lax.broadcasted_iota(jnp.int32, (1, chunk), 1)
        age = token + shift - at
        seen = mine & (age >= 0)
        if spec.window is not None:
            seen &= age < spec.window
        here = number * chunk + lax.broadcasted_iota(jnp.int32, (chunk, 1), 0) < stop + shift
        _fold_chunk(q, buffer.at[number % 2], seen, here, best, total, values, spec)

    lax.fori_loop(low, high, fold, None)
    fresh = (item == 0) | (blocks[jnp.maximum(item - 1, 0)] != block)
    for head in range(q.shape[0]):
        result = (values[head] / jnp.maximum(total[head], 1e-30)).astype(out.dtype)
        before = jnp.where(fresh, jnp.zeros_like(result), out[head, 0])
        out[head, 0] = jnp.where(mine, result, before)


def _fold_chunk(q, chunk, seen, here, best, total, values, spec: AttentionSpec) -> None:
    """One buffer of K and V into the running softmax. `here` [chunk, 1]: positions that hold a token of the row; other
    places may hold anything, NaN too."""
    heads, dim = q.shape[0], q.shape[3]
    for head in range(heads):
        k, v = (chunk[:, :, at * dim:(at + 1) * dim].reshape(-1, dim) for at in (head, heads + head))
        v = jnp.where(here, v, jnp.zeros_like(v))
        scores = lax.dot_general(q[head, 0], k, (((1,), (1,)), ((), ())), precision=precision(q.dtype),
                                 preferred_element_type=jnp.float32) * spec.scale
        if spec.softcap is not None:
            scores = spec.softcap * jnp.tanh(scores / spec.softcap)
        scores = jnp.where(seen, scores, HIDDEN)
        top = jnp.maximum(best[head], scores.max(1, keepdims=True))
        weights = jnp.exp(scores - top)
        fade = jnp.exp(best[head] - top)
        best[head] = top
        total[head] = total[head] * fade + weights.sum(1, keepdims=True)
        values[head] = values[head] * fade + lax.dot_general(
            weights.astype(v.dtype), v, (((1,), (0,)), ((), ())), precision=precision(v.dtype),
            preferred_element_type=jnp.float32)
