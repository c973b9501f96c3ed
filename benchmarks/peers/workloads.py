"""Deterministic workloads in token ids, so that every engine computes the same tokens.

W1 single stream: 128 tokens in, 128 out, three times.  W2: 32 concurrent distinct prompts of 256, 64 out.
W3: 32 requests behind one prefix of 1,500 tokens plus 64 of their own, 32 out, 8 at a time.
W4: 8 conversations of 4 turns (64 shared system tokens, 96 new tokens a turn, 48 out), 8 at a time.
"""
from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

FIRST_ID, LAST_ID = 300, 49_000  # ordinary tokens of both models' vocabularies


@dataclass(frozen=True)
class Timing:
    """One request: seconds from start to first and to last token, the ids that came, and how many tokens of the prompt
    the engine says that it had (None = it does not say)."""

    first: float
    last: float
    tokens: list[int]
    cached: int | None = None


Generate = Callable[[list[int], int], Timing]
Figures = dict[str, float]


def prompt(rng: np.random.Generator, length: int) -> list[int]:
    return rng.integers(FIRST_ID, LAST_ID, length).tolist()


def single_stream(generate: Generate, seed: int) -> Figures:
    """W1: medians of decode tokens/s and of milliseconds to the first token."""
    rng = np.random.default_rng((seed, 1))
    timings = [generate(prompt(rng, 128), 128) for _ in range(3)]
    return {"decode_tps": statistics.median((len(t.tokens) - 1) / (t.last - t.first) for t in timings),
            "ttft_ms": statistics.median(1e3 * t.first for t in timings), "out": sum(len(t.tokens) for t in timings)}


def concurrent(generate: Generate, seed: int) -> Figures:
    """W2: output tokens/s over the whole run, and the median time to the first token."""
    rng = np.random.default_rng((seed, 2))
    return _together(generate, [prompt(rng, 256) for _ in range(32)], 64, 32)


def shared_prefix(generate: Generate, seed: int) -> Figures:
    """W3: as W2, behind one prefix."""
    rng = np.random.default_rng((seed, 3))
    system = prompt(rng, 1500)
    return _together(generate, [system + prompt(rng, 64) for _ in range(32)], 32, 8)


def multi_turn(generate: Generate, seed: int) -> Figures:
    """W4: each conversation sends its whole history every turn."""
    rng = np.random.default_rng((seed, 4))
    system = prompt(rng, 64)
    turns = [[prompt(rng, 96) for _ in range(4)] for _ in range(8)]
    done: list[tuple[int, Timing]] = []
    lock = threading.Lock()

    def converse(conversation: list[list[int]]) -> None:
        history = list(system)
        for turn in conversation:
            history += turn
            timing = generate(history, 48)
            with lock:
                done.append((len(history), timing))
            history += timing.tokens

    began = time.perf_counter()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(converse, turns))
    return _figures(done, time.perf_counter() - began)


def _together(generate: Generate, prompts: list[list[int]], out: int, at_once: int) -> Figures:
    began = time.perf_counter()
    with ThreadPoolExecutor(at_once) as pool:
        timings = list(pool.map(lambda p: generate(p, out), prompts))
    wall = time.perf_counter() - began
    return _figures([(len(p), t) for p, t in zip(prompts, timings, strict=True)], wall)


def _figures(done: list[tuple[int, Timing]], wall: float) -> Figures:
    firsts, out = sorted(1e3 * timing.first for _, timing in done), sum(len(timing.tokens) for _, timing in done)
    figures = {"out_tps": out / wall, "ttft_ms": statistics.median(firsts),
               "ttft_p95_ms": firsts[int(0.95 * len(firsts))], "out": out}
    cached = [timing.cached for _, timing in done]
    if None not in cached:
        figures["hit_rate"] = sum(cached) / sum(length for length, _ in done)
    return figures


WORKLOADS = {"W1": single_stream, "W2": concurrent, "W3": shared_prefix, "W4": multi_turn}
MAIN = {"W1": "decode_tps", "W2": "out_tps", "W3": "out_tps", "W4": "out_tps"}  # the figure that is compared
