"""Where a step of the device check runs: the platform, its device, and how a call is timed.

With `--device cpu` it is the accelerators' common base on torch's CPU device, for cuda with FlashInfer's stand-in, and
graphs are recorded (tests/emulation). Every size is tiny: that run shows that the scripts work, and measures nothing.
"""
from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from isthmus.core.discovery import load_platform, probe
from isthmus.core.platform import Manifest, Unavailable
from isthmus.platforms.accelerator.base import AcceleratorPlatform
from isthmus.platforms.accelerator.device import Device
from isthmus.platforms.accelerator.graph import Graph
from isthmus.platforms.accelerator.kernels import Kernels
from isthmus.platforms.accelerator.staging import Staging
from report import write_whole
from subject import NO_DEVICE

ROOT = Path(__file__).resolve().parent.parent.parent
PLATFORMS = ("cuda", "rocm", "xpu", "npu")
SPAN, SPANS = 0.02, 7   # seconds of calls that are timed together; how often
CALLS = 200             # calls that are timed together at most


@dataclass
class Place:
    """A probed platform. tiny: sizes are for the scripts' own test."""

    name: str
    tiny: bool
    platform: AcceleratorPlatform
    manifest: Manifest
    device: Device
    kernels: Kernels
    graph: Callable[[], Graph] | str
    staging: Staging

    def empty(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device.torch)

    def random(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return self.empty(*shape, dtype=dtype).normal_()

    def pick(self, real: Any, tiny: Any) -> Any:
        return tiny if self.tiny else real


def make_platform(name: str, tiny: bool, options: dict[str, str] | None = None) -> Any:
    """A platform that was not probed yet."""
    if not tiny:
        return load_platform(name, options or {})
    sys.path.insert(0, str(ROOT))
    if name != "cuda":
        from tests.emulation.composed.platform import Platform
        return Platform(options or {})
    from tests.emulation.cuda_flashinfer import library
    from tests.emulation.cuda_flashinfer.platform import Platform as WithFlashInfer
    platform = WithFlashInfer(options or {})
    platform.library = library.library({}, "stand-in")
    return platform


def arrive(name: str, tiny: bool) -> Place:
    """Probe the platform. Raises `Unavailable` with the reason where there is no such device."""
    platform = make_platform(name, tiny, {"graphs": "first"})
    manifest = probe(name, platform)
    runtime = platform._ready()
    return Place(name, tiny, platform, manifest, runtime.device, runtime.kernels, runtime.graph, runtime.staging)


def arguments(about: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("platform", choices=PLATFORMS)
    parser.add_argument("--json", type=Path, required=True, help="where the results go")
    parser.add_argument("--device", choices=("own", "cpu"), default="own", help="cpu: emulated, tiny, for a test")
    parser.add_argument("--results", type=Path, help="the folder of earlier steps' results")
    return parser.parse_args()


def main(about: str, run: Callable[[Place, dict[str, Any]], Any]) -> None:
    """A step's command: `run(place, ceilings)` gives rows, which are written also when it is interrupted.

    ceilings: what the step of that name measured, {} without it. Exit status `NO_DEVICE` where there is no device.
    """
    given = arguments(about)
    try:
        place = arrive(given.platform, given.device == "cpu")
    except Unavailable as error:
        print(error)
        raise SystemExit(NO_DEVICE) from None
    kept: dict[str, Any] = {"rows": []}
    earlier = given.results / "ceilings.json" if given.results else None
    ceilings = json.loads(earlier.read_text("utf-8")) if earlier and earlier.is_file() else {}
    try:
        with torch.inference_mode():
            for row in run(place, ceilings):
                kept["rows"].append(row)
                print(json.dumps(row), flush=True)
                write_whole(given.json, json.dumps(kept, indent=1) + "\n")
    finally:
        place.platform.close()


def spans(call: Callable[[], object], device: Device, calls: int) -> list[float]:
    """Seconds of a call, from several spans of so many."""
    found = []
    for _ in range(SPANS):
        device.wait()
        began = time.perf_counter()
        for _ in range(calls):
            call()
        device.wait()
        found.append((time.perf_counter() - began) / calls)
    return found


def timed(calls: Sequence[Callable[[], object]], place: Place) -> tuple[float, str]:
    """Median seconds of a call, and whether a graph replayed it. calls: the same work on other memory, made in turn, so
    that nothing is found in a cache. A graph keeps the time to launch out of short calls."""
    for call in calls:
        call()
    place.device.wait()
    began = time.perf_counter()
    for call in calls:
        call()
    place.device.wait()
    once = (time.perf_counter() - began) / len(calls)
    rounds = 1 if place.tiny else max(1, min(CALLS, int(SPAN / max(once, 1e-7)) // len(calls)))

    def some() -> None:
        for _ in range(rounds):
            for call in calls:
                call()
    replay, how = captured(some, place)
    return statistics.median(spans(replay, place.device, 1)) / (rounds * len(calls)), how


def captured(call: Callable[[], object], place: Place) -> tuple[Callable[[], object], str]:
    """A replay of the call from a graph, or itself and why."""
    if isinstance(place.graph, str):
        return call, place.graph
    graph = place.graph()
    try:
        with torch.inference_mode(), torch.inference_mode() if place.device.host else torch.Stream(place.device.torch):
            call()
            place.device.wait()
            graph.capture_begin()
            try:
                call()
            finally:
                graph.capture_end()
    except Exception as error:  # what cannot be captured is timed with its launches
        return call, f"launched: {type(error).__name__}: {error}"[:120]
    return graph.replay, "replayed"


def figure(value: float) -> float:
    """To four digits."""
    return float(f"{value:.4g}")


def share(part: float, whole: float | None) -> float | None:
    """Of a ceiling, to three places; None without one."""
    return round(part / whole, 3) if whole else None
