"""Activations to int8 or fp8, with a scale for each token, or for each token and 128 values.

stored = value / scale, scale = largest magnitude / largest number of the type; a row of zeros gets the smallest scale
that is used, so that nothing is divided by zero. Rounding is to nearest even.
Sources: Micikevicius et al. 2022 (FP8 formats); Dettmers et al. 2022 (LLM.int8, scales by row); DeepSeek-AI 2024
(DeepSeek-V3, section 3.3: groups of 128).
"""
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .launch import Specialization, launch

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e4m3fnuz: 240.0}
ONE_BLOCK = 16384  # values of a row that a program keeps in registers; longer rows are read twice


class Quantized(NamedTuple):
    """values [tokens, width]; scale float32: [tokens], or [tokens, ceil(width / 128)] for groups."""

    values: torch.Tensor
    scale: torch.Tensor


@triton.jit
def store_quantized(out_ptr, x, scale, LARGEST: tl.constexpr, mask):
    """x / scale in the type of `out_ptr`, held within its range (division may round above the largest number)."""
    y = tl.minimum(tl.maximum(x / scale, -LARGEST), LARGEST)
    if out_ptr.dtype.element_ty == tl.int8:
        # Adding 1.5 * 2^23 rounds to whole numbers, ties to even.
        y = (y + 12582912.0) - 12582912.0
    tl.store(out_ptr, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def quantize_tokens_kernel(x_ptr, out_ptr, scale_ptr, width, x_stride, LARGEST: tl.constexpr, BLOCK: tl.constexpr,
                           ONCE: tl.constexpr):
    """Grid [tokens]. ONCE: the row fits one block."""
    token = tl.program_id(0).to(tl.int64)
    x_ptr += token * x_stride
    out_ptr += token * width
    at = tl.arange(0, BLOCK)
    if ONCE:
        x = tl.load(x_ptr + at, mask=at < width, other=0.0).to(tl.float32)
        peak = tl.max(tl.abs(x), 0)
        scale = tl.maximum(peak, 1e-30) / LARGEST
        store_quantized(out_ptr + at, x, scale, LARGEST, at < width)
    else:
        peaks = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, width, BLOCK):
            x = tl.load(x_ptr + start + at, mask=start + at < width, other=0.0).to(tl.float32)
            peaks = tl.maximum(peaks, tl.abs(x))
        scale = tl.maximum(tl.max(peaks, 0), 1e-30) / LARGEST
        for start in range(0, width, BLOCK):
            x = tl.load(x_ptr + start + at, mask=start + at < width, other=0.0).to(tl.float32)
            store_quantized(out_ptr + start + at, x, scale, LARGEST, start + at < width)
    tl.store(scale_ptr + token, scale)


@triton.jit
def quantize_groups_kernel(x_ptr, out_ptr, scale_ptr, width, groups, x_stride, LARGEST: tl.constexpr,
                           GROUPS: tl.constexpr):
    """Grid [tokens, blocks of GROUPS groups of 128]."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    at = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    x = tl.load(x_ptr + token * x_stride + at, mask=at < width, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), 1), 1e-30) / LARGEST
    store_quantized(out_ptr + token * width + at, x, scale[:, None], LARGEST, at < width)
    tl.store(scale_ptr + token * groups + group, scale, mask=group < groups)


def _check(x: torch.Tensor, dtype: torch.dtype) -> None:
    if dtype not in LARGEST:
        raise ValueError(f"activations are quantized to {', '.join(map(str, LARGEST))}, not to {dtype}")
    if x.ndim != 2 or x.stride(1) != 1:
        raise ValueError(f"activations of shape {tuple(x.shape)} and strides {x.stride()}: [tokens, width] with "
                         f"contiguous rows")


def quantize_tokens(x: torch.Tensor, dtype: torch.dtype) -> Quantized:
    """[tokens, width] of any float type -> values in `dtype` (int8, e4m3fn or e4m3fnuz) and a scale for each token."""
    _check(x, dtype)
    tokens, width = x.shape
    out = Quantized(torch.empty(tokens, width, dtype=dtype, device=x.device),
                    torch.empty(tokens, dtype=torch.float32, device=x.device))
    block = min(triton.next_power_of_2(width), ONE_BLOCK)
    launch(quantize_tokens_kernel, (tokens,), x, *out, width, x.stride(0), LARGEST=LARGEST[dtype], BLOCK=block,
           ONCE=width <= block, num_warps=4 if block <= 4096 else 8)
    return out


def quantize_groups(x: torch.Tensor, dtype: torch.dtype) -> Quantized:
    """[tokens, width] -> values in `dtype` and a scale for each token and 128 values, [tokens, ceil(width / 128)]."""
    _check(x, dtype)
    tokens, width = x.shape
    groups = triton.cdiv(width, 128)
    out = Quantized(torch.empty(tokens, width, dtype=dtype, device=x.device),
                    torch.empty(tokens, groups, dtype=torch.float32, device=x.device))
    launch(quantize_groups_kernel, (tokens, triton.cdiv(groups, 8)), x, *out, width, groups, x.stride(0),
           LARGEST=LARGEST[dtype], GROUPS=8, num_warps=4)
    return out


FP8_TARGETS = {  # where a compiled kernel may use each fp8 type in arithmetic
    "fp8e4nv": {"sm_80": "has no fp8 unit", "gfx90a": "has no fp8 unit", "gfx1100": "has no fp8 unit",
                "gfx942": "its fp8 is e4m3fnuz"},
    "fp8e4b8": {"sm_": "its fp8 is e4m3fn", "gfx90a": "has no fp8 unit", "gfx950": "its fp8 is e4m3fn",
                "gfx11": "has no fp8 unit", "gfx12": "its fp8 is e4m3fn"},
    "i8": {},
}


def specializations() -> list[Specialization]:
    """Rows of 4096 and of more than one block, and groups, to each type."""
    found = []
    for out, largest in (("i8", 127.0), ("fp8e4nv", 448.0), ("fp8e4b8", 240.0)):
        signature = {"x_ptr": "*bf16:16", "out_ptr": f"*{out}:16", "scale_ptr": "*fp32:16", "width": "i32:16",
                     "x_stride": "i32:16"}
        for block, once in ((4096, True), (ONE_BLOCK, False)):
            found.append(Specialization(
                f"tokens {out} block {block}", quantize_tokens_kernel, signature,
                {"LARGEST": largest, "BLOCK": block, "ONCE": once}, 4 if once else 8, unsupported=FP8_TARGETS[out]))
        found.append(Specialization(f"groups {out}", quantize_groups_kernel, signature | {"groups": "i32"},
                                    {"LARGEST": largest, "GROUPS": 8}, unsupported=FP8_TARGETS[out]))
    return found
