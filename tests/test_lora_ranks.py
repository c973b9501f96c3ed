"""Adapters over ranks of tensor parallelism: A and B are cut as their weights are, and the text is that of one rank."""
from __future__ import annotations

import pytest
from isthmus.core.config import (
    AdapterSettings,
    CacheSettings,
    Config,
    ModelSettings,
    ParallelSettings,
    PlatformSettings,
)
from isthmus.core.engine import EngineCore

from .checkpoints import tiny_llama_gguf
from .lora_files import drawn_for, write_adapter
from .test_lora_engine import load, run, submit

COST = 130  # seconds
WORK = {"a": ("x", [5, 6, 7]), "b": ("", list(range(3, 60))), "c": ("y", [9] * 20), "d": ("z", [5, 6, 7])}


def said(platform: str, model, adapters, ranks: int) -> dict[str, list[int]]:
    engine = EngineCore(Config(
        model=ModelSettings(model=str(model), dtype="float32"), platform=PlatformSettings(platform=platform),
        cache=CacheSettings(kv_cache_memory="4MiB"), parallel=ParallelSettings(tensor_parallel_size=ranks),
        adapters=AdapterSettings(lora=tuple(f"{name}={adapters[name]}" for name in "xy"), max_loras=2)))
    try:
        load(engine, "z", adapters["z"])  # the third for two slots
        for id, (name, prompt) in WORK.items():
            submit(engine, id, prompt, name)
        return run(engine)
    finally:
        engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_two_ranks_give_the_text_of_one(platform, tmp_path):
    """The first has its ranks in processes of their own, the second in one program."""
    pytest.importorskip({"cpu": "torch", "tpu": "jax"}[platform])
    model = tiny_llama_gguf(tmp_path / "tiny.gguf")
    adapters = {name: write_adapter(tmp_path / name, drawn_for(model, i, 4 * i, strength=2.0))
                for i, name in enumerate("xyz", 1)}
    want = said(platform, model, adapters, 1)
    assert len({tuple(tokens) for tokens in want.values()}) == 4
    assert said(platform, model, adapters, 2) == want
