"""Running requests as numpy columns, one row (sequence slot) each; slot 0 is nobody's.

Three lengths of a row, in tokens. computed is kept while it prefills, later it is length - 1, which is at most known.

    tokens    0 ........ computed ........ known ........ length
              K and V launched  | to compute | sampled, still on the device (overlap)
"""
from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..adapters.slots import Slots

if TYPE_CHECKING:
    from .request import Request

GREEDY = 1e-5  # a temperature below this is greedy: dividing by it would overflow float32 logits
# What a row asks for beyond its token, as bits: one look at a batch tells which parts of a step are needed.
DRAWN, TOP_K, TOP_P, MIN_P, PENALISED, BIASED, MIN_TOKENS, SCORED, MASKED, ADAPTED = (1 << i for i in range(10))

SOME_PAGES = 64  # of a row, to begin with

_MIX1, _MIX2, _GOLDEN = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB), np.uint64(0x9E3779B97F4A7C15)


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finalizer (Steele, Lea and Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * _MIX1
    x = (x ^ (x >> np.uint64(27))) * _MIX2
    return x ^ (x >> np.uint64(31))


def uniforms(seeds: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """One number in [0, 1) for each (seed uint64, output position): float32, a function of these two alone."""
    return draw(_mix(seeds + _GOLDEN), steps)


def mixed(seed: int) -> int:
    """What `draw` takes in place of a seed: the half of the work that does not depend on the position."""
    x = (seed + int(_GOLDEN)) % 2**64
    x = (x ^ x >> 30) * int(_MIX1) % 2**64
    x = (x ^ x >> 27) * int(_MIX2) % 2**64
    return x ^ x >> 31


def draw(mixed_seeds: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """`uniforms` of seeds that are mixed already."""
    bits = _mix(mixed_seeds + (steps.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0 ** -24)


class RequestTable:
    """Columns of the running requests: `seqs` rows (row 0 unused), `max_pages` page numbers and `max_len` tokens each.

    tokens: what the host knows, prompt first; memory is taken as it is written.  end: length at which the output ends.
    owner: the request of a row.  generation: grows when a row changes hands, so that a step in flight is told from it.
    seed: mixed.  charged: known tokens that the schedule policy has been told of.  flags: the bits above.
    min_tokens: 0 where a grammar's mask sees to it.  adapter: slot of the request's adapter, 0 = it has none.
    A row of `pages` is 0 from `page_count` on.
    """

    def __init__(self, seqs: int, max_pages: int, max_len: int, vocab_size: int, adapters: int = 0):
        self.slots = Slots(adapters)
        zeros = lambda dtype: np.zeros(seqs, dtype)  # noqa: E731
        # What `take` sets are columns of three arrays, so that a row is written at once.
        self._ints, self._floats = np.zeros((14, seqs), np.int32), np.zeros((6, seqs), np.float32)
        (self.length, self.known, self.charged, self.last, self.prompt_len, self.end, self.handle, self.top_k,
         self.min_tokens, self.logprobs, self.computed, self.page_count, self.tree_pages, self.adapter) = self._ints
        (self.temperature, self.top_p, self.min_p, self.repetition, self.presence, self.frequency) = self._floats
        self._max_pages = max_pages
        self.pages = np.zeros((seqs, min(max_pages, SOME_PAGES)), np.int32)
        self.tokens = np.zeros((seqs, max_len), np.int32)
        self.seed, self.flags, self.generation = zeros(np.uint64), zeros(np.uint16), zeros(np.uint32)
        self.owner = np.full(seqs, None, object)
        self.logprobs[0], self.top_p[0], self.repetition[0] = -1, 1, 1  # for rows that sample nothing
        self._free = list(range(seqs - 1, 0, -1))
        self._stops = np.zeros(vocab_size, np.int32)    # for each token, how many rows it would stop
        self._stopping = np.zeros(vocab_size, bool)     # whether it is any

    @property
    def free(self) -> int:
        """Slots that no request has."""
        return len(self._free)

    def take(self, request: Request) -> int:
        """A free slot, filled for `request` with the tokens that it has."""
        slot, p, ids = self._free.pop(), request.params, request.ids
        count, drawn, free = len(ids), p.temperature >= GREEDY, request.matcher is None
        self.tokens[slot, :count] = ids
        self._ints[:, slot] = (count, count, count, ids[-1], request.prompt_len, request.prompt_len + request.limit,
                               request.handle, p.top_k, p.min_tokens * free,
                               -1 if p.logprobs is None else p.logprobs, 0, 0, 0, self.slots.take(request.adapter))
        self._floats[:, slot] = (p.temperature if drawn else 0, p.top_p, p.min_p, p.repetition_penalty,
                                 p.presence_penalty, p.frequency_penalty)
        self.seed[slot], self.owner[slot] = mixed((p.seed or 0) % 2**64), request
        asks = ((DRAWN, drawn), (TOP_K, drawn and p.top_k), (TOP_P, drawn and p.top_p < 1), (MIN_P, drawn and p.min_p),
                (PENALISED, request.history), (BIASED, p.logit_bias), (MIN_TOKENS, p.min_tokens and free),
                (SCORED, p.logprobs is not None), (MASKED, not free), (ADAPTED, request.adapter))
        self.flags[slot] = sum([bit for bit, asked in asks if asked])
        stops = request.ban_ids.astype(np.intp)
        self._stops[stops] += 1
        self._stopping[stops] = True
        return slot

    def widen(self, pages: int) -> None:
        """A row may have so many pages more than the longest request needs."""
        self._max_pages += pages

    def reserve(self, pages: int) -> None:
        """Make room for rows of so many pages. They are no longer than they need to be, so that many rows read together
        are near each other in memory."""
        have = self.pages.shape[1]
        if pages > have:
            more = min(self._max_pages, max(pages, 2 * have)) - have
            self.pages = np.pad(self.pages, ((0, 0), (0, more)))

    def add_pages(self, slots: np.ndarray, pages: np.ndarray) -> None:
        """A further page for each of these rows."""
        counts = self.page_count[slots]
        self.reserve(int(counts.max()) + 1)
        self.pages[slots, counts] = pages
        self.page_count[slots] = counts + 1

    def add_row_pages(self, slot: int, pages: np.ndarray) -> None:
        """Further pages for one row."""
        count = int(self.page_count[slot])
        self.reserve(count + len(pages))
        self.pages[slot, count:count + len(pages)] = pages
        self.page_count[slot] = count + len(pages)

    def drop_pages(self, slot: int, keep: int) -> np.ndarray:
        """A row's pages but for the first `keep`, which are all that it has from now on."""
        count = int(self.page_count[slot])
        dropped = self.pages[slot, keep:count].copy()
        self.pages[slot, keep:count] = 0
        self.page_count[slot] = keep
        return dropped

    def give_back(self, slot: int) -> None:
        """The slot is free again."""
        self.slots.give_back(int(self.adapter[slot]))
        stops = self.owner[slot].ban_ids.astype(np.intp)
        self._stops[stops] -= 1
        self._stopping[stops] = self._stops[stops] > 0
        self.pages[slot, :self.page_count[slot]] = 0
        self.length[slot] = self.known[slot] = self.computed[slot] = self.page_count[slot] = 0
        self.owner[slot] = None
        self.generation[slot] += np.uint32(1)
        self._free.append(slot)

    def may_stop(self, tokens: np.ndarray) -> np.ndarray:
        """Which of these tokens end some running request, not necessarily the one that drew it: bool [n]."""
        return self._stopping.take(tokens, mode="clip")
