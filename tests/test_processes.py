"""Both forms of the engine client over a fake engine, and the detokenizer's core."""
from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import aclosing
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
from isthmus.core.config import Config, ModelSettings
from isthmus.core.errors import EngineDead, IsthmusError, Overloaded, RequestError
from isthmus.core.messages import (
    Abort,
    Failed,
    Logprobs,
    Reply,
    SamplingParams,
    Submit,
    TextOutput,
    TextOutputs,
    TokenOutput,
    TokenOutputs,
    Watch,
    pack_ids,
    refused,
    request_error,
    unpack_ids,
)
from isthmus.core.processes.backlog import MERGE_BYTES, Backlog, joined
from isthmus.core.processes.detokenizer import DetokenizerState, first_logprobs
from isthmus.core.processes.in_process import InProcessClient
from isthmus.core.processes.scheduler import SchedulerState
from isthmus.core.processes.three import ProcessClient
from isthmus.core.processes.wire import decode_to_api, decode_to_detokenizer, decode_to_scheduler, encode

from .fake_engine import BUG, CRASH, EOS, FULL, RAISE, REFUSE, ByteTokenizer, FakeEngine

FORMS = ("in-process", "processes")


@pytest.fixture(autouse=True)
def importable_fakes(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


def make(form: str, model: str = "m"):
    config = Config(model=ModelSettings(model))
    if form == "in-process":
        return InProcessClient(config, FakeEngine, ByteTokenizer)
    return ProcessClient(config, "fake_engine:FakeEngine", "fake_engine:ByteTokenizer")


def with_client(form: str, body, timeout: float = 30):
    """Run `body(client)` on a started client and close it, whatever happens."""
    async def main():
        client = make(form)
        try:
            await client.start()
            return await body(client)
        finally:
            await client.close()
    return asyncio.run(asyncio.wait_for(main(), timeout))


def request(id: str, prompt: bytes | list[int], **params):
    params = SamplingParams(**{"max_tokens": 8, **params})
    return (Submit(id, pack_ids(list(prompt)), params),
            Watch(id, params.stop, params.include_stop, params.skip_special, params.min_tokens))


async def collect(client, *args, **params) -> list[TextOutput]:
    return [output async for output in client.generate(*request(*args, **params))]


def text(outputs: list[TextOutput]) -> str:
    return "".join(o.text for o in outputs)


async def until(condition, seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not await condition():
        assert time.monotonic() < end, "did not happen in time"
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("form", FORMS)
def test_texts_arrive_in_order_and_counts_are_right(form):
    async def body(client):
        assert client.info["served_name"] == "fake"
        assert client.health() == (True, "")
        many = await asyncio.gather(*(collect(client, f"r{i}", f"request {i} ".encode(), max_tokens=30)
                                      for i in range(40)))
        return many, await client.command("stats"), client.waiting
    many, stats, waiting = with_client(form, body)
    for i, outputs in enumerate(many):
        assert text(outputs) == (f"request {i} " * 5)[:30]
        counts = [o.completion_tokens for o in outputs]
        assert counts == np.cumsum([len(o.tokens) // 4 for o in outputs]).tolist() and counts[-1] == 30
        assert [o.finish for o in outputs] == [None] * (len(outputs) - 1) + ["length"]
        assert outputs[0].prompt_tokens == len(f"request {i} ")
        assert b"".join(o.tokens for o in outputs) == pack_ids(list((f"request {i} " * 5)[:30].encode()))
    assert stats["running"] == 0 and waiting == 0


@pytest.mark.parametrize("form", FORMS)
def test_a_stop_string_ends_the_request_here_and_in_the_engine(form):
    async def body(client):
        outputs = await collect(client, "a", b"hello world, ", max_tokens=10**6, stop=("rld", "wor"))

        async def idle():
            return (await client.command("stats"))["running"] == 0
        await until(idle)
        kept = await collect(client, "b", b"hello world, ", max_tokens=100, stop=("wor",), include_stop=True)
        late = await collect(client, "c", b"ab", max_tokens=100, stop=("ab",), min_tokens=7)
        return outputs, kept, late
    outputs, kept, late = with_client(form, body)
    assert text(outputs) == "hello "
    assert (outputs[-1].finish, outputs[-1].stop_reason, outputs[-1].completion_tokens) == ("stop", "wor", 9)
    assert text(kept) == "hello wor"
    assert text(late) == "abababab"[:7] + "b" and late[-1].completion_tokens == 10


@pytest.mark.parametrize("form", FORMS)
def test_refusals_are_raised_as_the_engine_raised_them(form):
    async def body(client):
        errors = []
        for prompt in ([REFUSE], [FULL]):
            with pytest.raises(RequestError) as caught:
                await collect(client, "a", prompt)
            errors.append(caught.value)
        with pytest.raises(IsthmusError, match="2 requests are running"):
            await client.command("flush_cache")
        with pytest.raises(RequestError, match="cannot be taken: KeyError: 'a bug'") as caught:
            await collect(client, "a", [BUG])
        assert caught.value.status == 500
        assert text(await collect(client, "a", b"x", max_tokens=2)) == "xx"
        return errors
    refusal, full = with_client(form, body)
    assert (refusal.status, refusal.param, refusal.code) == (400, "prompt", "context_length_exceeded")
    assert "5000 tokens" in refusal.message
    assert isinstance(full, Overloaded) and full.status == 429 and full.retry_after


@pytest.mark.parametrize("form", FORMS)
def test_leaving_early_aborts_in_the_engine(form):
    async def body(client):
        async def running():
            return (await client.command("stats"))["running"]

        async with aclosing(client.generate(*request("a", b"x", max_tokens=10**6))) as outputs:
            assert set((await anext(outputs)).text) == {"x"}
        tasks = [asyncio.ensure_future(collect(client, f"t{i}", b"x", max_tokens=10**6)) for i in range(10)]
        unstarted = asyncio.ensure_future(collect(client, "u", b"x", max_tokens=10**6))

        async def all_run():
            return await running() == 11
        await until(all_run)
        for task in [*tasks, unstarted]:
            task.cancel()

        async def none_run():
            return await running() == 0
        await until(none_run)
        assert client.waiting == 0
        if form == "in-process":
            assert len(client._detokenizer) == 0
    with_client(form, body)


@pytest.mark.parametrize("form", FORMS)
def test_an_id_can_be_used_again_at_once_after_leaving(form):
    async def body(client):
        for i in range(20):
            async with aclosing(client.generate(*request("same", b"x", max_tokens=10**6))) as outputs:
                assert set((await anext(outputs)).text) == {"x"}
            assert text(await collect(client, "same", f"again {i} ".encode(), max_tokens=8)) == f"again {i} "[:8]
    with_client(form, body)


@pytest.mark.parametrize("form", FORMS)
def test_abort_by_id_reaches_the_reader(form):
    async def body(client):
        task = asyncio.ensure_future(collect(client, "a", b"x", max_tokens=10**6))

        async def runs():
            return (await client.command("stats"))["running"] == 1
        await until(runs)
        await client.abort("nobody")
        await client.abort("a")
        outputs = await task
        assert outputs[-1].finish == "abort"
        with pytest.raises(RequestError, match="in use"):
            task = asyncio.ensure_future(collect(client, "b", b"x", max_tokens=10**6))
            await asyncio.sleep(0)
            try:
                await collect(client, "b", b"y")
            finally:
                task.cancel()
    with_client(form, body)


@pytest.mark.parametrize("form", FORMS)
def test_draining_takes_no_new_request_and_lets_running_ones_end(form):
    async def body(client):
        short = asyncio.ensure_future(collect(client, "short", b"x", max_tokens=50))
        await asyncio.sleep(0.02)
        drained = asyncio.ensure_future(client.drain(10))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded) as caught:
            await collect(client, "new", b"x")
        assert caught.value.status == 503
        assert await drained and (await short)[-1].finish == "length"
        client.draining = False
        endless = asyncio.ensure_future(collect(client, "endless", b"x", max_tokens=10**6))
        await asyncio.sleep(0.02)
        assert not await client.drain(0.05)
        assert (await endless)[-1].finish == "abort"
    with_client(form, body)


@pytest.mark.parametrize("form", FORMS)
def test_a_failing_step_reaches_everybody_and_health(form):
    async def body(client):
        waiting = asyncio.ensure_future(collect(client, "a", b"x", max_tokens=10**6))
        await asyncio.sleep(0.02)
        with pytest.raises(EngineDead, match="the step went wrong"):
            await collect(client, "b", [120, RAISE])
        with pytest.raises(EngineDead, match="the step went wrong"):
            await waiting
        ok, reason = client.health()
        assert not ok and "the step went wrong" in reason
        with pytest.raises(EngineDead):
            await collect(client, "c", b"x")
        with pytest.raises(EngineDead):
            await client.command("stats")
        assert client.died.is_set()
    with_client(form, body)


@pytest.mark.parametrize("form", FORMS)
def test_before_start_and_after_close_there_is_a_clear_answer(form):
    async def main():
        client = make(form)
        with pytest.raises(Overloaded, match="loading"):
            await collect(client, "a", b"x")
        stages = []
        await client.start(lambda *progress: stages.append(progress))
        await client.close()
        await client.close()
        assert not client.died.is_set(), "it was stopped"
        with pytest.raises(EngineDead):
            await collect(client, "a", b"x")
        return stages
    assert asyncio.run(main()) == [("load weights", i, 2) for i in range(3)]


@pytest.mark.parametrize("form", FORMS)
def test_an_engine_that_cannot_load_says_why(form):
    async def main():
        client = make(form, "broken")
        try:
            with pytest.raises(EngineDead, match="need 12 GiB, 3 GiB are free"):
                await client.start()
            assert not client.health()[0]
        finally:
            await client.close()
    asyncio.run(asyncio.wait_for(main(), 30))


@pytest.mark.parametrize("kill", ["scheduler", "detokenizer", "by itself"])
def test_a_dead_process_fails_health_at_once_and_ends_every_stream(kill):
    async def body(client):
        streams = [asyncio.ensure_future(collect(client, f"s{i}", b"x", max_tokens=10**6)) for i in range(5)]
        await asyncio.sleep(0.05)
        if kill == "by itself":
            streams.append(asyncio.ensure_future(collect(client, "crash", [CRASH])))
        else:
            os.kill(client.pids()[kill], signal.SIGKILL)
        began = time.monotonic()

        async def ill():
            return not client.health()[0]
        await until(ill, 2)
        assert time.monotonic() - began < 1
        for stream in streams:
            with pytest.raises(EngineDead, match="exited with code 7" if kill == "by itself" else "signal 9"):
                await asyncio.wait_for(stream, 2)
        assert client.died.is_set() and time.monotonic() - began < 1, "it left no last words to wait for"
        assert ("scheduler" if kill == "by itself" else kill) in client.health()[1]
    with_client("processes", body)


def test_every_request_is_traced_at_debug_level_3(monkeypatch, caplog):
    async def body(client):
        await collect(client, "traced", b"x", max_tokens=3)
    monkeypatch.setenv("ISTHMUS_DEBUG", "3")
    with caplog.at_level("INFO"):
        with_client("in-process", body)
    text = caplog.text
    assert "request traced.0: 1 prompt tokens" in text and "request traced.0 ends: length" in text


def test_a_module_in_the_current_folder_is_not_imported_by_the_workers(tmp_path, monkeypatch):
    (tmp_path / "msgspec.py").write_text("raise SystemExit('imported from the current folder')")
    monkeypatch.chdir(tmp_path)

    async def body(client):
        assert client.health()[0]
    with_client("processes", body)


def test_closing_leaves_no_process_and_no_directory():
    async def body(client):
        directory = client._workers.directory
        assert not directory.exists(), "the sockets' names are removed once everybody is connected"
        return client.pids(), directory
    pids, directory = with_client("processes", body)
    assert len(pids) == 2 and not directory.exists()
    assert not any(psutil.pid_exists(pid) for pid in pids.values())


def test_workers_ignore_the_signals_of_a_group_and_end_with_their_parent(tmp_path):
    script = f"""
import asyncio, os, signal, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from isthmus.core.config import Config
from isthmus.core.processes.three import ProcessClient
async def main():
    client = ProcessClient(Config(), "fake_engine:FakeEngine", "fake_engine:ByteTokenizer")
    await client.start()
    for pid in client.pids().values():
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
    await client.command("ping")
    print(*client.pids().values(), flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True,
                              env={**os.environ, "TMPDIR": str(tmp_path)})
    try:
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2 and all(psutil.pid_exists(pid) for pid in pids)
    finally:
        parent.kill()
        parent.wait()
    end = time.monotonic() + 5
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() < end, "a worker outlived its parent"
        time.sleep(0.02)
    assert list(tmp_path.iterdir()) == []


def test_an_idle_engine_costs_no_processor_time():
    async def body(client):
        await collect(client, "a", b"x")
        processes = [psutil.Process(pid) for pid in client.pids().values()]
        before = [sum(p.cpu_times()[:2]) for p in processes]
        await asyncio.sleep(0.5)
        return [sum(p.cpu_times()[:2]) - b for p, b in zip(processes, before, strict=True)]
    assert max(with_client("processes", body)) <= 0.05


@pytest.mark.parametrize("late", ["", "the API is late"])
def test_a_failed_worker_is_heard_however_late_its_words_arrive(late, monkeypatch):
    """Its exit and its words come on different ways: the exit must not cut the words off."""
    if late:
        def first_the_exit(self, message, plain=ProcessClient._receive):
            if isinstance(message, Failed):
                asyncio.get_running_loop().call_later(1.0, plain, self, message)
            else:
                plain(self, message)
        monkeypatch.setattr(ProcessClient, "_receive", first_the_exit)

    async def body(client):
        with pytest.raises(EngineDead, match="the step went wrong"):
            await asyncio.wait_for(collect(client, "b", [120, RAISE]), 5)
        assert "the step went wrong" in client.health()[1] and client.gone
    with_client("processes", body)


@pytest.mark.parametrize("form", FORMS)
def test_a_silent_engine_is_unhealthy_until_it_answers_again(form, monkeypatch):
    monkeypatch.setattr("isthmus.core.processes.client.PING_S", 0.02)
    monkeypatch.setattr("isthmus.core.processes.client.IDLE_SILENCE_S", 0.3)

    async def body(client):
        await collect(client, "a", b"x")
        await asyncio.sleep(0.5)
        assert client.health() == (True, ""), "an idle engine answers"
        if form == "processes":
            os.kill(client.pids()["scheduler"], signal.SIGSTOP)
        else:
            monkeypatch.setattr(SchedulerState, "handle", lambda *_: time.sleep(0.8))

        async def silent():
            return not client.health()[0]
        await until(silent)
        assert "has not answered for 0." in client.health()[1] and not client.gone
        if form == "processes":
            os.kill(client.pids()["scheduler"], signal.SIGCONT)
        else:
            monkeypatch.undo()

        async def well():
            return client.health() == (True, "")
        await until(well)
        assert text(await collect(client, "b", b"x", max_tokens=2)) == "xx"
    with_client(form, body)


def test_an_engine_in_a_long_step_is_healthy(monkeypatch):
    monkeypatch.setattr("isthmus.core.processes.client.PING_S", 0.02)
    monkeypatch.setattr("isthmus.core.processes.client.IDLE_SILENCE_S", 0.2)
    monkeypatch.setattr(FakeEngine, "step", lambda self, plain=FakeEngine.step: time.sleep(0.8) or plain(self))

    async def body(client):
        stream = asyncio.ensure_future(collect(client, "a", b"x", max_tokens=1))
        for _ in range(30):
            await asyncio.sleep(0.02)
            assert client.health()[0] and not stream.done()
        stream.cancel()  # whoever asked has left; the step goes on
        await asyncio.sleep(0.1)
        assert client.health()[0]
    with_client("in-process", body)


def test_a_flood_of_messages_does_not_starve_the_loop(monkeypatch):
    """The reader of the socket never has to wait; others must get their turn all the same."""
    flood = encode(TextOutputs([TextOutput("nobody", "x", pack_ids([1]))]))

    async def body(client):
        async def recv(*_):
            return flood
        monkeypatch.setattr(client._inbox, "recv", recv, raising=False)
        client._reader.cancel()
        client._reader = asyncio.ensure_future(client._read())
        began = time.monotonic()
        for _ in range(20):
            await asyncio.sleep(0.005)
        assert time.monotonic() - began < 2
    with_client("processes", body)


# ---- what waits to be read


def some(i: int, k: int = 0, **more) -> TextOutput:
    scores = Logprobs(np.float32(i).tobytes(), k, pack_ids(range(i, i + k)), np.arange(k, dtype="<f4").tobytes())
    return TextOutput("a", chr(97 + i % 26), pack_ids([i]), completion_tokens=i + 1,
                      logprobs=scores if k else None, **more)


async def read_all(backlog: Backlog) -> list[TextOutput]:
    outputs = []
    while not outputs or outputs[-1].finish is None:
        outputs.append(await backlog.get())
    return outputs


@pytest.mark.parametrize("k,pieces", [(0, 4), (20, 84)])
def test_what_waits_is_read_in_a_few_bounded_pieces(k, pieces):
    async def main():
        backlog = Backlog()
        for i in range(1000):
            backlog.put(some(i, k, prompt_tokens=9 * (i == 0), finish="length" if i == 999 else None))
        return await read_all(backlog)
    outputs = asyncio.run(main())
    assert len(outputs) == pieces and all(len(o.tokens) <= MERGE_BYTES for o in outputs)
    assert joined(outputs) == joined([some(i, k, prompt_tokens=9 * (i == 0), finish="length" if i == 999 else None)
                                      for i in range(1000)])
    assert unpack_ids(joined(outputs).tokens).tolist() == list(range(1000)) and outputs[0].prompt_tokens == 9
    assert outputs[0].completion_tokens == len(outputs[0].tokens) // 4


def test_joined_logprobs_keep_their_rows():
    whole = joined([some(3, 2), some(4, 2), some(5, 2)])
    assert np.frombuffer(whole.logprobs.chosen, "<f4").tolist() == [3, 4, 5] and whole.logprobs.k == 2
    assert unpack_ids(whole.logprobs.top_ids).reshape(3, 2).tolist() == [[3, 4], [4, 5], [5, 6]]


def test_an_error_does_not_swallow_what_came_before_it():
    async def read(last):
        backlog = Backlog()
        for item in (some(0), some(1), last):
            backlog.put(item)
        first = await backlog.get()
        assert first.text == "ab"
        await backlog.get()
    with pytest.raises(EngineDead, match="killed"):
        asyncio.run(read(EngineDead("killed")))
    with pytest.raises(RequestError, match="bad"):
        asyncio.run(read(TextOutput("a", "", b"", "error", error="bad", status=400)))


def test_a_reader_that_is_behind_lets_others_have_the_loop():
    async def main():
        backlog, turns = Backlog(), 0
        for i in range(10_000):
            backlog.put(some(i, finish="length" if i == 9_999 else None))
        reading = asyncio.ensure_future(read_all(backlog))
        while not reading.done():
            turns += 1
            await asyncio.sleep(0)
        return turns, len(reading.result())
    turns, pieces = asyncio.run(main())
    assert turns >= pieces == 40


# ---- the detokenizer's core


def run_state(watch: Watch, batches: list[TokenOutput]):
    state = DetokenizerState(ByteTokenizer())
    state.watch(watch)
    texts, stops = [], []
    for output in batches:
        made, ended = state.handle(TokenOutputs([output]))
        texts += made.outputs
        stops += ended
    return texts, stops, len(state)


def test_a_stop_string_inside_a_batch_of_tokens_counts_up_to_its_last_token():
    logprobs = Logprobs(np.arange(6, dtype="<f4").tobytes(), 2, pack_ids(range(12)),
                        np.arange(12, dtype="<f4").tobytes())
    texts, stops, left = run_state(Watch("a", ("cd",)), [TokenOutput("a", pack_ids(list(b"abcdef")), logprobs=logprobs),
                                                        TokenOutput("a", pack_ids(list(b"gh")))])
    assert [(t.text, t.finish, t.stop_reason, t.completion_tokens) for t in texts] == [("ab", "stop", "cd", 4)]
    assert unpack_ids(texts[0].tokens).tolist() == list(b"abcd")
    assert texts[0].logprobs == first_logprobs(logprobs, 4) and len(texts[0].logprobs.top) == 4 * 4 * 2
    assert stops == ["a"] and left == 0


def test_a_stop_string_met_by_the_last_token_needs_no_abort():
    texts, stops, left = run_state(Watch("a", ("b",)), [TokenOutput("a", pack_ids(list(b"ab")), "length")])
    assert (texts[0].text, texts[0].finish, texts[0].stop_reason) == ("a", "stop", "b")
    assert stops == [] and left == 0


def test_held_back_text_comes_out_at_the_end():
    texts, _, _ = run_state(Watch("a", ("bcd",)), [TokenOutput("a", pack_ids(list(b"ab"))),
                                                  TokenOutput("a", pack_ids(list(b"c")), "length")])
    assert [t.text for t in texts] == ["a", "bc"]


def test_the_stop_id_is_counted_and_not_spoken_unless_asked_for():
    ended = TokenOutput("a", pack_ids([*b"ab", ord("!")]), "stop", stop_id=ord("!"))
    (hidden,), _, _ = run_state(Watch("a"), [ended])
    assert (hidden.text, hidden.completion_tokens, hidden.stop_reason) == ("ab", 3, "33")
    (spoken,), _, _ = run_state(Watch("a", include_stop=True), [ended])
    assert spoken.text == "ab!"


def test_a_character_over_two_outputs_appears_once_complete():
    emoji = list("🦊".encode())
    texts, _, _ = run_state(Watch("a"), [TokenOutput("a", pack_ids(emoji[:2])), TokenOutput("a", pack_ids(emoji[2:])),
                                         TokenOutput("a", pack_ids(emoji[:1]), "length")])
    assert [t.text for t in texts] == ["", "🦊", "\ufffd"]


def test_special_tokens_are_skipped_if_asked():
    output = TokenOutput("a", pack_ids([65, EOS, 66]), "length")
    (skipped,), _, _ = run_state(Watch("a"), [output])
    assert skipped.text == "AB"


def test_outputs_of_unknown_requests_are_dropped_and_one_bad_request_harms_no_other():
    class Poison(ByteTokenizer):
        def token_bytes(self, id):
            if id == 99:
                raise KeyError(id)
            return bytes([id])

    state = DetokenizerState(Poison())
    state.watch(Watch("good"))
    state.watch(Watch("bad"))
    texts, stops = state.handle(TokenOutputs([TokenOutput(id, pack_ids([n])) for id, n in
                                              (("unknown", 65), ("bad", 99), ("good", 65))]))
    assert [(t.id, t.finish) for t in texts.outputs] == [("bad", "error"), ("good", None)]
    assert stops == ("bad",) and request_error(texts.outputs[0]).status == 500 and len(state) == 1


# ---- messages


def test_messages_survive_the_wire():
    submit = request("a", b"xyz", stop=("s",), logit_bias={5: -1.5}, seed=7, logprobs=3)[0]
    assert decode_to_scheduler(encode(submit)) == submit
    assert decode_to_scheduler(encode(Abort(("a", "b"), "stop"))) == Abort(("a", "b"), "stop")
    outputs = TokenOutputs([refused("a", RequestError("no", status=422, param="p", code="c"))])
    assert decode_to_detokenizer(encode(outputs)) == outputs
    texts = TextOutputs([TextOutput("a", "é", pack_ids([1]), stop_reason="x")])
    assert decode_to_api(encode(texts)) == texts
    assert unpack_ids(pack_ids([1, 2**31 - 1])).tolist() == [1, 2**31 - 1]


@pytest.mark.parametrize("data", [b"", b"\x80", b"garbage", b"\x81\xa4type\xa5Nosuch", encode(Reply("t", True))])
def test_what_is_no_message_is_refused(data):
    with pytest.raises(msgspec.DecodeError):
        decode_to_scheduler(data)


def test_a_refusal_comes_back_as_the_error_it_was():
    for error in (RequestError("m", status=400, param="p", code="c"), Overloaded("full"), Overloaded("bye", status=503),
                  RequestError("bug", status=500, kind="server_error")):
        again = request_error(TextOutput("a", "", b"", "error", **{f: getattr(refused("a", error), f) for f in
                                                                   ("error", "status", "code", "param")}))
        assert type(again) is type(error)
        assert (again.message, again.status, again.param, again.kind) == (error.message, error.status, error.param,
                                                                          error.kind)
