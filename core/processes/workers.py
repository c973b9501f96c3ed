"""Starting, watching and stopping the two worker processes."""
from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from ..config import Config
from .wire import Start

ROLES = ("scheduler", "detokenizer")


def describe_exit(role: str, code: int) -> str:
    """What a worker's exit code says."""
    if code >= 0:
        return f"the {role} process exited with code {code}"
    memory = ", which is also what the system does when memory runs out" if code == -9 else ""
    return f"the {role} process was killed by signal {-code}{memory}"


class Workers:
    """The worker processes and the directory of their sockets.

    on_exit(role, code) is called from a thread, once for each process that ends before `stop`.
    """

    def __init__(self, config: Config, engine: str | None = None, tokenizer: str | None = None):
        self.directory = Path(tempfile.mkdtemp(prefix="isthmus-"))  # mkdtemp makes it 0700
        self._start = Start(str(self.directory), os.getpid(), config, engine, tokenizer)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._stopping = False

    def spawn(self, on_exit: Callable[[str, int], None]) -> None:
        """Start the processes, each with its configuration as one line of JSON on a pipe.

        -P: what lies in the current folder, such as a `random.py`, must not be imported there.
        """
        line = msgspec.json.encode(self._start) + b"\n"
        for role in ROLES:
            process = subprocess.Popen([sys.executable, "-P", "-m", f"{__package__}.{role}"],
                                       stdin=subprocess.PIPE)
            self._processes[role] = process
            threading.Thread(target=self._watch, args=(role, process, on_exit), daemon=True).start()
            try:
                process.stdin.write(line)
                process.stdin.flush()
            except BrokenPipeError:  # it died at once: `on_exit` tells
                pass

    def pids(self) -> dict[str, int]:
        """Process ids by role."""
        return {role: process.pid for role, process in self._processes.items()}

    def forget_directory(self) -> None:
        """Remove the sockets' names; connected sockets stay, and nobody else can connect any more."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def stop(self, timeout: float = 0.5) -> None:
        """End the processes and wait for them; blocks for `timeout` seconds at most before they are killed."""
        self._stopping = True
        for process in self._processes.values():
            try:
                process.stdin.close()
            except BrokenPipeError:  # it is gone already
                pass
        for process in self._processes.values():
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.forget_directory()

    def _watch(self, role: str, process: subprocess.Popen[bytes], on_exit: Callable[[str, int], None]) -> None:
        code = process.wait()
        if not self._stopping:
            on_exit(role, code)
