"""Drafts in the scheduler: which rows get one, what is taken in of it, and what is given back.

A step with drafts is settled before the next one is planned, since how long its rows are is known only then. So overlap
is given up while any request drafts, and on again as soon as none does.
"""
from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..cache.manager import CacheManager
from ..errors import said
from ..messages import pack_ids, unpack_ids
from ..plan import Batch
from ..scheduler.admission import Limits
from ..scheduler.masks import Masks
from ..scheduler.plans import Drafts, Plan
from ..scheduler.request import Request
from ..scheduler.table import MASKED, RequestTable
from .contract import Drafter, Proposals, View
from .lengths import Lengths
from .stats import DraftStats

log = logging.getLogger(__name__)

ROWS = 256  # drafted tokens of one step at most, over all requests: logits take memory

MODES = 7   # three plans that have waited


@dataclass(frozen=True)
class Drafting:
    """What the scheduler speculates with. ask: through which proposals come, so that a recording has them.

    adaptive: drafts get shorter, down to none, where they do not pay; else they are always of `tokens`.
    step_tokens: most tokens of a step that the platform is compiled for; 0 = any number.
    on_device: the drafter needs pages for what it may draft.
    """

    name: str
    drafter: Drafter
    tokens: int
    adaptive: bool = False
    ask: Callable[[Callable[[], bytes]], bytes] = lambda read: read()
    step_tokens: int = 0
    on_device: bool = False


class Speculation:
    """The drafts of one scheduler."""

    def __init__(self, drafting: Drafting, table: RequestTable, cache: CacheManager, limits: Limits, masks: Masks):
        self.name, self.drafter, self._ask = drafting.name, drafting.drafter, drafting.ask
        self._step_tokens, self._on_device = drafting.step_tokens, drafting.on_device
        self._table, self._cache, self._limits, self._masks = table, cache, limits, masks
        self.broken = ""
        self.lengths = Lengths(limits.max_running + 1, drafting.tokens, not drafting.adaptive)
        self.stats = DraftStats(drafting.tokens, limits.max_running + 1)
        self._modes, self._waits = 0, False  # did the last plans wait for all tokens: a bit each; does the next one
        self._given = 0                      # tokens that the rows with drafts of the last settled step have

    def settles_first(self, plan: Plan, slots: np.ndarray) -> bool:
        """Must a launched plan be settled before the next is planned, since its rows have drafts, or one of these rows,
        which decode, may get one?"""
        self._waits = plan.drafts is not None or not self.broken and self.lengths.soon(slots)
        return self._waits

    def learn(self, plan: Plan, seconds: float) -> None:
        """A settled plan took so long, from its own planning to the next, or that of a later one to the one after."""
        requests = len(plan.decode) + (0 if plan.drafts is None else len(plan.drafts.slots))
        if self._modes not in (0, MODES) or plan.chunks or not requests:
            return  # between the two ways to go on a step takes longer than it does
        drafted = 0 if plan.drafts is None else len(plan.drafts.tokens)
        tokens = len(plan.decode) + (self._given if drafted else 0)
        self.lengths.stepped(requests, drafted, tokens, seconds, self._modes == MODES)

    def plan(self, decode: np.ndarray, lengths: np.ndarray,
             others: int) -> tuple[Drafts | None, np.ndarray, np.ndarray]:
        """(drafts, slots, lengths): the drafts of some decoding rows, and the rows that are left. others: tokens of the
        step beside the decoding rows'."""
        none = None, decode, lengths
        waits, self._waits = self._waits, False
        self._modes = (self._modes << 1 | waits) & MODES
        self._masks.forget_walks()  # of a step that could not be launched
        if not len(decode) or self.broken:
            return none
        most = self._most(decode, lengths, len(decode) + others)
        rows = np.flatnonzero(most)
        if not len(rows):
            return none
        self._modes |= 1
        slots, most = decode[rows], most[rows]
        if self._on_device and not self._grow(slots, lengths[rows] + most):
            return none
        told = unpack_ids(self._ask(lambda: self._proposed(slots, lengths[rows], most)))
        counts, tokens = (told[:len(slots)], told[len(slots):]) if len(told) else (np.zeros_like(most), told)
        self.lengths.asked(slots, counts)
        if self._on_device:
            self._shrink(slots, lengths[rows] + counts)
        if not len(tokens):
            return none
        some = np.flatnonzero(counts)
        slots, counts, rows = slots[some], counts[some], rows[some]
        if not self._grow(slots, lengths[rows] + counts):
            self._masks.forget_walks()
            return none
        left = np.ones(len(decode), bool)
        left[rows] = False
        return self._drafts(slots, lengths[rows], counts, tokens), decode[left], lengths[left]

    def count(self, drafts: Drafts, accepted: np.ndarray) -> None:
        """So many drafted tokens of each row were accepted, before any of these requests ends by them."""
        alive = self._table.generation[drafts.slots] == drafts.generations
        slots, counts, accepted = drafts.slots[alive], drafts.counts[alive], accepted[alive]
        self._given = int(accepted.sum()) + len(slots)
        self.stats.count(slots, counts, accepted)
        self.lengths.settled(slots, counts, accepted)

    def settled(self, drafts: Drafts, accepted: np.ndarray) -> None:
        """The tokens are taken in; -1 where the request has ended: pages go back, and the drafter learns of it."""
        alive = accepted >= 0
        slots = drafts.slots[alive]
        self._shrink(slots, self._table.known[slots])
        self._guarded(lambda: self.drafter.settled(slots, accepted[alive]))

    def launched(self, plan: Plan, batch: Batch) -> None:
        """The model's step is about to be launched."""
        self._guarded(lambda: self.drafter.launched(plan, batch))

    def left(self, request: Request) -> None:
        """A request has ended or gives way; its row and slot are still its own."""
        slot, table = request.slot, self._table
        drafted, accepted = self.stats.of(slot)
        request.drafted += drafted
        request.accepted += accepted
        self.lengths.forget(slot)
        tokens = table.tokens[slot, :table.known[slot]]
        self._guarded(lambda: self.drafter.left(slot, tokens, request.cached, request.domain))

    def flushed(self) -> None:
        """The cache was emptied on purpose."""
        self._guarded(self.drafter.flushed)

    def reset(self) -> None:
        """Count from zero again, and forget what was learnt."""
        self.stats.reset()
        self.lengths.forget_all()

    def snapshot(self) -> dict[str, Any]:
        """All counters as plain numbers, and what is going on in words."""
        return {"drafter": self.name, "draft_state": self.broken or self.lengths.state,
                "drafting": int(not self.broken and self.lengths.state == "on"), **self.stats.snapshot()}

    # ---- inside

    def _most(self, slots: np.ndarray, lengths: np.ndarray, others: int) -> np.ndarray:
        """Most drafted tokens of each row, int32 [n]: within its output, the memory there is and the step's size. A row
        whose last token is still on the device gets none."""
        table, size = self._table, self._limits.page_size
        most = np.minimum(self.lengths.most(slots), table.end[slots] - lengths - 1)
        most = np.where(table.known[slots] >= lengths, np.maximum(most, 0), 0)
        room = min(ROWS, self._step_tokens - others) if self._step_tokens else ROWS
        if most.sum() > room:
            most = np.minimum(most, max(1, room // len(slots)))
            most = np.clip(room - (np.cumsum(most) - most), 0, most)
        held = table.page_count[slots] * size
        need = -(-np.maximum(0, lengths + most - held) // size)
        if need.sum() + len(slots) > self._cache.available:  # the next tokens come first
            most = np.minimum(most, held - lengths)
        return most

    def _proposed(self, slots: np.ndarray, lengths: np.ndarray, most: np.ndarray) -> bytes:
        """Counts, then tokens, of what the drafter proposes and grammars allow; nothing where nothing is left."""
        table = self._table
        requests = table.owner[slots].tolist()
        view = View(slots, lengths, most.astype(np.int32), table.tokens, table.pages, [r.domain for r in requests])
        proposals = self._guarded(lambda: self._checked(self.drafter.propose(view), view))
        if proposals is None or not len(proposals.tokens):
            return b""
        counts, tokens = proposals
        if (table.flags[slots] & MASKED).any():
            counts, tokens = self._allowed(requests, proposals)
        return pack_ids(np.concatenate([counts, tokens])) if counts.any() else b""

    def _checked(self, proposals: Proposals, view: View) -> Proposals:
        """What a drafter gives, or ValueError where it is not what was asked for."""
        counts, tokens = (np.asarray(part) for part in proposals)
        if counts.shape != view.most.shape or (counts < 0).any() or (counts > view.most).any():
            raise ValueError(f"it proposes {counts.tolist()} tokens where at most {view.most.tolist()} are wanted")
        if tokens.shape != (counts.sum(),):
            raise ValueError(f"it proposes {tokens.shape} tokens and counts {counts.sum()}")
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < self._limits.vocab_size:
            raise ValueError(f"it proposes a token outside the vocabulary of {self._limits.vocab_size}")
        return Proposals(counts.astype(np.int32), tokens.astype(np.int32))

    def _allowed(self, requests: list[Any], proposals: Proposals) -> Proposals:
        """The drafts as far as grammars allow them."""
        counts, drafts = proposals.counts.copy(), np.split(proposals.tokens, np.cumsum(proposals.counts)[:-1])
        for i, request in enumerate(requests):
            if request.matcher is not None and counts[i]:
                counts[i] = self._masks.walk(request, drafts[i].tolist())
        return Proposals(counts, np.concatenate([draft[:count] for draft, count in zip(drafts, counts, strict=True)]))

    def _grow(self, slots: np.ndarray, lengths: np.ndarray) -> bool:
        """Pages for rows of these lengths; False, and none taken, if there are too few."""
        table = self._table
        need = np.maximum(0, -(-lengths // self._limits.page_size) - table.page_count[slots])
        total = int(need.sum())
        if not total:
            return True
        pages = self._cache.take(total, np.repeat(slots, need).astype(np.int32))
        if pages is None:
            return False
        for slot, part in zip(slots.tolist(), np.split(pages, np.cumsum(need)[:-1]), strict=True):
            if len(part):
                table.add_row_pages(slot, part)
        return True

    def _shrink(self, slots: np.ndarray, lengths: np.ndarray) -> None:
        """Give back what rows of these lengths have no use for."""
        keep, table = -(-lengths // self._limits.page_size), self._table
        for row in np.flatnonzero(table.page_count[slots] > keep).tolist():
            slot = int(slots[row])
            self._cache.pool.release(table.drop_pages(slot, int(keep[row])), slot)

    def _drafts(self, slots: np.ndarray, lengths: np.ndarray, counts: np.ndarray, tokens: np.ndarray) -> Drafts:
        table, drawn = self._table, counts + 1
        rows = np.repeat(np.arange(len(slots)), drawn)
        offsets = np.arange(len(rows), dtype=np.int32) - np.repeat(np.cumsum(drawn) - drawn, drawn).astype(np.int32)
        return Drafts(slots, table.owner[slots], table.generation[slots], table.flags[slots], lengths, counts, tokens,
                      rows, offsets)

    def _guarded(self, call: Callable[[], Any]) -> Any:
        """What a call of the drafter gives; None, and no more speculation, when it fails."""
        if self.broken:
            return None
        try:
            return call()
        except Exception as error:
            self.broken = f"the drafter {self.name} failed: {said(error) or type(error).__name__}"
            log.exception("speculation ends, requests go on without it: %s", self.broken)
            return None
