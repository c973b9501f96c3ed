"""`isthmus serve` as its clients, its probes and its supervisor see it, on the platform without a model."""
from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from isthmus.core.cli.serve import Gate, listen
from isthmus.core.errors import ConfigError

from .checkpoints import tiny_llama_gguf


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(tiny_llama_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf"))


def test_a_port_in_use_names_a_free_one():
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} is in use on 127.0.0.1; [0-9]+ is free: --port [0-9]+"):
            listen("127.0.0.1", port)
    with pytest.raises(ConfigError, match="cannot listen on --host 203.0.113.1"):
        listen("203.0.113.1", 0)


class Serving:
    """`isthmus serve` in a process of its own, from its ready banner on."""

    def __init__(self, *words: str, temporary, delay_ms=5):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "isthmus.core.cli.main", "serve", *words, "--platform", "null", "--port", "0",
             "--platform-option", f"delay_ms={delay_ms}"], stderr=subprocess.PIPE, text=True,
            env={**os.environ, "TMPDIR": str(temporary)})

    def __enter__(self):
        self.lines = []
        self.wait_for(" is ready after ")
        self.address = self.lines[-1].split("http://")[1].strip()
        self.children = psutil.Process(self.process.pid).children()
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.stderr.close()
        self.process.wait()

    def wait_for(self, words: str) -> None:
        while not self.lines or words not in self.lines[-1]:
            self.lines.append(self.process.stderr.readline())
            assert self.lines[-1], "".join(self.lines)

    def ask(self, method: str, path: str, body=None) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(self.address, timeout=20)
        connection.request(method, path, body and json.dumps(body), {"Content-Type": "application/json"})
        return connection.getresponse()

    def stream(self, max_tokens: int) -> http.client.HTTPResponse:
        response = self.ask("POST", "/v1/completions", {"prompt": "hello", "max_tokens": max_tokens, "stream": True,
                                                        "temperature": 0, "ignore_eos": True})
        assert response.readline().startswith(b"data: ")
        return response


@pytest.mark.parametrize("words", [[], ["--in-process"]])
def test_serve_from_loading_to_drain(tiny, words, tmp_path):
    with Serving(tiny, *words, temporary=tmp_path) as server:
        assert len(server.children) == (0 if words else 2)
        assert server.ask("GET", "/health").status == 200
        stream = server.stream(100)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("1 running requests have 30 s to finish")
        assert server.ask("POST", "/v1/completions", {"prompt": "hello"}).status == 503
        rest = stream.read()
        assert b"[DONE]" in rest and b'"finish_reason":"length"' in rest
        assert server.process.wait(10) == 0
        assert not any(child.is_running() for child in server.children)
        assert list(tmp_path.iterdir()) == []


def test_a_second_signal_ends_it_at_once(tiny, tmp_path):
    with Serving(tiny, temporary=tmp_path, delay_ms=100) as server:
        stream = server.stream(240)  # takes 24 s
        server.process.send_signal(signal.SIGINT)
        server.wait_for("a second signal ends them now")
        began = time.monotonic()
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(10) == 0
        assert time.monotonic() - began < 5, "it must not wait for the request"
        assert b'"finish_reason":"length"' not in stream.read()
        assert not any(child.is_running() for child in server.children)


def test_a_dead_engine_is_told_to_clients_and_probes(tiny, tmp_path):
    with Serving(tiny, temporary=tmp_path) as server:
        stream = server.stream(240)
        victim = next(c for c in server.children if "scheduler" in " ".join(c.cmdline()))
        victim.kill()
        assert b'"error"' in stream.read()
        health = server.ask("GET", "/health")
        assert health.status == 503 and b"scheduler" in health.read()
        assert server.ask("POST", "/v1/completions", {"prompt": "hello"}).status in (500, 503)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) == 0


def test_until_the_model_is_loaded_the_answer_is_503_with_the_progress():
    sent = []

    async def send(message):
        sent.append(message)
    asyncio.run(Gate(lambda: "the model is loading: load weights 40%")({"type": "http"}, None, send))
    assert sent[0]["status"] == 503 and (b"retry-after", b"1") in sent[0]["headers"]
    assert json.loads(sent[1]["body"])["error"]["message"].endswith("load weights 40%")
