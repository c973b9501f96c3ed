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
from ..scheduler.plans import Chunk, Drafts, Plan, drafts_of
from ..scheduler.request import Request
from ..scheduler.table import MASKED, RequestTable
from .branches import first_rows, fitting, longest, most_pages, place
from .contract import Drafter, Proposals, View, Ways
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
    branches: further ways to go on that are drafted for a request at most.  step_rows: as step_tokens, of rows.
    """

    name: str
    drafter: Drafter
    tokens: int
    adaptive: bool = False
    ask: Callable[[Callable[[], bytes]], bytes] = lambda read: read()
    step_tokens: int = 0
    on_device: bool = False
    branches: int = 0
    step_rows: int = 0


class Speculation:
    """The drafts of one scheduler."""

    def __init__(self, drafting: Drafting, table: RequestTable, cache: CacheManager, limits: Limits, masks: Masks):
        self.name, self.drafter, self._ask = drafting.name, drafting.drafter, drafting.ask
        self._step_tokens, self._step_rows = drafting.step_tokens, drafting.step_rows
        self._on_device, self._branches = drafting.on_device, drafting.branches
        table.widen(most_pages(drafting.branches, drafting.tokens, limits.page_size))
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
        requests = len(plan.decode) + (0 if plan.drafts is None else int(np.count_nonzero(plan.drafts.shifts == 0)))
        if self._modes not in (0, MODES) or plan.chunks or not requests:
            return  # between the two ways to go on a step takes longer than it does
        drafted = 0 if plan.drafts is None else len(plan.drafts.tokens)
        tokens = len(plan.decode) + (self._given if drafted else 0)
        self.lengths.stepped(requests, drafted, tokens, seconds, self._modes == MODES)

    def plan(self, decode: np.ndarray, lengths: np.ndarray,
             chunks: list[Chunk]) -> tuple[Drafts | None, np.ndarray, np.ndarray]:
        """(drafts, slots, lengths): the drafts of some decoding rows, and the rows that are left. chunks: of the step.
        """
        none = None, decode, lengths
        waits, self._waits = self._waits, False
        self._modes = (self._modes << 1 | waits) & MODES
        self._masks.forget_walks()  # of a step that could not be launched
        if not len(decode) or self.broken:
            return none
        others = len(decode) + sum([c.size for c in chunks])
        most = self._most(decode, lengths, others)
        rows = np.flatnonzero(most)
        if not len(rows):
            return none
        self._modes |= 1
        slots, most = decode[rows], most[rows]
        if self._on_device and not self._grow(slots, lengths[rows] + most):
            return none
        spare = others, len(decode) + len(chunks)
        told = unpack_ids(self._ask(lambda: self._proposed(slots, lengths[rows], most, spare)))
        counts, tokens, owners = self._unpacked(told, len(slots))
        ways = longest(Ways(counts, tokens, owners), len(slots))
        self.lengths.asked(slots, ways)
        if self._on_device:
            self._shrink(slots, lengths[rows] + ways)
        if not len(tokens):
            return none
        drafts = self._drafts(slots, lengths[rows], ways, Ways(counts[counts > 0], tokens, owners[counts > 0]))
        if drafts is None:
            self._masks.forget_walks()
            return none
        left = np.ones(len(decode), bool)
        left[rows[ways > 0]] = False
        return drafts, decode[left], lengths[left]

    def count(self, drafts: Drafts, counts: np.ndarray, accepted: np.ndarray) -> None:
        """Of so many drafted tokens of each row so many were accepted, before any of these requests ends by them."""
        alive = self._table.generation[drafts.slots] == drafts.generations
        slots, counts, accepted = drafts.slots[alive], counts[alive], accepted[alive]
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

    def _proposed(self, slots: np.ndarray, lengths: np.ndarray, most: np.ndarray, others: tuple[int, int]) -> bytes:
        """Counts, then tokens, of what the drafter proposes and grammars allow; nothing where nothing is left. With
        branches the number of chains and the owner of each come first. others: tokens and rows of the step without."""
        table = self._table
        requests = table.owner[slots].tolist()
        view = View(slots, lengths, most.astype(np.int32), table.tokens, table.pages, [r.domain for r in requests])
        proposals = self._guarded(lambda: self._checked(self.drafter.propose(view), view))
        if proposals is None or not len(proposals.tokens):
            return b""
        if self._branches:
            proposals = self._fitting(proposals, slots, lengths, *others)
        if (table.flags[slots] & MASKED).any():
            proposals = self._allowed([requests[i] for i in proposals.owners.tolist()], proposals)
        if not proposals.counts.any():
            return b""
        head = [[len(proposals.counts)], proposals.owners] if self._branches else []
        return pack_ids(np.concatenate([*head, proposals.counts, proposals.tokens]))

    def _unpacked(self, told: np.ndarray, requests: int) -> Ways:
        """What `_proposed` has packed, of so many requests."""
        if not len(told) or not self._branches:
            counts = told[:requests] if len(told) else np.zeros(requests, np.int32)
            return Ways(counts, told[requests:], np.arange(requests))
        owners, counts, tokens = np.split(told[1:], [told[0], 2 * told[0]])
        return Ways(counts, tokens, owners)

    def _checked(self, proposals: Proposals | Ways, view: View) -> Ways:
        """What a drafter gives, or ValueError where it is not what was asked for."""
        requests = len(view.most)
        owners = np.asarray(proposals.owners) if isinstance(proposals, Ways) else np.arange(requests)
        counts, tokens = (np.asarray(part) for part in proposals[:2])
        if (owners.ndim != 1 or (np.diff(owners) < 0).any() or not ((owners >= 0) & (owners < requests)).all()
                or np.bincount(owners, minlength=1).max() > 1 + self._branches):
            raise ValueError(f"it proposes chains for the requests {owners.tolist()} where each of {requests} may have "
                             f"{1 + self._branches}, in their order")
        if counts.shape != owners.shape or (counts < 0).any() or (counts > view.most[owners]).any():
            raise ValueError(f"it proposes {counts.tolist()} tokens where at most {view.most.tolist()} are wanted")
        if tokens.shape != (counts.sum(),):
            raise ValueError(f"it proposes {tokens.shape} tokens and counts {counts.sum()}")
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < self._limits.vocab_size:
            raise ValueError(f"it proposes a token outside the vocabulary of {self._limits.vocab_size}")
        return Ways(counts.astype(np.int32), tokens.astype(np.int32), owners)

    def _fitting(self, proposals: Ways, slots: np.ndarray, lengths: np.ndarray, tokens: int,
                 rows: int) -> Ways:
        """The chains for which there are tokens, rows and free pages. tokens, rows: of the step without drafts."""
        size, first = self._limits.page_size, int(proposals.counts[first_rows(proposals.owners)].sum())
        held = self._table.page_count[slots] * size
        need = np.maximum(0, -(-(lengths + longest(proposals, len(slots)) - held) // size))
        return fitting(proposals, lengths, size, (min(ROWS, self._step_tokens - tokens) if self._step_tokens else ROWS)
                       - first, self._step_rows - rows if self._step_rows else ROWS,
                       self._cache.pool.free - int(need.sum()) - rows)

    def _allowed(self, requests: list[Any], proposals: Ways) -> Ways:
        """The drafts as far as grammars allow them. requests: of each."""
        counts, drafts = proposals.counts.copy(), np.split(proposals.tokens, np.cumsum(proposals.counts)[:-1])
        for i, request in enumerate(requests):
            if request.matcher is not None and counts[i]:
                counts[i] = self._masks.walk(request, drafts[i].tolist())
        return Ways(counts, np.concatenate([draft[:count] for draft, count in zip(drafts, counts, strict=True)]),
                         proposals.owners)

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

    def _drafts(self, slots: np.ndarray, lengths: np.ndarray, ways: np.ndarray, chains: Ways) -> Drafts | None:
        """The rows of these chains, with pages; None, and none taken, if there are too few. ways: the longest each."""
        if not self._grow(slots, lengths + ways):
            return None
        table, rows = self._table, slots[chains.owners]
        placed = place(table, self._cache, rows, lengths[chains.owners], chains.counts)
        if placed is None:
            self._shrink(slots, lengths)
            return None
        return drafts_of(rows, table.owner[rows], table.generation[rows], table.flags[rows], lengths[chains.owners],
                         chains.counts, chains.tokens, *placed)

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
