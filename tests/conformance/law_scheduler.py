"""Law 6, scheduler: through the real engine on a tiny model. Retracted and resumed = undisturbed, hit = no cache, an
abort at any state returns every page, other salts share no page, a failed step is reported and the engine serves on.
"""
from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from ..core.cache.pool import FREE
from ..core.config import CacheSettings, Config, ModelSettings, SchedulerSettings
from ..core.engine import EngineCore
from ..core.messages import SamplingParams, Submit, TokenOutput, pack_ids, unpack_ids
from ..core.platform import StateSpec, Unsupported
from ..core.scheduler.request import cache_domain
from ..core.startup import DTYPES as NAMES
from .case import Case, Context, Needs, Wrong
from .held import Held
from .opcase import DTYPES
from .oracle import check_greedy, placed, text
from .tiny import tiny_model

KIND = "llama"
SETTING = {name: setting for setting, name in NAMES.items()}


class Served(NamedTuple):
    """What a request got."""

    tokens: list[int]
    finish: str | None
    cached: int
    error: str


class Bench:
    """An engine on the platform under test: `pages` pages, a few requests at a time, prompts in chunks of `chunk`
    tokens, or small ones."""

    def __init__(self, context: Context, dtype: str, pages: int, cached: bool, chunk: int | None = None):
        self.context, self.dtype, self.page = context, dtype, context.page_size()
        manifest = context.manifest
        kv = dtype if dtype in manifest.kv_dtypes else manifest.kv_dtypes[0]
        spec = StateSpec(placed(context, KIND, dtype).loaded.state_layers, kv, self.page, 2)
        self.device = Held(context)
        self.core = EngineCore(Config(
            ModelSettings(str(tiny_model(KIND, context.seed)), dtype=SETTING[dtype]),
            CacheSettings(self.page, f"{pages * spec.page_bytes()}B", cached),
            scheduler=SchedulerSettings(max_running_requests=4, chunked_prefill_size=chunk or 2 * self.page + 3)),
            clock=lambda: 0.0, platform=self.device)
        self.core.cache.pool.strict = True

    def submit(self, id: str, prompt: Sequence[int], count: int, domain: bytes = b"") -> None:
        need, limit = len(prompt) + count, self.core.info.max_model_len
        if need > limit:
            raise Unsupported(f"a context of {need} tokens; the largest bucket of pages holds {limit}")
        params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        self.core.submit(Submit(id, pack_ids(prompt), params, domain))

    def steps(self, count: int) -> list[TokenOutput]:
        outputs: list[TokenOutput] = []
        for _ in range(count):
            if self.core.has_work:
                outputs += self.core.step()
        return outputs

    def drain(self) -> dict[str, Served]:
        """Run until nothing is left; outputs by request. The ledger of pages is proved after every step."""
        outputs: list[TokenOutput] = []
        for _ in range(2000):
            if not self.core.has_work:
                return served(outputs)
            outputs += self.core.step()
            self.core.command("verify")
        raise Wrong("the engine has not come to an end after 2000 steps")

    def serve(self, prompts: Mapping[str, Sequence[int]], count: int, domains: Mapping[str, bytes] | None = None,
              ) -> dict[str, Served]:
        """All of them at once, to the end; greedy output of each as if alone."""
        for id, prompt in prompts.items():
            self.submit(id, prompt, count, (domains or {}).get(id, b""))
        done = self.drain()
        for id, prompt in prompts.items():
            got = done[id]
            if got.finish != "length" or len(got.tokens) != count:
                raise Wrong(f"request {id} ended with {got.finish!r} after {len(got.tokens)} of {count} tokens "
                            f"{got.error}")
            check_greedy(self.context, KIND, prompt, got.tokens, self.dtype, f"request {id}")
        return done

    def empty(self, when: str) -> None:
        """After a drain and a flush the pool is what it was at the start, page by page."""
        self.core.command("flush_cache")
        self.core.command("verify")
        pool = self.core.cache.pool
        held = np.flatnonzero(pool.owner[1:] != FREE) + 1
        if len(held) or pool.free != pool.capacity or pool.violations:
            raise Wrong(f"{when}: pages {held[:8].tolist()} have an owner, {pool.free} of {pool.capacity} are free, "
                        f"{pool.violations} violations")


def served(outputs: Sequence[TokenOutput]) -> dict[str, Served]:
    result: dict[str, Served] = {}
    for output in outputs:
        before = result.get(output.id, Served([], None, output.cached_tokens, ""))
        result[output.id] = Served(before.tokens + unpack_ids(output.tokens).tolist(), output.finish or before.finish,
                                   before.cached, output.error or before.error)
    return result


def bench(context: Context, dtype: str, pages: int = 64, cached: bool = True, chunk: int | None = None) -> Bench:
    """An engine for all cases that want this one, idle and empty; a new one after a case that left it otherwise."""
    key = ("engine", dtype, pages, cached, chunk)
    made = context.once(key, lambda: Bench(context, dtype, pages, cached, chunk))
    made.core.command("flush_cache")
    if made.core.has_work or made.core.cache.pool.free < made.core.cache.pool.capacity:
        context.forget(key)
        return bench(context, dtype, pages, cached, chunk)
    return made


@contextmanager
def quiet() -> Iterator[None]:
    """The engine logs the step that fails by design; nobody wants to read it."""
    log = logging.getLogger(EngineCore.__module__)
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = False


def prompts_of(context: Context, count: int, tokens: int) -> dict[str, list[int]]:
    return {f"r{i}": text(tokens + i, context.seed, f"request {i}") for i in range(count)}


def retracted(context: Context, dtype: str) -> None:
    """Four requests that need more pages than there are: somebody is sent back and comes again."""
    run = bench(context, dtype, pages=12)
    before = run.core.command("stats")["preemptions"]
    run.serve(prompts_of(context, 4, run.page + 1), 3 * run.page)
    assert run.core.command("stats")["preemptions"] > before, "memory was never short: the case tests nothing"
    run.empty("after retractions")


def hit(context: Context, dtype: str) -> None:
    """A prompt that begins like another takes its pages from the cache, and gives what it gives without one."""
    first = text(3 * context.page_size() + 2, context.seed, "first")
    again = first[:-3] + text(5, context.seed, "other end")
    for cached in (True, False):
        run = bench(context, dtype, cached=cached)
        run.serve({"first": first}, 6)
        found = run.serve({"again": again, "same": first}, 6)
        taken = [found[id].cached for id in ("again", "same")]
        if not cached and max(taken):
            raise Wrong(f"{taken} tokens came from a cache that is off")
        if cached and min(taken) < 2 * run.page:
            raise Wrong(f"{taken} tokens came from the cache, at least {2 * run.page} are there")
        run.empty(f"prefix cache {'on' if cached else 'off'}")


def aborted(context: Context, dtype: str) -> None:
    """Abort one of three requests, and all of them, after every number of steps."""
    run = bench(context, dtype)
    prompts = prompts_of(context, 3, 3 * run.page)
    for number in (0, 1, 2, 3, 5, 8):
        for gone in (["r1"], list(prompts)):
            for id, prompt in prompts.items():
                run.submit(id, prompt, 4)
            early = served(run.steps(number))
            run.core.abort(gone)
            late = run.drain()
            for id, prompt in prompts.items():
                parts = [part for part in (early.get(id), late.get(id)) if part]
                tokens, finish = [t for part in parts for t in part.tokens], [p.finish for p in parts if p.finish]
                if finish not in (["length"], ["abort"]) or (finish == ["length"]) != (len(tokens) == 4):
                    raise Wrong(f"abort after {number} steps: {id} ended with {finish} and {len(tokens)} tokens")
                check_greedy(context, KIND, prompt, tokens, dtype, f"abort after {number} steps: {id}")
            run.empty(f"abort of {len(gone)} after {number} steps")


def longest(context: Context, dtype: str) -> None:
    """A request that fills the whole context which the engine promises on a platform with buckets."""
    most = placed(context, KIND, dtype).loaded.config.max_position
    run = bench(context, dtype, most // context.page_size() + 2, chunk=most // 4)
    limit = run.core.info.max_model_len
    run.serve({"long": text(limit - 3, context.seed, "longest")}, 3)
    run.empty(f"after a context of {limit}")


def salted(context: Context, dtype: str) -> None:
    """The same prompt under other salts at the same time: no page in common. Later only its own salt finds it."""
    run = bench(context, dtype)
    prompt = text(3 * run.page + 1, context.seed, "salted")
    domains = {"one": cache_domain(salt="one"), "two": cache_domain(salt="two"), "none": b""}
    pages = run.device.watch()
    together = run.serve(dict.fromkeys(domains, prompt), 3, domains)
    sets = list(pages.values())
    common = set().union(*(a & b for i, a in enumerate(sets) for b in sets[:i]))
    if common or len(sets) != len(domains):
        raise Wrong(f"{len(sets)} requests under other salts have pages {sorted(common)} in common")
    later = [run.serve({"later": prompt}, 3, {"later": cache_domain(salt=salt)})["later"].cached
             for salt in ("one", "three")]
    if [got.cached for got in together.values()] != [0, 0, 0] or later != [3 * run.page, 0]:
        raise Wrong(f"from the cache came {[got.cached for got in together.values()]} tokens under three salts, then "
                    f"{later} under a known one and a new one")
    run.empty("after salts")


def failed(context: Context, dtype: str) -> None:
    """A step fails on the device, while prompts are computed or tokens decoded: reported, and the engine serves on."""
    run = bench(context, dtype)
    for number in (0, 1, 4, 7):
        prompts = prompts_of(context, 2, 3 * run.page)
        for id, prompt in prompts.items():
            run.submit(id, prompt, 12)
        run.steps(number)
        run.device.broken = True
        with quiet():
            ended = run.drain()
        for id in prompts:
            if ended[id].finish != "error" or "by design" not in ended[id].error:
                raise Wrong(f"failure after {number} steps: {id} ended with {ended[id].finish!r} {ended[id].error!r}")
        run.empty(f"failure after {number} steps")
        run.serve(prompts, 5)
        run.empty("after serving on")


CHECKS: dict[str, Callable[[Context, str], None]] = {
    "retracted": retracted, "prefix_hit": hit, "aborted": aborted, "salts": salted, "failed_step": failed,
    "longest_context": longest}


def cases() -> Iterator[Case]:
    for dtype in DTYPES:
        for name, check in CHECKS.items():
            needs = Needs(dtype, buckets=name == "longest_context")  # else nothing but the model limits it
            yield Case(f"scheduler[{name},{dtype}]", "scheduler", name, needs,
                       lambda context, check=check, dtype=dtype: check(context, dtype))
