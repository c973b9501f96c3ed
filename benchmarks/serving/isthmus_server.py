"""A real `isthmus serve` in its own processes, driven over HTTP as a client would."""
from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any

from workloads import Timing


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

    def flush(self) -> None:
        """Empty the prefix cache, so that a round does not help the next."""
        status, body = self._get("/flush_cache", "POST")
        assert status == 200, body

    def info(self) -> dict[str, Any]:
        return json.loads(self._get("/server_info")[1])

    def generate(self, prompt: list[int], max_tokens: int) -> Timing:
        """One streamed completion, greedy, end of text ignored."""
        body = json.dumps({"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0,
                           "ignore_eos": True, "stream": True, "return_token_ids": True})
        began = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {response.read()!r}")
        first, tokens = 0.0, []
        for line in response:
            if line.startswith(b"data: {"):
                choices = json.loads(line[6:])["choices"]
                fresh = choices[0].get("token_ids") or [] if choices else []
                if fresh and not tokens:
                    first = time.perf_counter() - began
                tokens += fresh
                last = time.perf_counter() - began
        connection.close()
        if len(tokens) != max_tokens:
            raise RuntimeError(f"{len(tokens)} tokens instead of {max_tokens}")
        return Timing(first, last, tokens)

    @property
    def model(self) -> str:
        return json.loads(self._get("/v1/models")[1])["data"][0]["id"]

    def close(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
