"""The watchdog over the engine's steps, and engines that are started anew when they die."""
from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import threading
import time
from collections import deque

import psutil
import pytest
import zmq
from isthmus.core.config import Config
from isthmus.core.errors import EngineDead, EngineRestarting, Overloaded
from isthmus.core.messages import Progress, Reply, TextOutput
from isthmus.core.processes import three, workers
from isthmus.core.processes.in_process import InProcessClient
from isthmus.core.processes.three import ProcessClient
from isthmus.core.processes.wire import encode
from isthmus.core.processes.workers import SOCKETS, Workers
from isthmus.core.server.errors import as_request_error, error_headers
from isthmus.core.server.metrics import Metrics

from .clients import FORMS, collect, importable_fakes, request, text, until, with_client  # noqa: F401
from .effort import SOON
from .effort import until as wait_until
from .fake_engine import CRASH, RAISE, FakeEngine

COST = 66  # seconds

PLAIN_STEP = FakeEngine.step


def held(monkeypatch) -> threading.Event:
    """From now on the engine's steps in this process wait until the event is set."""
    goes_on = threading.Event()
    monkeypatch.setattr(FakeEngine, "step", lambda self: goes_on.wait(SOON) and PLAIN_STEP(self))
    return goes_on


async def begun(client, **params) -> asyncio.Task[list[TextOutput]]:
    """A request whose first output has come."""
    outputs = client.generate(*request("begun", b"x", **params))
    first = await anext(outputs)

    async def rest():
        return [first, *[output async for output in outputs]]
    return asyncio.ensure_future(rest())


async def well_again(client):
    async def well():
        return client.health() == (True, "")
    await until(well)


# ---- the watchdog

@pytest.mark.parametrize("form", FORMS)
def test_a_step_that_takes_half_of_its_time_is_reported_once_and_forgiven(form, monkeypatch, caplog, capfd):
    monkeypatch.setattr("isthmus.core.processes.client.PING_S", 0.02)

    async def body(client):
        count = 2000 if form == "processes" else 300  # the process is still at it when it is stopped
        stream = await begun(client, max_tokens=count)
        goes_on = held(monkeypatch)
        if form == "processes":
            os.kill(client.pids()["scheduler"], signal.SIGSTOP)

        async def reported():
            return "Where it is:" in caplog.text and client.step_age > 6
        await until(reported)
        if form == "processes":
            os.kill(client.pids()["scheduler"], signal.SIGCONT)
        goes_on.set()
        assert text(await stream) == "x" * count

        async def forgiven():
            return client.step_age < 1
        await until(forgiven)
        assert not client.hung and client.health() == (True, "")
    with_client(form, body, step_timeout=10)
    told = caplog.text + capfd.readouterr().err
    assert caplog.text.count("Where it is:") == 1 and "at 10 s it is ended (--step-timeout)" in told
    assert "fake: " in told and "after step" in told and "in step" in told
    assert ("thread engine" if form == "in-process" else "thread MainThread") in told


@pytest.mark.parametrize("form", FORMS)
def test_an_engine_that_hangs_is_unhealthy_and_ended(form, monkeypatch, capfd):
    monkeypatch.setattr("isthmus.core.processes.client.PING_S", 0.02)
    monkeypatch.setattr(three, "DUMP_S", 3.0)

    async def body(client):
        stream = await begun(client, max_tokens=10**6)
        goes_on, pids = held(monkeypatch), client.pids() if form == "processes" else {}
        if pids:
            os.kill(pids["scheduler"], signal.SIGSTOP)
        with pytest.raises(EngineDead, match="the engine hung: it had requests and finished no step for [0-9.]+ s"):
            await asyncio.wait_for(stream, SOON)
        goes_on.set()
        assert client.died.is_set() and client.hung and not client.health()[0]
        assert "hung" in client.health()[1] and "--step-timeout" in client.health()[1]
        return pids
    pids = with_client(form, body, step_timeout=3)
    assert not any(psutil.pid_exists(pid) for pid in pids.values())
    if form == "processes":
        assert "Thread 0x" in capfd.readouterr().err, "printed by the detokenizer, whatever holds Python's lock"


@pytest.mark.parametrize("form", FORMS)
def test_an_engine_that_computes_beyond_its_time_is_not_called_hung_and_told_the_way_out(form, monkeypatch):
    monkeypatch.setattr("isthmus.core.processes.client.PING_S", 0.02)
    spent = iter((10.0, 10.6))
    for kind in (InProcessClient, ProcessClient):
        monkeypatch.setattr(kind, "_processor_time", lambda _: next(spent))

    async def body(client):
        stream = await begun(client, max_tokens=10**6)
        goes_on = held(monkeypatch)
        if form == "processes":
            os.kill(client.pids()["scheduler"], signal.SIGSTOP)
        with pytest.raises(EngineDead, match="ended while it computed: .* A --step-timeout longer than 3 lets"):
            await asyncio.wait_for(stream, SOON)
        goes_on.set()
        assert "hung" not in client.health()[1]
    with_client(form, body, step_timeout=3)


def test_processor_time_is_that_of_the_engine(monkeypatch):
    async def body(client):
        before = client._processor_time()
        await collect(client, "a", b"x", max_tokens=2000)
        assert before < client._processor_time() < before + 60
    with_client("processes", body)


def test_an_engine_that_answers_and_gets_nowhere_hangs(monkeypatch):
    monkeypatch.setattr("isthmus.core.processes.client.PING_S", 0.02)
    monkeypatch.setattr(FakeEngine, "step", lambda self: time.sleep(0.001) or [])

    async def body(client):
        with pytest.raises(EngineDead, match="hung"):
            await collect(client, "a", b"x")
    with_client("in-process", body, step_timeout=1)


def test_many_short_steps_are_no_hang(monkeypatch):
    monkeypatch.setattr("isthmus.core.processes.client.PING_S", 0.02)

    async def body(client):
        stream = asyncio.ensure_future(collect(client, "a", b"x", max_tokens=10**6))
        pings = []
        monkeypatch.setattr(client, "_judge", lambda plain=client._judge: (pings.append(1), plain()))

        async def long():
            return len(pings) > 250  # 5 s
        await until(long)
        assert client.health() == (True, "") and not stream.done()
        stream.cancel()
    with_client("processes", body, step_timeout=3)


# ---- engines that are started anew

@pytest.mark.parametrize("role", ["scheduler", "detokenizer"])
def test_a_killed_process_costs_the_running_requests_and_no_later_one(role, caplog):
    async def body(client):
        first = client.pids()
        streams = [asyncio.ensure_future(collect(client, f"s{i}", b"x", max_tokens=10**6)) for i in range(5)]
        await asyncio.sleep(0.05)
        os.kill(first[role], signal.SIGKILL)
        for stream in streams:
            with pytest.raises(EngineRestarting, match=f"the {role} process was killed by signal 9"):
                await asyncio.wait_for(stream, SOON)
        ok, reason = client.health()
        assert not ok and "It is being started anew" in reason and not client.gone
        with pytest.raises(Overloaded, match="being started anew|is loading") as caught:
            await collect(client, "early", b"x")
        assert caught.value.status == 503
        with pytest.raises(EngineDead):
            await client.command("stats")
        await well_again(client)
        assert text(await collect(client, "s0", b"ab", max_tokens=4)) == "abab", "the id is free again"
        assert client.restarts == 1 and not client.died.is_set()
        assert not any(psutil.pid_exists(pid) for pid in first.values())
        assert not client._workers.directory.exists() and client.info["served_name"] == "fake"
        return client.pids()
    pids = with_client("processes", body, restart=3)
    assert not any(psutil.pid_exists(pid) for pid in pids.values())
    assert "(1 of 3 times in 10 minutes)" in caplog.text


def test_an_engine_that_dies_too_often_stays_dead():
    async def body(client):
        for prompt, words in (([CRASH], "exited with code 7"), ([120, RAISE], "the step went wrong")):
            with pytest.raises(EngineRestarting, match=words):
                await collect(client, "bad", prompt)
            await well_again(client)
        with pytest.raises(EngineDead, match="exited with code 7") as caught:
            await collect(client, "bad", [CRASH])
        assert not isinstance(caught.value, EngineRestarting)
        assert client.died.is_set() and client.gone and client.restarts == 2
    with_client("processes", body, restart=2)


def test_an_engine_that_cannot_load_again_is_tried_as_often_as_allowed(monkeypatch):
    async def body(client):
        client._replacements = ("fake_engine:NotThere", client._replacements[1])
        os.kill(client.pids()["scheduler"], signal.SIGKILL)
        await asyncio.wait_for(client.died.wait(), SOON)
        assert client.restarts == 2 and "NotThere" in client.health()[1]
    with_client("processes", body, restart=2)


def test_closing_while_the_engine_is_started_anew_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    async def body(client):
        os.kill(client.pids()["detokenizer"], signal.SIGKILL)

        async def again():
            return client.restarts == 1 and client._workers is not None and len(client.pids()) == 2
        await until(again)
        return client.pids()
    pids = with_client("processes", body, restart=3)
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids.values()))
    assert list(tmp_path.iterdir()) == []


def test_what_clients_are_told():
    again = as_request_error(EngineRestarting("the engine is gone"))
    assert (again.status, again.code) == (503, "engine_restarting") and error_headers(again)["Retry-After"] == "5"
    gone = as_request_error(EngineDead("killed"))
    assert (gone.status, gone.code) == (503, "engine_dead") and "Retry-After" not in error_headers(gone)
    assert b"isthmus_engine_restarts_total" in Metrics().export("m", {}, {"restarts": 2})


def test_folders_of_killed_servers_are_swept_and_those_of_living_ones_are_not(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left, own, other = tmp_path / f"{SOCKETS}left", tmp_path / f"{SOCKETS}own", tmp_path / "isthmus-soak"
    for folder in (left, own, other):
        folder.mkdir()
        os.utime(folder, (1, 1))
    descriptor = workers.lock(own)
    made = Workers(None)
    assert not left.exists() and own.exists() and other.exists() and made.directory.exists()
    os.close(descriptor)
    os.utime(made.directory, (1, 1))
    workers.sweep()
    assert made.directory.exists() and not own.exists()
    made.forget_directory()
    assert [p.name for p in tmp_path.iterdir()] == ["isthmus-soak"]


# ---- what arrives

def taking(*frames: bytes) -> ProcessClient:
    """A client that is ready, and these frames on its socket."""
    client, waiting = ProcessClient(Config()), deque(frames)

    class Inbox:
        def recv(self, flags):
            if not waiting:
                raise zmq.Again
            return waiting.popleft()
    client._loop, client._inbox = asyncio.get_running_loop(), Inbox()
    client._serve()
    return client


def test_what_came_with_a_message_that_cannot_be_read_arrives_and_nobody_waits_for_ever():
    async def body():
        client = taking(encode(Reply("a", True, b'{"x": 1}')), b"\xc1 no message", encode(Reply("b", True, b"{}")))
        client._started = client._loop.create_future()
        answers = client._commands["a"], client._commands["b"] = [client._loop.create_future() for _ in "ab"]
        client._read()
        assert await answers[0] == {"x": 1} and client.died.is_set()
        with pytest.raises(EngineDead, match="a message of the engine cannot be read"):
            await answers[1]
        await client._started if client._started.done() else None
    asyncio.run(body())


def test_what_goes_wrong_with_one_message_keeps_no_other_from_arriving(caplog):
    async def body():
        client = taking(encode(Progress("load", 1, 2)), encode(Reply("a", True, b'{"x": 1}')))
        client._progress = lambda *told: 1 / 0
        answer = client._commands["a"] = client._loop.create_future()
        client._read()
        assert await answer == {"x": 1} and client.health()[0]
    asyncio.run(body())
    assert "a message of the engine was lost" in caplog.text and "ZeroDivisionError" in caplog.text


def test_an_engine_that_cannot_be_started_anew_is_dead(monkeypatch):
    async def body(client):
        def none(*_):
            raise OSError(12, "no memory")
        monkeypatch.setattr(three, "Workers", none)
        os.kill(client.pids()["scheduler"], signal.SIGKILL)
        await asyncio.wait_for(client.died.wait(), SOON)
        assert "it cannot be started anew: OSError" in client.health()[1] and client.gone
    with_client("processes", body, restart=3)
