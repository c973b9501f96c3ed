"""Is there an Ascend NPU with a driver, CANN and a torch_npu that fits torch? Answered without importing torch."""
from __future__ import annotations

import ctypes
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ..accelerator.build import torch_build

NODES = Path("/dev")                               # davinci0, davinci1 ...: one for each NPU
MANAGER = "davinci_manager"                        # the driver's own node
TOOLKIT = Path("/usr/local/Ascend/ascend-toolkit")  # where CANN's installer puts it
LIBRARY = "libascendcl.so"
ELSEWHERE = "--platform=cpu serves without an NPU"


def reason_against() -> str | None:
    """Why no Ascend NPU can be used here, the driver first, with the way out; None = it is worth importing torch."""
    if sys.platform != "linux":
        return f"there are Ascend drivers for Linux only; {ELSEWHERE}"
    return reason_against_driver() or reason_against_cann() or reason_against_packages()


def reason_against_driver() -> str | None:
    if any(re.fullmatch(r"davinci\d+", node.name) for node in NODES.glob("davinci*")):
        return None
    if (NODES / MANAGER).exists():
        return (f"an Ascend driver is installed but shows no NPU ({NODES}/davinci0 is missing): look at "
                f"`npu-smi info`; a container needs --device=/dev/davinci0 for each NPU; {ELSEWHERE}")
    return (f"no Ascend driver found ({NODES}/{MANAGER} is missing): install the driver and firmware of the NPU, a "
            f"container needs --device=/dev/davinci0 --device=/dev/{MANAGER} and the driver's folder; {ELSEWHERE}")


def reason_against_cann() -> str | None:
    """CANN is the NPU's runtime and operators, which no package of Python's brings."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError as error:
        if str(error).startswith(LIBRARY + ":"):
            way = (f"run `source {TOOLKIT}/set_env.sh` first" if (TOOLKIT / "set_env.sh").exists() else
                   "install the CANN toolkit and the kernels of this NPU, and source its set_env.sh")
            return f"CANN is not found ({LIBRARY} cannot be loaded): {way}"
        return f"CANN cannot be loaded ({error}): source its set_env.sh; the driver's libraries belong to it"
    return None


def reason_against_packages() -> str | None:
    """torch_npu is compiled against one release of torch."""
    build = torch_build()
    if build is None:
        return "torch is not installed: pip install 'isthmus[npu]'"
    have = release(build.get("__version__", ""))
    try:
        wants = release(version("torch-npu"))
    except PackageNotFoundError:
        return f"torch_npu is not installed, without which torch has no NPU: pip install torch-npu=={have}"
    if have != wants:
        return (f"torch_npu {wants} was built for torch {wants}, and torch {have} is installed: "
                f"pip install torch=={wants}, or torch-npu=={have} if there is one for your CANN")
    return None


def release(text: str) -> str:
    """"2.13.0" of "2.13.0+cpu" or "2.13.0.post1"."""
    found = re.match(r"\d+(\.\d+)*", text)
    return found[0] if found else "unknown"
