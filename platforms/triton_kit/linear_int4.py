"""Weight-only linears in affine groups: w = scale * code + minimum, codes of 4 or 8 bits.

AWQ, GPTQ, MLX and the affine block formats of GGUF (`platforms.expand.affine`) are all this form; they are packed once
at load. Sources: Lin et al. 2023 (AWQ), Frantar et al. 2022 (GPTQ).

Packed codes are panels: for each panel of values along `in` the rows lie one behind the other, so that a tile is one
piece of memory. A panel of 4-bit codes is 128 values, 16 words of 32 bits a row: value 32 q + 2 j + h is nibble q + 4 h
of word j. So an `and` and an `or` make two neighbouring values of 16 bits at once. A panel of 8-bit codes is `half`
bytes, as they are. Scale and second are [groups, rows].
"""
from __future__ import annotations

import numpy as np
import torch

from .launch import Specialization
from .linear_kernel import linear, linear_specializations
from .linear_tiles import Matrix, Tile, linear_tile

EXACT = (torch.float16, torch.bfloat16, torch.float32)  # the first that holds all scales without a change is kept


def pack_bytes(codes: torch.Tensor, half: int) -> torch.Tensor:
    """Codes [..., rows, in] uint8 -> panels [..., ceil(in / half), rows, half] uint8; `in` is filled up with zeros."""
    *lead, rows, width = codes.shape
    panels = -(-width // half)
    padded = torch.nn.functional.pad(codes, (0, panels * half - width))
    return padded.reshape(*lead, rows, panels, half).movedim(-2, -3).contiguous()


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Codes 0..15 [..., rows, in] uint8 -> panels [..., ceil(in / 128), rows, 16] int32."""
    parts = pack_bytes(codes, 128)
    parts = parts.reshape(*parts.shape[:-1], 4, 16, 2)  # quarter, word, half of the word
    low, high = ((part[..., 0, :] | part[..., 1, :] << 4, part[..., 2, :] | part[..., 3, :] << 4)
                 for part in parts.unbind(-1))
    return torch.stack([*low, *high], -1).view(torch.int32).squeeze(-1).contiguous()


def pack_groups(values: torch.Tensor, groups: int) -> torch.Tensor:
    """One value for each group [..., rows, in / group] -> [..., groups, rows], filled up with zeros."""
    padded = torch.nn.functional.pad(values, (0, groups - values.shape[-1]))
    return padded.transpose(-1, -2).contiguous()


def _narrowest(*tensors: torch.Tensor) -> list[torch.Tensor]:
    dtype = next(kind for kind in EXACT if all(torch.equal(t.to(kind).float(), t) for t in tensors))
    return [t.to(dtype) for t in tensors]


def _tensor(array: np.ndarray | torch.Tensor) -> torch.Tensor:
    return array if isinstance(array, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(array))


def pack_affine(codes: np.ndarray | torch.Tensor, scale: np.ndarray | torch.Tensor,
                minimum: np.ndarray | torch.Tensor, bits: int) -> Matrix:
    """Pack codes [out, in] (or [experts, out, in]) uint8, or int8 of 8 bits, for the kernel, on the codes' device.

    scale, minimum: [out, in / group] float32; one group for the whole row, or groups of 32, 64 or a multiple of 128.
    The result is exact: scales are stored in the narrowest type that changes none of them, and where every minimum is
    a whole number of scales (AWQ, GPTQ, q4_0, q8_0) that number, the zero point, is stored instead.
    Raises ValueError for shapes, groups or codes that do not fit.
    """
    codes, scale, minimum = _tensor(codes), _tensor(scale).float(), _tensor(minimum).float()
    width, groups = codes.shape[-1], scale.shape[-1]
    if bits not in (4, 8) or (bits == 4 and codes.numel() and int(codes.max()) > 15):
        raise ValueError(f"codes of {bits} bits up to {int(codes.max()) if codes.numel() else 0}: 4 or 8 bits it is")
    if scale.shape != minimum.shape or scale.shape[:-1] != codes.shape[:-1] or groups == 0 or width % groups:
        raise ValueError(f"scales {tuple(scale.shape)} and minima {tuple(minimum.shape)} do not fit codes "
                         f"{tuple(codes.shape)}")
    group = 0 if groups == 1 else width // groups
    if group not in (0, 32, 64) and group % 128:
        raise ValueError(f"groups of {group} values: it must be 32, 64, a multiple of 128 or the whole row ({width})")
    if codes.dtype == torch.int8:
        codes, minimum = (codes.to(torch.int16) + 128).to(torch.uint8), minimum - 128 * scale
    zero = torch.where(scale == 0, 0.0, torch.round(-minimum / scale))
    whole = bool((zero.abs() <= 256).all()) and torch.equal(-zero * scale, minimum)
    half = 32 if group == 32 and bits == 8 else 64
    span = half * 8 // bits
    padded = 1 if group == 0 else -(-width // span) * span // group if group < span else groups
    packed = [pack_groups(part, padded) for part in _narrowest(scale, zero if whole else minimum)]
    panels = pack_nibbles(codes) if bits == 4 else pack_bytes(codes, half)
    return Matrix(f"affine{bits}", panels, codes.shape[-2], width, *packed, group, half, whole,
                  codes.shape[0] if codes.ndim == 3 else 0)


def affine_linear(x: torch.Tensor, weight: Matrix, bias: torch.Tensor | None = None, tile: Tile | None = None,
                  ) -> torch.Tensor:
    """[tokens, in] bfloat16, float16 or float32 -> [tokens, out] in the same type; `weight` from `pack_affine`.

    Sums are float32. A tile for sm_90 is taken where none is given. Raises ValueError where shapes do not fit.
    """
    return linear(x, weight, bias, tile or linear_tile(weight.kind, len(x), weight.width, weight.rows))


def specializations() -> list[Specialization]:
    """Groups of 32 (GGUF), 128 with zero points in bf16 and f16 (AWQ, GPTQ), and 8 bits by row."""
    return [found for bits, group, zero, x in ((4, 32, False, "bf16"), (4, 128, True, "bf16"), (4, 128, True, "fp16"),
                                               (8, 0, True, "bf16"))
            for found in linear_specializations(
                f"affine{bits} g{group or 'row'} {x}", f"affine{bits}", x=x, out=x, scale="fp16", second="fp16",
                w="i32" if bits == 4 else "u8", group=group, half=64, zero=zero)]
