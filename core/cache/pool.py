"""The page pool: which pages are free, and who owns each of the others.

Invariants, checked by identity: every page has one owner; free pages are on the free list exactly once; a page's
generation grows with each release, so a stale handle is told from a live one. Page 0 is nobody's: padding goes there.
"""
from __future__ import annotations

import logging
from collections.abc import Iterable

import numpy as np

log = logging.getLogger(__name__)

FREE, TREE, TRANSFER, SESSION, QUARANTINE = 0, -1, -2, -3, -4
_NAMES = {FREE: "free", TREE: "tree", TRANSFER: "transfer", SESSION: "session", QUARANTINE: "quarantine"}


def owner_name(owner: int) -> str:
    """Words for an owner: positive numbers are requests, by their sequence slot."""
    return _NAMES.get(owner, f"request in slot {owner}")


class OwnershipError(AssertionError):
    """A page used by someone who does not own it; the message names the page and both owners."""


class PagePool:
    """Pages 1 .. total - 1, handed out and taken back by owner.

    strict: raise `OwnershipError` on a violation (tests). Otherwise report it, put the page under quarantine and go on.
    """

    def __init__(self, total: int, strict: bool = True):
        if total < 2:
            raise ValueError(f"a pool needs at least 2 pages (page 0 is nobody's), got {total}")
        self.strict, self.violations = strict, 0
        self.generation = np.zeros(total, np.uint32)
        self._all_free(total)

    def shrink(self, total: int) -> None:
        """Fewer pages, in new memory: what was under quarantine is free too. `OwnershipError` while any is owned."""
        owned = np.flatnonzero((self.owner != FREE) & (self.owner != QUARANTINE))
        if len(owned) or not 2 <= total <= self.total:
            raise OwnershipError(f"from {self.total} to {total} pages while {len(owned)} are owned, such as "
                                 + ", ".join(f"{page} by {owner_name(self.owner[page])}" for page in owned[:3]))
        self.generation = self.generation[:total] + np.uint32(1)
        self._all_free(total)

    def _all_free(self, total: int) -> None:
        self.total, self._top = total, total - 1
        self.owner = np.full(total, FREE, np.int32)
        self._free = np.arange(total - 1, 0, -1, dtype=np.int32)

    @property
    def free(self) -> int:
        """Pages on the free list."""
        return self._top

    @property
    def capacity(self) -> int:
        """Pages that can be owned: all but page 0."""
        return self.total - 1

    @property
    def quarantined(self) -> int:
        return int(np.count_nonzero(self.owner == QUARANTINE))

    def alloc(self, count: int, owner: int) -> np.ndarray | None:
        """Take `count` pages for `owner`: int32 [count], or None (and nothing taken) when fewer are free."""
        if count > self._top:
            return None
        pages = self._free[self._top - count:self._top][::-1].copy()
        self._top -= count
        bad = self.owner[pages] != FREE
        if bad.any():
            self._violation(pages[bad], "allocated twice", FREE)
            pages = pages[~bad]
            more = self.alloc(count - len(pages), owner)
            if more is None:
                self._push(pages)
                return None
            self.owner[pages] = owner
            return np.concatenate([pages, more])
        self.owner[pages] = owner
        return pages

    def release(self, pages: np.ndarray, owner: int) -> None:
        """Give pages back. A page that `owner` does not own, or that is named twice, is a violation and stays out."""
        pages = np.asarray(pages, np.int32)
        if len(pages) > 1 and len(np.unique(pages)) != len(pages):
            values, counts = np.unique(pages, return_counts=True)
            self._violation(values[counts > 1], f"released twice in one call by {owner_name(owner)}", owner)
            pages = values[counts == 1]
        pages = self._owned(pages, owner, "released")
        self.owner[pages] = FREE
        self.generation[pages] += 1
        self._push(pages)

    def transfer(self, pages: np.ndarray, source: int, target: int) -> None:
        """Hand pages from one owner to another; their generation stays."""
        pages = self._owned(np.asarray(pages, np.int32), source, f"handed to {owner_name(target)}")
        self.owner[pages] = target

    def check(self, pages: np.ndarray, generations: np.ndarray, owner: int) -> None:
        """Before a write or an adoption: the pages are still `owner`'s and of these generations."""
        pages = self._owned(np.asarray(pages, np.int32), owner, "used")
        stale = self.generation[pages] != np.asarray(generations, np.uint32)[:len(pages)]
        if stale.any():
            self._violation(pages[stale], "used with a stale generation", owner)

    def verify(self, tree: Iterable[int], held: dict[int, Iterable[int]]) -> int:
        """Conservation by identity: free + tree + held + quarantined is every page once, each with that owner.

        A quarantined page may still be named by whoever held it; returns how many are.
        """
        seen: dict[int, int] = {}
        named = 0
        groups = [(FREE, self._free[:self._top].tolist()), (TREE, list(tree)),
                  (QUARANTINE, np.flatnonzero(self.owner == QUARANTINE).tolist())]
        groups += [(slot, [int(p) for p in pages]) for slot, pages in held.items()]
        for owner, pages in groups:
            for page in pages:
                if owner != QUARANTINE and self.owner[page] == QUARANTINE:
                    named += 1
                    continue
                if page in seen:
                    raise OwnershipError(f"page {page} is held by {owner_name(seen[page])} and by {owner_name(owner)}")
                if self.owner[page] != owner:
                    raise OwnershipError(f"page {page} is held by {owner_name(owner)}, "
                                         f"the ledger says {owner_name(int(self.owner[page]))}")
                seen[page] = owner
        if len(seen) != self.capacity or 0 in seen:
            lost = sorted(set(range(1, self.total)) - set(seen))[:8]
            raise OwnershipError(f"{self.capacity - len(seen)} pages have no holder, such as {lost}")
        return named

    def _owned(self, pages: np.ndarray, owner: int, verb: str) -> np.ndarray:
        wrong = self.owner[pages] != owner
        if wrong.any():
            self._violation(pages[wrong], f"{verb} by {owner_name(owner)}", owner)
            return pages[~wrong]
        return pages

    def _push(self, pages: np.ndarray) -> None:
        count = len(pages)
        self._free[self._top:self._top + count] = pages[::-1]
        self._top += count

    def _violation(self, pages: np.ndarray, what: str, claimed: int) -> None:
        page = int(pages[0])
        message = (f"page {page} (generation {int(self.generation[page])}) {what}: "
                   f"its owner is {owner_name(int(self.owner[page]))}, not {owner_name(claimed)}")
        if self.strict:
            raise OwnershipError(message)
        self.violations += len(pages)
        log.error("%s; quarantined, %d pages in all", message, len(pages))
        # A page that is on the free list stays there under its FREE owner; any other is kept out of use.
        pages = pages[self.owner[pages] != FREE]
        self.owner[pages] = QUARANTINE
