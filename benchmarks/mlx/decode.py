"""Decode speed of the mlx platform beside mlx-lm: the same weights, the same machine, in turn, in one process.

    python benchmarks/mlx/decode.py --model FILE.gguf [--forms 4bit bf16] [--concurrent 1 4] [--rounds 5] [--tokens 16]
    python benchmarks/mlx/decode.py --model FILE.gguf [--forms 4bit bf16] --warmup [--rounds 5]

The weights are expanded, rounded to bfloat16 and written once as a checkpoint of MLX's layout, plain ("bf16") and
with every matrix in 4-bit groups of 64 ("4bit", by `mx.quantize`, as mlx-lm's converter does). Both engines load that
folder. Every round decodes greedily after a fresh prompt, first with one engine, then with the other, in alternating
order; a figure is the median over the rounds, in ms for a step of all concurrent requests, prefill left out.

With --warmup: the first step of each bucket of prompt tokens beside the median of later ones, through the engine, one
prompt of so many tokens a step. The difference is tracing, MLX's compilation (its C++ compiler's time too) and buffers.
"""
from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
from isthmus.core.config import CacheSettings, Config, ModelSettings, PlatformSettings
from isthmus.core.engine import EngineCore
from isthmus.core.messages import SamplingParams, Submit, pack_ids
from isthmus.core.weights.checkpoint import open_checkpoint
from isthmus.platforms.expand import expand
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.utils import load_model

PROMPT = 6
GROUP = 64


def write_checkpoint(source: Path, folder: Path, four_bits: bool) -> Path:
    """A folder with config.json and model.safetensors as mlx-lm writes them."""
    folder.mkdir(parents=True)
    tensors: dict[str, mx.array] = {}
    with open_checkpoint(source) as checkpoint:
        config = dict(checkpoint.config)
        for name in sorted(checkpoint.names):
            values = mx.array(expand(checkpoint.tensor(name))).astype(mx.bfloat16)
            if four_bits and values.ndim == 2:
                parts = mx.quantize(values, group_size=GROUP, bits=4)
                stem = name.removesuffix(".weight")
                tensors |= {f"{stem}.{part}": value for part, value in zip(("weight", "scales", "biases"), parts,
                                                                           strict=True)}
            else:
                tensors[name] = values
            mx.eval(list(tensors.values()))
    if four_bits:
        config["quantization"] = {"group_size": GROUP, "bits": 4}
    (folder / "config.json").write_text(json.dumps(config, default=list))
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, {"format": "mlx"})
    return folder


class Ours:
    """The whole engine without server and text: scheduler, pages, platform."""

    name = "isthmus"

    def __init__(self, folder: Path) -> None:
        config = Config(model=ModelSettings(model=str(folder), dtype="bfloat16"),
                        platform=PlatformSettings(platform="mlx"), cache=CacheSettings(prefix_cache=False))
        self.engine = EngineCore(config)
        self.count = 0

    def decode(self, prompts: list[list[int]], tokens: int) -> tuple[float, list[list[int]]]:
        """Seconds from the step that gave the last first token to the end, and the tokens of each prompt."""
        ids = [f"r{self.count}-{i}" for i in range(len(prompts))]
        self.count += 1
        for name, prompt in zip(ids, prompts, strict=True):
            self.engine.submit(Submit(name, pack_ids(prompt),
                                      SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)))
        found: dict[str, list[int]] = {name: [] for name in ids}
        began = 0.0
        while self.engine.has_work:
            for output in self.engine.step():
                found[output.id] += np.frombuffer(output.tokens, np.int32).tolist()
            if not began and all(found.values()):
                began, done = time.perf_counter(), sum(map(len, found.values())) / len(ids)
        seconds = time.perf_counter() - began
        return seconds / (tokens - done), list(found.values())


class MlxLm:
    """mlx-lm's own loops: `generate_step` for one request, `BatchGenerator` for several."""

    name = "mlx-lm"

    def __init__(self, folder: Path) -> None:
        self.model, _ = load_model(folder)

    def decode(self, prompts: list[list[int]], tokens: int) -> tuple[float, list[list[int]]]:
        return self._one(prompts[0], tokens) if len(prompts) == 1 else self._several(prompts, tokens)

    def _one(self, prompt: list[int], tokens: int) -> tuple[float, list[list[int]]]:
        found: list[int] = []
        began = 0.0
        for token, _ in generate_step(mx.array(prompt), self.model, max_tokens=tokens):
            found.append(int(token))
            began = began or time.perf_counter()
        return (time.perf_counter() - began) / (tokens - 1), [found]

    def _several(self, prompts: list[list[int]], tokens: int) -> tuple[float, list[list[int]]]:
        generator = BatchGenerator(self.model, max_tokens=tokens)
        ids = generator.insert(prompts, [tokens] * len(prompts))
        found: dict[int, list[int]] = {uid: [] for uid in ids}
        began = 0.0
        while not all(len(each) == tokens for each in found.values()):
            for response in generator.next_generated():
                found[response.uid].append(response.token)
            if not began and all(found.values()):
                began, done = time.perf_counter(), sum(map(len, found.values())) / len(ids)
        seconds = time.perf_counter() - began
        generator.close()
        return seconds / (tokens - done), list(found.values())


def compare(engines: list[Any], count: int, tokens: int, rounds: int, vocabulary: int) -> dict[str, Any]:
    """Medians over the rounds, after one that does not count."""
    rng = np.random.default_rng(count)
    times: dict[str, list[float]] = {engine.name: [] for engine in engines}
    same = total = 0
    for turn in range(rounds + 1):
        prompts = rng.integers(0, vocabulary, (count, PROMPT)).tolist()
        texts = []
        for engine in engines if turn % 2 else engines[::-1]:
            seconds, found = engine.decode(prompts, tokens)
            texts.append(found)
            if turn:
                times[engine.name].append(1e3 * seconds)
        same += sum(a == b for a, b in zip(*texts, strict=True))
        total += count
    return {name: round(statistics.median(each), 1) for name, each in times.items()} | {
        "spread": {name: [round(min(each), 1), round(max(each), 1)] for name, each in times.items()},
        "same_texts": f"{same} of {total}"}


def warm_up(engine: EngineCore, rounds: int, buckets: tuple[int, ...] = (8, 32, 128)) -> list[dict[str, Any]]:
    """[wall, processor] ms of the first step of a prompt that fills a bucket, and of the median later one."""
    rng, lines = np.random.default_rng(0), []
    for tokens in buckets:
        times = []
        for turn in range(rounds + 1):
            prompt = rng.integers(0, engine.info.vocab_size, tokens).tolist()
            engine.submit(Submit(f"w{tokens}-{turn}", pack_ids(prompt), SamplingParams(max_tokens=1, temperature=0.0)))
            began, busy = time.perf_counter(), sum(os.times()[:4])
            while engine.has_work:
                engine.step()
            times.append([1e3 * (time.perf_counter() - began), 1e3 * (sum(os.times()[:4]) - busy)])
        later = [statistics.median(each) for each in zip(*times[1:], strict=True)]
        lines.append({"tokens": tokens, "first": np.round(times[0]).tolist(), "later": np.round(later).tolist()})
        print(f"  {lines[-1]}", flush=True)
    return lines


def timed(make: Callable[[Path], Any], folder: Path) -> tuple[Any, float]:
    began = time.perf_counter()
    return make(folder), round(time.perf_counter() - began, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--forms", nargs="+", default=["4bit", "bf16"], choices=["4bit", "bf16"])
    parser.add_argument("--concurrent", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--warmup", action="store_true", help="the first step of each bucket, no comparison")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    report: dict[str, Any] = {"mlx": mx.__version__, "mlx_lm": mlx_lm.__version__, "device": mx.device_info(),
                              "rounds": args.rounds, "tokens": args.tokens, "results": []}
    with tempfile.TemporaryDirectory() as scratch:
        for form in args.forms:
            folder = write_checkpoint(args.model, Path(scratch) / form, form == "4bit")
            ours, load = timed(Ours, folder)
            vocabulary = ours.engine.info.vocab_size
            print(f"{form}: loaded and warmed up in {load} s; {'; '.join(ours.engine.info.report)}", flush=True)
            if args.warmup:
                report["results"].append({"form": form, "load_seconds": load,
                                          "buckets": warm_up(ours.engine, args.rounds)})
                ours.engine.close()
                continue
            theirs = MlxLm(folder)
            for count in args.concurrent:
                line = {"form": form, "concurrent": count, "load_seconds": load}
                line |= compare([ours, theirs], count, args.tokens, args.rounds, vocabulary)
                report["results"].append(line)
                print(f"  {count} concurrent: isthmus {line['isthmus']} ms a step, mlx-lm {line['mlx-lm']} ms; "
                      f"{line['mlx-lm'] / line['isthmus']:.2f} times as fast; same texts {line['same_texts']}; "
                      f"{line['spread']}", flush=True)
            ours.engine.close()
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
