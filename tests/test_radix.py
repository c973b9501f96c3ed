"""The radix tree: matching, splitting, locks, eviction order and domains, with exact pages."""
from __future__ import annotations

import numpy as np
import pytest
from isthmus.core.cache.manager import CacheManager
from isthmus.core.cache.radix import RadixTree

A, B = list(range(100, 112)), list(range(200, 212))  # 3 pages of 4 tokens each


def key(tokens: list[int]) -> bytes:
    return np.array(tokens, np.int32).tobytes()


def insert(tree: RadixTree, tokens: list[int], pages: range | list[int], domain: bytes = b"") -> int:
    return tree.insert(key(tokens), np.array(pages, np.int32), domain)[0]


def match(tree: RadixTree, tokens: list[int], domain: bytes = b"") -> list[int]:
    found, node = tree.match(key(tokens), domain)
    assert len(tree.path(node)) == found == tree.peek(key(tokens), domain)
    tree.check()
    return tree.path(node).tolist()


def test_only_whole_pages_match():
    tree = RadixTree(4)
    assert insert(tree, [*A, 1, 2], [1, 2, 3]) == 0        # two tokens over: no fourth page
    assert match(tree, A) == [1, 2, 3]
    assert match(tree, [*A, 9]) == [1, 2, 3]
    assert match(tree, A[:11]) == [1, 2]
    assert match(tree, A[:3]) == [] and match(tree, []) == [] and match(tree, B) == []


def test_an_edge_splits_where_prompts_part():
    tree = RadixTree(4)
    insert(tree, A, [1, 2, 3])
    assert insert(tree, A[:6] + B[:6], [7, 8, 9]) == 1     # they part inside the second page
    assert match(tree, A) == [1, 2, 3]
    assert match(tree, A[:6] + B[:6]) == [1, 8, 9]
    assert sorted(node.size for _, node in tree.nodes()) == [1, 2, 2]
    assert sorted(tree.pages().tolist()) == [1, 2, 3, 8, 9]


def test_a_duplicate_insert_keeps_the_first_pages():
    tree = RadixTree(4)
    insert(tree, A, range(1, 4))
    assert insert(tree, A + B, range(50, 56)) == 3
    assert match(tree, A + B) == [1, 2, 3, 53, 54, 55]
    assert sorted(tree.evict(1000).tolist()) == [1, 2, 3, 53, 54, 55]


def test_locked_pages_stay_and_are_evicted_once_after():
    tree = RadixTree(4)
    insert(tree, A, range(1, 4))
    insert(tree, A + B, range(1, 7))
    found, node = tree.match(key([*A, *B, 7]))
    assert found == 6
    tree.lock(node)
    assert (tree.evictable, tree.protected) == (0, 6)
    assert tree.evict(1000).tolist() == []
    tree.unlock(node)
    assert (tree.evictable, tree.protected) == (6, 0)
    assert sorted(tree.evict(1000).tolist()) == [1, 2, 3, 4, 5, 6]
    assert (tree.evictable, tree.protected) == (0, 0) and match(tree, A) == []


def test_a_split_under_a_lock_protects_both_halves():
    tree = RadixTree(4)
    insert(tree, A, [1, 2, 3])
    deep = tree.match(key(A))[1]
    tree.lock(deep)
    front = tree.match(key(A[:4]))[1]                      # splits the locked node after one page
    tree.check()
    assert (front.size, front.locks, deep.size, deep.locks) == (1, 1, 2, 1)
    assert (tree.evictable, tree.protected) == (0, 3) and tree.evict(9).tolist() == []
    tree.lock(front)
    tree.unlock(deep)
    assert (tree.evictable, tree.protected) == (2, 1)
    assert tree.evict(9).tolist() == [2, 3]
    tree.unlock(front)
    assert tree.evict(9).tolist() == [1]


def test_locks_are_counted():
    tree = RadixTree(1)
    insert(tree, [1, 2], [5, 6])
    node = tree.match(key([1, 2]))[1]
    tree.lock(node)
    tree.lock(node)
    tree.unlock(node)
    assert tree.evict(9).tolist() == []
    tree.unlock(node)
    with pytest.raises(AssertionError, match="unlock of a node of 2 pages that is not locked"):
        tree.unlock(node)
    assert tree.evict(9).tolist() == [5, 6]


def test_eviction_trims_the_tail_of_the_least_recently_used_leaf():
    tree = RadixTree(1)
    insert(tree, [1, 2, 3], [11, 12, 13])
    insert(tree, [4, 5], [14, 15])
    insert(tree, [6], [16])
    assert match(tree, [1, 2, 3]) == [11, 12, 13]          # now the most recently used
    assert tree.evict(1).tolist() == [15]
    assert match(tree, [4, 5]) == [14]                     # what is left of it was just used
    assert tree.evict(2).tolist() == [13, 16]              # the first to go is last
    assert match(tree, [1, 2, 3]) == [11, 12]
    assert sorted(tree.evict(9).tolist()) == [11, 12, 14]


def test_a_parent_goes_after_its_last_child():
    tree = RadixTree(1)
    insert(tree, [1, 2], [11, 12])
    insert(tree, [1, 3], [11, 13])
    assert tree.evict(2).tolist() == [13, 12] and tree.evictable == 1
    assert tree.evict(2).tolist() == [11]


def test_a_match_alone_keeps_its_leaf_in_the_order():
    tree = RadixTree(1)
    insert(tree, [1], [11])
    insert(tree, [2], [12])
    assert match(tree, [1]) == [11]
    assert tree.evict(9).tolist() == [11, 12]


def test_peek_is_no_use():
    tree = RadixTree(1)
    insert(tree, [1, 1], [11, 12])
    insert(tree, [2], [13])
    assert tree.peek(key([1, 5])) == 1 and tree.peek(key([1, 1])) == 2
    assert len(list(tree.nodes())) == 2                    # and splits nothing
    assert tree.evict(2).tolist() == [11, 12]


def test_domains_never_mix_and_leave_no_trace():
    tree = RadixTree(4)
    insert(tree, A, [1, 2, 3], b"one")
    insert(tree, A, [4, 5, 6], b"two")
    assert match(tree, A, b"one") == [1, 2, 3] and match(tree, A, b"two") == [4, 5, 6] and match(tree, A) == []
    for i in range(100):
        assert match(tree, A, str(i).encode()) == []
    assert set(tree._roots) == {b"one", b"two"}
    tree.evict(3)
    assert set(tree._roots) == {b"two"}


def test_ten_thousand_uses_do_not_grow_the_heap():
    tree = RadixTree(1)
    for i in range(20):
        insert(tree, [i], [i + 1])
    for i in range(10_000):
        tree.match(key([i % 20]))
    assert len(tree.policy._order) <= 20 and not tree.policy._bared
    assert tree.evict(99).tolist() == list(range(20, 0, -1))


def test_an_unknown_eviction_policy_names_those_there_are():
    with pytest.raises(ValueError, match="unknown eviction policy 'fifo'; there are: .*lru"):
        RadixTree(1, "fifo")


# ---- the cache manager

def test_a_request_finds_what_another_left():
    cache = CacheManager(9, 4, strict=True)
    row = np.zeros(8, np.int32)
    tokens = np.array(A, np.int32)
    _, node = cache.acquire(tokens, b"")
    row[:3] = cache.take(3, owner=1)
    shared, node = cache.commit(tokens[:9], row, 0, 1, b"", node)   # two full pages
    assert shared == 2 and cache.tree.protected == 2
    cache.verify({1: row[2:3]})
    cache.release(row[:3], shared, 1, node)
    assert cache.pool.free == 6 and cache.available == 8
    assert cache.cached_tokens(tokens, b"") == 8 and cache.cached_tokens(tokens, b"x") == 0
    pages, node = cache.acquire(tokens, b"")
    assert pages.tolist() == [1, 2] and cache.available == 6
    assert cache.take(7, 2) is None
    cache.forget(node)
    assert cache.take(7, 2).tolist() == [2, 3, 4, 5, 6, 7, 8]
    assert cache.evicted_pages == 1 and cache.tree.pages().tolist() == [1]


def test_duplicates_go_back_to_the_pool():
    cache = CacheManager(9, 1, strict=True)
    tokens, rows = np.array([5, 6], np.int32), [np.zeros(4, np.int32), np.zeros(4, np.int32)]
    nodes = [cache.acquire(tokens, b"")[1] for _ in rows]
    for owner, row in enumerate(rows, 1):
        row[:2] = cache.take(2, owner)
    _, first = cache.commit(tokens, rows[0], 0, 1, b"", nodes[0])
    shared, second = cache.commit(tokens, rows[1], 0, 2, b"", nodes[1])
    assert shared == 2 and rows[1][:2].tolist() == rows[0][:2].tolist() == [1, 2]
    assert cache.pool.free == 6 and second is first and first.locks == 2
    cache.verify({})


def test_a_cache_that_is_off_keeps_nothing():
    cache = CacheManager(9, 1, enabled=False, strict=True)
    tokens, row = np.array([5, 6], np.int32), np.zeros(4, np.int32)
    pages, node = cache.acquire(tokens, b"salt")
    row[:2] = cache.take(2, 1)
    assert len(pages) == 0 and cache.commit(tokens, row, 0, 1, b"salt", node) == (0, node)
    cache.release(row[:2], 0, 1, node)
    assert cache.pool.free == 8 and cache.cached_tokens(tokens, b"salt") == 0 and not cache.tree._roots
