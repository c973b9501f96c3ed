"""Who gives way to a better request: as many as it takes for that one to start, and nobody if all would not do."""
from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..cache.manager import CacheManager
from .policy import SchedulePolicy
from .request import Request
from .table import RequestTable

Affords = Callable[[Request, int, dict[int, Request], int], bool]


def victims(policy: SchedulePolicy, running: dict[int, Request], table: RequestTable, cache: CacheManager,
            growing: set[int], affords: Affords) -> list[Request] | None:
    """Those that give way, none when the best waiting request can start as it is; None: it cannot start whoever does.

    running: by slot, in order of admission. growing: slots that take a page for their next token before anybody starts.
    affords: may a request that needs so many pages start beside those that still run, with so many to be had? What
    giving way sets free is counted page by page: a page of the tree is free to go once the last request that holds it
    has given way, and one that the best request has found never is.
    """
    pair = policy.preempt(running.values())
    if pair is None:
        return []
    best = pair[0]
    prefix, node = cache.acquire(best.stored, best.domain, 0 if best.score else best.known - 1)
    try:
        need, available = -(-best.known // cache.page_size) - len(prefix), cache.available - len(growing)
        if table.free and affords(best, need, running, available):
            return []
        left, gone = dict(running), []
        cached = lambda slot: table.pages[slot, :table.tree_pages[slot]]  # noqa: E731
        holders = np.bincount(np.concatenate([prefix, *map(cached, left)]), minlength=cache.pool.total)
        while pair is not None:
            victim = pair[1]
            del left[victim.slot]
            gone.append(victim)
            pages = cached(victim.slot)
            holders[pages] -= 1
            available += int(table.page_count[victim.slot]) - len(pages) + int(np.count_nonzero(holders[pages] == 0))
            available += victim.slot in growing
            if affords(best, need, left, available):
                return gone
            pair = policy.preempt(left.values()) if left else None
        return None
    finally:
        cache.forget(node)
