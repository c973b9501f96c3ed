"""`isthmus top`: what it makes of a server's numbers, over a pipe, as JSON and in a terminal."""
from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import socketserver
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import contextmanager, suppress
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from isthmus.core.cli import backends, top
from isthmus.core.cli.main import main
from isthmus.core.cli.top import Figures, figures, lines, sparkline
from isthmus.core.errors import RequestError

from .checkpoints import tiny_llama_gguf
from .effort import SOON
from .test_cli_serve import Serving

COST = 15  # seconds

STATS = {"running": 2, "waiting": 1, "steps": 10, "generated_tokens": 100, "prompt_tokens": 1000, "preemptions": 3,
         "finish_reasons": {"stop": 4, "length": 1}, "hit_rate_window": 0.25, "hit_rate_total": 0.5}
PAGES = {"requests": 10, "cache_used": 20, "cache_idle": 30, "free": 40, "quarantine": 0}


def answer(time=100.0, started=5, **changes):
    """What /server_info says. changes: of the engine's numbers; `none`: it gives none."""
    stats = {} if changes.pop("none", False) else {**STATS, **changes}
    return {"version": "1", "served_model_name": "tiny", "time": time, "started": started, "running": 0,
            "health": {"ok": True, "reason": ""}, "info": {"platform": "null"}, "stats": stats,
            "pages": PAGES if stats else {},
            "step_seconds": {"schedule": .1, "device": .7, "finish": .2} if stats else {}}


def later(**changes):
    found = answer(time=102.0, **{"steps": 30, "generated_tokens": 400, "prompt_tokens": 1001, **changes})
    found["step_seconds"] = {"schedule": .2, "device": 2.6, "finish": .4}
    return found


@contextmanager
def stub(*answers, key=None):
    """A server that gives these answers in turn, the last for ever; an int is a status. Yields (address, paths)."""
    paths, left = [], list(answers)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            paths.append(self.path)
            found = left[0] if len(left) == 1 else left.pop(0)
            status = found if isinstance(found, int) else 200
            if key and self.headers["Authorization"] != f"Bearer {key}":
                status, found = 401, 401
            body = {"error": {"message": "the model is loading: weights", "code": "loading" if status == 503 else None}}
            data = json.dumps(body if isinstance(found, int) else found).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_port}", paths
    finally:
        server.shutdown()
        server.server_close()


def test_figures_of_two_readings():
    page = figures("http://x", answer(), later())
    assert (page.model, page.platform, page.ok) == ("tiny", "null", True)
    assert (page.running, page.waiting, page.finished, page.preemptions) == (2, 1, 5, 3)
    assert (page.generated_per_s, page.prompt_per_s, page.steps_per_s) == (150.0, 0.5, 10.0)
    assert page.step == pytest.approx({"schedule": .005, "device": .095, "finish": .01})
    assert (page.hit_rate, page.hit_rate_total, page.pages) == (0.25, 0.5, PAGES)


@pytest.mark.parametrize("before,now", [
    (answer(), later() | {"started": 6}), (answer(steps=31, generated_tokens=500, prompt_tokens=2000), later()),
    (answer(none=True), later()), (answer(), later() | {"time": 100.0})])
def test_a_server_that_was_started_anew_has_no_rates_yet(before, now):
    page = figures("http://x", before, now)
    assert (page.generated_per_s, page.prompt_per_s, page.steps_per_s) == (None, None, None)


def test_without_steps_there_is_no_time_of_one():
    assert figures("http://x", answer(), answer(time=101.0)).step is None


def test_an_engine_without_numbers_is_told():
    page = figures("http://x", answer(), answer(none=True) | {"health": {"ok": False, "reason": "it is gone"}})
    text = "\n".join(lines(page))
    assert "NOT HEALTHY: it is gone" in text and "gives no numbers" in text and "tokens/s" not in text
    assert json.loads(json.dumps(asdict(page)))["running"] is None


def test_a_page():
    page = Figures("http://x", "tiny", "null", 3723.0, True, "", 2, 1, 1234567, 3, 1500.4, 0.5, 10.0, .25, .5, PAGES,
                   {"schedule": .001, "device": .0085, "finish": .0005})
    assert lines(page, plain=True) == [
        "tiny on null at http://x, up 1 h 2 min, healthy",
        "  requests    2 running, 1 waiting, 1,234,567 finished, 3 preempted",
        "  tokens/s    1,500 generated, 0.5 of prompts",
        "  hit rate    25.0% of the last prompts' tokens, 50.0% since start",
        "  pages       requests      ##...................... 10.0%  10",
        "              cache in use  #####................... 20.0%  20",
        "              cache idle    #######................. 30.0%  30",
        "              free          ##########.............. 40.0%  40",
        "              quarantine    ........................  0.0%  0",
        "  step        10.00 ms, 10.0 a second",
        "              schedule      ##...................... 10.0%  1.00 ms",
        "              device        ####################.... 85.0%  8.50 ms",
        "              finish        #.......................  5.0%  0.50 ms"]
    assert lines(page, deque([0.0, 5.0, 10.0]))[2].endswith("of prompts   ▄█")


def test_sparklines():
    assert sparkline(deque([0, 1, 4, 8])) == " ▁▄█" and sparkline(deque([0, 8]), plain=True) == " @"
    assert sparkline(deque([0, 0])) == "  " and sparkline(deque()) == ""


@pytest.mark.parametrize("seconds,text", [(-1, "0 s"), (59, "59 s"), (61, "1 min 1 s"), (7260, "2 h 1 min"),
                                          (90000, "1 d 1 h")])
def test_durations(seconds, text):
    assert top.duration(seconds) == text


def run_main(capsys, *words, monkeypatch=None) -> tuple[int, str, str]:
    code = main(["top", *words])
    out, err = capsys.readouterr()
    return code, out, err


def test_once_as_json(capsys):
    with stub(answer(), later()) as (address, paths):
        code, out, _ = run_main(capsys, "--url", address, "--once", "--json", "--interval", "0.1")
    page = json.loads(out)
    assert code == 0 and page["generated_per_s"] == 150 and page["url"] == f"http://{address}"
    assert paths == ["/server_info", "/server_info"]


def test_once_waits_for_numbers_newer_than_the_first_but_not_for_ever(capsys):
    with stub(answer(), answer(), answer(), later()) as (address, paths):
        _, out, _ = run_main(capsys, "--url", address, "--once", "--json", "--interval", "0.1")
    assert json.loads(out)["generated_per_s"] == 150 and len(paths) == 4
    with stub(answer()) as (address, paths):
        code, out, _ = run_main(capsys, "--url", address, "--once", "--interval", "0.1")
    assert code == 0 and "- generated" in out and "none has ended since" in out and len(paths) == 2 + top.NEWER
    with stub(answer(none=True)) as (address, paths):
        _, out, _ = run_main(capsys, "--url", address, "--once", "--interval", "0.1")
    assert "gives no numbers" in out and len(paths) == 2


def test_a_url_may_have_a_path_and_v1(capsys):
    with stub(answer(), later()) as (address, paths):
        assert run_main(capsys, "--url", f"http://{address}/deep/v1", "--once", "--interval", "0.1")[0] == 0
    assert set(paths) == {"/deep/server_info"}


def test_once_for_people_over_a_pipe(capsys, monkeypatch):
    with stub(answer(), later()) as (address, _):
        host, port = address.split(":")
        code, out, _ = run_main(capsys, "--host", host, "--port", port, "--once", "--interval", "0.1")
    assert code == 0 and out.startswith(f"tiny on null at http://{address}, up ") and "\x1b" not in out
    assert "150 generated" in out and "95.0 ms" in out.replace("95.00", "95.0")


def test_the_key_is_sent_and_asked_for(capsys, monkeypatch):
    with stub(answer(), later(), key="sekret") as (address, _):
        url = ["--url", address, "--once", "--interval", "0.1"]
        code, _, err = run_main(capsys, *url)
        assert code == 2 and "asks for an API key: give it as --api-key or ISTHMUS_API_KEY" in err
        assert run_main(capsys, *url, "--api-key", "wrong")[0] == 2
        assert run_main(capsys, *url, "--api-key", "sekret, other")[0] == 0
        monkeypatch.setenv("ISTHMUS_API_KEY", "sekret")
        assert run_main(capsys, *url)[0] == 0


@pytest.mark.parametrize("answers,reason", [
    ((503,), "the model is loading: weights"), ((404,), "this is no Isthmus server"),
    (({"hello": "world"},), "this is no Isthmus server"), (([],), "this is no Isthmus server")])
def test_once_fails_with_the_reason(capsys, answers, reason):
    with stub(*answers) as (address, _):
        code, out, err = run_main(capsys, "--url", address, "--once", "--interval", "0.1")
    assert code == 2 and reason in err and not out


def test_nobody_there(capsys):
    with stub(answer()) as (address, _):
        pass
    code, _, err = run_main(capsys, "--url", address)
    assert code == 2 and "no server answers" in err and "isthmus serve" in err


@pytest.mark.parametrize("interval", ("0", "-1", "nan", "99999"))
def test_an_interval_out_of_range(capsys, interval):
    code, _, err = run_main(capsys, "--interval", interval)
    assert code == 2 and "between 0.1 and 3600" in err


def test_a_server_that_loads_or_goes_away_for_a_while_is_waited_for(monkeypatch):
    with stub(503, answer(), later(), 500, answer(time=104.0), later() | {"time": 106.0}) as (address, _):
        pages = top.Source(address, None, 0.1).pages()
        first = [next(pages) for _ in range(4)]
    assert first[0] == "the model is loading: weights" and first[2] == "the model is loading: weights"
    assert isinstance(first[1], Figures) and isinstance(first[3], Figures)


def test_a_server_that_refuses_at_first_is_not_waited_for_in_a_pipe():
    with stub(500) as (address, _):
        with pytest.raises(RequestError):
            next(top.Source(address, None, 0.1).pages())
        assert isinstance(next(top.Source(address, None, 0.1).pages(patient=True)), str)


def test_without_unicode_bars_are_ascii(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert not top.can_draw()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))
    assert top.can_draw()


# ---- whoever answers there is not trusted

ESCAPES = "\x1b]0;pwn\x07\x1b[2J\x9b1m\nhealthy"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n"


@contextmanager
def sender(*pieces: bytes, last: bytes = b""):
    """A server that answers with these bytes, and then with `last`, slowly, until it is left (or for ever)."""
    over = threading.Event()

    class Handler(socketserver.BaseRequestHandler):
        def handle(self):
            self.request.recv(65536)
            with suppress(OSError):
                for piece in pieces:
                    self.request.sendall(piece)
                while last and not over.wait(0.05):
                    self.request.sendall(last)

    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        over.set()
        server.shutdown()
        server.server_close()


def without(field: str) -> dict:
    return {name: value for name, value in answer().items() if name != field}


def with_text(path: str) -> dict:
    """Something else than a number there."""
    found = json.loads(json.dumps(answer()))
    *outer, name = path.split(".")
    place = found
    for part in outer:
        place = place[part]
    place[name] = "x"
    return found


@pytest.mark.parametrize("found", [
    *map(without, ("served_model_name", "time", "started", "health", "info", "stats", "pages", "step_seconds")),
    *map(with_text, ("time", "started", "health", "health.ok", "info", "stats", "stats.running", "stats.steps",
                     "stats.finish_reasons", "stats.finish_reasons.stop", "stats.hit_rate_total", "pages",
                     "pages.free", "step_seconds", "step_seconds.device")),
    answer(time=float("nan")), answer(time=0), answer(started=1e308), answer(steps=10**30), answer(running=True),
    answer(waiting=[]), answer() | {"served_model_name": None}, None, "x", 5,
    answer() | {"pages": dict.fromkeys(map(str, range(99)), 1)}])
def test_an_answer_of_another_shape_is_no_server_of_ours(capsys, found):
    with sender(HEAD, json.dumps(found).encode()) as address:
        for words in ([], ["--json"]):
            code, out, err = run_main(capsys, "--url", address, "--once", "--interval", "0.1", *words)
            assert code == 2 and "this is no Isthmus server" in err and len(err.splitlines()) == 1 and not out


@pytest.mark.parametrize("body", [b"", b"[" * 100_000, b"\xff\x00", b'{"stats":' + b"9" * 5000 + b"}", b"<html>"])
def test_what_is_no_json_is_no_server_of_ours(capsys, body):
    with sender(HEAD, body) as address:
        code, out, err = run_main(capsys, "--url", address, "--once", "--interval", "0.1")
    assert code == 2 and "this is no Isthmus server" in err and len(err.splitlines()) == 1 and not out


def test_an_answer_without_end_is_read_to_a_limit(capsys, monkeypatch):
    monkeypatch.setattr(backends, "MAX_ANSWER", 10_000)
    with sender(HEAD, b" " * 20_000, last=b" ") as address:
        code, _, err = run_main(capsys, "--url", address, "--once", "--interval", "0.1")
    assert code == 2 and "answers with more than 10000 bytes" in err


@pytest.mark.parametrize("sent", [HEAD, HEAD.replace(b"\r\n\r\n", b"\r\nContent-Length: 1000000\r\n\r\n"), HEAD[:30]])
def test_an_answer_that_drips_is_left(capsys, monkeypatch, sent):
    """Also one whose head does: each byte comes in time."""
    monkeypatch.setattr(top, "ANSWER_S", 0.5)
    with sender(sent, last=b" ") as address:
        code, _, err = run_main(capsys, "--url", address, "--once", "--interval", "0.1")
    assert code == 2 and f"{address} gave no whole answer in 0.5 s" in err


def test_names_of_a_server_steer_no_terminal(capsys):
    odd = {"served_model_name": ESCAPES, "info": {"platform": ESCAPES}, "health": {"ok": False, "reason": ESCAPES},
           "pages": {ESCAPES: 1}}
    before = answer() | odd | {"step_seconds": {ESCAPES: 0.1}}
    with stub(before, later() | odd | {"step_seconds": {ESCAPES: 0.2}}) as (address, _):
        for words in ([], ["--json"]):
            code, out, _ = run_main(capsys, "--url", address, "--once", "--interval", "0.1", *words)
            assert code == 0 and "pwn" in out and all(c.isprintable() for c in out.replace("\n", ""))
            assert not any(line.startswith("healthy") for line in out.splitlines())
    for status in (500, 401, 404):
        body = json.dumps({"error": {"message": ESCAPES}}).encode()
        with sender(HEAD.replace(b"200 OK", b"%d NO" % status), body) as address:
            said = next(top.Source(address, None, 0.1).pages(patient=True)) if status == 500 else ""
            code, _, err = run_main(capsys, "--url", address, "--once", "--interval", "0.1")
        assert code == 2 and all(c.isprintable() or c == "\n" for c in err + said)


def test_numbers_that_do_not_agree_fill_no_memory():
    page = figures("http://x", answer(), later() | {"pages": {"free": 2**62, "requests": 1 - 2**62},
                                                    "step_seconds": {"device": 0.0, "new": 1e15}})
    assert set(page.step) == {"device"} and max(map(len, lines(page, deque([0.0, 1.0])))) < 200


# ---- with a real server


@pytest.fixture(scope="module")
def serving(tmp_path_factory):
    folder = tmp_path_factory.mktemp("top")
    with Serving(str(tiny_llama_gguf(folder / "tiny.gguf")), "--in-process", temporary=folder, delay_ms=100) as server:
        yield server


def command(server, *words) -> list[str]:
    return [sys.executable, "-c", "import sys; from isthmus.core.cli.main import main; sys.exit(main())", "top",
            "--url", server.address, "--interval", "0.3", *words]


def test_pages_of_a_real_server_over_a_pipe(serving):
    stream = serving.stream(240)  # takes 24 s
    process = subprocess.Popen(command(serving, "--json"), stdout=subprocess.PIPE, text=True)
    try:
        page = json.loads(process.stdout.readline())
        while page["running"] == 1 and not page["generated_per_s"]:  # no step ended while it looked
            page = json.loads(process.stdout.readline())
    finally:
        process.send_signal(signal.SIGINT)
        process.stdout.close()
        assert process.wait(SOON) == 0
    stream.close()
    assert page["running"] == 1 and page["platform"] == "null" and page["ok"] is True
    assert page["generated_per_s"] > 0 and page["steps_per_s"] > 0
    assert set(page["step"]) == {"schedule", "device", "finish"} and page["step"]["device"] > 0.09  # 100 ms a step
    assert sum(page["pages"].values()) == json.loads(serving.ask("GET", "/server_info").read())["stats"]["pages_total"]


def test_the_page_in_a_terminal(serving):
    """It renews itself in place, and Ctrl-C leaves it as it was."""
    own, theirs = pty.openpty()
    process = subprocess.Popen(command(serving), stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
                               env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"})
    os.close(theirs)
    seen, end = b"", time.monotonic() + SOON
    while len(re.findall(rb"tokens/s", seen)) < 2 and time.monotonic() < end:
        if select.select([own], [], [], 0.2)[0]:
            seen += os.read(own, 65536)
    process.send_signal(signal.SIGINT)
    with suppress(OSError):  # the terminal is gone with its only user
        while time.monotonic() < end:
            seen += os.read(own, 65536)
    os.close(own)
    text = seen.decode(errors="replace")
    assert process.wait(SOON) == 0
    assert text.count("tokens/s") >= 2 and "on null at http://" in text and "Ctrl-C leaves" in text
    assert "\x1b[?1049h" in text and "\x1b[?1049l" in text and "Traceback" not in text
