"""Paged attention: the K and V memory of a layer, and how one step's tokens read it.

Rows of one token (decode) are attended together. Rows of several tokens are cut into tiles of `TILE` queries, so that
ragged prompts have few static shapes. On Apple GPUs decode reads the pages in place (`attention_kernel`); otherwise the
pages are gathered and a masked softmax runs over them.
"""
from __future__ import annotations

import bisect
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from ...core.platform import AttentionSpec, Batch, Buckets, LayerState
from .attention_kernel import decode_kernel, kernel_gap
from .quant import Device

TILE = 64               # queries of one row that read the same pages
SCORES = 64 << 20       # bytes of scores held at once


# Sizes that steps are compiled for. Padding costs time where products are bound by arithmetic, and each size costs a
# trace: steps of about a third.
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
BUCKETS = Buckets(tokens=SIZES, rows=SIZES[:16], pages=(*SIZES[3:], 3072, 4096, 6144, 8192, 12288, 16384, 32768, 65536))


def fit(count: int, sizes: tuple[int, ...]) -> int:
    """The smallest of the ascending `sizes` that holds `count`, or `count` beyond them; 0 for 0."""
    place = bisect.bisect_left(sizes, count)
    return count if count == 0 or place == len(sizes) else sizes[place]


@dataclass(frozen=True)
class Sizes:
    """What a trace depends on: decode rows, tiles and queries in each; plain: token t is decode row t, no tiles."""

    decodes: int
    tiles: int
    queries: int
    plain: bool


def plan_arrays(batch: Batch, page_size: int) -> tuple[Sizes, dict[str, np.ndarray]]:
    """A step's attention as arrays of few sizes, whatever the batch is padded to. Position -1 is a query that nobody
    owns; its result is zeros.

    decode_tokens, decode_positions [D], decode_pages [D, P]; tile_tokens, tile_positions [N, Q], tile_pages [N, P];
    places [T]: where each token's result is among the D + N * Q.
    """
    total, counts = len(batch.tokens), np.diff(batch.starts)
    several = np.flatnonzero(counts != 1)
    decodes = int(several[0]) if len(several) else len(counts)
    pages = batch.pages[:, :fit(-(-int(batch.lengths.max()) // page_size), BUCKETS.pages)]
    only_decodes, size = decodes == batch.starts[-1], fit(decodes, BUCKETS.tokens)
    plain = only_decodes and size >= total
    size = total if plain else size
    arrays = {"decode_tokens": _grown(np.arange(decodes), size), "decode_pages": _grown(pages[:decodes], size),
              "decode_positions": _grown(batch.positions[:decodes], size, -1)}
    if plain:
        return Sizes(size, 0, 0, True), arrays
    places = np.zeros(total, np.int32)
    places[:decodes] = np.arange(decodes)
    if only_decodes:
        return Sizes(size, 0, 0, False), arrays | {"places": places}
    prompts = np.flatnonzero(counts > 1)
    queries = min(TILE, fit(int(counts.max()), BUCKETS.tokens))
    each = -(-counts[prompts] // queries)
    rows = np.repeat(prompts, each)
    first = np.arange(each.sum()) - np.repeat(np.cumsum(each) - each, each)
    tokens = (batch.starts[rows] + first * queries)[:, None] + np.arange(queries)
    inside = tokens < batch.starts[rows + 1][:, None]
    tiles = fit(len(rows), BUCKETS.tokens)
    places[tokens[inside]] = (size + np.arange(tokens.size)).reshape(tokens.shape)[inside]
    tokens = np.where(inside, tokens, 0)
    arrays |= {"tile_tokens": _grown(tokens, tiles), "tile_pages": _grown(pages[rows], tiles),
               "tile_positions": _grown(np.where(inside, batch.positions[tokens], -1), tiles, -1), "places": places}
    return Sizes(size, tiles, queries, False), arrays


def _grown(array: np.ndarray, size: int, value: int = 0) -> np.ndarray:
    out = np.full((size, *array.shape[1:]), value, np.int32)
    out[:len(array)] = array
    return out


def allocate(pages: int, page_size: int, layer: LayerState, dtype: mx.Dtype) -> mx.array:
    """K and V of one layer, K's heads before V's: [2 * kv_heads, pages * page_size, head_dim]."""
    return mx.zeros((2 * layer.kv_heads, pages * page_size, layer.head_dim), dtype)


def write(cache: mx.array, slots: mx.array, k: mx.array, v: mx.array) -> mx.array:
    """Put k and v [T, kv_heads, d] at slots [T]. The memory is donated, so nothing else is copied."""
    cache[:, slots] = mx.concatenate([k, v], axis=1).swapaxes(0, 1).astype(cache.dtype)
    return cache


@dataclass(frozen=True)
class AttentionPlan:
    """One step's attention, the same for all layers. `arrays` as `plan_arrays` says, on the device."""

    sizes: Sizes
    arrays: dict[str, mx.array]
    page_size: int
    device: Device

    def attend(self, q: mx.array, cache: mx.array, spec: AttentionSpec) -> mx.array:
        """q [T, heads, d] -> [T, heads, d]; padding tokens get some finite value."""
        a, parts = self.arrays, []
        if self.sizes.decodes:
            some = q if self.sizes.plain else mx.take(q, a["decode_tokens"], axis=0)
            parts.append(self._decode(some, cache, spec, a["decode_pages"], a["decode_positions"]))
        if self.sizes.plain:
            return parts[0]
        if self.sizes.tiles:
            tiles = mx.take(q, a["tile_tokens"].flatten(), axis=0).reshape(*a["tile_tokens"].shape, *q.shape[1:])
            out = attend_gathered(tiles, cache, spec, a["tile_pages"], a["tile_positions"], self.page_size, self.device)
            parts.append(out.reshape(-1, *q.shape[1:]))
        return mx.take(mx.concatenate(parts) if len(parts) > 1 else parts[0], a["places"], axis=0)

    def _decode(self, q: mx.array, cache: mx.array, spec: AttentionSpec, pages: mx.array,
                positions: mx.array) -> mx.array:
        if self.device.metal and kernel_gap(q.shape[1], cache.shape[0] // 2, q.shape[2]) is None:
            return decode_kernel(q, cache, spec, pages, positions, self.page_size)
        return attend_gathered(q[:, None], cache, spec, pages, positions[:, None], self.page_size, self.device)[:, 0]


def attend_gathered(q: mx.array, cache: mx.array, spec: AttentionSpec, pages: mx.array, positions: mx.array,
                    page_size: int, device: Device) -> mx.array:
    """q [N, Q, heads, d] at positions [N, Q] (ascending; -1 = nobody's) with page tables [N, P] -> [N, Q, heads, d].

    Bounded: scores of no more than `SCORES` bytes at once where it can be divided.
    """
    count, queries, heads, dim = q.shape
    if spec.window is not None:
        pages, first = window_pages(pages, positions[:, 0], spec.window, queries, page_size)
    else:
        first = mx.zeros((count,), mx.int32)
    context = pages.shape[1] * page_size
    step = max(1, SCORES // (4 * queries * heads * context))
    parts = []
    for start in range(0, count, step):
        some = slice(start, start + step)
        keys = first[some, None] * page_size + mx.arange(context)
        parts.append(_attend_some(q[some], cache, pages[some], keys, positions[some], spec, page_size, device))
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)


def window_pages(pages: mx.array, lowest: mx.array, window: int, queries: int,
                 page_size: int) -> tuple[mx.array, mx.array]:
    """The pages that queries from position `lowest` [N] on can see, and the number of the first of them [N]."""
    width = min(pages.shape[1], (window + queries - 2) // page_size + 2)
    first = mx.maximum(lowest - (window - 1), 0) // page_size
    columns = mx.minimum(first[:, None] + mx.arange(width), pages.shape[1] - 1)
    return mx.take_along_axis(pages, columns, axis=1), first


def _gather(cache: mx.array, pages: mx.array, needed: mx.array, page_size: int,
            dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    """K and V of page tables [N, P], each [N, kv_heads, P * page_size, d], with zeros where nothing is needed [N, S].

    What no query sees may be anything, even NaN, which a weight of 0 would not stop.
    """
    both, _, dim = cache.shape
    blocks = mx.take(cache.reshape(both, -1, page_size * dim), pages.flatten(), axis=1)
    blocks = blocks.reshape(both, *needed.shape, dim)
    blocks = mx.where(needed[None, :, :, None], blocks.astype(dtype), mx.zeros((), dtype)).swapaxes(0, 1)
    return blocks[:, :both // 2], blocks[:, both // 2:]


def _attend_some(q: mx.array, cache: mx.array, pages: mx.array, keys: mx.array, positions: mx.array,
                 spec: AttentionSpec, page_size: int, device: Device) -> mx.array:
    """As `attend_gathered`, with pages of positions keys [N, S]; scores in float32."""
    count, queries, heads, dim = q.shape
    behind = positions[:, :, None] - keys[:, None]
    seen = behind >= 0
    needed = keys <= positions.max(axis=1, keepdims=True)
    if spec.window is not None:
        seen = seen & (behind < spec.window)
        needed = needed & (keys > positions[:, :1] - spec.window)
    seen = (seen | (positions < 0)[:, :, None])[:, None]  # a query that nobody owns sees zeros
    fused = device.metal and spec.softcap is None
    k, v = _gather(cache, pages, needed, page_size, q.dtype if fused else mx.float32)
    if fused:
        out = mx.fast.scaled_dot_product_attention(q.swapaxes(1, 2), k, v, scale=spec.scale, mask=seen)
        return out.swapaxes(1, 2)
    shared = heads // k.shape[1]
    grouped = (q.astype(mx.float32) * spec.scale).swapaxes(1, 2).reshape(count, k.shape[1], shared * queries, dim)
    scores = (grouped @ k.swapaxes(-1, -2)).reshape(count, heads, queries, -1)
    if spec.softcap is not None:
        scores = mx.tanh(scores / spec.softcap) * spec.softcap
    weights = mx.softmax(mx.where(seen, scores, -mx.inf), axis=-1)
    out = weights.reshape(count, k.shape[1], shared * queries, -1) @ v
    return out.reshape(count, heads, queries, dim).swapaxes(1, 2).astype(q.dtype)
