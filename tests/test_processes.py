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
from isthmus.core.processes.detokenizer import DetokenizerState, first_logprobs
from isthmus.core.processes.in_process import InProcessClient
from isthmus.core.processes.three import LAST_WORDS_S, ProcessClient
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
        assert [o.completion_tokens for o in outputs] == list(range(1, 31))
        assert [o.finish for o in outputs] == [None] * 29 + ["length"]
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
            assert (await anext(outputs)).text == "x"
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
                assert (await anext(outputs)).text == "x"
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
        assert client.died.is_set()
        if kill != "by itself":
            assert time.monotonic() - began < LAST_WORDS_S, "a killed process has no last words to wait for"
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
from isthmus.core.processes.three import LAST_WORDS_S, ProcessClient
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
