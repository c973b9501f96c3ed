"""The scheduler on the null platform with a virtual clock: every token, page, slot and output is checked as it comes.

The model of these tests is a hash of the whole context and of everything that decides a token: `Draw`. The device
reads it off the batch, the oracle off the request, so a wrong page, uniform, penalty count or bias changes the text.
"""
from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from isthmus.core.cache.manager import CacheManager
from isthmus.core.cache.pool import QUARANTINE, TREE, PagePool
from isthmus.core.errors import Overloaded
from isthmus.core.messages import GrammarSpec, Logprobs, SamplingParams, Submit, TokenOutput, pack_ids, unpack_ids
from isthmus.core.plan import Batch, Out, StepResult
from isthmus.core.scheduler import batch as batch_module
from isthmus.core.scheduler.admission import Limits
from isthmus.core.scheduler.plans import Drafts
from isthmus.core.scheduler.policy import POLICIES
from isthmus.core.scheduler.request import cache_domain
from isthmus.core.scheduler.scheduler import Plan, Scheduler
from isthmus.core.scheduler.times import StepTimes
from isthmus.core.specs import Buckets, LayerState, StateSpec
from isthmus.core.speculation.contract import Drafter, Proposals, View, Ways
from isthmus.core.speculation.speculation import Drafting
from isthmus.core.turn import Flight, Turn
from isthmus.platforms.null.platform import Platform, State, nearest

from .hashed import (
    EOS,
    GRAMMARS,
    MAX_LEN,
    VOCAB,
    allowed_after,
    draw_token,
    grammar_after,
    logprob_of,
    received,
    requested,
    stop_ids,
)
from .queued import Fault, Queue

DOMAINS = (b"", b"", b"", cache_domain(salt="a"), cache_domain(adapter=("a", 1)))
PARAMS: dict[str, tuple[Any, ...]] = {
    "max_tokens": (0, 1, 2, 8, 20, 40, 40), "min_tokens": (0, 0, 0, 4), "temperature": (0.0, 0.0, 1.0, 1.5),
    "top_p": (1.0, 1.0, 0.75), "top_k": (0, 0, 7), "min_p": (0.0, 0.0, 0.25), "seed": (None, 0, 5, 2**64 - 1),
    "repetition_penalty": (1.0, 1.0, 1.0, 1.5), "presence_penalty": (0.0, 0.0, 0.0, -0.5),
    "frequency_penalty": (0.0, 0.0, 0.0, 0.5), "logit_bias": ({}, {}, {}, {7: -0.5, EOS: 4.0}, {1: float("-inf")}),
    "stop_token_ids": ((), (), (5, 9)), "ignore_eos": (False, True), "logprobs": (None, None, None, 0, 2),
    "prompt_logprobs": (None, None, None, None, None, 3)}


# ---- the device

class Device(Platform):
    """The null platform with this module's model; `fault` makes the next step fail, after scribbling on its slots."""

    def __init__(self, late: bool):
        super().__init__({"vocab": str(VOCAB)})
        self._worker, self.fault = Queue(late), False

    def _checked(self, state: State, batch: Batch, bucket: Any) -> StepResult:
        if self.fault:
            self.fault = False
            state.tokens[batch.slots], state.positions[batch.slots] = VOCAB - 1, -7
            state.last[batch.seqs] = -1
            raise Fault("the device gave up")
        return super()._checked(state, batch, bucket)

    def _next(self, context: np.ndarray, batch: Batch, i: int, allowed: np.ndarray | None) -> int:
        return nearest(draw_token(context.tolist(), received(context, batch, i)), allowed)

    def _result(self, tokens: np.ndarray, batch: Batch) -> StepResult:
        if batch.sampling.top_logprobs is None:
            return StepResult(tokens)
        ids = (tokens[:, None] + np.arange(len(batch.sampling.top_logprobs), dtype=np.int32)) % VOCAB
        return StepResult(tokens, logprob_of(tokens), ids, logprob_of(ids))


class WriteOnce:
    """A slot is written once in each generation of its page, by a page's owner or for a prompt that the tree has
    taken already; it is read only in the generation that wrote it, and only in the domain that it was written for."""

    def __init__(self, slots: int, page_size: int):
        self.page_size, self.written = page_size, np.full(slots, -1, np.int64)
        self.domains = np.full(slots, b"", object)

    def launch(self, batch: Batch, pool: PagePool, domains: list[bytes]) -> None:
        """Check the writes and reads of a batch, rows in `domains`, against the ledger when it is launched."""
        size, real = self.page_size, int(batch.starts[-1])
        slots, seqs = batch.slots[:real], batch.seqs[batch.rows[:real]]
        owner, generation = pool.owner[slots // size], pool.generation[slots // size]
        wrong = np.flatnonzero((owner != seqs) & (owner != TREE) & (owner != QUARANTINE))
        assert not len(wrong), f"slot {slots[wrong[0]]} of owner {owner[wrong[0]]} is written for {seqs[wrong[0]]}"
        again = np.flatnonzero(self.written[slots] == generation)
        assert not len(again), f"slot {slots[again[0]]} is written twice in generation {generation[again[0]]}"
        self.written[slots], self.domains[slots] = generation, np.array([*domains, b""], object)[batch.rows[:real]]
        for row, domain in enumerate(domains):
            positions = np.arange(batch.lengths[row])
            slots = batch.pages[row, positions // size] * size + positions % size
            stale = np.flatnonzero(self.written[slots] != pool.generation[slots // size])
            assert not len(stale), f"row {row} reads slot {slots[stale[0]]}, written in a generation that is gone"
            assert (self.domains[slots] == domain).all(), f"row {row} of domain {domain} reads another domain's slots"


# ---- the drafter

class Guess(Drafter):
    """Knows the model, and is wrong now and then, at any place."""

    def __init__(self, run: Run, seed: int = 0):
        self.run, self.random, self.left_slots, self.fault = run, random.Random(seed), 0, False

    def propose(self, view: View) -> Proposals | Ways:
        if self.fault:
            raise Fault("the drafter gave up")
        owners = [i for i in range(len(view.slots)) for _ in range(1 + self.random.randint(0, self.run.branches))]
        drafts = [self._draft(view.tokens[view.slots[i], :view.known[i]].tolist(), int(view.slots[i]),
                              int(view.most[i])) for i in owners]
        found = np.array([*map(len, drafts)], np.int32), np.array(sum(drafts, []), np.int32)
        return Ways(*found, np.array(owners, np.int32)) if self.run.branches else Proposals(*found)

    def _draft(self, known: list[int], slot: int, most: int) -> list[int]:
        submit = self.run.tracks[self.run.scheduler.table.owner[slot].id].submit
        prompt, draft = unpack_ids(submit.prompt).tolist(), []
        assert known[:len(prompt)] == prompt
        for _ in range(self.random.randint(0, most)):
            out = known[len(prompt):] + draft
            right = self.random.random() < 0.8
            try:
                allowed = allowed_after(submit.params, out)
            except AssertionError:  # the draft has left its grammar
                right = False
            draft.append(nearest(draw_token([*prompt, *out], requested(submit, out)), allowed) if right
                         else self.random.randrange(VOCAB))
        return draft

    def left(self, slot: int, tokens: np.ndarray, cached: int, domain: bytes) -> None:
        self.left_slots += 1


# ---- the driver

@dataclass
class Track:
    """What is known about one request."""

    submit: Submit
    arrival: float
    out: list[int] = field(default_factory=list)
    finish: str | None = None
    cached: int | None = None
    aborted: bool = False


class Run:
    """A scheduler with everything around it. `launched` counts steps; `padded` uses buckets; `late` as in `Queue`;
    `drafts`: tokens that `Guess` drafts at most; `branches`: further ways to go on, each as good as the first;
    `taken`: how many of them a request has gone on in."""

    def __init__(self, page: int = 4, pages: int = 30, policy: str = "lpm", late: bool = False, padded: bool = False,
                 prefix_cache: bool = True, strict: bool = True, drafts: int = 0, adaptive: bool = False,
                 branches: int = 0, **limits: Any):
        assert (pages - 1) * page >= limits.get("max_model_len", MAX_LEN), "the longest request must fit"
        limits = {"max_running": 6, "max_queued": 8, "chunk": 12, "max_model_len": MAX_LEN, "score_rows": 5,
                  "waiting_timeout": 6.0, "running_timeout": 20.0} | limits
        self.limits = Limits(page_size=page, vocab_size=VOCAB, eos_ids=(EOS,), **limits)
        self.cache = CacheManager(pages, page, enabled=prefix_cache, strict=strict)
        full = self.limits.max_running + self.limits.chunk
        drafting = Drafting("guess", Guess(self), drafts, adaptive, step_tokens=full * padded,
                            on_device=drafts % 2 == 1, branches=branches,
                            step_rows=self.limits.max_running * padded) if drafts else None
        self.branches, self.taken = branches, 0
        self.scheduler = Scheduler(self.limits, self.cache, policy, GRAMMARS, drafting=drafting)
        self.buckets = None
        if padded:
            self.buckets = Buckets((2, 8, full), (1, 4, self.limits.max_running), (1, 4, self.limits.max_pages))
        self.device = Device(late)
        self.state = self.device.alloc(StateSpec((LayerState(1, 1),), "f32", page, self.limits.max_running + 1), pages)
        self.once = WriteOnce(pages * page, page)
        self.tracks: dict[str, Track] = {}
        self.history: list[list[int]] = [[0]]
        self.flight: Flight | None = None
        self.fault: str | None = None
        self.late_masks = True
        self.faulted, self.now, self.launched, self.submitted = False, 1.0, 0, 0

    # ---- what can happen

    def submit(self, prompt: list[int], domain: bytes = b"", priority: int = 0, tenant: str = "", ttft: float = 0.0,
               grammar: int | None = None, **params: Any) -> str | None:
        """Submit a request; None if the queue is full. grammar: the number of a `Toy`."""
        spec = None if grammar is None else GrammarSpec("regex", str(grammar))
        rid = f"r{self.submitted}"
        self.submitted += 1
        params = {"temperature": 0.0, "grammar": spec} | params
        request = Submit(rid, pack_ids(prompt), SamplingParams(**params), domain, priority, tenant=tenant, ttft=ttft)
        try:
            self.scheduler.submit(request, self.now, spec and GRAMMARS.ask(spec).result().start())
        except Overloaded:
            free = 0 if self.scheduler._short else self.scheduler.table.free
            assert self.scheduler.waiting - free >= self.limits.max_queued, "refused although there is a place"
            return None
        self.tracks[rid] = Track(request, self.now)
        self.history = [*self.history[-11:], prompt]
        return rid

    def abort(self, *ids: str) -> None:
        for rid in ids:
            self.tracks[rid].aborted = True
        self.scheduler.abort([*ids, "unknown"])
        self.scheduler.verify()

    def fail_next(self, kind: str) -> None:
        """The next step fails: while its batch is built, at launch, or when it is collected."""
        self.fault = kind

    def flush(self) -> None:
        self.cache.flush()
        self.scheduler.verify()
        assert self.cache.tree.evictable == 0

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def step(self, overlap: bool = True) -> list[TokenOutput]:
        """One turn of the engine's loop; without overlap the step is settled at once."""
        self.now += 0.01
        self.faulted = False
        before = []
        if self.flight is not None and self.scheduler.settles_first(self.flight.plan):
            turn, self.flight = Turn(self.scheduler, StepTimes(), self.flight), None
            before = self._land(turn, None, None)
        plan = self.scheduler.plan(self.now)
        turn, self.flight, fault = Turn(self.scheduler, StepTimes(), self.flight), None, None
        if plan is not None:
            self._check_plan(plan)
            try:
                self.flight = Flight(plan, self._launch(plan, turn))
            except Fault as error:
                fault = error
        outputs = before + self._land(turn, plan, fault)
        if not overlap and self.flight:
            turn, self.flight = Turn(self.scheduler, StepTimes(), self.flight), None
            outputs += self._land(turn, None, None)
        self.scheduler.verify()
        for output in outputs:
            self._absorb(output)
        self._check_late()
        return outputs

    def drain(self, limit: int = 3000) -> None:
        """Step until nothing is left."""
        for _ in range(limit):
            if not (self.flight or self.scheduler.running or self.scheduler.waiting or self.scheduler.has_ended):
                return
            self.step()
        raise AssertionError(f"after {limit} steps {self.scheduler.running} run and {self.scheduler.waiting} wait")

    def finish(self) -> None:
        """Drain, then everything must be as it was at first, page by page."""
        self.drain()
        open_ends = [rid for rid, track in self.tracks.items() if not track.finish]
        assert not open_ends, f"{open_ends} got no end"
        pool, tree, table = self.cache.pool, self.cache.tree, self.scheduler.table
        assert tree.protected == 0 and pool.free + tree.evictable == pool.capacity
        self.flush()
        assert sorted(pool._free[:pool.free].tolist()) == list(range(1, pool.total)) and not pool.owner.any()
        assert not tree._roots, f"{len(tree._roots)} domains are left"
        assert sorted(table._free) == list(range(1, self.limits.max_running + 1))
        assert not self.scheduler._by_id and not len(self.scheduler._decoding) and not list(self.scheduler._prefills)

    # ---- inside

    def _launch(self, plan: Plan, turn: Turn) -> Out:
        fault, self.fault = self.fault, None
        if fault == "build":
            raise Fault("no bucket")
        batch, bucket = batch_module.build_batch(plan, self.scheduler.table, self.limits.page_size, self.buckets,
                                                 self.scheduler.masks)
        slots = batch.seqs[batch.lengths > 0].tolist()
        domains = [self.tracks[self.scheduler._running[slot].id].submit.domain for slot in slots]
        self._copy(plan.drafts)
        self.once.launch(batch, self.cache.pool, domains)
        self.scheduler.advance(plan)
        batch = turn.masked(batch, self.late_masks)
        if fault == "launch":
            raise Fault("out of memory")
        if fault == "collect":
            self.device.fault = True
        self.launched += 1
        out, self.state = self.device.compile(None, None, bucket)(self.state, batch)
        return out

    def _copy(self, drafts: Drafts | None) -> None:
        """The pages that branches begin with, as the engine copies them: what the request has computed of its last."""
        if drafts is None or not len(drafts.copies):
            return
        size, copies = self.limits.page_size, drafts.copies.tolist()
        self.state = self.device.copy_pages(self.state, *drafts.copies.T.tolist())
        for source, target in copies:
            owner = self.cache.pool.owner[target]
            computed = int(self.scheduler.table.known[owner] - 1) % size
            assert computed and owner == self.cache.pool.owner[source], f"page {source} is copied for {owner}"
            here, there = (np.arange(page * size, page * size + computed) for page in (source, target))
            assert (self.once.written[here] == self.cache.pool.generation[source]).all(), "what was not computed"
            self.once.written[there], self.once.domains[there] = (
                self.cache.pool.generation[target], self.once.domains[here])

    def _land(self, turn: Turn, plan: Plan | None, fault: Fault | None) -> list[TokenOutput]:
        """Take in the step before, as the engine does. plan, fault: of a step that could not be launched."""
        drafts = turn.before and turn.before.plan.drafts
        before = self._first_pages(drafts) if drafts else []
        turn.land()
        if drafts:
            self._forget_rejected(drafts)
            self.taken += sum(bool(a and b and a != b) for a, b in zip(before, self._first_pages(drafts), strict=True))
        outputs = list(turn.outputs or self.scheduler.ended())
        if turn.error is not None and not isinstance(turn.error, Fault):
            raise turn.error
        broken = [turn.before.plan] if turn.error else []
        broken += [plan] if fault else []
        return outputs + (self._failed(broken, turn.error or fault) if broken else [])

    def _first_pages(self, drafts: Drafts) -> list[int]:
        """Where each request's first row has its known token."""
        rows, pages = np.flatnonzero(drafts.shifts == 0), self.scheduler.table.pages
        return pages[drafts.slots[rows], (drafts.lengths[rows] - 1) // self.limits.page_size].tolist()

    def _forget_rejected(self, drafts: Drafts) -> None:
        """What was written for rejected tokens is overwritten by the next ones, and read by nobody before."""
        table, size = self.scheduler.table, self.limits.page_size
        alive = table.generation[drafts.slots] == drafts.generations
        for slot in drafts.slots[alive].tolist():
            places = np.arange(table.known[slot] - 1, table.page_count[slot] * size)
            self.once.written[table.pages[slot, places // size] * size + places % size] = -1

    def _failed(self, plans: list[Plan], fault: Exception) -> list[TokenOutput]:
        flight, self.flight, self.faulted = self.flight, None, True
        plans += [flight.plan] if flight else []
        try:
            if flight:
                flight[1].collect()
        except (Fault, AssertionError):
            pass  # it may well have read what the failed step did not write
        return self.scheduler.fail(plans, str(fault))

    def _check_plan(self, plan: Plan) -> None:
        limits = self.limits
        ranges = plan.record().ranges
        assert len({r.request for r in ranges}) == len(ranges) <= limits.max_running
        assert all(0 <= r.start < r.stop <= limits.max_model_len for r in ranges), f"ranges {ranges}"
        assert sum(c.stop - c.start for c in plan.chunks) <= limits.chunk, "over the budget of prompt tokens"
        assert all(c.scores <= limits.score_rows for c in plan.chunks), "over the limit of scored rows"
        assert all(r.sample for r in ranges[:len(plan.decode)])

    def _check_late(self) -> None:
        late = [rid for rid, t in self.tracks.items() if t.aborted and not t.finish]
        assert not late, f"{late} are aborted and have no end"
        once_a_second = self.now - 1.02
        waiting = self.scheduler.queue
        late = [r.id for r in waiting if not r.attempts and once_a_second - r.arrival > self.limits.waiting_timeout]
        running = [*self.scheduler._running.values(), *(r for r in waiting if r.attempts)]
        late += [r.id for r in running if once_a_second - r.started > self.limits.running_timeout]
        assert not late, f"{late} should have timed out"

    def _absorb(self, output: TokenOutput) -> None:
        """Check one output against the oracle."""
        track = self.tracks[output.id]
        assert track.finish is None, f"{output.id} gets output after its end"
        params, prompt = track.submit.params, unpack_ids(track.submit.prompt)
        tokens = unpack_ids(output.tokens).tolist()
        for token in tokens:
            want = nearest(draw_token([*prompt, *track.out], requested(track.submit, track.out)),
                           allowed_after(params, track.out))
            assert token == want, f"{output.id}: token {len(track.out)} is {token}, right is {want}"
            track.out.append(token)
        if params.logprobs is None:
            assert output.logprobs is None
        elif tokens:
            check_logprobs(output.logprobs, np.array(tokens), params.logprobs)
        if track.cached is None:
            self._check_first(track, output, prompt)
        else:
            assert (output.prompt_tokens, output.cached_tokens, output.prompt_logprobs) == (0, 0, None)
        track.finish = output.finish
        self._check_end(track, output, len(prompt))

    def _check_first(self, track: Track, output: TokenOutput, prompt: np.ndarray) -> None:
        k, reusable = track.submit.params.prompt_logprobs, self.cache.enabled
        track.cached = output.cached_tokens
        assert output.prompt_tokens == len(prompt)
        assert 0 <= track.cached <= (len(prompt) - 1 if reusable and k is None else 0)
        assert track.cached % self.limits.page_size == 0
        if k is None or len(prompt) == 1 or output.finish in ("abort", "error"):
            assert output.prompt_logprobs is None
        else:
            assert output.prompt_logprobs is not None, f"{output.id} misses its prompt's logprobs"
            check_logprobs(output.prompt_logprobs, prompt[1:], k)

    def _check_end(self, track: Track, output: TokenOutput, prompt_len: int) -> None:
        params, last = track.submit.params, track.out[-1] if track.out else -1
        most = min(params.max_tokens, self.limits.max_model_len - prompt_len)
        stopped = bool(track.out) and last in stop_ids(params) and (
            len(track.out) >= params.min_tokens or params.grammar is not None)
        complete = bool(track.out) and not stopped and params.grammar is not None and grammar_after(
            params, track.out).is_complete()
        right = "stop" if stopped or complete else "length" if len(track.out) == most else None
        if output.finish == "abort":
            assert track.aborted
        elif output.finish == "error":
            late = self.now - track.arrival > min(self.limits.waiting_timeout, self.limits.running_timeout)
            assert self.faulted or late and ("waited" in output.error or "ran" in output.error), output.error
        elif output.tokens or output.finish:
            assert output.finish == right, f"{output.id}: {output.finish} at {len(track.out)} tokens, right is {right}"
        assert output.stop_id == (last if output.finish == "stop" and stopped else -1)


def check_logprobs(have: Logprobs, tokens: np.ndarray, k: int) -> None:
    ids = (tokens[:, None] + np.arange(k)) % VOCAB
    assert have is not None and have.k == k
    assert have.chosen == logprob_of(tokens).tobytes(), f"logprobs {np.frombuffer(have.chosen, np.float32)} of {tokens}"
    assert (have.top_ids, have.top) == (pack_ids(ids), logprob_of(ids).tobytes()), f"top logprobs of {tokens}"


# ---- random work

def random_run(seed: int, steps: int, grammars: bool = False, drafts: int = 0, branches: int = 0) -> Run:
    """A run of at least `steps` launched steps in which anything may happen, then a drain; the same for a seed.
    grammars: half of the requests have one. drafts, branches: as of `Run`."""
    rng = random.Random(seed)
    page = rng.choice((1, 2, 4, 16))
    least = -(-MAX_LEN // page) + 1
    run = Run(page, rng.randint(least, 2 * least), rng.choice(POLICIES.names()), late=rng.random() < 0.5,
              padded=rng.random() < 0.5, prefix_cache=rng.random() < 0.9, chunk=rng.choice((4, 12, 40)),
              score_rows=rng.choice((2, 5, 64)), foresight=rng.choice((0, 0, 4, 32)),
              itl_target=rng.choice((0.0, 0.0, 0.02)), drafts=drafts, branches=branches)
    overlap, load = rng.choice((0.0, 0.5, 1.0, 1.0)), rng.choice((0.15, 0.4))
    while run.launched < steps:
        if rng.random() < load:
            base = rng.choice(run.history)
            keep = rng.choice((len(base), rng.randint(0, len(base))))
            prompt = base[:keep] + [rng.randrange(4) for _ in range(rng.randint(1, 8))]
            domain = rng.choice(DOMAINS)
            for _ in range(rng.choice((1, 1, 1, 3))):
                params = {name: rng.choice(values) for name, values in PARAMS.items()}
                if grammars:
                    params["grammar"] = rng.choice((None, rng.randrange(60)))
                run.submit(prompt[:36], domain, rng.choice((0, 0, 0, 1)), rng.choice(("", "a", "b")),
                           rng.choice((0.0, 0.1, 3.0)), **params)
        if rng.random() < 0.08 and run.tracks:
            run.abort(rng.choice(list(run.tracks)[-12:]))
        event = rng.random()
        if event < 0.01:
            run.fail_next(rng.choice(("build", "launch", "collect", "collect")))
        elif event < 0.03:
            run.flush()
        elif event < 0.035:
            run.wait(rng.choice((1.0, 7.0, 21.0)))
        for output in run.step(rng.random() < overlap):
            if output.finish:
                track = run.tracks[output.id]
                run.history = [*run.history[-11:], (unpack_ids(track.submit.prompt).tolist() + track.out)[:30]]
        if len(run.tracks) > 60:
            run.tracks = {rid: track for rid, track in run.tracks.items() if not track.finish}
    run.finish()
    return run
