"""Attention over memory that is simulated slot by slot, so that sequences may lie over each other and every slot of
every page has a value that somebody reads: what was there before, beside, copied or taken to the host.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..core.plan import Batch, Sampling
from ..core.platform import AttentionSpec, LayerState, StateSpec
from .case import random_source
from .opcase import Run, Step, normal
from .ops_attention import LAYERS, Inputs, Shape, attend_forward, attended

Row = tuple[int, Sequence[int], int, int]  # sequence slot, its pages, first position, new tokens


def row_batch(rows: Sequence[Row], page: int, padding: int = 0, wider: int = 0) -> Batch:
    """Rows of one token go first. padding: tokens, and a row, more; wider: page table entries more."""
    rows = sorted(rows, key=lambda row: row[3] > 1)
    places = [(row, pages[p // page] * page + p % page, p) for row, (_, pages, start, count) in enumerate(rows)
              for p in range(start, start + count)]
    counts = [count for *_, count in rows]
    extra_row = 1 if padding else 0
    lengths = [start + count for _, _, start, count in rows] + [0] * extra_row
    tables = np.zeros((len(lengths), max(-(-n // page) for n in lengths) + wider), np.int32)
    for row, (_, pages, start, count) in enumerate(rows):
        used = -(-(start + count) // page)
        tables[row, :used] = pages[:used]
    total = len(places)
    array = lambda values: np.array(values, np.int32)  # noqa: E731
    pad, row_of = [0] * padding, [row for row, *_ in places] + [len(rows)] * padding
    return Batch(np.arange(total + padding, dtype=np.int32), array([p for *_, p in places] + pad),
                 array([slot for _, slot, _ in places] + pad), array(row_of),
                 array([seq for seq, *_ in rows] + [0] * extra_row),
                 array([*np.cumsum([0, *counts]), *[total] * extra_row]), array(lengths), tables, array([0]),
                 array([-2]), Sampling())


class Memory:
    """Simulated K and V of two layers that get the same inputs, the second with K and V exchanged. Records launches."""

    def __init__(self, name: str, shape: Shape, dtype: str, seed: int, pages: int, seqs: int):
        self.shape, self.dtype, self.page = shape, dtype, shape.page_size
        self.rng = random_source(seed, name)
        self.k, self.v = (np.full((pages, self.page, shape.kv_heads, shape.dim), np.nan) for _ in "kv")
        self.specs = [AttentionSpec(1 / math.sqrt(shape.dim))] * LAYERS
        self.inputs, self.forward = Inputs(), attend_forward(shape, self.specs)
        self.steps: list[Step] = []
        layers = (LayerState(shape.kv_heads, shape.dim),) * LAYERS
        self.state = StateSpec(layers, dtype, self.page, seqs + 1)
        self._before: Callable[[Any, Any], Any] | None = None

    def launch(self, *rows: Row, value: float | None = None, padding: int = 0, padded: float = math.nan,
               wider: int = 0, unread: bool = False) -> None:
        """One step. value: of every K and V, instead of random ones; padded: of the padding tokens. unread: what
        comes out is not compared."""
        batch = row_batch(rows, self.page, padding, wider)
        shape, count, real = self.shape, len(batch.tokens), int(batch.starts[-1])
        q = normal(self.rng, (count, shape.heads, shape.dim), self.dtype, 0.3 * shape.scale)
        k, v = (normal(self.rng, (count, shape.kv_heads, shape.dim), self.dtype) for _ in "kv")
        if value is not None:
            k[:], v[:] = value, value
        k[real:], v[real:] = padded, padded
        where = np.divmod(batch.slots[:real], self.page)
        self.k[where], self.v[where] = k[:real], v[:real]
        expected = np.zeros((0 if unread else real, shape.heads, shape.dim))
        for token in range(len(expected)):
            pages = batch.pages[batch.rows[token]]
            keys, values = (part[pages].reshape(-1, *part.shape[2:])[:batch.positions[token] + 1]
                            for part in (self.k, self.v))
            expected[token] = (attended(q[token], keys, values, self.specs[0])
                               - attended(q[token], values, keys, self.specs[1]))
        batch = self.inputs.add(batch, q, k, v)
        self.steps.append(Step(self.forward, batch, expected, len(expected), self._before))
        self._before = None

    def fill(self, seq: int, pages: Sequence[int], value: float | None = None) -> None:
        """Write every slot of `pages` as one sequence's, a few pages in a step."""
        each = max(1, 32 // self.page)
        for start in range(0, len(pages), each):
            count = len(pages[start:start + each])
            self.launch((seq, pages, start * self.page, count * self.page), value=value, unread=value is not None)

    def copy(self, src: Sequence[int], dst: Sequence[int]) -> None:
        """Before the next launch, through `copy_pages`."""
        self._move(src, dst, lambda platform, state: platform.copy_pages(state, list(src), list(dst)))

    def export(self, src: Sequence[int], dst: Sequence[int]) -> None:
        """Before the next launch, to the host and back elsewhere."""
        self._move(src, dst, lambda platform, state: platform.import_pages(
            state, list(dst), platform.export_pages(state, list(src))))

    def _move(self, src: Sequence[int], dst: Sequence[int], call: Callable[[Any, Any], Any]) -> None:
        assert not set(src) & set(dst)
        self.k[list(dst)], self.v[list(dst)] = self.k[list(src)], self.v[list(src)]
        first = self._before
        self._before = call if first is None else lambda platform, state: call(platform, first(platform, state))

    def run(self) -> Run:
        return Run(self.inputs.weights(), self.steps, self.state, len(self.k))
