"""Paged attention: how a step's tokens see K and V, and the path that is composed of torch's own operators.

A backend is chosen once for each `AttentionSpec`. What a backend needs to know of a step beyond the batch, it computes
on the host in `plan`, as arrays that travel with the batch.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch.nn import functional as F

from ...core.platform import AttentionSpec, Batch, Bucket
from .cache import LayerCache

GATHERED = 1 << 26  # elements of K that the composed path holds at once
QUERIES = 256       # queries of a prefill whose scores it holds at once


@dataclass(eq=False)
class View:
    """What attention may know of a step. decode: every row has one token, and token i is row i's. whole: it is captured
    as one graph, or replayed from it.

    host: the batch in numpy. fed: its arrays on the device, and those that `plan` added. A graph is replayed with
    another host batch, and with other values in the same device arrays.
    """

    host: Batch
    fed: dict[str, torch.Tensor]
    bucket: Bucket | None
    page_size: int
    decode: bool
    whole: bool = False


class Backend(Protocol):
    """One way to compute attention.

    name: for people. wants: names of the int32 arrays, beyond the batch's, that it needs for this case in such a step;
    plan: one of them, made on the host, of a size that the bucket alone decides. whole: why a decode step of this
    bucket cannot be part of a graph, None = it can. prepare: what the host must do before a step of which `view.whole`
    is true is captured, and before each replay, when `view` holds that step's arrays. attend: q [T, heads, head_dim]
    and a layer's memory (`State.caches`) that holds this step's K and V already -> [T, heads, head_dim]; zeros for
    padding rows of a decode step, anything finite for padding tokens else.
    """

    name: str

    def wants(self, q: torch.Tensor, cache: LayerCache, view: View) -> tuple[str, ...]:
        ...

    def plan(self, view: View, name: str) -> np.ndarray:
        ...

    def whole(self, bucket: Bucket, page_size: int) -> str | None:
        ...

    def prepare(self, view: View) -> None:
        ...

    def attend(self, q: torch.Tensor, cache: LayerCache, view: View, spec: AttentionSpec) -> torch.Tensor:
        ...


def only_decodes(batch: Batch) -> bool:
    """Does every row that has tokens have one, and does token i belong to row i?"""
    counts = np.diff(batch.starts)
    used = int(batch.starts[-1])
    return used <= len(counts) and bool((counts[:used] == 1).all())


class Composed:
    """torch's scaled dot product attention over gathered pages: works everywhere, reads K and V twice."""

    name = "composed of torch operators"

    def wants(self, q: torch.Tensor, cache: LayerCache, view: View) -> tuple[str, ...]:
        return ()

    def plan(self, view: View, name: str) -> np.ndarray:
        raise KeyError(name)

    def whole(self, bucket: Bucket, page_size: int) -> str | None:
        positions = bucket.rows * bucket.pages * page_size
        return None if positions <= GATHERED >> 10 else f"{positions} gathered positions are too many for a graph"

    def prepare(self, view: View) -> None:
        """Nothing: all that a step needs was fed."""

    def attend(self, q: torch.Tensor, cache: LayerCache, view: View, spec: AttentionSpec) -> torch.Tensor:
        if view.decode:
            return self._decode(q, cache, view, spec)
        out = torch.zeros_like(q)
        counts = np.diff(view.host.starts)
        for row in np.flatnonzero(counts):
            start, stop = int(view.host.starts[row]), int(view.host.starts[row + 1])
            out[start:stop] = self._prefill(q[start:stop], cache, view, spec, int(row), start)
        return out

    def _decode(self, q: torch.Tensor, cache: LayerCache, view: View, spec: AttentionSpec) -> torch.Tensor:
        """All rows over the pages that the longest of them uses; nothing of the host's but sizes in a graph."""
        rows = len(view.fed["lengths"])
        pages = view.fed["pages"]
        if view.bucket is None or self.whole(view.bucket, view.page_size) is not None:
            pages = pages[:, :max(1, -(-int(view.host.lengths.max(initial=0)) // view.page_size))]
        width = pages.shape[1] * view.page_size * cache.kv_heads * cache.kv.shape[4]
        step = max(1, GATHERED // width)
        parts = [self._decode_some(q[start:start + step], cache, pages[start:start + step],
                                   view.fed["lengths"][start:start + step], spec) for start in range(0, rows, step)]
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out if len(out) == len(q) else F.pad(out, (0, 0, 0, 0, 0, len(q) - len(out)))

    def _decode_some(self, q: torch.Tensor, cache: LayerCache, pages: torch.Tensor, lengths: torch.Tensor,
                     spec: AttentionSpec) -> torch.Tensor:
        rows, page_size = len(pages), cache.page_size
        q = q[:rows]
        places = torch.arange(pages.shape[1] * page_size, device=q.device)
        lengths = lengths[:, None]
        # What lies past a context may be NaN, and hidden values must be finite: they repeat its last token.
        positions = torch.minimum(places, (lengths - 1).clamp_min(0))
        slots = torch.gather(pages, 1, positions // page_size) * page_size + positions % page_size
        hidden = places >= lengths
        if spec.window is not None:
            hidden = hidden | (places < lengths - spec.window)
        k, v = (part.transpose(1, 2) for part in cache.read(slots, q.dtype))  # [rows, kv_heads, context, d]
        out = attend(q[:, :, None], k, v, ~hidden[:, None, None], spec)[:, :, 0]
        return torch.where(lengths[:, :, None] > 0, out, 0)

    def _prefill(self, q: torch.Tensor, cache: LayerCache, view: View, spec: AttentionSpec, row: int,
                 start: int) -> torch.Tensor:
        """One row's queries over its own pages, some at a time; page numbers come from the device's table."""
        length, page_size = int(view.host.lengths[row]), view.page_size
        first = length - len(q)  # position of the first query
        parts = []
        for low in range(0, len(q), QUERIES):
            some = q[low:low + QUERIES]
            oldest = 0 if spec.window is None else max(0, first + low - spec.window + 1)
            page, end = oldest // page_size, first + low + len(some)
            used = view.fed["pages"][row, page:-(-end // page_size)]
            k, v = (part[:end - page * page_size].transpose(0, 1)[None] for part in cache.read_pages(used, q.dtype))
            keys = torch.arange(page * page_size, end, device=q.device)
            at = torch.arange(first + low, end, device=q.device)[:, None]
            seen = keys <= at
            if spec.window is not None:
                seen &= keys > at - spec.window
            parts.append(attend(some.transpose(0, 1)[None], k, v, seen, spec)[0].transpose(0, 1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """q [rows, heads, queries, d], k and v [rows, kv_heads, context, d], seen bool [.., queries, context] -> as q."""
    if spec.softcap is None:
        return F.scaled_dot_product_attention(q, k, v, seen, scale=spec.scale, enable_gqa=q.shape[1] != k.shape[1])
    shape = q.shape
    q = q.unflatten(1, (k.shape[1], -1)).flatten(2, 3)  # query heads of one KV head beside each other
    scores = (q.float() * spec.scale) @ k.float().transpose(-1, -2)
    scores = (scores / spec.softcap).tanh() * spec.softcap
    scores = scores.unflatten(2, (-1, shape[2])).masked_fill(~seen[..., None, :, :], -torch.inf)
    out = scores.softmax(-1).flatten(2, 3) @ v.float()
    return out.to(v.dtype).unflatten(2, (-1, shape[2])).flatten(1, 2)
