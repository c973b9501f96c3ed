"""`isthmus doctor`: what can run here, and the way out where something cannot. What it finds never makes it fail."""
from __future__ import annotations

import argparse
import json
import os
import platform as machine
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ..env import cache_dir
from .banner import size
from .settings import Resolved
from .version import isthmus_version

LIBRARIES = ("numpy", "msgspec", "pyzmq", "starlette", "uvicorn", "tokenizers", "jinja2", "huggingface-hub",
             "torch", "jax", "mlx")
MAX_REASON = 150  # characters of one platform's reason
MAX_PLATFORMS = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace, resolved: Resolved) -> int:
    """0 when a platform can run, 1 when none can."""
    report = examine(resolved.config.platform.platform_option)
    if arguments.json:
        print(json.dumps(report, ensure_ascii=False))
    else:
        print("\n".join(lines(report)))
    return 0 if report["chosen"] else 1


def examine(options: tuple[str, ...] = ()) -> dict[str, Any]:
    """Everything that doctor knows, as plain data."""
    return {"isthmus": isthmus_version(), "python": machine.python_version(), "system": machine.platform(),
            "cpus": _processors(), "memory": _safely(_memory),
            "libraries": {name: _safely(lambda name=name: version(name)) for name in LIBRARIES},
            "cache": str(cache_dir()), **_platforms(options)}


def _safely(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except PackageNotFoundError:
        return None
    except Exception as error:  # a broken part of this machine is a finding, not a crash
        return f"broken: {type(error).__name__}: {error}"


def _processors() -> int | None:
    """Those that this process may use, where the system says that."""
    allowed = getattr(os, "sched_getaffinity", None)
    return len(allowed(0)) if allowed else os.cpu_count()


def _memory() -> dict[str, int]:
    import psutil
    memory = psutil.virtual_memory()
    return {"total": memory.total, "free": memory.available}


def _platforms(options: tuple[str, ...]) -> dict[str, Any]:
    """Every platform's manifest in short, or its reason; and the one that would be taken."""
    from ..discovery import probe_all
    from ..platform import Manifest
    from ..startup import platform_options
    try:
        probed = probe_all(platform_options(options))
    except Exception as error:  # such as two packages that claim one name
        return {"platforms": {}, "chosen": None, "problem": str(error)}
    found: dict[str, Any] = {}
    for name, answer in probed.items():
        if isinstance(answer, Manifest):
            found[name] = {"available": True, "device": answer.device, "dtypes": answer.compute_dtypes,
                           "rank": answer.rank, "memory_free": answer.memory_free, "details": dict(answer.details)}
        else:
            found[name] = {"available": False, "reason": " ".join(str(answer).split()) or type(answer).__name__}
    usable = [name for name, entry in found.items() if entry["available"]]
    chosen = max(usable, key=lambda name: (found[name]["rank"], name), default=None)
    return {"platforms": found, "chosen": chosen, "problem": None}


def lines(report: dict[str, Any]) -> list[str]:
    """The report for people, twenty lines at most."""
    memory = report["memory"]
    space = f"{size(memory['free'])} of {size(memory['total'])} free" if isinstance(memory, dict) else memory
    out = [f"isthmus {report['isthmus']}, Python {report['python']}, {report['system']}",
           f"{report['cpus']} processors, memory {space}", "platforms:"]
    names = sorted(report["platforms"], key=lambda n: (not report["platforms"][n]["available"], n))
    width = max(map(len, names), default=0)
    for name in names[:MAX_PLATFORMS]:
        entry = report["platforms"][name]
        if entry["available"]:
            mark = "*" if name == report["chosen"] else "+"
            text = f"{entry['device']}; {', '.join(entry['dtypes'])}; {size(entry['memory_free'])} free"
        else:
            mark, text = "-", entry["reason"].removeprefix(f"--platform={name}: ")[:MAX_REASON]
        out.append(f"  {mark} {name:{width}}  {text}")
    if len(names) > MAX_PLATFORMS:
        out.append(f"    and {len(names) - MAX_PLATFORMS} more: isthmus doctor --json")
    libraries = report["libraries"]
    out.append("libraries: " + ", ".join(f"{n} {v}" for n, v in libraries.items() if v))
    if missing := [n for n, v in libraries.items() if not v]:
        out.append("not installed: " + ", ".join(missing))
    out.append(f"downloads are kept in {report['cache']}")
    if report["chosen"]:
        out.append(f"ready: `isthmus serve` runs on {report['chosen']}")
    else:
        out.append(f"no platform can run here: {report['problem'] or 'see the reasons above'}; "
                   "`pip install \"isthmus[cpu]\"` gives one that runs everywhere")
    return out
