"""Activations to int8 or fp8 with the one scale that a checkpoint was calibrated to.

stored = value / scale, held within the type's range: what lies beyond it in a token is cut off, as its author measured.
AMD's e4m3fnuz takes twice the scale and half the range of e4m3, which gives the same numbers.
Sources: Micikevicius et al. 2022 (FP8 formats); the static schemes of compressed-tensors and NVIDIA ModelOpt.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import Specialization, launch
from .quantize import FP8_TARGETS, LARGEST, Quantized, store_quantized

FNUZ = torch.float8_e4m3fnuz
RANGE = LARGEST | {FNUZ: LARGEST[torch.float8_e4m3fn] / 2}
BLOCK = 4096  # values of a row that a program takes


@triton.jit
def quantize_static_kernel(x_ptr, out_ptr, scale_ptr, width, x_stride, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    """Grid [tokens, blocks of a row]."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + token * x_stride + at, mask=at < width, other=0.0).to(tl.float32)
    store_quantized(out_ptr + token * width + at, x, tl.load(scale_ptr), LARGEST, at < width)


def static_scale(scale: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A checkpoint's scale for values in `dtype` (int8, e4m3fn or e4m3fnuz): float32 [1]."""
    return torch.tensor([2 * scale if dtype == FNUZ else scale], dtype=torch.float32, device=device)


def quantize_static(x: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor) -> Quantized:
    """[tokens, width] of any float type -> values in `dtype` beside `scale` [1], from `static_scale`. Raises ValueError
    for rows that are not contiguous."""
    if x.ndim != 2 or x.stride(1) != 1:
        raise ValueError(f"activations of shape {tuple(x.shape)} and strides {x.stride()}: [tokens, width] with "
                         "contiguous rows")
    tokens, width = x.shape
    values = torch.empty(tokens, width, dtype=dtype, device=x.device)
    block = min(triton.next_power_of_2(width), BLOCK)
    launch(quantize_static_kernel, (tokens, triton.cdiv(width, block)), x, values, scale, width, x.stride(0),
           LARGEST=RANGE[dtype], BLOCK=block, num_warps=4)
    return Quantized(values, scale)


def specializations() -> list[Specialization]:
    """Blocks of long rows, to each type."""
    signature = {"x_ptr": "*bf16:16", "scale_ptr": "*fp32:16", "width": "i32:16", "x_stride": "i32:16"}
    return [Specialization(f"static {out}", quantize_static_kernel, signature | {"out_ptr": f"*{out}:16"},
                           {"LARGEST": RANGE[dtype], "BLOCK": BLOCK}, unsupported=FP8_TARGETS[out])
            for out, dtype in (("i8", torch.int8), ("fp8e4nv", torch.float8_e4m3fn), ("fp8e4b8", FNUZ))]
