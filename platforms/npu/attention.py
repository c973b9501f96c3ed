"""Paged attention by `npu_fused_infer_attention_score`: what it takes, and how a step is put to it.

The operator wants K and V each in contiguous blocks [blocks, page_size, kv_heads * head_dim] with one table of block
numbers for both. The base's memory [pages, 2, page_size, kv_heads, head_dim] is such blocks as it lies: K of page p is
block 2 p of the whole, V is block 2 p of all but the first. So the layout stays the base's, and tables hold 2 p.
Constraints: torch_npu's documentation of the operator (Ascend/op-plugin, docs/zh/custom_APIs/torch_npu).
"""
from __future__ import annotations

import numpy as np
import torch

from ...core.platform import AttentionSpec, Bucket
from ..accelerator.attention import View
from ..accelerator.cache import LayerCache

TRIANGLE = 2048     # rows and columns of the mask that sparse modes 2 to 4 take, whatever the lengths
PACKED_DIM = 128    # head dimension of ragged queries (layout TND)
PACKED_ROWS = 4096  # rows of one call with ragged queries
QUERIES = 1024      # queries of a windowed prefill in one call: their mask has a byte for each key in sight
DTYPES = (torch.bfloat16, torch.float16)
CAUSAL, MASKED = 3, 1  # sparse modes: the triangle at the lower right; the mask as it is given


def reason_against(q: torch.Tensor, cache: LayerCache, spec: AttentionSpec) -> str | None:
    """Why the operator does not take this case: q [T, heads, head_dim], a layer's memory, and the spec."""
    page_size, kv_heads, dim = cache.kv.shape[2:]
    if spec.softcap is not None:
        return "scores are not capped"
    if q.dtype not in DTYPES or cache.kv.dtype != q.dtype:
        return f"queries in {q.dtype} over {cache.kv.dtype}: bfloat16 and float16 alone are taken, the same for both"
    if dim % 16 or dim > 512:
        return f"head dimension {dim}: multiples of 16 up to 512 are taken"
    if q.shape[1] > 256 or q.shape[1] > 64 * kv_heads or kv_heads * dim > 65535:
        return f"{q.shape[1]} heads over {kv_heads}: up to 256, 64 for each of K, and 65535 values of K a token"
    if page_size % 16 or page_size > 512:
        return f"pages of {page_size}: multiples of 16 up to 512 are taken"
    if page_size % 128 and (dim != PACKED_DIM or spec.window is not None):
        return f"pages of {page_size}: ragged queries alone, of head dimension {PACKED_DIM}, go with less than 128"
    return None


class Fused:
    """One call for a decode step; for a prefill one call where queries may be ragged, else one for each row.

    The operator takes lengths as lists of the host's, so that a graph would keep those of its capture: `whole` refuses,
    and attention is launched between the graphs of a step. window: of the specs that it serves.
    """

    name = "npu_fused_infer_attention_score over pages"

    def __init__(self, triangle: torch.Tensor, window: int | None) -> None:
        self.triangle, self.window = triangle, window
        self.sight = f"npu.window.{window}"

    def wants(self, q: torch.Tensor, cache: LayerCache, view: View) -> tuple[str, ...]:
        if self.window is None:
            return ("npu.blocks",)
        return (self.sight,) if view.decode else ("npu.blocks", self.sight)

    def plan(self, view: View, name: str) -> np.ndarray:
        """Block numbers [rows, pages]; or those in sight of each row's last token, and how many tokens before."""
        pages = 2 * view.host.pages
        if name != self.sight:
            return pages
        first, hidden = self.before(view)
        width = min(pages.shape[1], -(-(self.window - 1) // view.page_size) + 1)
        columns = np.minimum(first[:, None] + np.arange(width), pages.shape[1] - 1)
        return np.column_stack([np.take_along_axis(pages, columns, 1), hidden]).astype(np.int32)

    def before(self, view: View) -> tuple[np.ndarray, np.ndarray]:
        """Of each row: whole pages that its last token does not see, and tokens of the next page that it does not."""
        return np.divmod(np.maximum(contexts(view) - self.window, 0), view.page_size)

    def whole(self, bucket: Bucket, page_size: int) -> str | None:
        return "the operator's lengths are the host's"

    def prepare(self, view: View) -> None:
        """Nothing: all that a step needs was fed."""

    def attend(self, q: torch.Tensor, cache: LayerCache, view: View, spec: AttentionSpec) -> torch.Tensor:
        call, starts = Call(cache, spec), view.host.starts
        if view.decode:
            rows = min(len(q), len(starts) - 1)
            seen = (view.fed["lengths"][:rows] > 0)[:, None, None]
            return padded(torch.where(seen, self.decode(call, q[:rows], view), 0), len(q))
        rows = int(np.flatnonzero(np.diff(starts)).max(initial=-1)) + 1  # beyond lies padding
        if rows == 0:
            return torch.zeros_like(q)
        tables, lengths = view.fed["npu.blocks"][:rows], contexts(view)[:rows]
        q, tokens = q[:starts[rows]], len(q)
        if q.shape[2] == PACKED_DIM and self.window is None and rows <= PACKED_ROWS:
            out = call.run(q, "TND", tables, lengths.tolist(), actual_seq_lengths=starts[1:rows + 1].tolist(),
                           atten_mask=self.triangle, sparse_mode=CAUSAL)
        else:
            out = torch.cat(self.rows(call, q, tables, view))
        return padded(out, tokens)

    def decode(self, call: Call, q: torch.Tensor, view: View) -> torch.Tensor:
        """q [rows, heads, d], one token of each of the first rows; a padding row reads a token of page 0."""
        rows, lengths = len(q), contexts(view)
        if self.window is None:
            return call.run(q[:, None], "BSND", view.fed["npu.blocks"][:rows], lengths[:rows].tolist())[:, 0]
        tables, hidden = view.fed[self.sight][:rows].split([view.fed[self.sight].shape[1] - 1, 1], 1)
        places = torch.arange(tables.shape[1] * view.page_size, device=q.device)
        lengths = lengths - self.before(view)[0] * view.page_size
        return call.run(q[:, None], "BSND", tables.contiguous(), lengths[:rows].tolist(),
                        atten_mask=(places < hidden)[:, None, None])[:, 0]

    def rows(self, call: Call, q: torch.Tensor, tables: torch.Tensor, view: View) -> list[torch.Tensor]:
        """One call for the rows of one token, which come first, and one for each of the others."""
        starts, lengths = view.host.starts, contexts(view)
        counts = np.diff(starts[:len(tables) + 1])
        ones = int(np.argmax(np.append(counts, 0) != 1))
        parts = [self.decode(call, q[:ones], view)] if ones else []
        for row in np.flatnonzero(counts[ones:]) + ones:
            some, table = q[starts[row]:starts[row + 1]], tables[row:row + 1]
            if self.window is None and len(some) > 1:
                parts.append(call.run(some[None], "BSND", table, [int(lengths[row])], atten_mask=self.triangle,
                                      sparse_mode=CAUSAL)[0])
            else:
                parts += [self.banded(call, some[low:low + QUERIES], table, int(lengths[row]) - len(some) + low)
                          for low in range(0, len(some), QUERIES)]
        return parts

    def banded(self, call: Call, q: torch.Tensor, table: torch.Tensor, before: int) -> torch.Tensor:
        """Queries of one row from position `before` on, over the pages in their sight."""
        page_size, stop = call.page_size, before + len(q)
        first = 0 if self.window is None else max(0, before + 1 - self.window) // page_size
        table = table[:, first:-(-stop // page_size)].contiguous()
        keys = torch.arange(first * page_size, (first + table.shape[1]) * page_size, device=q.device)
        places = torch.arange(before, stop, device=q.device)[:, None]
        hidden = keys > places if self.window is None else (keys > places) | (keys <= places - self.window)
        return call.run(q[None], "BSND", table, [stop - first * page_size], atten_mask=hidden[None, None],
                        sparse_mode=MASKED)[0]


class Call:
    """The operator over one layer's memory, with one spec."""

    def __init__(self, cache: LayerCache, spec: AttentionSpec) -> None:
        self.page_size, self.kv_heads, self.scale = *cache.kv.shape[2:4], spec.scale
        blocks = cache.kv.view(-1, self.page_size, self.kv_heads * cache.kv.shape[4])
        self.k, self.v = blocks[:-1], blocks[1:]

    def run(self, q: torch.Tensor, layout: str, tables: torch.Tensor, lengths: list[int],
            **more: object) -> torch.Tensor:
        """lengths: tokens that each row of `tables` reads."""
        return torch.ops.npu.npu_fused_infer_attention_score(
            q.contiguous(), self.k, self.v, input_layout=layout, num_heads=q.shape[-2],
            num_key_value_heads=self.kv_heads, scale=self.scale, block_table=tables, block_size=self.page_size,
            actual_seq_lengths_kv=lengths, **more)[0]


def contexts(view: View) -> np.ndarray:
    """Tokens of each row's context; 1 for padding, whose result is thrown away."""
    return np.maximum(view.host.lengths, 1)


def padded(out: torch.Tensor, tokens: int) -> torch.Tensor:
    """With zeros for the tokens that are nobody's."""
    return out if len(out) == tokens else torch.nn.functional.pad(out, (0, 0, 0, 0, 0, tokens - len(out)))
