"""Which tokens are computed next: continuous batching with chunked prefill under a token budget.

Pure integers: no clock (the caller passes `now` in seconds), no thread, no tensor. One step is `plan` -> (the batch is
built) -> `advance` -> (the device computes) -> `settle`. With overlap the next `plan` comes before this `settle`, so a
sampled token may be unknown to the host for one step; a request that ends meanwhile has its extra token dropped.
Steps run in order on the device, so pages may change hands as soon as the host knows.

Requests that decode are rows of numpy columns and are handled all at once; Python loops only over prompts, endings and
requests that want more than their token.
"""
from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np

from ..cache.manager import CacheManager
from ..grammar.contract import Matcher
from ..messages import FinishReason, Logprobs, Submit, TokenOutput, pack_ids
from ..plan import StepResult
from ..speculation.settle import settle_drafts
from ..speculation.speculation import Drafting, Speculation
from .admission import Limits, check_request
from .ledger import prove
from .masks import Ask, Masks, refusal
from .outlook import Growth, Pace
from .outputs import NOT_A_NUMBER, StepOutputs, output_of, scored_outputs, token_logprobs
from .plans import Chunk, Plan
from .policy import POLICIES, View, count_shares
from .preemption import victims
from .prefill import Prefills
from .request import Request
from .rows import Rows
from .stats import SchedulerStats
from .table import RequestTable
from .waiting import Waiting, overdue

LOOK_AGAIN = 16  # plans after which admission is tried again, or shares are counted, though nothing has changed


class Scheduler:
    """Owns the requests and their pages. Every method leaves the ledger whole; `verify` proves it.

    grammars, ask: as `Masks` takes them. drafting: what to speculate with, None = nothing.
    """

    def __init__(self, limits: Limits, cache: CacheManager, policy: str = "lpm", grammars: Any = None,
                 ask: Ask | None = None, drafting: Drafting | None = None):
        self.limits, self.cache = limits, cache
        self.table = RequestTable(limits.max_running + 1, limits.max_pages, limits.max_model_len, limits.vocab_size,
                                  limits.adapters)
        self.masks = Masks(self.table, limits.max_running, limits.vocab_size, grammars, ask)
        self.speculation = Speculation(drafting, self.table, cache, limits, self.masks) if drafting else None
        self.stats, self.growth = SchedulerStats(), Growth()
        self.pace = Pace(limits.itl_target, limits.chunk)
        self._policy = POLICIES.create(policy)
        self._eos = tuple(sorted({i for i in limits.eos_ids if i < limits.vocab_size}))
        self.queue = Waiting(limits, self._policy, self.table.slots)
        self._running: dict[int, Request] = {}          # by slot, in order of admission
        self._prefills = Prefills(limits, cache, self.table)
        self._decoding = np.zeros(0, np.intp)           # slots
        self._rows = Rows(self.table, self._decoding)   # of the last plan
        self._by_id: dict[str, Request] = {}
        self._ended: list[TokenOutput] = []
        self._handles, self._turns = itertools.count(1), itertools.count(1)
        self._step = self._plans = self._changes = 0
        self._short = False                             # free slots cannot be filled now: memory is short
        self._tried = (0, 0)                            # changes and available pages when that was found
        self._futile = -1                               # changes when nobody could make room for the best one
        self._next_expiry = 0.0
        self._timed: tuple[float, Plan | None] = (0.0, None)  # the last plan's time, the step settled since

    # ---- requests in and out

    def submit(self, submit: Submit, now: float, matcher: Matcher | None = None) -> None:
        """Queue a request. Raises as `check` does."""
        limit = self.check(submit)
        request = Request(submit, self._eos, limit, next(self._handles) & 0x7FFFFFFF, matcher)
        request.arrival = request.arrival or now
        self._by_id[request.id] = request
        self.queue.add(request)
        self._changes += 1

    def check(self, submit: Submit) -> int:
        """The most tokens its output can have. Raises `RequestError` when it can never run, `Overloaded` when the queue
        is full."""
        limit = check_request(submit, self.limits)
        if submit.id in self._by_id:
            raise ValueError(f"request id {submit.id!r} is in use")
        self.queue.check(0 if self._short else self.table.free, self.pace.per_token)
        return limit

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

    def report(self, output: TokenOutput) -> None:
        """Have `ended` tell of a request that never came here."""
        self._ended.append(output)

    @property
    def has_ended(self) -> bool:
        """Is there anything for `ended` to report?"""
        return bool(self._ended)

    def reset_stats(self) -> None:
        """Count from zero again, and forget what was learnt."""
        self.stats, self.growth, self.pace = SchedulerStats(), Growth(), Pace(self.limits.itl_target, self.limits.chunk)
        self._timed = (0.0, None)
        if self.speculation is not None:
            self.speculation.reset()

    @property
    def waiting(self) -> int:
        return len(self.queue)

    @property
    def running(self) -> int:
        return len(self._running)

    # ---- one step

    def plan(self, now: float) -> Plan | None:
        """What to compute next, or None when there is nothing that can be."""
        self._plans += 1
        self.cache.tick(now)
        self._learn(now)
        self._expire(now)
        if self.queue and self._plans % LOOK_AGAIN == 0:
            count_shares(self._policy, self.table, self._running)
        view = View(lambda r: self.cache.cached_tokens(r.stored, r.domain, r.known - 1), now, self.pace.per_token)
        self._preempt()
        decode, lengths, retracted = self._plan_decode()
        chunks = self._plan_prefill(view, self.pace.budget(len(decode)), admit=not retracted)
        if not len(decode) and not chunks:
            self._timed = (now, None)
            return None
        drafts = None
        if self.speculation is not None:
            drafts, decode, lengths = self.speculation.plan(decode, lengths, chunks)
        chunks.sort(key=lambda c: c.size > 1)  # a batch has its rows of one token first
        self._step += 1
        if decode is not self._rows.slots:  # they have the same requests for as long as the array is the same
            self._rows = Rows(self.table, decode)
        return Plan(self._step, decode, lengths, chunks, self._rows, drafts)

    def settles_first(self, plan: Plan) -> bool:
        """Must a launched plan be settled before the next is planned?"""
        return self.speculation is not None and self.speculation.settles_first(plan, self._decoding)

    def advance(self, plan: Plan) -> None:
        """The plan's batch has been built and is launched: its tokens count as computed from now on."""
        table = self.table
        table.length[plan.decode] = plan.lengths + 1
        if plan.drafts is not None:
            table.length[plan.drafts.slots] = plan.drafts.lengths + 1
        ready = []
        for chunk in plan.chunks:
            table.length[chunk.slot] += chunk.sample
            if chunk.sample or chunk.stop >= chunk.request.known:
                ready.append(chunk.slot)
                self._prefills.remove(chunk.request)
        if ready:
            self._decoding = np.concatenate([self._decoding, np.array(ready, np.intp)])

    def fill_masks(self) -> None:
        """Fill the masks of the step that was launched last, before anything else is planned."""
        for request, tokens in self.masks.fill():
            if taken := self._prefills.force(request, tokens):
                self._decoding = self._decoding[self._decoding != request.slot]
                self.stats.forced_tokens += len(taken) - 1

    def settle(self, plan: Plan, result: StepResult) -> StepOutputs:
        """Take in a step's result: append tokens, end requests, report. Requests that ended meanwhile are skipped."""
        self._timed = (self._timed[0], plan)
        full = self.ended()
        columns = self._take_all(plan, result, full)
        row = len(plan.decode)
        for chunk in plan.chunks:
            if chunk.scores:
                self._score(chunk, result, row)
                row += chunk.scores
            if chunk.sample:
                self._take(chunk.request, result, row, full)
                row += 1
            elif chunk.stop == chunk.request.known and not chunk.request.finish:
                self._finish(chunk.request, "length", -1, full)
        if plan.drafts is not None:
            columns = settle_drafts(self, plan.drafts, result, row, full, columns)
        return StepOutputs(full, *columns)

    def fail(self, plans: Iterable[Plan], message: str) -> list[TokenOutput]:
        """A step failed on the device: end its requests and the running ones, since any may share pages that it left
        unwritten, and drop the cache. Waiting requests stay."""
        for request in [*(r for plan in plans for r in plan.requests), *self._running.values()]:
            self._end(request, "error", message)
        self.cache.flush()
        return self.ended()

    def retract_all(self) -> None:
        """Send every running request back to waiting, in its order. No step may be in flight."""
        for request in list(self._running.values()):
            self._send_back(request)

    # ---- the ledger

    def verify(self) -> None:
        """Every page has one holder, every lock is accounted for. Raises with the page or node at fault."""
        prove(self)

    # ---- planning

    def _learn(self, now: float) -> None:
        before, settled = self._timed
        if settled is not None and self._running:
            if self.speculation is not None:
                self.speculation.learn(settled, now - before)
            self.pace.observe(settled.prompt_tokens, len(settled.decode), now - before)
        self._timed = (now, None)

    def _plan_decode(self) -> tuple[np.ndarray, np.ndarray, bool]:
        """Slots that decode, each with a page for its token, and their lengths; retracts while memory is short."""
        table, size, retracted = self.table, self.limits.page_size, False
        while True:
            slots = self._decoding
            length = table.length[slots]
            if not len(slots):
                return slots, length, retracted
            goes_on = length < table.end[slots]
            if np.count_nonzero(goes_on) < len(slots):
                slots, length = slots[goes_on], length[goes_on]
            short = length > table.page_count[slots] * size
            need = int(np.count_nonzero(short))
            if not need or need <= self.cache.available and self._grow(slots[short]):
                return slots, length, retracted
            if need > self.cache.available:
                retracted = True
                self._retract(need)

    def _grow(self, slots: np.ndarray) -> bool:
        """A further page for each slot; False if there were fewer than the ledger said."""
        pages = self.cache.take_each(slots)
        if pages is not None:
            self.table.add_pages(slots, pages)
        return pages is not None

    def _retract(self, need: int) -> None:
        """Send the request that the policy can best do without back to waiting."""
        victim = self._policy.victim(self._running.values())
        if len(self._running) == 1:
            self._end(victim, "error", f"out of KV memory: the request needs {need} more pages, "
                                       f"{self.cache.available} of {self.cache.pool.capacity} can be had")
            return
        self.growth.retracted()
        self._send_back(victim)

    def _send_back(self, victim: Request) -> None:
        if victim in self._prefills:
            victim.scores = []     # scored again from the first token
        else:
            victim.score = False   # all scores are here or on their way
        victim.stored = self.table.tokens[victim.slot, :self.table.known[victim.slot]].tobytes()
        self._vacate(victim)
        victim.left = self._plans
        self.stats.preemptions += 1
        self.queue.add(victim)

    def _preempt(self) -> None:
        """Make running requests give way to the best waiting one, if the policy wants it and it can then start."""
        if not self._running or not self._policy.preempt(self._running.values()):
            return
        if self._prefills.tokens >= self.limits.chunk or self._futile == self._changes and self._plans % LOOK_AGAIN:
            return
        table, slots = self.table, self._decoding
        length = table.length[slots]
        short = (length < table.end[slots]) & (length > table.page_count[slots] * self.limits.page_size)
        gone = victims(self._policy, self._running, table, self.cache, {*slots[short].tolist()}, self._affords)
        self._futile = self._changes if gone is None else -1
        for victim in gone or ():
            self._send_back(victim)

    def _plan_prefill(self, view: View, budget: int, admit: bool) -> list[Chunk]:
        was_short, self._short = self._short, not admit
        chunks: list[Chunk] = []
        tokens, need, priority = self._prefills.share(budget)
        if tokens:
            chunks = self._prefills.overtake(tokens, need, priority)
            tokens -= sum([c.size for c in chunks])
            if admit and tokens > 0:
                chunks += self._plan_admission(view, tokens, False, (need, priority))
        chunks += self._prefills.go_on(budget - sum([c.size for c in chunks]), chunks)
        budget -= sum([c.size for c in chunks])
        if admit and budget > 0:
            chunks += self._plan_admission(view, budget, was_short and not chunks)
        return chunks

    def _plan_admission(self, view: View, budget: int, was_short: bool,
                        overtaking: tuple[int, int] | None = None) -> list[Chunk]:
        """First chunks of waiting requests. overtaking: only of those that need at most so many tokens and have this
        priority at least."""
        chunks: list[Chunk] = []
        if not self.queue or not self.table.free:
            return chunks
        changes, pages = self._tried
        if was_short and self._plans % LOOK_AGAIN and changes == self._changes and pages >= self.cache.available:
            self._short = True
            return chunks
        for request in self.table.slots.able(self._policy.order(view)):
            if budget <= 0 or not self.table.free:
                break
            if request.left == self._plans or overtaking and (  # its last token may still be in flight
                    request.priority < overtaking[1] or request.known - view.cached(request) > overtaking[0]):
                continue
            if not self._admit(request, view.now):
                if not overtaking:  # else it says nothing of those whose turn it is
                    self._short, self._tried = True, (self._changes, self.cache.available)
                break
            chunks.append(self._prefills.chunk(request, budget))
            budget -= chunks[-1].size
        return chunks

    def _admit(self, request: Request, now: float) -> bool:
        """Give a waiting request a slot, its cached prefix and pages for the rest; False when memory is short."""
        size, ids = self.limits.page_size, request.ids
        pages, node = self.cache.acquire(request.stored, request.domain, request.known - 1 if not request.score else 0)
        need = -(-len(ids) // size) - len(pages)
        if self._running and not self._affords(request, need, self._running, self.cache.available):
            self.cache.forget(node)
            return False
        if not request.attempts:
            request.prepare()
        slot = self.table.take(request)
        fresh = self.cache.take(need, slot)
        if fresh is None:
            self.table.give_back(slot)
            self.cache.forget(node)
            self._end(request, "error", f"out of KV memory: the request needs {need} pages, "
                                        f"{self.cache.available} of {self.cache.pool.capacity} can be had")
            return False
        self.queue.remove(request)
        if not request.attempts:
            request.turn = next(self._turns)
            request.use = self.cache.admit(ids, len(pages), node, request.hint, request.priority)
        self.table.reserve(len(pages) + need)
        row = self.table.pages[slot]
        row[:len(pages)] = pages
        row[len(pages):len(pages) + need] = fresh
        self.table.page_count[slot], self.table.tree_pages[slot] = len(pages) + need, len(pages)
        self.table.computed[slot] = len(pages) * size
        request.slot, request.node = slot, node
        self._policy.charge(request.tenant, len(ids) - len(pages) * size, 0)
        self.stats.admitted(request, len(pages) * size, now)
        self._running[slot] = request
        self._prefills.add(request)
        return True

    def _affords(self, request: Request, need: int, running: dict[int, Request], available: int) -> bool:
        """`Growth.affords`, of requests for whose adapters there are places."""
        return self.table.slots.admits(request.adapter) and self.growth.affords(
            self.table, running, request, need, available, self.limits, running is self._running)

    # ---- taking results in

    def _take_all(self, plan: Plan, result: StepResult, full: list[TokenOutput]) -> tuple[np.ndarray, ...]:
        """The decoded tokens: (handles, tokens, requests) of those of which there is nothing more to tell."""
        table, rows, tokens = self.table, plan.rows, result.tokens
        slots, owners, tokens = rows.slots, rows.owners, tokens[:len(rows.slots)]
        known = table.known[slots] + 1
        odd = (known >= rows.end) | (table.generation[slots] != rows.generations) | table.may_stop(tokens)
        self.masks.take(plan, result, odd)
        scored, plain, penalised = rows.scored, rows.plain, rows.penalised
        if len(scored):
            odd[scored] |= np.isnan(result.logprobs[scored])
            full += scored_outputs(scored[~odd[scored]], owners, result)
        others = odd.nonzero()[0].tolist()
        if others:
            even = ~odd
            plain, penalised = plain & even, penalised[even[penalised]]
            table.tokens[slots[even], known[even] - 1] = tokens[even]
            table.known[slots[even]], table.last[slots[even]] = known[even], tokens[even]
        else:
            table.tokens[slots, known - 1] = tokens
            table.known[slots], table.last[slots] = known, tokens
        self.stats.generated_tokens += len(slots) - len(others)
        for request, token in zip(owners[penalised].tolist(), tokens[penalised].tolist(), strict=True):
            request.history.add(token)
        for row in others:
            self._take(owners[row], result, row, full)
        if len(scored) or others:
            return rows.handle[plain], tokens[plain], owners[plain]
        return rows.handle, tokens, owners

    def _take(self, request: Request, result: StepResult, row: int, full: list[TokenOutput]) -> None:
        if request.finish:
            return
        scored = request.params.logprobs is not None
        if scored and np.isnan(result.logprobs[row]):
            return self._end(request, "error", NOT_A_NUMBER)
        token = int(result.tokens[row])
        if request.is_refused(token):
            return self._end(request, "error", **refusal(request, self.table))
        if request.ahead:
            tokens, request.ahead = request.ahead, []
            self.stats.generated_tokens += len(tokens)
            if request.verdict is not None:
                return self._finish(request, "stop", -1, full, pack_ids(tokens))
            return full.append(output_of(request, pack_ids(tokens)))
        outputs = self._append(request, token)
        self.stats.generated_tokens += 1
        reason = request.finish_reason(token, outputs)
        logprobs = token_logprobs(result, row, request.params.logprobs) if scored else None
        if reason:
            stop_id = token if reason == "stop" and token in request.stop_ids else -1
            self._finish(request, reason, stop_id, full, pack_ids([token]), logprobs)
        else:
            full.append(output_of(request, pack_ids([token]), logprobs=logprobs))

    def _append(self, request: Request, token: int) -> int:
        """One more sampled token: how many the output has now."""
        if request.history is not None:
            request.history.add(token)
        slot, table = request.slot, self.table
        if not slot:
            request.stored += pack_ids([token])
            self.queue.tokens += 1
            return request.known - request.prompt_len
        known = int(table.known[slot])
        table.tokens[slot, known] = table.last[slot] = token
        table.known[slot] = known + 1
        return known + 1 - request.prompt_len

    def _score(self, chunk: Chunk, result: StepResult, row: int) -> None:
        rows = slice(row, row + chunk.scores)
        request, k = chunk.request, chunk.request.params.prompt_logprobs
        if not request.finish and np.isnan(result.logprobs[rows]).any():
            return self._end(request, "error", NOT_A_NUMBER)
        if not request.finish and (request.slot == chunk.slot or not request.score):
            request.scores.append((result.logprobs[rows], result.top_ids[rows, :k], result.top_logprobs[rows, :k]))

    # ---- endings

    def _finish(self, request: Request, reason: FinishReason, stop_id: int, full: list[TokenOutput],
                tokens: bytes = b"", logprobs: Logprobs | None = None) -> None:
        self._close(request, reason)
        full.append(output_of(request, tokens, reason, stop_id, logprobs))

    def _end(self, request: Request, reason: FinishReason, error: str = "", **more: Any) -> None:
        if not request.finish:
            self._close(request, reason)
            self._ended.append(output_of(request, finish=reason, error=error, **more))

    def _close(self, request: Request, reason: FinishReason) -> None:
        request.finish = reason
        del self._by_id[request.id]
        if request.slot:
            if reason != "error":
                self.growth.ended(int(self.table.known[request.slot]) - request.prompt_len)
            self._vacate(request)
        else:
            self.queue.remove(request)
        self._changes += 1
        self.stats.finished(request)

    def _vacate(self, request: Request) -> None:
        """Take a request off the device: what it computed stays cached, the rest of its pages and its slot are free."""
        slot, table = request.slot, self.table
        self._changes += 1
        if self.speculation is not None:
            self.speculation.left(request)
        computed = int(table.computed[slot])
        if request in self._prefills:
            self._prefills.remove(request)
        else:
            computed = max(computed, int(min(table.length[slot] - 1, table.known[slot])))
            self._decoding = self._decoding[self._decoding != slot]
        self._policy.charge(request.tenant, 0, int(table.known[slot] - table.charged[slot]))
        self._prefills.commit(request, computed)
        row = table.pages[slot, :table.page_count[slot]].copy()
        self.cache.release(row, int(table.tree_pages[slot]), slot, request.node, request.use, request.hint)
        del self._running[slot]
        table.give_back(slot)
        request.slot, request.node = 0, None

    def _expire(self, now: float) -> None:
        if now < self._next_expiry:
            return
        self._next_expiry = now + 1.0
        for request, words, status in list(overdue(self.queue, self._running.values(), self.limits, now)):
            self._end(request, "error", words, status=status)
