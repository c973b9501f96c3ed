"""What sequences keep between steps, and where everything is in one step: the host's part of attention."""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from isthmus.core.platform import Batch, StateSpec


@dataclass(frozen=True)
class State:
    """layers: K and V of each, [pages * page_size, kv_heads, head_dim]; last: the last sampled token of each slot."""

    spec: StateSpec
    layers: list[tuple[np.ndarray, np.ndarray]]
    last: np.ndarray

    def parts(self) -> list[np.ndarray]:
        """K and V of every layer as views [pages, page_size * kv_heads * head_dim]."""
        return [part.reshape(-1, self.spec.page_size * part[0].size) for layer in self.layers for part in layer]

    def copy_pages(self, src: list[int], dst: list[int]) -> State:
        for part in self.parts():
            part[dst] = part[src]
        return self

    def export_pages(self, pages: list[int]) -> bytes:
        """Page after page, each with K, then V, of layer after layer."""
        return np.concatenate([part[pages] for part in self.parts()], 1).tobytes()

    def import_pages(self, pages: list[int], data: bytes) -> State:
        """Raises `ValueError` for data of another number of pages."""
        parts = self.parts()
        ends = np.cumsum([part.shape[1] for part in parts])
        values = np.frombuffer(data, np.float32).reshape(len(pages), ends[-1])
        for part, new in zip(parts, np.split(values, ends[:-1], 1), strict=True):
            part[pages] = new
        return self


def lay_out(batch: Batch, state: State) -> dict[str, np.ndarray]:
    """Inputs of a graph by name. C is the longest context, Q the most tokens that a row has in this step.

    tokens [T] (those that wait in the state filled in), positions [T], logit_rows [L].
    inside [B, C, 1, 1]: does the row have this position?  slots [B, C]: where it lies in memory.
    fresh [B, C]: the token of this step that goes there; is_fresh [B, C, 1, 1]: is there one?
    grid [B, Q]: tokens of each row, filled up with token 0.  place [T]: where each token is in the grid, laid flat.
    age [B, 1, 1, Q, C]: how many tokens a position lies before a token of the grid.
    """
    page_size, rows = state.spec.page_size, batch.rows
    counts, context = np.diff(batch.starts), np.arange(max(1, batch.lengths.max()))
    queries = np.arange(max(1, counts.max()))
    inside = context < batch.lengths[:, None]
    pages = batch.pages[:, np.minimum(context // page_size, batch.pages.shape[1] - 1)]
    slots = np.where(inside, pages * page_size + context % page_size, 0)
    order = np.argsort(batch.slots, kind="stable")
    found = np.minimum(np.searchsorted(batch.slots[order], slots), len(order) - 1)
    fresh = order[found]
    grid = np.where(queries < counts[:, None], batch.starts[:-1, None] + queries, 0)
    within = np.clip(np.arange(len(rows)) - batch.starts[rows], 0, len(queries) - 1)
    return {"tokens": np.where(batch.tokens < 0, state.last[batch.seqs[rows]], batch.tokens),
            "positions": batch.positions, "logit_rows": batch.logit_rows,
            "inside": inside[:, :, None, None], "slots": slots,
            "fresh": fresh, "is_fresh": (inside & (batch.slots[fresh] == slots))[:, :, None, None],
            "grid": grid, "place": rows * len(queries) + within,
            "age": batch.positions[grid][:, None, None, :, None] - context}
