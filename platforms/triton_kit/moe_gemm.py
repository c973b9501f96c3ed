"""Products of tokens with the experts they were sent to, and the sparse feed-forward layer made of them.

A block of tokens of one expert is multiplied with that expert's rows, read through the order of `routing.Sorted`: no
token is copied, and results go back to their entry, so that nothing depends on which program came first.
Source: Gale et al. 2022 (MegaBlocks), blocks of one expert.
"""
from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
import triton
import triton.language as tl

from ...core.platform import MoESpec
from .activation import KINDS, act
from .launch import Specialization, launch
from .linear_kernel import NEIGHBOURS, check_activations, neighbours, scale_stride, weight_constants, weight_signature
from .linear_products import product
from .linear_tiles import Matrix, Tile, grouped_tile, step_width, tiles_by_target
from .linear_w8a8 import STORED, quantized_for
from .quantize import FP8_TARGETS
from .routing import Sorted, route, sort_by_expert


@triton.jit
def grouped_kernel(
    x_ptr, xs_ptr, w_ptr, scale_ptr, second_ptr, out_ptr, order_ptr, experts_ptr, entries, width, rows, steps, blocks,
    part_rows, w_expert, scale_expert, second_expert, x_stride, xs_stride, out_stride,
    KIND: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, ZERO: tl.constexpr, EVEN: tl.constexpr,
    SHARE: tl.constexpr, ACT: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
):
    """Grid [row tiles * blocks]. Entry i reads row i // SHARE of x and writes row i of out.

    With ACT half of a tile's rows are of the gate and half of the same places of `up`, rows / 2 further on, and out
    [entries, rows / 2] is act(gate) * up; without, out is [entries, rows].
    """
    ends = rows if ACT is None else rows // 2
    OUTPUTS: tl.constexpr = ROWS if ACT is None else ROWS // 2
    row_tile, block = neighbours(tl.program_id(0), tl.cdiv(ends, OUTPUTS), blocks, NEIGHBOURS)
    expert = tl.load(experts_ptr + block).to(tl.int64)
    if expert >= 0:
        entry = tl.load(order_ptr + block * TOKENS + tl.arange(0, TOKENS))
        # What fills up the block reads the last token: no mask in the loop, and nothing is stored of it.
        token = (tl.minimum(entry, entries - 1) // SHARE).to(tl.int64)
        place = tl.arange(0, ROWS)
        row = tl.minimum(row_tile * OUTPUTS + place % OUTPUTS, ends - 1) + place // OUTPUTS * ends
        scale_row = row // part_rows * tl.cdiv(part_rows, 128) + row % part_rows // 128
        if scale_ptr is not None:
            scale_ptr += expert * scale_expert
        if second_ptr is not None:
            second_ptr += expert * second_expert
        acc = product(x_ptr, xs_ptr, w_ptr + expert * w_expert, scale_ptr, second_ptr, token, row.to(tl.int64),
                      scale_row, 0, steps, width, rows, x_stride, xs_stride, KIND, GROUP, HALF, ZERO, EVEN, ROWS,
                      TOKENS, WIDTH)
        if ACT is None:
            result = tl.trans(acc)
        else:
            gate, up = tl.split(tl.permute(tl.reshape(acc, (2, OUTPUTS, TOKENS)), (2, 1, 0)))
            result = act(gate, ACT) * up
        column = row_tile * OUTPUTS + tl.arange(0, OUTPUTS)
        at = entry.to(tl.int64)[:, None] * out_stride + column[None, :]
        inside = (entry < entries)[:, None] & (column < ends)[None, :]
        tl.store(out_ptr + at, result.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def combine_kernel(y_ptr, ids_ptr, weights_ptr, map_ptr, out_ptr, width, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """out [tokens, width] = sum over choices of weight * y [tokens * TOP_K, width], in order, in float32; choices of
    no expert or a foreign one are left out. Grid [tokens, blocks of width]."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(TOP_K):
        expert = tl.load(ids_ptr + token * TOP_K + i)
        if map_ptr is not None:
            expert = tl.where(expert < 0, -1, tl.load(map_ptr + tl.maximum(expert, 0)))
        y = tl.load(y_ptr + (token * TOP_K + i) * width + at, mask=(at < width) & (expert >= 0), other=0.0)
        weight = tl.where(expert < 0, 0.0, tl.load(weights_ptr + token * TOP_K + i))
        acc += weight * y.to(tl.float32)
    tl.store(out_ptr + token * width + at, acc.to(out_ptr.dtype.element_ty), mask=at < width)


def dense_experts(weight: torch.Tensor) -> Matrix:
    """Experts [experts, out, in] in the activations' type, as they are."""
    if weight.ndim != 3:
        raise ValueError(f"experts are [experts, out, in], not {tuple(weight.shape)}")
    return Matrix("dense", weight.contiguous(), *weight.shape[1:], experts=weight.shape[0])


def grouped_gemm(x: torch.Tensor, weight: Matrix, plan: Sorted, tile: Tile, *, share: int = 1,
                 act: str | None = None, x_scale: torch.Tensor | None = None, dtype: torch.dtype | None = None,
                 ) -> torch.Tensor:
    """Each entry's activations times the rows of its expert -> [entries, rows]; [entries, rows / 2] with `act`.

    x:    [entries / share, in]: entry i reads row i // share (top_k for the first product, 1 for the second); int8 and
          fp8 with their `x_scale`, as in `linear_kernel.linear`.
    act:  the weight's rows are gate above up, and the result is act(gate) * up.
    Rows of entries that the plan leaves out are not written. Raises ValueError where shapes or types do not fit.
    """
    check_activations(x, x_scale, weight)
    if weight.experts != len(plan.counts) or len(x) * share != plan.entries or tile.tokens != plan.block:
        raise ValueError(f"{weight.experts} experts, {len(x)} x {share} entries and tiles of {tile.tokens} beside a "
                         f"plan of {len(plan.counts)} experts, {plan.entries} entries and blocks of {plan.block}")
    if act is not None and (act not in KINDS or weight.rows % 2):
        raise ValueError(f"activation {act!r} of {weight.rows} rows; there are {', '.join(KINDS)}, of gate and up")
    dtype = dtype or (x.dtype if x.dtype.is_floating_point and x.dtype.itemsize > 1 else torch.bfloat16)
    ends = weight.rows if act is None else weight.rows // 2
    out = torch.empty(plan.entries, ends, dtype=dtype, device=x.device)
    blocks = len(plan.experts)
    strides = [0 if part is None else part.stride(0) for part in (weight.codes, weight.scale, weight.second)]
    grid = (triton.cdiv(ends, tile.rows if act is None else tile.rows // 2) * blocks,)
    launch(grouped_kernel, grid, x, x_scale, weight.codes, weight.scale, weight.second, out, plan.order, plan.experts,
           plan.entries, weight.width, weight.rows, triton.cdiv(weight.width, step_width(weight, tile)), blocks,
           weight.rows // weight.parts, *strides, x.stride(0), scale_stride(x_scale), ends, SHARE=share, ACT=act,
           NEIGHBOURS=NEIGHBOURS, num_warps=tile.warps, num_stages=tile.stages, **weight_constants(weight, tile))
    return out


def combine(y: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, expert_map: torch.Tensor | None = None,
            ) -> torch.Tensor:
    """Experts' results [T * top_k, D] times weights [T, top_k] float32, added up for each token: [T, D] in y's type.

    Choices with an id below 0, or that `expert_map` gives to another rank, count nothing and are not read.
    """
    tokens, top_k = ids.shape
    if len(y) != tokens * top_k or weights.shape != ids.shape:
        raise ValueError(f"results {tuple(y.shape)} and weights {tuple(weights.shape)} of ids {tuple(ids.shape)}")
    out = torch.empty(tokens, y.shape[1], dtype=y.dtype, device=y.device)
    block = min(1024, triton.next_power_of_2(y.shape[1]))
    launch(combine_kernel, (tokens, triton.cdiv(y.shape[1], block)), y, ids, weights, expert_map, out, y.shape[1],
           TOP_K=top_k, BLOCK=block, num_warps=4)
    return out


def moe(x: torch.Tensor, logits: torch.Tensor, w13: Matrix, w2: Matrix, spec: MoESpec,
        bias: torch.Tensor | None = None, *, tile: Tile | None = None, family: str = "sm_90",
        expert_map: torch.Tensor | None = None, live: torch.Tensor | None = None) -> torch.Tensor:
    """The sparse feed-forward layer of `Ops.moe`: [T, D] and router logits [T, experts] -> [T, D] in x's type.

    w13 [experts, 2F, D] (gate above up) and w2 [experts, D, F] of any kind; bias [experts] float32 corrects the choice.
    tile:  of both products; by `grouped_tile` of the family where none is given.
    expert_map: [experts] int32, for expert parallelism: the number of each expert among those of w13 and w2, or -1;
           the result is then this rank's share of the sum.
    live:  as in `route`; rows of padding tokens become 0.
    Sums are float32; each expert's result is rounded to x's type once. No host synchronization, no atomics.
    Raises ValueError where shapes or types do not fit.
    """
    if expert_map is not None and (tuple(expert_map.shape) != (spec.experts,) or expert_map.dtype != torch.int32):
        raise ValueError(f"expert_map {expert_map.dtype} {tuple(expert_map.shape)}: int32 [{spec.experts}]")
    if (expert_map is None and w13.experts != spec.experts) or w13.experts != w2.experts or len(x) != len(logits):
        raise ValueError(f"{w13.experts} and {w2.experts} experts, {len(x)} tokens and {len(logits)} rows of logits "
                         f"beside {spec}")
    ids, weights = route(logits, spec, bias, live)
    tile = tile or grouped_tile(w13.kind, len(x), spec.top_k, spec.experts, family)
    plan = sort_by_expert(ids, w13.experts, tile.tokens, expert_map, family)
    values, scale = quantized_for(x, w13)
    hidden = grouped_gemm(values, w13, plan, tile, share=spec.top_k, act=spec.act, x_scale=scale, dtype=x.dtype)
    values, scale = quantized_for(hidden, w2)
    return combine(grouped_gemm(values, w2, plan, tile, x_scale=scale, dtype=x.dtype), ids, weights, expert_map)


SIZES = {"decode": 16, "prompt": 8192}  # tokens, 8 of 128 experts each


def _specializations(name: str, kind: str, *, x: str = "bf16", w: str = "u8", scale: str | None = "fp32",
                     second: str | None = None, group: int = 0, half: int = 0, zero: bool = False,
                     unsupported: Mapping[str, str] | None = None) -> list[Specialization]:
    pointers, absent = weight_signature(kind, x, w, scale, second)
    signature = pointers | {"out_ptr": "*bf16:16", "order_ptr": "*i32:16", "experts_ptr": "*i32:16", "entries": "i32",
                            "width": "i32:16", "rows": "i32:16", "steps": "i32", "blocks": "i32",
                            "part_rows": "i32:16", "w_expert": "i32:16", "scale_expert": "i32:16",
                            "second_expert": "i32:16", "x_stride": "i32:16", "xs_stride": "i32", "out_stride": "i32:16"}
    found = []
    for size, tokens in SIZES.items():
        for tile, others in tiles_by_target(partial(grouped_tile, kind, tokens, 8, 128)).items():
            step = step_width(Matrix(kind, None, 0, 0, half=half), tile)
            for act_kind in ("silu", None):
                constants = absent | {
                    "KIND": kind, "GROUP": group, "HALF": half, "ZERO": zero, "EVEN": True,
                    "SHARE": 8 if act_kind else 1, "ACT": act_kind, "ROWS": tile.rows, "TOKENS": tile.tokens,
                    "WIDTH": step, "NEIGHBOURS": NEIGHBOURS}
                found.append(Specialization(
                    f"{name} {size} {act_kind or 'plain'} {tile.rows}x{tile.tokens}x{step} warps {tile.warps} stages "
                    f"{tile.stages}", grouped_kernel, signature, constants, tile.warps, tile.stages,
                    unsupported=others | dict(unsupported or {})))
    return found


def specializations() -> list[Specialization]:
    """Experts in bf16, fp8 by row and by block (both kinds of fp8, and expanded), 4 bits affine, MXFP4; combining."""
    found = _specializations("dense", "dense", w="bf16", scale=None)
    for fp8 in ("fp8e4nv", "fp8e4b8"):
        for kind in ("fp8", "fp8_block"):
            found += _specializations(f"{kind} {fp8}", kind, x=fp8, w=fp8, unsupported=FP8_TARGETS[fp8])
    for w, others in STORED.items():
        found += _specializations("fp8_block_weight" + (" cast" if w != "u8" else ""), "fp8_block_weight", w=w,
                                  unsupported=others)
    found += _specializations("affine4 g128", "affine4", w="i32", scale="fp16", second="fp16", group=128, half=64,
                              zero=True)
    found += _specializations("mxfp4", "mxfp4", w="i32", scale="u8", group=32, half=64)
    found.append(Specialization(
        "combine", combine_kernel, {"y_ptr": "*bf16:16", "ids_ptr": "*i32:16", "weights_ptr": "*fp32:16",
                                    "out_ptr": "*bf16:16", "width": "i32:16"},
        {"map_ptr": None, "TOP_K": 8, "BLOCK": 1024}))
    return found
