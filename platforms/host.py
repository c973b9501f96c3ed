"""What the host offers this process, for any platform: memory and physical cores."""
from __future__ import annotations

from pathlib import Path

import psutil


def host_memory() -> tuple[int, int]:
    """Bytes that this process may use: total, and free without swapping; a control group's limit counts."""
    now = psutil.virtual_memory()
    limit, used = _group_bytes("memory.max"), _group_bytes("memory.current")
    if limit is None or used is None or limit >= now.total:
        return now.total, now.available
    return limit, min(now.available, max(0, limit - used))


def physical_cores() -> int:
    """Physical cores that this process may run on."""
    process = psutil.Process()
    if not hasattr(process, "cpu_affinity"):
        return psutil.cpu_count(logical=False) or 1
    cpus = process.cpu_affinity()
    siblings = {read_text(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or str(cpu)
                for cpu in cpus}
    return len(siblings)


def read_text(path: str) -> str | None:
    """A small file of the system's; None where it is not there."""
    try:
        return Path(path).read_text("utf-8").strip()
    except OSError:
        return None


def _group_bytes(name: str) -> int | None:
    """A figure of this process's own control group (version 2); None where there is none or no limit."""
    text = read_text(f"/sys/fs/cgroup/{name}")
    return int(text) if text is not None and text.isdecimal() else None
