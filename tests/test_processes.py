"""Requests through both forms of the engine client, over a fake engine."""
from __future__ import annotations

import asyncio
from contextlib import aclosing

import numpy as np
import pytest
from isthmus.core.errors import EngineDead, EngineStopped, IsthmusError, Overloaded, RequestError
from isthmus.core.messages import pack_ids

from .clients import FORMS, collect, importable_fakes, make, request, text, until, with_client  # noqa: F401
from .effort import SOON
from .fake_engine import BUG, FULL, REFUSE

COST = 6  # seconds


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
        drained = asyncio.ensure_future(client.drain(SOON))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded) as caught:
            await collect(client, "new", b"x")
        assert caught.value.status == 503 and caught.value.code == "server_stopping"
        assert await drained and (await short)[-1].finish == "length"
        client.draining = False
        endless = asyncio.ensure_future(collect(client, "endless", b"x", max_tokens=10**6))
        await asyncio.sleep(0.02)
        assert not await client.drain(0.05)
        with pytest.raises(EngineStopped, match="this request was not finished, send it again"):
            await endless
        assert client.health()[0] and (await client.command("stats"))["running"] == 0
    with_client(form, body)


@pytest.mark.parametrize("form", FORMS)
def test_draining_does_not_wait_for_who_reads_nothing_of_what_has_ended(form, monkeypatch):
    monkeypatch.setattr("isthmus.core.processes.client.UNREAD_S", 0.3)

    async def body(client):
        submit, watch = request("unread", b"x", max_tokens=50)
        async with aclosing(client.generate(submit, watch)) as outputs:
            await anext(outputs)
            assert not await client.drain(10**6)
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


def test_every_request_is_traced_at_debug_level_3(monkeypatch, caplog):
    async def body(client):
        await collect(client, "traced", b"x", max_tokens=3)
    monkeypatch.setenv("ISTHMUS_DEBUG", "3")
    with caplog.at_level("INFO"):
        with_client("in-process", body)
    text = caplog.text
    assert "request traced.0: 1 prompt tokens" in text and "request traced.0 ends: length" in text


def test_the_schedulers_process_does_not_look_through_what_it_has_loaded():
    async def body(client):
        return await client.command("frozen")
    assert with_client("processes", body)["objects"] > 1000
