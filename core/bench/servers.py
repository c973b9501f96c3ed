"""Servers that a bench starts by a command, of ours or of anybody, and ends again."""
from __future__ import annotations

import http.client
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress

import psutil

from ..errors import ConfigError
from .output import Output
from .result import hidden

LOOK_S = 0.05        # between two looks whether it is ready
END_S = 30.0         # after which it is killed
PLACE = "{port}"


def words_of(command: str, port: int) -> list[str]:
    """The command's words with the port in them. `isthmus` is this one; it needs no `{port}`. Raises `ConfigError`."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"{hidden(command)!r} is no command: {error}") from None
    if not words:
        raise ConfigError("an empty command starts no server")
    ours = words[0] == "isthmus"
    if ours and not any(PLACE in word or word.startswith("--port") for word in words):
        words += ["--port", PLACE]
    if not any(PLACE in word for word in words):
        raise ConfigError(f"{hidden(command)!r}: say where the server takes its port, such as --port {PLACE}")
    words = [word.replace(PLACE, str(port)) for word in words]
    return [sys.executable, "-m", "isthmus", *words[1:]] if ours else words


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class Started:
    """A server in a process group of its own, from its first answer on; `with` ends it.

    ready_s: from the command to the first 200 of /v1/models.  stages: what it said first, (seconds, line).
    """

    def __init__(self, command: str, timeout: float = 600.0, environment: dict[str, str] | None = None):
        self.port = free_port()
        self.url, self.command = f"http://127.0.0.1:{self.port}", hidden(command)
        words = words_of(command, self.port)
        self.began = time.monotonic()
        try:
            self.process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                            stdin=subprocess.DEVNULL, start_new_session=os.name == "posix",
                                            env={**os.environ, **(environment or {})})
        except OSError as error:
            raise ConfigError(f"{words[0]} cannot be started: {(error.strerror or str(error)).lower()}") from None
        self._output = Output(self.process.stdout, self.began)
        try:
            self._wait(timeout)
        except BaseException:
            self.close()
            raise

    @property
    def stages(self) -> list[tuple[float, str]]:
        return self._output.lines

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait(self, timeout: float) -> None:
        while not self._answers():
            spent = time.monotonic() - self.began
            if self.process.poll() is not None:
                raise ConfigError(f"{self.command!r} ended with exit code {self.process.returncode}: "
                                  f"{self._output.said()}")
            if spent > timeout:
                raise ConfigError(f"{self.command!r} was not ready in {timeout:g} s: {self._output.said()}")
            time.sleep(LOOK_S)
        self._output.take()
        self.ready_s = time.monotonic() - self.began

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/v1/models")
            return connection.getresponse().status in (200, 401, 403)
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def processes(self) -> list[psutil.Process]:
        with suppress(psutil.Error):
            parent = psutil.Process(self.process.pid)
            return [parent, *parent.children(recursive=True)]
        return []

    def resident(self) -> int:
        """Bytes that its processes hold in memory; what they share counts once where the system can tell."""
        total = 0
        for process in self.processes():
            with suppress(psutil.Error):
                full = process.memory_full_info() if hasattr(process, "memory_full_info") else process.memory_info()
                total += getattr(full, "pss", full.rss)
        return total

    def cpu_seconds(self) -> float:
        """Of a core, that its processes have used so far."""
        total = 0.0
        for process in self.processes():
            with suppress(psutil.Error):
                total += sum(process.cpu_times()[:2])
        return total

    def close(self) -> None:
        """End it, orderly first."""
        if self.process.poll() is None:
            self._signal(signal.SIGTERM)
            try:
                self.process.wait(END_S)
            except subprocess.TimeoutExpired:
                self._signal(getattr(signal, "SIGKILL", signal.SIGTERM))
                self.process.wait()
        if os.name == "posix":
            self._signal(signal.SIGKILL)  # what it has left of its group

    def _signal(self, number: int) -> None:
        with suppress(OSError):
            if os.name == "posix":
                os.killpg(self.process.pid, number)
            else:
                self.process.terminate()
