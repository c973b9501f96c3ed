"""What the tree tells its listener: blocks by hash, as routers of KV caches keep them."""
from __future__ import annotations

import random

import numpy as np
from isthmus.core.cache.events import CacheEvents, Cleared, Removed, Stored, block_hashes
from isthmus.core.cache.radix import RadixTree


def key(tokens: list[int]) -> bytes:
    return np.array(tokens, np.int32).tobytes()


def listened(page_size: int, pages: int = 100, limit: int = 1000) -> tuple[RadixTree, CacheEvents]:
    tree = RadixTree(page_size)
    tree.listener = events = CacheEvents(pages, page_size, limit)
    assert events.drain(tree) == [Cleared()]
    return tree, events


def insert(tree: RadixTree, tokens: list[int], first: int, domain: bytes = b"") -> None:
    tree.insert(key(tokens), np.arange(first, first + len(tokens), dtype=np.int32), domain)


def test_blocks_are_stored_after_their_parent_and_removed_by_their_hashes():
    tree, events = listened(2)
    insert(tree, [1, 2, 3, 4], 10)
    insert(tree, [1, 2, 5, 6, 7], 20)                      # splits: nothing new but one block
    a, b, c = (block_hashes(key(t), 8, None, b"").tolist() for t in ([1, 2], [1, 2, 3, 4], [1, 2, 5, 6]))
    assert events.drain(tree) == [Stored(b, None, key([1, 2, 3, 4]), b""), Stored(c[1:], a[0], key([5, 6]), b"")]
    assert tree.match(key([1, 2, 3, 4]))[0] == 2 and events.drain(tree) == []
    tree.evict(1)
    assert events.drain(tree) == [Removed(c[1:])]
    tree.evict(9)
    assert events.drain(tree) == [Cleared()]


def test_hashes_are_the_same_everywhere_and_differ_by_domain():
    tokens = key([1, 2, 3, 4])
    plain, salted = block_hashes(tokens, 8, None, b""), block_hashes(tokens, 8, None, b"salt")
    assert plain.tolist() == [14340416249043421609, 14314149598557683587] and plain.dtype == np.uint64
    assert not set(plain.tolist()) & set(salted.tolist())
    assert block_hashes(tokens[8:], 8, int(plain[0]), b"").tolist() == plain[1:].tolist()


def test_a_late_listener_is_told_the_whole_tree_and_so_is_one_that_missed_something():
    tree = RadixTree(1)
    insert(tree, [1, 2, 3], 1)
    insert(tree, [1, 4], 7)
    insert(tree, [1], 9, b"x")
    tree.listener = events = CacheEvents(12, 1, 12)
    told = events.drain(tree)
    assert told[0] == Cleared() and len(told) == 5
    assert mirror(set(), told) == expected(tree, 4) and len(expected(tree, 4)) == 5
    tree.lock(tree.match(key([1]))[1])
    for _ in range(4):                                     # names more pages than the log may
        tree.evict(9)
        insert(tree, [1, 2, 3], 1)
    assert not events._notes
    assert mirror({1, 2}, events.drain(tree)) == expected(tree, 4)
    insert(tree, [1, 4, 5], 9)
    assert len(events.drain(tree)) == 1


def mirror(known: set[int], events: list) -> set[int]:
    """A router's view after these events; a block comes in behind its parent and once."""
    for event in events:
        if isinstance(event, Cleared):
            known = set()
        elif isinstance(event, Removed):
            assert known.issuperset(event.hashes)
            known = known - set(event.hashes)
        else:
            assert event.parent is None or event.parent in known
            assert not known & set(event.hashes)
            known = known | set(event.hashes)
    return known


def expected(tree: RadixTree, page_bytes: int) -> set[int]:
    """Hashes of all blocks, each from its whole path."""
    found: set[int] = set()
    for domain, root in tree._roots.items():
        stack = [(b"", root)]
        while stack:
            path, node = stack.pop()
            if node.parent is not None:
                path += node.edge
                found |= set(block_hashes(path, page_bytes, None, domain).tolist())
            stack += [(path, child) for child in node.children.values()]
    return found


def test_a_router_sees_what_is_cached_whatever_happens():
    draw, pages = random.Random(5), np.arange(1, 65, dtype=np.int32)
    tree, events = listened(2, pages=65)
    free, known = pages.tolist(), set()
    for step in range(600):
        tokens = [draw.randrange(2) for _ in range(draw.randrange(2, 16))]
        domain = draw.choice([b"", b"x"])
        need = len(tokens) // 2
        if need > len(free):
            free += tree.evict(draw.randrange(need, 40)).tolist()
        taken = np.array(free[:need], np.int32)
        found, _ = tree.insert(key(tokens), taken, domain)
        free = taken[:found].tolist() + free[need:]
        if step % 3 == 0:                                  # several operations between two looks
            known = mirror(known, events.drain(tree))
            assert known == expected(tree, 8)
