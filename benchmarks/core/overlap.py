"""How much of the time a device computes while the real server in its three processes plans, streams and stops for it.

    python benchmarks/core/overlap.py --requests 256 --step-ms 5

The device is a model of one: a queue of steps that take exactly so long each, one after the other, with no thread and
no lock of Python's, so that it idles only when the next step has not been launched in time. Every request streams, has
stop strings, and a JSON Schema, with the masks of a real vocabulary: a step's end waits for its masks, and what is
sampled is allowed by them. Counted are steps with all the requests on the device. `host_ms` is processor time of the
scheduler's process, all its duties included. On a machine that is busy with other things the processor is theirs too:
`--realtime` has the system run the scheduler's process whenever it can run (needs the right to; SCHED_FIFO), as on a
machine with a core to spare for it.
"""
from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from isthmus.core.config import CacheSettings, Config, ModelSettings, SchedulerSettings
from isthmus.core.engine import EngineCore
from isthmus.core.messages import GrammarSpec, SamplingParams, Submit, Watch, pack_ids
from isthmus.core.plan import Batch, StepResult
from isthmus.core.processes.three import ProcessClient
from isthmus.platforms.null.platform import Platform as Null

STEPS = 1_000_000   # that are kept
VOCABULARY = Path("shared", "data", "llama_cpp_models", "models", "ggml-vocab-llama-spm.gguf")  # 32,000 tokens
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}, "kind": {"enum": ["invoice", "credit note"]},
                                           "lines": {"type": "array", "items": {"type": "object", "properties": {
                                               "article": {"type": "string", "maxLength": 40},
                                               "amount": {"type": "number"}}, "required": ["article", "amount"],
                                               "additionalProperties": False}}},
          "required": ["name", "kind", "lines"], "additionalProperties": False}


def model_with(vocabulary: Path, path: Path) -> Path:
    """A tiny model with a real vocabulary, or its own where there is none."""
    from checkpoints import HIDDEN, as_gguf, tiny_llama_gguf, tiny_llama_metadata, tiny_weights, write_gguf
    from isthmus.core.weights.gguf import read_gguf
    if not vocabulary.is_file():
        return tiny_llama_gguf(path)
    real = {key: value for key, value in read_gguf(vocabulary).metadata.items() if key.startswith("tokenizer.")}
    weights = tiny_weights()
    rows = len(real["tokenizer.ggml.tokens"])
    weights["model.embed_tokens.weight"] = np.resize(weights["model.embed_tokens.weight"], (rows, HIDDEN))
    metadata = {k: v for k, v in tiny_llama_metadata().items() if not k.startswith("tokenizer.")} | real
    return write_gguf(path, metadata, as_gguf(weights))


class Device(Null):
    """A queue of steps of `step_s` seconds. began, ended, rows: of each, on the clock."""

    def __init__(self, step_s: float):
        super().__init__({"check": "0"})
        self.step_s, self.free_at, self.masks_at = step_s, 0.0, 0.0
        self.began, self.rows = np.zeros(STEPS), np.zeros(STEPS, np.int32)
        self.cpu, self.steps = np.zeros(STEPS), 0

    def compile(self, forward: Any, weights: Any, bucket: Any) -> Any:
        def step(state: Any, batch: Batch) -> tuple[Any, Any]:
            begin = max(time.monotonic(), self.free_at)
            self.free_at = begin + self.step_s
            if self.steps < STEPS:
                self.began[self.steps], self.rows[self.steps] = begin, len(batch.seqs)
                self.cpu[self.steps] = time.process_time()
            self.steps += 1
            return Launched(self, batch), state
        return step

    def masked(self) -> None:
        """The masks of the step that was launched last are there: it ends no earlier."""
        self.masks_at = time.monotonic()
        self.free_at = max(self.free_at, self.masks_at)


class Launched:
    """A step in the queue."""

    def __init__(self, device: Device, batch: Batch):
        self.device, self.batch, self.end = device, batch, device.free_at

    def collect(self) -> StepResult:
        batch, mask = self.batch, self.batch.sampling.mask
        rows = batch.logit_rows
        mixed = batch.positions[rows].astype(np.int64) * 7919 + batch.seqs[batch.rows[rows]] * 104729
        tokens = np.where(batch.targets < 0, 3 + mixed % (self.device._vocab - 3), batch.targets).astype(np.int32)
        if mask is not None:
            mask.ready()
            tokens[mask.rows] = some_allowed(mask.bits, mixed[mask.rows])
            self.end = max(self.end, self.device.masks_at)
        wait = self.end - time.monotonic()
        if wait > 0:
            time.sleep(wait)
        return self.device._result(tokens, batch)


def some_allowed(bits: np.ndarray, mixed: np.ndarray) -> np.ndarray:
    """A token that each row allows, another one for another number: from a word at that place, or else the first."""
    every = np.arange(len(bits))
    words = mixed % bits.shape[1]
    others = np.flatnonzero(bits[every, words] == 0)
    words[others] = (bits[others] != 0).argmax(1)
    chosen = bits[every, words]
    lowest = np.log2(chosen & (~chosen + np.uint32(1))).astype(np.int32)
    return (32 * words + lowest).astype(np.int32)


class Engine(EngineCore):
    """The engine on that device; "stats" also says how it was kept busy."""

    def __init__(self, config: Config, progress: Any = None):
        self.device = Device(float(os.environ["OVERLAP_STEP_S"]))
        super().__init__(config, progress, platform=self.device)
        fill = self.scheduler.fill_masks

        def fill_masks() -> None:
            fill()
            self.device.masked()
        self.scheduler.fill_masks = fill_masks
        if os.environ["OVERLAP_REALTIME"] == "1":
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))

    def stats(self) -> dict[str, Any]:
        return {**super().stats(), **busy(self.device, int(os.environ["OVERLAP_ROWS"]))}


def busy(device: Device, rows: int) -> dict[str, float]:
    """What the device did in steps with at least `rows` rows that followed such a step."""
    n = min(device.steps, STEPS)
    full = device.rows[:n] >= rows
    pairs = np.flatnonzero(full[1:] & full[:-1])
    if len(pairs) < 20:
        return {"full_steps": len(pairs)}
    pairs = pairs[10:]
    gaps = np.maximum(0.0, np.diff(device.began[:n])[pairs] - device.step_s)
    cpu = np.diff(device.cpu[:n])[pairs]
    median = float(np.median(gaps))
    return {"full_steps": len(pairs), "idle_share": float(gaps.mean() / (gaps.mean() + device.step_s)),
            "idle_share_of_median": median / (median + device.step_s), "gap_ms_median": median * 1e3,
            "gap_ms_p99": float(np.percentile(gaps, 99)) * 1e3, "steps_without_a_gap": float((gaps < 1e-6).mean()),
            "host_ms_median": float(np.median(cpu)) * 1e3, "host_ms_p99": float(np.percentile(cpu, 99)) * 1e3}


async def one(client: ProcessClient, number: int, tokens: int, got: list[int], after: float) -> None:
    """One streaming request with stop strings that never come, after so many seconds."""
    await asyncio.sleep(after)
    grammar = GrammarSpec("json_schema", json.dumps(SCHEMA)) if os.environ["OVERLAP_GRAMMAR"] == "1" else None
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, stop=("\x00never", "\x00none"),
                            grammar=grammar)
    submit = Submit(f"r{number}", pack_ids([3 + number % 100, 4, 5, 6 + number // 100]), params)
    async for output in client.generate(submit, Watch(submit.id, params.stop)):
        got[0] += len(output.tokens) // 4
        got[1] += 1


async def measure(config: Config, requests: int, waves: float, tokens: int, apart: float) -> dict[str, Any]:
    """More requests than can run, the first ones `apart` seconds apart: the device's numbers, and the clients'."""
    client = ProcessClient(config, engine="overlap:Engine")
    got = [0, 0]
    try:
        await client.start()
        began = time.monotonic()
        last = requests * 9 // 10  # the others are there when the first ones end
        await asyncio.gather(*(one(client, i, tokens, got, min(i, last) * apart) for i in range(int(requests * waves))))
        seconds = time.monotonic() - began
        stats = await client.command("stats")
    finally:
        await client.close()
    keys = ("full_steps", "idle_share", "idle_share_of_median", "gap_ms_median", "gap_ms_p99", "steps_without_a_gap",
            "host_ms_median", "host_ms_p99", "forced_tokens")
    return {key: round(stats[key], 5) for key in keys if key in stats} | {
        "tokens": got[0], "tokens_per_output": round(got[0] / got[1], 2), "seconds": round(seconds, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256, help="on the device at once")
    parser.add_argument("--waves", type=float, default=2, help="times as many are asked for")
    parser.add_argument("--tokens", type=int, default=200, help="of each request")
    parser.add_argument("--step-ms", type=float, default=5)
    parser.add_argument("--no-grammar", action="store_true")
    parser.add_argument("--at-once", action="store_true", help="all begin together, and stay in the same places of "
                        "their texts; else they begin one after the other, while one of them would run")
    parser.add_argument("--no-overlap", action="store_true", help="for comparison")
    parser.add_argument("--realtime", action="store_true", help="a processor for the scheduler whenever it needs one")
    parser.add_argument("--vocabulary", type=Path, default=Path(__file__).resolve().parents[3] / VOCABULARY)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    root = Path(__file__).resolve().parent
    sys.path.insert(0, str(root.parent.parent / "tests"))
    os.environ |= {"PYTHONPATH": str(root), "OVERLAP_STEP_S": str(args.step_ms / 1e3),
                   "OVERLAP_ROWS": str(args.requests), "OVERLAP_GRAMMAR": str(int(not args.no_grammar)),
                   "OVERLAP_REALTIME": str(int(args.realtime))}
    with tempfile.TemporaryDirectory(prefix="isthmus-overlap-") as folder:
        model = str(model_with(args.vocabulary, Path(folder, "tiny.gguf")))
        config = Config(
            model=ModelSettings(model), cache=CacheSettings(kv_cache_memory="256MiB"),
            scheduler=SchedulerSettings(max_running_requests=args.requests, overlap=not args.no_overlap, restart=0))
        apart = 0.0 if args.at_once else args.tokens * args.step_ms / 1e3 / args.requests
        result = asyncio.run(measure(config, args.requests, args.waves, args.tokens, apart))
    result = vars(args) | {"json": None, "vocabulary": args.vocabulary.name} | result
    print(json.dumps(result, indent=1))
    if args.json:
        args.json.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
