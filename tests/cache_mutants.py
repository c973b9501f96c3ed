"""Seeded bugs of the cache, for test_cache_mutants.py."""
from __future__ import annotations

from isthmus.core.cache.events import CacheEvents
from isthmus.core.cache.eviction.lru import LeastRecentlyUsed
from isthmus.core.cache.manager import CacheManager
from isthmus.core.cache.pool import PagePool
from isthmus.core.cache.radix import RadixTree

from .mutants import Mutant

POOL = [
    Mutant("a page is handed out twice", PagePool, "alloc", "self._top = top - count",
           "self._top = top - max(1, count - 1)"),
    Mutant("one page twice and another lost, sums right", PagePool, "alloc", "self.owner[at] = owner\n    return pages",
           "self.owner[at] = owner\n    return pages[[-1, *range(1, count)]] if count else pages"),
    Mutant("heads before tails", PagePool, "alloc", "[::-1]", ""),
    Mutant("a release is pushed the other way round", PagePool, "_push", "= pages\n", "= pages[::-1]\n"),
    Mutant("a stranger's page is taken back", PagePool, "_owned", "not _all_are(owners, owner)", "False"),
    Mutant("a release keeps the generation", PagePool, "release", "self.generation[at] = numbers =", "numbers ="),
    Mutant("all pages of a release have one generation", PagePool, "_numbers",
           "np.arange(first, first + count, dtype", "np.full(count, first, dtype"),
    Mutant("a page released twice goes unnoticed", PagePool, "release", "not _all_are(found, numbers)", "False"),
    Mutant("a released page keeps its owner", PagePool, "release", "self.owner[at] = FREE", "pass"),
    Mutant("few pages are a stranger's", PagePool, "_release_few", "owners[page] != owner", "False"),
    Mutant("one of few pages is named twice", PagePool, "_release_few", "len(set(pages)) < len(pages)", "False"),
    Mutant("few pages have one generation", PagePool, "_release_few", "number += 1", "number = self._released + 1"),
    Mutant("few pages are pushed the other way round", PagePool, "_release_few", "for page in pages:\n        number",
           "for page in pages[::-1]:\n        number"),
    Mutant("few pages keep their owner", PagePool, "_release_few", "owners[page], generations[page], free[top] = FREE,",
           "generations[page], free[top] ="),
    Mutant("the generation is not compared", PagePool, "check", "if stale.any()", "if False"),
    Mutant("a transfer keeps the owner", PagePool, "transfer", "= target", "= source"),
]

TREE = [
    Mutant("a split drops the protection", RadixTree, "_split", "1 if node.locks else 0", "0"),
    Mutant("a split copies the lock count", RadixTree, "_split", "1 if node.locks else 0", "node.locks"),
    Mutant("a split keeps the old key", RadixTree, "_split", "front.children[node.key] =",
           "front.children[front.key] ="),
    Mutant("a split leaves the old child as the last", RadixTree, "_descend", "node.last = child", "pass"),
    Mutant("a split keeps the old size", RadixTree, "_split", "= node.size - front.size,", "= node.size,"),
    Mutant("a split keeps the old first page", RadixTree, "_split", ", node.edge[:self.page_bytes]\n", ", node.key\n"),
    Mutant("a child that is gone stays the last", RadixTree, "_remove", "parent.last = None", "pass"),
    Mutant("unlock forgets the parent", RadixTree, "unlock", "if locks:\n            break", "break"),
    Mutant("lock forgets the parent", RadixTree, "lock", "if locks:\n            break", "break"),
    Mutant("lock goes on to the root", RadixTree, "lock", "if locks:\n            break", "pass"),
    Mutant("an unlocked leaf is not offered again", RadixTree, "unlock", "if not node.children:", "if False:"),
    Mutant("the end of a request is no use", RadixTree, "unlock", "node.stamp = clock", "pass"),
    Mutant("an evicted leaf's parent is not offered", RadixTree, "_remove",
           "elif not parent.children and not parent.locks", "elif False"),
    Mutant("a trimmed node keeps its edge", RadixTree, "evict", "last.edge[:keep * self.page_bytes]", "last.edge"),
    Mutant("a trimmed node keeps its size", RadixTree, "evict", "last.size = keep", "pass"),
    Mutant("a trimmed node keeps the wrong end", RadixTree, "evict", "freed.append(last.pages[keep * ID_BYTES:])",
           "freed.append(last.pages[:len(last.pages) - keep * ID_BYTES])"),
    Mutant("a trimmed node is not offered again", RadixTree, "evict", "policy.add(last)", "pass"),
    Mutant("evicted pages come back in another order", RadixTree, "evict", "freed.reverse()", "pass"),
    Mutant("a page in part equal counts as equal", RadixTree, "_shared_bytes", "first // self.page_size",
           "-(-first // self.page_size)"),
    Mutant("the end of the prompt is not kept to", RadixTree, "_shared_bytes", "min(len(edge), end - offset)",
           "min(len(edge), len(key) - offset)"),
    Mutant("an edge may reach beyond the prompt's end", RadixTree, "_descend",
           "if child is None or not matches(child.edge, at, end)", "if child is None or not matches(child.edge, at)"),
    Mutant("peek reaches beyond the prompt's end", RadixTree, "peek",
           "if child is None or not matches(child.edge, at, end)", "if child is None or not matches(child.edge, at)"),
    Mutant("an empty domain stays", RadixTree, "_remove", "if not parent.children:", "if False:"),
    Mutant("a domain's second root hides the first", RadixTree, "extend", "self._roots.get(domain, node)", "node"),
    Mutant("a new leaf is not protected", RadixTree, "extend", "below.locks = 1", "pass"),
    Mutant("a new leaf is not counted", RadixTree, "extend", "self.protected += below.size", "pass"),
    Mutant("the lock does not follow what others cached", RadixTree, "extend", "self.lock(below)", "pass"),
    Mutant("the lock of the old node stays", RadixTree, "extend", "self.unlock(node)", "pass"),
    Mutant("routers do not hear of evictions", RadixTree, "evict", "self.listener.removed(dropped)", "pass"),
    Mutant("a listener hears of other pages", RadixTree, "_attach", "stored(edge, child.pages",
           "stored(edge, child.pages[::-1]"),
    Mutant("routers hear of another parent", RadixTree, "_attach", "child.pages, node.pages, domain",
           "child.pages, child.pages, domain"),
]

MANAGER = [
    Mutant("every domain is one", CacheManager, "acquire", "acquire(key, domain, end)", 'acquire(key, b"", end)'),
    Mutant("acquire does not lock", RadixTree, "acquire", "self.lock(node)", "pass"),
    Mutant("the count is in bytes", CacheManager, "acquire", "count * ID_BYTES", "count"),
    Mutant("forget keeps the lock", CacheManager, "forget", "self.tree.unlock(node)", "pass"),
    Mutant("duplicates are not released", CacheManager, "commit", "self.pool.release(duplicates, owner)", "pass"),
    Mutant("duplicates stay in the row", CacheManager, "commit", "= self.tree.path(node)[shared:shared + found]",
           "= duplicates"),
    Mutant("the tree is given pages it has", CacheManager, "commit", "row[shared + found:full]", "row[shared:full]"),
    Mutant("a commit takes another's pages for its own", CacheManager, "commit", "found, had = found + there, stop",
           "found, had = there, stop"),
    Mutant("a commit starts at the prompt's start", CacheManager, "commit", "tokens[had * size:stop * size]",
           "tokens[:stop * size]"),
    Mutant("flush leaks pages", CacheManager, "flush", "self.pool.release(dropped, TREE)", "pass"),
    Mutant("eviction takes too few", CacheManager, "take", "self.tree.evict(short)", "self.tree.evict(short - 1)"),
    Mutant("eviction takes too many", CacheManager, "take", "self.tree.evict(short)", "self.tree.evict(short + 1)"),
    Mutant("an ended request keeps its pages", CacheManager, "release", "row[shared:]", "row[shared + 1:]"),
    Mutant("an ended request keeps its lock", CacheManager, "release", "self.tree.unlock(node)", "pass"),
    Mutant("events are lost at the limit", CacheEvents, "removed", "self._notes.append(pages)", "pass"),
]

CACHE = POOL + TREE + MANAGER

LRU = [  # for lru_run
    Mutant("a locked node is evicted", LeastRecentlyUsed, "pop", "node.children or node.locks or", "node.children or"),
    Mutant("a node with children is evicted", LeastRecentlyUsed, "pop", "node.children or node.locks", "node.locks"),
    Mutant("the most recent leaf goes first", LeastRecentlyUsed, "add", "self._order.move_to_end(node)",
           "self._order.move_to_end(node, last=False)"),
    Mutant("a leaf used again keeps its place", LeastRecentlyUsed, "add", "self._order.move_to_end(node)", "pass"),
    Mutant("a bared node is forgotten", LeastRecentlyUsed, "add", "heappush(self._bared, (stamp, id(node), node))",
           "pass"),
    Mutant("a bared node waits for all others", LeastRecentlyUsed, "pop", "bared[0][0] < node.stamp", "False"),
    Mutant("a node once bared is never again", LeastRecentlyUsed, "pop", "heappop(bared)[2].queued = 0",
           "heappop(bared)"),
    Mutant("a node that was evicted by baring is never again", LeastRecentlyUsed, "pop",
           "node = heappop(bared)[2]\n    node.queued = 0", "node = heappop(bared)[2]"),
]
