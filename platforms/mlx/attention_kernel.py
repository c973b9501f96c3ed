"""Decode attention over pages for Apple GPUs: one threadgroup for each (row, query head), K and V read in place.

`SIMDGROUPS` simdgroups share the positions of the context; the 32 lanes of each share the head's dimensions. Every
simdgroup keeps a running maximum and sum (online softmax: Milakov and Gimelshein 2018), which are merged at the end.
Positions that the row does not own are never read. Compiled by MLX at first use (`mx.fast.metal_kernel`).
"""
from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx

from ...core.platform import AttentionSpec

LANES = 32
SIMDGROUPS = 8
MAX_DIM = 256  # head dimensions that fit a lane's registers

# Minus infinity is written as -1e30: Metal compiles with fast math, under which infinities are undefined.
SOURCE = """
    constexpr int PER_LANE = DIM / 32;
    const int head = int(threadgroup_position_in_grid.x);
    const int row = int(threadgroup_position_in_grid.y);
    const int lane = int(thread_index_in_simdgroup);
    const int part = int(simdgroup_index_in_threadgroup);
    const int kv_head = head / (HEADS / KV_HEADS);
    const int last = positions[row];
    const int first = WINDOW > 0 && last - WINDOW + 1 > 0 ? last - WINDOW + 1 : 0;
    const device T* keys = cache + size_t(kv_head) * size_t(slots[0]) * DIM;
    const device T* values = cache + size_t(KV_HEADS + kv_head) * size_t(slots[0]) * DIM;

    float query[PER_LANE];
    float sum[PER_LANE];
    for (int i = 0; i < PER_LANE; ++i) {
        query[i] = float(q[(size_t(row) * HEADS + head) * DIM + lane * PER_LANE + i]) * numbers[0];
        sum[i] = 0.0f;
    }
    float best = -1e30f;
    float total = 0.0f;
    for (int p = first + part; p <= last; p += SIMDGROUPS) {
        const size_t slot = size_t(pages[size_t(row) * PAGES + p / PAGE]) * PAGE + p % PAGE;
        const size_t at = slot * DIM + lane * PER_LANE;
        float score = 0.0f;
        for (int i = 0; i < PER_LANE; ++i) {
            score += query[i] * float(keys[at + i]);
        }
        score = simd_sum(score);
        if (CAPPED) {
            score = numbers[1] * metal::precise::tanh(score / numbers[1]);
        }
        const float top = metal::max(best, score);
        const float fade = metal::exp(best - top);
        const float weight = metal::exp(score - top);
        best = top;
        total = total * fade + weight;
        for (int i = 0; i < PER_LANE; ++i) {
            sum[i] = sum[i] * fade + weight * float(values[at + i]);
        }
    }

    threadgroup float bests[SIMDGROUPS];
    threadgroup float totals[SIMDGROUPS];
    threadgroup float sums[SIMDGROUPS * DIM];
    if (lane == 0) {
        bests[part] = best;
        totals[part] = total;
    }
    for (int i = 0; i < PER_LANE; ++i) {
        sums[part * DIM + lane * PER_LANE + i] = sum[i];
    }
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    float top = bests[0];
    for (int s = 1; s < SIMDGROUPS; ++s) {
        top = metal::max(top, bests[s]);
    }
    float whole = 0.0f;
    for (int s = 0; s < SIMDGROUPS; ++s) {
        whole += totals[s] * metal::exp(bests[s] - top);
    }
    for (int d = part * LANES + lane; d < DIM; d += SIMDGROUPS * LANES) {
        float merged = 0.0f;
        for (int s = 0; s < SIMDGROUPS; ++s) {
            merged += sums[s * DIM + d] * metal::exp(bests[s] - top);
        }
        out[(size_t(row) * HEADS + head) * DIM + d] = T(whole > 0.0f ? merged / whole : 0.0f);
    }
"""


def kernel_gap(heads: int, kv_heads: int, dim: int) -> str | None:
    """Why the kernel cannot do these heads; None if it can."""
    if dim % LANES or dim > MAX_DIM:
        return f"head_dim {dim}: the kernel takes multiples of {LANES} up to {MAX_DIM}"
    return None if heads % kv_heads == 0 else f"{heads} heads do not share {kv_heads} K and V heads evenly"


@functools.cache
def _kernel() -> Any:
    return mx.fast.metal_kernel("isthmus_paged_decode", ["q", "cache", "pages", "positions", "slots", "numbers"],
                                ["out"], SOURCE)


def constants(heads: int, kv_heads: int, dim: int, page_size: int, pages: int,
              spec: AttentionSpec) -> list[tuple[str, Any]]:
    """Template parameters of the kernel, besides T."""
    return [("HEADS", heads), ("KV_HEADS", kv_heads), ("DIM", dim), ("PAGE", page_size), ("PAGES", pages),
            ("WINDOW", spec.window or 0), ("CAPPED", int(spec.softcap is not None)), ("SIMDGROUPS", SIMDGROUPS),
            ("LANES", LANES)]


def decode_kernel(q: mx.array, cache: mx.array, spec: AttentionSpec, pages: mx.array, positions: mx.array,
                  page_size: int) -> mx.array:
    """q [D, heads, d] at positions [D] (-1 = nobody's: zeros), cache as `attention.allocate`, pages [D, P]."""
    rows, heads, dim = q.shape
    fixed = constants(heads, cache.shape[0] // 2, dim, page_size, pages.shape[1], spec)
    slots, numbers = mx.array([cache.shape[1]], mx.int32), mx.array([spec.scale, spec.softcap or 0.0], mx.float32)
    return _kernel()(inputs=[q.astype(cache.dtype), cache, pages, positions, slots, numbers],
                     template=[("T", cache.dtype), *fixed], grid=(heads * LANES * SIMDGROUPS, rows, 1),
                     threadgroup=(LANES * SIMDGROUPS, 1, 1), output_shapes=[q.shape],
                     output_dtypes=[cache.dtype])[0].astype(q.dtype)
