"""Routing tokens to experts, and sorting tokens by expert: two or three launches, sizes that depend on shapes alone.

The rule is that of `Ops.moe`: softmax or sigmoid, the best groups, a bias on the choice, ties to the lower number.
Sources: Shazeer et al. 2017 (top-k gating); DeepSeek-AI 2024 (DeepSeek-V2 and V3: groups, correction bias); the sort by
expert with blocks of one expert follows Gale et al. 2022 (MegaBlocks).
"""
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ...core.platform import MoESpec
from .launch import Specialization, launch
from .tiles import INTEL, is_intel

LOWEST = tl.constexpr(-1.0e38)  # below every score, twice of it still finite; only what cannot be chosen is -inf
TILE = 4096  # entries x experts in registers at once
ROWS = 16  # blocks that a program describes at once


@triton.jit
def route_kernel(logits_ptr, bias_ptr, live_ptr, ids_ptr, weights_ptr, logits_stride, scale, size, TOP_K: tl.constexpr,
                 GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, SIGMOID: tl.constexpr, RENORMALIZE: tl.constexpr,
                 GROUPS_PADDED: tl.constexpr, SIZE_PADDED: tl.constexpr, TOP_K_PADDED: tl.constexpr):
    """Grid [tokens]: one program, one warp, one token. Experts lie as [groups, size], filled up to powers of two."""
    token = tl.program_id(0)
    group = tl.arange(0, GROUPS_PADDED)
    place = tl.arange(0, SIZE_PADDED)
    expert = group[:, None] * size + place[None, :]
    real = (group < GROUPS)[:, None] & (place < size)[None, :]
    logits = tl.load(logits_ptr + tl.cast(token, tl.int64) * logits_stride + expert, mask=real,
                     other=float("-inf")).to(tl.float32)
    if SIGMOID:
        scores = 1 / (1 + tl.exp(-logits))
    else:
        scores = tl.exp(logits - tl.max(tl.max(logits, 1), 0))
        scores = scores / tl.sum(tl.sum(scores, 1), 0)
    choice = scores
    if bias_ptr is not None:
        choice = scores + tl.load(bias_ptr + expert, mask=real, other=0.0)
    # A score that is not a number can be chosen, last of all, and tells in the weights: ids are always experts.
    choice = tl.where(real, tl.where(choice > LOWEST, choice, LOWEST), float("-inf"))
    if GROUPS > 1:
        told = tl.max(choice, 1)
        if bias_ptr is not None:
            first = tl.argmax(choice, 1, tie_break_left=True)
            told += tl.max(tl.where(place[None, :] == first[:, None], float("-inf"), choice), 1)
        kept = group < 0
        for _ in tl.static_range(TOP_GROUPS):
            best = tl.argmax(tl.where(kept, float("-inf"), told), 0, tie_break_left=True)
            kept = kept | (group == best)
        choice = tl.where(kept[:, None], choice, float("-inf"))
    choice = tl.reshape(choice, (GROUPS_PADDED * SIZE_PADDED,))
    scores = tl.reshape(scores, (GROUPS_PADDED * SIZE_PADDED,))
    flat = tl.arange(0, GROUPS_PADDED * SIZE_PADDED)
    nth = tl.arange(0, TOP_K_PADDED)
    ids = tl.zeros((TOP_K_PADDED,), tl.int32)
    weights = tl.zeros((TOP_K_PADDED,), tl.float32)
    for i in tl.static_range(TOP_K):
        best = tl.argmax(choice, 0, tie_break_left=True)
        weight = tl.sum(tl.where(flat == best, scores, 0.0), 0)
        ids = tl.where(nth == i, best // SIZE_PADDED * size + best % SIZE_PADDED, ids)
        weights = tl.where(nth == i, weight, weights)
        choice = tl.where(flat == best, float("-inf"), choice)
    if RENORMALIZE:
        weights = weights / (tl.sum(weights, 0) + 1e-20)
    weights = weights * scale
    if live_ptr is not None:
        alive = tl.load(live_ptr + token) != 0
        ids = tl.where(alive, ids, -1)
        weights = tl.where(alive, weights, 0.0)
    at = tl.cast(token, tl.int64) * TOP_K + nth
    tl.store(ids_ptr + at, ids, mask=nth < TOP_K)
    tl.store(weights_ptr + at, weights, mask=nth < TOP_K)


def route(logits: torch.Tensor, spec: MoESpec, bias: torch.Tensor | None = None, live: torch.Tensor | None = None,
          ) -> tuple[torch.Tensor, torch.Tensor]:
    """Router logits [T, experts] -> ids [T, top_k] int32, the best first, and weights [T, top_k] float32.

    bias: [experts] float32, corrects the choice only.  live: [T] bool or integer, 0 = a padding token: it gets ids -1
    and weights 0, so that it costs no expert. A token with a score that is no number still gets experts, and weights
    that tell. Raises ValueError where shapes do not fit the spec.
    """
    tokens, experts = logits.shape
    size, rest = divmod(experts, spec.groups)
    if experts != spec.experts or rest or not 0 < spec.top_groups <= spec.groups:
        raise ValueError(f"logits of {experts} experts beside {spec}")
    if not 0 < spec.top_k <= spec.top_groups * size:
        raise ValueError(f"top_k {spec.top_k} of {spec.top_groups} groups of {size} experts")
    if spec.scoring not in ("softmax", "sigmoid"):
        raise ValueError(f"scoring is softmax or sigmoid, not {spec.scoring!r}")
    if bias is not None and (tuple(bias.shape) != (experts,) or bias.dtype != torch.float32):
        raise ValueError(f"a bias of {bias.dtype} {tuple(bias.shape)}: float32 [{experts}]")
    if bias is not None and spec.groups > 1 and size < 2:
        raise ValueError("groups of one expert have no two best scores for a correction bias")
    if live is not None and tuple(live.shape) != (tokens,):
        raise ValueError(f"live {tuple(live.shape)} for {tokens} tokens")
    ids = torch.empty(tokens, spec.top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, spec.top_k, dtype=torch.float32, device=logits.device)
    launch(route_kernel, (tokens,), logits, bias, live, ids, weights, logits.stride(0), spec.scale, size,
           TOP_K=spec.top_k, GROUPS=spec.groups, TOP_GROUPS=spec.top_groups, SIGMOID=spec.scoring == "sigmoid",
           RENORMALIZE=spec.renormalize, GROUPS_PADDED=triton.next_power_of_2(spec.groups),
           SIZE_PADDED=triton.next_power_of_2(size), TOP_K_PADDED=triton.next_power_of_2(spec.top_k), num_warps=1)
    return ids, weights


class Sorted(NamedTuple):
    """(Token, choice) pairs, entry = token * top_k + choice, in order of experts and then of entries.

    order [blocks * block] int32: the entries; an expert's entries start at a multiple of `block`, and what is left of
    its last block holds `entries`, a number that no entry has.  counts [experts], offsets [experts + 1] int32: in
    `order`, the last where the used part ends.  experts [blocks] int32: the expert of each block, -1 = not used.
    """

    order: torch.Tensor
    counts: torch.Tensor
    offsets: torch.Tensor
    experts: torch.Tensor
    block: int
    entries: int


@triton.jit
def expert_of(ids_ptr, map_ptr, at, inside):
    """Local expert of entries; -1 for what is beyond the end, padding or another rank's."""
    expert = tl.load(ids_ptr + at, mask=inside, other=-1)
    if map_ptr is not None:
        expert = tl.where(expert < 0, -1, tl.load(map_ptr + tl.maximum(expert, 0)))
    return expert


@triton.jit
def count_range(ids_ptr, map_ptr, start, stop, STEP: tl.constexpr, EXPERTS: tl.constexpr):
    """Entries start .. stop of each expert, [EXPERTS] int32."""
    counts = tl.zeros((EXPERTS,), tl.int32)
    for begin in range(start, stop, STEP):
        at = begin + tl.arange(0, STEP)
        expert = expert_of(ids_ptr, map_ptr, at, at < stop)
        counts += tl.sum((expert[:, None] == tl.arange(0, EXPERTS)[None, :]).to(tl.int32), 0)
    return counts


@triton.jit
def count_kernel(ids_ptr, map_ptr, counts_ptr, entries, CHUNK: tl.constexpr, STEP: tl.constexpr,
                 EXPERTS: tl.constexpr):
    """counts [chunks, EXPERTS] of each chunk of entries. Grid [chunks]."""
    start = tl.program_id(0) * CHUNK
    counts = count_range(ids_ptr, map_ptr, start, tl.minimum(start + CHUNK, entries), STEP, EXPERTS)
    tl.store(counts_ptr + tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS), counts)


@triton.jit
def place_kernel(ids_ptr, map_ptr, chunk_counts_ptr, order_ptr, counts_ptr, offsets_ptr, block_experts_ptr, entries,
                 experts, blocks, BLOCK: tl.constexpr, CHUNK: tl.constexpr, STEP: tl.constexpr, EXPERTS: tl.constexpr,
                 ROWS: tl.constexpr):
    """Grid [chunks]: where each entry goes is counted, not raced for. Without chunk_counts there is one chunk."""
    chunk = tl.program_id(0)
    chunks = tl.num_programs(0)
    expert = tl.arange(0, EXPERTS)
    if chunk_counts_ptr is None:
        total = count_range(ids_ptr, map_ptr, 0, entries, STEP, EXPERTS)
        before = tl.zeros((EXPERTS,), tl.int32)
    else:
        total = tl.zeros((EXPERTS,), tl.int32)
        before = tl.zeros((EXPERTS,), tl.int32)
        for begin in range(0, chunks, STEP):
            at = begin + tl.arange(0, STEP)
            counts = tl.load(chunk_counts_ptr + at[:, None] * EXPERTS + expert[None, :], mask=(at < chunks)[:, None],
                             other=0)
            total += tl.sum(counts, 0)
            before += tl.sum(tl.where((at < chunk)[:, None], counts, 0), 0)
    padded = (total + BLOCK - 1) // BLOCK * BLOCK
    end = tl.cumsum(padded, 0)
    offset = end - padded
    if chunk == 0:
        tl.store(counts_ptr + expert, total, mask=expert < experts)
        tl.store(offsets_ptr + expert, offset, mask=expert < experts)
        tl.store(offsets_ptr + experts, tl.sum(padded, 0))
    for begin in range(chunk * ROWS, blocks, chunks * ROWS):
        block = begin + tl.arange(0, ROWS)
        first = block * BLOCK
        owner = tl.sum(((end[None, :] <= first[:, None]) & (expert < experts)[None, :]).to(tl.int32), 1)
        stop = tl.sum(tl.where(owner[:, None] == expert[None, :], (offset + total)[None, :], 0), 1)
        tl.store(block_experts_ptr + block, tl.where(owner < experts, owner, -1), mask=block < blocks)
        at = first[:, None] + tl.arange(0, BLOCK)[None, :]
        tl.store(order_ptr + at, tl.broadcast_to(entries, (ROWS, BLOCK)),
                 mask=(block < blocks)[:, None] & (at >= stop[:, None]))
    next_place = offset + before
    for begin in range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, entries), STEP):
        at = begin + tl.arange(0, STEP)
        mine = expert_of(ids_ptr, map_ptr, at, at < entries)
        one = (mine[:, None] == expert[None, :]).to(tl.int32)
        place = tl.sum(one * (tl.cumsum(one, 0) - 1 + next_place[None, :]), 1)
        tl.store(order_ptr + place, at, mask=mine >= 0)
        next_place += tl.sum(one, 0)


def most_blocks(entries: int, experts: int, block: int) -> int:
    """Blocks that are enough however the entries fall: each used expert wastes less than one."""
    return (entries + min(entries, experts) * (block - 1)) // block


def place_warps(experts: int, family: str) -> int:
    """Warps of `place_kernel`; with 8, tables of 512 experts do not fit the registers of Intel's devices."""
    return 16 if is_intel(family) and experts > 256 else 8


def sort_by_expert(ids: torch.Tensor, experts: int, block: int, expert_map: torch.Tensor | None = None,
                   family: str = "sm_90") -> Sorted:
    """Sort the choices ids [T, top_k] int32 (contiguous) by expert, in blocks of `block` (a power of two).

    expert_map: [global experts] int32, the number among the `experts` of this rank, -1 = another rank's (expert
    parallelism): foreign choices, and ids below 0, are left out. Raises ValueError for sizes that cannot be.
    """
    if block & (block - 1) or block < 1 or not 0 < experts <= 1024:
        raise ValueError(f"blocks of {block} (a power of two) of {experts} experts (1 to 1024)")
    if ids.dtype != torch.int32 or not ids.is_contiguous():
        raise ValueError(f"ids are contiguous int32, not {ids.dtype} with strides {ids.stride()}")
    entries = ids.numel()
    blocks = most_blocks(entries, experts, block)
    padded = triton.next_power_of_2(experts)
    step = max(8, min(64, TILE // padded))
    chunk = 256 if entries <= 64 * 256 else 1024
    chunks = triton.cdiv(entries, chunk)

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=torch.int32, device=ids.device)

    out = Sorted(empty(blocks * block), empty(experts), empty(experts + 1), empty(blocks), block, entries)
    counts = None
    if chunks > 1:
        counts = empty(chunks, padded)
        launch(count_kernel, (chunks,), ids, expert_map, counts, entries, CHUNK=chunk, STEP=step, EXPERTS=padded,
               num_warps=8)
    launch(place_kernel, (chunks,), ids, expert_map, counts, out.order, out.counts, out.offsets, out.experts, entries,
           experts, blocks, BLOCK=block, CHUNK=chunk, STEP=step, EXPERTS=padded, ROWS=ROWS,
           num_warps=place_warps(padded, family))
    return out


def specializations() -> list[Specialization]:
    """Routers of Qwen3 (128 experts), DeepSeek-V3 (256 in 8 groups) and 512 experts; sorts of their choices."""
    found = []
    for name, experts, groups, top_groups, sigmoid in (("128", 128, 1, 1, False), ("256 in groups", 256, 8, 4, True),
                                                       ("512", 512, 1, 1, False)):
        signature = {"logits_ptr": "*fp32:16", "ids_ptr": "*i32:16", "weights_ptr": "*fp32:16", "live_ptr": "*i1:16",
                     "logits_stride": "i32:16", "scale": "fp32", "size": "i32:16"}
        absent = {} if groups > 1 else {"bias_ptr": None}
        found.append(Specialization(
            f"route {name}", route_kernel, signature | ({"bias_ptr": "*fp32:16"} if groups > 1 else {}),
            absent | {"TOP_K": 8, "GROUPS": groups, "TOP_GROUPS": top_groups, "SIGMOID": sigmoid, "RENORMALIZE": True,
                      "GROUPS_PADDED": groups, "SIZE_PADDED": experts // groups, "TOP_K_PADDED": 8}, 1))
        if groups > 1:
            continue
        step = max(8, min(64, TILE // experts))
        counting = {"ids_ptr": "*i32:16", "entries": "i32"}
        placing = counting | {"order_ptr": "*i32:16", "counts_ptr": "*i32:16", "offsets_ptr": "*i32:16",
                              "block_experts_ptr": "*i32:16", "experts": "i32:16", "blocks": "i32"}
        tuning = {family: {"num_warps": place_warps(experts, family)} for family in INTEL}
        sizes = {"STEP": step, "EXPERTS": experts, "map_ptr": None}
        found.append(Specialization(f"count {name}", count_kernel, counting | {"counts_ptr": "*i32:16"},
                                    sizes | {"CHUNK": 1024}, 8))
        found += [Specialization(f"place {name} one chunk blocks of {block}", place_kernel, placing,
                                 sizes | {"BLOCK": block, "CHUNK": 256, "ROWS": ROWS, "chunk_counts_ptr": None}, 8,
                                 tuning=tuning)
                  for block in (8, 16)]
        found.append(Specialization(f"place {name}", place_kernel, placing | {"chunk_counts_ptr": "*i32:16"},
                                    sizes | {"BLOCK": 128, "CHUNK": 1024, "ROWS": ROWS}, 8, tuning=tuning))
    return found
