"""Is there an Intel GPU with its driver, and a torch built for it? Answered without importing torch."""
from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

from ..accelerator.build import reason_against_build

NODES = Path("/dev/dri")
SYSTEM = Path("/sys/class/drm")
WSL = Path("/dev/dxg")  # Windows' own driver, seen from Linux inside it
INTEL = "0x8086"        # PCI's number of the vendor
ELSEWHERE = "--platform=cpu serves without a GPU"


def reason_against() -> str | None:
    """Why no Intel GPU can be used here, the driver first, with the way out; None = it is worth importing torch."""
    if sys.platform == "darwin":
        return "there are no such drivers for macOS: --platform=mlx serves Apple GPUs, --platform=cpu every machine"
    if sys.platform == "linux" and not WSL.exists():
        nodes = intel_nodes()
        if not nodes:
            return (f"no Intel GPU found (no render node of Intel's under {NODES}): load the kernel's driver xe or "
                    f"i915, in a container pass --device={NODES}; {ELSEWHERE}")
        if not any(os.access(node, os.R_OK | os.W_OK) for node in nodes):
            return (f"{nodes[0]} may not be opened by this user: add the user to the node's group (often `render`), in "
                    f"a container pass --group-add; {ELSEWHERE}")
    library = "ze_loader.dll" if sys.platform == "win32" else "libze_loader.so.1"
    try:
        ctypes.CDLL(library)
    except OSError:
        return (f"Level Zero's loader is missing ({library} cannot be loaded): install level-zero and Intel's compute "
                f"runtime (intel-level-zero-gpu); {ELSEWHERE}")
    return reason_against_build("xpu", "xpu", "Intel GPUs (XPU)")


def intel_nodes() -> list[Path]:
    """Render nodes whose device is Intel's."""
    found = []
    for node in sorted(NODES.glob("renderD*")):
        try:
            vendor = (SYSTEM / node.name / "device" / "vendor").read_text("utf-8").strip()
        except OSError:
            continue
        if vendor == INTEL:
            found.append(node)
    return found
