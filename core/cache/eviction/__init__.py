"""Which cached pages go first: policies over the unlocked leaves of the radix tree."""
from __future__ import annotations

from .learned import Learned
from .lru import LeastRecentlyUsed
from .protocol import EvictionPolicy, EvictionRegistry, Unwatching, Use
from .ranked import LeastFrequentlyUsed, Priority, TimeToLive
from .segmented import AdaptiveReplacement, SegmentedLru

__all__ = ["EVICTION", "EvictionPolicy", "EvictionRegistry", "LeastRecentlyUsed", "Unwatching", "Use"]

EVICTION = EvictionRegistry()
EVICTION.register("learned", Learned)
EVICTION.register("lru", LeastRecentlyUsed)
EVICTION.register("lfu", LeastFrequentlyUsed)
EVICTION.register("slru", SegmentedLru)
EVICTION.register("arc", AdaptiveReplacement)
EVICTION.register("ttl", TimeToLive)
EVICTION.register("priority", Priority)
