"""The one place that reads environment variables which are not settings.

| variable        | meaning                                                                                          |
|-----------------|--------------------------------------------------------------------------------------------------|
| ISTHMUS_DEBUG   | 0 quiet; 1 choices made at start, tracebacks of deliberate errors; 2 also one line a step;       |
|                 | 3 also every request's events, integrity checks after every step; 4 also each op's shapes       |
| ISTHMUS_CACHE   | folder for downloaded models; the system's cache folder for users unless set                     |
| ISTHMUS_CONFIG  | YAML file with settings, as `--config`                                                           |

Every setting can be given too (`--max-model-len` is ISTHMUS_MAX_MODEL_LEN); `isthmus explain` lists them.
"""
from __future__ import annotations

import os
import sys
from pathlib import Path

PREFIX = "ISTHMUS_"
VARIABLES = {
    "ISTHMUS_CONFIG": "YAML file with settings, as --config",
    "ISTHMUS_CACHE": "folder for downloaded models",
    "ISTHMUS_DEBUG": "0 to 4: choices and tracebacks, steps, requests, ops",
}


def debug_level() -> int:
    """ISTHMUS_DEBUG as a number; what is not a number counts as 0."""
    value = os.environ.get("ISTHMUS_DEBUG", "0")
    return int(value) if value.isdecimal() else 0


def cache_dir() -> Path:
    """Where downloaded models are kept. The folder need not exist yet."""
    if chosen := os.environ.get("ISTHMUS_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / ".cache")) / "isthmus"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "isthmus"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "isthmus"
