"""Weight-only linears in 4-bit floats (e2m1): MXFP4, blocks of 32 with a power of two, and NVFP4, blocks of 16 with an
e4m3 scale under a scale of the tensor. For devices without a unit for them, and for activations in 16 bits.

Both products e2m1 x activation and e2m1 x e4m3 are exact in bf16 and f16, so nothing is rounded before the sum.
Packed codes are the panels of `linear_int4`. Sources: OCP Microscaling Formats (MX) v1.0; NVIDIA 2025 (NVFP4).
"""
from __future__ import annotations

import torch

from .launch import Specialization
from .linear_int4 import pack_groups, pack_nibbles
from .linear_kernel import linear, linear_specializations
from .linear_tiles import Matrix, Tile, linear_tile

PANEL = 128
GROUP = {"mxfp4": 32, "nvfp4": 16}


def pack_fp4(codes: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor | None = None,
             sizes: tuple[int, ...] | None = None) -> Matrix:
    """Pack a weight as checkpoints store it, on its device.

    codes: [out, in / 2] uint8 (or [experts, out, in / 2]), value 2 j in the low and 2 j + 1 in the high half of byte j.
    scale: uint8 e8m0 [out, in / 32] for MXFP4; float8_e4m3fn [out, in / 16] for NVFP4, whose `global_scale` is one
           number or [parts] for stacked parts of `sizes` rows ([experts] or [experts, parts] for experts):
           weight = e2m1 * scale * global_scale.
    Raises ValueError for other types or shapes, and for NaN among the scales.
    """
    kind = "nvfp4" if scale.dtype == torch.float8_e4m3fn else "mxfp4"
    if codes.dtype != torch.uint8 or scale.dtype not in (torch.uint8, torch.float8_e4m3fn):
        raise ValueError(f"fp4 weights are uint8 with scales of uint8 (e8m0) or float8_e4m3fn, not {codes.dtype} with "
                         f"{scale.dtype}")
    width = 2 * codes.shape[-1]
    if tuple(scale.shape) != (*codes.shape[:-1], width // GROUP[kind]) or width % GROUP[kind]:
        raise ValueError(f"scales {tuple(scale.shape)} beside codes {tuple(codes.shape)}: one for {GROUP[kind]} values")
    bits = scale.view(torch.uint8)
    if bool(((bits == 255) if kind == "mxfp4" else (bits & 0x7F == 0x7F)).any()):
        raise ValueError(f"a scale of this {kind} weight is NaN")
    if (global_scale is None) != (kind == "mxfp4"):
        raise ValueError("NVFP4 has a global scale, MXFP4 has none")
    values = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
    groups = -(-width // PANEL) * PANEL // GROUP[kind]
    second = None if global_scale is None else _spread(global_scale, codes.shape, sizes)
    return Matrix(kind, pack_nibbles(values), codes.shape[-2], width, pack_groups(bits, groups), second, GROUP[kind],
                  PANEL // 2,
                  experts=codes.shape[0] if codes.ndim == 3 else 0)


def _spread(scale: torch.Tensor, shape: torch.Size, sizes: tuple[int, ...] | None) -> torch.Tensor:
    """A number for each part -> [*lead, rows] float32."""
    lead, rows = shape[:-2], shape[-2]
    sizes = sizes or (rows,)
    scale = scale.float()
    if scale.numel() == 1 or (len(sizes) == 1 and tuple(scale.shape) == tuple(lead)):
        scale = scale.reshape(*([1] * len(lead) if scale.numel() == 1 else lead), 1).expand(*lead, len(sizes))
    if tuple(scale.shape) != (*lead, len(sizes)) or sum(sizes) != rows:
        raise ValueError(f"global scales {tuple(scale.shape)} for parts of {sizes} rows do not fit a weight of {rows}")
    return scale.repeat_interleave(torch.tensor(sizes, device=scale.device), dim=-1).contiguous()


def fp4_linear(x: torch.Tensor, weight: Matrix, bias: torch.Tensor | None = None, tile: Tile | None = None,
               ) -> torch.Tensor:
    """[tokens, in] bfloat16, float16 or float32 -> [tokens, out] in the same type; `weight` from `pack_fp4`.

    Sums are float32. A tile for sm_90 is taken where none is given. Raises ValueError where shapes do not fit.
    """
    return linear(x, weight, bias, tile or linear_tile(weight.kind, len(x), weight.width, weight.rows))


def specializations() -> list[Specialization]:
    """Both formats in bf16."""
    return [found for kind in ("mxfp4", "nvfp4")
            for found in linear_specializations(kind, kind, w="i32", scale="u8",
                                                second="fp32" if kind == "nvfp4" else None, group=GROUP[kind],
                                                half=PANEL // 2)]
