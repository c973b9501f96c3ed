"""Products and sparse layers by AITER, for the trials of `triton_kit/library.py`: int8 and fp8 by token and output, fp8
in blocks of 128 x 128, experts in bf16, f16 and fp8. Codes are of the kind that the device multiplies."""
from __future__ import annotations

import torch

from ..triton_kit.linear_tiles import Matrix
from ..triton_kit.linear_w8a8 import quantized_for
from ..triton_kit.quantize_static import quantize_static
from ..triton_kit.weights import Kept
from .aiter_library import Library

HALVES = (torch.bfloat16, torch.float16)
NARROW = 1e-4  # error beside ours: single codes of activations may be rounded to their neighbour
ROUNDED, CODES = 5e-5, 2e-3  # of sparse layers: what lies between their products is rounded, and its codes differ
TILE = (16, 16)  # of `shuffle_weight`: outputs, and half of the inputs


class RowProducts:
    """int8 and fp8 with a scale for each token and each output."""

    name, limit = "AITER", NARROW

    def __init__(self, library: Library) -> None:
        self.gemm = library.gemm_a8w8

    def reason_against(self, kept: Kept, dtype: torch.dtype) -> str | None:
        matrix = kept.matrix
        if matrix.kind not in ("int8", "fp8") or dtype not in HALVES:
            return f"of {matrix.kind} weights in {dtype}"
        return None if matrix.width % 16 == 0 else f"{matrix.width} wide: a multiple of 16 is needed"

    def product(self, x: torch.Tensor, kept: Kept) -> torch.Tensor:
        matrix = kept.matrix
        if kept.x_scale is None:
            values, scale = quantized_for(x, matrix)
        else:
            values, scale = quantize_static(x, matrix.codes.dtype, kept.x_scale)
            scale = scale.expand(len(x))
        return self.gemm(XQ=values, WQ=matrix.codes, x_scale=scale[:, None].contiguous(),
                         w_scale=matrix.scale[None], dtype=x.dtype)


class BlockProducts:
    """fp8 with a scale for 128 x 128 of the weight, and for each token and 128 values."""

    name, limit = "AITER", NARROW

    def __init__(self, library: Library) -> None:
        self.gemm = library.gemm_a8w8_blockscale

    def reason_against(self, kept: Kept, dtype: torch.dtype) -> str | None:
        matrix = kept.matrix
        if matrix.kind != "fp8_block" or dtype not in HALVES:
            return f"of {matrix.kind} weights in {dtype}"
        whole = matrix.parts == 1 and matrix.rows % 128 == matrix.width % 128 == 0
        return None if whole else f"{matrix.rows} x {matrix.width} in {matrix.parts} parts: whole blocks are needed"

    def product(self, x: torch.Tensor, kept: Kept) -> torch.Tensor:
        matrix = kept.matrix
        values, scale = quantized_for(x, matrix)
        return self.gemm(XQ=values, WQ=matrix.codes, x_scale=scale, w_scale=matrix.scale, dtype=x.dtype)


class FusedExperts:
    """It wants the codes of 16 outputs beside each other; gate above up, as ours. It quantizes activations itself, in
    the same way."""

    name, acts = "AITER", ("silu",)

    def __init__(self, library: Library, kind: str) -> None:
        """kind: of the experts, "dense", "fp8" or "fp8_block"."""
        self.kind, self.limit = kind, ROUNDED if kind == "dense" else CODES
        self.fused, self.shuffle = library.fused_moe, library.shuffle_weight
        types = library.QuantType
        self.quantized = {"dense": types.No, "fp8": types.per_Token, "fp8_block": types.per_128x128}[kind]
        self.silu = library.ActivationType.Silu

    def reason_against(self, matrix: Matrix, width: int, inner: int, dtype: torch.dtype) -> str | None:
        if matrix.kind != self.kind or dtype not in HALVES or (self.kind == "dense" and matrix.codes.dtype != dtype):
            return f"of {matrix.kind} weights in {dtype}"
        unit = 128 if self.kind == "fp8_block" else 2 * TILE[1]
        return f"{width} x {inner}: multiples of {unit} are needed" if width % unit or inner % unit else None

    def pack(self, matrix: Matrix, first: bool) -> Matrix:
        return matrix._replace(codes=self.shuffle(matrix.codes, layout=TILE))

    def unpack(self, packed: Matrix, first: bool) -> Matrix:
        return packed._replace(codes=unshuffled(packed.codes))

    def moe(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, w13: Matrix, w2: Matrix,
            act: str) -> torch.Tensor:
        scales = {}
        if self.kind != "dense":
            scales = {name: each.scale[..., None] if self.kind == "fp8" else each.scale
                      for name, each in (("w1_scale", w13), ("w2_scale", w2))}
        return self.fused(hidden_states=x.contiguous(), w1=w13.codes, w2=w2.codes, topk_weight=weights, topk_ids=ids,
                          activation=self.silu, quant_type=self.quantized, **scales)


def unshuffled(codes: torch.Tensor) -> torch.Tensor:
    """What `shuffle_weight(codes, layout=TILE)` was made of, [experts, out, in]: there 16 outputs of one piece of 16
    bytes of inputs lie one behind the other."""
    experts, rows, width = codes.shape
    size = codes.element_size()
    across, piece = 2 * TILE[1], 16 // size
    lying = codes.view(torch.uint8).view(experts, rows // TILE[0], width // across, across // piece, TILE[0], 16)
    return lying.permute(0, 1, 4, 2, 3, 5).contiguous().view(experts, rows, width * size).view(codes.dtype)
