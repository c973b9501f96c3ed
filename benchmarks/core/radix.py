"""The radix cache beside SGLang's: match, insert, lock and evict, one process, in turn, thread CPU time.

    OMP_NUM_THREADS=1 python benchmarks/core/radix.py [--sglang FOLDER] [--pages 1 16 64] [--nodes 1000 100000]

FOLDER holds their unpacked wheel (see peers.py); without it Isthmus runs alone. Isthmus has every duty on: domains, a
listener for KV events, ownership and generations in the pool. SGLang has its namespaces on, its events off, and an
allocator that does nothing. `insert` is one call of the tree; `commit` is what an engine does when a prompt has been
computed, ownership, lock and row included: CacheManager.commit here, `checkpoint` there. `evict` gives pages back, in
one call, of a cache that was filled as an engine fills it: by requests, one after the other.
"""
from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from isthmus.core.cache.events import CacheEvents
from isthmus.core.cache.manager import CacheManager
from isthmus.core.cache.pool import TREE

NEW = {128: 16, 1024: 16, 8192: 8, 32768: 4}  # lengths of prompts; how many that are new to the cache in one round
EVICT = {64: 32, 128: 16, 1024: 4, 8192: 1}  # tokens of one call; how many calls in one round
SHARED, LEAF = 512, 64   # tokens of the common prefix, of each leaf
TURN, TURNS = 256, 40    # tokens of a turn of the conversation that makes the deep path; how many
VOCABULARY, DOMAIN, OWNER = 150_000, "tenant-7", 1


class Isthmus:
    """The cache as the scheduler uses it, in the terms of the peers: prompts are int32 bytes, slots page numbers."""

    name = "Isthmus"

    def __init__(self, page_size: int, tokens: int, policy: str):
        self.size = page_size
        self.cache = CacheManager(tokens // page_size + 2, page_size, policy, strict=True)
        self.tree, self.pool = self.cache.tree, self.cache.pool
        self.tree.listener = self.events = CacheEvents(self.pool.total, page_size)
        self.events.cleared()
        self._inserted: list[np.ndarray] = []
        self.domain = DOMAIN.encode()

    def prompt(self, tokens: np.ndarray) -> bytes:
        return tokens.tobytes()

    def slots(self, count: int, start: int) -> np.ndarray:
        return self.pool.alloc(count // self.size, OWNER)

    def match(self, prompt: bytes, domain: str) -> tuple[int, Any]:
        pages, node = self.tree.match(prompt, self.domain)
        return pages * self.size, node

    def insert(self, prompt: bytes, slots: np.ndarray, domain: str) -> int:
        found, _ = self.tree.insert(prompt, slots, self.domain)
        self._inserted.append(slots[found:])
        return found * self.size

    def settle(self) -> None:
        """What happens between steps: inserted pages are the tree's, the log of events is told."""
        for pages in self._inserted:
            self.pool.transfer(pages, OWNER, TREE)
        self._inserted.clear()
        self.events._notes.clear()
        self.events._noted = 0

    def start(self, prompt: bytes, slots: np.ndarray, domain: str) -> list[Any]:
        """A request that has locked its cached prefix and has pages for all its tokens."""
        tokens, (pages, node) = np.frombuffer(prompt, np.int32), self.cache.acquire(prompt, self.domain)
        use = self.cache.admit(tokens, len(pages), node)
        self.pool.release(slots[:len(pages)], OWNER)
        return [tokens, np.concatenate([pages, slots[len(pages):]]), len(pages), node, use]

    def commit(self, request: list[Any]) -> int:
        tokens, row, shared, node, use = request
        request[2:4] = self.cache.commit(tokens, row, shared, OWNER, self.domain, node, use)
        return request[2] * self.size

    def end(self, request: list[Any]) -> None:
        _, row, shared, node, use = request
        self.cache.release(row, shared, OWNER, node, use)

    def lock(self, node: Any) -> Any:
        self.tree.lock(node)
        return node

    def unlock(self, node: Any) -> None:
        self.tree.unlock(node)

    def path(self, node: Any) -> np.ndarray:
        return self.tree.path(node)

    def evict(self, tokens: int) -> int:
        pages = self.tree.evict(-(-tokens // self.size))
        self.pool.release(pages, TREE)
        return len(pages) * self.size


class Bench:
    """One page size and tree size: the same prompts into every cache, then each operation in turn, `rounds` times."""

    def __init__(self, caches: list[Any], page_size: int, nodes: int, rounds: int):
        self.caches, self.page_size, self.nodes, self.rounds = caches, page_size, nodes, rounds
        self._draw, self._next, self.rows = np.random.default_rng(0), 1, []
        self.common = self._tokens(SHARED)
        self.build = {cache.name: 0.0 for cache in caches}
        for start in range(0, nodes, 1000):
            leaves = [np.concatenate([self.common, self._tokens(LEAF)]) for _ in range(min(1000, nodes - start))]
            for cache in caches:
                began = time.thread_time()
                for leaf in leaves:
                    self._serve(cache, leaf)
                self.build[cache.name] += time.thread_time() - began
            self._settle()

    def _tokens(self, count: int) -> np.ndarray:
        return self._draw.integers(0, VOCABULARY, count, dtype=np.int32)

    def _slots(self, cache: Any, count: int) -> Any:
        self._next += count
        return cache.slots(count, self._next)

    def _serve(self, cache: Any, tokens: np.ndarray) -> None:
        """A request from its admission to its end, without output."""
        request = cache.start(cache.prompt(tokens), self._slots(cache, len(tokens)), DOMAIN)
        cache.commit(request)
        cache.end(request)

    def _settle(self) -> None:
        for cache in self.caches:
            if isinstance(cache, Isthmus):
                cache.settle()

    def measure(self, op: str, tokens: int, calls: int, prepare: Callable[[Any], list[Callable[[], Any]]]) -> None:
        """Time `calls` times what `prepare(cache)` gives, by turns. Answers that differ between caches are an error."""
        times: dict[str, list[float]] = {cache.name: [] for cache in self.caches}
        for _ in range(self.rounds):
            answers = []
            state = self._draw.bit_generator.state
            for cache in self.caches:
                self._draw.bit_generator.state = state  # the same tokens for each
                work = prepare(cache) * calls
                began = time.thread_time_ns()
                for call in work:
                    answer = call()
                times[cache.name].append((time.thread_time_ns() - began) / len(work) / 1e3)
                answers.append(answer)
            if len(set(answers)) > 1:
                raise AssertionError(f"{op} of {tokens} tokens: {dict(zip(times, answers, strict=True))}")
            self._settle()
        self.rows.append(row(op, tokens, self.page_size, self.nodes, times))
        print(line(self.rows[-1]), flush=True)

    def run(self) -> list[dict[str, Any]]:
        for tokens, calls in EVICT.items():  # first: to `learned`, what `insert` puts in is older than any request
            self._evict(tokens, calls)
        for tokens in NEW:
            self._prefixes(tokens)
        self._deep()
        return self.rows

    def _evict(self, tokens: int, calls: int) -> None:
        def filled(cache: Any) -> list[Callable[[], Any]]:
            for _ in range(calls * tokens // LEAF):
                self._serve(cache, np.concatenate([self.common, self._tokens(LEAF)]))
            return [lambda: cache.evict(tokens) >= tokens]

        self.measure("evict", tokens, calls, filled)

    def _prefixes(self, tokens: int) -> None:
        shared, started = min(SHARED, tokens // 2), []
        prompt = np.concatenate([self.common[:shared], self._tokens(tokens - shared)])

        def hit(cache: Any) -> list[Callable[[], Any]]:
            ids = cache.prompt(prompt)
            return [lambda: cache.match(ids, DOMAIN)[0]]

        def miss(cache: Any) -> list[Callable[[], Any]]:
            ids = cache.prompt(self._tokens(tokens))
            return [lambda: cache.match(ids, DOMAIN)[0]]

        def fresh(cache: Any) -> list[tuple[Any, Any]]:
            made = [np.concatenate([self.common[:shared], self._tokens(tokens - shared)]) for _ in range(NEW[tokens])]
            return [(cache.prompt(ids), self._slots(cache, tokens)) for ids in made]

        def new(cache: Any) -> list[Callable[[], Any]]:
            return [lambda ids=ids, slots=slots: cache.insert(ids, slots, DOMAIN) for ids, slots in fresh(cache)]

        def commit(cache: Any) -> list[Callable[[], Any]]:
            requests = [cache.start(ids, slots, DOMAIN) for ids, slots in fresh(cache)]
            started.append((cache, requests))
            return [lambda request=request: cache.commit(request) for request in requests]

        def again(cache: Any) -> list[Callable[[], Any]]:
            ids, slots = cache.prompt(prompt), self._slots(cache, tokens)
            return [lambda: cache.insert(ids, slots, DOMAIN)]

        for cache in self.caches:
            cache.insert(cache.prompt(prompt), self._slots(cache, tokens), DOMAIN)
        self.measure("match", tokens, 50, hit)
        self.measure("match, none", tokens, 50, miss)
        self.measure("insert", tokens, 1, new)
        self.measure("insert again", tokens, 20, again)
        self.measure("commit", tokens, 1, commit)
        for cache, requests in started:
            for request in requests:
                cache.end(request)

    def _deep(self) -> None:
        conversation = np.concatenate([self.common, self._tokens(LEAF)])
        for _ in range(TURNS):
            conversation = np.concatenate([conversation, self._tokens(TURN)])
            for cache in self.caches:
                cache.insert(cache.prompt(conversation), self._slots(cache, len(conversation)), DOMAIN)
        tokens = len(conversation)

        def match(cache: Any) -> list[Callable[[], Any]]:
            ids = cache.prompt(conversation)
            return [lambda: cache.match(ids, DOMAIN)[0]]

        def lock(cache: Any) -> list[Callable[[], Any]]:
            node = cache.match(cache.prompt(conversation), DOMAIN)[1]
            return [lambda: cache.unlock(cache.lock(node))]

        def path(cache: Any) -> list[Callable[[], Any]]:
            node = cache.match(cache.prompt(conversation), DOMAIN)[1]
            return [lambda: bool(len(cache.path(node)))]

        self.measure("match, 42 nodes", tokens, 50, match)
        self.measure("lock + unlock, 42 nodes", tokens, 50, lock)
        self.measure("page numbers of 42 nodes", tokens, 50, path)


def row(op: str, tokens: int, page_size: int, nodes: int, times: dict[str, list[float]]) -> dict[str, Any]:
    """Medians in microseconds; ratios to Isthmus as medians of the rounds' own, with their range."""
    ours = times[Isthmus.name]
    found = {"op": op, "tokens": tokens, "page_size": page_size, "nodes": nodes,
             "us": {name: statistics.median(values) for name, values in times.items()},
             "us_range": {name: [min(values), max(values)] for name, values in times.items()}, "ratio": {}}
    for name, values in times.items():
        if name != Isthmus.name:
            ratios = [theirs / own for theirs, own in zip(values, ours, strict=True)]
            found["ratio"][name] = [statistics.median(ratios), min(ratios), max(ratios)]
    return found


def line(found: dict[str, Any]) -> str:
    """A row of the table, in Markdown."""
    us, ratio = found["us"], found["ratio"]
    cells = [found["op"], f"{found['tokens']:,}", str(found["page_size"]), f"{found['nodes']:,}",
             f"{us[Isthmus.name]:.1f}"]
    cells += [f"{us[name]:,.1f} = {mid:,.1f}x [{low:,.1f}-{high:,.1f}]" for name, (mid, low, high) in ratio.items()]
    return "| " + " | ".join(cells) + " |"


def head(names: list[str]) -> str:
    cells = ["operation", "tokens", "page", "nodes", "Isthmus us", *names[1:]]
    return "| " + " | ".join(cells) + " |\n|" + "---|" * len(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sglang", type=Path, help="folder of SGLang's unpacked wheel")
    parser.add_argument("--pages", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--nodes", type=int, nargs="+", default=[1000, 100_000])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--policy", default="learned", help="eviction policy of Isthmus")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    made = None
    if options.sglang:
        import peers
        made = peers.load(options.sglang)
        made.torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    print(f"Python {platform.python_version()}, numpy {np.__version__}, {sys.platform}, {platform.machine()}")
    gc.disable()
    for nodes in options.nodes:
        for page_size in options.pages:
            most = sum((2 * new + 2) * tokens for tokens, new in NEW.items()) * options.rounds
            most += sum(tokens * calls for tokens, calls in EVICT.items()) * options.rounds * 2
            most += nodes * (LEAF + SHARED) + TURNS * TURN * (TURNS // 2 + 2) + 10**6
            others = peers.caches(made, page_size) if made else []
            bench = Bench([Isthmus(page_size, most, options.policy), *others], page_size, nodes, options.rounds)
            print("\n" + head([cache.name for cache in bench.caches]))
            rows += bench.run()
            print("built in s: " + ", ".join(f"{name} {seconds:.1f}" for name, seconds in bench.build.items()))
            del bench
            gc.collect()
    if options.json:
        options.json.write_text(json.dumps({"results": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
