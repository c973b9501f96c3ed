"""Rotary embedding: tables of cosines and sines of a step's positions, and the rotation of heads by them.

Source: Su et al. 2021, RoFormer; half-split layout as in `core.platform.RopeSpec`.
"""
from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .launch import Specialization, launch


@triton.jit
def rope_table_kernel(positions, turns, cos, sin, tokens, width, scale, TOKENS: tl.constexpr, BLOCK: tl.constexpr):
    """Angles are counted in turns of 2^64: the product wraps at whole turns, so that no position is too great."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    position = tl.load(positions + token, mask=token < tokens, other=0).to(tl.int64)
    turn = position[:, None] * tl.load(turns + at, mask=at < width, other=0)[None, :]
    # The quarter of the turn, and what is left of it in [-1/8, 1/8] of a turn, which Taylor's series take to 1e-8.
    quarter = (turn + (1 << 61)) >> 62
    angle = (turn - (quarter << 62)).to(tl.float32) * (6.283185307179586 * 2.0 ** -64)
    square = angle * angle
    s = angle * (1 + square * (-1 / 6 + square * (1 / 120 + square * (-1 / 5040 + square * (1 / 362880)))))
    c = 1 + square * (-1 / 2 + square * (1 / 24 + square * (-1 / 720 + square * (1 / 40320))))
    odd = (quarter & 1) != 0
    c, s = tl.where(odd, s, c), tl.where(odd, c, s)
    c = tl.where(((quarter + 1) & 2) != 0, -c, c)
    s = tl.where((quarter & 2) != 0, -s, s)
    place = token.to(tl.int64)[:, None] * width + at[None, :]
    mask = (token < tokens)[:, None] & (at < width)[None, :]
    tl.store(cos + place, c * scale, mask=mask)
    tl.store(sin + place, s * scale, mask=mask)


@triton.jit
def rope_kernel(x, cos, sin, out, heads, half, width, x_row, x_head, out_row, out_head, HEADS: tl.constexpr,
                BLOCK: tl.constexpr, REST: tl.constexpr):
    """HEADS heads of one token; REST covers the dimensions from 2 * half on, which pass unchanged (0 = none)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    at = tl.arange(0, BLOCK)
    c = tl.load(cos + token * half + at, mask=at < half, other=0.0)[None, :]
    s = tl.load(sin + token * half + at, mask=at < half, other=0.0)[None, :]
    mask = (head < heads)[:, None] & (at < half)[None, :]
    source = x + token * x_row + (head * x_head)[:, None]
    target = out + token * out_row + (head * out_head)[:, None]
    first = tl.load(source + at[None, :], mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + half + at[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(target + at[None, :], (first * c - second * s).to(out.dtype.element_ty), mask=mask)
    tl.store(target + half + at[None, :], (second * c + first * s).to(out.dtype.element_ty), mask=mask)
    if REST > 0:
        rest = 2 * half + tl.arange(0, REST)
        mask = (head < heads)[:, None] & (rest < width)[None, :]
        tl.store(target + rest[None, :], tl.load(source + rest[None, :], mask=mask, other=0.0), mask=mask)


def turns_of(inv_freq: Sequence[float], device: torch.device) -> torch.Tensor:
    """Angular frequencies in radians per position -> int64 [R], 2^-64 turns per position. Once per model."""
    wrapped = [round(math.fmod(f / (2 * math.pi), 1.0) * 2 ** 64) % 2 ** 64 for f in inv_freq]
    return torch.tensor([t - 2 ** 64 if t >= 2 ** 63 else t for t in wrapped], dtype=torch.int64, device=device)


def rope_tables(positions: torch.Tensor, turns: torch.Tensor, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions [T] int32, `turns_of` [R] -> scale * cos and scale * sin, [T, R] float32, to 1e-7 at any position."""
    tokens, width = positions.shape[0], turns.shape[0]
    cos, sin = (torch.empty(tokens, width, dtype=torch.float32, device=positions.device) for _ in range(2))
    block = min(64, triton.next_power_of_2(width))
    launch(rope_table_kernel, (triton.cdiv(tokens, 16), triton.cdiv(width, block)), positions, turns, cos, sin, tokens,
           width, scale, TOKENS=16, BLOCK=block, num_warps=4)
    return cos, sin


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Rotate the first 2R dimensions of every head of x [T, heads, d] by the tables [T, R]; the rest stays.

    x may be a slice of a wider tensor with a contiguous last axis. out: x itself to work in place; new by default.
    """
    tokens, heads, width = x.shape
    half = cos.shape[1]
    if 2 * half > width or x.stride(-1) != 1:
        raise ValueError(f"{half} frequencies rotate {2 * half} dimensions of heads of {width}, strides {x.stride()}")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    block, rest = triton.next_power_of_2(half), width - 2 * half
    per_program = min(triton.next_power_of_2(heads), max(1, 1024 // block))
    launch(rope_kernel, (tokens, triton.cdiv(heads, per_program)), x, cos, sin, out, heads, half, width, x.stride(0),
           x.stride(1), out.stride(0), out.stride(1), HEADS=per_program, BLOCK=block,
           REST=triton.next_power_of_2(rest) if rest else 0, num_warps=4)
    return out


def specializations() -> list[Specialization]:
    """Tables, and heads of 64, 128 and 256 in bf16, f16 and f32; 128 with a part of 64 rotated."""
    table = {"positions": "*i32:16", "turns": "*i64:16", "cos": "*fp32:16", "sin": "*fp32:16", "tokens": "i32",
             "width": "i32:16", "scale": "fp32"}
    found = [Specialization("rope_table", rope_table_kernel, table, {"TOKENS": 16, "BLOCK": 64})]
    for type_, width, rest in (("bf16", 64, 0), ("bf16", 128, 0), ("fp16", 128, 0), ("fp32", 128, 0), ("bf16", 256, 0),
                               ("bf16", 128, 64)):
        block = (width - rest) // 2
        found.append(Specialization(
            f"rope {type_} {width}" + (f" of which {rest} pass" if rest else ""), rope_kernel,
            {"x": f"*{type_}:16", "cos": "*fp32:16", "sin": "*fp32:16", "out": f"*{type_}:16", "heads": "i32",
             "half": "i32:16", "width": "i32:16", "x_row": "i32:16", "x_head": "i32:16", "out_row": "i32:16",
             "out_head": "i32:16"}, {"HEADS": min(32, 1024 // block), "BLOCK": block, "REST": rest}))
    return found
