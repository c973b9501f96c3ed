"""Starting, watching and stopping the two worker processes."""
from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from ..config import Config
from .wire import GROUP_SIGNALS, REPORT, Start

try:
    import fcntl
except ImportError:  # Windows, where the engine runs in one process
    fcntl = None

ROLES = ("scheduler", "detokenizer")
SOCKETS = "isthmus-sockets-"


def describe_exit(role: str, code: int) -> str:
    """What a worker's exit code says."""
    if code >= 0:
        return f"the {role} process exited with code {code}"
    memory = ", which is also what the system does when memory runs out" if code == -9 else ""
    return f"the {role} process was killed by signal {-code}{memory}"


def lock(directory: Path) -> int | None:
    """Mark a folder as used for as long as this process lives: a descriptor, None if another process has it."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def sweep() -> None:
    """Remove the folders of servers that were killed while they started; what lives has its folder locked."""
    for folder in Path(tempfile.gettempdir()).glob(f"{SOCKETS}*"):
        with suppress(OSError):  # another user's, or gone
            if folder.stat().st_mtime < time.time() - 1 and (descriptor := lock(folder)) is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(descriptor)


@contextmanager
def spared_signals() -> Iterator[None]:
    """A process that is started inside does not get the signals of its group; `start_worker` ignores them for good."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Workers:
    """The worker processes and the directory of their sockets.

    on_exit(role, code) is called from a thread, once for each process that ends before `stop`.
    """

    def __init__(self, config: Config, engine: str | None = None, tokenizer: str | None = None):
        sweep()
        self.directory = Path(tempfile.mkdtemp(prefix=SOCKETS))  # mkdtemp makes it 0700
        self._lock = lock(self.directory)
        self._start = Start(str(self.directory), os.getpid(), config, engine, tokenizer)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._stopping = False

    def spawn(self, on_exit: Callable[[str, int], None]) -> None:
        """Start the processes, each with its configuration as one line of JSON on a pipe.

        -P: what lies in the current folder, such as a `random.py`, must not be imported there.
        """
        line = msgspec.json.encode(self._start) + b"\n"
        for role in ROLES:
            with spared_signals():
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
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def ask_for_report(self) -> None:
        """Have each process log where its threads are, and the engine what happened last, as far as Python runs."""
        for process in self._processes.values():
            with suppress(OSError, ValueError):  # it is gone already
                process.stdin.write(REPORT)
                process.stdin.flush()

    def dump(self) -> None:
        """Have each process print where its threads are, even if a native call holds Python's lock."""
        for process in self._processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGUSR1)

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
