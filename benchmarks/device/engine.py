"""Output tokens a second of the engine, scheduler and all, beside transformers' continuous batching of the same weights
on the same device: random weights of a 1.1-billion-parameter Llama's shape, prompts of equal length, greedy."""
from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from generated import SMALL, TINY, write_checkpoint
from isthmus.core.config import CacheSettings, Config, ModelSettings
from isthmus.core.engine import EngineCore
from isthmus.core.messages import SamplingParams, Submit, pack_ids
from place import Place, main, make_platform

REQUESTS, PROMPT, OUTPUT = 128, 128, 64


def prompts(place: Place, vocabulary: int, round_: int) -> list[list[int]]:
    """Others in each round, so that nobody's prefix cache has them."""
    shape = place.pick((REQUESTS, PROMPT), (3, 5))
    return np.random.default_rng(round_).integers(3, vocabulary, shape).tolist()


class Ours:
    name = "isthmus"

    def __init__(self, folder: Path, place: Place) -> None:
        config = Config(model=ModelSettings(model=str(folder), dtype="bfloat16"), cache=CacheSettings(
            prefix_cache=False, kv_cache_memory=place.pick("4GiB", "1MiB")))
        self.engine = EngineCore(config, platform=make_platform(place.name, place.tiny, {"graphs": "first"}))
        self.count = 0

    def generate(self, texts: list[list[int]], tokens: int) -> float:
        """Seconds for all of them."""
        began = time.perf_counter()
        for text in texts:
            self.count += 1
            self.engine.submit(Submit(f"r{self.count}", pack_ids(text), SamplingParams(
                max_tokens=tokens, temperature=0.0, ignore_eos=True)))
        while self.engine.has_work:
            self.engine.step()
        return time.perf_counter() - began

    def close(self) -> None:
        self.engine.close()


class Peer:
    name = "transformers, continuous batching"

    def __init__(self, folder: Path, place: Place) -> None:
        from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaForCausalLM
        model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa")
        blocks, step = place.pick((4096, 4096), (64, 64))
        self.manager = model.to(place.device.torch).eval().init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=2),
            continuous_batching_config=ContinuousBatchingConfig(num_blocks=blocks, page_size=16, max_batch_tokens=step))
        self.manager.start()

    def generate(self, texts: list[list[int]], tokens: int) -> float:
        began = time.perf_counter()
        self.manager.add_requests(texts, max_new_tokens=tokens)
        for _ in texts:
            found = self.manager.get_result(timeout=60)
            if found is None or found.error or len(found.generated_tokens) != tokens:
                raise RuntimeError(f"transformers gave no whole answer: {found and found.error}")
        return time.perf_counter() - began

    def close(self) -> None:
        self.manager.stop(block=True)


def run(place: Place, ceilings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    config, rates = SMALL | place.pick({}, TINY), {}
    rounds = [prompts(place, config["vocab_size"], round_) for round_ in range(3)]
    tokens, count = place.pick(OUTPUT, 4), len(rounds[0])
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_checkpoint(config, Path(scratch, "model"))
        for kind in (Ours, Peer) if find_spec("transformers") else (Ours,):
            made = kind(folder, place)
            first, *others = (made.generate(texts, tokens) for texts in rounds)  # graphs are captured in the first
            made.close()
            del made  # with its memory, before the next one asks for some
            gc.collect()
            rates[kind.name] = count * tokens / min(others)
            yield {"by": kind.name, "requests": count, "prompt": len(rounds[0][0]), "output": tokens,
                   "first round s": round(first, 2),
                   "tokens/s": round(rates[kind.name], 1)}
    if len(rates) == 2:
        yield {"by": "ratio", "times as fast": round(rates[Ours.name] / rates[Peer.name], 2)}
    else:
        yield {"by": Peer.name, "error": "transformers is not installed"}


if __name__ == "__main__":
    main(__doc__, run)
