"""Prompts in the middle of being computed, and how a step's budget of tokens is shared among them."""
from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from ..cache.manager import CacheManager
from .admission import Limits
from .plans import Chunk
from .request import Request
from .table import RequestTable

LEAST = 2  # forced tokens that are worth a place among the prompts


class Prefills:
    """The running requests whose prompt is not computed yet, in order of admission.

    The first one has a step's budget, what it leaves goes to the next, and so on. But while a long prompt takes more
    than a step, half of each goes to prompts that need less than half of what it still needs, the shortest first: a
    short question behind a book waits for a step or two, and the book takes twice as long at worst. Prompts of like
    length are computed one after another, since all of them would end late otherwise.
    """

    def __init__(self, limits: Limits, cache: CacheManager, table: RequestTable):
        self._limits, self._cache, self._table = limits, cache, table
        self._requests: dict[Request, None] = {}

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __contains__(self, request: Request) -> bool:
        return request in self._requests

    def add(self, request: Request) -> None:
        self._requests[request] = None

    def remove(self, request: Request) -> None:
        del self._requests[request]

    def left(self, request: Request) -> int:
        """Tokens of its prompt that are not computed yet."""
        return request.known - int(self._table.computed[request.slot])

    @property
    def tokens(self) -> int:
        """The same of all of them."""
        return sum(map(self.left, self._requests))

    def share(self, budget: int) -> tuple[int, int, int]:
        """(tokens, need, priority): how much of a step's budget is for prompts that may overtake the first one, the
        most that such a prompt may need, and the least priority it must have. No tokens when the first one takes no
        more than this step."""
        first = next(iter(self._requests), None)
        if first is None or (left := self.left(first)) <= budget:
            return 0, 0, 0
        return budget // 2, (left - 1) // 2, first.priority

    def overtake(self, tokens: int, need: int, priority: int) -> list[Chunk]:
        """Chunks of at most `tokens` in all for the prompts here that need the least, up to `need`."""
        able = [r for r in self._requests if r.priority >= priority and self.left(r) <= need]
        return self.chunks(tokens, sorted(able, key=self.left))

    def go_on(self, budget: int, chunks: list[Chunk]) -> list[Chunk]:
        """Chunks for those that have none in `chunks`, in order."""
        served = {chunk.request for chunk in chunks}
        return self.chunks(budget, [r for r in self._requests if r not in served])

    def chunks(self, budget: int, requests: Iterable[Request]) -> list[Chunk]:
        """The next chunks of these, while there are tokens left."""
        chunks: list[Chunk] = []
        for request in requests:
            if budget <= 0:
                break
            self._catch_up(request)
            chunks.append(self.chunk(request, budget))
            budget -= chunks[-1].size
        return chunks

    def chunk(self, request: Request, budget: int) -> Chunk:
        """The next tokens of a prompt; its full pages go to the tree now, since steps run in order.

        Its last token's page does not, nor do scored prompts': the tree may have that page already, and a page of the
        tree is never written.
        """
        slot, start, known = request.slot, int(self._table.computed[request.slot]), request.known
        if request.score:
            budget = min(budget, self._limits.score_rows)
        stop = min(known, start + budget)
        sample = stop == known and known - request.prompt_len < request.limit
        scores = max(0, min(stop, request.prompt_len - 1) - start) if request.score else 0
        self._table.computed[slot] = stop
        if not request.score:
            self.commit(request, min(stop, known - 1))
        return Chunk(request, slot, start, stop, scores, sample)

    def commit(self, request: Request, computed: int) -> None:
        """Put the full pages of the first `computed` tokens into the tree."""
        slot, table = request.slot, self._table
        shared = int(table.tree_pages[slot])
        table.tree_pages[slot], request.node = self._cache.commit(
            table.tokens[slot, :computed], table.pages[slot], shared, slot, request.domain, request.node, request.use)

    def force(self, request: Request, tokens: list[int]) -> list[int]:
        """Have a request that decodes go on with tokens which are known already, as with a prompt; those that it takes,
        [] when it is left as it is.

        Its step in flight samples the first of them. They end before the output's end, a token that would stop it, and
        what memory there is.
        """
        slot, table, size = request.slot, self._table, self._limits.page_size
        known = int(table.known[slot])
        tokens = tokens[:max(0, int(table.end[slot]) - 1 - known)]
        stops = [i for i, token in enumerate(tokens) if token in request.stop_ids]
        tokens = tokens[:stops[0]] if stops else tokens
        need = -(-(known + len(tokens)) // size) - int(table.page_count[slot])
        if len(tokens) < LEAST or request.params.logprobs is not None or request.score or need > 0 and (
                need + self._limits.max_running > self._cache.available):
            return []
        fresh = self._cache.take(need, slot) if need > 0 else None
        if need > 0:
            if fresh is None:
                return []
            table.add_row_pages(slot, fresh)
        table.tokens[slot, known:known + len(tokens)] = tokens
        table.known[slot] = table.length[slot] = known + len(tokens)
        table.computed[slot] = known
        table.last[slot] = tokens[-1]
        table.generation[slot] += np.uint32(1)  # what the step in flight samples is one of these
        request.stored = table.tokens[slot, :known + len(tokens)].tobytes()
        request.go_ahead(tokens)
        self.add(request)
        return tokens

    def _catch_up(self, request: Request) -> None:
        """Skip prompt tokens whose pages another request has put into the tree since this one was admitted."""
        if request.score:
            return
        cached = self._cache.cached_tokens(request.stored, request.domain, request.known - 1)
        if cached > int(self._table.computed[request.slot]):
            self.commit(request, cached)
            self._table.computed[request.slot] = cached
