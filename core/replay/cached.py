"""A trace through the real cache: pool, radix tree and eviction policy, one request after the other."""
from __future__ import annotations

import numpy as np

from ..cache.manager import CacheManager
from ..messages import CacheHint
from .peers import Tick
from .trace import Trace

ENDS = CacheHint(ends=True)
OWNER = 1


def cached_blocks(trace: Trace, capacity: int, tick: Tick, policy: str, ends: np.ndarray) -> np.ndarray:
    """How many blocks at the front of each request were cached, int64 [n].

    A block of the trace is a page, its number the token in it. Only prompts are cached, and a request whose blocks do
    not all fit leaves those at its front. capacity: pages. ends: requests that are hinted to end their session, bool.
    """
    cache = CacheManager(capacity + 1, 1, policy)
    found, arrival = np.zeros(len(trace), np.int64), trace.arrival.tolist()
    for i in range(len(trace)):
        tokens = trace.request(i)
        cache.tick(arrival[i])
        pages, node = cache.acquire(tokens, b"")
        found[i] = hit = len(pages)
        use = cache.admit(tokens, hit, node, ENDS if ends[i] else None)
        fresh = cache.take(min(len(tokens) - hit, cache.available), OWNER)
        row = np.concatenate([pages, fresh])
        shared, node = cache.commit(tokens[:len(row)], row, hit, OWNER, b"", node, use)
        cache.release(row, shared, OWNER, node, use)
        tick(i)
    return found
