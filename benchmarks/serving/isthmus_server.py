"""A real `isthmus serve` in its own processes."""
from __future__ import annotations

import http.client
import signal
import socket
import subprocess
import sys
import tempfile
import time


class IsthmusServer:
    """Started on construction; `ready_s` is the time from the command to the first 200 of /ready."""

    def __init__(self, *flags: str, model: str | None = None):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        command = [sys.executable, "-m", "isthmus.core.cli.main", "serve", *([model] if model else []),
                   f"--port={self.port}", *flags]
        self.command = " ".join(["isthmus", *command[3:]])
        began = time.perf_counter()
        self._said = tempfile.TemporaryFile("w+")  # not a pipe: one that nobody reads stops the server when full
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=self._said)
        self._wait(began)
        self.ready_s = time.perf_counter() - began

    def _wait(self, began: float) -> None:
        while time.perf_counter() - began < 120:
            if self._process.poll() is not None:
                self._said.seek(0)
                raise RuntimeError(f"{self.command} ended: {self._said.read()}")
            try:
                if self._get("/ready")[0] == 200:
                    return
            except OSError:
                pass
            time.sleep(0.02)
        raise RuntimeError(f"{self.command} was not ready in 120 s")

    def _get(self, path: str, method: str = "GET") -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request(method, path)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def close(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
