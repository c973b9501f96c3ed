"""A real server for tests, on the platform without a model."""
from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import sys

import psutil

from .effort import SOON


class Serving:
    """`isthmus serve` in a process of its own, from its ready banner on. `before` is Python that runs there first.
    delay_ms: None where another platform is named."""

    def __init__(self, *words: str, temporary, delay_ms=5, before="", **environment):
        null = () if delay_ms is None else ("--platform", "null", "--platform-option", f"delay_ms={delay_ms}")
        code = f"import sys\n{before}\nfrom isthmus.core.cli.main import main\nsys.exit(main())"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, "serve", *words, "--port", "0", *null],
            stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "TMPDIR": str(temporary), **environment})

    def __enter__(self):
        self.lines = []
        self.wait_for(" is ready after ")
        self.address = re.search(r"http://([\w.:]+)", self.lines[-1])[1]
        self.children = psutil.Process(self.process.pid).children()
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.stderr.close()
        self.process.stdout.close()
        self.process.wait()

    def wait_for(self, words: str) -> None:
        while not self.lines or words not in self.lines[-1]:
            self.lines.append(self.process.stderr.readline())
            assert self.lines[-1], "".join(self.lines)

    def rest(self) -> list[str]:
        """What it still printed, once it has ended."""
        return self.process.stderr.readlines()

    def ask(self, method: str, path: str, body=None, **headers: str) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(self.address, timeout=SOON)
        connection.request(method, path, body and json.dumps(body), {"Content-Type": "application/json", **headers})
        return connection.getresponse()

    def stream(self, max_tokens: int) -> http.client.HTTPResponse:
        response = self.ask("POST", "/v1/completions", {"prompt": "hello", "max_tokens": max_tokens, "stream": True,
                                                        "temperature": 0, "ignore_eos": True})
        assert response.readline().startswith(b"data: ")
        return response
