"""What the cache's operations may cost, in calls and copies rather than time: nothing loops over tokens or pages.

A call is a Python function entered or a C function called, as `sys.setprofile` tells. Times are in benchmarks/core.
"""
from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from isthmus.core.cache.events import CacheEvents
from isthmus.core.cache.manager import CacheManager
from isthmus.core.cache.pool import TREE, PagePool
from isthmus.core.cache.radix import RadixTree

COST = 5  # seconds


def calls(work: Callable[[], object]) -> int:
    """Calls that `work` makes, without those of a garbage collection that happens to come."""
    count, collects = 0, gc.isenabled()

    def profile(frame: object, event: str, arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.disable()
    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
        if collects:
            gc.enable()
    return count


def prompt(tokens: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).integers(0, 150_000, tokens, dtype=np.int32).tobytes()


def filled(tree: RadixTree, key: bytes, first: int = 1) -> bytes:
    tree.insert(key, np.arange(first, first + len(key) // tree.page_bytes, dtype=np.int32))
    return key


@pytest.mark.parametrize("operation", [
    lambda tree, key: tree.match(key),
    lambda tree, key: tree.peek(key),
    lambda tree, key: filled(tree, key),
    lambda tree, key: tree.match(key[:-4] + prompt(1, 9)),      # parts in the last page
    lambda tree, key: tree.match(prompt(len(key) // 4, 9)),     # nothing cached
    lambda tree, key: filled(tree, prompt(len(key) // 4, 9)),   # all new
    lambda tree, key: tree.evict(len(key) // tree.page_bytes),
], ids=["match", "peek", "insert again", "part late", "miss", "insert", "evict"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_prompt_of_32k_tokens_takes_as_many_calls_as_one_of_128(operation, page_size):
    counts = []
    for tokens in (128, 32_768):
        tree = RadixTree(page_size)
        key = filled(tree, prompt(tokens))
        counts.append(calls(lambda tree=tree, key=key: operation(tree, key)))
    assert counts[0] == counts[1] < 60


def test_the_pool_takes_as_many_calls_for_a_page_as_for_thousands():
    counts = []
    for pages in (8, 100, 5000):  # a few come back one by one, which must take no more
        pool = PagePool(6000)
        some: list[np.ndarray] = []
        counts.append([calls(lambda some=some, pool=pool, pages=pages: some.append(pool.alloc(pages, 1))),
                       calls(lambda some=some, pool=pool: pool.transfer(some[0], 1, TREE)),
                       calls(lambda some=some, pool=pool: pool.release(some[0], TREE))])
    for few, some, many in zip(*counts, strict=True):
        assert abs(some - many) <= 4 and few <= some < 30 > many  # many are compared in another way


def test_a_request_takes_the_same_calls_whatever_its_length():
    counts = []
    for tokens in (2048, 32_768):
        cache = CacheManager(5000, 16)
        cache.tree.listener = CacheEvents(5000, 16)
        key = prompt(tokens)
        ids = np.frombuffer(key, np.int32)

        def serve(cache=cache, key=key, ids=ids) -> None:
            pages, node = cache.acquire(key, b"", len(ids) - 1)
            row = np.concatenate([pages, cache.take(len(ids) // 16 - len(pages), 1)])
            shared, node = cache.commit(ids, row, len(pages), 1, b"", node)
            cache.release(row, shared, 1, node)
        counts.append([calls(serve), calls(serve)])  # new, then cached
    for short, long in zip(*counts, strict=True):
        assert abs(short - long) <= 8 and max(short, long) < 150


def test_each_node_of_a_path_adds_few_calls_to_a_match_and_none_to_a_lock_that_an_ancestor_has():
    tree, key, counts = RadixTree(1), prompt(400), {}
    for depth in (10, 20, 40):
        for end in range(10, depth * 10 + 1, 10):
            filled(tree, key[:end * 4], 1)
        counts[depth] = calls(lambda depth=depth: tree.match(key[:depth * 40]))
    assert counts[40] - counts[20] == 2 * (counts[20] - counts[10]) <= 60
    tree.lock(tree.match(key[:1560])[1])
    deepest = tree.match(key)[1]
    pages = tree.evictable
    assert calls(lambda: tree.lock(deepest)) < 5 and pages - tree.evictable == 10


def test_evicting_takes_as_many_calls_in_a_large_tree_as_in_a_small_one():
    counts = []
    for leaves in (100, 20_000):
        tree = RadixTree(1)
        for i in range(leaves):
            filled(tree, np.array([i, i, i, i], np.int32).tobytes(), 4 * i + 1)
        counts.append(calls(lambda tree=tree: tree.evict(64)))
    assert counts[0] == counts[1] < 16 * 25


def test_a_prompt_is_not_copied_to_be_looked_up():
    cache = CacheManager(5000, 16)
    key = prompt(32_768)
    filled(cache.tree, key)
    tracemalloc.start()
    try:
        cache.cached_tokens(key, b"", 32_767)
        pages, node = cache.acquire(key, b"", 32_767)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(pages) == 2047 and peak < 300_000  # a split copies the edge once, in two parts; the pages are 8 kB


def test_a_second_lookup_copies_nothing():
    cache = CacheManager(5000, 16)
    key = prompt(32_768)
    filled(cache.tree, key)
    cache.forget(cache.acquire(key, b"", 32_767)[1])
    tracemalloc.start()
    try:
        cache.cached_tokens(key, b"", 32_767)
        cache.acquire(key, b"", 32_767)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 30_000


def test_a_commit_copies_only_what_is_new():
    cache = CacheManager(5000, 16)
    ids = np.frombuffer(prompt(32_768), np.int32)
    row = cache.take(2048, 1)
    _, node = cache.acquire(b"", b"")
    shared, node = cache.commit(ids[:32_000], row, 0, 1, b"", node)
    tracemalloc.start()
    try:
        cache.commit(ids, row, shared, 1, b"", node)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 30_000


def test_the_ledger_is_verified_without_a_loop_over_pages():
    counts = []
    for pages in (100, 20_000):
        cache = CacheManager(pages + 1, 1)
        filled(cache.tree, prompt(pages // 2))
        cache.pool.transfer(cache.pool.alloc(pages // 2, 1), 1, TREE)
        held = {2: cache.pool.alloc(pages // 4, 2)}
        counts.append(calls(lambda cache=cache, held=held: cache.verify(held)))
    assert counts[0] == counts[1] < 150
