"""Weights as the linear and MoE kernels read them, and the tiles they run with, by device family and shape.

Families are the architecture names of the compilers: "sm_80" ... "sm_120", "gfx90a" ... "gfx1201".
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import triton

from .launch import TARGETS
from .tiles import is_intel

KINDS = ("dense", "int8", "fp8", "fp8_block", "fp8_weight", "fp8_block_weight", "affine4", "affine8", "mxfp4", "nvfp4")
PLAIN = ("dense", "int8", "fp8", "fp8_weight")  # summed up over the whole of `in` before anything is scaled


class Matrix(NamedTuple):
    """One weight [rows, width], or `experts` of them; what each kind keeps (a leading [experts] where there are any):

    dense             codes [rows, width] in the activations' type.
    int8, fp8         codes [rows, width]; scale [rows] float32. Activations are quantized per token.
    fp8_block         codes [rows, width] fp8; scale [blocks of rows, ceil(width / 128)] float32 for blocks of 128 x 128
                      of each part of `parts` equal parts of rows. Activations are quantized per token and 128 values.
    fp8_weight, fp8_block_weight   the same for activations in 16 bits, expanded in registers: codes fp8 where the
                      device converts them, else uint8.
    affine4, affine8  codes [panels, rows, half / 4] int32, or [panels, rows, half] uint8, see `linear_int4`; scale and
                      second [groups, rows]; `second` is the minimum, or the zero point in codes where `zero`.
                      group 0 = the whole row.
    mxfp4             codes as affine4; scale [width / 32, rows] uint8 (e8m0).
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
    if family in ("sm_80", "sm_90", "sm_100", "sm_103"):
        return 4 if deep else 3
    return 3 if deep else 2


def _small(family: str) -> bool:
    """AMD's waves of 32 lanes, and Intel's sub-groups: tiles of 128 rows do not fit their registers."""
    return family.startswith(("gfx10", "gfx11", "gfx12")) or is_intel(family)


def _step(kind: str, family: str) -> int:
    """128 bytes of a row; 64 values where the compute units' shared memory, or Intel's registers, are small."""
    return 64 if kind == "dense" or (kind in PLAIN and (family.startswith("gfx") or is_intel(family))) else 128


def _many(family: str) -> int:
    """Warps of a tile of more than 16 tokens where tiles are small; Intel's spill with 8."""
    return 16 if is_intel(family) else 8


WEIGHT_ONLY = ("fp8_weight", "fp8_block_weight", "affine4", "affine8", "mxfp4", "nvfp4")


def _across(kind: str, tokens: float, family: str, most: int) -> int:
    """Tokens of a tile of few. NVIDIA's products take 8: half of what grows with them, and in Hopper's older form,
    which does not wait for each product of unpacked codes before the next is begun."""
    least = 8 if family.startswith("sm_") and kind in WEIGHT_ONLY else 16
    return min(max(least, triton.next_power_of_2(int(tokens))), most)


def _few(kind: str, across: int, family: str) -> tuple[int, int]:
    """(rows, warps) of a tile of few tokens. NVIDIA's memory is ahead of its instructions: with 128 rows what does not
    grow with them (tokens, pipeline) is shared by twice the codes to unpack. Two warps are too few for the form of
    Hopper's product that waits; fp4 with two does not fit the registers, nor do 128 rows those of Blackwell's compiler.
    """
    if family.startswith(("sm_8", "sm_9")) and kind in ("affine4", "mxfp4", "nvfp4"):
        if across == 8:
            return 128, 4
        if across == 16 and family == "sm_90":
            return 128, 2 if kind == "affine4" else 4
    return 64, _many(family) if _small(family) and across == 32 else 4


def _splits(programs: int, steps: int, most: int, units: int) -> int:
    """The least number of shares of the sum along `in` that gives every unit two programs, and with which the unit that
    has most to do takes no more than a tenth longer than it could; at most `most`."""
    programs = max(1, programs)  # of no tokens
    enough = min(most, triton.cdiv(2 * units, programs))
    longest = {n: triton.cdiv(programs * n, units) * triton.cdiv(steps, n) for n in range(enough, most + 1)}
    return next(n for n, time in longest.items() if time <= 1.1 * min(longest.values()))


def linear_tile(kind: str, tokens: int, width: int, rows: int, family: str = "sm_90", units: int = 132) -> Tile:
    """Tile of a linear with `tokens` activations; `units` = multiprocessors (compute units) of the device.

    Few tokens are bound by reading the weight: small tiles, deep pipelines, and the sum along `in` split until every
    unit has two programs. Many are bound by arithmetic: large tiles.
    """
    if kind not in KINDS:
        raise ValueError(f"no kind of weight {kind!r}; known: {', '.join(KINDS)}")
    step = _step(kind, family)
    if tokens <= 64:
        across = _across(kind, tokens, family, 32 if _small(family) else 64)
        tall, warps = _few(kind, across, family)
        programs = triton.cdiv(rows, tall) * triton.cdiv(tokens, across)
        splits = _splits(programs, triton.cdiv(width, step), max(1, min(16, width // 512)), units)
        return Tile(tall, across, step, splits, warps, _stages(family, deep=across < 64))
    if _small(family):
        return Tile(64, 64 if kind in PLAIN else 32, step, 1, _many(family), 2)
    # The other kinds add up a group by itself beside the result: 128 x 128 of both do not fit the registers.
    large = triton.cdiv(rows, 128) * triton.cdiv(tokens, 128) >= units and kind in PLAIN
    return Tile(128, 128 if large else 64, step, 1, 8, _stages(family, deep=False))


def grouped_tile(kind: str, tokens: int, top_k: int, experts: int, family: str = "sm_90") -> Tile:
    """Tile of both products of a MoE layer; `Tile.tokens` is the block that tokens are padded to per expert."""
    each = tokens * top_k / experts
    step = _step(kind, family)
    across = _across(kind, each, family, 16) if each <= 16 else 32 if each <= 48 else 64 if each <= 192 else 128
    if across == 128 and kind not in PLAIN:
        across = 64
    if _small(family):
        return Tile(64, min(across, 64 if kind in PLAIN else 32), step, 1,
                    4 if across < 32 else _many(family), 2)
    if across <= 32:
        tall, warps = _few(kind, across, family)
        return Tile(tall, across, step, 1, warps, _stages(family, deep=True))
    # With 8 warps Blackwell's compiler leaves each thread 128 registers, and unpacking e2m1 beside `act` takes more.
    warps = 4 if family in ("sm_100", "sm_103") and kind == "mxfp4" else 8
    return Tile(128, across, step, 1, warps, _stages(family, deep=False))


def tiles_by_target(choose: Callable[[str], Tile]) -> dict[Tile, dict[str, str]]:
    """The tiles that targets choose, and for each the targets that do not, as `Specialization.unsupported` wants it."""
    chosen = {target: choose(target) for target in TARGETS}
    return {tile: {target: f"runs {other}" for target, other in chosen.items() if other != tile}
            for tile in dict.fromkeys(chosen.values())}
