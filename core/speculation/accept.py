"""Which drafted tokens stay.

At each place of a draft the model draws from its own distribution, with mask, bias, penalties, temperature, top-k,
top-p and min-p as ever, by the random number that belongs to the request's seed and this position of its output. That
draw is the output's next token if the draft was right so far. So a drafted token is kept exactly where it equals the
draw: an output is the same with and without speculation, whatever the parameters, and no second random number is
needed. For a drafter that proposes one token for a place, as all here do, this keeps a draft as often as rejection
sampling does: with the model's probability of the token (Leviathan et al. 2023, with a proposal of one token).
"""
from __future__ import annotations

import numpy as np


def accepted(counts: np.ndarray, drafts: np.ndarray, drawn: np.ndarray) -> np.ndarray:
    """How many tokens of each draft are kept: int32 [n].

    counts: int32 [n], lengths of the drafts. drafts: int32 [sum of counts]. drawn: int32 [sum of counts + n], what the
    model drew: of each request before its first drafted token, then after each.
    """
    number = len(counts)
    if not number:
        return np.zeros(0, np.int32)
    rows = np.repeat(np.arange(number), counts)
    places = np.arange(len(drafts)) - np.repeat(np.cumsum(counts) - counts, counts)
    same = np.zeros((number, int(counts.max(initial=0)) + 1), bool)  # the last column ends every run
    same[rows, places] = drafts == drawn[np.arange(len(drafts)) + rows]
    return same.argmin(1).astype(np.int32)
