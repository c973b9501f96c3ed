"""The loop: plan -> launch -> (while the device works) settle the previous step. One thread calls it.

Nothing here knows a device: the platform gives a manifest, a state and a step; time comes from one clock.
"""
from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from . import startup
from .adapters.store import Adapters, wanted_slots
from .cache.manager import CacheManager
from .config import Config
from .contract import Checked, check_ops
from .discovery import told
from .embedding import Embedder
from .engine_info import engine_info
from .env import debug_level
from .errors import CheckpointError, ConfigError, EngineDead, RequestError, cut, said
from .grammar.contract import Matcher
from .grammar.controls import biased
from .grammar.library import Library
from .grammar.processors import load_processors
from .grammar.vocabulary import Vocabulary
from .grammar.waiting import Compiling
from .manifests import missing_features
from .messages import FinishReason, SamplingParams, Submit, TokenOutput, pack_ids, refused
from .plan import Batch, Out
from .platform import State, Step
from .recording.recorder import Recorder, check_file, open_file
from .scheduler.admission import Limits
from .scheduler.batch import bucketed, build_batch
from .scheduler.outputs import StepOutputs
from .scheduler.scheduler import NOT_A_NUMBER, Plan, Scheduler
from .scheduler.times import DEVICE, SCHEDULE, StepTimes
from .specs import Bucket
from .speculation.load import drafting
from .tracing import traced_forward
from .turn import Flight, Turn
from .weights.checkpoint import open_checkpoint

log = logging.getLogger(__name__)

COMPILING = 0.005             # seconds that an engine with nothing else to do waits for a grammar
LOOK, LOOK_AGAIN = 1.0, 15.0  # seconds between looks at the device's memory; after K and V gave way
AUDIT = 60.0                  # seconds between two proofs of the ledger of an idle engine


class EngineCore:
    """Model, cache and scheduler on one platform, one step at a time.

    clock: seconds, monotonic; tests pass a virtual one. progress(stage, done, total) is told about loading.
    platform: an object that was not probed yet, in place of the one that the settings name (conformance).
    loaded, recorder: what `startup.load` gives, and what stands between engine and world, in a rerun of a recording.
    """

    def __init__(self, config: Config, progress: Callable[[str, int, int | None], None] | None = None,
                 clock: Callable[[], float] = time.monotonic, platform: Any = None,
                 loaded: startup.Loaded | None = None, recorder: Any = None):
        began = time.monotonic()
        self._publisher = _open_publisher(config, self)
        if recorder is None:
            check_file(config)
            load_processors(config.scheduler.logits_processors)
        loaded = loaded or startup.load(config, progress, platform)
        self.recorder = recorder or Recorder(clock, open_file(config, loaded))
        self._platform, self._manifest, self._model = loaded.platform, loaded.manifest, loaded.model
        sizes = loaded.sizes
        self._page_size, self._overlap = sizes.page_size, loaded.overlap
        self._late_masks = "late_mask" in loaded.manifest.features
        self._state_spec = sizes.state
        tell = progress or (lambda stage, done, total: None)
        tell("allocate KV cache", 0, sizes.pages * sizes.state.page_bytes())
        self._state = self._platform.alloc(sizes.state, sizes.pages)
        self._next_look, self._given_back, self._blind = 0.0, 0, False
        self._next_audit, self._worth_telling = 0.0, 1
        self._steps: dict[Bucket | None, Step] = {}
        self._adapted_steps: dict[Bucket | None, Step] = {}  # whose batches name adapters
        self._flight: Flight | None = None
        self.cache = CacheManager(sizes.pages, sizes.page_size, config.cache.eviction_policy, config.cache.prefix_cache,
                                  pin_share=config.cache.pin_share)
        self.grammars = self.recorder.grammars(lambda: Library(config.scheduler.grammar_backend,
                                                               lambda: _vocabulary(loaded)))
        self._compiling = Compiling(self.grammars, config.scheduler.max_queued_requests)
        limits = _limits(config, loaded)
        self.scheduler = Scheduler(limits, self.cache, config.scheduler.schedule_policy, self.grammars,
                                   self.recorder.answered,
                                   drafting(config, loaded, limits, self.cache.tree, self.recorder, self))
        self._drafts_on_device = self.scheduler.speculation is not None and self.scheduler.speculation.drafter.on_device
        self.adapters = Adapters(config.adapters, loaded.adapters, self.scheduler.table.slots, loaded.model,
                                 loaded.platform, (config.model.served_model_name, loaded.model.config.name))
        self.embedder = Embedder(self, loaded, config.parallel.tensor_parallel_size)
        self.steps, self.times = 0, StepTimes()
        self.info = replace(engine_info(config, loaded, time.monotonic() - began), **self.adapters.info())
        tell("warm up", 0, None)
        self._warm_up()
        if self._publisher is not None:
            self._publisher.attach(self.cache)

    # ---- what callers do

    def submit(self, submit: Submit) -> None:
        """Queue a request. Raises `RequestError` with the field and number at fault, `Overloaded` when full.

        One with a grammar that has to be compiled first comes to the queue when it is; what is wrong with that is the
        request's only output.
        """
        matcher = None
        if submit.params.grammar is not None or submit.params.controls is not None:
            self.scheduler.check(submit)
            matcher = self._compiling.start(submit)
            if matcher is None:
                return
        self.enter(submit, matcher)

    def enter(self, submit: Submit, matcher: Matcher | None = None) -> None:
        """Queue a request whose grammar, if it has one, is there. Raises as `submit` does."""
        submit = biased(submit, matcher)
        self.recorder.submitted(submit)
        self.adapters.check(submit.adapter)
        self.scheduler.submit(submit, self.recorder.now(), matcher)

    def abort(self, ids: Iterable[str], reason: FinishReason = "abort") -> None:
        """End requests in any state; the next `step` reports them. Unknown ids are ignored."""
        ids = tuple(ids)
        self.recorder.aborted(ids, reason)
        for submit in self._compiling.drop(ids):
            self.scheduler.report(TokenOutput(submit.id, b"", reason, prompt_tokens=len(submit.prompt) // 4))
        self.scheduler.abort(ids, reason)

    @property
    def has_work(self) -> bool:
        """Is there anything that `step` would do?"""
        return bool(self._computes or self.scheduler.has_ended or len(self._compiling))

    @property
    def _computes(self) -> bool:
        # Unlike `has_work` it is the same in a rerun: requests whose grammar is being compiled, and the ends of those
        # that never came to the queue, are in no recording.
        return bool(self._flight or self.scheduler.running or self.scheduler.waiting)

    def step(self) -> StepOutputs:
        """Launch the next step, then settle the previous one (with overlap) or this one: the new outputs."""
        self.times.enter(SCHEDULE)
        if len(self._compiling):
            self._take_compiled()
        self.recorder.stepped()
        self.adapters.renew(self.recorder.now, self.scheduler, self._adapted_steps)
        outputs = self.relieve()
        if outputs is None:
            outputs = self._advance()
        self._publish()
        self.times.enter(None)
        self._tell_violations()
        if debug_level() >= 3:
            self.scheduler.verify()
        return outputs

    def relieve(self) -> StepOutputs | None:
        """Give memory of K and V back when the device gets short of it, at most a quarter at once; looks each second.

        Running requests wait and are computed anew in the pages that are left; the outputs are of the step in flight.
        None when nothing was given back.
        """
        floor = self._manifest.memory_floor
        if not floor or (now := self.recorder.now()) < self._next_look:
            return None
        self._next_look = now + LOOK
        had, least = self.cache.pool.capacity, self.scheduler.limits.max_pages
        left = max(least, had * 3 // 4)
        total, free = self.recorder.memory(self._free_memory)
        if free >= floor * total or left >= had:
            return None
        outputs = self._land()
        self.scheduler.retract_all()
        self.cache.shrink(left + 1)
        self._state = None  # before there is a second one
        self._state = self._platform.alloc(self._state_spec, left + 1)
        self._given_back += had - left
        self._next_look = now + LOOK_AGAIN
        log.warning("%d of %d MiB are free on %s: %d of %d pages of K and V were given back, running requests are "
                    "computed anew", free / 2**20, total / 2**20, self._manifest.name, had - left, had)
        return outputs

    def command(self, name: str, **arguments: Any) -> dict[str, Any]:
        """Administrative calls: "stats", "flush_cache", "ping", "verify", "pin" (session, ttl), "unpin" (session).
        Raises ValueError for another name, `RequestError` for what cannot be done. Of adapters: "read_adapter" (lora,
        path, replace), "add_adapter" (and number; or give_up), "remove_adapter" (lora), "adapters"."""
        if (answer := self.adapters.before(name, **arguments)) is not None:
            return answer
        if name == "embed":
            return self.embedder.embed(**arguments)
        self.recorder.commanded(name, arguments)
        commands = {"stats": self.stats, "verify": self._verify, "ping": self._ping,
                    "make_room": self.embedder.make_room,
                    "flush_cache": self._flush_cache, "pin": self._pin,
                    "unpin": lambda session: {"unpinned": self.cache.pins.unpin(session)},
                    "add_adapter": self.adapters.add, "remove_adapter": self.adapters.remove,
                    "adapters": lambda: {"adapters": self.adapters.list()}}
        if name not in commands:
            raise ValueError(f"unknown command {name!r}; there are: {', '.join(sorted(commands))}")
        answer = commands[name](**arguments)
        self._publish()
        return answer

    def report(self) -> str:
        """What the engine is doing and what happened last, for people; nothing private. Any thread may ask."""
        pool, flight = self.cache.pool, self._flight
        return (f"engine: {self.steps} steps, {f'step {flight.plan.step}' if flight else 'none'} in flight, "
                f"{self.scheduler.running} running, {self.scheduler.waiting} waiting, {pool.free} of {pool.capacity} "
                f"pages free, {pool.violations} ownership violations; {self.recorder.tail()}")

    def save(self) -> None:
        """Hand what is recorded to the system, as the process may end. Any thread may ask."""
        self.recorder.flush()

    def close(self) -> None:
        """Let the device go."""
        if self._flight:
            plan, out = self._flight
            self._flight = None
            try:
                out.collect()
            except EngineDead as error:  # the rest is to be let go all the same
                log.error("step %d: %s", plan.step, error)
            except Exception as error:
                self._failed([plan], error)
        self.recorder.close()
        self.grammars.close()
        self.adapters.close()
        getattr(self._platform, "close", lambda: None)()
        if self._publisher is not None:
            self._publisher.close()

    # ---- inside

    def _publish(self) -> None:
        if self._publisher is not None:
            self._publisher.publish()

    def _take_compiled(self) -> None:
        """Queue the requests whose grammars are there; with nothing else to do, wait a little for the first."""
        for submit, found in self._compiling.ready(0.0 if self._computes or self.scheduler.has_ended else COMPILING):
            try:
                if isinstance(found, RequestError):
                    raise found
                self.enter(submit, found)
            except RequestError as error:
                self.scheduler.report(refused(submit.id, error))

    def _advance(self) -> StepOutputs:
        if self._flight is not None and self.scheduler.settles_first(self._flight.plan):
            return self._land().followed_by(self._go_on())
        return self._go_on()

    def _go_on(self) -> StepOutputs:
        plan = self.scheduler.plan(self.recorder.now())
        turn, self._flight = Turn(self.scheduler, self.times, self._flight), None
        failed: list[tuple[Plan, Exception]] = []
        try:
            if plan is not None:
                try:
                    self._flight = Flight(plan, self._launch(plan, turn))
                except Exception as error:
                    failed.append((plan, error))
            turn.land()
            if not self._overlap and self._flight and not failed:
                turn, self._flight = Turn(self.scheduler, self.times, self._flight), None
                turn.land()
        finally:
            turn.release()
        return self._told(turn, failed)

    def _told(self, turn: Turn, failed: list[tuple[Plan, Exception]]) -> StepOutputs:
        """The outputs of the step before, and the ends of all that ran, if it or the launched one has failed."""
        outputs = turn.outputs or StepOutputs(self.scheduler.ended())
        if turn.error is not None:
            failed.insert(0, (turn.before.plan, turn.error))
        if not failed:
            return outputs
        plans = [plan for plan, _ in failed] + ([self._flight.plan] if self._flight else [])
        ends = self._failed(plans, failed[0][1])
        return StepOutputs([*outputs.full, *ends.full], outputs.handles, outputs.tokens, outputs.owners)

    def _land(self) -> StepOutputs:
        """Settle the step in flight without launching another."""
        turn, self._flight = Turn(self.scheduler, self.times, self._flight), None
        if turn.before is None:
            return StepOutputs()
        turn.land()
        return self._told(turn, [])

    def _launch(self, plan: Plan, turn: Turn) -> Out:
        batch, bucket = build_batch(plan, self.scheduler.table, self._page_size, self._manifest.buckets,
                                    self.scheduler.masks)
        self.scheduler.advance(plan)
        if self._drafts_on_device:
            self.scheduler.speculation.launched(plan, batch)
        if plan.drafts is not None and len(plan.drafts.copies):
            self._state = self._platform.copy_pages(self._state, *plan.drafts.copies.T.tolist())
        batch = turn.masked(batch, self._late_masks)
        out, self._state = self.recorder.launch(plan, batch, self.cache, lambda: self._run(bucket, batch))
        self.steps += 1
        if debug_level() >= 2:
            log.info("step %d: %d tokens, %d decode, %d chunks, %d waiting, pages free %d evictable %d", plan.step,
                     int(batch.starts[-1]), len(plan.decode), len(plan.chunks), self.scheduler.waiting,
                     self.cache.pool.free, self.cache.tree.evictable)
        return out

    def _run(self, bucket: Bucket | None, batch: Batch) -> tuple[Out, State]:
        steps = self._steps if batch.adapters is None else self._adapted_steps
        step = steps.get(bucket)
        if step is None:
            model = self._model if batch.adapters is None else self.adapters.placed or self._model
            forward = traced_forward(model.forward) if debug_level() >= 4 else model.forward
            step = steps[bucket] = self._platform.compile(forward, model.weights, bucket)
        self.times.enter(DEVICE)
        out, state = step(self._state, batch)
        return Checked(out, batch), state

    def launch_beside(self, steps: dict[Bucket | None, Step], model: Any, batch: Batch) -> Out:
        """Launch a step of another model (`forward`, `weights`) on the same state, behind all that are launched: a
        drafter's. steps: those of this model so far, which this adds to. batch: of exact sizes."""
        batch, bucket = bucketed(batch, self._manifest.buckets)
        step = steps.get(bucket)
        if step is None:
            step = steps[bucket] = self._platform.compile(model.forward, model.weights, bucket)
        out, self._state = step(self._state, batch)
        return out

    def _failed(self, plans: list[Plan], error: Exception) -> StepOutputs:
        if isinstance(error, EngineDead):  # a rank is gone: no later step can succeed
            raise error
        log.exception("step %d failed on %s", plans[-1].step, self._manifest.name, exc_info=error)
        flight, self._flight = self._flight, None
        if flight is not None:
            try:  # it must be off the device before its pages are given to others
                flight[1].collect()
            except Exception as second:
                log.error("step %d failed too: %s", flight[0].step, second)
        words = cut(said(error), 500)
        return StepOutputs(self.scheduler.fail(plans, f"the step failed on {self._manifest.name}: {words}"))

    def _warm_up(self) -> None:
        """One token through the whole path, so that the first request is not the slow one; it leaves no trace. Then one
        that is scored, which shows weights that give no numbers. Raises `CheckpointError` for those, and before all
        `RegistrationError` for a platform whose ops are not all there."""
        _, self._state = check_ops(self._platform, self._manifest, self._state, self._page_size)
        tries = [(SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True), 0)]
        if "logprobs" not in self.scheduler.limits.lacks:
            tries.append((SamplingParams(max_tokens=1, temperature=0.0, logprobs=0), 0))
        tries += [(tries[-1][0], known["number"]) for known in self.adapters.list()[:1]]
        for params, adapter in tries:
            self.submit(Submit("warm-up", pack_ids([0]), params, adapter=adapter))
            outputs: list[TokenOutput] = []
            while self.has_work:
                outputs += self.step()
            if outputs and outputs[-1].finish == "error":
                raise (CheckpointError if outputs[-1].error == NOT_A_NUMBER else RuntimeError)(outputs[-1].error)
        self.cache.flush()
        self.scheduler.reset_stats()
        self.times.reset()
        self.steps = 0

    def _ping(self) -> dict[str, Any]:
        if not self._computes:  # else `step` looks
            self.relieve()
            self._audit()
        return {"steps": self.steps, "busy": self.has_work}

    def _flush_cache(self) -> dict[str, Any]:
        if self.scheduler.speculation is not None:
            self.scheduler.speculation.flushed()
        return {"flushed_pages": self.cache.flush()}

    def _pin(self, session: str, ttl: float) -> dict[str, Any]:
        pin = self.cache.pin(session, ttl, self.recorder.now())
        return {"pages": pin.pages, "tokens": pin.pages * self._page_size, "expires_in": ttl}

    def _audit(self) -> None:
        """With nothing to do, prove the ledger now and then: a lost page shows although nobody touches it."""
        now = self.recorder.now()
        if now < self._next_audit:
            return
        self._next_audit = now + AUDIT
        try:
            self.scheduler.verify()
        except AssertionError as error:
            self.cache.pool.violations += 1
            log.error("the ledger of pages is broken: %s", error)
            self._tell_violations()

    def _tell_violations(self) -> None:
        """A report for the first one, and whenever there are twice as many."""
        if self.cache.pool.violations >= self._worth_telling:
            self._worth_telling = 2 * self.cache.pool.violations
            log.error("%s", self.report())
            self.recorder.flush()

    def _free_memory(self) -> tuple[float, float]:
        """(total, free) bytes on the device; as if all were free while the platform cannot say, which it logs once."""
        try:
            total, free = map(float, self._platform.memory())
            if not 0 <= free <= total:
                raise ValueError(f"memory() gave {free:g} of {total:g}")
        except Exception as error:  # what it says is advice: requests do not fail for want of it
            if not self._blind:
                log.warning("%s cannot say how much memory is free, so none is given back until it can: %s",
                            self._manifest.name, told(error))
            self._blind = True
            return 0.0, 0.0
        self._blind = False
        return total, free

    def _verify(self) -> dict[str, Any]:
        self.scheduler.verify()
        return {"verified": True}

    def stats(self) -> dict[str, Any]:
        """All numbers, as of now."""
        pool, tree, speculation = self.cache.pool, self.cache.tree, self.scheduler.speculation
        return {**self.scheduler.stats.snapshot(), **self.times.snapshot(),
                **(speculation.snapshot() if speculation is not None else {}),
                "running": self.scheduler.running, "waiting": self.scheduler.waiting, "steps": self.steps,
                "queued_tokens": self.scheduler.queue.tokens, "prompt_chunk": int(self.scheduler.pace.chunk),
                "pages_total": pool.capacity, "pages_free": pool.free,
                "pages_cached": tree.evictable + tree.protected, "pages_evictable": tree.evictable,
                "pages_used": pool.capacity - pool.free - tree.evictable, "pages_quarantined": pool.quarantined,
                "pages_given_back": self._given_back, "ownership_violations": pool.violations,
                "evicted_pages": self.cache.evicted_pages, "page_size": self._page_size,
                "pins": len(self.cache.pins), "pages_pinned": self.cache.pins.pages,
                "grammars_compiled": self.grammars.compiled, "grammar_compile_seconds": self.grammars.seconds,
                "grammars_compiling": len(self._compiling), **self.adapters.stats(),
                "kv_event_batches": self._publisher.sequence if self._publisher is not None else 0}


def _open_publisher(config: Config, owner: EngineCore) -> Any:
    """The stream of cache events, if one is asked for: before the model loads, so that a taken address is told soon. It
    ends with its owner at the latest."""
    if config.cache.kv_events is None:
        if config.cache.kv_events_replay is not None:
            raise ConfigError("--kv-events-replay answers who follows the events, so it needs --kv-events too")
        return None
    if not config.cache.prefix_cache:
        raise ConfigError("--kv-events tells what is cached, and with --no-prefix-cache nothing is: leave one out")
    from .cache.publisher import Publisher  # with sockets, which nobody else needs here
    publisher = Publisher(config.cache)
    weakref.finalize(owner, publisher.close)
    return publisher


def _vocabulary(loaded: startup.Loaded) -> Vocabulary:
    """The model's tokens as grammars see them."""
    from .text import load_tokenizer  # nobody else needs it in this process
    with open_checkpoint(loaded.path) as checkpoint:
        tokenizer = load_tokenizer(checkpoint)
    return Vocabulary(tokenizer, loaded.model.config.vocab_size, loaded.model.config.eos_ids)


def _limits(config: Config, loaded: startup.Loaded) -> Limits:
    s, sizes, model, manifest = config.scheduler, loaded.sizes, loaded.model.config, loaded.manifest
    return Limits(sizes.max_running, s.max_queued_requests, sizes.chunk, sizes.page_size, sizes.max_model_len,
                  model.vocab_size, model.eos_ids, max_top_logprobs=manifest.max_top_logprobs,
                  max_queued_tokens=s.max_queued_tokens, itl_target=s.itl_target / 1e3,
                  waiting_timeout=s.waiting_timeout, running_timeout=s.running_timeout, platform=manifest.name,
                  adapters=wanted_slots(config.adapters),
                  lacks=missing_features(loaded.platform, manifest))
