"""What the radix tree tells a listener, and a log of it in the terms of KV-cache routers: hashes of blocks.

The tree speaks of page numbers only, so that a listener costs a tuple a call and no listener one `is None`. A page
holds the same tokens for as long as it is in the tree: its hash is kept by its number, computed when a log is drained.
"""
from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from .node import ID_BYTES

if TYPE_CHECKING:
    from .radix import RadixTree


class CacheListener(Protocol):
    """Called by the tree as it changes, in order, on the scheduler's thread: an implementation only takes notes."""

    def stored(self, tokens: bytes, pages: bytes, before: bytes, domain: bytes) -> None:
        """Pages came in: int32 page numbers, their int32 tokens, their domain. before: pages whose last is the one
        before the first of them; empty when a prompt begins with them."""
        ...

    def removed(self, pages: bytes) -> None:
        """These pages (int32 numbers) went out, the last one first."""
        ...

    def cleared(self) -> None:
        """The tree is empty."""
        ...


class Stored(NamedTuple):
    """Blocks after the block `parent` (None: the first of a prompt). tokens: of all the blocks, int32 bytes."""

    hashes: list[int]
    parent: int | None
    tokens: bytes
    domain: bytes


class Removed(NamedTuple):
    """Blocks that are no longer cached."""

    hashes: list[int]


class Cleared(NamedTuple):
    """No block is cached."""


class CacheEvents:
    """A listener that keeps notes until `drain`. A block is a page; its hash covers its domain and all tokens up to it.

    Hashes are unsigned 64-bit numbers, a BLAKE2b chain: the same in every process, for the same page size.
    pages: as many as the pool has. limit: pages that notes may name, at least as many as the pool has; after more, and
    at first, `drain` tells the whole tree anew behind a `Cleared`.
    """

    def __init__(self, pages: int, page_size: int, limit: int = 65536):
        self._page_bytes, self._limit = page_size * ID_BYTES, max(limit, pages) * ID_BYTES
        self._hash = np.zeros(pages, np.uint64)
        self._notes: list[tuple[bytes, bytes, bytes, bytes] | bytes | None] = []
        self._noted, self._lost = 0, True

    def stored(self, tokens: bytes, pages: bytes, before: bytes, domain: bytes) -> None:
        self._noted += len(pages)
        if self._noted > self._limit:
            self._lose()
        elif not self._lost:
            self._notes.append((tokens, pages, before[-ID_BYTES:], domain))

    def removed(self, pages: bytes) -> None:
        self._noted += len(pages)
        if self._noted > self._limit:
            self._lose()
        elif not self._lost:
            self._notes.append(pages)

    def cleared(self) -> None:
        self._notes, self._noted, self._lost = [None], 0, False

    def drain(self, tree: RadixTree) -> list[Stored | Removed | Cleared]:
        """What happened since the last call, oldest first. `tree`: the one that is listened to."""
        if self._lost:
            self.cleared()
            tree.tell(self)
        notes, self._notes, self._noted = self._notes, [], 0
        return [self._event(note) for note in notes]

    def _lose(self) -> None:
        self._notes, self._lost = [], True

    def _event(self, note: tuple[bytes, bytes, bytes, bytes] | bytes | None) -> Stored | Removed | Cleared:
        if note is None:
            return Cleared()
        if isinstance(note, bytes):
            return Removed(self._hash[np.frombuffer(note, np.int32)].tolist())
        tokens, pages, before, domain = note
        parent = int(self._hash[np.frombuffer(before, np.int32)[0]]) if before else None
        hashes = block_hashes(tokens, self._page_bytes, parent, domain)
        self._hash[np.frombuffer(pages, np.int32)] = hashes
        return Stored(hashes.tolist(), parent, tokens, domain)


def block_hashes(tokens: bytes, page_bytes: int, parent: int | None, domain: bytes) -> np.ndarray:
    """uint64 [pages]: hashes of pages from that of the page before (None: the prompt begins) and their tokens."""
    last = blake2b(domain, digest_size=8).digest() if parent is None else parent.to_bytes(8, "little")
    hashes = []
    for start in range(0, len(tokens), page_bytes):
        last = blake2b(last + tokens[start:start + page_bytes], digest_size=8).digest()
        hashes.append(last)
    return np.frombuffer(b"".join(hashes), "<u8")
