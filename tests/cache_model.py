"""The simplest cache that could be right, for cache_machine.py: a dictionary of prefixes and a list of free pages.

A prefix is (domain, its tokens, a whole number of pages) and stands for its last page.
"""
from __future__ import annotations

from dataclasses import dataclass

Prefix = tuple[bytes, tuple[int, ...]]


@dataclass
class Cached:
    """Its page, the requests that hold it, when the last of them let go."""

    page: int
    locks: int
    stamp: int = 0


class Model:
    """Exact in every page number: which are free and in which order, which are cached, which go next."""

    def __init__(self, pages: int, size: int):
        self.size, self.clock, self.released = size, 0, 0
        self.free, self.generation = list(range(pages - 1, 0, -1)), [0] * pages  # the last is taken first
        self.cached: dict[Prefix, Cached] = {}

    def prefixes(self, domain: bytes, tokens: list[int]) -> list[Prefix]:
        return [(domain, tuple(tokens[:i])) for i in range(self.size, len(tokens) + 1, self.size)]

    def found(self, prefixes: list[Prefix]) -> list[Prefix]:
        count = next((i for i, prefix in enumerate(prefixes) if prefix not in self.cached), len(prefixes))
        return prefixes[:count]

    def lock(self, prefixes: list[Prefix]) -> list[int]:
        for prefix in prefixes:
            self.cached[prefix].locks += 1
        return [self.cached[prefix].page for prefix in prefixes]

    def unlock(self, prefixes: list[Prefix]) -> None:
        self.clock += 1
        for held in (self.cached[prefix] for prefix in prefixes):
            held.locks -= 1
            held.stamp = held.stamp if held.locks else self.clock

    def evictable(self) -> int:
        return sum(not held.locks for held in self.cached.values())

    def leaves(self) -> list[Prefix]:
        """Prefixes that may go now: nobody holds them and nothing cached follows them."""
        inner = {(domain, tokens[:-self.size]) for domain, tokens in self.cached}
        return [prefix for prefix, held in self.cached.items() if not held.locks and prefix not in inner]

    def evict(self, victims: list[int] | None, count: int) -> list[int]:
        """Up to `count` pages, first to go first: the least recently used, or `victims` if these may go so."""
        gone = []
        while len(gone) < count and (leaves := self.leaves()):
            prefix = min(leaves, key=lambda leaf: self.cached[leaf].stamp)
            if victims is not None:
                page = victims[len(gone)] if len(gone) < len(victims) else 0
                assert page in [self.cached[leaf].page for leaf in leaves], f"page {page} may not go, or another must"
                prefix = next(leaf for leaf in leaves if self.cached[leaf].page == page)
            gone.append(self.cached.pop(prefix).page)
        self.release(gone[::-1])
        return gone

    def release(self, pages: list[int]) -> None:
        for page in pages:
            self.released += 1
            self.generation[page] = self.released
        self.free += pages

    def take(self, count: int) -> list[int]:
        return [self.free.pop() for _ in range(count)]
