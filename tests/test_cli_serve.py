"""`isthmus serve` as its clients, its probes and its supervisor see it, on the platform without a model."""
from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from isthmus.core import discovery
from isthmus.core.cli import serve
from isthmus.core.cli.main import main
from isthmus.core.cli.serve import NEXT_PORTS, Gate, Loading, listen
from isthmus.core.errors import ConfigError
from starlette.testclient import TestClient

from .checkpoints import tiny_llama_gguf
from .effort import SOON, until
from .fake_client import make_app
from .serving import Serving

COST = 60  # seconds


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(tiny_llama_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf"))


def test_without_a_driver_that_is_said_before_the_port_is_tried(monkeypatch, capsys):
    monkeypatch.setattr(serve, "listen", lambda *_: pytest.fail("the port was tried"))
    monkeypatch.setattr(discovery, "reason_against", lambda name: f"no driver of {name}")
    assert main(["serve", "--platform=cuda"]) == 2
    assert capsys.readouterr().err == "isthmus: platform 'cuda': no driver of cuda\n"


@pytest.mark.parametrize("option, words", [("graphs=banana", "one of background, first"), ("=x", "form key=value")])
def test_a_bad_platform_option_is_refused_before_anything_else(option, words, monkeypatch, capsys):
    monkeypatch.setattr(serve, "run", lambda *_: pytest.fail("the command was run"))
    assert main(["serve", "--platform=cuda", "--platform-option", option]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"isthmus: --platform-option '{option}'") and words in error and error.count("\n") == 1


def test_a_port_in_use_names_the_next_free_one():
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            listen("127.0.0.1", port)
        free = int(str(caught.value).rsplit(" ", 1)[1])
        assert str(caught.value) == f"port {port} is in use on 127.0.0.1; {free} is free: --port {free}"
        assert port < free <= port + NEXT_PORTS or port > 65535 - NEXT_PORTS
        listen("127.0.0.1", free).close()
    with pytest.raises(ConfigError, match="cannot listen on --host 203.0.113.1"):
        listen("203.0.113.1", 0)


def test_wrong_names_are_told_before_the_port(capsys):
    with listen("127.0.0.1", 0) as taken:
        port = str(taken.getsockname()[1])
        for words in (["/no/such.gguf"], ["smolm2"], ["--lora", "x=./no-such"]):
            assert main(["serve", *words, "--port", port]) == 2
            said = capsys.readouterr().err
            assert "in use" not in said and ("no such" in said or "did you mean" in said), said


# ---- how it ends


class Ending:
    """An engine client as far as the end of a server needs it."""

    waiting, hung = 0, False

    def __init__(self, dies_in_drain=False):
        self.died, self.drained, self.dies_in_drain = asyncio.Event(), [], dies_in_drain

    def health(self):
        return not self.died.is_set(), "the step went wrong"

    async def drain(self, timeout):
        self.drained.append(timeout)
        if self.dies_in_drain:
            self.died.set()
        return True


def end_of(client, happens, monkeypatch, dead_s=0.2) -> tuple[int, float]:
    """Exit code, and seconds from what `happens(client, signals)` to the end."""
    monkeypatch.setattr(serve, "DEAD_S", dead_s)

    async def body():
        signals = SimpleNamespace(first=asyncio.Event(), second=asyncio.Event())
        end = asyncio.ensure_future(serve.until_end(client, 30, signals))
        await asyncio.sleep(0)
        assert not end.done()
        happens(client, signals)
        began = time.monotonic()
        return await asyncio.wait_for(end, SOON), time.monotonic() - began
    return asyncio.run(body())


def test_a_dead_engine_ends_the_server_with_code_1_after_a_while(monkeypatch, capsys):
    assert serve.DEAD_S == 5
    client = Ending()
    code, seconds = end_of(client, lambda client, signals: client.died.set(), monkeypatch)
    assert code == 1 and 0.2 <= seconds and client.drained == []
    assert capsys.readouterr().err == (
        "isthmus: the engine is gone: the step went wrong. The server ends with exit code 1 in 0.2 s\n")


def test_an_engine_that_hung_ends_the_server_with_a_code_of_its_own(monkeypatch, capsys):
    client = Ending()
    client.hung = True
    assert end_of(client, lambda client, signals: client.died.set(), monkeypatch)[0] == serve.HUNG == 71
    assert "exit code 71" in capsys.readouterr().err


def test_a_signal_ends_a_server_without_an_engine_at_once_but_still_with_code_1(monkeypatch):
    def both(client, signals):
        client.died.set()
        signals.first.set()
    assert end_of(Ending(), both, monkeypatch, dead_s=10 * SOON)[0] == 1


def test_a_signal_drains_and_an_engine_that_dies_meanwhile_is_told(monkeypatch, capsys):
    client = Ending()
    assert end_of(client, lambda client, signals: signals.first.set(), monkeypatch)[0] == 0
    assert client.drained == [30] and capsys.readouterr().err == ""
    assert end_of(Ending(True), lambda client, signals: signals.first.set(), monkeypatch)[0] == 1
    assert capsys.readouterr().err == "isthmus: the engine is gone: the step went wrong\n"


# ---- the whole


@pytest.mark.parametrize("words", [[], ["--in-process"]])
def test_serve_from_loading_to_drain(tiny, words, tmp_path):
    with Serving(tiny, *words, temporary=tmp_path, delay_ms=30) as server:
        assert len(server.children) == (0 if words else 2)
        assert server.ask("GET", "/health").status == 200
        stream = server.stream(200)  # takes 6 s
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("1 running request may take 30 s to finish")
        assert server.ask("POST", "/v1/completions", {"prompt": "hello"}).status == 503
        rest = stream.read()
        assert b"[DONE]" in rest and b'"finish_reason":"length"' in rest
        assert server.process.wait(SOON) == 0
        said = server.rest()
        assert said[-1] == "isthmus: stopped\n"
        assert any("INFO isthmus.request: POST /v1/completions 200 id=cmpl-" in line for line in said)


def test_the_log_is_ours_at_every_level(tiny, tmp_path):
    with Serving(tiny, "--in-process", "--log-level", "debug", temporary=tmp_path) as server:
        assert server.ask("GET", "/health").status == 200
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(SOON) == 0
        said = server.rest()
        assert any("DEBUG isthmus.request: GET /health 200" in line for line in said)
        assert not any("uvicorn" in line for line in [*server.lines, *said])
        assert not any(child.is_running() for child in server.children)
        assert list(tmp_path.iterdir()) == []


def test_a_second_signal_ends_it_at_once(tiny, tmp_path):
    with Serving(tiny, temporary=tmp_path, delay_ms=100) as server:
        stream = server.stream(240)  # takes 24 s
        server.process.send_signal(signal.SIGINT)
        server.wait_for("a second signal ends them now")
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(SOON) == 0
        said = stream.read()  # it did not wait for the request
        assert b'"finish_reason":"length"' not in said and b'"code":"server_stopping"' in said and b"engine" not in said
        assert not any(child.is_running() for child in server.children)


def test_whoever_waits_for_a_stopped_worker_is_answered_at_the_end(tiny, tmp_path):
    with Serving(tiny, temporary=tmp_path) as server:
        next(c for c in server.children if "scheduler" in " ".join(c.cmdline())).suspend()
        assert server.ask("GET", "/server_info").status == 200  # the last figures: they wait for nobody
        answers = []
        connection = http.client.HTTPConnection(server.address, timeout=SOON)
        connection.request("POST", "/flush_cache")
        waiting = threading.Thread(target=lambda: answers.append(connection.getresponse()))
        waiting.start()
        time.sleep(1.5)
        assert not answers
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(SOON) == 0
        waiting.join(SOON)
        assert answers[0].status == 503, answers[0].read()
        assert not any("Traceback" in line for line in server.rest())


# ---- JSON


def records(lines: list[str]) -> list[dict]:
    """What a log collector reads."""
    found = [json.loads(line) for line in lines]
    assert all({"time", "level", "logger", "message"} <= record.keys() for record in found)
    return found


@pytest.mark.parametrize("words", [[], ["--in-process"]])
def test_with_json_logging_every_line_is_an_object(tiny, words, tmp_path):
    """Also what is no log message: warnings and choices at start, progress, the banner, the end."""
    with Serving(tiny, *words, "--log-format", "json", temporary=tmp_path, before="import warnings\n" + WARNING,
                 delay_ms=30, ISTHMUS_DEBUG="1", ISTHMUS_POTR="1") as server:
        server.stream(3).read()
        stream = server.stream(200)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("may take 30 s to finish")
        stream.read()
        assert server.process.wait(SOON) == 0
        found = records([*server.lines, *server.rest()])
        assert server.process.stdout.read() == ""
    said = {record["message"]: record for record in found}
    banner = next(record for message, record in said.items() if " is ready after " in message)
    assert banner["message"].startswith("isthmus ") and banner["level"] == "info"
    assert banner["details"][0].startswith("model ") and any("curl http" in line for line in banner["details"])
    for start in ("ISTHMUS_POTR", "--log-format json", "stopping; 1 running request", "stopped", "load weights",
                  "POST /v1/completions 200"):
        assert any(message.startswith(start) for message in said), start
    assert any("odd" in message for message in said)


WARNING = """
import isthmus.core.cli.serve as serve
plain = serve.run
serve.run = lambda *given: (warnings.warn("odd"), plain(*given))[1]
"""


@pytest.mark.parametrize("words, reason", [
    (["--max-model-len", "99999"], "99999"), (["--kv-cache-memory", "1KiB"], "too few to serve"),
    (["--port", "TAKEN"], "is in use"), (["--model", "/no/such"], "/no/such")])
def test_with_json_logging_a_failure_is_told_in_objects(tiny, words, reason, tmp_path):
    """With the tracebacks that ISTHMUS_DEBUG promises, the workers' too."""
    with listen("127.0.0.1", 0) as taken:
        words = [word.replace("TAKEN", str(taken.getsockname()[1])) for word in words]
        done = subprocess.run(
            [sys.executable, "-m", "isthmus.core.cli.main", "serve", "--model", tiny, "--platform", "null", "--port",
             "0", "--log-format", "json", *words], capture_output=True, text=True, timeout=SOON,
            env={**os.environ, "TMPDIR": str(tmp_path), "ISTHMUS_DEBUG": "1"})
    found = records(done.stderr.splitlines())
    assert done.returncode == 2 and done.stdout == ""
    assert found[-1]["level"] == "error" and reason in found[-1]["message"]
    assert any("Traceback" in record.get("error", "") for record in found)


def test_with_json_logging_uncaught_errors_are_objects(tmp_path):
    code = """
import logging, sys, threading, warnings
from isthmus.core.config import ServerSettings
from isthmus.core.logs import announce, set_up_logging
set_up_logging(ServerSettings(log_format="json", log_level="error"))
announce("isthmus: at every level")
class Odd:
    def __del__(self):
        raise KeyError("in del")
Odd()
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
raise OSError("at the end")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=SOON)
    found = records(done.stderr.splitlines())
    assert [record["message"] for record in found] == [
        "at every level", "KeyError: 'in del'", "ZeroDivisionError: division by zero", "OSError: at the end"]
    assert all("Traceback" in record["error"] for record in found[1:]) and done.returncode == 1


WAITS = "import isthmus.core.cli.serve as serve; serve.DEAD_S = 8\n"


@pytest.mark.parametrize("form", ["three processes", "one process"])
def test_when_the_engine_dies_everybody_is_told_and_the_server_ends(form, tiny, tmp_path):
    words, before = (["--restart=0"], WAITS) if form == "three processes" else (["--in-process"], WAITS + (
        "import os, isthmus.core.engine as engine\nstep = engine.EngineCore.step\n"
        "def dying(self):\n"
        f"    if os.path.exists({str(tmp_path / 'fire')!r}): raise OSError('the device is on fire')\n"
        "    return step(self)\n"
        "engine.EngineCore.step = dying"))
    with Serving(tiny, *words, temporary=tmp_path, before=before, delay_ms=30) as server:
        stream = server.stream(240)
        began = time.monotonic()
        if form == "three processes":
            next(c for c in server.children if "scheduler" in " ".join(c.cmdline())).kill()
            reason = b"the scheduler process was killed by signal 9"
        else:
            (tmp_path / "fire").touch()
            reason = b"the device is on fire"
        error = stream.read()
        assert server.process.poll() is None, "who waits is told at once"
        assert reason in error and b"engine_dead" in error
        for path in ("/health", "/ready"):
            answer = server.ask("GET", path)
            assert answer.status == 503 and reason in answer.read()
        refused = server.ask("POST", "/v1/completions", {"prompt": "hello"})
        assert refused.status == 503 and json.loads(refused.read())["error"]["code"] == "engine_dead"
        assert server.process.wait(SOON) == 1
        assert time.monotonic() - began > 7.9, "probes have their time"
        told = [line for line in server.rest() if "the engine is gone" in line]
        assert len(told) == 1 and told[0].startswith("isthmus: the engine is gone: ") and "exit code 1" in told[0]
        assert not any(child.is_running() for child in server.children)


def ask_gate(path: str) -> tuple[int, list, dict]:
    sent = []

    async def send(message):
        sent.append(message)
    scope = {"type": "http", "path": path, "method": "GET", "headers": []}
    asyncio.run(Gate(Loading("load weights", 2, 5))(scope, None, send))
    return sent[0]["status"], sent[0]["headers"], json.loads(sent[1]["body"])


def test_until_the_model_is_loaded_the_answer_is_503_with_the_progress():
    status, headers, body = ask_gate("/v1/completions")
    assert status == 503 and (b"retry-after", b"1") in headers
    assert body["error"]["message"].endswith("load weights 40%")
    assert body["progress"] == {"stage": "load weights", "done": 2, "total": 5}


def test_answers_have_one_form_while_the_model_loads_and_when_the_engine_is_dead():
    made = make_app()
    made.client.fail("gone")
    with TestClient(made.app) as http:
        for path in ("/health", "/ready"):
            dead = http.get(path)
            status, _, loading = ask_gate(path)
            assert dead.status_code == status == 503
            assert loading.keys() - {"progress"} == dead.json().keys() == {"status", "reason"}
        dead = http.post("/v1/completions", json={"prompt": "x"})
        status, headers, loading = ask_gate("/v1/completions")
        assert dead.status_code == status == 503 and b"retry-after" in dict(headers)
        assert "retry-after" not in dead.headers, "it does not come back"
        assert dead.json()["error"]["code"] == "engine_dead" and loading["error"]["code"] == "loading"
        assert loading["error"].keys() == dead.json()["error"].keys()


def test_a_full_server_says_so_and_when_to_come_again(tiny, tmp_path):
    """One request runs, one waits until it has waited too long, one more is refused, one runs too long."""
    words = ("--max-running-requests=1", "--max-queued-requests=1", "--waiting-timeout=4", "--running-timeout=9")
    with Serving(tiny, *words, temporary=tmp_path, delay_ms=100) as server:
        running = server.stream(200)
        answers: dict[str, http.client.HTTPResponse] = {}
        waiting = threading.Thread(target=lambda: answers.update(late=server.ask(
            "POST", "/v1/completions", {"prompt": "hello", "max_tokens": 200, "ignore_eos": True})))
        waiting.start()
        until(lambda: json.loads(server.ask("GET", "/server_info").read())["stats"]["waiting"] == 1)
        refused = server.ask("POST", "/v1/completions", {"prompt": "hello"})
        assert refused.status == 429 and int(refused.headers["Retry-After"]) >= 1
        assert "the limit is 1" in json.loads(refused.read())["error"]["message"]
        waiting.join(SOON)
        assert answers["late"].status == 503 and int(answers["late"].headers["Retry-After"]) >= 1
        assert "--waiting-timeout" in json.loads(answers["late"].read())["error"]["message"]
        assert b"--running-timeout" in running.read(), "an event of its stream"
        assert server.ask("GET", "/health").status == 200
        again = server.ask("POST", "/v1/completions", {"prompt": "hello", "max_tokens": 1})
        assert again.status == 200
