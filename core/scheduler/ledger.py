"""The proof that no page, lock, slot or request is lost: by identity, not by sums."""
from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .scheduler import Scheduler


def prove(scheduler: Scheduler) -> None:
    """Every page has one holder, every lock is accounted for. Raises with the page or node at fault."""
    table, cache, running, queue = scheduler.table, scheduler.cache, scheduler._running, scheduler.queue
    held = {slot: table.pages[slot, table.tree_pages[slot]:table.page_count[slot]] for slot in running}
    cache.verify(held)
    for slot, request in running.items():
        prefix, path = table.pages[slot, :table.tree_pages[slot]], cache.tree.path(request.node)
        assert np.array_equal(prefix, path), f"request {request.id} reads pages {prefix}, locked are {path}"
        assert table.owner[slot] is request and request.slot == slot, f"slot {slot} is not {request.id}'s"
    decoding = scheduler._decoding.tolist()
    assert set(scheduler._prefills) <= set(running.values()), "a request prefills without a slot"
    assert set(decoding) <= set(running), "a slot decodes without a request"
    assert len(set(decoding)) == len(decoding), "a slot decodes twice"
    assert not {r.slot for r in scheduler._prefills} & set(decoding), "a slot prefills and decodes"
    assert table.free + len(running) == scheduler.limits.max_running, "a slot is lost"
    assert len(running) + len(queue) == len(scheduler._by_id), "a request neither runs nor waits"
    assert queue.tokens == sum(r.known for r in queue), "queued tokens are miscounted"
