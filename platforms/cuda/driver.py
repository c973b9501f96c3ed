"""Is there an NVIDIA driver with a device, and a torch built for it? Answered without importing torch."""
from __future__ import annotations

import ctypes
import sys
from pathlib import Path

from ..accelerator.build import reason_against_build

DEVICES = Path("/proc/driver/nvidia/gpus")
WSL = Path("/dev/dxg")  # Windows' own driver, seen from Linux inside it


def reason_against() -> str | None:
    """Why no NVIDIA GPU can be used here, the driver first, with the way out; None = it is worth importing torch."""
    library = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    if sys.platform == "darwin":
        return "there are no NVIDIA drivers for macOS: --platform=mlx serves Apple GPUs, --platform=cpu every machine"
    try:
        ctypes.CDLL(library)
    except OSError:
        return (f"no NVIDIA driver found ({library} cannot be loaded): install the driver, in a container start it "
                "with --gpus=all; --platform=cpu serves without a GPU")
    if sys.platform == "linux" and not WSL.exists() and not (DEVICES.is_dir() and any(DEVICES.iterdir())):
        return ("an NVIDIA driver is installed but shows no GPU: look at `nvidia-smi`; in a container start it with "
                "--gpus=all; --platform=cpu serves without a GPU")
    return reason_against_build("cuda", "cuda", "CUDA")
