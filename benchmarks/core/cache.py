"""What the cache costs a scheduler: admission and end of a request, the ledger's share, memory by page and node.

    OMP_NUM_THREADS=1 python benchmarks/core/cache.py [--page-size 16] [--policy learned] [--json FILE]

Everything is CacheManager's, with every duty on; thread CPU time, medians of rounds.
"""
from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from isthmus.core.cache.events import CacheEvents
from isthmus.core.cache.manager import CacheManager
from isthmus.core.cache.pool import PagePool

DOMAIN, OWNER, VOCABULARY = b"tenant-7", 1, 150_000
ROUNDS, REQUESTS = 9, 8
PARTS = ("cached_tokens", "acquire", "admit", "take", "commit", "end")  # end: the output's pages, and release


class Unchecked(PagePool):
    """The pool without its ledger: a free list and nothing else."""

    def alloc(self, count: int, owner: int | np.ndarray) -> np.ndarray:
        self._top -= count
        return self._free[self._top:self._top + count][::-1].astype(np.int32)

    def release(self, pages: np.ndarray, owner: int) -> None:
        self._free[self._top:self._top + len(pages)] = pages
        self._top += len(pages)

    def transfer(self, pages: np.ndarray, source: int, target: int) -> None:
        pass


def prompts(tokens: int, seed: int) -> Iterator[bytes]:
    """Prompts without end; 512 tokens of each are everybody's."""
    draw = np.random.default_rng(seed)
    common = draw.integers(0, VOCABULARY, min(512, tokens // 2), dtype=np.int32)
    while True:
        rest = draw.integers(0, VOCABULARY, tokens - len(common), dtype=np.int32)
        yield np.concatenate([common, rest]).tobytes()


def serve(cache: CacheManager, prompt: bytes, spent: dict[str, float], output: int = 16) -> None:
    """One request from admission to its end, each of its calls on the clock. It decodes `output` tokens."""
    tokens, size = np.frombuffer(prompt, np.int32), cache.page_size
    told = np.concatenate([tokens, tokens[:output]])
    row = np.zeros(-(-len(told) // size), np.int32)
    clock = time.thread_time_ns
    t0 = clock()
    cache.cached_tokens(prompt, DOMAIN, len(tokens) - 1)
    t1 = clock()
    pages, node = cache.acquire(prompt, DOMAIN, len(tokens) - 1)
    t2 = clock()
    use = cache.admit(tokens, len(pages), node)
    t3 = clock()
    fresh = cache.take(len(row) - len(pages), OWNER)
    t4 = clock()
    row[:len(pages)], row[len(pages):] = pages, fresh
    t5 = clock()
    shared, node = cache.commit(tokens[:-1], row, len(pages), OWNER, DOMAIN, node, use)
    t6 = clock()
    shared, node = cache.commit(told[:-1], row, shared, OWNER, DOMAIN, node, use)
    cache.release(row, shared, OWNER, node, use)
    t7 = clock()
    for part, ns in zip(PARTS, (t1 - t0, t2 - t1, t3 - t2, t4 - t3, t6 - t5, t7 - t6), strict=True):
        spent[part] += ns / 1e3
    cache.tick(cache.now + 0.01)


def costs(tokens: int, cached: bool, page_size: int, policy: str) -> dict[str, Any]:
    """Microseconds of one request, by call, in a cache that is full: each new one evicts."""
    cache = CacheManager(40 * tokens // page_size + 1000, page_size, policy)
    cache.tree.listener = events = CacheEvents(cache.pool.total, page_size)
    some = prompts(tokens, 1)
    known = [next(some) for _ in range(4)]
    for prompt in [next(some) for _ in range(60)] + known:
        serve(cache, prompt, dict.fromkeys(PARTS, 0.0))
    rounds: list[dict[str, float]] = []
    for _ in range(ROUNDS):
        spent = dict.fromkeys(PARTS, 0.0)
        events.drain(cache.tree)
        for i in range(REQUESTS):
            serve(cache, known[i % 4] if cached else next(some), spent)
        rounds.append({part: us / REQUESTS for part, us in spent.items()})
    parts = {part: statistics.median(r[part] for r in rounds) for part in PARTS}
    admission = [sum(us for part, us in r.items() if part != "end") for r in rounds]
    return {"what": "cached" if cached else "new", "tokens": tokens, "us": parts,
            "admission_us": statistics.median(admission), "admission_range": [min(admission), max(admission)]}


def ledger(tokens: int, running: int, page_size: int) -> dict[str, Any]:
    """Microseconds of a step's pool operations, with the ledger and without it: `running` requests decode, so that each
    page_size-th takes a page; one request of `tokens` tokens comes, and one goes, whose pages are evicted later."""

    def life(pool: PagePool) -> Callable[[], None]:
        full, owners = tokens // page_size, np.arange(1, running // page_size + 1, dtype=np.int32)

        def run() -> None:
            some = pool.alloc(len(owners), owners)
            pages = pool.alloc(full + 1, OWNER)
            pool.transfer(pages[:full], OWNER, -1)
            pool.release(pages[full:], OWNER)
            pool.release(pages[:full], -1)
            pool.owner[some] = OWNER
            pool.release(some, OWNER)
        return run

    made = {"checked": life(PagePool(100_000)), "unchecked": life(Unchecked(100_000))}
    times: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(ROUNDS):
        for name, run in made.items():
            began = time.thread_time_ns()
            for _ in range(50):
                run()
            times[name].append((time.thread_time_ns() - began) / 50 / 1e3)
    checked, unchecked = (statistics.median(times[name]) for name in made)
    return {"tokens": tokens, "running": running, "us": checked, "without_us": unchecked,
            "share_of_5_ms": (checked - unchecked) / 5000}


def memory(nodes: int, tokens: int, page_size: int, policy: str) -> dict[str, Any]:
    """Bytes of a tree of `nodes` leaves of `tokens` tokens behind one prefix: in all, by node and by page.

    The difference between long and short leaves is what pages cost; what is left is the node's own.
    """
    count = tokens // page_size
    cache = CacheManager(nodes * count + 1000, page_size, policy)
    draw = np.random.default_rng(0)
    common = draw.integers(0, VOCABULARY, 512, dtype=np.int32).tobytes()
    cache.tree.insert(common, cache.pool.alloc(512 // page_size, OWNER))
    gc.collect()
    tracemalloc.start()
    for _ in range(nodes):
        row = np.zeros(512 // page_size + count, np.int32)
        row[512 // page_size:] = cache.pool.alloc(count, OWNER)
        cache.tree.insert(common + draw.integers(0, VOCABULARY, tokens, dtype=np.int32).tobytes(), row)
    total = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    pool = sum(part.nbytes for part in (cache.pool.owner, cache.pool.generation, cache.pool._free))
    return {"nodes": nodes, "pages": count, "bytes_a_node": total / nodes, "pool_bytes_a_page": pool / cache.pool.total}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--policy", default="learned")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    size, policy = options.page_size, options.policy
    gc.disable()
    print(f"page size {size}, policy {policy}; microseconds a request\n")
    print("| request | tokens | " + " | ".join(PARTS) + " | admission |\n|" + "---|" * (len(PARTS) + 3))
    requests = [costs(tokens, cached, size, policy) for tokens in (128, 1024, 8192, 32768) for cached in (False, True)]
    for found in requests:
        cells = " | ".join(f"{found['us'][part]:.1f}" for part in PARTS)
        low, high = found["admission_range"]
        print(f"| {found['what']} | {found['tokens']:,} | {cells} | "
              f"{found['admission_us']:.1f} [{low:.1f}-{high:.1f}] |")
    ledgers = [ledger(tokens, running, size) for tokens, running in ((1024, 64), (8192, 512))]
    for found in ledgers:
        print(f"\na step's pages, {found['running']} running, one of {found['tokens']:,} tokens comes and goes: "
              f"{found['us']:.1f} us, {found['without_us']:.1f} without the ledger: it is "
              f"{found['share_of_5_ms']:.2%} of 5 ms")
    few, many = memory(20_000, 4 * size, size, policy), memory(20_000, 12 * size, size, policy)
    page = (many["bytes_a_node"] - few["bytes_a_node"]) / 8
    node = few["bytes_a_node"] - 4 * page
    print(f"\nmemory: {page:.0f} bytes a cached page in the tree ({4 * size} of them its tokens) and "
          f"{few['pool_bytes_a_page']:.0f} in the pool, {node:.0f} bytes a node")
    if options.json:
        found = {"requests": requests, "ledger": ledgers, "bytes_a_page": page, "bytes_a_node": node,
                 "pool_bytes_a_page": few["pool_bytes_a_page"]}
        options.json.write_text(json.dumps({"results": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
