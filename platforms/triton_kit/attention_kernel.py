"""The kernel of paged attention: one to a few tokens a row (decode), prompts, and both in one launch.

A program owns a tile of query rows (tokens x the query heads of one KV head, packed, so that K and V are read once for
all of them: GQA) and walks over the keys with a running softmax; with splits, several programs share one tile's keys
and `merge.py` joins what they found.
Sources: Dao 2023 (FlashAttention-2), Dao et al. 2023 (Flash-Decoding), Kwon et al. 2023 (PagedAttention).
"""
from __future__ import annotations

import triton
import triton.language as tl

from .fp8 import decode

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3.0e38)  # a running maximum that has seen nothing: finite, so no difference becomes NaN


@triton.jit
def locate(pages_ptr, start, n, inside, PAGE: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr):
    """Page numbers (int64) and offsets in the page of tokens n = start + 0 .. KEYS; start is a multiple of KEYS."""
    if PAGE % KEYS == 0:
        page = tl.load(pages_ptr + start // PAGE).to(tl.int64)
        offset = start % PAGE + tl.arange(0, KEYS)
    elif MASKED:
        page = tl.load(pages_ptr + n // PAGE, mask=inside, other=0).to(tl.int64)
        offset = n % PAGE
    else:
        page = tl.load(pages_ptr + n // PAGE).to(tl.int64)
        offset = n % PAGE
    return page, offset


@triton.jit
def load_rows(ptr, offsets, inside, dims, WIDTH: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr):
    """[KEYS, PADDED] elements; what is not inside is not read (a NaN there must not meet a weight of zero)."""
    at = ptr + offsets[:, None] + dims[None, :]
    if MASKED and WIDTH == PADDED:
        x = tl.load(at, mask=inside[:, None], other=0.0)
    elif MASKED:
        x = tl.load(at, mask=inside[:, None] & (dims < WIDTH)[None, :], other=0.0)
    elif WIDTH == PADDED:
        x = tl.load(at)
    else:
        x = tl.load(at, mask=(dims < WIDTH)[None, :], other=0.0)
    return x


@triton.jit
def accumulate(scores, peak, total):
    """One block of scores (base 2, masked with -inf) into the running softmax: weights, factor, peak, total."""
    higher = tl.maximum(peak, tl.max(scores, 1))
    weights = tl.exp2(scores - higher[:, None])
    factor = tl.exp2(peak - higher)
    return weights, factor, higher, total * factor + tl.sum(weights, 1)


@triton.jit
def bounded(scores, scale, cap, CAPPED: tl.constexpr):
    """Scaled scores in base 2, through the soft cap cap * tanh(scores * scale / cap) where there is one."""
    if CAPPED:
        # tanh(x) = 1 - 2 / (1 + e^2x); the host gives scale = 2 log2(e) factor / cap and cap = cap log2(e)
        scores = cap * (1.0 - 2.0 / (1.0 + tl.exp2(scores * scale)))
    else:
        scores = scores * scale
    return scores


@triton.jit
def walk(
    q, peak, total, acc, begin, end, low, high, base, at, tree, tree_positions_ptr, k_ptr, v_ptr, k_scales_ptr,
    v_scales_ptr, pages_ptr, k_page, k_token, v_page, v_token, s_page, s_token, scale, cap, window,
    FORMAT: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr, PAGE: tl.constexpr,
    KEYS: tl.constexpr, WIDTH: tl.constexpr, K_PADDED: tl.constexpr, V_WIDTH: tl.constexpr, V_PADDED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Keys begin .. end (a multiple of KEYS to start with) into the running softmax of the tile's rows.

    MASKED is False only for keys that every row sees. at [rows]: positions. tree [rows]: bits among the step's tokens
    from `base` on, 0 = causal; `tree_positions_ptr`: positions of the row's tokens of this step.
    """
    for start in range(begin, end, KEYS):
        n = start + tl.arange(0, KEYS)
        inside = (n >= low) & (n < high)
        page, offset = locate(pages_ptr, start, n, inside, PAGE, KEYS, MASKED)
        k = load_rows(k_ptr, page * k_page + offset * k_token, inside, tl.arange(0, K_PADDED), WIDTH, K_PADDED, MASKED)
        v = load_rows(v_ptr, page * v_page + offset * v_token, inside, tl.arange(0, V_PADDED), V_WIDTH, V_PADDED,
                      MASKED)
        scores = tl.dot(q, tl.trans(decode(k, q.dtype, FORMAT)), input_precision=PRECISION)
        if FORMAT == "int8":
            scores *= tl.load(k_scales_ptr + page * s_page + offset * s_token, mask=inside, other=0.0)[None, :]
        scores = bounded(scores, scale, cap, CAPPED)
        if MASKED:
            where = n
            seen = n[None, :] <= at[:, None]
            if tree is not None:
                step = n - base
                where = tl.load(tree_positions_ptr + step, mask=inside & (step >= 0), other=0)
                where = tl.where(step >= 0, where, n)
                bit = (tree[:, None] >> tl.minimum(tl.maximum(step, 0), 63)[None, :]) & 1
                seen = tl.where((tree == 0)[:, None], seen, (step < 0)[None, :] | (bit != 0))
            if WINDOWED:
                seen = seen & (where[None, :] > at[:, None] - window)
            scores = tl.where(seen & inside[None, :], scores, float("-inf"))
        weights, factor, peak, total = accumulate(scores, peak, total)
        if FORMAT == "int8":
            weights *= tl.load(v_scales_ptr + page * s_page + offset * s_token, mask=inside, other=0.0)[None, :]
        acc = tl.dot(weights.to(q.dtype), decode(v, q.dtype, FORMAT), acc * factor[:, None], input_precision=PRECISION)
    return peak, total, acc


@triton.jit
def attention_kernel(
    q_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, out_ptr, lse_ptr, tiles_ptr, starts_ptr, lengths_ptr, pages_ptr,
    sinks_ptr, tree_ptr, positions_ptr, tokens, splits, scale, v_scale, cap, window, q_token, q_head, k_page, k_token,
    k_head, v_page, v_token, v_head, s_page, s_token, s_head, pages_row,
    GROUP: tl.constexpr, HEADS: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    PAGE: tl.constexpr, WIDTH: tl.constexpr, K_PADDED: tl.constexpr, V_WIDTH: tl.constexpr, V_PADDED: tl.constexpr,
    FORMAT: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr, SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid [tiles, kv_heads * ceil(GROUP / HEADS), splits]; HEADS query heads of one KV head are in a tile.

    QUERIES > 0: row b owns the tokens b * QUERIES .. (no tiles, no starts). Otherwise tiles [n, 2] holds (row, first
    token), row -1 for tokens that no row owns: they get zeros. With SPLIT out is [tokens, heads, splits, V_WIDTH]
    float32 and lse [tokens, heads, splits], sinks left to the merge; otherwise [tokens, heads, V_WIDTH] and
    [tokens, heads] (lse_ptr may be None).
    """
    blocks: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    kv_head = tl.program_id(1) // blocks
    kv_heads = tl.num_programs(1) // blocks
    split = tl.program_id(2)
    if QUERIES > 0:
        row = tl.program_id(0)
        begin_row = row * QUERIES
        first = begin_row
        stop = begin_row + QUERIES
        length = tl.load(lengths_ptr + row)
    else:
        row = tl.load(tiles_ptr + 2 * tl.program_id(0))
        first = tl.load(tiles_ptr + 2 * tl.program_id(0) + 1)
        owned = row >= 0
        row = tl.maximum(row, 0)
        begin_row = tl.load(starts_ptr + row)
        stop = tl.where(owned, tl.load(starts_ptr + row + 1), tokens)
        length = tl.where(owned, tl.load(lengths_ptr + row), 0)
    base = length - (stop - begin_row)  # position of the row's first token of this step

    r = tl.arange(0, ROWS)
    token = first + r // HEADS
    member = (tl.program_id(1) % blocks) * HEADS + r % HEADS
    real = (token < stop) & (r < (ROWS // HEADS) * HEADS) & (member < GROUP)
    head = kv_head * GROUP + member
    at = base + token - begin_row
    last = tl.minimum(first + ROWS // HEADS, stop) - 1
    high = tl.minimum(length, base + last - begin_row + 1)
    common = base + first - begin_row + 1  # keys below it are seen by every row of the tile, but for the window
    tree = None
    tree_positions_ptr = positions_ptr
    if tree_ptr is not None:
        tree = tl.load(tree_ptr + token, mask=real, other=0)
        tree_positions_ptr += begin_row
        at = tl.load(positions_ptr + token, mask=real, other=0)
        high = length
        common = base
    low = 0
    if WINDOWED:
        low = tl.maximum(base - window + 1 if tree_ptr is not None else common - window, 0)
    d = tl.arange(0, K_PADDED)
    q = tl.load(q_ptr + token.to(tl.int64)[:, None] * q_token + head[:, None] * q_head + d[None, :],
                mask=real[:, None] & (d < WIDTH)[None, :], other=0.0)

    aligned = low // KEYS * KEYS
    share = tl.cdiv(tl.cdiv(tl.maximum(high - aligned, 0), KEYS), splits) * KEYS
    begin = aligned + split * share
    end = tl.minimum(begin + share, high)
    peak = tl.full((ROWS,), LOWEST, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, V_PADDED), tl.float32)
    k_ptr += kv_head * k_head
    v_ptr += kv_head * v_head
    if FORMAT == "int8":
        k_scales_ptr += kv_head * s_head
        v_scales_ptr += kv_head * s_head
    pages_ptr += row.to(tl.int64) * pages_row
    whole = begin
    if QUERIES == 0 and not WINDOWED:  # prompts: most blocks need no mask; decode waits for memory anyway
        whole = tl.maximum(tl.minimum(tl.maximum(common, 0) // KEYS * KEYS, end // KEYS * KEYS), begin)
        peak, total, acc = walk(
            q, peak, total, acc, begin, whole, low, high, base, at, tree, tree_positions_ptr, k_ptr, v_ptr,
            k_scales_ptr, v_scales_ptr, pages_ptr, k_page, k_token, v_page, v_token, s_page, s_token, scale, cap,
            window, FORMAT, CAPPED, WINDOWED, False, PAGE, KEYS, WIDTH, K_PADDED, V_WIDTH, V_PADDED, PRECISION)
    peak, total, acc = walk(
        q, peak, total, acc, whole, end, low, high, base, at, tree, tree_positions_ptr, k_ptr, v_ptr, k_scales_ptr,
        v_scales_ptr, pages_ptr, k_page, k_token, v_page, v_token, s_page, s_token, scale, cap, window, FORMAT, CAPPED,
        WINDOWED, True, PAGE, KEYS, WIDTH, K_PADDED, V_WIDTH, V_PADDED, PRECISION)

    if sinks_ptr is not None and not SPLIT:
        sink = tl.load(sinks_ptr + head, mask=real, other=0.0).to(tl.float32) * LOG2E
        higher = tl.maximum(peak, sink)
        factor = tl.exp2(peak - higher)
        total = total * factor + tl.exp2(sink - higher)
        acc *= factor[:, None]
        peak = higher
    acc *= (v_scale / tl.where(total > 0, total, 1.0))[:, None]
    place = token.to(tl.int64) * (kv_heads * GROUP) + head
    if SPLIT:
        place = place * splits + split
    d = tl.arange(0, V_PADDED)
    tl.store(out_ptr + place[:, None] * V_WIDTH + d[None, :], acc.to(out_ptr.dtype.element_ty),
             mask=real[:, None] & (d < V_WIDTH)[None, :])
    if lse_ptr is not None:
        lse = tl.where(total > 0, peak * LN2 + tl.log(tl.where(total > 0, total, 1.0)), float("-inf"))
        tl.store(lse_ptr + place, lse, mask=real)
