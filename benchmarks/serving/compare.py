"""Isthmus beside transformers on one machine, in turn, in one run: medians of interleaved rounds, as ratios.

    python benchmarks/serving/compare.py --rounds 5 --json results.json

Both compute in the same dtype from the same GGUF; Isthmus is a real server over HTTP, transformers runs in this process
(which favours it). While one works the other is idle. Prefix caches are emptied before every measurement.
"""
from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from isthmus.core.weights.sources import resolve_model
from isthmus_server import IsthmusServer
from workloads import WORKLOADS, prompt

MAIN = {"W1": "decode_tps", "W2": "out_tps", "W3": "out_tps", "W4": "out_tps"}


def isthmus_round(seed: int, names: list[str], flags: list[str]) -> dict[str, dict[str, float]]:
    """Every workload on a fresh server."""
    server = IsthmusServer(*flags)
    try:
        server.generate(prompt(np.random.default_rng(seed + 999), 40), 8)
        results = {"ready": {"seconds": server.ready_s}}
        for name in names:
            server.flush()
            results[name] = WORKLOADS[name](server.generate, seed)
        return results
    finally:
        server.close()


def peer_round(model: Any, seed: int, names: list[str], continuous: bool) -> dict[str, dict[str, float]]:
    """The same in transformers; W2 also as one static batch and, if asked, with continuous batching."""
    from transformers_peer import OneAtATime
    peer = OneAtATime(model)
    peer.generate(prompt(np.random.default_rng(seed + 999), 40), 8)
    results = {}
    for name in names:
        # One after the other the rate is that of any number of them: 4 of the 32 tell it.
        results[name] = WORKLOADS[name](peer.generate, seed, **({"count": 4} if name in ("W2", "W3") else {}))
        if name == "W2":
            rng = np.random.default_rng(seed)
            wall = peer.batch([prompt(rng, 256) for _ in range(32)], 64)
            results["W2 static batch"] = {"wall_s": wall, "out_tps": 32 * 64 / wall}
    if continuous and "W2" in names:
        results["W2 continuous"] = continuous_round(model, seed)
    return results


def continuous_round(model: Any, seed: int) -> dict[str, float]:
    from transformers_peer import Continuous
    manager = Continuous(model)
    try:
        return WORKLOADS["W2"](manager.generate, seed)
    finally:
        manager.close()


def median(rounds: list[dict], key: str, figure: str) -> tuple[float, float, float]:
    values = [r[key][figure] for r in rounds if key in r]
    return statistics.median(values), min(values), max(values)


def table(ours: list[dict], uncached: list[dict], peer: list[dict]) -> list[str]:
    """Markdown rows: our median [min-max], the other's, and the median of the ratios round by round."""
    rows = ["| workload | isthmus | beside | figure | ratio |", "|---|---|---|---|---|"]

    def row(name: str, other: str, others: list[dict], key: str, figure: str) -> None:
        both = zip(ours, others, strict=True) if others else ()
        pairs = [(a[name][figure], b[key][figure]) for a, b in both if name in a and key in b]
        if pairs:
            ratio = statistics.median(a / b for a, b in pairs)
            spread = f"{min(a / b for a, b in pairs):.2f}-{max(a / b for a, b in pairs):.2f}"
            a, b = median(ours, name, figure), median(others, key, figure)
            rows.append(f"| {name} | {a[0]:.1f} [{a[1]:.1f}-{a[2]:.1f}] | {other} {b[0]:.1f} [{b[1]:.1f}-{b[2]:.1f}] | "
                        f"{figure} | {ratio:.2f} [{spread}] |")

    for name, figure in MAIN.items():
        row(name, "transformers generate", peer, name, figure)
    row("W2", "transformers static batch", peer, "W2 static batch", "out_tps")
    row("W2", "transformers continuous batching", peer, "W2 continuous", "out_tps")
    for name in ("W3", "W4"):
        row(name, "isthmus --no-prefix-cache", uncached, name, "out_tps")
    ready = median(ours, "ready", "seconds")
    rows.append(f"| time to ready | {ready[0]:.2f} s [{ready[1]:.2f}-{ready[2]:.2f}] | | | |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--workloads", nargs="*", default=list(WORKLOADS))
    parser.add_argument("--continuous", action="store_true", help="also transformers' continuous batching")
    parser.add_argument("--no-peer", action="store_true", help="Isthmus alone")
    parser.add_argument("--json", type=Path, help="write every figure here")
    parser.add_argument("flags", nargs="*", help="further flags for isthmus serve, after --")
    args = parser.parse_args()
    flags = [f"--dtype={args.dtype}", *args.flags]
    ours, uncached, peers = [], [], []
    model = None
    if not args.no_peer:
        import torch
        from transformers_peer import load
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        model = load(resolve_model(None), getattr(torch, args.dtype))
    for i in range(args.rounds):
        seed = 1000 + i
        ours.append(isthmus_round(seed, args.workloads, flags))
        cached = [w for w in ("W3", "W4") if w in args.workloads]
        if cached:
            uncached.append(isthmus_round(seed, cached, [*flags, "--no-prefix-cache"]))
        if model is not None:
            peers.append(peer_round(model, seed, args.workloads, args.continuous))
        print(f"round {i + 1} of {args.rounds}: {ours[-1]}", file=sys.stderr, flush=True)
    lines = table(ours, uncached, peers)
    print("\n".join(lines))
    if args.json:
        machine = {"machine": platform.platform(), "python": platform.python_version(), "cores": os.cpu_count(),
                   "date": time.strftime("%Y-%m-%d"), "load": os.getloadavg()}
        args.json.write_text(json.dumps({"machine": machine, "argv": sys.argv, "isthmus": ours, "uncached": uncached,
                                         "transformers": peers, "table": lines}, indent=1))


if __name__ == "__main__":
    main()
