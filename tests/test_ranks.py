"""Ranks of tensor parallelism in processes of their own: the same text, errors that end in all of them, a batch on the
wire."""
from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import psutil
import pytest
from isthmus.core import startup
from isthmus.core.config import (
    CacheSettings,
    Config,
    ModelSettings,
    ParallelSettings,
    PlatformSettings,
    SchedulerSettings,
)
from isthmus.core.engine import EngineCore
from isthmus.core.errors import CheckpointError, EngineDead
from isthmus.core.messages import SamplingParams, Submit, pack_ids
from isthmus.core.plan import Batch, Bias, Mask, Penalties, Sampling
from isthmus.core.platform import Unavailable
from isthmus.core.processes.ranks import RENDEZVOUS, Work, pack, unpack
from isthmus.core.processes.three import ProcessClient

from .checkpoints import tiny_llama_gguf
from .clients import collect
from .effort import until

COST = 75  # seconds


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_llama_gguf(tmp_path_factory.mktemp("ranks") / "tiny.gguf")


def settings(model, ranks: int, **scheduler) -> Config:
    return Config(model=ModelSettings(model=str(model), dtype="float32"),
                  platform=PlatformSettings(platform="cpu", platform_option=("threads=1",)),
                  cache=CacheSettings(kv_cache_memory="4MiB"), scheduler=SchedulerSettings(**scheduler),
                  parallel=ParallelSettings(tensor_parallel_size=ranks))


def engine(model, ranks: int, **scheduler) -> EngineCore:
    return EngineCore(settings(model, ranks, **scheduler))


def texts(made: EngineCore) -> dict[str, list[int]]:
    """Greedy and drawn tokens of three requests at once, one of them longer than a chunk."""
    for name, prompt, more in (("a", [5, 6, 7], {}), ("b", list(range(3, 60)), {}),
                               ("c", [9] * 20, {"temperature": 0.9, "seed": 3, "top_p": 0.9})):
        made.submit(Submit(name, pack_ids(prompt), SamplingParams(
            **{"max_tokens": 12, "temperature": 0.0, "ignore_eos": True, **more})))
    found: dict[str, list[int]] = {}
    while made.has_work:
        for output in made.step():
            assert output.finish != "error", output.error
            found.setdefault(output.id, []).extend(np.frombuffer(output.tokens, np.int32).tolist())
    return found


def test_two_ranks_give_the_text_of_one(model):
    one = engine(model, 1)
    want = texts(one)
    one.close()
    two = engine(model, 2)
    try:
        assert texts(two) == want
        two.command("verify")
        assert two.command("flush_cache")["flushed_pages"] and two.cache.pool.free == two.cache.pool.capacity
    finally:
        processes = two._platform._processes
        two.close()
    assert [process.poll() is not None for process in processes] == [True]


def test_a_rank_that_ends_is_told_and_nobody_waits_for_it(model):
    made = engine(model, 2)
    try:
        (process,) = made._platform._processes
        process.kill()
        until(lambda: made._platform.dead)
        with pytest.raises(EngineDead, match="rank 1 process was killed by signal 9"):
            made._platform.alloc(made._state_spec, 4)
    finally:
        made.close()


stops = pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="processes cannot be stopped here")


@stops
def test_a_rank_that_hangs_is_named_with_what_it_did_and_ended(model):
    made = engine(model, 2, step_timeout=4.0)
    try:
        texts(made)
        (process,) = made._platform._processes
        until(lambda: (made._platform._progress.counts[1] == made._platform._sent).all())
        process.send_signal(signal.SIGSTOP)
        until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
        with pytest.raises(EngineDead, match=r"rank 1 hung and was ended: a step of \d+ tokens, not begun there, was "
                                             r"not finished within [0-9.]+ s \(--step-timeout\)"):
            texts(made)
        assert process.wait() == -signal.SIGKILL
        with pytest.raises(EngineDead, match="rank 1 hung"):
            made._platform.copy_pages(None, [1], [2])
    finally:
        made.close()


@stops
def test_a_rank_that_hangs_in_the_first_step_is_named_and_ended(model):
    """Which may take long, but not while nobody computes."""
    made = engine(model, 2, step_timeout=4.0)
    try:
        (process,) = made._platform._processes
        until(lambda: (made._platform._progress.counts[1] == made._platform._sent).all())
        process.send_signal(signal.SIGSTOP)
        until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
        with pytest.raises(EngineDead, match=r"rank 1 hung and was ended: a step of \d+ tokens, not begun there"):
            texts(made)
        assert process.wait() == -signal.SIGKILL
    finally:
        made.close()


def test_ranks_that_compile_are_waited_for():
    now, spent = [0.0], [0.0]
    work = Work(10.0, lambda: now[0])
    work.spent = lambda: spent[0]
    work.note()
    for seconds, used, none in ((9, 0, False), (1, 2, False), (10, 0.6, False), (5, 0, False), (5, 0.1, True)):
        now[0], spent[0] = now[0] + seconds, spent[0] + used
        assert work.none() is none


def test_rank_0_is_named_when_the_others_have_finished(model):
    made, never = engine(model, 2, step_timeout=4.0), threading.Event()
    submit = made._platform.collector.submit
    made._platform.collector.submit = lambda collect: submit(never.wait)
    try:
        with pytest.raises(EngineDead, match=r"rank 0 hung: a step of \d+ tokens, finished by the other ranks, was not "
                                             r"finished within [0-9.]+ s \(--step-timeout\)"):
            texts(made)
    finally:
        never.set()
        made.close()


@stops
def test_clients_hear_of_a_rank_that_hangs_and_health_fails(model):
    async def body() -> None:
        client = ProcessClient(settings(model, 2, step_timeout=6.0, restart=0))
        await client.start()
        try:
            scheduler = psutil.Process(client.pids()["scheduler"])
            (rank,) = [p for p in scheduler.children() if "isthmus.core.processes.ranks" in p.cmdline()]
            await collect(client, "a", [5, 6, 7], max_tokens=4, ignore_eos=True)
            rank.send_signal(signal.SIGSTOP)
            with pytest.raises(EngineDead, match="rank 1 hung and was ended: a step of 4 tokens, "):
                await collect(client, "b", [8, 9, 10, 11], max_tokens=4, ignore_eos=True)
            ok, reason = client.health()
            assert not ok and "rank 1 hung" in reason and not client.hung
            psutil.wait_procs([rank])
            assert not rank.is_running()
        finally:
            await client.close()
    asyncio.run(body())


def test_ranks_that_do_not_come_are_named(tmp_path):
    code = ("import sys, datetime; from isthmus.platforms import collective as c\n"
            "c.TIMEOUT = datetime.timedelta(seconds=0.2)\nc.join('gloo', 1, 3)")
    for found, words in ((None, "rank 0, 2 of 3 did not come within 0:00:00.2"), ("rank 2 exited", "rank 2 exited")):
        if found:
            (tmp_path / "failed").write_text(found)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                              env=os.environ | {RENDEZVOUS: str(tmp_path)})
        assert words in done.stderr


def test_ranks_that_do_not_divide_the_model_are_refused_before_any_is_started(model, monkeypatch):
    monkeypatch.setattr(startup, "claim_platform", lambda *_: pytest.fail("the platform was asked"))
    with pytest.raises(CheckpointError, match="--tensor-parallel-size 3: .* cannot be shared evenly; 2 would do"):
        engine(model, 3)


@pytest.mark.parametrize("platform", ["null", "reference"])
def test_a_platform_of_one_process_takes_no_ranks(model, platform):
    config = Config(model=ModelSettings(model=str(model)), platform=PlatformSettings(platform=platform),
                    parallel=ParallelSettings(tensor_parallel_size=2))
    with pytest.raises(Unavailable, match="runs in a single process; 2 ranks were asked for"):
        EngineCore(config)


def test_a_batch_on_the_wire_is_the_batch():
    def some(*shape, dtype=np.int32):
        return np.arange(np.prod(shape), dtype=dtype).reshape(shape)
    sampling = Sampling(some(2, dtype=np.float32), top_k=some(2), penalties=Penalties(*map(some, (3, 3, 3, 2)), *[
        some(2, dtype=np.float32)] * 3), bias=Bias(some(0), some(0), some(0, dtype=np.float32)),
        mask=Mask(some(1), some(1, 4, dtype=np.uint32)), top_logprobs=some(0))
    batch = Batch(*map(some, (4, 4, 4, 4, 2, 3, 2)), some(2, 3), some(2), some(2), sampling)
    np.testing.assert_equal(unpack(Batch, pack(batch)), batch)
    assert unpack(Batch, pack(batch)).sampling.uniform is None


def test_a_rank_alone_says_who_starts_it():
    code = ("from isthmus.core.discovery import load_platform\nfrom isthmus.core.platform import *\n"
            "p = load_platform('cpu'); p.probe(1, 2)\np.alloc(StateSpec((LayerState(1, 8),), 'f32', 16, 2), 3)")
    environment = {name: value for name, value in os.environ.items() if name != RENDEZVOUS}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert "ranks are started by the engine (--tensor-parallel-size 2)" in done.stderr
