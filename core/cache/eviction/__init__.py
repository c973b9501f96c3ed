"""Which cached pages go first: policies over the unlocked leaves of the radix tree."""
from __future__ import annotations

from .learned import Learned
from .lru import LeastRecentlyUsed
from .protocol import EvictionPolicy, EvictionRegistry, Unwatching, Use

__all__ = ["EVICTION", "EvictionPolicy", "LeastRecentlyUsed", "Unwatching", "Use"]

EVICTION = EvictionRegistry()
EVICTION.register("lru", LeastRecentlyUsed)
EVICTION.register("learned", Learned)
