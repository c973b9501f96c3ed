"""Linears in 8 bits on both sides: int8 x int8 -> int32, fp8 x fp8 -> float32; and fp8 weights alone where a device has
no fp8 unit (sm_80, gfx90a, gfx1100), expanded in registers.

Weights keep the layout of checkpoints, [out, in]. A scale of a whole tensor is spread over its rows at load, so that
stacked weights (q, k and v) may have one each. gfx942 computes in e4m3fnuz: `fp8_matrix` converts the bits at load.
Sources: Xiao et al. 2022 (SmoothQuant), Micikevicius et al. 2022 (FP8 formats), DeepSeek-AI 2024 (blocks of 128 x 128).
"""
from __future__ import annotations

import torch

from .launch import TARGETS, Specialization
from .linear_kernel import linear, linear_specializations
from .linear_tiles import Matrix, Tile, linear_tile
from .quantize import FP8_TARGETS, Quantized, quantize_groups, quantize_tokens
from .tiles import converts_fp8

# What a device does with fp8: it multiplies OCP's e4m3, or AMD's e4m3fnuz (gfx942); it converts the former; nothing.
UNITS = ("fn", "fnuz", "cast", "none")


def _row_scales(scale: torch.Tensor, shape: tuple[int, ...], sizes: tuple[int, ...] | None) -> torch.Tensor:
    """[...] or one value for each stacked part (`sizes`: their rows) -> [*lead, rows] float32."""
    rows = shape[-2]
    scale = scale.float()
    if sizes is not None:
        if scale.shape[-1] != len(sizes) or sum(sizes) != rows:
            raise ValueError(f"scales {tuple(scale.shape)} for parts of {sizes} rows do not fit {rows} rows")
        scale = scale.repeat_interleave(torch.tensor(sizes, device=scale.device), dim=-1)
    elif scale.shape[-1:] == (1,) and rows != 1 and scale.ndim == len(shape):
        scale = scale.squeeze(-1)
    return torch.broadcast_to(scale, (*shape[:-2], rows)).contiguous()


def int8_matrix(codes: torch.Tensor, scale: torch.Tensor, sizes: tuple[int, ...] | None = None) -> Matrix:
    """Weight [out, in] (or [experts, out, in]) int8 with scale [out] or [out, 1], one number, or [parts] for stacked
    parts of `sizes` rows. Raises ValueError for another type or scales that do not fit."""
    if codes.dtype != torch.int8:
        raise ValueError(f"int8 weights are torch.int8, not {codes.dtype}")
    return Matrix("int8", codes.contiguous(), *codes.shape[-2:], _row_scales(scale, tuple(codes.shape), sizes),
                  experts=codes.shape[0] if codes.ndim == 3 else 0)


def fnuz_bits(codes: torch.Tensor) -> torch.Tensor:
    """e4m3fn values as e4m3fnuz of half the value: the same bits, but for minus zero (NaN there) and NaN."""
    bits = codes.view(torch.uint8)
    bits = torch.where(bits == 0x80, torch.zeros_like(bits), torch.where(bits & 0x7F == 0x7F, 0x80, bits))
    return bits.to(torch.uint8).view(torch.float8_e4m3fnuz)


def fp8_matrix(codes: torch.Tensor, scale: torch.Tensor, unit: str, *, block: bool = False, parts: int = 1,
               sizes: tuple[int, ...] | None = None) -> Matrix:
    """Weight [out, in] (or [experts, out, in]) float8_e4m3fn for a device with fp8 `unit` "fn" or "fnuz"; with "cast"
    or "none" for activations in 16 bits.

    scale: as in `int8_matrix`; with `block` [ceil(out / 128), ceil(in / 128)] for blocks of 128 x 128, those of `parts`
    stacked parts of equal rows one after the other (gate above up: 2). weight = codes * scale.
    Raises ValueError for other types, units, or scales that do not fit.
    """
    if codes.dtype != torch.float8_e4m3fn or unit not in UNITS:
        raise ValueError(f"fp8 weights are torch.float8_e4m3fn for a unit of {UNITS}, not {codes.dtype} for {unit!r}")
    shape = tuple(codes.shape)
    if block:
        across = (*shape[:-2], parts * -(-(shape[-2] // parts) // 128), -(-shape[-1] // 128))
        if tuple(scale.shape) != across or shape[-2] % parts:
            raise ValueError(f"block scales {tuple(scale.shape)} beside a weight {shape} in {parts} parts: {across}")
        scale = scale.float().contiguous()
    else:
        scale = _row_scales(scale, shape, sizes)
    kind = "fp8_block" if block else "fp8"
    if unit in ("cast", "none"):
        codes, kind = codes if unit == "cast" else codes.view(torch.uint8), f"{kind}_weight"
    elif unit == "fnuz":
        codes, scale = fnuz_bits(codes), 2 * scale
    return Matrix(kind, codes.contiguous(), *shape[-2:], scale, experts=shape[0] if codes.ndim == 3 else 0,
                  parts=parts if block else 1)


def quantized_for(x: torch.Tensor, weight: Matrix) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Activations and their scales as the weight's kind takes them."""
    if weight.kind in ("int8", "fp8"):
        return quantize_tokens(x, weight.codes.dtype)
    if weight.kind == "fp8_block":
        return quantize_groups(x, weight.codes.dtype)
    return x, None


def w8a8_linear(x: torch.Tensor | Quantized, weight: Matrix, bias: torch.Tensor | None = None,
                tile: Tile | None = None, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """[tokens, in] -> [tokens, out] in `dtype`; weight from `int8_matrix` or `fp8_matrix`.

    x: bfloat16, float16 or float32, quantized here per token (and 128 values for blocks), or already `Quantized`,
    where several weights share it. A tile for sm_90 is taken where none is given. Raises ValueError where shapes or
    types do not fit.
    """
    values, scale = x if isinstance(x, Quantized) else quantized_for(x, weight)
    tile = tile or linear_tile(weight.kind, len(values), weight.width, weight.rows)
    return linear(values, weight, bias, tile, x_scale=scale, dtype=dtype)


STORED = {  # how weights in fp8 alone are stored, and why some targets store them otherwise
    "u8": {target: "converts e4m3 itself" for target in TARGETS if converts_fp8(target)},
    "fp8e4nv": {target: "does not convert e4m3 itself" for target in TARGETS if not converts_fp8(target)},
}


def specializations() -> list[Specialization]:
    """int8; fp8 of both kinds by row and by block; fp8 weights alone, on every target."""
    found = linear_specializations("int8", "int8", x="i8", w="i8")
    for fp8 in ("fp8e4nv", "fp8e4b8"):
        for kind in ("fp8", "fp8_block"):
            found += linear_specializations(f"{kind} {fp8}", kind, x=fp8, w=fp8, unsupported=FP8_TARGETS[fp8])
    for w, others in STORED.items():
        for kind in ("fp8_weight", "fp8_block_weight"):
            found += linear_specializations(kind + (" cast" if w != "u8" else ""), kind, w=w, unsupported=others)
    return found
