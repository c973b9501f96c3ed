"""The page pool: which pages are free, and who owns each of the others.

Invariants, checked by identity: every page has one owner; free pages are on the free list exactly once; a page's
generation is the number of its last release (they begin anew after 4 billion), the same for no other, so a stale handle
is told from a live one. Page 0 is nobody's: padding goes there.

Order of reuse: the free list is a stack. What came back last goes out first, and of one release its last page: of a
request that ends the partial page first, then full ones that never were cached, tails before heads. Cached pages are
not on the list: they are evicted once it is empty, tails before heads too.

Memory: 12 bytes a page. Every call is a fixed number of numpy operations, whatever the number of pages; a few are given
back one by one, which costs less than these do.
"""
from __future__ import annotations

import logging
import sys

import numpy as np

log = logging.getLogger(__name__)

FREE, TREE, TRANSFER, SESSION, QUARANTINE = 0, -1, -2, -3, -4
_FEW = 8    # pages up to which one by one is faster
_MANY = 64  # pages from which on it pays to look whether they follow each other
_NAMES = {FREE: "free", TREE: "tree", TRANSFER: "transfer", SESSION: "session", QUARANTINE: "quarantine"}


def owner_name(owner: int) -> str:
    """Words for an owner: positive numbers are requests, by their sequence slot."""
    return _NAMES.get(owner, f"request in slot {owner}")


def _all_are(values: np.ndarray, wanted: np.ndarray | int) -> bool:
    """Is each of `values` (of four bytes each) the one wanted? A few are compared thrice as fast as bytes."""
    if len(values) > 2048:
        return not np.count_nonzero(values != wanted)
    if isinstance(wanted, np.ndarray):
        return values.tobytes() == wanted.tobytes()
    return values.tobytes() == int(wanted).to_bytes(4, sys.byteorder, signed=True) * len(values)


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
        self.generation, self._released = np.zeros(total, np.uint32), 0
        self._all_free(total)

    def shrink(self, total: int) -> None:
        """Fewer pages, in new memory: what was under quarantine is free too. `OwnershipError` while any is owned."""
        owned = np.flatnonzero((self.owner != FREE) & (self.owner != QUARANTINE))
        if len(owned) or not 2 <= total <= self.total:
            raise OwnershipError(f"from {self.total} to {total} pages while {len(owned)} are owned, such as "
                                 + ", ".join(f"{page} by {owner_name(self.owner[page])}" for page in owned[:3]))
        self.generation = np.full(total, self._numbers(1)[0], np.uint32)
        self._all_free(total)

    def _all_free(self, total: int) -> None:
        self.total, self._top, self.quarantined = total, total - 1, 0
        self.owner = np.full(total, FREE, np.int32)
        self._free = np.arange(total - 1, 0, -1, dtype=np.int32)
        self._each = [memoryview(column) for column in (self.owner, self.generation, self._free)]

    @property
    def free(self) -> int:
        """Pages on the free list."""
        return self._top

    @property
    def capacity(self) -> int:
        """Pages that can be owned: all but page 0."""
        return self.total - 1

    def alloc(self, count: int, owner: int | np.ndarray) -> np.ndarray | None:
        """Take `count` pages for `owner` (or owners, int32 [count]): int32 [count], or None, and nothing taken, when
        fewer are free."""
        top = self._top
        if count > top:
            return None
        pages = self._free[top - count:top][::-1].copy()
        at = self._index(pages)
        self._top = top - count
        if np.count_nonzero(self.owner[at]):  # FREE is 0
            return self._alloc_again(pages, owner)
        self.owner[at] = owner
        return pages

    def _alloc_again(self, pages: np.ndarray, owner: int | np.ndarray) -> np.ndarray | None:
        """Some of these were on the free list though somebody owns them: they are kept out, and others taken."""
        count, owned = len(pages), self.owner[pages] != FREE
        try:
            self._violation(pages[owned], "allocated twice", FREE)
        finally:
            self._push(pages[~owned])
        return self.alloc(count, owner)

    def release(self, pages: np.ndarray, owner: int) -> None:
        """Give pages back. A page that `owner` does not own, or that is named twice, is a violation and stays out."""
        if len(pages) <= _FEW and self._release_few(pages.tolist(), owner):
            return
        pages, at = self._owned(pages, owner, "released")
        self.generation[at] = numbers = self._numbers(len(pages))
        if not isinstance(at, slice):
            found = self.generation[at]
            if not _all_are(found, numbers):  # of a page that is named twice the later number stays
                twice = np.unique(at[found != numbers])
                self._violation(twice, f"released twice in one call by {owner_name(owner)}", owner)
                pages = at = at[~np.isin(at, twice)]
        self.owner[at] = FREE
        self._push(pages)

    def _release_few(self, pages: list[int], owner: int) -> bool:
        """One by one. False, and nothing done, where a page is not `owner`'s or named twice, or numbers begin anew."""
        owners, generations, free = self._each
        top, number = self._top, self._released
        if len(set(pages)) < len(pages) or number + len(pages) >= 2**32:
            return False
        for page in pages:
            if owners[page] != owner:
                return False
        for page in pages:
            number += 1
            owners[page], generations[page], free[top] = FREE, number, page
            top += 1
        self._top, self._released = top, number
        return True

    def transfer(self, pages: np.ndarray, source: int, target: int) -> None:
        """Hand pages from one owner to another; their generation stays."""
        self.owner[self._owned(pages, source, "handed on")[1]] = target

    def check(self, pages: np.ndarray, generations: np.ndarray, owner: int) -> None:
        """Before a write or an adoption: the pages are still `owner`'s and of these generations."""
        pages, at = self._owned(pages, owner, "used")
        stale = self.generation[at] != np.asarray(generations, np.uint32)[:len(pages)]
        if stale.any():
            self._violation(pages[stale], "used with a stale generation", owner)

    def verify(self, tree: np.ndarray | list[int], held: dict[int, np.ndarray | list[int]]) -> int:
        """Conservation by identity: free + tree + held + quarantined is every page once, each with that owner.

        A quarantined page may still be named by whoever held it; returns how many are.
        """
        groups = [(FREE, self._free[:self._top]), (TREE, tree), *held.items()]
        pages = np.concatenate([np.asarray(group, np.intp) for _, group in groups])
        holders = np.repeat([owner for owner, _ in groups], [len(group) for _, group in groups])
        out = self.owner[pages] == QUARANTINE
        named, pages, holders = int(np.count_nonzero(out)), pages[~out], holders[~out]
        times = np.bincount(pages, minlength=self.total)
        if times.max() > 1:
            page = int(times.argmax())
            first, second = holders[pages == page][:2]
            raise OwnershipError(f"page {page} is held by {owner_name(int(first))} and by {owner_name(int(second))}")
        wrong = np.flatnonzero(self.owner[pages] != holders)
        if len(wrong):
            page = int(pages[wrong[0]])
            raise OwnershipError(f"page {page} is held by {owner_name(int(holders[wrong[0]]))}, "
                                 f"the ledger says {owner_name(int(self.owner[page]))}")
        times[0] = 1 - times[0]  # nobody's: to be held is as wrong for it as to be lost
        lost = np.flatnonzero((times == 0) & (self.owner != QUARANTINE))
        if len(lost):
            raise OwnershipError(f"{len(lost)} pages have no holder, such as {lost[:8].tolist()}")
        return named

    def _owned(self, pages: np.ndarray, owner: int, done: str) -> tuple[np.ndarray, np.ndarray | slice]:
        """Those of `pages` that `owner` owns, and as an index; the others are a violation."""
        at = self._index(pages)
        owners = self.owner[at]
        if not _all_are(owners, owner):
            pages, wrong = np.asarray(pages, np.intp), owners != owner
            strange = pages[wrong & (owners != QUARANTINE)]  # one under quarantine may still be named by its holder
            if len(strange):
                self._violation(strange, f"{done} by {owner_name(owner)}", owner)
            pages = at = pages[~wrong]
        return pages, at

    def _index(self, pages: np.ndarray) -> np.ndarray | slice:
        """What picks these pages out of a column: a slice where many follow each other up or down, which is several
        times as fast."""
        count = len(pages)
        if count >= _MANY:
            first, last = int(pages[0]), int(pages[-1])
            step = 1 if last > first else -1
            if last - first == step * (count - 1) and min(first, last) > 0 and max(first, last) < self.total \
                    and _all_are(pages, np.arange(first, last + step, step, np.int32)):
                return slice(first, last + step, step)
        return np.asarray(pages, np.intp)  # indexing makes one of it each time otherwise

    def _numbers(self, count: int) -> np.ndarray:
        """The next `count` numbers of releases, uint32."""
        first = self._released + 1 if self._released + count < 2**32 else 1
        self._released = first + count - 1
        return np.arange(first, first + count, dtype=np.uint32)

    def _push(self, pages: np.ndarray) -> None:
        top = self._top + len(pages)
        self._free[self._top:top] = pages
        self._top = top

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
        self.quarantined = int(np.count_nonzero(self.owner == QUARANTINE))
