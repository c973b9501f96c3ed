"""Versions, and what the device says of itself."""
from __future__ import annotations

import datetime
import os
import platform as machine
import subprocess
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from isthmus.conformance.report import manifest_data
from place import ROOT, Place, main

PACKAGES = ("isthmus", "torch", "triton", "flashinfer-python", "flashinfer-jit-cache", "aiter", "vllm-xpu-kernels",
            "torch-npu", "transformers", "numpy")
TOOLS = {
    "cuda": ("nvidia-smi", "--format=csv",
             "--query-gpu=name,driver_version,clocks.max.sm,clocks.max.mem,power.limit,ecc.mode.current"),
    "rocm": ("rocm-smi", "--showproductname", "--showdriverversion"),
    "xpu": ("xpu-smi", "discovery"), "npu": ("npu-smi", "info")}


def installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def told(command: tuple[str, ...]) -> str:
    """What a tool prints, or why it does not."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, cwd=ROOT)
        return (done.stdout or done.stderr).strip()[:4000]
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]}: {error}"


def run(place: Place, ceilings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    total, free = place.platform.memory()
    yield {"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "machine": machine.platform(),
           "python": machine.python_version(), "cores": os.cpu_count(), "commit": told(("git", "rev-parse", "HEAD"))}
    yield {"packages": {name: installed(name) for name in PACKAGES}}
    yield {"platform": place.name, "device": place.device.name, "architecture": place.device.arch,
           "processors": place.device.processors, "memory": total, "free": free,
           "details": dict(place.manifest.details), "manifest": manifest_data(place.manifest, ())}
    yield {"tool": told(TOOLS[place.name])}


if __name__ == "__main__":
    main(__doc__, run)
