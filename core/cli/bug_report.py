"""`isthmus doctor --bug-report`: what a maintainer asks first, to paste into an issue."""
from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ..settings import Resolved, list_settings, shown
from .running import list_running

HIDDEN = ("TOKEN", "KEY", "SECRET", "PASSWORD")
VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK",
             "ASCEND_RT_VISIBLE_DEVICES", "OMP_NUM_THREADS", "KMP_BLOCKTIME", "HF_HUB_OFFLINE", "PYTHONPATH",
             "LD_PRELOAD", "LANG")


def text(doctor: Sequence[str], resolved: Resolved) -> str:
    """Markdown with doctor's lines, the settings that somebody set, and the servers that run. Keys are hidden, and the
    home folder is written ~."""
    settings = [f"{s.flag} {shown(resolved.config, s)}   ({resolved.origin[s.name]})"
                for s in list_settings().values() if resolved.origin[s.name] != "default"]
    known = {setting.variable for setting in list_settings().values()}
    variables = [f"{name}={'(hidden)' if any(word in name for word in HIDDEN) else value}"
                 for name, value in sorted(os.environ.items())
                 if name in VARIABLES or name.startswith("ISTHMUS_") and name not in known]
    servers = [f"{s.model} on {s.platform or '?'} at port {s.port}" for s in list_running()]
    parts = [("isthmus doctor", doctor), ("settings that were set", settings or ["none"]),
             ("variables", variables or ["none"]), ("servers that run", servers or ["none"])]
    told = ["What did you do, what happened, and what should have happened?", "",
            *(line for title, found in parts for line in (f"### {title}", "```text", *found, "```", "")),
            f"Python: `{sys.executable}`"]
    return "\n".join(told).replace(str(Path.home()), "~")
