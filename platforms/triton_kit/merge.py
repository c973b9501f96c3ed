"""Joining partial results of attention over disjoint sets of keys: out and the log of the softmax's denominator (lse).

Source: Dao et al. 2023 (Flash-Decoding), Ye et al. 2024 (Cascade Inference). A part that saw no key has lse -inf and
is not read, whatever its memory holds; where no part saw one, out is zero and lse -inf, never NaN.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import Specialization, launch

LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-3.0e38)


@triton.jit
def merge_splits_kernel(part_ptr, part_lse_ptr, out_ptr, lse_ptr, sinks_ptr, splits,
                        WIDTH: tl.constexpr, PADDED: tl.constexpr, CHUNK: tl.constexpr):
    """Grid [tokens, heads]: part [tokens, heads, splits, WIDTH] and its lse into out and lse (may be None)."""
    head = tl.program_id(1)
    place = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + head
    d = tl.arange(0, PADDED)
    peak = LOWEST
    total = 0.0
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2E
        peak = tl.maximum(sink, LOWEST)
        total = tl.exp2(sink - peak)
    acc = tl.zeros((PADDED,), tl.float32)
    for start in range(0, splits, CHUNK):
        s = start + tl.arange(0, CHUNK)
        lse = tl.load(part_lse_ptr + place * splits + s, mask=s < splits, other=float("-inf")) * LOG2E
        there = lse > float("-inf")
        part = tl.load(part_ptr + (place * splits + s)[:, None] * WIDTH + d[None, :],
                       mask=there[:, None] & (d < WIDTH)[None, :], other=0.0)
        higher = tl.maximum(peak, tl.max(lse, 0))
        weights = tl.exp2(lse - higher)
        factor = tl.exp2(peak - higher)
        acc = acc * factor + tl.sum(part * weights[:, None], 0)
        total = total * factor + tl.sum(weights, 0)
        peak = higher
    safe = tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + place * WIDTH + d, (acc / safe).to(out_ptr.dtype.element_ty), mask=d < WIDTH)
    if lse_ptr is not None:
        tl.store(lse_ptr + place, tl.where(total > 0, peak * LN2 + tl.log(safe), float("-inf")))


@triton.jit
def merge_states_kernel(a_ptr, a_lse_ptr, b_ptr, b_lse_ptr, out_ptr, lse_ptr,
                        WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Grid [tokens * heads]: two results over disjoint keys into one."""
    place = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, PADDED)
    a_lse = tl.load(a_lse_ptr + place)
    b_lse = tl.load(b_lse_ptr + place)
    peak = tl.maximum(tl.maximum(a_lse, b_lse), LOWEST)
    a_weight = tl.exp2((a_lse - peak) * LOG2E)
    b_weight = tl.exp2((b_lse - peak) * LOG2E)
    total = a_weight + b_weight
    safe = tl.where(total > 0, total, 1.0)
    a = tl.load(a_ptr + place * WIDTH + d, mask=d < tl.where(a_weight > 0, WIDTH, 0), other=0.0).to(tl.float32)
    b = tl.load(b_ptr + place * WIDTH + d, mask=d < tl.where(b_weight > 0, WIDTH, 0), other=0.0).to(tl.float32)
    out = (a * a_weight + b * b_weight) / safe
    tl.store(out_ptr + place * WIDTH + d, out.to(out_ptr.dtype.element_ty), mask=d < WIDTH)
    tl.store(lse_ptr + place, tl.where(total > 0, peak + tl.log(safe), float("-inf")))


def merge_splits(part: torch.Tensor, part_lse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None = None,
                 sinks: torch.Tensor | None = None) -> None:
    """part [tokens, heads, splits, d] f32 and part_lse [tokens, heads, splits] f32 -> out [tokens, heads, d] and lse.

    sinks [heads]: logits that only add to the denominator (and to lse), counted once here.
    """
    tokens, heads, splits, width = part.shape
    launch(merge_splits_kernel, (tokens, heads), part, part_lse, out, lse, sinks, splits, WIDTH=width,
           PADDED=triton.next_power_of_2(width), CHUNK=merge_chunk(width), num_warps=4)


def merge_chunk(width: int) -> int:
    """Splits read at a time: 4096 numbers a program."""
    return max(2, 4096 // triton.next_power_of_2(width))


def merge_states(o_a: torch.Tensor, lse_a: torch.Tensor, o_b: torch.Tensor, lse_b: torch.Tensor,
                 ) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the keys of a and of b from both results: (out [tokens, heads, d] in o_a's dtype, lse f32).

    o_a, o_b: [tokens, heads, d], contiguous.  lse_a, lse_b: [tokens, heads] f32, natural logarithm, -inf = no key (its
    out is then not read). Sinks must be in one of the two only. Raises ValueError where shapes differ.
    """
    if o_a.shape != o_b.shape or o_a.dtype != o_b.dtype or not lse_a.shape == lse_b.shape == o_a.shape[:2]:
        raise ValueError(f"cannot merge {o_a.dtype} {tuple(o_a.shape)}, lse {tuple(lse_a.shape)} with {o_b.dtype} "
                         f"{tuple(o_b.shape)}, lse {tuple(lse_b.shape)}")
    if not all(x.is_contiguous() for x in (o_a, lse_a, o_b, lse_b)):
        raise ValueError("merge_states takes contiguous tensors only")
    out, lse = torch.empty_like(o_a), torch.empty_like(lse_a)
    width = o_a.shape[2]
    launch(merge_states_kernel, (lse_a.numel(),), o_a, lse_a, o_b, lse_b, out, lse, WIDTH=width,
           PADDED=triton.next_power_of_2(width), num_warps=1)
    return out, lse


def specializations() -> list[Specialization]:
    """What the platforms use: the head dims of common models, and MLA's latent."""
    found = []
    for dtype, width in (("bf16", 64), ("bf16", 128), ("bf16", 256), ("bf16", 512), ("fp16", 128), ("fp32", 128)):
        pointers = {"part_ptr": "*fp32:16", "part_lse_ptr": "*fp32:16", "out_ptr": f"*{dtype}:16"}
        sizes = {"WIDTH": width, "PADDED": width, "CHUNK": merge_chunk(width)}
        found.append(Specialization(
            f"merge_splits {dtype} d{width}", merge_splits_kernel, pointers | {"splits": "i32"},
            sizes | {"lse_ptr": None, "sinks_ptr": None}, warps=4))
    found.append(Specialization(
        "merge_splits bf16 d64 sinks lse", merge_splits_kernel,
        {"part_ptr": "*fp32:16", "part_lse_ptr": "*fp32:16", "out_ptr": "*bf16:16", "lse_ptr": "*fp32:16",
         "sinks_ptr": "*fp32:16", "splits": "i32"}, {"WIDTH": 64, "PADDED": 64, "CHUNK": merge_chunk(64)}, warps=4))
    states = {name: "*bf16:16" for name in ("a_ptr", "b_ptr", "out_ptr")}
    states |= {name: "*fp32:16" for name in ("a_lse_ptr", "b_lse_ptr", "lse_ptr")}
    found.append(Specialization("merge_states bf16 d128", merge_states_kernel, states, {"WIDTH": 128, "PADDED": 128},
                                warps=1))
    return found
