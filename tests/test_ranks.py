"""Ranks of tensor parallelism in processes of their own: the same text, errors that end in all of them, a batch on the
wire."""
from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from isthmus.core.config import CacheSettings, Config, ModelSettings, ParallelSettings, PlatformSettings
from isthmus.core.engine import EngineCore
from isthmus.core.errors import EngineDead
from isthmus.core.messages import SamplingParams, Submit, pack_ids
from isthmus.core.plan import Batch, Bias, Mask, Penalties, Sampling
from isthmus.core.processes.ranks import RENDEZVOUS, pack, unpack

from .checkpoints import tiny_llama_gguf
from .effort import until

COST = 60  # seconds


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_llama_gguf(tmp_path_factory.mktemp("ranks") / "tiny.gguf")


def engine(model, ranks: int) -> EngineCore:
    return EngineCore(Config(model=ModelSettings(model=str(model), dtype="float32"),
                             platform=PlatformSettings(platform="cpu", platform_option=("threads=1",)),
                             cache=CacheSettings(kv_cache_memory="4MiB"),
                             parallel=ParallelSettings(tensor_parallel_size=ranks)))


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


def test_ranks_that_do_not_divide_the_model_are_refused(model):
    with pytest.raises(Exception, match="--tensor-parallel-size 3: .* cannot be shared evenly"):
        engine(model, 3)


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
