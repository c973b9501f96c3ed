"""What sends many requests at once: all of them are sent, and who leaves waits for none."""
from __future__ import annotations

import asyncio
import threading

import pytest
from isthmus.core.cli.posting import Daemons, each
from isthmus.core.cli.run_batch import remote

COST = 1  # seconds


def test_all_items_are_worked_on_and_at_most_so_many_at_once():
    lock, now, most, done = threading.Lock(), [0], [0], []

    def work(item):
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        done.append(item)
        with lock:
            now[0] -= 1
    each(iter(range(100)), work, 7)
    assert sorted(done) == list(range(100)) and most[0] <= 7
    each(iter(()), work, 3)


def test_the_first_error_is_raised_and_ends_it():
    taken = []

    def items():
        for i in range(1000):
            taken.append(i)
            yield i
    with pytest.raises(ZeroDivisionError):
        each(items(), lambda item: 1 / 0, 1)
    assert len(taken) <= 3


def test_who_presses_ctrl_c_waits_for_no_answer():
    begun, answered = threading.Event(), threading.Event()

    def items():
        yield 1
        begun.wait()
        raise KeyboardInterrupt

    def work(item):
        begun.set()
        answered.wait()
    with pytest.raises(KeyboardInterrupt):
        each(items(), work, 2)
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "post")
    answered.set()


def test_nor_does_who_leaves_a_batch(monkeypatch):
    begun, answered = threading.Event(), threading.Event()
    monkeypatch.setattr("isthmus.core.cli.run_batch.Poster.post", lambda *_: (begun.set(), answered.wait()))

    async def body():
        async with remote("http://127.0.0.1:9", None, 2) as post:
            task = asyncio.ensure_future(post("/x", b"{}"))
            await asyncio.to_thread(begun.wait)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    asyncio.run(body())
    answered.set()


def test_errors_and_cancelled_work_are_its_callers():
    threads, goes_on = Daemons(1), threading.Event()
    first, second, third = threads.submit(goes_on.wait), threads.submit(int, "x"), threads.submit(int, "5")
    fourth = threads.submit(int, "6")
    assert fourth.cancel()
    goes_on.set()
    assert first.result() is True and third.result() == 5
    with pytest.raises(ValueError):
        second.result()
    threads.close()
