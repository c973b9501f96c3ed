"""Both forms of the engine client over the fake engine, for tests of them."""
from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from isthmus.core.config import Config, ModelSettings, SchedulerSettings
from isthmus.core.messages import SamplingParams, Submit, TextOutput, Watch, pack_ids
from isthmus.core.processes.in_process import InProcessClient
from isthmus.core.processes.three import ProcessClient

from .effort import SOON
from .fake_engine import ByteTokenizer, FakeEngine

FORMS = ("in-process", "processes")


@pytest.fixture(autouse=True)
def importable_fakes(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


def make(form: str, model: str = "m", **scheduler):
    config = Config(model=ModelSettings(model), scheduler=SchedulerSettings(**{"restart": 0} | scheduler))
    if form == "in-process":
        return InProcessClient(config, FakeEngine, ByteTokenizer)
    return ProcessClient(config, "fake_engine:FakeEngine", "fake_engine:ByteTokenizer")


def with_client(form: str, body, timeout: float = 2 * SOON, **scheduler):
    """Run `body(client)` on a started client and close it, whatever happens."""
    async def main():
        client = make(form, **scheduler)
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


async def until(condition) -> None:
    end = time.monotonic() + SOON
    while not await condition():
        assert time.monotonic() < end, "did not happen in time"
        await asyncio.sleep(0.01)
