"""Starting the attention kernel: arguments from tensors, and the configurations to compile ahead of time."""
from __future__ import annotations

import math
from collections.abc import Callable

import torch
import triton

from .attention_kernel import attention_kernel
from .launch import TARGETS, Specialization, launch
from .merge import merge_splits
from .paged import PagedKV, check_tree
from .tiles import Tile, converts_fp8, refusal

LOG2E = math.log2(math.e)
ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "u8": 1, "i8": 1, "fp8e4nv": 1}


def run(
    q: torch.Tensor, kv: PagedKV, pages: torch.Tensor, lengths: torch.Tensor, starts: torch.Tensor | None,
    tiles: torch.Tensor | None, programs: int, packed: int, queries: int, scale: float, tile: Tile, splits: int,
    window: int | None, softcap: float | None, sinks: torch.Tensor | None, tree: torch.Tensor | None,
    positions: torch.Tensor | None, with_lse: bool, out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Launch the kernel of decode and ragged attention and, with splits, the merge."""
    check_tree(tree, positions, q.shape[0])
    tokens, heads, width = q.shape
    v_width = kv.v.shape[3]
    shape = (tokens, heads, v_width)
    if out is None:
        out = torch.empty(shape, dtype=q.dtype, device=q.device)
    elif out.shape != shape or out.dtype != q.dtype or not out.is_contiguous():
        raise ValueError(f"out must be contiguous {q.dtype} {shape}, not {out.dtype} {tuple(out.shape)}")
    lse = torch.empty((tokens, heads), dtype=torch.float32, device=q.device) if with_lse else None
    part, part_lse = out, lse
    if splits > 1:
        part = torch.empty((tokens, heads, splits, v_width), dtype=torch.float32, device=q.device)
        part_lse = torch.empty((tokens, heads, splits), dtype=torch.float32, device=q.device)
    k_scale, v_scale = kv.read_scales
    factor, cap = scale * k_scale * LOG2E, 0.0
    if softcap is not None:
        factor, cap = 2.0 * factor / softcap, softcap * LOG2E
    group = heads // kv.kv_heads
    s = (0, 0, 0) if kv.k_scales is None else kv.k_scales.stride()
    launch(
        attention_kernel, (programs, kv.kv_heads * -(-group // packed), splits), q, kv.k, kv.v, kv.k_scales,
        kv.v_scales, part, part_lse, tiles, starts, lengths, pages, sinks, tree, positions, tokens, splits, factor,
        v_scale, cap, window or 0, q.stride(0), q.stride(1), *kv.k.stride()[:3], *kv.v.stride()[:3], *s,
        pages.stride(0), GROUP=group, HEADS=packed, QUERIES=queries, ROWS=tile.rows, KEYS=tile.keys,
        PAGE=kv.page_size, WIDTH=width, K_PADDED=padded(width), V_WIDTH=v_width, V_PADDED=padded(v_width),
        FORMAT=kv.format, CAPPED=softcap is not None, WINDOWED=window is not None, SPLIT=splits > 1,
        PRECISION="ieee", num_warps=tile.warps, num_stages=tile.stages)
    if splits > 1:
        merge_splits(part, part_lse, out, lse, sinks)
    return out, lse


def padded(width: int) -> int:
    """A head dim as a tile holds it: a power of two, 16 at least."""
    return max(16, triton.next_power_of_2(width))


def signature(q: str, kv: str, constants: dict[str, object]) -> dict[str, str]:
    """Triton types of the kernel's runtime parameters that are not among `constants`."""
    types = {name: f"*{kv}:16" for name in ("k_ptr", "v_ptr")}
    types |= {"q_ptr": f"*{q}:16", "out_ptr": f"*{'fp32' if constants['SPLIT'] else q}:16"}
    types |= {name: "*fp32:16" for name in ("k_scales_ptr", "v_scales_ptr", "lse_ptr", "sinks_ptr")}
    types |= {name: "*i32:16" for name in ("tiles_ptr", "starts_ptr", "lengths_ptr", "pages_ptr", "positions_ptr")}
    types |= {"tree_ptr": "*i64:16", "scale": "fp32", "v_scale": "fp32", "cap": "fp32"}
    types |= {name: "i32" for name in ("tokens", "splits", "window", "pages_row", "s_page", "s_token", "s_head")}
    types |= {f"{name}_{axis}": "i32:16" for name in "kv" for axis in ("page", "token", "head")}
    types |= {"q_token": "i32:16", "q_head": "i32:16"}
    return {name: types[name] for name in attention_kernel.arg_names if name not in constants}


def configuration(name: str, queries: int, group: int, width: int, page: int, q: str, kv: str, form: str, tile: Tile,
                  **case: object) -> Specialization:
    """One Specialization of the kernel; `case` overrides the constants of the plain case."""
    packed = min(group, tile.rows // max(1, queries))
    constants: dict[str, object] = dict(
        GROUP=group, HEADS=packed, QUERIES=queries, ROWS=tile.rows, KEYS=tile.keys, PAGE=page, WIDTH=width,
        K_PADDED=padded(width), V_WIDTH=width, V_PADDED=padded(width), FORMAT=form, CAPPED=False, WINDOWED=False,
        SPLIT=False, PRECISION="ieee", lse_ptr=None, sinks_ptr=None, tree_ptr=None, positions_ptr=None)
    if form != "int8":
        constants |= {"k_scales_ptr": None, "v_scales_ptr": None, "s_page": 0, "s_token": 0, "s_head": 0}
    if queries:
        constants |= {"tiles_ptr": None, "starts_ptr": None}
    constants |= case
    constants = {key: value for key, value in constants.items() if value != "given"}
    stored = kv if form == "native" else form
    return Specialization(f"{name} {q}/{stored} d{width} g{group} p{page} {tile.label}", attention_kernel,
                          signature(q, kv, constants), constants, tile.warps, tile.stages)


def refusal_of(q: str, kv: str, width: int) -> Callable[[str], str | None]:
    """Why a family does not run attention of these types and head dim."""
    def reason(family: str) -> str | None:
        if kv == "fp8e4nv" and not converts_fp8(family):
            return f"{family} does not convert e4m3 itself: it runs the kernel that decodes the bits"
        return refusal(family, width, ELEMENT_BYTES[q], ELEMENT_BYTES[kv])
    return reason


def per_tile(make: Callable[[Tile], Specialization], tile_of: Callable[[str], Tile],
             refuse: Callable[[str], str | None]) -> list[Specialization]:
    """`make` for each tile that the device families choose, each to be compiled for the families that choose it; where
    all refuse, one that says so."""
    refused = {family: why for family in TARGETS if (why := refuse(family)) is not None}
    tiles = {family: tile_of(family) for family in TARGETS if family not in refused}
    found = []
    for tile in dict.fromkeys(tiles.values() or [tile_of(TARGETS[0])]):
        others = {family: f"its tile is {other.label}" for family, other in tiles.items() if other != tile}
        made = make(tile)
        found.append(Specialization(made.name, made.kernel, made.signature, made.constants, tile.warps, tile.stages,
                                    unsupported=others | refused))
    return found
