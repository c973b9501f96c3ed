"""The engine's loop on the null platform with a virtual clock: overlap, failures, commands."""
from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from isthmus.core import startup
from isthmus.core.cache.pool import OwnershipError, PagePool
from isthmus.core.config import Config, SchedulerSettings
from isthmus.core.engine import EngineCore
from isthmus.core.errors import EngineDead
from isthmus.core.messages import SamplingParams, Submit, TokenOutput, pack_ids, unpack_ids
from isthmus.core.specs import LayerState, StateSpec
from isthmus.platforms.null.platform import Platform as Null

from .scheduling import EOS, VOCAB, Device, Fault, draw_token, requested


class Broken(Device):
    """Fails at launch when `launch_fault` is set."""

    launch_fault = False

    def compile(self, forward, weights, bucket):
        step = super().compile(forward, weights, bucket)

        def run(state, batch):
            if self.launch_fault:
                self.launch_fault = False
                raise Fault("out of memory")
            return step(state, batch)
        return run


class Spoiled(Device):
    """What `spoil` makes of each result is given back."""

    def __init__(self, **more):
        super().__init__(**more)
        self.spoil = lambda result: result

    def compile(self, forward, weights, bucket):
        step = super().compile(forward, weights, bucket)

        def run(state, batch):
            out, state = step(state, batch)
            return SimpleNamespace(collect=lambda: self.spoil(out.collect())), state
        return run


@pytest.fixture
def engine(monkeypatch):
    """engine(overlap): an EngineCore on a `Broken` device, which is `engine.device`."""
    def make(overlap: bool = True, device: Device | None = None, **scheduler) -> EngineCore:
        device = device or Broken(late=True)
        state = StateSpec((LayerState(1, 1),), "f32", 4, 5)
        model = SimpleNamespace(forward=None, weights=None, report=["none"], nbytes=0,
                                state_layers=state.layers, dtype="f32",
                                config=SimpleNamespace(name="hash", model_type="", vocab_size=VOCAB, eos_ids=(EOS,),
                                                       hidden=1))
        sizes = startup.Sizes(state, page_size=4, pages=30, max_model_len=48, max_running=4, chunk=12)
        loaded = startup.Loaded(device, device.probe(), "named by the test", Path("hash"), model, "f32", sizes, overlap,
                                {}, ())
        monkeypatch.setattr(startup, "load", lambda config, progress, platform: loaded)
        core = EngineCore(Config(scheduler=SchedulerSettings(**scheduler)), clock=lambda: 1.0)
        core.device, core.cache.pool.strict = device, True
        return core
    return make


def submit(core: EngineCore, rid: str, prompt: list[int], **params) -> Submit:
    request = Submit(rid, pack_ids(prompt), SamplingParams(**({"temperature": 0.0, "ignore_eos": True} | params)))
    core.submit(request)
    return request


def run(core: EngineCore) -> list[TokenOutput]:
    outputs = []
    for _ in range(500):
        if not core.has_work:
            return outputs
        outputs += core.step()
        core.command("verify")
    raise AssertionError("it never ends")


def right(request: Submit) -> list[int]:
    outputs: list[int] = []
    for _ in range(request.params.max_tokens):
        outputs.append(draw_token([*unpack_ids(request.prompt), *outputs], requested(request, outputs)))
    return outputs


def tokens_of(outputs: list[TokenOutput], rid: str) -> list[int]:
    return [t for o in outputs if o.id == rid for t in unpack_ids(o.tokens).tolist()]


def test_warming_up_leaves_no_trace(engine):
    stats = engine().command("stats")
    assert (stats["pages_free"], stats["pages_total"], stats["pages_cached"]) == (29, 29, 0)
    counters = ("requests", "prompt_tokens", "generated_tokens", "steps", "running", "waiting")
    assert not any(stats[name] for name in counters)


@pytest.mark.parametrize("overlap", [True, False])
def test_tokens_are_right_with_and_without_overlap(engine, overlap):
    core = engine(overlap)
    requests = [submit(core, f"r{i}", [*range(i, i + 5 * i + 1)], max_tokens=7, temperature=i % 2, seed=i)
                for i in range(6)]
    outputs = run(core)
    for request in requests:
        assert tokens_of(outputs, request.id) == right(request)
    assert [o.finish for o in outputs if o.finish] == ["length"] * 6


def test_overlap_launches_a_step_before_it_settles_the_last(engine):
    core = engine(True)
    submit(core, "a", [1, 2], max_tokens=3)
    assert not core.step() and core.steps == 1
    assert len(core.step()) == 1 and core.steps == 2
    without = engine(False)
    submit(without, "a", [1, 2], max_tokens=3)
    assert len(without.step()) == 1 and without.steps == 1


def hard_to_say(result):
    class Silent(Exception):
        def __str__(self):
            raise ValueError("no words")
    raise Silent


def loud(result):
    raise Fault("x" * 100_000)


@pytest.mark.parametrize("spoil, words", [
    (lambda r: None, "tokens as NoneType, it must be an array of int32"),
    (lambda r: (r.tokens,), "tokens as NoneType"), (lambda r: r._replace(tokens=r.tokens.tolist()), "tokens as list"),
    (lambda r: r._replace(tokens=r.tokens[:-1]), "tokens as int32 [0]"),
    (lambda r: r._replace(tokens=r.tokens[:, None]), "tokens as int32 [1, 1]"),
    (lambda r: r._replace(tokens=r.tokens * np.nan), "tokens as float64 [1]"),
    (lambda r: r._replace(logprobs=None), "logprobs as NoneType, it must be an array of float32 [1]"),
    (lambda r: r._replace(logprobs=r.logprobs[:0]), "logprobs as float32 [0]"),
    (lambda r: r._replace(top_ids=r.top_ids[0]), "top_ids as int32 [2], it must be an array of int32 [1, K]"),
    (lambda r: r._replace(top_logprobs=r.top_logprobs[:0]), "top_logprobs as float32 [0, 2]"),
    (hard_to_say, "the step failed on null: "), (loud, "x" * 500 + "...")])
def test_a_result_that_is_none_ends_its_requests_and_the_engine_goes_on(engine, spoil, words):
    core = engine(device=Spoiled(late=True))
    core.device.spoil = spoil
    submit(core, "a", [*range(9)], max_tokens=9, logprobs=2)
    outputs = run(core)
    assert [(o.id, o.finish) for o in outputs if o.finish] == [("a", "error")]
    assert words in outputs[-1].error and len(outputs[-1].error) < 600
    core.device.spoil = lambda result: result
    again = submit(core, "b", [*range(9)], max_tokens=9)
    assert tokens_of(run(core), "b") == right(again)


@pytest.mark.parametrize("kind", ["launch", "collect"])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_failed_step_is_reported_and_the_engine_goes_on(engine, kind, overlap, caplog):
    core = engine(overlap)
    submit(core, "a", [*range(9)], max_tokens=9)
    for _ in range(3):
        core.step()
    core.device.launch_fault, core.device.fault = kind == "launch", kind == "collect"
    outputs = run(core)
    assert [(o.id, o.finish) for o in outputs if o.finish] == [("a", "error")]
    reason = {"launch": "out of memory", "collect": "the device gave up"}[kind]
    assert outputs[-1].error == f"the step failed on null: {reason}"
    assert not core.device._worker.pending, "a step is still on the device"
    again = submit(core, "a", [*range(9)], max_tokens=9)
    outputs = run(core)
    assert tokens_of(outputs, "a") == right(again) and outputs[0].cached_tokens == 0
    core.command("flush_cache")
    assert core.command("stats")["pages_free"] == 29


def test_commands(engine):
    core = engine()
    submit(core, "a", [*range(9)], max_tokens=2)
    run(core)
    stats = core.command("stats")
    assert (stats["pages_cached"], stats["pages_evictable"], stats["pages_used"]) == (2, 2, 0)
    assert stats["steps"] == 2 and stats["finish_reasons"] == {"length": 1} and stats["ownership_violations"] == 0
    assert core.command("flush_cache") == {"flushed_pages": 2} and core.command("ping")["busy"] is False
    assert core.command("verify") == {"verified": True}
    with pytest.raises(ValueError, match="'dance'; there are: adapters, add_adapter, flush_cache, "):
        core.command("dance")


def test_abort_and_close_with_a_step_in_flight(engine):
    core = engine()
    submit(core, "a", [1, 2], max_tokens=9)
    core.step()
    core.abort(["a", "nobody"])
    assert [(o.id, o.finish) for o in run(core)] == [("a", "abort")]
    submit(core, "b", [1, 2], max_tokens=9)
    core.step()
    core.device.fault = True
    core.close()                                             # what fails now concerns nobody


@pytest.mark.parametrize("overlap", [True, False])
def test_pages_are_given_back_when_memory_gets_short(engine, overlap, monkeypatch, caplog):
    """Running requests are computed anew in fewer pages with the same tokens; a request of full length always fits."""
    core, now, free = engine(overlap), [2.0], [900]
    monkeypatch.setattr(core.recorder, "_clock", lambda: now[0])
    monkeypatch.setattr(core, "_manifest", replace(core._manifest, memory_floor=0.1))
    monkeypatch.setattr(core.device, "memory", lambda: (1000, free[0]), raising=False)
    requests = [submit(core, f"r{i}", [i, 5, 6, 7, 8], max_tokens=9) for i in range(3)]
    outputs = [*core.step(), *core.step(), *core.step()]
    assert core.command("stats")["pages_total"] == 29
    free[0], now[0] = 99, 4.0
    outputs += core.step()
    core.command("verify")
    stats = core.command("stats")
    assert (stats["pages_total"], stats["pages_given_back"], stats["preemptions"]) == (21, 8, 3)
    assert "8 of 29 pages of K and V were given back" in caplog.text
    outputs += run(core)
    for request in requests:
        assert tokens_of(outputs, request.id) == right(request)
    for _ in range(9):  # the heartbeat looks when nothing runs; never fewer than the longest request needs
        now[0] += 60
        core.command("ping")
    assert core.command("stats")["pages_total"] == 12
    longest = submit(core, "long", list(range(1, 40)), max_tokens=9)
    assert tokens_of(run(core), "long") == right(longest)


@pytest.mark.parametrize("answer", [OSError("driver says no"), None, ("a", None), (1000,), (1000, float("nan")),
                                    (1000, -5)])
def test_a_failed_look_at_memory_costs_no_request_anything(engine, answer, monkeypatch, caplog):
    """It is told once, until the platform can say again."""
    core, now, answers = engine(True), [2.0], [answer]
    monkeypatch.setattr(core.recorder, "_clock", lambda: now[0])
    monkeypatch.setattr(core, "_manifest", replace(core._manifest, memory_floor=0.1))

    def memory():
        if isinstance(answers[0], Exception):
            raise answers[0]
        return answers[0]
    monkeypatch.setattr(core.device, "memory", memory, raising=False)
    request = submit(core, "r", [1, 5, 6, 7, 8], max_tokens=9)
    outputs = []
    while core.has_work:
        outputs += core.step()
        now[0] += 2
    assert tokens_of(outputs, "r") == right(request)
    core.command("ping")
    assert caplog.text.count("cannot say how much memory is free") == 1
    answers[0], now[0] = (1000, 99), now[0] + 60
    core.command("ping")
    assert core.command("stats")["pages_given_back"] == 8, "as before, once it works"
    answers[0], now[0] = answer, now[0] + 60
    core.command("ping")
    assert caplog.text.count("cannot say how much memory is free") == 2


@pytest.mark.parametrize("answer", [OSError("driver says no"), None, ("a", None)])
def test_memory_that_cannot_be_measured_is_computed(answer, caplog):
    manifest = Null({}).probe()

    class Platform:
        def memory(self):
            if isinstance(answer, Exception):
                raise answer
            return answer
    assert startup._free_memory(Platform(), manifest, 5) == manifest.memory_free - 5
    assert "null cannot say how much memory is free" in caplog.text


def test_a_pool_shrinks_only_when_nobody_owns_a_page():
    pool = PagePool(10)
    held = pool.alloc(2, 1)
    before = pool.generation.copy()
    with pytest.raises(OwnershipError, match="2 are owned, such as .* by request in slot 1"):
        pool.shrink(5)
    pool.release(held, 1)
    with pytest.raises(OwnershipError, match="from 10 to 11"):
        pool.shrink(11)
    pool.shrink(5)
    assert pool.free == pool.capacity == 4 and (pool.generation > before[:5]).all()
    assert sorted(pool.alloc(4, 1).tolist()) == [1, 2, 3, 4]


@pytest.mark.parametrize("overlap", [True, False])
def test_a_lost_rank_ends_the_engine_instead_of_every_later_step(engine, overlap, monkeypatch):
    core = engine(overlap)
    submit(core, "a", [4, 5], max_tokens=9)
    core.step()

    def lost(state, batch):
        raise EngineDead("rank 1 was killed by signal 9")
    monkeypatch.setattr(core, "_steps", {None: lost})
    with pytest.raises(EngineDead, match="rank 1"):
        core.step()
