"""Weights that keep a checkpoint's codes, as the kernels read them; what no kernel reads is expanded at load.

int8 and fp8 weights meet activations in 8 bits where the checkpoint was made for that, which its author measured; it is
faster for many tokens and less exact. Each token has its own scale, or all have the one that the checkpoint was
calibrated to (of linears; experts' tokens have their own). An option decides otherwise, and float32 is left alone.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from ...core.platform import RawTensor, WeightSpec
from ..accelerator import quant
from ..accelerator.device import Device
from ..accelerator.quant import Dense, Experts, Leaf
from ..expand import AFFINE, INTEGERS, affine, expand, group_of
from ..experts import by_expert
from .fp4 import pack_fp4
from .linear_int4 import pack_affine
from .linear_kernel import linear
from .linear_tiles import Matrix, linear_tile
from .linear_w8a8 import fp8_matrix, int8_matrix, quantized_for
from .quantize_static import quantize_static, static_scale
from .tiles import converts_fp8

FOUR_BITS = ("q4_0", "q4_1", "q4_k", "affine2", "affine3", "affine4", "awq4", "gptq2", "gptq3", "gptq4", "pack4")
FP8, BLOCKS, FP4 = "fp8", "fp8_128", ("mxfp4", "nvfp4", "nvfp4_div")
KEPT = (*AFFINE, *INTEGERS, FP8, BLOCKS, *FP4)


@dataclass(frozen=True)
class Kept:
    """A quantized matrix for `linear`. x_scale: float32 [1], of all activations, None = each token has its own."""

    matrix: Matrix
    device: Device
    label: str
    x_scale: torch.Tensor | None = None

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[T, in] -> [T, out]."""
        tile = linear_tile(self.matrix.kind, len(x), self.matrix.width, self.matrix.rows, self.device.arch,
                           self.device.processors)
        if self.x_scale is None:
            values, scale = quantized_for(x, self.matrix)
        else:
            values, scale = quantize_static(x, self.matrix.codes.dtype, self.x_scale)
        return linear(values, self.matrix, bias, tile, x_scale=scale, dtype=x.dtype)

    @property
    def experts(self) -> int:
        return self.matrix.experts

    def __str__(self) -> str:
        return self.label


@dataclass(frozen=True)
class Policy:
    """unit: the device's fp8 products, "fn", "fnuz" or "none".  narrow: whether activations of 8-bit weights are
    quantized, by token; None = where the checkpoint was made for it, and as it was."""

    unit: str
    narrow: bool | None

    def settled(self, spec: WeightSpec, dtype: str) -> Policy:
        """For one weight, with a `narrow` that says yes or no."""
        return self if self.narrow is not None else replace(self, narrow=spec.narrow and dtype != "f32")

    def static(self, spec: WeightSpec, matrix: Matrix) -> float | None:
        """The scale of all activations that meet a matrix, if they have one."""
        taken = self.narrow is None and spec.role == "linear" and matrix.kind in ("int8", "fp8")
        return spec.input_scale if taken else None

    def fp8(self, device: Device) -> str:
        """What the device does with weights in fp8, see `linear_w8a8.UNITS`."""
        if self.narrow and self.unit != "none":
            return self.unit
        return "cast" if converts_fp8(device.arch) else "none"


def load_weight(raws: Sequence[RawTensor], spec: WeightSpec, dtype: str, device: Device, policy: Policy) -> Leaf | Kept:
    """The leaf of one weight: kept where a kernel reads its format, else as `accelerator.quant.load_weight`."""
    if spec.role not in ("linear", "experts"):
        return quant.load_weight(raws, spec, dtype, device, groups=None)
    experts = by_expert(raws, spec) if spec.role == "experts" else [list(raws)]
    make = maker(experts, policy.settled(spec, dtype))
    if make is None:
        leaf = quant.load_weight(raws, spec, dtype, device, groups=None)
        if spec.role == "linear" or not isinstance(leaf.weight, Dense):
            return leaf
        values = leaf.weight.values
        return Experts(Kept(Matrix("dense", values, *values.shape[1:], experts=len(values)), device, dtype))
    matrix = make(experts, spec.role == "experts", device)
    kept = Kept(matrix, device, label_of(raws[0], matrix))
    if (scale := policy.static(spec, matrix)) is not None:
        kept = replace(kept, label=kept.label.replace("8-bit", "static 8-bit"),
                       x_scale=static_scale(scale, matrix.codes.dtype, device.torch))
    return kept if spec.role == "linear" else Experts(kept)


def label_of(raw: RawTensor, matrix: Matrix) -> str:
    """What it is, for people: "int4 groups of 32", "fp8_block, 8-bit activations"."""
    if matrix.kind.startswith("affine"):
        return f"int{matrix.kind[-1]} " + (f"groups of {matrix.group}" if matrix.group else "rows")
    return matrix.kind.removesuffix("_weight") + (", 8-bit activations" if matrix.kind in (
        "int8", "fp8", "fp8_block") else "")


def maker(experts: Sequence[Sequence[RawTensor]], policy: Policy) -> Callable[..., Matrix] | None:
    """What packs these parts of each expert (or of one matrix), None = they are expanded."""
    parts = [raw for expert in experts for raw in expert]
    names = {raw.dtype for raw in parts}
    if len(names) != 1 or not names <= set(KEPT):
        return None
    name = names.pop()
    if name == FP8:
        return lambda *args: pack_fp8(*args, policy)
    if name == BLOCKS:
        heights = {raw.shape[-2] for raw in parts}
        whole = all(height % 128 == 0 for height in heights)
        return (lambda *args: pack_fp8_blocks(*args, policy)) if whole or len(heights) == 1 else None
    if name in FP4:
        return pack_fp4_parts
    groups = {group_of(raw) for raw in parts}
    group, width = min(groups), parts[0].shape[-1]
    if len(groups) != 1 or (group not in (32, 64, width) and group % 128):
        return None
    if name == "int8" and policy.narrow and group == width:
        return pack_int8
    return pack_groups


def stacked(experts: Sequence[Sequence[RawTensor]], many: bool, device: Device,
            arrays: Callable[[RawTensor], tuple[np.ndarray, ...]]) -> list[torch.Tensor]:
    """`arrays` of every part, parts one below the other, experts along a first axis: on the device."""
    columns = [[np.concatenate(part) for part in zip(*map(arrays, parts), strict=True)] for parts in experts]
    whole = [np.stack(column) if many else column[0] for column in zip(*columns, strict=True)]
    return [torch.from_numpy(np.ascontiguousarray(part)).to(device.torch) for part in whole]


def pack_groups(experts: Sequence[Sequence[RawTensor]], many: bool, device: Device) -> Matrix:
    codes, scale, minimum = stacked(experts, many, device, affine)
    return pack_affine(codes, scale, minimum, 4 if experts[0][0].dtype.startswith(FOUR_BITS) else 8)


def pack_int8(experts: Sequence[Sequence[RawTensor]], many: bool, device: Device) -> Matrix:
    codes, scale, _ = stacked(experts, many, device, affine)
    return int8_matrix(codes, scale[..., 0])


def rows_of(raw: RawTensor) -> np.ndarray:
    return np.frombuffer(raw.data, np.uint8).reshape(raw.shape[0], -1)


def scale_rows(raw: RawTensor) -> np.ndarray:
    """One scale for each output, from one for each or one for all."""
    return np.broadcast_to(expand(raw.extra[0]).reshape(-1), raw.shape[:1])


def pack_fp8(experts: Sequence[Sequence[RawTensor]], many: bool, device: Device, policy: Policy) -> Matrix:
    codes, scale = stacked(experts, many, device, lambda raw: (rows_of(raw), scale_rows(raw)))
    return fp8_matrix(codes.view(torch.float8_e4m3fn), scale, policy.fp8(device))


def pack_fp8_blocks(experts: Sequence[Sequence[RawTensor]], many: bool, device: Device, policy: Policy) -> Matrix:
    codes, scale = stacked(experts, many, device, lambda raw: (rows_of(raw), expand(raw.extra[0])))
    parts = 1 if experts[0][0].shape[0] % 128 == 0 else len(experts[0])
    return fp8_matrix(codes.view(torch.float8_e4m3fn), scale, policy.fp8(device), block=True,
                      parts=parts)


def pack_fp4_parts(experts: Sequence[Sequence[RawTensor]], many: bool, device: Device) -> Matrix:
    name = experts[0][0].dtype
    codes, scale = stacked(experts, many, device, lambda raw: (
        rows_of(raw), np.frombuffer(raw.extra[0].data, np.uint8).reshape(raw.shape[0], -1)))
    if name == "mxfp4":
        return pack_fp4(codes, scale)
    whole = torch.tensor([[float(expand(raw.extra[1]).reshape(())) for raw in parts] for parts in experts])
    whole = (1 / whole if name == "nvfp4_div" else whole).to(device.torch)
    sizes = tuple(raw.shape[0] for raw in experts[0])
    return pack_fp4(codes, scale.view(torch.float8_e4m3fn), whole if many else whole[0], sizes)
