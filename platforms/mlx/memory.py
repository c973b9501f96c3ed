"""One budget for weights, K and V and buffers: a share of what the device can work with, measured as it is used.

On an Apple GPU memory is shared with everything else on the machine, so the budget is a share of the working set that
Metal recommends; on a host processor a share of the memory that the process may use. Freed buffers are cached for reuse
up to a bound, and given back when the system runs short.
"""
from __future__ import annotations

import time

import mlx.core as mx

from ..host import host_memory

CACHE_SHARE = 1 / 8     # of the budget: freed buffers kept for reuse
SHORT = 1 / 10          # of the machine's memory: less available than this is short
INTERVAL = 1.0          # seconds between looks at the system
MIB = 1 << 20


class Budget:
    """share: of the working set, over 0 up to 1. `details` is kept up to date for people."""

    def __init__(self, share: float, metal: bool) -> None:
        machine = host_memory()[0]
        working_set = int(mx.device_info().get("max_recommended_working_set_size", machine)) if metal else machine
        self.total = int(working_set * share)
        self.cache_limit = int(self.total * CACHE_SHARE)
        self.given_back = self.times = 0
        self._next_look = 0.0
        mx.set_memory_limit(self.total)
        mx.set_cache_limit(self.cache_limit)
        if metal:
            mx.set_wired_limit(self.total)
        self.details = {"memory budget": f"{self.total // MIB} MiB, {share:.0%} of {working_set // MIB} MiB"}

    def figures(self) -> tuple[int, int]:
        """Bytes: the budget, and what is left of it now. Cached buffers count as free, for they are reused."""
        available = host_memory()[1] + mx.get_cache_memory()
        return self.total, max(0, min(self.total - mx.get_active_memory(), available))

    def relieve(self) -> None:
        """Give cached buffers back when the system runs short, and keep half as many from then on."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + INTERVAL
        total, available = host_memory()
        cached = mx.get_cache_memory()
        if available >= total * SHORT or not cached:
            return
        mx.clear_cache()
        self.cache_limit //= 2
        mx.set_cache_limit(self.cache_limit)
        self.given_back += cached - mx.get_cache_memory()
        self.times += 1
        self.details["given back"] = (f"{self.given_back // MIB} MiB of buffers in {self.times} times, as the system "
                                      f"was short of memory; now no more than {self.cache_limit // MIB} MiB are cached")
