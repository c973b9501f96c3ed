"""Decode of multi-head latent attention (MLA): all heads read one latent vector a token, which is K and V at once.

Source: DeepSeek-AI 2024 (DeepSeek-V2), section 2.1: with W_UK absorbed into q, scores are q . [latent, rope], and the
result is a weighted sum of latents that W_UV is applied to afterwards.
"""
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from .attention_kernel import LN2, LOWEST, accumulate, load_rows, locate
from .attention_launch import ELEMENT_BYTES, per_tile
from .fp8 import DECODE_FACTOR, decode
from .launch import Specialization, launch
from .merge import merge_splits
from .paged import FP8_BITS
from .tiles import Tile, latent_tile, refusal

LOG2E = math.log2(math.e)


@triton.jit
def mla_kernel(q_ptr, cache_ptr, out_ptr, lse_ptr, lengths_ptr, pages_ptr, heads, splits, scale, v_scale, c_page,
               c_token, pages_row, QUERIES: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PAGE: tl.constexpr,
               LATENT: tl.constexpr, ROPE: tl.constexpr, FORMAT: tl.constexpr, SPLIT: tl.constexpr,
               PRECISION: tl.constexpr):
    """Grid [rows, ceil(heads * QUERIES / ROWS), splits]; q [rows * QUERIES, heads, LATENT + ROPE], contiguous."""
    row = tl.program_id(0)
    split = tl.program_id(2)
    length = tl.load(lengths_ptr + row)
    r = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    real = r < heads * QUERIES
    place = row.to(tl.int64) * (heads * QUERIES) + r
    at = length - QUERIES + r // heads
    q_at = q_ptr + place[:, None] * (LATENT + ROPE)
    q = tl.load(q_at + tl.arange(0, LATENT)[None, :], mask=real[:, None], other=0.0)
    q_rope = tl.load(q_at + LATENT + tl.arange(0, ROPE)[None, :], mask=real[:, None], other=0.0)

    share = tl.cdiv(tl.cdiv(length, KEYS), splits) * KEYS
    begin = split * share
    peak = tl.full((ROWS,), LOWEST, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, LATENT), tl.float32)
    pages_ptr += row.to(tl.int64) * pages_row
    for start in range(begin, tl.minimum(begin + share, length), KEYS):
        n = start + tl.arange(0, KEYS)
        inside = n < length
        page, offset = locate(pages_ptr, start, n, inside, PAGE, KEYS, True)
        token = page * c_page + offset * c_token
        latent = load_rows(cache_ptr, token, inside, tl.arange(0, LATENT), LATENT, LATENT, True)
        rope = load_rows(cache_ptr + LATENT, token, inside, tl.arange(0, ROPE), ROPE, ROPE, True)
        latent = decode(latent, q.dtype, FORMAT)
        scores = tl.dot(q_rope, tl.trans(decode(rope, q.dtype, FORMAT)), input_precision=PRECISION)
        scores = tl.dot(q, tl.trans(latent), scores, input_precision=PRECISION) * scale
        scores = tl.where((n[None, :] <= at[:, None]) & inside[None, :], scores, float("-inf"))
        weights, factor, peak, total = accumulate(scores, peak, total)
        acc = tl.dot(weights.to(q.dtype), latent, acc * factor[:, None], input_precision=PRECISION)

    safe = tl.where(total > 0, total, 1.0)
    acc *= (v_scale / safe)[:, None]
    if SPLIT:
        place = place * splits + split
    tl.store(out_ptr + place[:, None] * LATENT + tl.arange(0, LATENT)[None, :], acc.to(out_ptr.dtype.element_ty),
             mask=real[:, None])
    if lse_ptr is not None:
        tl.store(lse_ptr + place, tl.where(total > 0, peak * LN2 + tl.log(safe), float("-inf")), mask=real)


def mla_decode(
    q: torch.Tensor, cache: torch.Tensor, pages: torch.Tensor, lengths: torch.Tensor, *, scale: float, tile: Tile,
    latent: int = 512, splits: int = 1, queries: int = 1, cache_scale: float = 1.0, native_fp8: bool = False,
    with_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """q [rows * queries, heads, latent + rope] -> (out [.., heads, latent] in q's dtype, lse [.., heads] f32 or None).

    q: the latent part with W_UK absorbed, then the rotated part; contiguous; f32, bf16 or f16.
    cache [pages, page_size, latent + rope]: f32, bf16, f16 or fp8 with value = cache_scale * stored.
    pages [rows, P] int32, lengths [rows] int32: a row's tokens are the last `queries` of its context; length 0 gives
    zeros and lse -inf.  scale: of the scores (the model's, over the unabsorbed head dim).  splits: `plan_splits` with
    ceil(heads * queries / tile.rows) in place of the KV heads.  tile: `tiles.latent_tile`.
    Raises ValueError where shapes or types do not fit, or latent or rope is no power of two of 16 or more.
    """
    tokens, heads, width = q.shape
    rope = width - latent
    if any(x < 16 or x & (x - 1) for x in (latent, rope)):
        raise ValueError(f"latent {latent} and rope {rope} must be powers of two, 16 or more")
    if cache.ndim != 3 or cache.shape[2] != width or cache.stride(2) != 1:
        raise ValueError(f"cache must be [pages, page_size, {width}] with a contiguous last axis, not "
                         f"{tuple(cache.shape)}")
    rows = lengths.shape[0]
    if tokens != rows * queries or pages.shape[0] != rows or not q.is_contiguous():
        raise ValueError(f"q must be contiguous with {rows} x {queries} tokens and pages have {rows} rows, not "
                         f"{tokens} and {pages.shape[0]}")
    if lengths.dtype != torch.int32 or pages.dtype != torch.int32:
        raise ValueError(f"lengths and pages must be int32, not {lengths.dtype} and {pages.dtype}")
    form = "native"
    if cache.dtype in FP8_BITS and not native_fp8:
        form, cache = FP8_BITS[cache.dtype], cache.view(torch.uint8)
    factor = cache_scale * DECODE_FACTOR.get(form, 1.0)
    out = torch.empty((tokens, heads, latent), dtype=q.dtype, device=q.device)
    lse = torch.empty((tokens, heads), dtype=torch.float32, device=q.device) if with_lse else None
    part, part_lse = out, lse
    if splits > 1:
        part = torch.empty((tokens, heads, splits, latent), dtype=torch.float32, device=q.device)
        part_lse = torch.empty((tokens, heads, splits), dtype=torch.float32, device=q.device)
    launch(mla_kernel, (rows, triton.cdiv(heads * queries, tile.rows), splits), q, cache, part, part_lse, lengths,
           pages, heads, splits, scale * factor * LOG2E, factor, cache.stride(0), cache.stride(1), pages.stride(0),
           QUERIES=queries, ROWS=tile.rows, KEYS=tile.keys, PAGE=cache.shape[1], LATENT=latent, ROPE=rope, FORMAT=form,
           SPLIT=splits > 1, PRECISION="ieee", num_warps=tile.warps, num_stages=tile.stages)
    if splits > 1:
        merge_splits(part, part_lse, out, lse)
    return out, lse


def specializations() -> list[Specialization]:
    """DeepSeek's 512 + 64, 16 and 128 heads, bf16 and e4m3 caches."""
    found = []
    for heads, page, kv, form in ((128, 64, "bf16", "native"), (128, 16, "bf16", "native"), (16, 64, "bf16", "native"),
                                  (128, 64, "u8", "e4m3")):
        def make(tile: Tile, page: int = page, kv: str = kv, form: str = form, heads: int = heads) -> Specialization:
            types = {"q_ptr": "*bf16:16", "cache_ptr": f"*{kv}:16", "out_ptr": "*fp32:16", "lse_ptr": "*fp32:16",
                     "lengths_ptr": "*i32:16", "pages_ptr": "*i32:16", "heads": "i32:16", "splits": "i32",
                     "scale": "fp32", "v_scale": "fp32", "c_page": "i32:16", "c_token": "i32:16", "pages_row": "i32"}
            constants = {"QUERIES": 1, "ROWS": tile.rows, "KEYS": tile.keys, "PAGE": page, "LATENT": 512, "ROPE": 64,
                         "FORMAT": form, "SPLIT": True, "PRECISION": "ieee"}
            name = f"mla bf16/{form if form != 'native' else kv} h{heads} p{page} {tile.label}"
            return Specialization(name, mla_kernel, types, constants, tile.warps, tile.stages)
        found += per_tile(make, lambda family, h=heads, b=ELEMENT_BYTES[kv]: latent_tile(family, h, b),
                          lambda family: refusal(family, 512, 2))
    return found
