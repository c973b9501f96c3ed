"""Paged attention: how one step's tokens read the K and V memory of a layer.

Decode rows (one token) are gathered and attended together, in groups of similar length. Prefill rows go one by one
over their own pages, without a copy where the pages follow each other in memory. Query heads that share a KV head
are folded into another axis (the query axis in decode, the batch axis in prefill), so K and V are never repeated.

A token's result has the same bits whatever is computed beside it and however its prompt is cut. torch's kernel takes
`BLOCK` keys at once, and the order in which it sums a block depends on how many keys that has: whether they end inside
a vector, and whether they are more than `HALVED`. So contexts begin at whole blocks, are filled up with hidden copies
of their last token, and tokens that see at most `HALVED` keys of their last block never share a call with others that
see more. A single query would be another kernel's; it is doubled.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from ...core.platform import AttentionSpec, Batch
from .kept import LayerCache

QUERIES = 256   # queries of a soft-capped prefill whose scores are held at once
LANES = 32      # keys that a context is filled up to a multiple of
BLOCK = 512     # keys that torch's kernel takes at once
HALVED = 384    # more keys than these in a block are summed in two halves
GROUP_WASTE = 1.25  # longest context of a decode group over its shortest

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


@dataclass
class DecodeGroup:
    """Rows of one token each with similar contexts. rows: their numbers, or a slice when they are neighbours."""

    rows: torch.Tensor | slice
    slots: torch.Tensor   # [rows * context], where K and V of the positions lie
    hidden: torch.Tensor  # [rows, 1, 1, context] bool: not to be seen
    masks: dict[torch.dtype, torch.Tensor] = field(default_factory=dict)
    buffer: torch.Tensor | None = None

    def gather(self, cache: LayerCache, dtype: torch.dtype) -> torch.Tensor:
        """K and V of the group, [rows, context, 2, kv_heads, head_dim]; the memory is reused by the next layer."""
        tokens = cache.pages.flatten(0, 1)
        if self.buffer is None or self.buffer.shape[1:] != tokens.shape[1:]:
            self.buffer = torch.empty((len(self.slots), *tokens.shape[1:]), dtype=tokens.dtype)
        torch.index_select(tokens, 0, self.slots, out=self.buffer)
        scales = None if cache.scales is None else cache.scales.flatten(0, 1)[self.slots]
        return cache.values(self.buffer, scales, dtype).view(len(self.hidden), -1, *tokens.shape[1:])


@dataclass
class PrefillRow:
    """Some tokens of one row. tokens: where its queries are. context: slots it may read, from the first page."""

    tokens: slice
    pages: torch.Tensor | slice
    context: int
    hidden: torch.Tensor | None  # [even number of queries, filled context] bool; None = plainly causal
    masks: dict[torch.dtype, torch.Tensor] = field(default_factory=dict)

    def read(self, cache: LayerCache, dtype: torch.dtype) -> torch.Tensor:
        """K and V of the context, [filled context, 2, kv_heads, head_dim]."""
        kept, scales = (None if part is None else part[self.pages].flatten(0, 1)[:self.context]
                        for part in (cache.pages, cache.scales))
        kv = cache.values(kept, scales, dtype)
        missing = filled(self.context) - self.context
        return torch.cat((kv, kv[-1:].expand(missing, -1, -1, -1))) if missing else kv


class AttentionPlan:
    """Everything about a step's attention that all layers share: where to write, what each token may see."""

    def __init__(self, batch: Batch, page_size: int) -> None:
        self.batch, self.page_size = batch, page_size
        self.slots = torch.from_numpy(batch.slots.astype(np.int64))
        self.counts = np.diff(batch.starts)
        several = np.flatnonzero(self.counts != 1)
        self.decodes = int(several[0]) if len(several) else len(self.counts)
        self.tokens = int(batch.starts[-1])
        self.windows: dict[int | None, tuple[list[DecodeGroup], list[PrefillRow]]] = {}

    def attend(self, q: torch.Tensor, cache: LayerCache, spec: AttentionSpec) -> torch.Tensor:
        """q [T, heads, d] -> [T, heads, d]; zeros for padding tokens."""
        if spec.window not in self.windows:
            self.windows[spec.window] = list(self._decode_groups(spec.window)), list(self._prefill_rows(spec.window))
        groups, rows = self.windows[spec.window]
        if len(groups) == 1 and not rows and self.tokens == len(q):
            return self._decode(q, cache, spec, groups[0])
        out = torch.zeros_like(q)
        for group in groups:
            out[group.rows] = self._decode(q[group.rows], cache, spec, group)
        for row in rows:
            out[row.tokens] = self._prefill(q[row.tokens], cache, spec, row)
        return out

    def _decode(self, q: torch.Tensor, cache: LayerCache, spec: AttentionSpec, group: DecodeGroup) -> torch.Tensor:
        kv = group.gather(cache, q.dtype).permute(2, 0, 3, 1, 4)  # [2, rows, kv_heads, context, d]
        folded = q.view(len(q), kv.shape[2], -1, q.shape[2])
        sharers = folded.shape[2]
        folded = folded.repeat(1, 1, 2, 1) if sharers == 1 else folded
        return attend(folded, kv[0], kv[1], spec, group)[:, :, :sharers].reshape(q.shape)

    def _prefill(self, q: torch.Tensor, cache: LayerCache, spec: AttentionSpec, row: PrefillRow) -> torch.Tensor:
        kv = row.read(cache, q.dtype).permute(1, 2, 0, 3)
        kv_heads, queries = kv.shape[1], len(q)
        q = torch.cat((q, q[-1:])) if queries % 2 else q
        folded = q.view(len(q), kv_heads, -1, q.shape[2]).permute(2, 1, 0, 3)  # [sharers, kv_heads, queries, d]
        k, v = kv[:, None].expand(2, len(folded), *kv.shape[1:])
        return attend(folded, k, v, spec, row).permute(2, 1, 0, 3).reshape(q.shape)[:queries]

    def _decode_groups(self, window: int | None) -> Iterator[DecodeGroup]:
        """Groups in order of context, each at most `GROUP_WASTE` times as long as its shortest row."""
        lengths = self.batch.lengths[:self.decodes].astype(np.int64)
        read = lengths - first_read(lengths, window)
        order = np.argsort(read, kind="stable")
        start = 0
        while start < len(order):
            shortest = int(read[order[start]])
            longest = min(max(shortest * GROUP_WASTE, shortest + 32), same_order(shortest))
            stop = int(np.searchsorted(read[order], longest, "right"))
            rows = np.sort(order[start:stop])
            yield self._group(rows, lengths[rows, None], read[rows, None], window)
            start = stop

    def _group(self, rows: np.ndarray, lengths: np.ndarray, read: np.ndarray, window: int | None) -> DecodeGroup:
        places = np.arange(filled(int(read.max())))
        # Shorter rows repeat their last token: what lies elsewhere may be NaN, and hidden values must be finite.
        positions = lengths - read + np.minimum(places, read - 1)
        pages = np.take_along_axis(self.batch.pages[rows], positions // self.page_size, 1).astype(np.int64)
        slots = pages * self.page_size + positions % self.page_size
        hidden = places >= read
        if window is not None:
            hidden |= places < read - window
        together = len(rows) == rows[-1] - rows[0] + 1
        return DecodeGroup(slice(int(rows[0]), int(rows[-1]) + 1) if together else torch.from_numpy(rows),
                           torch.from_numpy(slots.reshape(-1)), torch.from_numpy(hidden)[:, None, None])

    def _prefill_rows(self, window: int | None) -> Iterator[PrefillRow]:
        for row in np.flatnonzero(self.counts[self.decodes:]) + self.decodes:
            length, first = int(self.batch.lengths[row]), int(self.batch.starts[row])
            start = at = length - int(self.counts[row])
            while at < length:
                stop = min(length, same_order(at + 1))
                yield self._prefill_row(row, slice(first + at - start, first + stop - start), at, stop, window)
                at = stop

    def _prefill_row(self, row: int, tokens: slice, start: int, stop: int, window: int | None) -> PrefillRow:
        """Queries at positions start .. stop - 1."""
        base = int(first_read(start + 1, window))
        pages = self.batch.pages[row, base // self.page_size:-(-stop // self.page_size)].astype(np.int64)
        hidden = None
        if start or (window is not None and window < stop):
            keys = torch.arange(base, base + filled(stop - base))
            at = torch.arange(start, stop + (stop - start) % 2).clamp_(max=stop - 1)[:, None]
            hidden = keys > at
            if window is not None:
                hidden |= keys <= at - window
        follow = bool((np.diff(pages) == 1).all())
        return PrefillRow(tokens, slice(int(pages[0]), int(pages[-1]) + 1) if follow else torch.from_numpy(pages),
                          stop - base, hidden)


def first_read(length: int | np.ndarray, window: int | None) -> int | np.ndarray:
    """The first position that is read for the last token of a context: the window's own block's."""
    return length * 0 if window is None else np.maximum(length - window, 0) // BLOCK * BLOCK


def same_order(context: int) -> int:
    """The longest context whose last block is summed in the order of this one's."""
    return (context + BLOCK - HALVED - 1) // BLOCK * BLOCK + HALVED


def filled(context: int) -> int:
    """The context with its hidden copies: whole vectors, or the whole of a block that is summed in halves."""
    whole = -(-context // BLOCK) * BLOCK
    return whole if context > whole - BLOCK + HALVED else -(-context // LANES) * LANES


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec,
           seen: DecodeGroup | PrefillRow) -> torch.Tensor:
    """q [batch, kv_heads, queries, d], k and v [batch, kv_heads, context, d] -> as q; hidden keys as `seen` says."""
    if spec.softcap is not None:
        return capped(q, k, v, spec, seen.hidden)
    if seen.hidden is None:
        return _flash(q, k, v, 0.0, True, scale=spec.scale)[0]
    mask = seen.masks.get(q.dtype)
    if mask is None:
        mask = torch.zeros(seen.hidden.shape, dtype=q.dtype).masked_fill_(seen.hidden, -torch.inf)
        seen.masks[q.dtype] = mask
    return _flash(q, k, v, 0.0, False, attn_mask=mask, scale=spec.scale)[0]


def capped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec,
           hidden: torch.Tensor | None) -> torch.Tensor:
    """Attention whose scores pass softcap * tanh(score / softcap); a bounded number of queries at a time."""
    if hidden is None:
        hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu_(1)
    k, v = k.float().transpose(-1, -2), v.float()
    parts = []
    for start in range(0, q.shape[2], QUERIES):
        some = slice(start, start + QUERIES)
        scores = (q[:, :, some].float() * spec.scale) @ k
        scores = scores.div_(spec.softcap).tanh_().mul_(spec.softcap)
        scores.masked_fill_(hidden if hidden.shape[-2] == 1 else hidden[some], -torch.inf)
        parts.append(scores.softmax(-1) @ v)
    return torch.cat(parts, 2).to(q.dtype)
