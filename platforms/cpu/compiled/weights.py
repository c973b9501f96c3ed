"""Matrices in the order of `packed.h`, made once at load, on huge pages."""
from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..memory import huge_bytes

if TYPE_CHECKING:
    from .step import Runner

BF16, INT8, INT4 = range(3)  # `Format` of step.h
NAMES = ("bfloat16", "int8", "int4")
LANES, GROUP = 16, 32
BLOCK = {BF16: 32 * GROUP, INT8: 512 + 64, INT4: 256 + 64}  # bytes of sixteen outputs and a group of inputs


class Packed:
    """[outputs, inputs] values: bf16, or codes of 8 or 4 bits with a scale and a minimum in half precision for each 32
    inputs: w = scale * code + minimum."""

    def __init__(self, runner: Runner, format: int, arrays: Sequence[np.ndarray], outputs: int, inputs: int) -> None:
        self.runner, self.format, self.outputs, self.inputs = runner, format, outputs, inputs
        library = runner.library
        self.block = BLOCK[format] * inputs // GROUP
        self.memory = huge_bytes(-(-outputs // LANES) * self.block)
        pack = (library.pack_bf16, library.pack_int8, library.pack_int4)[format]
        kept = [np.ascontiguousarray(array) for array in arrays]
        pack(*(array.ctypes.data for array in kept), outputs, inputs, self.memory.ctypes.data)

    def fill(self, record: np.ndarray) -> None:
        """Describe itself in a `WEIGHT` record."""
        record["at"], record["format"], record["block"] = self.memory.ctypes.data, self.format, self.block
        record["outputs"], record["inputs"] = self.outputs, self.inputs

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[T, in] -> [T, out], one op by itself."""
        out = torch.empty((len(x), self.outputs), dtype=torch.float32)
        self.runner.product(x.float().contiguous().numpy(), self, out.numpy())
        return out.to(x.dtype) if bias is None else (out + bias).to(x.dtype)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """[n] row numbers -> [n, in] in bf16."""
        out = torch.empty((len(ids), self.inputs), dtype=torch.float32)
        self.runner.look_up(ids.int().numpy(), self, out.numpy())
        return out.to(torch.bfloat16)

    def __str__(self) -> str:
        return NAMES[self.format]


def pack_values(runner: Runner, values: torch.Tensor) -> Packed:
    """values: bf16 [outputs, inputs], an even number of inputs."""
    return Packed(runner, BF16, (values.contiguous().view(torch.int16).numpy(),), *values.shape)


def pack_codes(runner: Runner, codes: np.ndarray, scale: np.ndarray, minimum: np.ndarray,
               bits: int) -> Packed | None:
    """codes [outputs, inputs], uint8 or int8, of `bits`; scale and minimum float32 for each group, whole runs of 32.
    None where half precision is too coarse for them, as for scales below its normal range."""
    if bits > 4 and codes.dtype == np.uint8:
        middle = 1 << (bits - 1)
        codes, minimum = (codes.astype(np.int16) - middle).astype(np.int8), minimum + np.float32(middle) * scale
    with np.errstate(over="ignore"):
        halves = [part.astype(np.float16) for part in (scale, minimum)]
    for half, part in zip(halves, (scale, minimum), strict=True):
        allowed = np.maximum(np.abs(part), np.abs(scale)) * 2.0 ** -10
        if not (np.abs(half.astype(np.float32) - part) <= allowed).all():
            return None
    repeat = codes.shape[1] // GROUP // scale.shape[1]
    halves = [np.repeat(half, repeat, axis=1).view(np.uint16) for half in halves]
    return Packed(runner, INT4 if bits <= 4 else INT8, (codes, *halves), *codes.shape)
