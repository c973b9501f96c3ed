"""Weights as the linear and MoE kernels read them, and the tiles they run with, by device family and shape.

Families are the architecture names of the compilers: "sm_80" ... "sm_120", "gfx90a" ... "gfx1201".
"""
from __future__ import annotations

from typing import Any, NamedTuple

import triton

KINDS = ("dense", "int8", "fp8", "fp8_block", "fp8_weight", "fp8_block_weight", "affine4", "affine8", "mxfp4", "nvfp4")


class Matrix(NamedTuple):
    """One weight [rows, width], or `experts` of them; what each kind keeps (a leading [experts] where there are any):

    dense             codes [rows, width] in the activations' type.
    int8, fp8         codes [rows, width]; scale [rows] float32. Activations are quantized per token.
    fp8_block         codes [rows, width] fp8; scale [blocks of rows, ceil(width / 128)] float32 for blocks of 128 x 128
                      of each part of `parts` equal parts of rows. Activations are quantized per token and 128 values.
    fp8_weight, fp8_block_weight   the same with codes as uint8 (e4m3), expanded in registers: no fp8 unit is needed.
    affine4, affine8  codes [panels, rows, half] uint8, see `linear_int4`; scale and second [groups, rows]; `second` is
                      the minimum, or the zero point in codes where `zero`. group 0 = the whole row.
    mxfp4             codes as affine4 with half 32; scale [width / 32, rows] uint8 (e8m0).
    nvfp4             codes as affine4; scale [width / 16, rows] uint8 (e4m3); second [rows] float32, global scales.
    """

    kind: str
    codes: Any
    rows: int
    width: int
    scale: Any = None
    second: Any = None
    group: int = 0
    half: int = 0
    zero: bool = False
    experts: int = 0
    parts: int = 1


class Tile(NamedTuple):
    """rows: weight rows (outputs) of a program.  tokens: its tokens.  width: values along `in` in one iteration, where
    the packing does not fix it.  splits: programs that share a sum along `in`.  warps, stages: Triton's."""

    rows: int
    tokens: int
    width: int
    splits: int = 1
    warps: int = 4
    stages: int = 3


def step_width(weight: Matrix, tile: Tile) -> int:
    """Values along `in` that one iteration takes."""
    if weight.half:
        return weight.half * (1 if weight.kind == "affine8" else 2)
    return 128 if "block" in weight.kind else tile.width


def _stages(family: str, deep: bool) -> int:
    if family.startswith("gfx"):
        return 2
    if family in ("sm_90", "sm_100", "sm_103", "sm_80"):
        return 4 if deep else 3
    return 3 if deep else 2


def linear_tile(kind: str, tokens: int, width: int, rows: int, family: str = "sm_90", units: int = 132) -> Tile:
    """Tile of a linear with `tokens` activations; `units` = multiprocessors (compute units) of the device.

    Few tokens are bound by reading the weight: small tiles, deep pipelines, and the sum along `in` split until every
    unit has two programs. Many are bound by arithmetic: large tiles.
    """
    if kind not in KINDS:
        raise ValueError(f"no kind of weight {kind!r}; known: {', '.join(KINDS)}")
    step = 64 if kind == "dense" else 128
    if tokens <= 64:
        across = max(16, triton.next_power_of_2(tokens))
        programs = triton.cdiv(rows, 64)
        most = max(1, width // (4 * step))
        splits = 1
        while 2 * splits <= min(most, 16) and programs * splits < 2 * units:
            splits *= 2
        return Tile(64, across, step, splits, 4, _stages(family, deep=True))
    if family.startswith(("gfx11", "gfx12")):
        return Tile(64, 64, min(step, 64), 1, 4, 2)
    large = tokens > 128 and triton.cdiv(rows, 128) * triton.cdiv(tokens, 128) >= units
    if family.startswith("gfx"):
        return Tile(128, 128 if large else 64, 64, 1, 8 if large else 4, 2)
    return Tile(128, 128 if large else 64, step, 1, 8, _stages(family, deep=False))


def grouped_tile(kind: str, tokens: int, top_k: int, experts: int, family: str = "sm_90") -> Tile:
    """Tile of both products of a MoE layer; `Tile.tokens` is the block that tokens are padded to per expert."""
    each = tokens * top_k / experts
    step = 64 if kind == "dense" else 128
    across = 16 if each <= 16 else 32 if each <= 48 else 64 if each <= 128 else 128
    if family.startswith(("gfx11", "gfx12")):
        return Tile(64, min(across, 64), min(step, 64), 1, 4, 2)
    if family.startswith("gfx"):
        return Tile(64 if across < 64 else 128, across, 64, 1, 8 if across == 128 else 4, 2)
    if across <= 32:
        return Tile(64, across, step, 1, 4, _stages(family, deep=True))
    return Tile(128, across, step, 1, 8, _stages(family, deep=False))
