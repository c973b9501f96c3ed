"""Speculation on a real model: tokens per second with and without it, in turn, on texts that suit it and that do not.

    python benchmarks/core/speculation.py [--model PATH] [--platform cpu] [--batch 1 4 16] [--tokens 128] [--rounds 3]
        [--also eagle] [--plot FILE.html] [--json FILE]

edit: a text is to be repeated, so that what comes next stands in the prompt. chat: questions, sampled as SmolLM2's
makers recommend. free: the same at temperature 1, where hardly anything can be guessed. The last lines say for each
drafter where it does worst. --plot: how long accepted drafts are, in a table, and how many of the tokens at each place
of a draft are right, as a page or a picture (.png). Each engine is loaded once; rounds alternate, so that the machine's
load falls on all alike.
"""
from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from pathlib import Path

import numpy as np
from isthmus.core.chart import Chart, Table, check_plot, write_charts
from isthmus.core.config import (
    CacheSettings,
    Config,
    ModelSettings,
    PlatformSettings,
    SchedulerSettings,
    SpeculationSettings,
)
from isthmus.core.engine import EngineCore
from isthmus.core.messages import SamplingParams, Submit, pack_ids
from isthmus.core.text.tokenizer import load_tokenizer
from isthmus.core.weights.checkpoint import open_checkpoint

TEXT = ("The harbour of the small town was quiet in the morning. Three boats lay at the pier, and a man with a grey "
        "cap carried nets from one to the next. He had done so for forty years, he said, and his father before him. "
        "The water was green and still, and the gulls sat in a row on the wall, as if they waited for something. ")
QUESTIONS = ("Tell me a story about a clock.", "Why is the sky blue?", "Write a poem about rain.", "What is a prime?",
             "Describe a market in the morning.", "How do bees find flowers?", "Invent a new sport.", "What is music?")
WORKLOADS = {"edit": {"temperature": 0.0}, "chat": {"temperature": 0.2, "top_p": 0.9}, "free": {"temperature": 1.0}}
CASES = {"plain": (), "ngram": ("ngram", "tokens=8"), "suffix": ("suffix", "tokens=8")}


def prompts(workload: str, count: int, tokenizer: object) -> list[list[int]]:
    found = []
    for i in range(count):
        ask = (f"Repeat this text word for word, and nothing else: Number {i}. {TEXT}" if workload == "edit"
               else QUESTIONS[i % len(QUESTIONS)])
        found.append(tokenizer.encode(f"<|im_start|>user\n{ask}<|im_end|>\n<|im_start|>assistant\n", add_special=True))
    return found


def measure(engine: EngineCore, asked: list[list[int]], workload: str, tokens: int, round: int) -> float:
    """Tokens per second of decoding, from when all have begun."""
    for i, ids in enumerate(asked):
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, seed=i + 100 * round, **WORKLOADS[workload])
        engine.submit(Submit(f"r{i}", pack_ids(np.array(ids)), params))
    given = began = 0
    while engine.has_work:
        outputs = engine.step()
        new = len(outputs.tokens) + sum(len(o.tokens) // 4 for o in outputs.full)
        if not began and engine.scheduler.running == len(asked) and not list(engine.scheduler._prefills):
            began, given = time.perf_counter(), 0
        elif began:
            given += new
    return given / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default=str(Path.home() / ".cache/isthmus/models/smollm2-135m-instruct"))
    parser.add_argument("--platform", default="cpu")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--also", action="append", default=[], metavar="SPECULATIVE", help="a drafter more")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.plot:
        check_plot(arguments.plot)
    cases = CASES | {also: tuple(also.split(",")) for also in arguments.also}
    path = next(Path(arguments.model).glob("*.gguf"), Path(arguments.model))
    with open_checkpoint(path) as checkpoint:
        tokenizer = load_tokenizer(checkpoint)
    engines = {name: EngineCore(Config(
        model=ModelSettings(str(path), max_model_len=1024), platform=PlatformSettings(arguments.platform),
        cache=CacheSettings(kv_cache_memory="400MiB"), scheduler=SchedulerSettings(max_running_requests=16),
        speculation=SpeculationSettings(case))) for name, case in cases.items()}
    rows = []
    for batch in arguments.batch:
        for workload in WORKLOADS:
            asked, speeds = prompts(workload, batch, tokenizer), {name: [] for name in engines}
            before = {name: engine.stats() for name, engine in engines.items()}
            for round in range(arguments.rounds):
                for name, engine in engines.items():
                    speeds[name].append(measure(engine, asked, workload, arguments.tokens, round))
            for name, engine in engines.items():
                rows.append(row_of(batch, workload, name, speeds, before[name], engine.stats()))
                print(json.dumps(rows[-1]), flush=True)
    for name in cases:
        worst = min((row for row in rows if row["drafter"] == name), key=lambda row: row["to_plain"])
        print(f"{name}: at least {worst['to_plain']} times plain ({worst['workload']}, {worst['batch']} at a time)")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))
    if arguments.plot:
        write_charts(arguments.plot, f"Drafts of {path.name}", charts_of(rows), [table_of(rows)])


def row_of(batch: int, workload: str, name: str, speeds: dict[str, list[float]], was: dict, now: dict) -> dict:
    """What one drafter came to; was, now: its engine's counters."""
    drafts, kept, proposed = (now.get(key, 0) - was.get(key, 0) for key in (
        "drafts", "accepted_tokens", "drafted_tokens"))
    median = statistics.median(speeds[name])
    places = [[a - b for a, b in itertools.zip_longest(now.get(key, []), was.get(key, []), fillvalue=0)]
              for key in ("drafted_at", "accepted_at")]
    return {"batch": batch, "workload": workload, "drafter": name, "tokens_per_s": round_(median),
            "to_plain": round_(median / statistics.median(speeds["plain"])),
            "ratios": [round_(a / b) for a, b in zip(speeds[name], speeds["plain"], strict=True)],
            "length": round_(1 + kept / drafts) if drafts else 1.0,
            "accepted": round_(kept / proposed) if proposed else None,
            "accepted_at": [round_(b / a) for a, b in zip(*places, strict=True) if a],
            "state": now.get("draft_state", "")}


def charts_of(rows: list[dict]) -> list[Chart]:
    """For each workload and batch: the share of drafted tokens that are right, by place in the draft."""
    found = []
    for workload, batch in dict.fromkeys((row["workload"], row["batch"]) for row in rows):
        curves = {row["drafter"]: [*enumerate(row["accepted_at"], 1)] for row in rows
                  if (row["workload"], row["batch"]) == (workload, batch) and row["accepted_at"]}
        if curves:
            found.append(Chart(f"{workload}, {batch} at a time", "place in the draft", "share that is kept", curves))
    return found


def table_of(rows: list[dict]) -> Table:
    """Tokens that a step with a draft gives, by drafter, workload and batch, and the speed beside no drafts."""
    columns = list(dict.fromkeys((row["workload"], row["batch"]) for row in rows))
    cells = {(row["drafter"], row["workload"], row["batch"]): f"{row['length']:.3g} ({row['to_plain']:.3g} x)"
             for row in rows}
    return Table(["tokens of a step with a draft (speed)", *(f"{workload}, {batch}" for workload, batch in columns)],
                 [[name, *(cells.get((name, *column), "") for column in columns)]
                  for name in dict.fromkeys(row["drafter"] for row in rows)])


def round_(number: float) -> float:
    return float(f"{number:.3g}")


if __name__ == "__main__":
    main()
