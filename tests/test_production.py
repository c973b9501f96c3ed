"""Simulated production (`tests/production.py`) and what a long life leaves behind."""
from __future__ import annotations

import asyncio
import gc
from pathlib import Path

import pytest
from isthmus.core.config import Config
from isthmus.core.errors import IsthmusError
from isthmus.core.messages import CacheHint, SamplingParams, Submit, Watch, pack_ids
from isthmus.core.processes.in_process import InProcessClient

from .fake_engine import ByteTokenizer
from .memory import allocated
from .production import BEGIN, VOCAB, make_engine, production

COST = 400  # seconds

MOONCAKE = Path(__file__).resolve().parents[2] / "shared" / "data" / "mooncake" / "conversation_trace.jsonl"


@pytest.mark.parametrize("pages, policy", [(30_000, "lpm"), (9_000, "fcfs")])
def test_every_figure_agrees_after_a_minute(pages, policy):
    result = production(1, pages=pages, policy=policy, seed=1)
    assert not result["problems"], result["problems"]
    assert result["requests"] > 100 and result["hit_rate"] > 0.3 and result["steps"] > 2000, result


@pytest.mark.slow
def test_every_figure_agrees_after_twenty_minutes():
    result = production(20, pages=9_000)
    assert not result["problems"], result["problems"]
    assert result["requests"] > 3000 and result["endings"]["abort"] > 10 and result["evicted_pages"] > 100_000, result


@pytest.mark.slow
@pytest.mark.skipif(not MOONCAKE.exists(), reason="Mooncake's trace is not here")
def test_every_figure_agrees_after_an_hour_of_mooncakes_arrivals():
    result = production(60, MOONCAKE, pages=60_000)
    assert not result["problems"], result["problems"]
    assert result["requests"] > 10_000 and result["endings"]["abort"] > 50, result


class Letters(ByteTokenizer):
    """Every id of a large vocabulary has some letter."""

    vocab_size = VOCAB

    def token_bytes(self, id):
        return b"%c" % (97 + id % 26)


async def ask(client: InProcessClient, number: int) -> None:
    """A request that nothing else resembles: its own tenant, session, domain and prompt."""
    prompt = pack_ids([number % VOCAB, number // VOCAB, *range(number % 40)])
    params = SamplingParams(max_tokens=1 + number % 4, temperature=0.0, stop=("zz",) if number % 5 == 0 else ())
    submit = Submit(f"r{number}", prompt, params, f"salt {number}".encode() if number % 3 == 0 else b"",
                    tenant=f"tenant {number}", priority=number % 2,
                    hint=CacheHint(f"session {number}", number % 7 == 0, 5.0 if number % 2 else 0.0))
    outputs = client.generate(submit, Watch(submit.id, params.stop))
    try:
        async for _ in outputs:
            if number % 50 == 0:
                break  # its client hangs up
    except IsthmusError as error:
        assert "is outside the vocabulary" in str(error) or "waiting" in str(error)
    finally:
        await outputs.aclose()


async def serve(client: InProcessClient, first: int, count: int, at_once: int = 64) -> None:
    numbers = iter(range(first, first + count))

    async def worker() -> None:
        for number in numbers:
            await ask(client, number)
    await asyncio.gather(*(worker() for _ in range(at_once)))


def memory() -> tuple[int, int]:
    """(objects that Python tracks, bytes allocated)."""
    gc.collect()
    return len(gc.get_objects()), allocated()


@pytest.mark.slow
def test_nothing_grows_over_100_000_requests():
    """Of what lives long: engine, scheduler, cache, policies, detokenizer and client."""
    clock = [BEGIN]

    async def main() -> None:
        client = InProcessClient(Config(), lambda config, progress: make_engine(clock, 2000, "lpm"), Letters)
        await client.start()
        await serve(client, 0, 30_000)
        before = memory()
        await serve(client, 30_000, 70_000)
        after = memory()
        stats = await client.command("stats")
        assert stats["requests"] > 90_000 and stats["evicted_pages"] > 10_000 and not stats["running"]
        await client.close()
        assert after[0] < before[0] * 1.03 + 500, f"{before[0]} objects became {after[0]}"
        assert after[1] < before[1] + 16 * 2**20, f"{before[1] >> 20} MiB became {after[1] >> 20}"
    asyncio.run(main())

