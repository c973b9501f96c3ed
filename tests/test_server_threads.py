"""Long work beside the event loop: what is abandoned is never done, and small work does not wait for large."""
from __future__ import annotations

import asyncio
import json
import threading

import pytest
from isthmus.core.errors import Overloaded
from isthmus.core.server import threads as module
from isthmus.core.server.threads import LARGE, MAX_WAITING, SMALL, Lane, Threads

from .fake_client import drive, make_app


class Works:
    """Pieces of work that note that they ran. The first holds its thread until `gate` opens."""

    def __init__(self):
        self.gate, self.started, self.done = threading.Event(), threading.Event(), []

    def hold(self):
        self.started.set()
        assert self.gate.wait(120)

    def note(self, name):
        return lambda: self.done.append(name) or name


@pytest.fixture
def works():
    made = Works()
    yield made
    made.gate.set()


async def start(lane, work, size):
    task = asyncio.ensure_future(lane.run(work, size, refusable=True))
    await asyncio.sleep(0)
    return task


async def held(lane, works, size=10):
    """The only thread of the lane is busy."""
    task = await start(lane, works.hold, size)
    await asyncio.to_thread(works.started.wait, 120)
    return task


def test_small_work_passes_large_work_but_not_for_ever(works, monkeypatch):
    lane, clock = Lane(1), [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])

    async def main():
        tasks = [await held(lane, works)]
        for name, size, now in (("large", 1_000_000, 100), ("small", 1000, 101), ("later", 1000, 150),
                                ("too late", 1000, 300)):
            clock[0] = now
            tasks.append(await start(lane, works.note(name), size))
        works.gate.set()
        await asyncio.gather(*tasks)
    asyncio.run(main())
    assert works.done == ["small", "later", "large", "too late"]


def test_abandoned_work_is_not_done_and_holds_nothing(works):
    lane = Lane(1)

    async def main():
        first = await held(lane, works)
        task, other = await start(lane, works.note("abandoned"), 10**6), await start(lane, works.note("kept"), 10**6)
        assert len(lane._jobs) == 3
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert len(lane._jobs) == 2 and lane._waiting < 10**6
        works.gate.set()
        await asyncio.gather(first, other)
        assert not lane._jobs and not lane._waiting
    asyncio.run(main())
    assert works.done == ["kept"]


def test_what_waits_is_bounded_for_large_work_only(works):
    lane = Lane(1)

    async def main():
        first = await held(lane, works)
        large = await start(lane, works.note("large"), MAX_WAITING + 10**6)  # one of any size may wait
        with pytest.raises(Overloaded, match="wait to be read") as caught:
            await lane.run(works.note("refused"), 100_000, refusable=True)
        assert caught.value.status == 503
        rest = [await start(lane, works.note("small"), 1000),
                asyncio.ensure_future(lane.run(works.note("answer"), 10**6, refusable=False))]
        works.gate.set()
        await asyncio.gather(first, large, *rest)
    asyncio.run(main())
    assert sorted(works.done) == ["answer", "large", "small"]


def test_errors_reach_whoever_waits():
    async def main():
        with pytest.raises(ZeroDivisionError):
            await Lane(1).run(lambda: 1 / 0, 10, refusable=True)
    asyncio.run(main())


def test_generation_does_not_wait_for_conversion(works):
    pool = Threads()

    async def main():
        task = asyncio.ensure_future(pool.read(works.hold, LARGE + 1, text=True))
        await asyncio.to_thread(works.started.wait, 120)
        assert await pool.read(works.note("chat"), LARGE + 1) == "chat"
        assert await pool.read(works.note("short text"), SMALL + 1, text=True) == "short text"
        assert await pool.run(works.note("answer"), LARGE + 1) == "answer"
        works.gate.set()
        await task
    asyncio.run(main())
    pool.close()


def test_a_client_that_hangs_up_takes_its_waiting_work_along(works, monkeypatch):
    made = make_app()
    texts = []

    def encode(text, *_):
        texts.append(text[0])
        works.hold()
        return [1]
    monkeypatch.setattr(made.app.state.server.text.tokenizer, "encode", encode)

    async def main():
        posts = [json.dumps({"prompt": letter * 100_000}).encode() for letter in "abc"]
        first = asyncio.ensure_future(drive(made.app, "/tokenize", posts[0]))
        await asyncio.to_thread(works.started.wait, 120)
        second = asyncio.ensure_future(drive(made.app, "/tokenize", posts[1], hang_up=lambda sent: True))
        third = asyncio.ensure_future(drive(made.app, "/tokenize", posts[2]))
        await asyncio.wait({second}, timeout=120)
        assert second.done(), "it need not wait for anything"
        works.gate.set()
        return [(await task)[0]["status"] for task in (first, third)]
    assert asyncio.run(main()) == [200, 200] and texts == ["a", "c"]
