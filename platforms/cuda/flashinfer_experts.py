"""Sparse layers by FlashInfer's fused experts, for the trials of `triton_kit/library.py`: bf16 and f16 (from Ada on),
fp8 in blocks of 128 x 128 (Hopper). Routing stays ours."""
from __future__ import annotations

from types import ModuleType

import torch

from ..triton_kit.linear_tiles import Matrix
from .flashinfer_library import HALVES

# Errors beside ours: it rounds gate and up to the activations' type before it multiplies them, and one in thirty codes
# of the result is then its neighbour.
ROUNDED, CODES = 5e-5, 2e-3


class FusedExperts:
    """It wants `up` above gate. Results of a token's experts are added up in a fixed order, not by atomics."""

    name, acts = "FlashInfer", ("silu",)

    def __init__(self, library: ModuleType, arch: str, blocks: bool = False) -> None:
        """blocks: those in fp8, whose kernels are compiled for each shape."""
        self.fused, self.arch, self.blocks = library.fused_moe.cutlass_fused_moe, arch, blocks
        self.limit = CODES if blocks else ROUNDED

    def reason_against(self, matrix: Matrix, width: int, inner: int, dtype: torch.dtype) -> str | None:
        if not self.blocks:
            if dtype not in HALVES or matrix.kind != "dense" or matrix.codes.dtype != dtype:
                return f"of {matrix.kind} weights in {dtype}"
            return f"{width} x {inner}: multiples of 8 are needed" if width % 8 or inner % 8 else None
        if matrix.kind != "fp8_block" or matrix.codes.dtype != torch.float8_e4m3fn or dtype != torch.bfloat16:
            return f"of {matrix.kind} weights in {dtype}"
        if not self.arch.startswith("sm_90"):
            return f"on {self.arch}: sm_90 alone"
        return f"{width} x {inner}: whole blocks are needed" if width % 128 or inner % 128 else None

    def pack(self, matrix: Matrix, first: bool) -> Matrix:
        if not first:
            return matrix
        codes, scale = (None if part is None else part.roll(part.shape[1] // 2, 1)
                        for part in (matrix.codes.view(torch.uint8) if self.blocks else matrix.codes, matrix.scale))
        return matrix._replace(codes=codes.view(matrix.codes.dtype), scale=scale)

    unpack = pack  # halves that change places

    def moe(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, w13: Matrix, w2: Matrix,
            act: str) -> torch.Tensor:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        self.fused(input=x.contiguous(), token_selected_experts=ids, token_final_scales=weights,
                   fc1_expert_weights=w13.codes, fc2_expert_weights=w2.codes, output_dtype=x.dtype,
                   quant_scales=[w13.scale, w2.scale] if self.blocks else [], output=out,
                   use_deepseek_fp8_block_scale=self.blocks, use_fused_finalize=False)
        return out
