"""The page pool: who owns what, strictly in tests and forgivingly in production."""
from __future__ import annotations

import logging

import numpy as np
import pytest
from isthmus.core.cache.manager import CacheManager
from isthmus.core.cache.pool import FREE, QUARANTINE, TREE, OwnershipError, PagePool, owner_name


def pages(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def test_pages_come_in_order_and_page_0_never():
    pool = PagePool(9)
    assert (pool.total, pool.capacity, pool.free) == (9, 8, 8)
    first = pool.alloc(3, owner=1)
    assert first.tolist() == [1, 2, 3] and first.dtype == np.int32
    assert pool.alloc(5, owner=2).tolist() == [4, 5, 6, 7, 8] and pool.free == 0
    assert pool.owner.tolist() == [0, 1, 1, 1, 2, 2, 2, 2, 2]


def test_too_many_takes_nothing():
    pool = PagePool(9)
    pool.alloc(3, 1)
    assert pool.alloc(6, 2) is None and pool.free == 5 and not (pool.owner == 2).any()
    assert pool.alloc(0, 2).tolist() == [] and pool.free == 5


def test_release_bumps_the_generation_and_the_page_comes_back_first():
    pool = PagePool(5)
    taken = pool.alloc(2, 1)
    pool.release(taken, 1)
    assert pool.free == 4 and pool.generation.tolist() == [0, 1, 2, 0, 0]
    assert pool.alloc(4, 2).tolist() == [2, 1, 3, 4]  # the tail before the head


def test_pages_for_several_owners_in_one_call():
    pool = PagePool(6)
    assert pool.alloc(3, np.array([7, 8, 9], np.int32)).tolist() == [1, 2, 3]
    assert pool.owner.tolist() == [0, 7, 8, 9, 0, 0]


def test_numbers_of_releases_begin_anew_and_stay_apart():
    pool = PagePool(6)
    pool._released = 2**32 - 3
    pool.release(pool.alloc(2, 1), 1)
    assert pool.generation.tolist() == [0, 2**32 - 2, 2**32 - 1, 0, 0, 0]
    pool.release(pool.alloc(3, 1), 1)
    assert sorted(pool.generation.tolist()) == [0, 0, 0, 1, 2, 3]


@pytest.mark.parametrize("order", [slice(None), slice(None, None, -1)], ids=["up", "down"])
@pytest.mark.parametrize("break_at", [None, 0, 300, 598])
def test_many_pages_in_a_row_or_not_are_taken_alike(order, break_at):
    """Where they follow each other they are found by a slice, to the first and the last page that there is."""
    pool, plain = PagePool(601), PagePool(601)
    taken = pool.alloc(600, 1)[order].copy()
    if break_at is not None:
        taken[[break_at, break_at + 1]] = taken[[break_at + 1, break_at]]
    plain.alloc(600, 1)
    pool.transfer(taken, 1, TREE)
    assert (pool.owner[1:] == TREE).all() and pool.owner[0] == FREE
    pool.check(taken, pool.generation[taken], TREE)
    pool.release(taken, TREE)
    for i in range(0, 600, 100):  # few at a time are never looked at so
        plain.release(taken[i:i + 100], 1)
    assert pool.generation.tolist() == plain.generation.tolist()
    assert pool._free[:600].tolist() == plain._free[:600].tolist()
    assert pool.alloc(600, 2).tolist() == taken[::-1].tolist() and (pool.owner[1:] == 2).all()


def test_many_pages_in_a_row_are_checked_each():
    pool = PagePool(1201)
    taken = pool.alloc(1000, 1)
    pool.transfer(taken[500:501], 1, 2)
    for call in (lambda: pool.release(taken, 1), lambda: pool.transfer(taken, 1, TREE),
                 lambda: pool.check(taken, pool.generation[taken], 1)):
        with pytest.raises(OwnershipError, match=f"page {taken[500]} .*request in slot 2, not request in slot 1"):
            call()
    with pytest.raises(OwnershipError, match="stale generation"):
        pool.check(taken[:500], pool.generation[taken[:500]] + 1, 1)
    with pytest.raises(IndexError):
        pool.transfer(np.arange(1, 1300, dtype=np.int32), 1, TREE)
    pool.transfer(taken[500:501], 2, 1)
    with pytest.raises(OwnershipError, match="page 0 "):
        pool.transfer(np.arange(600, -1, -1, dtype=np.int32), 1, TREE)


@pytest.mark.parametrize("count", [3, 5000])
def test_one_wrong_page_among_few_or_many_is_found(count):
    pool = PagePool(count + 2)
    taken, other = pool.alloc(count, 1), pool.alloc(1, 2)
    for wrong in (np.append(taken, other), np.append(other, taken)):
        with pytest.raises(OwnershipError, match="request in slot 2, not request in slot 1"):
            pool.transfer(wrong, 1, TREE)
    with pytest.raises(OwnershipError, match=f"page {taken[-1]} .* released twice"):
        pool.release(np.append(taken, taken[-1]), 1)
    pool.transfer(taken, 1, TREE)
    pool.release(taken, TREE)
    assert pool.free == count


@pytest.mark.parametrize("count", [0, 1, 3, 8])
def test_few_pages_come_back_one_by_one_as_many_do_at_once(count, monkeypatch):
    pool, plain = PagePool(20), PagePool(20)
    pool._released = plain._released = 2**32 - 12    # and where the numbers of releases begin anew
    for _ in range(4):
        some = pool.alloc(8, 1)[::-1][:count]
        assert some.tolist() == plain.alloc(8, 1)[::-1][:count].tolist()
        pool.release(some, 1)
        with monkeypatch.context() as patch:
            patch.setattr("isthmus.core.cache.pool._FEW", -1)
            plain.release(some, 1)
        rest = np.flatnonzero(pool.owner == 1).astype(np.int32)
        pool.transfer(rest, 1, TREE)
        plain.transfer(rest, 1, TREE)
        for left, right in ((pool.owner, plain.owner), (pool.generation, plain.generation), (pool._free, plain._free)):
            assert left.tolist() == right.tolist()
        assert (pool.free, pool._released) == (plain.free, plain._released)
        pool.release(rest, TREE)
        plain.release(rest, TREE)


def test_few_pages_come_back_to_a_pool_that_has_shrunk():
    pool = PagePool(20)
    pool.shrink(6)
    pool.release(pool.alloc(4, 1), 1)
    assert pool.free == 5 and pool.alloc(5, 1).tolist() == [4, 3, 2, 1, 5] and pool.owner.tolist() == [0] + [1] * 5


def test_transfer_keeps_the_generation():
    pool = PagePool(5)
    taken = pool.alloc(2, 1)
    pool.transfer(taken, 1, TREE)
    assert pool.owner[taken].tolist() == [TREE, TREE] and not pool.generation.any()
    pool.verify([1, 2], {})


@pytest.mark.parametrize(("call", "message"), [
    (lambda pool: pool.release(pages(1), 2),
     r"page 1 \(generation 0\) released by request in slot 2: its owner is request in slot 1, not request in slot 2"),
    (lambda pool: pool.release(pages(3), 1), r"page 3 .* released by request in slot 1: its owner is free"),
    (lambda pool: pool.release(pages(1, 1), 1), r"page 1 .* released twice in one call by request in slot 1"),
    (lambda pool: pool.transfer(pages(1), TREE, 1),
     r"page 1 .* handed on by tree: its owner is request in slot 1, not tree"),
    (lambda pool: pool.check(pages(2), pages(0), 2), r"page 2 .* used by request in slot 2"),
    (lambda pool: pool.check(pages(1), pages(7), 1), r"page 1 \(generation 0\) used with a stale generation"),
])
def test_violations_name_the_page_and_both_owners(call, message):
    pool = PagePool(5)
    pool.alloc(2, 1)
    with pytest.raises(OwnershipError, match=message):
        call(pool)
    pool.verify([], {1: [1, 2]})  # a refusal changes nothing


def test_a_second_release_is_an_error_not_a_second_entry():
    pool = PagePool(9)
    taken = pool.alloc(3, 1)
    pool.release(taken, 1)
    with pytest.raises(OwnershipError, match="released by request in slot 1: its owner is free"):
        pool.release(taken[:1], 1)
    assert pool.free == 8 and sorted(pool.alloc(8, 1).tolist()) == list(range(1, 9))


def test_a_handle_of_an_earlier_life_is_stale():
    pool = PagePool(2)
    handle, generation = pool.alloc(1, 1), pool.generation[[1]]
    pool.check(handle, generation, 1)
    pool.release(handle, 1)
    assert pool.alloc(1, 1).tolist() == [1]  # the same page, the same owner
    with pytest.raises(OwnershipError, match="stale generation"):
        pool.check(handle, generation, 1)


@pytest.mark.parametrize(("tree", "held", "message"), [
    ([3], {1: [1, 2, 3]}, "page 3 is held by tree and by request in slot 1"),
    ([], {1: [1, 2]}, "1 pages have no holder, such as \\[3\\]"),
    ([1, 3], {1: [2]}, "page 1 is held by tree, the ledger says request in slot 1"),
    ([3], {1: [1], 2: [2]}, "page 2 is held by request in slot 2, the ledger says request in slot 1"),
    ([3, 4], {1: [1, 2]}, "page 4 is held by free and by tree"),
])
def test_conservation_is_by_identity(tree, held, message):
    pool = PagePool(6)
    pool.alloc(2, 1)
    pool.transfer(pool.alloc(1, 2), 2, TREE)
    pool.verify([3], {1: [1, 2]})
    with pytest.raises(OwnershipError, match=message):
        pool.verify(tree, held)


def test_conservation_sees_a_duplicated_free_page():
    pool = PagePool(5)
    pool.alloc(2, 1)
    pool._free[0] = pool._free[1]  # as many entries as before: a sum would not notice
    with pytest.raises(OwnershipError, match="held by free and by free"):
        pool.verify([], {1: [1, 2]})


def test_a_pool_without_pages_is_refused():
    with pytest.raises(ValueError, match="at least 2 pages .* got 1"):
        PagePool(1)


def test_owners_have_names():
    assert [owner_name(o) for o in (FREE, TREE, -2, -3, QUARANTINE, 7)] == [
        "free", "tree", "transfer", "session", "quarantine", "request in slot 7"]


# ---- production: report, quarantine, go on

def test_production_quarantines_a_page_released_by_a_stranger(caplog):
    pool = PagePool(6, strict=False)
    mine = pool.alloc(2, 1)
    with caplog.at_level(logging.ERROR):
        pool.release(pages(2, 3), 2)
    assert "page 2 (generation 0) released by request in slot 2: its owner is request in slot 1" in caplog.text
    assert "quarantined, 2 pages in all" in caplog.text
    assert (pool.violations, pool.quarantined, pool.free) == (2, 1, 3)  # page 3 was free and stays free
    pool.release(mine, 1)
    assert pool.quarantined == 1 and pool.free == 4 and pool.owner[2] == QUARANTINE
    pool.verify([], {})
    assert sorted(pool.alloc(4, 3).tolist()) == [1, 3, 4, 5] and pool.alloc(1, 3) is None


def test_production_quarantines_a_page_named_twice():
    pool = PagePool(6, strict=False)
    pool.alloc(3, 1)
    pool.release(pages(1, 2, 2, 3), 1)
    assert (pool.quarantined, pool.free, pool.violations) == (1, 4, 1)
    pool.verify([], {})


def test_production_never_hands_out_a_page_that_is_owned():
    pool = PagePool(6, strict=False)
    pool.alloc(2, 1)
    pool._free[pool._top - 1] = 1                  # page 1 is on the free list although it is owned; page 3 is lost
    assert pool.alloc(2, 2).tolist() == [4, 5] and pool.owner[1] == QUARANTINE
    assert pool.alloc(1, 2) is None


def test_production_cache_looks_again_when_free_pages_prove_to_be_owned():
    cache = CacheManager(6, 1, strict=False)
    tokens, row = np.array([7, 8], np.int32), np.zeros(4, np.int32)
    _, node = cache.acquire(tokens, b"")
    row[:2] = cache.take(2, 1)
    shared, node = cache.commit(tokens, row, 0, 1, b"", node)
    cache.release(row[:2], shared, 1, node)        # two pages in the tree, three free
    cache.pool.owner[4] = 9                        # the ledger and the free list part ways
    assert sorted(cache.take(3, 2).tolist()) == [2, 3, 5] and cache.pool.quarantined == 1
    assert cache.take(2, 3) is None and cache.take(1, 3).tolist() == [1]


def test_production_cache_goes_on_after_a_violation():
    cache = CacheManager(6, 1, strict=False)
    tokens = np.arange(3, dtype=np.int32)
    row = np.zeros(8, np.int32)
    _, node = cache.acquire(tokens, b"")
    row[:3] = cache.take(3, 1)
    cache.pool.release(row[1:2], 2)                # somebody else gives the second page back
    shared, node = cache.commit(tokens, row, 0, 1, b"", node)
    assert shared == 3
    cache.verify({})                               # the tree names the page, and it counts once, as quarantined
    cache.release(row[:3], shared, 1, node)
    cache.flush()
    assert (cache.pool.free, cache.pool.quarantined) == (4, 1)
    cache.verify({})
    assert sorted(cache.take(4, 3).tolist()) == [1, 3, 4, 5]


# ---- the order in which pages are used again

def test_the_partial_page_of_an_ended_request_is_used_first_then_its_uncached_ones_then_older_free_ones():
    cache = CacheManager(12, 4, strict=True)
    _, node = cache.acquire(b"", b"")
    row = cache.take(5, 1)
    assert row.tolist() == [1, 2, 3, 4, 5]                # 5 is its partial page
    shared, node = cache.commit(np.arange(8, dtype=np.int32), row, 0, 1, b"", node)
    cache.release(row, shared, 1, node)                   # 1 and 2 are cached; 3 and 4 are full and never were
    assert cache.take(6, 2).tolist() == [5, 4, 3, 6, 7, 8]


def test_cached_pages_are_used_last_tails_before_heads_least_recently_used_first():
    cache = CacheManager(9, 1, strict=True)
    for start in (10, 20):
        ids = np.arange(start, start + 3, dtype=np.int32)
        _, node = cache.acquire(ids, b"")
        row = cache.take(3, 1)
        shared, node = cache.commit(ids, row, 0, 1, b"", node)
        cache.release(row, shared, 1, node)
    assert cache.tree.pages().tolist() == [1, 2, 3, 4, 5, 6]
    assert cache.take(5, 2).tolist() == [3, 2, 1, 7, 8]   # free ones go with those that make up for the rest
    assert cache.take(3, 3).tolist() == [6, 5, 4]
