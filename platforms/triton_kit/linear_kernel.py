"""One kernel for linears of every kind of weight, with the sum along `in` split where tokens are few.

A split sum is written apart and added up in order by a second kernel: the same bits every time, no atomics.
"""
from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from .launch import Specialization, launch
from .linear_products import product
from .linear_tiles import Matrix, Tile, linear_tile, step_width, tiles_by_target

TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int8: "i8", torch.uint8: "u8",
         torch.float8_e4m3fn: "fp8e4nv", torch.float8_e4m3fnuz: "fp8e4b8"}
NEIGHBOURS = 8  # tiles of tokens that read the same weight tiles one after another, from the cache


@triton.jit
def neighbours(pid, row_tiles, token_tiles, GROUP: tl.constexpr):
    """Tile numbers of a program, in bands of GROUP tiles of tokens, so that a band's weights are read once."""
    band = GROUP * row_tiles
    start = pid // band * GROUP
    size = tl.minimum(token_tiles - start, GROUP)
    return pid % band // size, start + pid % band % size


@triton.jit
def linear_kernel(
    x_ptr, xs_ptr, w_ptr, scale_ptr, second_ptr, bias_ptr, out_ptr, tokens, width, rows, steps, split_steps, part_rows,
    x_stride, xs_stride, out_stride,
    KIND: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, ZERO: tl.constexpr, EVEN: tl.constexpr,
    SPLIT: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, NEIGHBOURS: tl.constexpr,
):
    """Grid [row tiles * token tiles, splits]. With SPLIT out is [splits, tokens, rows] float32, without bias."""
    row_tile, token_tile = neighbours(tl.program_id(0), tl.cdiv(rows, ROWS), tl.cdiv(tokens, TOKENS), NEIGHBOURS)
    row = row_tile * ROWS + tl.arange(0, ROWS)
    token = token_tile * TOKENS + tl.arange(0, TOKENS)
    # What lies beyond the edge reads the last row or token instead: no masks in the loop, and nothing is stored of it.
    near_row = tl.minimum(row, rows - 1)
    near_token = tl.minimum(token, tokens - 1).to(tl.int64)
    scale_row = near_row // part_rows * tl.cdiv(part_rows, 128) + near_row % part_rows // 128
    split = tl.program_id(1)
    first = split * split_steps
    last = tl.minimum(first + split_steps, steps)
    acc = product(x_ptr, xs_ptr, w_ptr, scale_ptr, second_ptr, near_token, near_row.to(tl.int64), scale_row, first,
                  last, width, rows, x_stride, xs_stride, KIND, GROUP, HALF, ZERO, EVEN, ROWS, TOKENS, WIDTH)
    inside = (row < rows)[None, :] & (token < tokens)[:, None]
    at = token.to(tl.int64)[:, None] * out_stride + row[None, :]
    if SPLIT:
        tl.store(out_ptr + tl.cast(split, tl.int64) * tokens * out_stride + at, tl.trans(acc), mask=inside)
    else:
        if bias_ptr is not None:
            acc += tl.load(bias_ptr + near_row).to(tl.float32)[:, None]
        tl.store(out_ptr + at, tl.trans(acc).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def add_splits_kernel(parts_ptr, bias_ptr, out_ptr, splits, size, rows, BLOCK: tl.constexpr):
    """out [tokens, rows] = sum over splits of parts [splits, tokens, rows] in order, + bias. Grid [blocks of size]."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    acc = tl.zeros((BLOCK,), tl.float32)
    for split in range(splits):
        acc += tl.load(parts_ptr + tl.cast(split, tl.int64) * size + at, mask=inside, other=0.0)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + at % rows, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=inside)


def check_activations(x: torch.Tensor, scale: torch.Tensor | None, weight: Matrix) -> None:
    """Raises ValueError where activations and their scales do not fit the weight."""
    if x.ndim != 2 or x.shape[1] != weight.width or x.stride(1) != 1:
        raise ValueError(f"activations of shape {tuple(x.shape)} and strides {x.stride()} do not fit a weight "
                         f"of width {weight.width}: [tokens, width] with contiguous rows")
    if weight.kind in ("int8", "fp8", "fp8_block"):
        if x.dtype != weight.codes.dtype:
            raise ValueError(f"activations are {x.dtype}, the {weight.kind} weight {weight.codes.dtype}: quantize them")
        blocks = triton.cdiv(weight.width, 128)
        shapes = [(len(x), blocks)] if weight.kind == "fp8_block" else [(len(x),), (1,)]
        if scale is None or tuple(scale.shape) not in shapes:
            raise ValueError(f"scales of shape {None if scale is None else tuple(scale.shape)} beside activations of "
                             f"a {weight.kind} weight: expected {' or '.join(map(str, shapes))}")
    elif x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"activations of a {weight.kind} weight are bfloat16, float16 or float32, not {x.dtype}")
    elif weight.kind == "dense" and x.dtype != weight.codes.dtype:
        raise ValueError(f"activations are {x.dtype}, the dense weight {weight.codes.dtype}: one type for both")


def scale_stride(scale: torch.Tensor | None) -> int:
    """Elements from one token's scale to the next; a single scale serves all tokens."""
    return 0 if scale is None or scale.shape == (1,) else scale.stride(0)


def weight_constants(weight: Matrix, tile: Tile) -> dict[str, Any]:
    """Compile-time constants of `product` for a weight and a tile."""
    step = step_width(weight, tile)
    return {"KIND": weight.kind, "GROUP": weight.group, "HALF": weight.half, "ZERO": weight.zero,
            "EVEN": weight.width % step == 0, "ROWS": tile.rows, "TOKENS": tile.tokens, "WIDTH": step}


def linear(x: torch.Tensor, weight: Matrix, bias: torch.Tensor | None, tile: Tile, *,
           x_scale: torch.Tensor | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
    """[tokens, width] -> [tokens, rows] = x @ w.T + bias, for every kind of `Matrix` without experts.

    x:       activations; int8 or fp8 with `x_scale` float32 ([tokens] or [1]; [tokens, ceil(width / 128)] for
             fp8_block) where the kind quantizes them (`quantize`), otherwise bfloat16, float16 or float32.
    bias:    [rows] of any float type, or None.  dtype: of the result; that of x, or bfloat16 where x is quantized.
    Raises ValueError where shapes or types do not fit.
    """
    check_activations(x, x_scale, weight)
    if weight.experts:
        raise ValueError("a weight of experts is for moe_gemm, not for a linear")
    if bias is not None and tuple(bias.shape) != (weight.rows,):
        raise ValueError(f"a bias of shape {tuple(bias.shape)} beside {weight.rows} rows")
    dtype = dtype or (x.dtype if x.dtype.is_floating_point and x.dtype.itemsize > 1 else torch.bfloat16)
    tokens, rows = len(x), weight.rows
    steps = triton.cdiv(weight.width, step_width(weight, tile))
    each = triton.cdiv(steps, min(tile.splits, steps))
    splits = triton.cdiv(steps, each)
    out = torch.empty(tokens, rows, dtype=dtype, device=x.device)
    parts = out if splits == 1 else torch.empty(splits, tokens, rows, dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(rows, tile.rows) * triton.cdiv(tokens, tile.tokens), splits)
    launch(linear_kernel, grid, x, x_scale, weight.codes, weight.scale, weight.second, bias, parts, tokens,
           weight.width, rows, steps, each, rows // weight.parts, x.stride(0), scale_stride(x_scale), rows,
           SPLIT=splits > 1, NEIGHBOURS=NEIGHBOURS, num_warps=tile.warps, num_stages=tile.stages,
           **weight_constants(weight, tile))
    if splits > 1:
        launch(add_splits_kernel, (triton.cdiv(tokens * rows, 1024),), parts, bias, out, splits, tokens * rows, rows,
               BLOCK=1024)
    return out


def weight_signature(kind: str, x: str, w: str, scale: str | None, second: str | None) -> tuple[dict, dict]:
    """Types of the five pointers of `product`, and None constants for those that a kind does not have."""
    quantized = kind in ("int8", "fp8", "fp8_block")
    types = {"x_ptr": x, "xs_ptr": "fp32" if quantized else None, "w_ptr": w, "scale_ptr": scale, "second_ptr": second}
    return ({name: f"*{kind}:16" for name, kind in types.items() if kind},
            {name: None for name, kind in types.items() if not kind})


TOKENS = {"decode": 1, "few": 16, "batch": 64, "prompt": 4096}  # of the configurations that are compiled beforehand


def linear_specializations(name: str, kind: str, *, x: str = "bf16", w: str = "u8", out: str = "bf16",
                           scale: str | None = "fp32", second: str | None = None, group: int = 0, half: int = 0,
                           zero: bool = False, unsupported: Mapping[str, str] | None = None) -> list[Specialization]:
    """`linear_kernel` for one kind of weight, with the arguments that `linear` gives it: one token and a few of a small
    linear (split), a batch with bias, a prompt, each in the tiles that the targets choose. Types are Triton's names."""
    pointers, absent = weight_signature(kind, x, w, scale, second)
    signature = pointers | {"tokens": "i32", "width": "i32:16", "rows": "i32:16", "steps": "i32", "split_steps": "i32",
                            "part_rows": "i32:16", "x_stride": "i32:16", "xs_stride": "i32", "out_stride": "i32:16"}
    found = []
    for size, tokens in TOKENS.items():
        if size == "few" and kind != "affine4":  # no form of its own, as Hopper has for these
            continue
        choice = partial(linear_tile, kind, tokens, 4096, 4096 if tokens <= 16 else 8192)
        for tile, others in tiles_by_target(choice).items():
            split, biased = tile.splits > 1, size == "batch"
            ends = {"out_ptr": "*fp32:16" if split else f"*{out}:16"} | ({"bias_ptr": f"*{out}:16"} if biased else {})
            step = step_width(Matrix(kind, None, 0, 0, half=half), tile)
            constants = absent | ({} if biased else {"bias_ptr": None}) | {
                "KIND": kind, "GROUP": group, "HALF": half, "ZERO": zero, "EVEN": True, "SPLIT": split,
                "ROWS": tile.rows, "TOKENS": tile.tokens, "WIDTH": step, "NEIGHBOURS": NEIGHBOURS}
            found.append(Specialization(
                f"{name} {size} {tile.rows}x{tile.tokens}x{step} warps {tile.warps} stages {tile.stages}",
                linear_kernel, signature | ends, constants, tile.warps, tile.stages,
                unsupported=others | dict(unsupported or {})))
    return found


def specializations() -> list[Specialization]:
    """The kernel that adds split sums; the linears are listed by the modules of their formats."""
    signature = {"parts_ptr": "*fp32:16", "out_ptr": "*bf16:16", "splits": "i32", "size": "i32:16", "rows": "i32:16"}
    return [Specialization("add splits", add_splits_kernel, signature, {"bias_ptr": None, "BLOCK": 1024}),
            Specialization("add splits bias", add_splits_kernel, signature | {"bias_ptr": "*bf16:16"},
                           {"BLOCK": 1024})]
