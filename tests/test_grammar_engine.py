"""Grammars through the whole engine: compiled beside the loop, late masks, failures, recordings, platforms."""
from __future__ import annotations

import itertools
import json
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace

import jsonschema
import numpy as np
import pytest
from isthmus.core.api import Engine, config_of
from isthmus.core.engine import EngineCore
from isthmus.core.errors import RequestError
from isthmus.core.grammar import waiting
from isthmus.core.messages import GrammarSpec, SamplingParams, Submit, pack_ids, unpack_ids
from isthmus.core.plan import already
from isthmus.core.recording.rerun import rerun
from isthmus.platforms.null.platform import Platform as Null

from .checkpoints import tiny_llama_gguf

COST = 30  # seconds

SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 6}, "kind": {
    "enum": ["hello-hello-hello", "other"]}}, "required": ["name", "kind"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(tiny_llama_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf"))


@pytest.fixture
def core(model):
    """core(platform, ...): an EngineCore, closed in the end."""
    made = []

    def make(device=None, clock=time.monotonic, **settings) -> EngineCore:
        settings = {"model": model, "platform": "null", "kv_cache_memory": "8MiB"} | settings
        made.append(EngineCore(config_of(**settings), clock=clock, platform=device))
        made[-1].cache.pool.strict = True
        return made[-1]
    yield make
    for engine in made:
        engine.close()


def submit(engine: EngineCore, id: str, kind: str, source: str, **params) -> None:
    params = {"max_tokens": 40, "temperature": 0.0} | params
    engine.submit(Submit(id, pack_ids([5, 6, 7]), SamplingParams(**params, grammar=GrammarSpec(kind, source, "it"))))


def run(engine: EngineCore) -> dict[str, tuple[list[int], str, str]]:
    """Tokens, finish and error of each request."""
    found: dict[str, tuple[list[int], str, str]] = {}
    for _ in range(3000):
        if not engine.has_work:
            return found
        for output in engine.step():
            tokens = found.get(output.id, ([], "", ""))[0]
            found[output.id] = (tokens + unpack_ids(output.tokens).tolist(), output.finish or "", output.error)
        engine.command("verify")
    raise AssertionError("it never ends")


@pytest.mark.parametrize("platform", ["null", "reference", "cpu"])
def test_every_answer_follows_its_grammar_on_every_platform(model, platform):
    if platform == "cpu":
        pytest.importorskip("torch")
    settings = {"model": model, "platform": platform, "kv_cache_memory": "8MiB"}
    texts = {}
    for overlap in (True, False):
        with Engine(**settings, overlap=overlap) as engine:
            answers = engine.generate(["hello", "a", "bc"], max_tokens=200, temperature=1.0, seed=5, n=2,
                                      response_format=FORMAT)
            for answer in answers:
                assert answer.finish == "stop" or len(answer.tokens) == 200
                if answer.finish == "stop":
                    jsonschema.validate(json.loads(answer.text), SCHEMA)
            assert sum(answer.finish == "stop" for answer in answers) >= 3
            word = engine.generate("x", max_tokens=30, temperature=1.0, seed=1, guided_choice=["yes", "no", "hello"])
            assert word.text in ("yes", "no", "hello") and word.finish == "stop"
            texts[overlap] = [answer.text for answer in answers]
            assert engine.core.stats()["forced_tokens"] > 0
    assert texts[True] == texts[False] or platform == "cpu"  # whose bits may depend on the batch


def test_masks_come_late_only_where_the_platform_takes_them(core):
    """A platform without the word gets masks that are filled when it is launched."""
    seen: dict[str, list[bool]] = {"": [], "late_mask": []}
    tokens = {}
    for lacks in seen:
        device = Null({"lacks": lacks} if lacks else {})
        compile_ = device.compile

        def spied(forward, weights, bucket, compile_=compile_, lacks=lacks):
            step = compile_(forward, weights, bucket)

            def launch(state, batch):
                if batch.sampling.mask is not None:
                    seen[lacks].append(batch.sampling.mask.ready is already)
                return step(state, batch)
            return launch
        device.compile = spied
        engine = core(device)
        for i in range(4):
            submit(engine, f"r{i}", "regex", "[a-f]{9}")
        tokens[lacks] = run(engine)
    assert all(seen["late_mask"]) and not all(seen[""]) and tokens[""] == tokens["late_mask"]


def test_ready_waits_on_another_thread_and_takes_the_step_before_on_the_engines_own(core):
    device, threads = Null({}), []
    compile_ = device.compile

    def spied(forward, weights, bucket):
        step = compile_(forward, weights, bucket)

        def launch(state, batch):
            mask = batch.sampling.mask
            if mask is not None and mask.ready is not already:
                if len(threads) % 2:  # in the middle of a launch
                    mask.ready()
                    assert all(np.unpackbits(row.view(np.uint8)).sum() <= 7 for row in mask.bits)
                threads.append(threading.get_ident())
            return step(state, batch)
        return launch
    device.compile = spied
    engine = core(device)
    for i in range(3):
        submit(engine, f"r{i}", "regex", "[a-f]{8}")
    assert all(len(tokens) in (8, 9) and finish == "stop" for tokens, finish, _ in run(engine).values())
    assert len(threads) > 3


@pytest.mark.parametrize("where", ["launch", "collect"])
@pytest.mark.parametrize("asks", ["in the launch", "later"])
def test_a_step_that_fails_leaves_nobody_waiting_for_its_masks(core, where, asks):
    device = Null({})
    compile_, fault = device.compile, [""]

    def spied(forward, weights, bucket):
        step = compile_(forward, weights, bucket)

        def launch(state, batch):
            if asks == "in the launch" and batch.sampling.mask is not None:
                batch.sampling.mask.ready()
            if fault[0] == "launch":
                fault[0] = ""
                raise RuntimeError("no memory")
            out, state = step(state, batch)
            if fault[0] == "collect":
                fault[0] = ""
                out.collect = lambda collect=out.collect: (collect(), 1 / 0)
            return out, state
        return launch
    device.compile = spied
    engine = core(device)
    for i in range(3):
        submit(engine, f"r{i}", "regex", "[a-f]{30}")
    while not engine.scheduler.running:  # it is being compiled
        engine.step()
    for _ in range(3):
        engine.step()
    fault[0] = where
    ended = run(engine)
    assert all(finish == "error" for _, finish, _ in ended.values()) and len(ended) == 3
    submit(engine, "after", "regex", "[a-f]{5}")
    assert run(engine)["after"][1] == "stop"


class Slow:
    """A library whose grammars are compiled when the test says so."""

    def __init__(self, library):
        self.library, self.gates = library, []

    def ask(self, spec, tenant=""):
        future: Future = Future()
        self.gates.append((spec, future))
        return future

    def open(self):
        for spec, future in self.gates:
            if not future.running() and not future.set_running_or_notify_cancel():  # nobody waits for it any more
                continue
            inner = self.library.ask(spec)
            try:
                future.set_result(inner.result())
            except RequestError as error:
                future.set_exception(error)
        self.gates = []

    def __getattr__(self, name):
        return getattr(self.library, name)


@pytest.fixture
def slow(core, monkeypatch):
    engine = core()
    library = Slow(engine.grammars)
    monkeypatch.setattr(engine._compiling, "_library", library)
    return engine, library


def test_others_run_while_a_grammar_is_compiled(slow):
    engine, library = slow
    submit(engine, "waits", "regex", "[ab]{4}")
    engine.submit(Submit("plain", pack_ids([5]), SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)))
    found = {}
    for _ in range(50):
        found |= {output.id: output.finish for output in engine.step()}
    assert found == {"plain": "length"} and engine.has_work and engine.stats()["grammars_compiling"] == 1
    with pytest.raises(ValueError, match="'waits' is in use"):
        submit(engine, "waits", "regex", "[ab]{4}")
    library.open()
    assert run(engine)["waits"][1] == "stop"


def test_a_request_can_be_aborted_while_its_grammar_is_compiled(slow):
    engine, library = slow
    submit(engine, "goes", "regex", "[ab]{4}")
    engine.abort(["goes"])
    (output,) = engine.step()
    assert (output.id, output.finish) == ("goes", "abort")
    library.open()
    assert not engine.has_work and not run(engine)


def test_a_grammar_that_takes_too_long_is_given_up(slow, monkeypatch):
    engine, library = slow
    monkeypatch.setattr(waiting, "PATIENCE", -1.0)
    submit(engine, "late", "regex", "[ab]{4}")
    library.gates[0][1].set_running_or_notify_cancel()
    (output,) = engine.step()
    assert (output.status, output.param) == (400, "it") and "not compiled within" in output.error
    assert not engine.has_work


def test_who_has_waited_for_others_grammars_is_not_blamed(slow, monkeypatch):
    engine, library = slow
    monkeypatch.setattr(waiting, "PATIENCE", -1.0)
    submit(engine, "behind", "regex", "[ab]{4}")
    (output,) = engine.step()
    assert (output.status, output.code, output.retry_after > 0) == (503, "overloaded", True)
    assert "it has waited" in output.error and not engine.has_work and library.gates[0][1].cancelled()


def test_so_many_wait_for_their_grammars_and_no_more(slow, monkeypatch):
    engine, library = slow
    monkeypatch.setattr(engine._compiling, "_most", 2)
    for i in range(2):
        submit(engine, f"r{i}", "regex", f"[ab]{{{i + 2}}}")
    with pytest.raises(RequestError, match="2 requests wait for their grammars") as caught:
        submit(engine, "more", "regex", "a")
    assert caught.value.status == 429
    library.open()
    assert len(run(engine)) == 2


@pytest.mark.parametrize(("kind", "source", "words"), [
    ("regex", "[a", "unclosed character class"), ("json_schema", '{"not": {}}', "keyword not"),
    ("grammar", "root ::= foo", "foo"), ("novel", "", "kind 'novel' are unknown"),
    ("regex", "a" * 2**18 + "b", "bytes"),
    ("regex", "[^\\s\\S]", "no text satisfies it")])
def test_a_grammar_that_cannot_be_is_the_requests_only_output(core, kind, source, words):
    engine = core()
    try:
        submit(engine, "bad", kind, source)
    except RequestError as error:
        status, message = error.status, str(error)
    else:
        outputs = []
        while engine.has_work:
            outputs += engine.step()
        (output,) = outputs
        status, message = output.status, output.error
    assert status == 400 and words in message and "/root" not in message and "backtrace" not in message
    submit(engine, "good", "regex", "[a-f]{3}")
    assert run(engine)["good"][1] == "stop"


def test_bias_that_bans_what_the_grammar_needs_is_an_error_and_no_other_text(core):
    engine = core(platform="reference")
    submit(engine, "r", "regex", "aaa", logit_bias={token: float("-inf") for token in range(engine.info.vocab_size)})
    tokens, finish, error = run(engine)["r"]
    assert finish == "error" and "logit_bias" in error and not tokens


def test_a_recording_with_grammars_runs_again_without_them(core, tmp_path, monkeypatch):
    for overlap in (True, False):
        path = tmp_path / f"recording-{overlap}"
        engine = core(record=str(path), overlap=overlap, max_running_requests=4, kv_cache_memory="60KiB")
        for i in range(12):
            submit(engine, f"r{i}", "json_schema", json.dumps(SCHEMA), max_tokens=60 + i, temperature=1.0, seed=i,
                   ignore_eos=i % 3 == 0, logprobs=0 if i % 4 == 0 else None)
            engine.submit(Submit(f"p{i}", pack_ids([9] * (i + 3)), SamplingParams(max_tokens=20, temperature=0.0)))
        with suppress(RequestError):  # or told by the next step
            submit(engine, "bad", "regex", "[a")
        for _ in range(30):
            engine.step()
        engine.abort(["r1", "p2"])
        run(engine)
        assert engine.stats()["forced_tokens"] > 10
        stats = engine.stats()
        engine.close()
        monkeypatch.setattr("isthmus.core.engine.Library", None)
        outcome = rerun(path)
        monkeypatch.undo()
        assert not outcome.broken, outcome.broken
        same = ("generated_tokens", "forced_tokens", "preemptions", "finish_reasons", "evicted_pages")
        assert {name: outcome.stats[name] for name in same} == {name: stats[name] for name in same}


def test_who_asks_for_a_grammar_that_failed_gets_a_fresh_one(core):
    """The library's matchers of one grammar share what has come to its limit."""
    engine = core()
    for seed in range(3):
        endless = 'root ::= [a-y]{5} [k-y] inner\ninner ::= "a" inner'
        submit(engine, "bad", "grammar", endless, temperature=1.0, seed=seed)
        submit(engine, "good", "choice", '["yes", "no"]')
        assert {id: finish for id, (_, finish, _) in run(engine).items()} == {"bad": "error", "good": "stop"}
    assert engine.grammars.compiled == 3 + 1


@pytest.mark.parametrize("overlap", [True, False])
def test_what_became_too_complex_runs_again(core, tmp_path, overlap, monkeypatch):
    engine = core(record=str(tmp_path / "recording"), overlap=overlap)
    for i in range(3, 11):
        grammar = f'root ::= [a-y]{{{i}}} [k-y] inner\ninner ::= "a" inner'
        submit(engine, f"r{i}", "grammar", grammar, temperature=1.0, seed=i)
    submit(engine, "good", "regex", "[a-z]{20}")
    found, stats = run(engine), engine.stats()
    engine.close()
    assert found.pop("good")[1:] == ("stop", "") and {finish for _, finish, _ in found.values()} == {"error"}
    assert {error.partition(" at")[0] for _, _, error in found.values()} == {"it: it became too complex to follow"}
    monkeypatch.setattr("isthmus.core.engine.Library", None)
    outcome = rerun(tmp_path / "recording")
    assert not outcome.broken and not outcome.cut, outcome.broken
    assert outcome.stats["finish_reasons"] == stats["finish_reasons"]


@pytest.mark.parametrize("floor", [0.0, 0.5])
def test_what_happens_while_a_grammar_is_compiled_runs_again(core, tmp_path, monkeypatch, floor):
    """A recording has no grammar that is being compiled: no call may read the clock by whether there is one."""
    device, ticks = Null({}), itertools.count()
    probe = device.probe
    device.probe, device.memory = lambda *a: replace(probe(*a), memory_floor=floor), lambda: (2.0**34, 2.0**30)
    engine = core(device, lambda: next(ticks) * 0.3, record=str(tmp_path / "recording"), max_queued_requests=3,
                  max_running_requests=1)
    library = Slow(engine.grammars)
    monkeypatch.setattr(engine._compiling, "_library", library)
    free = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    ended: dict[str, int] = {}

    def step() -> None:
        for output in engine.step():
            if output.finish:
                ended[output.id] = output.status if output.finish == "error" else 0
        for name in ("ping", "stats", "verify", "ping"):
            engine.command(name)
    for turn in range(8):
        for i in range(3):
            with suppress(RequestError):
                submit(engine, f"g{turn}.{i}", "regex", f"[a-f]{{{turn + i + 2}}}")
            engine.command("ping")
        engine.abort([f"g{turn}.1"])
        for name in ("ping", "stats"):  # the end of a request that never came to the queue is still to be told
            engine.command(name)
        step()
        for i in range(turn % 5):
            with suppress(RequestError):
                engine.submit(Submit(f"p{turn}.{i}", pack_ids([5 + i] * 9), free))
        step()
        library.open()  # where the queue is full, these are refused now
        for _ in range(4 if turn % 2 else 200):
            step()
    run(engine)
    engine.command("ping")
    assert 429 in ended.values() and 0 in ended.values()
    assert bool(engine.stats()["pages_given_back"]) == bool(floor)
    stats = engine.stats()
    engine.close()
    outcome = rerun(tmp_path / "recording")
    assert not outcome.broken and not outcome.cut, outcome.broken
    assert outcome.stats["finish_reasons"] == stats["finish_reasons"]


def test_memory_given_back_while_a_grammar_is_given_up_runs_again(core, tmp_path, monkeypatch):
    device, now, free = Null({}), [0.0], [2.0**34]
    probe = device.probe
    device.probe, device.memory = lambda *a: replace(probe(*a), memory_floor=0.5), lambda: (2.0**34, free[0])
    engine = core(device, lambda: now[0], record=str(tmp_path / "recording"), chunked_prefill_size=16)
    monkeypatch.setattr(engine._compiling, "_library", Slow(engine.grammars))
    engine.submit(Submit("plain", pack_ids(range(5, 85)), SamplingParams(max_tokens=4, temperature=0.0)))
    engine.step()
    submit(engine, "goes", "regex", "[ab]{4}")
    engine.abort(["goes"])
    now[0], free[0] = 100.0, 2.0**30
    outputs = list(engine.step())  # the step in flight has none
    free[0] = 2.0**34
    assert engine.stats()["pages_given_back"] and [output.id for output in outputs] == ["goes"]
    run(engine)
    engine.close()
    assert not rerun(tmp_path / "recording").broken


def test_compiling_is_off_the_engines_thread(core, monkeypatch):
    engine, threads = core(), []
    backend = engine.grammars.backend
    compile_ = backend.compile
    monkeypatch.setattr(backend, "compile", lambda *a: (threads.append(threading.get_ident()), compile_(*a))[1])
    for i in range(3):
        submit(engine, f"r{i}", "regex", "[ab]{3}")
    submit(engine, "other", "regex", "[ab]{4}")
    run(engine)
    assert len(threads) == 2 and threading.get_ident() not in threads
    assert engine.stats()["grammars_compiled"] == 2 and engine.stats()["grammar_compile_seconds"] > 0


def test_an_engine_that_only_waits_for_a_grammar_does_not_spin(slow, monkeypatch):
    engine, library = slow
    submit(engine, "r", "regex", "[ab]{3}")
    waited = []
    wait = waiting.wait
    monkeypatch.setattr(waiting, "wait", lambda futures, seconds, when: (waited.append(seconds), wait([], 0))[1])
    engine.step()
    assert waited and waited[0] > 0.001
    library.open()
    assert run(engine)["r"][1] == "stop"


@pytest.mark.slow
def test_two_ranks_follow_the_grammar_that_one_does(model):
    """Their batches travel as bytes, masks included."""
    pytest.importorskip("torch")
    texts = []
    for ranks in (1, 2):
        with Engine(model=model, platform="cpu", kv_cache_memory="8MiB", dtype="float32", tensor_parallel_size=ranks,
                    platform_option=("threads=1",)) as engine:
            answers = engine.generate(["hello", "a"], max_tokens=60, temperature=0.0, response_format=FORMAT)
            texts.append([(answer.text, answer.finish) for answer in answers])
    assert texts[0] == texts[1]
