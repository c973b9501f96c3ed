"""Is there an AMD driver with a GPU, and a torch built for it? Answered without importing torch."""
from __future__ import annotations

import sys
from pathlib import Path

from ..accelerator.build import reason_against_build

DRIVER = Path("/dev/kfd")
NODES = Path("/sys/class/kfd/kfd/topology/nodes")
WSL = Path("/dev/dxg")  # Windows' own driver, seen from Linux inside it


def reason_against() -> str | None:
    """Why no AMD GPU can be used here, the driver first, with the way out; None = it is worth importing torch."""
    if sys.platform != "linux":
        return "torch's builds for ROCm are for Linux; --platform=cpu serves every machine"
    if not WSL.exists():
        if not DRIVER.exists():
            return (f"no AMD driver found ({DRIVER} is not there): load amdgpu, in a container pass --device=/dev/kfd "
                    "--device=/dev/dri; --platform=cpu serves without a GPU")
        if not _gpus():
            return "the AMD driver shows no GPU: look at `rocminfo`; --platform=cpu serves without a GPU"
    return reason_against_build("rocm", "hip", "ROCm")


def _gpus() -> int:
    """Nodes of the driver's topology that can compute; a processor's has no such units."""
    found = 0
    for properties in NODES.glob("*/properties"):
        try:
            words = properties.read_text("utf-8").split()
        except OSError:
            continue
        facts = dict(zip(words[::2], words[1::2], strict=False))
        found += int(facts.get("simd_count", "0")) > 0
    return found
