"""Attention of rows with any numbers of tokens in one launch: prompts, chunks of them, and decode rows among them."""
from __future__ import annotations

import numpy as np
import torch

from .attention_launch import ELEMENT_BYTES, configuration, per_tile, refusal_of, run
from .launch import Specialization
from .paged import PagedKV, check_attention
from .tiles import Tile, ragged_tile


def tokens_per_tile(tile: Tile, heads: int, kv_heads: int) -> int:
    """Tokens of a tile, whose rows are tokens x the query heads of one KV head."""
    return max(1, tile.rows // (heads // kv_heads))


def tile_count(tokens: int, rows: int, tokens_each: int) -> int:
    """Length of `plan_tiles`' map: the most that any batch of these sizes needs."""
    return min(tokens, tokens // tokens_each + rows + 1)


def plan_tiles(starts: np.ndarray, lengths: np.ndarray, tokens: int, tokens_each: int, skipped: int = 0) -> np.ndarray:
    """The work list of `ragged_attention`, made on the host: [tile_count, 2] int32 of (row, first token).

    starts [B + 1], lengths [B]: the batch's, on the host.  tokens: T, padding included. Longest walks first, so that
    no long one is left for the end; tokens that no row owns come as row -1, unused entries as (-1, tokens).
    skipped: so many rows at the front are not in it, since others attend for them.
    """
    counts = np.append(np.diff(starts), tokens - starts[-1])
    counts[:skipped] = 0
    tiles = -(-counts // tokens_each)
    rows = np.repeat(np.arange(len(counts)), tiles)
    nth = np.arange(len(rows)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    first = np.append(starts, tokens)[rows] + nth * tokens_each
    owned = rows < len(lengths)
    keys = np.append(lengths, 0)[rows] - counts[rows] + (nth + 1) * tokens_each
    order = np.argsort(np.where(owned, -keys, 1), kind="stable")
    plan = np.full((tile_count(tokens, len(lengths), tokens_each), 2), (-1, tokens), dtype=np.int32)
    plan[:len(rows), 0] = np.where(owned, rows, -1)[order]
    plan[:len(rows), 1] = first[order]
    return plan


def ragged_attention(
    q: torch.Tensor, kv: PagedKV, pages: torch.Tensor, lengths: torch.Tensor, starts: torch.Tensor,
    tiles: torch.Tensor, *, scale: float, tile: Tile, splits: int = 1, window: int | None = None,
    softcap: float | None = None, sinks: torch.Tensor | None = None, tree: torch.Tensor | None = None,
    positions: torch.Tensor | None = None, with_lse: bool = False, out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """q [T, heads, d] -> (out [T, heads, dv] in q's dtype, lse [T, heads] f32 or None).

    Row b owns the tokens starts[b] : starts[b + 1] (starts [B + 1] int32), the last of its context of lengths [B]
    int32 tokens in pages [B, P] int32; their K and V are in the pages already. Each sees its context up to itself.
    tiles: `plan_tiles(starts, lengths, T, tokens_per_tile(tile, heads, kv_heads))` on the device. Tokens that no row
    owns, and rows of length 0, give zeros and lse -inf (or the sink). With splits > 1 long contexts are shared (decode
    rows among prompts). The rest, tree and positions included, is as in `decode_attention`; tree words other than 0
    are for rows of at most 64 tokens. out: where the result goes, else a new tensor; tokens that no tile has are left
    as they are. Raises ValueError for what does not fit.
    Sources: Dao 2023 (FlashAttention-2), Kwon et al. 2023 (PagedAttention).
    """
    check_attention(q, kv, pages, lengths)
    if starts.shape != (lengths.shape[0] + 1,) or starts.dtype != torch.int32:
        raise ValueError(f"starts must be int32 [{lengths.shape[0] + 1}], not {starts.dtype} {tuple(starts.shape)}")
    each = tokens_per_tile(tile, q.shape[1], kv.kv_heads)
    expected = (tile_count(q.shape[0], lengths.shape[0], each), 2)
    if tiles.shape != expected or tiles.dtype != torch.int32 or not tiles.is_contiguous():
        raise ValueError(f"tiles must be plan_tiles' for {each} tokens a tile: contiguous int32 {expected}, "
                         f"not {tiles.dtype} {tuple(tiles.shape)}")
    return run(q, kv, pages, lengths, starts, tiles, tiles.shape[0], min(q.shape[1] // kv.kv_heads, tile.rows), 0,
               scale, tile, splits, window, softcap, sinks, tree, positions, with_lse, out)


CASES = (  # head dim, group, page size, q, kv, format
    (64, 3, 16, "bf16", "bf16", "native"), (64, 8, 64, "fp16", "fp16", "native"),
    (128, 4, 16, "bf16", "bf16", "native"), (128, 4, 64, "bf16", "bf16", "native"),
    (128, 4, 16, "fp32", "fp32", "native"), (128, 4, 16, "bf16", "u8", "e4m3"),
    (128, 4, 16, "bf16", "fp8e4nv", "native"),
    (128, 8, 16, "bf16", "i8", "int8"), (256, 4, 16, "bf16", "bf16", "native"),
    (256, 4, 64, "bf16", "u8", "e4m3"),
)
EXTRAS: dict[str, dict[str, object]] = {
    " window cap": {"WINDOWED": True, "CAPPED": True},
    " window sinks lse": {"WINDOWED": True, "sinks_ptr": "given", "lse_ptr": "given"},
    " tree": {"tree_ptr": "given", "positions_ptr": "given"}, " split": {"SPLIT": True, "lse_ptr": "given"}}


def specializations() -> list[Specialization]:
    """Prompts as the platforms run them; window, soft cap, sinks, trees and splits once each."""
    found = []
    wanted: list[tuple[tuple, str, dict[str, object]]] = [(case, "", {}) for case in CASES]
    wanted += [((128, 4, 16, "bf16", "bf16", "native"), name, extra) for name, extra in EXTRAS.items()]
    for (width, group, page, q, kv, form), variant, extra in wanted:
        found += per_tile(
            lambda tile, a=(group, width, page, q, kv, form), n=variant, c=extra: configuration(f"ragged{n}", 0, *a,
                                                                                               tile, **c),
            lambda family, w=width, b=ELEMENT_BYTES[q], s=ELEMENT_BYTES[kv]: ragged_tile(family, w, b, s),
            refusal_of(q, kv, width))
    return found
