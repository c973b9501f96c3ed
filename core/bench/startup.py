"""How long a server takes from the command to its first token, by stage, and what it holds then."""
from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .client import Client
from .drive import run_loop
from .result import Run
from .servers import Started
from .serving import Server
from .workload import Ask

MAX_FILES = 10_000
STAGE = re.compile(r"isthmus: (.+?)(?:, [\d.]+ [KMG]iB)? \.\.\.$")


def forget_files(path: Path) -> int:
    """Ask the system to drop a model's files from its cache, so that the next start reads them anew: bytes asked for;
    0 where it cannot."""
    if not hasattr(os, "posix_fadvise"):
        return 0
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())[:MAX_FILES]
    total = 0
    for file in files:
        try:
            descriptor = os.open(file, os.O_RDONLY)
        except OSError:
            continue
        try:
            os.fsync(descriptor)  # what is not on disk yet cannot be dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            total += os.fstat(descriptor).st_size
        except OSError:
            continue
        finally:
            os.close(descriptor)
    return total


def stages_of(lines: Sequence[tuple[float, str]], ready: float) -> list[tuple[str, float]]:
    """(stage, seconds) from the lines of a start: a stage lasts until the next begins, the last until it is ready."""
    begun = [(match[1], when) for when, line in lines if (match := STAGE.match(line)) and when <= ready]
    if not begun:
        return []
    ends = [when for _, when in begun[1:]] + [ready]
    return [("start the program", begun[0][1]),
            *((name, end - when) for (name, when), end in zip(begun, ends, strict=True))]


def measure(command: str, label: str, timeout: float, look: Any) -> tuple[Run, Server]:
    """Start it once, ask for a token, and end it. look(url): the server as `serving.look` finds it."""
    with Started(command, timeout) as started:
        server = look(started.url)
        asked = time.monotonic()

        async def ask() -> Any:
            client = Client(server.target)
            try:
                return await client.ask(Ask([1, 2, 3] if server.takes_ids else "hello", 2))
            finally:
                client.close()
        outcome = run_loop(ask())
        figures = {"ready_s": started.ready_s, "resident_bytes": float(started.resident()),
                   "cpu_s": started.cpu_seconds(), "failed": float(bool(outcome.error) and outcome.error != "no token")}
        if outcome.events:
            figures["first_token_s"] = outcome.events[0] - asked + started.ready_s
            figures["ttft_p50"] = outcome.ttft
        stages = stages_of(started.stages, started.ready_s)
        return Run(label, figures, {"stages": stages, "error": outcome.message, "said": [
            [round(when, 3), line] for when, line in started.stages[-50:]]}), server
