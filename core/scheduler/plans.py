"""What is computed in one step."""
from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..plan import Range, StepPlan
from .request import Request
from .rows import Rows


class Chunk(NamedTuple):
    """Prompt tokens `start` to `stop` of a request; `scores` of its first tokens are scored, `sample` its last."""

    request: Request
    slot: int
    start: int
    stop: int
    scores: int
    sample: bool

    @property
    def size(self) -> int:
        return self.stop - self.start


class Drafts(NamedTuple):
    """n rows that compute a known token and drafted ones behind it; the model draws a token after each. A request may
    have several, one behind the other: a tree (`core.speculation.branches`).

    slots: intp [n].  owners: object [n].  generations: of the slots.  flags: what the requests ask for.
    lengths: int32 [n], of the rows with the known token alone.  counts: int32 [n], drafted tokens, at least 1.
    tokens: int32 [sum of counts], row after row.
    rows: intp [sum of counts + n], row of each logit row.  offsets: int32, how many drafted tokens are before it.
    shifts: int32 [n], 0 for the first row of a request; for others, whose pages from that of the known token on are
    their own, so many places behind the request's in its row of the table.
    copies: int32 [m, 2], pages that are copied before the step, from and to.
    """

    slots: np.ndarray
    owners: np.ndarray
    generations: np.ndarray
    flags: np.ndarray
    lengths: np.ndarray
    counts: np.ndarray
    tokens: np.ndarray
    rows: np.ndarray
    offsets: np.ndarray
    shifts: np.ndarray
    copies: np.ndarray

    @property
    def firsts(self) -> np.ndarray:
        """Each row's first logit row, counted from the first of all of them: intp [n]."""
        return np.flatnonzero(self.offsets == 0)

    def of(self, row: int) -> np.ndarray:
        """The draft of a row."""
        stop = int(self.counts[:row + 1].sum())
        return self.tokens[stop - int(self.counts[row]):stop]

    def only(self, chosen: np.ndarray) -> Drafts:
        """Some of the rows, which are made nothing of any more but taken in."""
        columns = [each[chosen] for each in (self.slots, self.owners, self.generations, self.flags, self.lengths)]
        return drafts_of(*columns, self.counts[chosen], np.concatenate([self.of(row) for row in chosen.tolist()]),
                         self.shifts[chosen], self.copies)


def drafts_of(slots: np.ndarray, owners: np.ndarray, generations: np.ndarray, flags: np.ndarray, lengths: np.ndarray,
              counts: np.ndarray, tokens: np.ndarray, shifts: np.ndarray, copies: np.ndarray) -> Drafts:
    """The rows with their logit rows."""
    drawn = counts + 1
    rows = np.repeat(np.arange(len(slots)), drawn)
    offsets = np.arange(len(rows), dtype=np.int32) - np.repeat(np.cumsum(drawn) - drawn, drawn).astype(np.int32)
    return Drafts(slots, owners, generations, flags, lengths, counts, tokens, rows, offsets, shifts, copies)


class Plan(NamedTuple):
    """One step: the slots that decode a token each, the prefill chunks, and rows with drafts. Sampled logit rows are
    those of `decode`, then those of the chunks, then those of the drafts; each chunk's scored rows come before its
    sampled one.

    lengths: of the rows in `decode`, with the token that they compute. rows: what there is about them, as it was when
    this was planned. drafts: None without any.
    """

    step: int
    decode: np.ndarray
    lengths: np.ndarray
    chunks: list[Chunk]
    rows: Rows
    drafts: Drafts | None = None

    @property
    def prompt_tokens(self) -> int:
        return sum([c.size for c in self.chunks])

    @property
    def requests(self) -> list[Request]:
        """All whose tokens it computes."""
        drafting = [] if self.drafts is None else self.drafts.owners.tolist()
        return [*self.rows.owners.tolist(), *(c.request for c in self.chunks), *drafting]

    def record(self) -> StepPlan:
        """The plan as plain integers, without what further rows of a request compute."""
        ranges = [Range(slot, length - 1, length, True)
                  for slot, length in zip(self.decode.tolist(), self.lengths.tolist(), strict=True)]
        ranges += [Range(c.slot, c.start, c.stop, c.sample) for c in self.chunks]
        if self.drafts is not None:
            first = self.drafts.shifts == 0
            ranges += [Range(slot, length - 1, length + count, True) for slot, length, count in zip(*(
                part[first].tolist() for part in (self.drafts.slots, self.drafts.lengths, self.drafts.counts)),
                strict=True)]
        return StepPlan(self.step, tuple(ranges))
