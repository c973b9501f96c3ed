"""How an engine that fails, dies or falls silent shows, and what its processes do to their surroundings."""
from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from isthmus.core.errors import EngineDead
from isthmus.core.messages import Failed, TextOutput, TextOutputs, pack_ids
from isthmus.core.processes import three
from isthmus.core.processes.scheduler import SchedulerState
from isthmus.core.processes.three import ProcessClient
from isthmus.core.processes.wire import encode

from .clients import FORMS, collect, importable_fakes, make, text, until, with_client  # noqa: F401
from .effort import SOON
from .effort import until as wait_until
from .fake_engine import CRASH, RAISE, FakeEngine

COST = 30  # seconds


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
def test_an_engine_that_cannot_load_says_why(form):
    async def main():
        client = make(form, "broken")
        try:
            with pytest.raises(EngineDead, match="need 12 GiB, 3 GiB are free"):
                await client.start()
            assert not client.health()[0]
        finally:
            await client.close()
    asyncio.run(asyncio.wait_for(main(), SOON))


@pytest.mark.parametrize("kill", ["scheduler", "detokenizer", "by itself"])
def test_a_dead_process_fails_health_at_once_and_ends_every_stream(kill, monkeypatch):
    monkeypatch.setattr(three, "LAST_WORDS_S", 10 * SOON)  # it left none to wait for

    async def body(client):
        streams = [asyncio.ensure_future(collect(client, f"s{i}", b"x", max_tokens=10**6)) for i in range(5)]
        await asyncio.sleep(0.05)
        if kill == "by itself":
            streams.append(asyncio.ensure_future(collect(client, "crash", [CRASH])))
        else:
            os.kill(client.pids()[kill], signal.SIGKILL)

        async def ill():
            return not client.health()[0]
        await until(ill)
        for stream in streams:
            with pytest.raises(EngineDead, match="exited with code 7" if kill == "by itself" else "signal 9"):
                await asyncio.wait_for(stream, SOON)
        assert client.died.is_set()
        assert ("scheduler" if kill == "by itself" else kill) in client.health()[1]
    with_client("processes", body)


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
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids))
    assert list(tmp_path.iterdir()) == []


def test_an_idle_engine_costs_no_processor_time():
    async def body(client):
        await collect(client, "a", b"x")
        processes = [psutil.Process(pid) for pid in client.pids().values()]

        async def rests():  # what the request left to do may take its time on a busy machine
            before = [sum(p.cpu_times()[:2]) for p in processes]
            await asyncio.sleep(0.5)
            return max(sum(p.cpu_times()[:2]) - b for p, b in zip(processes, before, strict=True)) <= 0.05
        await until(rests)
    with_client("processes", body)


@pytest.mark.parametrize("late", ["", "the API is late"])
def test_a_failed_worker_is_heard_however_late_its_words_arrive(late, monkeypatch):
    """Its exit and its words come on different ways: the exit must not cut the words off."""
    monkeypatch.setattr(three, "LAST_WORDS_S", 10 * SOON)
    if late:
        def first_the_exit(self, message, plain=ProcessClient._receive):
            if isinstance(message, Failed):
                asyncio.get_running_loop().call_later(1.0, plain, self, message)
            else:
                plain(self, message)
        monkeypatch.setattr(ProcessClient, "_receive", first_the_exit)

    async def body(client):
        with pytest.raises(EngineDead, match="the step went wrong"):
            await asyncio.wait_for(collect(client, "b", [120, RAISE]), SOON)
        assert "the step went wrong" in client.health()[1] and client.gone
    with_client("processes", body)


@pytest.mark.parametrize("form", FORMS)
def test_a_silent_engine_is_unhealthy_until_it_answers_again(form, monkeypatch):
    monkeypatch.setattr("isthmus.core.processes.client.PING_S", 0.02)
    goes_on, felt = threading.Event(), []

    async def body(client):
        await collect(client, "a", b"x")
        monkeypatch.setattr(client, "_feel", lambda pulse, plain=client._feel: (felt.append(pulse), plain(pulse)))

        async def answers():
            return len(felt) > 5
        await until(answers)
        assert client.health() == (True, ""), "an idle engine answers"
        monkeypatch.setattr("isthmus.core.processes.client.IDLE_SILENCE_S", 0.3)
        if form == "processes":
            os.kill(client.pids()["scheduler"], signal.SIGSTOP)
        else:
            monkeypatch.setattr(SchedulerState, "handle", lambda *given, plain=SchedulerState.handle: (
                goes_on.wait(SOON), plain(*given)))

        async def silent():
            return not client.health()[0]
        await until(silent)
        assert re.search(r"has not answered for [0-9.]+ s", client.health()[1]) and not client.gone
        if form == "processes":
            os.kill(client.pids()["scheduler"], signal.SIGCONT)
        goes_on.set()

        async def well():
            return client.health() == (True, "")
        await until(well)
        assert text(await collect(client, "b", b"x", max_tokens=2)) == "xx"
    with_client(form, body)


def test_an_engine_in_a_long_step_is_healthy(monkeypatch):
    monkeypatch.setattr("isthmus.core.processes.client.PING_S", 0.02)
    monkeypatch.setattr("isthmus.core.processes.client.IDLE_SILENCE_S", 0.2)
    goes_on = threading.Event()
    monkeypatch.setattr(FakeEngine, "step", lambda self, plain=FakeEngine.step: goes_on.wait(SOON) and plain(self))

    async def body(client):
        async def silent(pings):
            assert client.health()[0]
            return client._unanswered > pings
        stream = asyncio.ensure_future(collect(client, "a", b"x", max_tokens=1))
        await until(lambda: silent(30))
        assert not stream.done()
        stream.cancel()  # whoever asked has left; the step goes on
        await until(lambda: silent(40))
        goes_on.set()
    with_client("in-process", body)


def test_a_flood_of_messages_does_not_starve_the_loop(monkeypatch):
    """The reader of the socket never has to wait; others must get their turn all the same."""
    flood, received = encode(TextOutputs([TextOutput("nobody", "x", pack_ids([1]))])), 0

    async def body(client):
        def recv(*_):
            nonlocal received
            received += 1
            assert received < 1_000_000, "nobody else gets a turn"
            return flood
        inbox = client._inbox
        client._inbox = SimpleNamespace(recv=recv)
        for _ in range(20):
            client._read()  # as the descriptor has it called, also while the next turn is due
            await asyncio.sleep(0.005)
        assert 20 * three.AT_ONCE < received < 1_000_000
        before = received
        await asyncio.sleep(0)
        assert received == before + three.AT_ONCE, "one turn is due at a time, whatever called for it"
        client._inbox = inbox
    with_client("processes", body)


@pytest.mark.parametrize("form", FORMS)
def test_figures_do_not_wait_for_a_long_step(form, monkeypatch):
    begun, goes_on = threading.Event(), threading.Event()
    plain = FakeEngine.step

    def long_step(self):
        if self.steps == 8 and form == "in-process":
            begun.set()
            assert goes_on.wait(SOON)
        return plain(self)
    monkeypatch.setattr(FakeEngine, "step", long_step)

    async def body(client):
        async def idle():
            return (await client.figures()).stats == {"running": 0, "steps": 8, "busy": False}
        await collect(client, "a", b"x")
        await until(idle)
        last = await client.figures()
        stream = asyncio.ensure_future(collect(client, "b", b"x"))
        if form == "processes":
            os.kill(client.pids()["scheduler"], signal.SIGSTOP)
        else:
            await asyncio.to_thread(begun.wait, SOON)
        found = [await client.figures(), await client.figures()]
        assert not stream.done() and client.health() == (True, "")
        if form == "processes":
            os.kill(client.pids()["scheduler"], signal.SIGCONT)
        goes_on.set()
        assert text(await stream) == "x" * 8
        if form == "in-process":  # the other may have got on before it was stopped
            assert [each.stats for each in found] == [last.stats] * 2 and found[0].at == found[1].at >= last.at

        async def told():
            return (await client.figures()).stats["steps"] == 16
        await until(told)
    with_client(form, body)
