"""Root mean square norm over the last axis, with the residual's addition before it and quantization after it.

Source: Zhang and Sennrich 2019, Root Mean Square Layer Normalization.
"""
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .fp8 import encode
from .launch import Specialization, launch
from .tiles import INTEL

MAX_WIDTH = 32768  # elements of a row that one program keeps in registers
QUANTIZED = {torch.int8: ("int8", 127.0), torch.float8_e4m3fn: ("e4m3", 448.0), torch.float8_e5m2: ("e5m2", 57344.0),
             torch.float8_e4m3fnuz: ("e4m3fnuz", 224.0)}  # storage type -> (kind in kernels, largest magnitude used)
SMALLEST_SCALE = 1e-12  # of a row of zeros


@triton.jit
def quantized(y, scale, KIND: tl.constexpr, LIMIT: tl.constexpr):
    """y / scale as the bytes of a kind: the nearest, ties to even, at most LIMIT in magnitude."""
    value = tl.minimum(tl.maximum(y / scale, -LIMIT), LIMIT)
    if KIND == "int8":
        # In float32, adding 1.5 * 2^23 leaves no bits for fractions: the addition rounds to even.
        code = ((value + 12582912.0) - 12582912.0).to(tl.int8)
    elif KIND == "e4m3fnuz":
        code = encode(2.0 * value, "e4m3")  # the bias is greater by one, and the code of -0 is its NaN
        code = tl.where(code == 0x80, 0, code).to(tl.uint8)
    else:
        code = encode(value, KIND)
    return code


@triton.jit
def rms_norm_kernel(x, weight, residual, out, total, scales, rows, heads, width, x_row, x_head, residual_row, eps,
                    ROWS: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, LIMIT: tl.constexpr,
                    LEAST: tl.constexpr):
    """ROWS rows of a program; row r is head r % heads of token r // heads. KIND "" = no quantization."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (at < width)[None, :]
    token = (row // heads).to(tl.int64)
    place = (row.to(tl.int64) * width)[:, None] + at[None, :]
    value = tl.load(x + (token * x_row + (row % heads) * x_head)[:, None] + at[None, :], mask=mask, other=0.0)
    value = value.to(tl.float32)
    if residual is not None:
        added = tl.load(residual + (token * residual_row + (row % heads) * width)[:, None] + at[None, :], mask=mask,
                        other=0.0)
        rounded = (value + added.to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + place, rounded, mask=mask)
        value = rounded.to(tl.float32)
    mean = tl.sum(value * value, axis=1) / width
    gain = tl.load(weight + at, mask=at < width, other=0.0).to(tl.float32)
    value = value * (1.0 / tl.sqrt_rn(mean + eps))[:, None] * gain[None, :]
    if KIND == "":
        tl.store(out + place, value.to(out.dtype.element_ty), mask=mask)
    else:
        scale = tl.maximum(tl.max(tl.abs(value), axis=1) / LIMIT, LEAST)
        tl.store(scales + row, scale, mask=row < rows)
        tl.store(out + place, quantized(value, scale[:, None], KIND, LIMIT), mask=mask)


def tile(width: int) -> tuple[int, int, int]:
    """Rows of a program, elements of a row, warps."""
    block = triton.next_power_of_2(width)
    rows = max(1, 1024 // block)
    return rows, block, min(16, max(1, rows * block // 512))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, residual: torch.Tensor | None = None,
             dtype: torch.dtype | None = None) -> Any:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, in float32 inside.

    x:        [T, D] or [T, heads, D]; a slice of a wider tensor is fine while the last axis is contiguous.
    weight:   [D], any float type.
    residual: of x's shape, contiguous but for axis 0: x + residual, rounded to x's dtype, is what is normed.
    dtype:    int8 or a float8 type: the result is quantized per row, value = code * scale.

    Returns the normed tensor in x's dtype, contiguous; with `residual` (normed, x + residual); with `dtype` the normed
    tensor is replaced by (codes, scales float32 of x's shape without the last axis).
    """
    heads, width = (x.shape[1] if x.dim() == 3 else 1), x.shape[-1]
    if x.dim() not in (2, 3) or x.stride(-1) != 1:
        raise ValueError(f"rms_norm takes [T, D] or [T, heads, D] with a contiguous last axis, not {list(x.shape)} of "
                         f"strides {x.stride()}: call .contiguous() on it")
    if width > MAX_WIDTH:
        raise ValueError(f"rms_norm over {width} elements; at most {MAX_WIDTH} fit one program")
    kind, limit = QUANTIZED[dtype] if dtype is not None else ("", 1.0)
    out = torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)
    scales = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device) if dtype is not None else None
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device) if residual is not None else None
    rows = x.shape[0] * heads
    per_program, block, warps = tile(width)
    launch(rms_norm_kernel, (triton.cdiv(rows, per_program),), x, weight, residual,
           out.view(torch.uint8) if kind not in ("", "int8") else out, total, scales, rows, heads, width, x.stride(0),
           x.stride(1) if x.dim() == 3 else 0, residual.stride(0) if residual is not None else 0, eps,
           ROWS=per_program, BLOCK=block, KIND=kind, LIMIT=limit, LEAST=SMALLEST_SCALE, num_warps=warps)
    normed = out if dtype is None else (out, scales)
    return normed if residual is None else (normed, total)


def specializations() -> list[Specialization]:
    """Heads of 64 to 256, models of 2048 to 16384, in bf16 and f32, plain, with a residual, and quantized."""
    found = []
    cases = [("bf16", width, residual, kind) for width in (128, 4096, 16384) for residual in (False, True)
             for kind in ("", "int8", "e4m3") if width > 128 or not (residual or kind)]
    cases += [("fp32", 64, False, ""), ("fp32", 4096, True, ""), ("fp16", 256, False, ""),
              ("bf16", 4096, True, "e4m3fnuz"), ("bf16", 4096, False, "e5m2")]
    stored = {"": None, "int8": "*i8"}
    limits = dict(QUANTIZED.values())
    for type_, width, residual, kind in cases:
        rows, block, warps = tile(width)
        found.append(Specialization(
            " ".join(filter(None, ("rms_norm", type_, str(width), "residual" if residual else "", kind))),
            rms_norm_kernel,
            {"x": f"*{type_}:16", "weight": f"*{type_}:16", "out": f"{stored.get(kind, '*u8') or '*' + type_}:16",
             **({"residual": f"*{type_}:16", "total": f"*{type_}:16"} if residual else {}),
             **({"scales": "*fp32:16"} if kind else {}), "rows": "i32", "heads": "i32", "width": "i32:16",
             "x_row": "i32:16", "x_head": "i32:16", "residual_row": "i32:16", "eps": "fp32"},
            {"ROWS": rows, "BLOCK": block, "KIND": kind, "LIMIT": limits.get(kind, 1.0), "LEAST": SMALLEST_SCALE,
             **({} if residual else {"residual": None, "total": None}), **({} if kind else {"scales": None})},
            warps=warps, unsupported=dict.fromkeys(INTEL, "spills, and nothing there adds a residual to so wide a row")
            if residual and width > 8192 else {}))
    return found
