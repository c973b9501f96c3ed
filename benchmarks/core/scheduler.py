"""A scheduler's step beside vLLM's: schedule and update with 8 to 512 running requests, and admission, one process, in
turn, thread CPU time.

    OMP_NUM_THREADS=1 python benchmarks/core/scheduler.py [--vllm FOLDER] [--running 8 64 256 512] [--json FILE]

FOLDER holds their unpacked wheel (see vllm_peer.py); without it Isthmus runs alone. A step of Isthmus is plan, the
whole batch (page tables, slots, sampling parameters, uniforms, penalties, biases), advance, settle and the message that
leaves; one of theirs is schedule() and update_from_output(): how their model runner makes its inputs is not counted.

steady: every request decodes. churn: in each step the oldest request is aborted and a new one of 256 tokens admitted.
Of 16 requests one wants log-probabilities, one has a presence penalty, one a logit_bias, one min_tokens and stop ids.
admission: from the new request of 8,192 tokens to the plan that has pages for all of it, nothing else running; neither
side's inputs of the model are counted.
"""
from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
from isthmus.core.cache.manager import CacheManager
from isthmus.core.messages import SamplingParams, Submit, pack_ids
from isthmus.core.plan import Batch, StepResult
from isthmus.core.scheduler.admission import Limits
from isthmus.core.scheduler.batch import build_batch
from isthmus.core.scheduler.plans import Plan
from isthmus.core.scheduler.scheduler import Scheduler

PAGE, EOS, VOCABULARY, PROMPT, LONG = 16, 2, 150_000, 256, 8192
BLOCK = 20  # steps of one engine before it is the next one's turn


class Isthmus:
    """The scheduler as the engine drives it."""

    name = "Isthmus"

    def __init__(self, running: int, pages: int):
        limits = Limits(running, 4096, 2**20, PAGE, 16384, VOCABULARY, (EOS,))
        self.scheduler = Scheduler(limits, CacheManager(pages, PAGE))
        self.now = 0.0

    def params(self, max_tokens: int, **more: Any) -> SamplingParams:
        return SamplingParams(max_tokens=max_tokens, temperature=0.8, top_p=0.95, seed=1, **more)

    def prompt(self, tokens: np.ndarray) -> bytes:
        return pack_ids(tokens)

    def submit(self, name: str, prompt: bytes, params: SamplingParams) -> None:
        self.scheduler.submit(Submit(name, prompt, params), self.now)

    def schedule(self) -> Plan:
        self.now += 0.01
        return self.scheduler.plan(self.now)

    def inputs(self, plan: Plan) -> tuple[Plan, Batch]:
        """What the model gets."""
        batch, _ = build_batch(plan, self.scheduler.table, PAGE, None)
        self.scheduler.advance(plan)
        return plan, batch

    def result(self, plan: tuple[Plan, Batch], tokens: np.ndarray, scores: tuple[np.ndarray, ...]) -> StepResult:
        """What a platform gives back."""
        count = len(plan[1].targets)
        return StepResult(tokens[:count], scores[1][:count, 0].copy(), scores[0][:count, 1:], scores[1][:count, 1:])

    def settle(self, plan: tuple[Plan, Batch], result: StepResult) -> Any:
        return self.scheduler.settle(plan[0], result).message()

    def abort(self, name: str) -> None:
        self.scheduler.abort([name])


class Run:
    """One engine under load. Tokens are fresh random ids that end nothing."""

    def __init__(self, engine: Any, running: int, seed: int = 0):
        self.engine, self.running, self.serial = engine, running, 0
        self.random = np.random.default_rng(seed)
        self.names: list[str] = []
        rows = running + 8
        self.scores = (np.zeros((rows, 3), np.int32), np.full((rows, 3), -0.5, np.float32), np.zeros(rows, np.int32))
        for _ in range(running):
            engine.submit(*self.request())
        for _ in range(3):
            self.step()

    def request(self) -> tuple[str, Any, Any]:
        """The next request: name, prompt and parameters in the engine's form."""
        more: dict[str, Any] = {0: {"logprobs": 2}, 1: {"presence_penalty": 0.5}, 2: {"logit_bias": {7: 1.0}},
                                3: {"min_tokens": 4, "stop_token_ids": (5, 6)}}.get(self.serial % 16, {})
        name = f"request-{self.serial}"
        self.serial += 1
        self.names.append(name)
        prompt = self.engine.prompt(self.random.integers(10, VOCABULARY, PROMPT))
        return name, prompt, self.engine.params(8000, **more)

    def step(self, churn: bool = False) -> float:
        """CPU seconds of one step; making up the device's result is not counted."""
        tokens = self.random.integers(10, VOCABULARY, self.running + 8).astype(np.int32)
        new = self.request() if churn else None
        before = time.thread_time_ns()
        if new is not None:
            self.engine.abort(self.names.pop(0))
            self.engine.submit(*new)
        plan = self.engine.inputs(self.engine.schedule())
        spent = time.thread_time_ns() - before
        result = self.engine.result(plan, tokens, self.scores)
        before = time.thread_time_ns()
        self.engine.settle(plan, result)
        return (spent + time.thread_time_ns() - before) / 1e9


def measure_steps(engines: list[Any], running: int, steps: int) -> dict[str, dict[str, dict[str, float]]]:
    """Medians and 99th percentiles in microseconds, engines in turn."""
    runs = [Run(engine, running) for engine in engines]
    found: dict[str, dict[str, dict[str, float]]] = {}
    for mode in ("steady", "churn"):
        spent: list[list[float]] = [[] for _ in runs]
        for _ in range(max(1, steps // BLOCK)):
            for run, times in zip(runs, spent, strict=True):
                run.step(mode == "churn")
                times += [run.step(mode == "churn") for _ in range(BLOCK)]
        found[mode] = {run.engine.name: {"median_us": statistics.median(times) * 1e6,
                                         "p99_us": float(np.quantile(times, 0.99)) * 1e6}
                       for run, times in zip(runs, spent, strict=True)}
    return found


def admit(engine: Any, name: str, tokens: np.ndarray) -> float:
    """CPU microseconds from a new request to its plan; then it is carried out and ends."""
    prompt, params = engine.prompt(tokens), engine.params(100)
    before = time.thread_time_ns()
    engine.submit(name, prompt, params)
    plan = engine.schedule()
    spent = time.thread_time_ns() - before
    plan = engine.inputs(plan)
    scores = (np.zeros((8, 3), np.int32), np.full((8, 3), -0.5, np.float32), np.zeros(8, np.int32))
    engine.settle(plan, engine.result(plan, np.full(8, 11, np.int32), scores))
    engine.abort(name)
    return spent / 1e3


def measure_admission(engines: list[Any], rounds: int) -> dict[str, dict[str, float]]:
    """Medians in microseconds for prompts of `LONG` tokens: never seen, and cached as a whole; engines in turn."""
    random = np.random.default_rng(1)
    same = random.integers(10, VOCABULARY, LONG)
    found: dict[str, dict[str, list[float]]] = {kind: {e.name: [] for e in engines} for kind in ("cold", "cached")}
    for i in range(rounds):
        for kind, times in found.items():
            prompts = [same if kind == "cached" else random.integers(10, VOCABULARY, LONG) for _ in range(BLOCK)]
            for engine in engines:
                spent = [admit(engine, f"{kind}-{i}-{n}", tokens) for n, tokens in enumerate(prompts)]
                times[engine.name] += spent[2:]
    return {kind: {name: statistics.median(times) for name, times in by.items()} for kind, by in found.items()}


def waiting_bytes(count: int = 2000) -> float:
    """Bytes that a waiting request takes beyond its packed prompt."""
    engine = Isthmus(1, 100)
    engine.scheduler.limits = Limits(1, count + 8, 512, PAGE, 16384, VOCABULARY, (EOS,))
    engine.scheduler.queue._limits = engine.scheduler.limits
    submits = [Submit(f"request-{i}", pack_ids(np.arange(10, 10 + PROMPT)), engine.params(8000)) for i in range(count)]
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for submit in submits:
        engine.scheduler.submit(submit, 0.0)
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return taken / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path)
    parser.add_argument("--running", type=int, nargs="+", default=[8, 64, 256, 512])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    theirs: Any = None
    if args.vllm:
        import vllm_peer
        made = vllm_peer.load(args.vllm)
        theirs = lambda size, pages: [vllm_peer.Vllm(made, size, pages, overlap) for overlap in (False, True)]  # noqa
    gc.disable()
    report: dict[str, Any] = {"machine": platform.processor(), "python": platform.python_version(),
                              "numpy": np.__version__, "steps": args.steps, "running": {}}
    for running in args.running:
        pages = running * (PROMPT + args.steps * 3) // PAGE + args.steps * 60
        engines = [Isthmus(running + 8, pages), *(theirs(running + 8, pages) if theirs else [])]
        report["running"][running] = found = measure_steps(engines, running, args.steps)
        for mode, by in found.items():
            ours = by["Isthmus"]["median_us"]
            print(f"{running:4} {mode:7}" + "".join(
                f"  {name}: {t['median_us']:8.1f} us (p99 {t['p99_us']:.0f}, x{t['median_us'] / ours:.1f})"
                for name, t in by.items()), flush=True)
        gc.collect()
    engines = [Isthmus(8, 80_000), *(theirs(8, 80_000)[:1] if theirs else [])]
    report["admission_us"] = measure_admission(engines, 5)
    report["waiting_request_bytes"] = waiting_bytes()
    print("admission of", LONG, "tokens, us:", report["admission_us"])
    print("a waiting request, bytes beyond its prompt:", round(report["waiting_request_bytes"]))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
