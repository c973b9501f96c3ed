"""Weights on the device: vectors, dense matrices, and matrices that keep the checkpoint's codes in affine groups.

The products here are composed of torch operators: a kept matrix is expanded for each product, which saves memory, not
time. A platform with kernels passes its own classes to `load_weight`.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F

from ...core.platform import RawTensor, Unsupported, WeightSpec
from ..expand import AFFINE, CODECS, affine, expand
from ..experts import by_expert
from .device import Device

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


@dataclass(frozen=True)
class Vector:
    """A norm's or bias's values in float32, and in the compute dtype."""

    values: torch.Tensor
    cast: torch.Tensor

    def __str__(self) -> str:
        return "float32"


@dataclass(frozen=True)
class Dense:
    """[out, in] values, or [experts, out, in]."""

    values: torch.Tensor

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """[n] row numbers -> [n, in]."""
        return self.values[ids]

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[T, in] -> [T, out]."""
        return F.linear(x, self.values, bias)

    def matrix(self, expert: int | torch.Tensor) -> torch.Tensor:
        """[out, in] of one expert, or [n, out, in] of n."""
        return self.values[expert]

    def __str__(self) -> str:
        return str(self.values.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Groups:
    """w = scale * code + minimum in groups along the last axis, [.., out, in], in the checkpoint's own precision.

    codes: uint8, 8-bit codes [.., out, in], or 4-bit codes [.., out, in / 2], the even column in the low half.
    scale, minimum: [.., out, in / group], float16 where that loses nothing, else float32.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    minimum: torch.Tensor
    bits: int
    dtype: torch.dtype

    @classmethod
    def make(cls, codes: np.ndarray, scale: np.ndarray, minimum: np.ndarray, bits: int, dtype: torch.dtype,
             device: Device) -> Groups:
        """From codes [.., out, in] (uint8, or int8 around zero), scale and minimum float32 [.., out, in / group]."""
        if codes.dtype == np.int8:
            codes, minimum = (codes.view(np.uint8) ^ np.uint8(128)), minimum - np.float32(128) * scale
        packed = codes[..., 0::2] | codes[..., 1::2] << np.uint8(4) if bits == 4 else codes
        parts = [torch.from_numpy(part).to(device.torch) for part in (
            np.ascontiguousarray(packed), *(narrowed(part) for part in (scale, minimum)))]
        return cls(*parts, bits, dtype)

    @property
    def group(self) -> int:
        return self.codes.shape[-1] * (8 // self.bits) // self.scale.shape[-1]

    def expand(self, codes: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor) -> torch.Tensor:
        """Values of some of the rows, in the compute dtype."""
        if self.bits == 4:
            codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
        grouped = codes.unflatten(-1, (scale.shape[-1], -1)).float()
        return (grouped * scale[..., None].float() + minimum[..., None].float()).flatten(-2).to(self.dtype)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """[n] row numbers -> [n, in]."""
        return self.expand(self.codes[ids], self.scale[ids], self.minimum[ids])

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[T, in] -> [T, out]."""
        return F.linear(x, self.expand(self.codes, self.scale, self.minimum), bias)

    def matrix(self, expert: int | torch.Tensor) -> torch.Tensor:
        """[out, in] of one expert, or [n, out, in] of n."""
        return self.rows(expert)

    def __str__(self) -> str:
        return f"int{self.bits} groups of {self.group}"


@dataclass(frozen=True)
class Experts:
    """One matrix for each expert. held: the numbers of these, where other ranks have others; None = all are here."""

    weight: Dense | Groups
    held: range | None = None

    def __str__(self) -> str:
        counted = getattr(self.weight, "experts", None)  # else the first axis of its values
        return f"{counted or len(next(iter(vars(self.weight).values())))} experts, {self.weight}"


Leaf = Vector | Dense | Groups | Experts


def narrowed(values: np.ndarray) -> np.ndarray:
    """In float16 where that is exact."""
    with np.errstate(over="ignore"):
        half = values.astype(np.float16)
    return half if (half.astype(np.float32) == values).all() else np.ascontiguousarray(values, np.float32)


def code_bits(raws: Sequence[RawTensor]) -> int | None:
    """Bits to keep the codes of these tensors in, 4 or 8, if all have one affine format; None = they are expanded."""
    names = {raw.dtype for raw in raws}
    if len(names) != 1 or not names <= AFFINE.keys():
        return None
    name = names.pop()
    return 4 if name in ("q4_0", "q4_1", "q4_k") or name.startswith(("affine2", "affine3", "affine4")) else 8


def load_weight(raws: Sequence[RawTensor], spec: WeightSpec, dtype: str, device: Device,
                groups: type[Groups] | None = Groups) -> Leaf:
    """The leaf of one weight, its parts stacked along the output axis. Copies: the bytes may go away afterwards.

    groups: what keeps codes in affine groups, None = they are expanded. Raises `Unsupported` for an unknown format.
    """
    unknown = sorted({raw.dtype for raw in raws} - CODECS.keys())
    if unknown:
        raise Unsupported(f"{spec.names[0]}: format {', '.join(unknown)} is unknown; known: {', '.join(CODECS)}")
    kind = DTYPES[dtype]
    if spec.role in ("norm", "bias"):
        values = torch.from_numpy(np.concatenate([expand(raw) for raw in raws])).to(device.torch)
        return Vector(values, values.to(kind))
    experts = by_expert(raws, spec) if spec.role == "experts" else [raws]
    bits = code_bits([raw for parts in experts for raw in parts]) if groups is not None else None
    if bits is None:
        values = [torch.cat([torch.from_numpy(expand(raw)).to(kind) for raw in parts]) for parts in experts]
        made: Dense | Groups = Dense((torch.stack(values) if spec.role == "experts" else values[0]).to(device.torch))
    else:
        columns = [[np.concatenate(part) for part in zip(*map(affine, parts), strict=True)] for parts in experts]
        made = groups.make(*(np.stack(part) if spec.role == "experts" else part[0]
                             for part in zip(*columns, strict=True)), bits, kind, device)
    return Experts(made) if spec.role == "experts" else made
