"""What low-rank adapters cost: prefill and decode steps with 0, 1, 4 and 16 adapters in a batch, beside the base model
and beside models that have them merged.

    python benchmarks/core/lora.py [--model MODEL] [--rank 16] [--rows 16] [--rounds 5] [--platform cpu]

Two engines in one process, in turn: one knows no adapter, the other has all in its slots. The adapters have the same
random values, which change every projection: to the engine they are different ones. A merged model costs a step what
the base model does, but shares no batch: k of them take k steps with a k-th of the rows each, which the base engine is
measured with. Told are medians of the time of a step, and the processor time of the process, which other work on the
machine changes less.
"""
from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from isthmus.core.config import (
    AdapterSettings,
    CacheSettings,
    Config,
    ModelSettings,
    PlatformSettings,
    SchedulerSettings,
)
from isthmus.core.engine import EngineCore
from isthmus.core.messages import SamplingParams, Submit, pack_ids
from isthmus.core.weights.sources import resolve_model

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

class Cost(NamedTuple):
    """Milliseconds of a decode step, and microseconds of prefill for a token: on the clock, and of processors."""

    decode: float
    decode_cpu: float
    prefill: float
    prefill_cpu: float


def make(given: argparse.Namespace, model: Path, adapter: Path | None, count: int) -> EngineCore:
    named = tuple(f"a{i}={adapter}" for i in range(count))
    return EngineCore(Config(
        model=ModelSettings(model=str(model)),
        platform=PlatformSettings(platform=given.platform, platform_option=tuple(given.option)),
        cache=CacheSettings(kv_cache_memory="256MiB"), scheduler=SchedulerSettings(max_running_requests=given.rows),
        adapters=AdapterSettings(lora=named, max_loras=count or None)))


def measure(given: argparse.Namespace, engine: EngineCore, rows: int, adapters: int, seed: int) -> Cost:
    """`rows` requests, of which each has one of the first `adapters` of the engine, or none."""
    numbers = [known["number"] for known in engine.command("adapters")["adapters"]][:adapters] if adapters else [0]
    rng = np.random.default_rng(seed)
    engine.command("flush_cache")
    for i in range(rows):
        prompt = rng.integers(5, engine.info.vocab_size, given.prompt)
        engine.submit(Submit(f"{i}", pack_ids(prompt), SamplingParams(
            max_tokens=given.new, temperature=0.0, ignore_eos=True), adapter=numbers[i % len(numbers)]))
    begun: set[str] = set()
    began, used = time.perf_counter(), time.process_time()
    while len(begun) < rows:
        begun |= {output.id for output in engine.step()}
    prefill, prefill_cpu = time.perf_counter() - began, time.process_time() - used
    steps, used, at = [], time.process_time(), time.perf_counter()
    while engine.has_work:
        engine.step()
        steps.append(time.perf_counter() - at)
        at += steps[-1]
    return Cost(1e3 * statistics.median(steps), 1e3 * (time.process_time() - used) / len(steps),
                1e6 * prefill / (rows * given.prompt), 1e6 * prefill_cpu / (rows * given.prompt))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--platform", default="cpu")
    parser.add_argument("--adapters", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a request's prompt")
    parser.add_argument("--new", type=int, default=24, help="tokens that it gets")
    parser.add_argument("--option", action="append", default=[], help="a --platform-option, such as threads=1, with "
                        "which the processor time has no waiting of one thread for another")
    given = parser.parse_args()
    from tests.lora_files import drawn_for, write_adapter
    model = Path(resolve_model(given.model))
    with tempfile.TemporaryDirectory() as folder:
        files = write_adapter(Path(folder, "adapter"), drawn_for(model, 0, given.rank, 0.1))
        base, adapted = make(given, model, None, 0), make(given, model, files, max(given.adapters))
        shares = sorted({max(1, given.rows // k) for k in given.adapters})
        cases = [(f"base model, {rows} rows", base, rows, 0) for rows in shares]
        cases += [("slots, no adapter", adapted, given.rows, 0)]
        cases += [(f"{k} adapters", adapted, given.rows, k) for k in given.adapters]
        found: dict[str, list[Cost]] = {name: [] for name, *_ in cases}
        for seed in range(given.rounds + 1):
            for name, engine, rows, k in cases:
                cost = measure(given, engine, rows, k, seed)
                if seed:  # the first round is for what is made once
                    found[name].append(cost)
    print(f"{base.info.model} on {given.platform}, {given.rows} rows, rank {given.rank}, {given.rounds} rounds; "
          f"medians [least to most]")
    print(f"{'':28}" + "".join(f"{name:>28}" for name in ("decode ms/step", "processor ms/step",
                                                            "prefill us/token", "processor us/token")))
    for name, costs in found.items():
        columns = [f"{statistics.median(values):.2f} [{min(values):.2f} to {max(values):.2f}]"
                   for values in zip(*costs, strict=True)]
        print(f"{name:28}" + "".join(f"{column:>28}" for column in columns))
    middle = {name: statistics.median(cost.decode_cpu for cost in costs) for name, costs in found.items()}
    whole = middle[f"base model, {given.rows} rows"]
    for k in given.adapters:
        share = max(1, given.rows // k)
        print(f"{k} adapters: {middle[f'{k} adapters'] / whole:.2f} of the base model's step; "
              f"{k} merged models: {k * middle[f'base model, {share} rows'] / whole:.2f}")


if __name__ == "__main__":
    main()
