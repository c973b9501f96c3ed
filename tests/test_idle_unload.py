"""--idle-unload: the engine's processes end for want of requests, and the next request has them started again."""
from __future__ import annotations

import asyncio
import json
import os
import signal

import msgspec
import psutil
import pytest
from isthmus.core.cli.main import main
from isthmus.core.errors import EngineStopped, IsthmusError, Overloaded
from isthmus.core.processes import client as clients

from .checkpoints import tiny_llama_gguf
from .clients import collect, importable_fakes, request, text, until, with_client  # noqa: F401
from .effort import SOON
from .effort import until as wait_until
from .serving import Serving

COST = 8  # seconds


@pytest.fixture(autouse=True)
def quick_pulse(monkeypatch):
    monkeypatch.setattr(clients, "PING_S", 0.02)


async def idle(client):
    """Unloaded, and its processes are gone."""
    async def gone():
        return client.status == "idle" and not client.pids()
    before = [psutil.Process(pid) for pid in client.pids().values()]
    await until(gone)
    await asyncio.to_thread(wait_until, lambda: not any(p.is_running() for p in before))


def test_it_is_unloaded_after_a_rest_and_loaded_for_the_next_request():
    async def body(client):
        said = text(await collect(client, "a", b"x"))
        info, first = client.info, set(client.pids().values())
        await idle(client)
        assert client.health() == (True, "") and client.info == info and not client.died.is_set()
        assert (await client.figures()).stats == {}
        with pytest.raises(IsthmusError, match="unloaded until a request comes"):
            await client.command("flush_cache")
        answers = await asyncio.gather(*(collect(client, str(i), b"x") for i in range(5)))
        assert {text(answer) for answer in answers} == {said}, "who comes while it loads waits too"
        assert client.status == "ok" and not first & set(client.pids().values())
        await idle(client)
        assert text(await collect(client, "b", b"x")) == said and client.restarts == 0
    with_client("processes", body, idle_unload=0.5)


def test_a_request_for_an_adapter_waits_until_a_new_engine_has_it_back():
    async def body(client):
        back, begun = asyncio.Event(), []

        async def bring_back():
            begun.append(client.status)
            await back.wait()
        await idle(client)
        client.on_start = bring_back
        submit, watch = request("adapted", b"x")
        submit = msgspec.structs.replace(submit, adapter=1_000_001)

        async def adapted():
            return [output async for output in client.generate(submit, watch)]
        waiting = asyncio.ensure_future(adapted())
        assert text(await collect(client, "base", b"x")) and begun == ["ok"], "who names none does not wait for that"
        await asyncio.sleep(0.2)
        assert not waiting.done() and client.status == "ok", "nor does the model rest meanwhile"
        back.set()
        assert text(await waiting)
        await idle(client)
        back.clear()
        settled = asyncio.ensure_future(client.settle())
        await asyncio.sleep(0)  # it begins at once
        assert client.status == "loading"
        waiting = asyncio.ensure_future(adapted())
        await until(lambda: asyncio.sleep(0, len(begun) == 2))
        await client.close()
        await settled
        with pytest.raises(EngineStopped):
            await waiting
    with_client("processes", body, idle_unload=0.05)


@pytest.mark.slow
def test_it_is_not_unloaded_while_a_request_runs():
    async def body(client):
        await collect(client, "long", b"x", max_tokens=200)
        assert client.status == "ok" and client.pids()
    with_client("processes", body, idle_unload=0.03)


@pytest.mark.slow
def test_who_leaves_while_it_loads_leaves_nothing_behind():
    async def body(client):
        await idle(client)
        leaving = asyncio.ensure_future(collect(client, "a", b"x"))
        await asyncio.sleep(0)  # it begins at once
        assert client.status == "loading" and client.health() == (True, "")
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        assert len(text(await collect(client, "a", b"x"))) and client.waiting == 0
    with_client("processes", body, idle_unload=0.05)


def test_too_many_that_wait_are_refused_and_who_waits_at_the_end_is_told():
    async def body(client):
        await idle(client)
        waiting = [asyncio.ensure_future(collect(client, str(i), b"x")) for i in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="2 requests wait"):
            await collect(client, "c", b"x")
        client.draining = True
        with pytest.raises(Overloaded, match="shutting down"):
            await collect(client, "d", b"x")
        await client.close()
        ends = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(end, Overloaded | EngineStopped) for end in ends), ends
    with_client("processes", body, idle_unload=0.05, max_queued_requests=2)


@pytest.mark.parametrize("moment", (0, 0.01))
def test_it_can_be_closed_at_any_moment_of_unloading(moment):
    async def body(client):
        async def unloading():
            return client.status == "idle"
        await until(unloading)
        await asyncio.sleep(moment)
        await client.close()
        assert not client.pids()
    with_client("processes", body, idle_unload=0.05)


@pytest.mark.slow
def test_an_engine_that_cannot_be_loaded_again_is_dead_and_all_are_told(monkeypatch):
    async def body(client):
        await idle(client)
        monkeypatch.setenv("PYTHONPATH", "/nowhere")  # the worker cannot import its engine
        with pytest.raises(IsthmusError):
            await collect(client, "a", b"x")
        assert client.died.is_set() and not client.health()[0] and client.status == "unavailable"
    with_client("processes", body, idle_unload=0.05)


@pytest.mark.slow
def test_a_killed_worker_while_it_loads_again_is_started_anew():
    async def body(client):
        await idle(client)
        waiting = asyncio.ensure_future(collect(client, "a", b"x"))
        await asyncio.to_thread(wait_until, lambda: client.pids())
        os.kill(client.pids()["scheduler"], signal.SIGKILL)
        assert len(text(await waiting)) and client.restarts == 1
    with_client("processes", body, idle_unload=0.05, restart=2)


@pytest.mark.slow
def test_a_server_says_that_it_is_idle_and_wakes(tmp_path):
    model = str(tiny_llama_gguf(tmp_path / "tiny.gguf"))
    quick = "import isthmus.core.processes.client as client; client.PING_S = 0.05"
    with Serving(model, "--idle-unload", "0.2", temporary=tmp_path, before=quick) as server:
        def health():
            return json.loads(server.ask("GET", "/health").read())
        wait_until(lambda: health() == {"status": "idle"})
        wait_until(lambda: not any(child.is_running() for child in server.children))
        assert server.ask("GET", "/ready").status == 200 and server.ask("GET", "/metrics").status == 200
        assert json.loads(server.ask("GET", "/v1/models").read())["data"], "what is known needs no engine"
        flushed = server.ask("POST", "/flush_cache")
        assert flushed.status == 200 and json.loads(flushed.read()) == {"success": True, "flushed_pages": 0}
        wrong = server.ask("POST", "/v1/completions", {"prompt": "hello", "max_tokens": -1})
        assert wrong.status == 400 and health() == {"status": "idle"}, "what is refused wakes nobody"
        answer = server.ask("POST", "/v1/completions", {"prompt": "hello", "max_tokens": 3})
        assert answer.status == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(SOON) == 0


def test_it_needs_processes_that_can_end(capsys):
    assert main(["serve", "--in-process", "--idle-unload", "9", "--platform", "null"]) == 2
    assert "--idle-unload" in (error := capsys.readouterr().err) and "--in-process" in error
