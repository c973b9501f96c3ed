"""Trees of drafts: each way through a tree is a row of the batch, and the rows' page tables are the mask.

The first row of a request computes its last known token and a draft behind it, in the request's own pages. A branch is
a further row: it reads the pages before that of the known token, which are the request's, and computes the known token
and its own way again in pages of its own, the first of which begins as a copy. So rows never see each other, on every
platform, with the kernels that it has. The way with most tokens that are kept is the output's; if that is a branch, its
pages become the request's. Until then they stand behind the request's own in its row of the table, where whoever ends
it finds them.
"""
from __future__ import annotations

import numpy as np

from ..cache.manager import CacheManager
from ..scheduler.plans import Drafts
from ..scheduler.table import RequestTable
from .contract import Ways


def most_pages(branches: int, tokens: int, size: int) -> int:
    """Pages that the branches of one request have at most. tokens: of a draft. size: of a page, in tokens."""
    return branches * (-(-(tokens + 1) // size) + 1)


def first_rows(owners: np.ndarray) -> np.ndarray:
    """Which chains are the first of their owner, intp; owners: ascending, of each chain."""
    return np.flatnonzero(np.diff(owners, prepend=-1))


def longest(proposals: Ways, count: int) -> np.ndarray:
    """The length of the longest chain of each of `count` requests: int32 [count]."""
    found = np.zeros(count, np.int32)
    np.maximum.at(found, proposals.owners, proposals.counts)
    return found


def fitting(proposals: Ways, lengths: np.ndarray, size: int, tokens: int, rows: int, pages: int) -> Ways:
    """The first chain of each request, and of the others as many as there is room for.

    lengths: of the requests, the known token included. tokens, rows: that may be added to the step. pages: that are
    free beyond what first chains need.
    """
    keep, ends = np.zeros(len(proposals.counts), bool), np.cumsum(proposals.counts)
    keep[first_rows(proposals.owners)] = True
    for chain in np.flatnonzero(~keep).tolist():
        length, count = int(lengths[proposals.owners[chain]]), int(proposals.counts[chain])
        need = _pages(length, count, size)
        if count and count < tokens and rows and need <= pages:
            keep[chain], tokens, rows, pages = True, tokens - count - 1, rows - 1, pages - need
    parts = [proposals.tokens[end - count:end] for end, count in zip(ends[keep], proposals.counts[keep], strict=True)]
    return Ways(proposals.counts[keep], np.concatenate([proposals.tokens[:0], *parts]), proposals.owners[keep])


def place(table: RequestTable, cache: CacheManager, slots: np.ndarray, lengths: np.ndarray,
          counts: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Pages for the branches among these rows, whose first ones have theirs: (`shifts`, `copies`) of `Drafts`; None,
    and nothing taken, if there are too few."""
    size, shifts = cache.page_size, np.zeros(len(slots), np.int32)
    some = np.flatnonzero(np.diff(slots, prepend=-1) == 0)
    need = np.array([_pages(int(lengths[row]), int(counts[row]), size) for row in some], np.int64)
    pages = cache.take(int(need.sum()), np.repeat(slots[some], need).astype(np.int32)) if len(some) else ()
    if pages is None:
        return None
    copies: list[tuple[int, int]] = []
    for row, end, count in zip(some.tolist(), np.cumsum(need).tolist(), need.tolist(), strict=True):
        slot, last = int(slots[row]), int(lengths[row]) - 1
        shifts[row] = int(table.page_count[slot]) - last // size
        table.add_row_pages(slot, pages[end - count:end])
        if last % size:
            copies.append((int(table.pages[slot, last // size]), int(pages[end - count])))
    return shifts, np.array(copies, np.int32).reshape(-1, 2)


def best(drafts: Drafts, kept: np.ndarray) -> np.ndarray:
    """The row of each request that has most tokens kept, the first of equals: intp."""
    order = np.lexsort((np.arange(len(kept)), -kept, request := np.cumsum(drafts.shifts == 0)))
    return order[np.flatnonzero(np.diff(request[order], prepend=0))]


def take_over(table: RequestTable, drafts: Drafts, size: int) -> None:
    """The pages of rows that are branches are now the requests', whose own are behind them."""
    alive = table.generation[drafts.slots] == drafts.generations
    for row in np.flatnonzero((drafts.shifts > 0) & alive).tolist():
        first = (int(drafts.lengths[row]) - 1) // size
        ours = np.arange(first, first + _pages(int(drafts.lengths[row]), int(drafts.counts[row]), size))
        theirs, pages = ours + drafts.shifts[row], table.pages[drafts.slots[row]]
        pages[ours], pages[theirs] = pages[theirs], pages[ours]


def _pages(length: int, count: int, size: int) -> int:
    """From that of the last of `length` tokens to that of the last of `count` drafted ones."""
    return -(-(length + count) // size) - (length - 1) // size
