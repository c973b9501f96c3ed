"""Products by FlashInfer, for the trials of `triton_kit/library.py`: fp8 in blocks of 128 x 128 (Hopper), fp8 with one
scale (from Ada on), nvfp4 weights under activations in 16 bits (Blackwell).

Only what works in memory of its own call or stream is here: graphs are captured beside steps that run.
"""
from __future__ import annotations

import threading
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch

from ...core.platform import RawTensor
from ..expand import expand
from ..triton_kit.quantize_static import quantize_static
from ..triton_kit.weights import FP4, Kept

NARROW = 1e-4  # error beside ours of products in 8 bits: single codes may be rounded to their neighbour
WIDE = 2e-5    # in 16 bits: a result is rounded twice, of a few parts in bf16
BLOCKSCALE = threading.Lock()  # the library's runner of blocks is told its memory in one call, and runs in the next
WORKSPACE = 40 << 20           # bytes: its DEFAULT_WORKSPACE_SIZE


class BlockProducts:
    """Weights in e4m3 with a scale for 128 x 128, which quantizes bf16 activations itself, by token and 128 values. Its
    kernels are compiled for each shape by the driver's compiler, in seconds."""

    name, limit = "FlashInfer", NARROW

    def __init__(self, library: ModuleType, arch: str) -> None:
        self.gemm, self.arch = library.gemm.fp8_blockscale_gemm_sm90, arch

    def reason_against(self, kept: Kept, dtype: torch.dtype) -> str | None:
        matrix = kept.matrix
        if matrix.kind != "fp8_block" or matrix.codes.dtype != torch.float8_e4m3fn:
            return f"of {matrix.kind} weights"
        if not self.arch.startswith("sm_90"):
            return f"on {self.arch}: sm_90 alone"
        if dtype != torch.bfloat16 or matrix.parts > 1 or matrix.rows % 64 or matrix.width % 128:
            return f"{matrix.rows} x {matrix.width} in {matrix.parts} parts, {dtype}: multiples of 64 and 128 in bf16"
        return None

    def product(self, x: torch.Tensor, kept: Kept) -> torch.Tensor:
        matrix = kept.matrix
        with BLOCKSCALE:
            return self.gemm(input=x.contiguous(), weight=matrix.codes, weight_scale=matrix.scale,
                             out_dtype=torch.bfloat16)


class TensorProducts:
    """Weights in e4m3 with one scale, and activations with the one that the checkpoint was calibrated to: cuBLAS."""

    name, limit = "FlashInfer", NARROW

    def __init__(self, library: ModuleType, arch: str) -> None:
        self.gemm, self.arch = library.gemm.gemm_base.fp8_gemm_sm100, arch

    def reason_against(self, kept: Kept, dtype: torch.dtype) -> str | None:
        matrix = kept.matrix
        if matrix.kind != "fp8" or matrix.codes.dtype != torch.float8_e4m3fn or matrix.experts:
            return f"of {matrix.kind} weights"
        if kept.x_scale is None or bool((matrix.scale != matrix.scale[0]).any()):
            return "with more than one scale"
        if dtype not in (torch.bfloat16, torch.float16) or matrix.rows % 16 or matrix.width % 16:
            return f"{matrix.rows} x {matrix.width} in {dtype}: multiples of 16 in bf16 or f16"
        return None

    def product(self, x: torch.Tensor, kept: Kept) -> torch.Tensor:
        matrix = kept.matrix
        values, scale = quantize_static(x, matrix.codes.dtype, kept.x_scale)
        out = torch.empty(1, len(x), matrix.rows, dtype=x.dtype, device=x.device)
        workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=x.device)
        self.gemm(a=values[None], b=matrix.codes.t()[None], scale_a=scale, scale_b=matrix.scale[:1], out=out,
                  workspace_buffer=workspace, runner_names=["cublas"])
        return out[0]


class Nvfp4(NamedTuple):
    """As checkpoints store it: codes uint8 [out, in / 2], scale e4m3 [out, in / 16], alpha float32 [1]."""

    codes: torch.Tensor
    scale: torch.Tensor
    alpha: torch.Tensor


class Nvfp4Products:
    """Weights in nvfp4, unpacked beside the matrix units, activations in bf16."""

    name, limit = "FlashInfer", WIDE
    backend = "blackwell-native"  # reads codes and scales in the order of checkpoints

    def __init__(self, library: ModuleType, arch: str) -> None:
        self.gemm, self.arch = library.gemm.mm_bf16_fp4, arch

    def reason_against(self, raws: Sequence[RawTensor], kept: Kept, dtype: torch.dtype) -> str | None:
        if kept.matrix.kind != "nvfp4":
            return f"of {kept.matrix.kind} weights"
        if self.arch not in ("sm_100", "sm_103"):
            return f"on {self.arch}: sm_100 and sm_103 alone"
        if dtype != torch.bfloat16 or kept.matrix.width % 16:
            return f"{kept.matrix.width} wide in {dtype}: multiples of 16 in bf16"
        return "with more than one global scale" if len(alphas(raws)) > 1 else None

    def pack(self, raws: Sequence[RawTensor], device: torch.device) -> Nvfp4:
        codes, scale = (np.concatenate([np.frombuffer(part.data, np.uint8).reshape(raw.shape[0], -1)
                                        for raw, part in pairs]) for pairs in (
            [(raw, raw) for raw in raws], [(raw, raw.extra[0]) for raw in raws]))
        return Nvfp4(torch.from_numpy(codes).to(device), torch.from_numpy(scale).view(torch.float8_e4m3fn).to(device),
                     torch.tensor([alphas(raws).pop()], dtype=torch.float32, device=device))

    def product(self, x: torch.Tensor, packed: Nvfp4) -> torch.Tensor:
        return self.gemm(a=x.contiguous(), b=packed.codes, b_descale=packed.scale, alpha=packed.alpha,
                         backend=self.backend, out_dtype=torch.bfloat16)


def alphas(raws: Sequence[RawTensor]) -> set[float]:
    """The global scales of the parts, as factors."""
    found = {float(expand(raw.extra[1]).reshape(())) for raw in raws if raw.dtype in FP4}
    return {1 / each for each in found} if raws[0].dtype == "nvfp4_div" else found
