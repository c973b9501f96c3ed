"""Which tokens are computed next: continuous batching with chunked prefill under a token budget.

Pure integers: no clock (the caller passes `now` in seconds), no thread, no tensor. One step is `plan` -> (the batch is
built) -> `advance` -> (the device computes) -> `settle`. With overlap the next `plan` comes before this `settle`, so a
sampled token may be unknown to the host for one step; a request that ends meanwhile has its extra token dropped.
Steps run in order on the device, so pages may change hands as soon as the host knows.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ..cache.manager import CacheManager
from ..errors import Overloaded
from ..messages import FinishReason, Logprobs, Submit, TokenOutput, pack_ids
from ..plan import Range, StepPlan, StepResult
from .admission import Limits, check_request
from .policy import POLICIES
from .request import Request
from .stats import SchedulerStats
from .table import RequestTable

NOT_A_NUMBER = "the model's output is not a number (NaN): its weights are broken, or the way they are computed with is"


class Chunk(NamedTuple):
    """Prompt tokens `start` to `stop` of a request; `scores` of its first tokens are scored, `sample` its last."""

    request: Request
    slot: int
    start: int
    stop: int
    scores: int
    sample: bool


@dataclass
class Plan:
    """One step: the slots that decode a token each, and the prefill chunks. `samples` are the requests of the sampled
    logit rows, decode rows first; each chunk's scored rows come before its sampled one."""

    step: int
    decode: np.ndarray
    chunks: list[Chunk]
    samples: list[Request] = field(default_factory=list)

    def record(self, table: RequestTable) -> StepPlan:
        """The plan as plain integers."""
        ranges = [Range(int(s), int(table.length[s]) - 1, int(table.length[s]), True) for s in self.decode]
        ranges += [Range(c.slot, c.start, c.stop, c.sample) for c in self.chunks]
        return StepPlan(self.step, tuple(ranges))


class Scheduler:
    """Owns the requests and their pages. Every method leaves the ledger whole; `verify` proves it."""

    def __init__(self, limits: Limits, cache: CacheManager, policy: str = "lpm"):
        self.limits, self.cache = limits, cache
        self.table = RequestTable(limits.max_running + 1, limits.max_pages)
        self.stats = SchedulerStats()
        self._policy = POLICIES.create(policy)
        self._waiting: deque[Request] = deque()
        self._retracted: deque[Request] = deque()
        self._running: dict[int, Request] = {}          # by slot, in order of admission
        self._prefilling: list[Request] = []
        self._decoding = np.zeros(0, np.int32)
        self._by_id: dict[str, Request] = {}
        self._ended: list[TokenOutput] = []
        self._step = 0
        self._short = False                             # free slots cannot be filled now: memory is short
        self._next_expiry = 0.0

    # ---- requests in and out

    def submit(self, submit: Submit, now: float) -> None:
        """Queue a request. Raises `RequestError` when it can never run, `Overloaded` when the queue is full."""
        limit = check_request(submit, self.limits)
        if submit.id in self._by_id:
            raise ValueError(f"request id {submit.id!r} is in use")
        queued = self.waiting - (0 if self._short else self.table.free)
        if queued >= self.limits.max_queued:
            raise Overloaded(f"{queued} requests are waiting for a place, the limit is {self.limits.max_queued}: "
                             "try again later or raise --max-queued-requests")
        request = Request(submit, self.limits.eos_ids, limit)
        request.arrival = request.arrival or now
        self._by_id[request.id] = request
        self._waiting.append(request)

    def abort(self, ids: Iterable[str], reason: FinishReason = "abort", error: str = "") -> None:
        """End these requests in whatever state they are; the next `settle` or `ended` reports them."""
        for request_id in ids:
            request = self._by_id.get(request_id)
            if request is not None:
                self._end(request, reason, error)

    def ended(self) -> list[TokenOutput]:
        """Outputs of requests that ended outside a step since the last call."""
        ended, self._ended = self._ended, []
        return ended

    @property
    def has_ended(self) -> bool:
        """Is there anything for `ended` to report?"""
        return bool(self._ended)

    def reset_stats(self) -> None:
        """Count from zero again."""
        self.stats = SchedulerStats()

    @property
    def waiting(self) -> int:
        return len(self._waiting) + len(self._retracted)

    @property
    def running(self) -> int:
        return len(self._running)

    # ---- one step

    def plan(self, now: float) -> Plan | None:
        """What to compute next, or None when there is nothing that can be."""
        self._expire(now)
        decode, retracted = self._plan_decode()
        chunks = self._plan_prefill(now, admit=not retracted)
        chunks.sort(key=lambda c: c.stop - c.start > 1)  # a batch has its rows of one token first
        if not len(decode) and not chunks:
            return None
        self._step += 1
        samples = [self._running[s] for s in decode.tolist()] + [c.request for c in chunks if c.sample]
        return Plan(self._step, decode, chunks, samples)

    def advance(self, plan: Plan) -> None:
        """The plan's batch has been built and is launched: its tokens count as computed from now on."""
        table = self.table
        table.computed[plan.decode] += 1
        table.length[plan.decode] += 1
        ready = []
        for chunk in plan.chunks:
            if chunk.sample:
                table.length[chunk.slot] += 1
            if chunk.sample or chunk.stop >= chunk.request.known:
                ready.append(chunk.slot)
                self._prefilling.remove(chunk.request)
        if ready:
            self._decoding = np.append(self._decoding, np.array(ready, np.int32))

    def settle(self, plan: Plan, result: StepResult) -> list[TokenOutput]:
        """Take in a step's result: append tokens, end requests, report. Requests that ended meanwhile are skipped."""
        outputs = self.ended()
        row = len(plan.decode)
        for i, request in enumerate(plan.samples[:row]):
            self._take(request, result, i, outputs)
        for chunk in plan.chunks:
            if chunk.scores:
                self._score(chunk, result, row)
                row += chunk.scores
            if chunk.sample:
                self._take(chunk.request, result, row, outputs)
                row += 1
            elif chunk.stop == chunk.request.known and not chunk.request.finish:
                self._finish(chunk.request, "length", -1, outputs)
        return outputs

    def fail(self, plans: Iterable[Plan], message: str) -> list[TokenOutput]:
        """A step failed on the device: end its requests and the running ones, since any may share pages that it left
        unwritten, and drop the cache. Waiting requests stay."""
        launched = [r for plan in plans for r in plan.samples + [c.request for c in plan.chunks]]
        for request in launched + list(self._running.values()):
            self._end(request, "error", message)
        self.cache.flush()
        return self.ended()

    def retract_all(self) -> None:
        """Send every running request back to waiting, in its order. No step may be in flight."""
        for request in reversed(list(self._running.values())):
            self._send_back(request)

    # ---- the ledger

    def verify(self) -> None:
        """Every page has one holder, every lock is accounted for. Raises with the page or node at fault."""
        held = {slot: self.table.pages[slot, self.table.tree_pages[slot]:self.table.page_count[slot]]
                for slot in self._running}
        self.cache.verify(held)
        for slot, request in self._running.items():
            prefix, path = self.table.pages[slot, :self.table.tree_pages[slot]], self.cache.tree.path(request.node)
            assert np.array_equal(prefix, path), f"request {request.id} reads pages {prefix}, locked are {path}"
        assert set(self._prefilling) <= set(self._running.values()), "a request prefills without a slot"
        assert set(self._decoding.tolist()) <= set(self._running), "a slot decodes without a request"
        assert self.table.free + len(self._running) == self.limits.max_running, "a slot is lost"

    # ---- planning

    def _plan_decode(self) -> tuple[np.ndarray, bool]:
        """Slots that decode, each with a page for its token; retracts requests while memory is short."""
        table, retracted = self.table, False
        while True:
            slots = self._decoding
            slots = slots[table.length[slots] < table.prompt_len[slots] + table.limit[slots]]
            at = (table.length[slots] - 1) // self.limits.page_size
            short = at >= table.page_count[slots]
            need = int(np.count_nonzero(short))
            if not need:
                return slots, retracted
            if need <= self.cache.available:
                self._grow(slots[short], at[short])
            else:
                retracted = True
                self._retract(need)

    def _grow(self, slots: np.ndarray, at: np.ndarray) -> None:
        for slot, index in zip(slots.tolist(), at.tolist(), strict=True):
            page = self.cache.take(1, slot)
            if page is None:  # there were fewer than the ledger said: plan again
                return
            self.table.pages[slot, index] = page[0]
            self.table.page_count[slot] += 1

    def _retract(self, need: int) -> None:
        """Send the request that is cheapest to lose back to waiting: lowest priority, then the latest admitted."""
        victim = min(reversed(self._running.values()), key=lambda r: r.priority)
        if len(self._running) == 1:
            self._end(victim, "error", f"out of KV memory: the request needs {need} more pages, "
                                       f"{self.cache.available} of {self.cache.pool.capacity} can be had")
            return
        self._send_back(victim)

    def _send_back(self, victim: Request) -> None:
        if victim in self._prefilling:
            victim.scores = []     # scored again from the first token
        else:
            victim.score = False   # all scores are here or on their way
        self._vacate(victim)
        self.stats.preemptions += 1
        self._retracted.appendleft(victim)

    def _plan_prefill(self, now: float, admit: bool) -> list[Chunk]:
        chunks, budget, self._short = [], self.limits.chunk, not admit
        for request in self._prefilling:
            if budget <= 0:
                return chunks
            self._catch_up(request)
            chunks.append(self._chunk(request, budget))
            budget -= chunks[-1].stop - chunks[-1].start
        if admit and budget > 0 and self.table.free and self.waiting:
            for request in self._admissible(now):
                if budget <= 0 or not self.table.free:
                    break
                if not self._admit(request, now):
                    self._short = True
                    break
                chunks.append(self._chunk(request, budget))
                budget -= chunks[-1].stop - chunks[-1].start
        return chunks

    def _admissible(self, now: float) -> list[Request]:
        """Retracted requests first, then the waiting ones in the policy's order."""
        cached = lambda r: self.cache.cached_tokens(r.tokens[:r.known - 1], r.domain)  # noqa: E731
        return list(self._retracted) + self._policy.order(list(self._waiting), cached, now)

    def _admit(self, request: Request, now: float) -> bool:
        """Give a waiting request a slot, its cached prefix and pages for the rest; False when memory is short."""
        size = self.limits.page_size
        reuse = request.known - 1 if not request.score else 0
        pages, node = self.cache.acquire(request.tokens[:reuse], request.domain)
        need = -(-request.known // size) - len(pages)
        if self._running and need + len(self._running) + 1 > self.cache.available:
            self.cache.forget(node)
            return False
        slot = self.table.take(request.params, request.known, request.prompt_len, self._limit(request))
        fresh = self.cache.take(need, slot)
        if fresh is None:
            self.table.give_back(slot)
            self.cache.forget(node)
            self._end(request, "error", f"out of KV memory: the request needs {need} pages, "
                                        f"{self.cache.available} of {self.cache.pool.capacity} can be had")
            return False
        count = len(pages) + need
        self.table.pages[slot, :count] = np.concatenate([pages, fresh])
        self.table.page_count[slot], self.table.tree_pages[slot] = count, len(pages)
        self.table.computed[slot] = len(pages) * size
        self.table.last[slot] = request.tokens[request.known - 1]
        (self._retracted if request.attempts else self._waiting).remove(request)
        request.slot, request.node = slot, node
        self.stats.admitted(request, len(pages) * size, now)
        self._running[slot] = request
        self._prefilling.append(request)
        return True

    def _catch_up(self, request: Request) -> None:
        """Skip prompt tokens whose pages another request has put into the tree since this one was admitted."""
        slot, table, size = request.slot, self.table, self.limits.page_size
        tokens = request.tokens[:request.known - 1]
        if request.score or self.cache.cached_tokens(tokens, request.domain) <= int(table.computed[slot]):
            return
        pages = self.cache.cached_tokens(tokens, request.domain) // size
        self._commit(request, pages * size)
        table.computed[slot] = pages * size

    def _chunk(self, request: Request, budget: int) -> Chunk:
        """The next tokens of a prefilling request; its full pages go to the tree now, since steps run in order.

        Its last token's page does not, nor do scored prompts': the tree may have that page already, and a page of the
        tree is never written.
        """
        slot, start = request.slot, int(self.table.computed[request.slot])
        if request.score:
            budget = min(budget, self.limits.score_rows)
        stop = min(request.known, start + budget)
        sample = stop == request.known and request.outputs < self._limit(request)
        last_scored = min(stop, request.prompt_len - 1)
        scores = max(0, last_scored - start) if request.score else 0
        self.table.computed[slot] = stop
        if not request.score:
            self._commit(request, min(stop, request.known - 1))
        return Chunk(request, slot, start, stop, scores, sample)

    def _commit(self, request: Request, computed: int) -> None:
        slot, table = request.slot, self.table
        shared = int(table.tree_pages[slot])
        table.tree_pages[slot], request.node = self.cache.commit(
            request.tokens[:computed], table.pages[slot], shared, slot, request.domain, request.node)

    def _limit(self, request: Request) -> int:
        return len(request.tokens) - request.prompt_len

    # ---- taking results in

    def _take(self, request: Request, result: StepResult, row: int, outputs: list[TokenOutput]) -> None:
        if request.finish:
            return
        scored = request.params.logprobs is not None
        if scored and np.isnan(result.logprobs[row]):
            return self._end(request, "error", NOT_A_NUMBER)
        token = int(result.tokens[row])
        request.append(token)
        if request.slot:
            self.table.known[request.slot] = request.known
            self.table.last[request.slot] = token
        self.stats.generated_tokens += 1
        reason = request.finish_reason(token, self._limit(request))
        logprobs = self._logprobs(request, result, row) if scored else None
        if reason:
            self._finish(request, reason, token if reason == "stop" else -1, outputs, pack_ids([token]), logprobs)
        else:
            outputs.append(self._output(request, pack_ids([token]), logprobs=logprobs))

    def _logprobs(self, request: Request, result: StepResult, row: int) -> Logprobs:
        k = request.params.logprobs
        return Logprobs(result.logprobs[row:row + 1].tobytes(), k, pack_ids(result.top_ids[row, :k]),
                        result.top_logprobs[row, :k].tobytes())

    def _score(self, chunk: Chunk, result: StepResult, row: int) -> None:
        rows = slice(row, row + chunk.scores)
        request, k = chunk.request, chunk.request.params.prompt_logprobs
        if not request.finish and np.isnan(result.logprobs[rows]).any():
            return self._end(request, "error", NOT_A_NUMBER)
        if not request.finish and (request.slot == chunk.slot or not request.score):
            request.scores.append((result.logprobs[rows], result.top_ids[rows, :k], result.top_logprobs[rows, :k]))

    def _output(self, request: Request, tokens: bytes = b"", finish: FinishReason | None = None, stop_id: int = -1,
                logprobs: Logprobs | None = None, error: str = "", status: int = 500) -> TokenOutput:
        first, request.reported = not request.reported, True
        return TokenOutput(request.id, tokens, finish, stop_id, request.prompt_len if first else 0,
                           request.cached if first else 0, logprobs,
                           request.prompt_scores() if first and finish not in ("abort", "error") else None, error,
                           status)

    # ---- endings

    def _finish(self, request: Request, reason: FinishReason, stop_id: int, outputs: list[TokenOutput],
                tokens: bytes = b"", logprobs: Logprobs | None = None) -> None:
        self._close(request, reason)
        outputs.append(self._output(request, tokens, reason, stop_id, logprobs))

    def _end(self, request: Request, reason: FinishReason, error: str = "", status: int = 500) -> None:
        if not request.finish:
            self._close(request, reason)
            self._ended.append(self._output(request, finish=reason, error=error, status=status))

    def _close(self, request: Request, reason: FinishReason) -> None:
        request.finish = reason
        del self._by_id[request.id]
        if request.slot:
            self._vacate(request)
        else:
            (self._retracted if request.attempts else self._waiting).remove(request)
        self.stats.finished(request)

    def _vacate(self, request: Request) -> None:
        """Take a request off the device: what it computed stays cached, the rest of its pages and its slot are free."""
        slot, table = request.slot, self.table
        if request in self._prefilling:
            self._prefilling.remove(request)
        else:
            self._decoding = self._decoding[self._decoding != slot]
        self._commit(request, min(int(table.computed[slot]), request.known))
        row = table.pages[slot, :table.page_count[slot]].copy()
        self.cache.release(row, int(table.tree_pages[slot]), slot, request.node)
        del self._running[slot]
        table.give_back(slot)
        request.slot, request.node = 0, None

    def _expire(self, now: float) -> None:
        if now < self._next_expiry:
            return
        self._next_expiry, limits = now + 1.0, self.limits
        late = [r for r in self._waiting if now - r.arrival > limits.waiting_timeout]
        for request in late:
            self._end(request, "error", f"waited {now - request.arrival:.0f} s, the limit is "
                                        f"{limits.waiting_timeout:.0f} s (--waiting-timeout)", status=503)
        late = [r for r in [*self._running.values(), *self._retracted] if now - r.started > limits.running_timeout]
        for request in late:
            self._end(request, "error", f"ran {now - request.started:.0f} s, the limit is "
                                        f"{limits.running_timeout:.0f} s (--running-timeout)", status=504)
