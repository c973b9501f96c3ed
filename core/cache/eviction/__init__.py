"""Which cached pages go first: policies over the unlocked leaves of the radix tree."""
from __future__ import annotations

from .lru import LeastRecentlyUsed
from .protocol import EvictionPolicy, EvictionRegistry, Unwatching, Use

__all__ = ["EVICTION", "EvictionPolicy", "EvictionRegistry", "LeastRecentlyUsed", "Unwatching", "Use"]

EVICTION = EvictionRegistry({
    "learned": (".learned", "Learned"), "lru": (".lru", "LeastRecentlyUsed"), "lfu": (".ranked", "LeastFrequentlyUsed"),
    "slru": (".segmented", "SegmentedLru"), "arc": (".segmented", "AdaptiveReplacement"),
    "ttl": (".ranked", "TimeToLive"), "priority": (".ranked", "Priority")})
