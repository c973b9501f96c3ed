"""Weights for vllm-xpu-kernels' products, in oneDNN or CUTLASS: fp8, 4-bit groups, and experts in 16 bits.

A leaf is made only where the operator computes the checkpoint's own values: scales that the activations' type cannot
hold, for one, leave the weight to the paths below.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...core.platform import RawTensor
from ..accelerator.device import Device
from ..accelerator.quant import DTYPES, Vector
from ..expand import affine, expand, group_of

FOUR_BITS = ("q4_0", "awq4", "gptq4", "gptq4_v2", "pack4", "pack4_asym")
GROUP_STEP = 32  # a group must be a multiple of this many values
ROW_STEP = 8     # zero points lie eight in a word
Call = Callable[..., Any]


@dataclass(frozen=True)
class Norm(Vector):
    """exact: the compute dtype holds the weights, so that an operator may read them in it."""

    exact: bool

    @classmethod
    def of(cls, vector: Vector) -> Norm:
        return cls(vector.values, vector.cast, torch.equal(vector.cast.float(), vector.values))


@dataclass(frozen=True)
class Fp8:
    """codes: e4m3 [out, in]. scale: float32 [out]. Activations stay in 16 bits."""

    codes: torch.Tensor
    scale: torch.Tensor
    gemm: Call

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[T, in] -> [T, out]."""
        return self.gemm(A=x.contiguous(), B=self.codes.t(), B_scale_=self.scale, bias_=bias)

    def __str__(self) -> str:
        return "fp8, oneDNN"


@dataclass(frozen=True)
class Int4:
    """w = scale * (code - zero). codes: int32 [out, in / 8], the lower nibble first. scale: [groups, out] in the
    activations' type. zero: int8 [1], one for all, or int32 [groups, out / 8]."""

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor
    group: int
    gemm: Call

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[T, in] -> [T, out]."""
        return self.gemm(A=x.contiguous(), B=self.codes.t(), bias=bias, B_scale=self.scale, B_zp=self.zero,
                         group_size=self.group, g_idx=None)

    def __str__(self) -> str:
        return f"int4 groups of {self.group}, oneDNN"


@dataclass(frozen=True)
class Grouped:
    """Experts' matrices as the grouped product reads them, [experts, in, out]."""

    values: torch.Tensor

    def matrix(self, expert: int | torch.Tensor) -> torch.Tensor:
        """[out, in] of one expert, or [n, out, in] of n."""
        return self.values[expert].transpose(-1, -2)

    def __str__(self) -> str:
        return f"{str(self.values.dtype).removeprefix('torch.')}, grouped"


def fp8(raws: Sequence[RawTensor], dtype: str, device: Device, gemm: Call) -> Fp8 | None:
    """One scale for each output or for each part; None = not a case of the operator."""
    if dtype not in ("bf16", "f16") or any(raw.dtype != "fp8" for raw in raws):
        return None
    codes = np.concatenate([np.frombuffer(raw.data, np.uint8).reshape(raw.shape) for raw in raws])
    scale = np.concatenate([np.broadcast_to(expand(raw.extra[0]).reshape(-1), raw.shape[:1]) for raw in raws])
    return Fp8(torch.from_numpy(codes).view(torch.float8_e4m3fn).to(device.torch),
               torch.from_numpy(np.ascontiguousarray(scale, np.float32)).to(device.torch), gemm)


def int4(raws: Sequence[RawTensor], dtype: str, device: Device, gemm: Call) -> Int4 | None:
    """4-bit codes with whole zero points and scales that the compute dtype holds; None = not a case of the operator."""
    if dtype not in ("bf16", "f16") or any(raw.dtype not in FOUR_BITS for raw in raws):
        return None
    if len({(raw.dtype, group_of(raw)) for raw in raws}) != 1:
        return None
    group, width = group_of(raws[0]), raws[0].shape[-1]
    if group % GROUP_STEP or width % group or sum(raw.shape[0] for raw in raws) % ROW_STEP:
        return None
    codes, scale, minimum = (torch.from_numpy(np.ascontiguousarray(np.concatenate(part)))
                             for part in zip(*map(affine, raws), strict=True))
    narrow = scale.to(DTYPES[dtype])
    zero = torch.where(scale == 0, 0, -minimum / scale).round()
    if not (torch.equal(narrow.float(), scale) and torch.equal(-zero * scale, minimum)
            and bool(((zero >= 0) & (zero <= 15)).all())):
        return None
    first = zero.flatten()[:1]
    same = bool((zero == first).all())
    points = first.to(torch.int8) if same else words(zero.t().to(torch.uint8))
    parts = (words(codes), narrow.t().contiguous(), points)
    return Int4(*(part.to(device.torch) for part in parts), group, gemm)


def words(nibbles: torch.Tensor) -> torch.Tensor:
    """Values 0..15 [rows, n] uint8 -> [rows, n / 8] int32, the first in the lowest bits."""
    pairs = nibbles.contiguous().unflatten(-1, (-1, 2))
    return (pairs[..., 0] | pairs[..., 1] << 4).contiguous().view(torch.int32)
