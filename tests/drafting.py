"""Engines that draft with models, and what they must say: what they say without."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from isthmus.core.config import (
    CacheSettings,
    Config,
    ModelSettings,
    PlatformSettings,
    SchedulerSettings,
    SpeculationSettings,
)
from isthmus.core.engine import EngineCore
from isthmus.core.messages import SamplingParams, Submit, pack_ids, unpack_ids

from .tiny import tiny_model

SAMPLED = {"temperature": 0.8, "top_p": 0.95, "top_k": 40, "min_p": 0.01}


def engine(*speculative: str, model: Path | None = None, platform: str = "reference", page: int = 16,
           memory: str = "2MiB", **scheduler) -> EngineCore:
    return EngineCore(Config(
        model=ModelSettings(str(model or tiny_model("llama3"))),
        cache=CacheSettings(page_size=page, kv_cache_memory=memory),
        speculation=SpeculationSettings(speculative), platform=PlatformSettings(platform),
        scheduler=SchedulerSettings(**{"max_running_requests": 8} | scheduler)))


def outputs(core: EngineCore, count: int = 3, most: int = 16, **params) -> dict[str, list[int]]:
    for i in range(count):
        given = {"max_tokens": most, "temperature": 0.0, "ignore_eos": True, "seed": i} | params
        core.submit(Submit(f"r{i}", pack_ids([3 + (7 * i + j * j) % 120 for j in range(4 + 9 * i)]),
                           SamplingParams(**given)))
    found: dict[str, list[int]] = {}
    while core.has_work:
        for output in core.step():
            found.setdefault(output.id, []).extend(unpack_ids(output.tokens).tolist())
        core.scheduler.verify()
    return found


def drafted(core: EngineCore) -> float:
    """The share of drafted tokens that were accepted."""
    stats = core.command("stats")
    assert not core.scheduler.speculation.broken and stats["pages_used"] == 0
    return stats["accepted_tokens"] / stats["drafted_tokens"]


def without_drafts() -> Callable[..., dict[str, list[int]]]:
    """(platform, model, parameters) -> outputs without speculation, each computed once."""
    found: dict = {}

    def look(platform: str = "reference", model: Path | None = None, **params) -> dict[str, list[int]]:
        key = (platform, model, *sorted(params.items()))
        if key not in found:
            core = engine(model=model, platform=platform)
            found[key] = outputs(core, **params)
            core.close()
        return found[key]
    return look


def same_outputs(plain, *speculative: str, model: Path | None = None, platform: str = "reference", least: float = 0.0,
                 **settings) -> float:
    """Greedy and seeded outputs are those without drafts, from a cold and a warm cache; -> the share accepted."""
    core = engine(*speculative, "adaptive=0", model=model, platform=platform, **settings)
    for params in ({}, SAMPLED, {}):
        assert outputs(core, **params) == plain(platform, model, **params)
    share = drafted(core)
    core.close()
    return share
