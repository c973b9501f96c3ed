"""Attention of rows with one token each (decode), or with the same few (speculation), over paged K and V."""
from __future__ import annotations

import torch

from .attention_launch import ELEMENT_BYTES, configuration, per_tile, refusal_of, run
from .launch import Specialization
from .paged import PagedKV, check_attention
from .tiles import Tile, decode_tile

MOST_SPLITS = 64
LEAST_SHARE = 256  # keys a program must have to be worth a merge


def plan_splits(rows: int, kv_heads: int, max_pages: int, page_size: int, multiprocessors: int,
                resident: int = 2) -> int:
    """Programs that share one row's keys, from sizes alone: rows, KV heads, width of the page table, and how many
    programs the device holds at once (`multiprocessors` times `resident`).

    The least number whose last wave of programs is as full as the best one's, to 10 %.
    """
    most = min(MOST_SPLITS, max(1, max_pages * page_size // LEAST_SHARE))
    places, programs = multiprocessors * resident, max(1, rows * kv_heads)
    if programs >= places * 4:
        return 1
    fill = [programs * n / (places * -(-programs * n // places)) for n in range(1, most + 1)]
    return next(n for n, full in enumerate(fill, 1) if full >= 0.9 * max(fill))


def decode_attention(
    q: torch.Tensor, kv: PagedKV, pages: torch.Tensor, lengths: torch.Tensor, *, scale: float, tile: Tile,
    splits: int = 1, queries: int = 1, window: int | None = None, softcap: float | None = None,
    sinks: torch.Tensor | None = None, tree: torch.Tensor | None = None, positions: torch.Tensor | None = None,
    with_lse: bool = False, out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """q [rows * queries, heads, d] -> (out [rows * queries, heads, dv] in q's dtype, lse [.., heads] f32 or None).

    Row b owns the tokens b * queries .. (b + 1) * queries, the last of its context of lengths [rows] int32 tokens in
    pages [rows, P] int32; their K and V are in the pages already. A row of length 0 gives zeros and lse -inf
    (or its sink).
    scale, window, softcap: as in `AttentionSpec`.  sinks [heads]: logits that only add to the denominator.
    splits: from `plan_splits`.  tile: from `tiles.decode_tile`.
    tree [tokens] int64: bit j of a token's word = it sees the row's token j of this step; 0 = causal. With it
    positions [tokens] int32. out: where the result goes, else a new tensor. Raises ValueError for what does not fit.
    Sources: Dao et al. 2023 (Flash-Decoding), Kwon et al. 2023 (PagedAttention), Xiao et al. 2024 (sinks).
    """
    check_attention(q, kv, pages, lengths)
    if q.shape[0] != lengths.shape[0] * queries:
        raise ValueError(f"q has {q.shape[0]} tokens, not {queries} for each of {lengths.shape[0]} rows")
    packed = tile.rows // queries
    if packed < 1:
        raise ValueError(f"{queries} tokens a row do not fit into a tile of {tile.rows} rows: use ragged_attention")
    return run(q, kv, pages, lengths, None, None, lengths.shape[0], min(q.shape[1] // kv.kv_heads, packed), queries,
               scale, tile, splits, window, softcap, sinks, tree, positions, with_lse, out)


CASES = (  # head dim, group, page size, q, kv, format, with splits
    (64, 4, 16, "bf16", "bf16", "native", True), (64, 8, 64, "fp16", "fp16", "native", False),
    (64, 3, 16, "fp32", "fp32", "native", False), (128, 4, 16, "bf16", "bf16", "native", False),
    (128, 4, 16, "bf16", "bf16", "native", True), (128, 8, 64, "bf16", "bf16", "native", True),
    (128, 4, 16, "fp32", "fp32", "native", True), (128, 8, 16, "bf16", "u8", "e4m3", True),
    (128, 8, 64, "bf16", "fp8e4nv", "native", True), (128, 8, 16, "bf16", "i8", "int8", True),
    (256, 4, 16, "bf16", "bf16", "native", True), (256, 4, 64, "bf16", "u8", "e4m3", True),
)
SPLIT: dict[str, object] = {"SPLIT": True, "lse_ptr": "given"}
EXTRAS: dict[str, dict[str, object]] = {
    " window cap": {"WINDOWED": True, "CAPPED": True}, " window sinks": {"WINDOWED": True, "sinks_ptr": "given"}}


def specializations() -> list[Specialization]:
    """Decode as the platforms run it; window, soft cap, sinks and a tree once each."""
    found = []
    wanted = [(case[:6], " split" if case[6] else "", SPLIT if case[6] else {}) for case in CASES]
    wanted += [((128, 4, 16, "bf16", "bf16", "native"), name, extra) for name, extra in EXTRAS.items()]
    for (width, group, page, q, kv, form), variant, extra in wanted:
        found += per_tile(
            lambda tile, a=(group, width, page, q, kv, form), n=variant, c=extra: configuration(f"decode{n}", 1, *a,
                                                                                               tile, **c),
            lambda family, g=group, w=width, b=ELEMENT_BYTES[kv]: decode_tile(family, g, 1, w, b),
            refusal_of(q, kv, width))
    found += per_tile(
        lambda tile: configuration("decode tree", 4, 4, 128, 16, "bf16", "bf16", "native", tile, tree_ptr="given",
                                   positions_ptr="given", **SPLIT), lambda family: decode_tile(family, 4, 4, 128, 2),
        refusal_of("bf16", "bf16", 128))
    return found
