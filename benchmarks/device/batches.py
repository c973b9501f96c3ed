"""Batches of a step as the engine would make them, without an engine."""
from __future__ import annotations

import numpy as np
from isthmus.core.plan import Batch, Sampling


def batch(rows: int, tokens: int, context: int, page_size: int) -> Batch:
    """`rows` rows of `tokens` new tokens each, whose contexts have `context` tokens with them; pages in random order,
    page 0 left out. The last token of a row is sampled from, greedily."""
    each = -(-context // page_size)
    table = np.random.default_rng(0).permutation(rows * each).reshape(rows, each) + 1
    position = np.tile(np.arange(context - tokens, context), rows)
    row = np.repeat(np.arange(rows), tokens)
    slots = table[row, position // page_size] * page_size + position % page_size
    ids = np.full(rows * tokens, -1) if tokens == 1 else np.arange(rows * tokens) % 97
    starts = np.arange(rows + 1) * tokens
    arrays = (ids, position, slots, row, np.arange(1, rows + 1), starts, np.full(rows, context), table, starts[1:] - 1,
              np.full(rows, -1))
    return Batch(*(np.ascontiguousarray(part, np.int32) for part in arrays), Sampling())


def pages_of(made: Batch) -> int:
    """Pages that a state must have for it, page 0 included."""
    return int(made.pages.max()) + 1
