"""What a connection may do before there is a request: over real sockets, with `core.server.connection`."""
from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import httpx
import pytest
import uvicorn
from isthmus.core.server import connection
from isthmus.core.server.connection import MAX_HEAD, Connection, most_connections
from isthmus.core.server.limits import FREE_BODY

from .effort import SOON, until
from .fake_client import drive, make_app

COST = 15  # seconds

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
BODY = json.dumps({"prompt": "x", "max_tokens": 2}).encode()
WHOLE = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


@contextmanager
def running() -> Iterator[SimpleNamespace]:
    made = make_app()
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    made.server = uvicorn.Server(uvicorn.Config(made.app, http=Connection, log_level="error", log_config=None,
                                                timeout_graceful_shutdown=2, timeout_keep_alive=75))
    made.thread = threading.Thread(target=made.server.run, kwargs={"sockets": [sock]}, daemon=True)
    made.thread.start()
    while not made.server.started:
        time.sleep(0.01)
    made.address, made.socket = sock.getsockname(), sock
    yield made
    made.server.should_exit = True
    made.thread.join(SOON)
    sock.close()


@pytest.fixture(scope="module")
def live():
    with running() as made:
        yield made


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(connection, "PATIENCE_S", 0.3)


def connect(live) -> socket.socket:
    client = socket.create_connection(live.address)
    client.settimeout(SOON)
    return client


def talk(live, *pieces: bytes, pause: float = 0.0) -> tuple[bytes, float]:
    """What comes back until the server closes, and after how many seconds."""
    began = time.monotonic()
    with connect(live) as client:
        answer = b""
        try:
            for piece in pieces:
                client.sendall(piece)
                time.sleep(pause)
            while data := client.recv(65536):
                answer += data
        except ConnectionError:
            pass
        return answer, time.monotonic() - began


def error_of(answer: bytes, status: int) -> dict:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status) and b"connection: close" in head
    assert b"content-length: %d\r\n" % len(body) in head + b"\r\n"
    return json.loads(body)["error"]


def some(client: socket.socket) -> bytes:
    data = client.recv(65536)
    assert data, "it was closed"
    return data


def one_answer(client: socket.socket) -> bytes:
    """One answer of a connection that stays open."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += some(client)
    head, _, body = data.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    while len(body) < length:
        body += some(client)
    return head + b"\r\n\r\n" + body


# ---- size

@pytest.mark.parametrize("start", [HEAD, b"GET /", b"", HEAD + b"X: "], ids=["fields", "path", "nothing", "value"])
def test_an_endless_head_is_cut_while_it_is_read(live, start):
    line = b"a" * 1000 if start and not start.endswith(b"\n") else b"x: " + b"a" * 995 + b"\r\n"
    with connect(live) as client:
        sent = 0
        try:
            client.sendall(start)
            for _ in range(200 * MAX_HEAD // len(line)):
                client.sendall(line)
                sent += len(line)
        except ConnectionError:
            pass
    assert sent < 150 * MAX_HEAD, "the kernel's buffers hold a few MB"


def test_an_endless_head_is_answered(live):
    answer, _ = talk(live, HEAD + b"x: " + b"a" * (MAX_HEAD - 1000), b"a" * 2000)
    assert error_of(answer, 431)["code"] == "headers_too_large"


def test_endless_trailers_are_cut(live):
    answer, _ = talk(live, HEAD + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (len(BODY), BODY), b"0\r\n",
                     *[b"x: " + b"a" * 1000 + b"\r\n"] * 66, pause=0.001)
    assert error_of(answer, 431)


def test_heads_and_bodies_of_allowed_size_pass(live):
    big = json.dumps({"prompt": "x", "max_tokens": 2, "user": "u" * 300_000}).encode()
    with connect(live) as client:
        for piece in (HEAD + b"X-Big: " + b"a" * 30_000, b"a" * 30_000,
                      b"\r\nContent-Length: %d\r\n\r\n" % len(big), big):
            client.sendall(piece)
            time.sleep(0.02)
        assert one_answer(client).startswith(b"HTTP/1.1 200")
        for _ in range(3):  # the count begins anew with each request
            client.sendall(HEAD + b"X-Big: " + b"a" * 40_000)
            time.sleep(0.02)
            client.sendall(b"\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY)
            assert one_answer(client).startswith(b"HTTP/1.1 200")


def test_what_is_no_http_is_answered_in_our_form(live):
    answer, _ = talk(live, b"\x16\x03\x01 hello\r\n\r\n")
    assert error_of(answer, 400)["code"] == "invalid_request"


def test_bodies_that_arrive_at_once_are_bounded_together(live, monkeypatch):
    bodies = live.app.state.server.bodies
    monkeypatch.setattr(bodies, "total", 300_000)
    body = json.dumps({"prompt": "x", "max_tokens": 2, "user": "u" * 200_000}).encode()
    big = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
    counted = len(body) - FREE_BODY
    with connect(live) as slow, connect(live) as leaver, connect(live) as other:
        slow.sendall(big[:-1])
        leaver.sendall(big[:-1])
        until(lambda: bodies.held == 2 * (counted - 1))
        other.sendall(big)
        answer = one_answer(other)
        assert answer.startswith(b"HTTP/1.1 503") and b"retry-after: 1\r\n" in answer.lower()
        message = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
        assert "request bodies" in message and "300000" in message
        other.sendall(WHOLE)  # a small one, on the same connection
        assert one_answer(other).startswith(b"HTTP/1.1 200")
        leaver.close()
        until(lambda: bodies.held == counted - 1)
        other.sendall(big)
        assert one_answer(other).startswith(b"HTTP/1.1 200")
        slow.sendall(big[-1:])
        assert one_answer(slow).startswith(b"HTTP/1.1 200")
    assert bodies.held == 0


def test_a_body_counts_until_it_has_been_read_and_not_for_the_length_of_the_answer():
    made = make_app()
    made.client.hold = 1
    bodies = made.app.state.server.bodies
    assert bodies.total == 16 * 2**24
    held = []

    def seen(sent: list[dict]) -> bool:
        held.append(bodies.held)
        return len(sent) > 1

    body = json.dumps({"prompt": "x", "stream": True, "user": "u" * 200_000}).encode()
    asyncio.run(drive(made.app, "/v1/completions", body, seen))
    assert len(held) > 1 and held[-1] == 0


# ---- time

@pytest.mark.parametrize("pieces", [[HEAD], [b"G"], [HEAD + b"Content-Length: 100\r\n\r\n"], [WHOLE[:-1]],
                                    [HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nab"]],
                         ids=["head", "first letter", "no body", "body", "chunk"])
def test_half_a_request_is_not_waited_for(live, impatient, pieces):
    answer, seconds = talk(live, *pieces)
    assert seconds > 0.25 and error_of(answer, 408)["code"] == "request_timeout"
    assert live.client.waiting == 0


def test_a_silent_connection_is_closed(live, impatient):
    answer, seconds = talk(live)
    assert answer == b"" and seconds > 0.25


def test_a_head_letter_by_letter_has_no_more_time(live, impatient):
    sent = 0
    with connect(live) as client, contextlib.suppress(ConnectionError):
        for letter in HEAD + b"X: " + b"a" * 300:
            client.sendall(bytes([letter]))
            sent += 1
            time.sleep(0.1)
    assert sent < 300, "the connection is closed after its time, however busy it looks"


def test_a_body_that_drips_is_not_waited_for(live, impatient):
    """Each piece comes in time, the whole does not."""
    with connect(live) as client:
        client.sendall(HEAD + b"Content-Length: 1000\r\n\r\n")
        for _ in range(1000):
            try:
                client.sendall(b" ")
            except ConnectionError:
                break
            time.sleep(0.02)
        else:
            raise AssertionError("it was waited for to the end")
    until(lambda: live.app.state.server.bodies.held == 0)


def test_a_slow_body_that_goes_on_is_waited_for(live, impatient, monkeypatch):
    monkeypatch.setattr(connection, "PATIENCE_S", 1.5)
    monkeypatch.setattr(connection, "BODY_RATE", 5)
    with connect(live) as client:
        client.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY))
        for i in range(0, len(BODY), 2):  # 2.4 s in all
            time.sleep(0.15)
            client.sendall(BODY[i:i + 2])
        assert one_answer(client).startswith(b"HTTP/1.1 200")


def test_a_long_answer_and_the_pause_after_it_are_not_cut(live, impatient, monkeypatch):
    monkeypatch.setattr(connection, "PATIENCE_S", 1.5)
    monkeypatch.setattr(live.client, "delay", 0.5)
    with connect(live) as client:
        body = json.dumps({"prompt": "x", "max_tokens": 4}).encode()
        client.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert one_answer(client).startswith(b"HTTP/1.1 200")
        time.sleep(2)
        client.sendall(HEALTH)
        assert one_answer(client).startswith(b"HTTP/1.1 200")
        client.sendall(HEALTH[:10])
        assert error_of(one_answer(client), 408)


def test_pipelined_requests_are_all_answered(live, monkeypatch):
    monkeypatch.setattr(connection, "PATIENCE_S", 1.5)
    with connect(live) as client:
        client.sendall(HEALTH * 20)
        data = b""
        while data.count(b"HTTP/1.1 200") < 20:
            data += some(client)


# ---- what the client does not take

@pytest.fixture
def talkative(live, monkeypatch):
    """Long answers, small buffers in the kernel, and little patience with those who do not read."""
    monkeypatch.setattr(connection, "STALL_S", 0.4)
    monkeypatch.setattr(connection, "LEAST_TAKEN", 1)
    monkeypatch.setattr(live.client, "burst", True)
    monkeypatch.setitem(live.client.info, "max_model_len", 50_000)
    monkeypatch.setattr(live.client, "aborts", [])
    before = live.socket.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    live.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    until(lambda: not live.server.server_state.connections)
    yield live
    live.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, before // 2)


def ask_and_leave_unread(live, tokens: int, stream: bool) -> socket.socket:
    body = json.dumps({"prompt": "x", "max_tokens": tokens, "ignore_eos": True, "stream": stream,
                       "logprobs": 1}).encode()
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)
    client.settimeout(SOON)
    client.connect(live.address)
    client.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    return client


def rest_of(client: socket.socket) -> bytes:
    answer = b""
    try:
        while data := client.recv(65536):
            answer += data
    except ConnectionError:
        pass
    return answer


def test_a_stream_that_nobody_reads_is_ended(talkative, caplog, monkeypatch):
    monkeypatch.setattr(talkative.client, "hold", 19_000)  # else it may have ended by then, and needs no abort
    began = time.monotonic()
    with caplog.at_level("INFO", logger="isthmus.core.server.connection"):
        with ask_and_leave_unread(talkative, 20_000, True) as client:
            until(lambda: talkative.client.aborts)
            assert time.monotonic() - began >= 0.4
            until(lambda: not talkative.server.server_state.connections)
            assert b"[DONE]" not in rest_of(client) and talkative.client.waiting == 0
    assert "bytes to read has read 0 in 0.4 s" in caplog.text


def test_a_stream_that_is_read_in_drips_is_ended(talkative, monkeypatch):
    monkeypatch.setattr(talkative.client, "hold", 19_000)
    monkeypatch.setattr(connection, "LEAST_TAKEN", 2**16)
    with ask_and_leave_unread(talkative, 20_000, True) as client:
        end = time.monotonic() + SOON
        while not talkative.client.aborts and time.monotonic() < end:
            client.recv(500)
            time.sleep(0.02)
        assert talkative.client.aborts


def test_a_buffered_answer_that_nobody_reads_is_thrown_away(talkative):
    with ask_and_leave_unread(talkative, 5_000, False) as client:
        until(lambda: talkative.client.submits[-1].params.max_tokens == 5_000 and not talkative.client.waiting)
        assert len(talkative.server.server_state.connections) == 1
        until(lambda: not talkative.server.server_state.connections)
        assert len(rest_of(client)) < 2**16


@pytest.mark.parametrize("requests", [1, 3])
def test_the_end_of_an_answer_that_nobody_reads_is_not_waited_for(talkative, requests):
    """Less than the transport's limit waits: nothing is paused, and the answer is complete."""
    with ask_and_leave_unread(talkative, 2000, False) as client:
        for _ in range(requests - 1):
            client.sendall(WHOLE)
        until(lambda: talkative.server.server_state.connections)
        until(lambda: not talkative.server.server_state.connections)


def test_a_slow_reader_gets_everything(talkative, monkeypatch):
    monkeypatch.setattr(connection, "STALL_S", 2.5)
    with ask_and_leave_unread(talkative, 20_000, True) as client:
        answer, began = b"", time.monotonic()
        while time.monotonic() < began + 8:  # more than three times as long as nothing may be read
            time.sleep(0.05)
            answer += client.recv(4096)
        assert b"[DONE]" not in answer
        while b"[DONE]" not in answer:
            data = client.recv(65536)
            assert data, "it was cut"
            answer += data
    assert talkative.client.aborts == []


def test_an_orderly_end_does_not_wait_for_who_reads_nothing(caplog):
    with caplog.at_level("ERROR"), running() as live:
        live.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        live.client.info["max_model_len"], live.client.burst = 50_000, True
        with ask_and_leave_unread(live, 20_000, True), connect(live) as idle:
            until(lambda: live.client.submits and not live.client._tasks)
            live.server.should_exit = True
            live.thread.join(SOON)
            assert not live.thread.is_alive() and idle.recv(10) == b""
    assert not caplog.records, caplog.text


# ---- bodies that are refused

@pytest.mark.parametrize("close", [False, True])
@pytest.mark.parametrize("size", [2**24 + 1, 3 * 2**24])
def test_whoever_sends_too_much_reads_why(live, size, close):
    """As most clients do it: all is sent before anything is read."""
    with connect(live) as client:
        client.settimeout(SOON)
        client.sendall(HEAD + b"Connection: close\r\n" * close + b"Content-Length: %d\r\n\r\n" % size)
        client.sendall(b" " * size)
        assert error_of(one_answer(client), 413)["code"] == "request_too_large"
    until(lambda: live.app.state.server.bodies.held == 0)


def test_whoever_asks_before_sending_too_much_is_told_at_once(live):
    for size, fields in ((2**24 + 1, b"Expect: 100-continue\r\n"), (10**12, b"")):
        with connect(live) as client:
            client.sendall(HEAD + fields + b"Content-Length: %d\r\n\r\n" % size)
            assert error_of(one_answer(client), 413)


def test_what_comes_after_an_early_answer_is_bounded(live, monkeypatch):
    monkeypatch.setattr(connection, "MAX_UNREAD", 2**20)
    with connect(live) as client, pytest.raises(ConnectionError):
        client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n\r\n")
        assert one_answer(client).startswith(b"HTTP/1.1 200")
        for _ in range(9999):
            client.sendall(b" " * 9999)


# ---- number

def test_more_connections_than_allowed_are_refused(live, monkeypatch):
    monkeypatch.setattr(connection, "MAX_CONNECTIONS", 20)
    until(lambda: not live.server.server_state.connections)
    clients = [connect(live) for _ in range(20)]
    try:
        for client in clients:
            client.sendall(HEALTH)
            assert one_answer(client).startswith(b"HTTP/1.1 200")
        answer, _ = talk(live)
        assert "20 connections are open" in error_of(answer, 503)["message"]
    finally:
        for client in clients:
            client.close()

    def answers() -> bool:
        try:
            return httpx.get("http://{}:{}/health".format(*live.address)).status_code == 200
        except httpx.HTTPError:
            return False
    until(answers)  # the places of closed connections are free again


def test_the_bound_leaves_files_to_the_rest(monkeypatch):
    resource = pytest.importorskip("resource")
    for files, most in ((1024, 924), (10**6, 4096), (resource.RLIM_INFINITY, 4096), (50, 1)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, files=files: (files, files))
        assert most_connections() == most


def test_the_server_of_the_command_line_uses_it():
    from isthmus.core.cli.serve import Gate, _http_server
    from isthmus.core.config import Config
    assert _http_server(Gate(lambda: ""), Config(), None).config.http is Connection
