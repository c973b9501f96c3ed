"""`isthmus chat` and `isthmus generate`: the conversation, sampling options, and a server as the other side."""
from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import aclosing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from isthmus.core.cli.backends import RemoteBackend, Turn
from isthmus.core.cli.chat import Chat
from isthmus.core.cli.main import main
from isthmus.core.cli.sampling import OPTIONS, check_options, parse_option
from isthmus.core.cli.terminal import WordWrap, is_open_block, quiet_terminal
from isthmus.core.errors import ConfigError, RequestError

from .effort import SOON

COST = 10  # seconds


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch):
    for name in list(os.environ):
        if name.startswith("ISTHMUS_") and name != "ISTHMUS_CACHE":
            monkeypatch.delenv(name)


def command_line(*words: str, **more):
    return subprocess.run([sys.executable, "-m", "isthmus.core.cli.main", *words], capture_output=True, text=True,
                          timeout=600, **more)


# ---- chat


class Echo:
    """Answers with the last message, word by word."""

    name, can_chat = "echo", True

    def __init__(self):
        self.seen, self.defaults = [], {"temperature": 0.2}

    async def stream(self, prompt, options, turn):
        self.seen.append((list(prompt), dict(options)))
        for word in prompt[-1]["content"].split():
            await asyncio.sleep(0)
            turn.mark()
            turn.completion_tokens += 1
            turn.finish = "length" if turn.completion_tokens == options.get("max_tokens") else None
            yield word + " "
            if turn.finish:
                return
        if prompt[-1]["content"] == "fail":
            raise RequestError("the engine is gone")
        if prompt[-1]["content"] == "too long":
            raise RequestError("512 tokens are too many", code="context_length_exceeded")
        if prompt[-1]["content"] == "endless":
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(10)


def talk(lines: list[str], options=(), **more) -> tuple[Chat, str]:
    out = io.StringIO()
    chat = Chat(Echo(), dict(options), out=out, **more)
    rest = iter(lines)

    async def read(prompt):
        line = next(rest, None)
        if line is None:
            raise EOFError
        return line
    asyncio.run(chat.talk(read))
    return chat, out.getvalue()


def test_chat_keeps_the_conversation_and_prints_numbers():
    chat, out = talk(["hello there", "again"], system="Be brief.")
    assert "hello there " in out and "2 tokens" in out and "tok/s" in out and "first after" in out
    assert [m["role"] for m in chat.messages] == ["user", "assistant"] * 2
    assert [m["role"] for m in chat.backend.seen[1][0]] == ["system", "user", "assistant", "user"]


def test_chat_commands(tmp_path):
    file = tmp_path / "talk.json"
    chat, out = talk(["hi", "/system Speak French.", "/set top_k 5", "/set temperature=0", f"/save {file}", "/clear",
                      "/set", "/hlep", "/set top_q 1", "/set top_k x", "/help", "next", "/exit", "never"])
    assert chat.options == {"temperature": 0.0, "top_k": 5} and chat.system == "Speak French."
    assert "did you mean /help?" in out and "did you mean top_" in out and "'x' is not a whole number" in out
    assert "Ctrl-C stops an answer" in out and "(top_k 5, temperature 0)" in out
    assert [m["content"] for m in json.loads(file.read_text())["messages"]] == ["Speak French.", "hi", "hi "]
    assert [m["content"] for m in chat.messages] == ["next", "next "], "cleared before, and left before `never`"


def test_chat_takes_many_lines_between_quotes():
    chat, _ = talk(['"""first', "second", 'third"""', '"""one line"""'])
    assert [m["content"] for m in chat.messages if m["role"] == "user"] == ["first\nsecond\nthird", "one line"]


def test_an_error_does_not_end_the_chat_nor_enter_the_conversation():
    chat, out = talk(["fail", "fine"])
    assert "! the engine is gone" in out and chat.failed == 1
    assert [m["content"] for m in chat.messages] == ["fine", "fine "]


def test_ctrl_c_stops_the_answer_only():
    chat, out = talk(["endless", "after"])
    assert "endless \n(stopped; about 1 token, first after" in out
    assert [m["content"] for m in chat.messages] == ["endless", "endless ", "after", "after "]


def test_options_are_parsed_by_kind():
    assert parse_option("max_tokens", "7") == 7 and parse_option("temperature", "0.5") == 0.5
    assert parse_option("stop", "x") == ["x"]


@pytest.mark.parametrize("name, good, bad", [
    ("temperature", [0, 2], [-0.1, 2.1]), ("top_p", [0, 1], [-0.1, 1.1]), ("top_k", [0, 10**6], [-2]),
    ("min_p", [0, 1], [-0.1, 1.1]), ("max_tokens", [1], [0]), ("seed", [-2**63, 2**63 - 1], [2**63]),
    ("repetition_penalty", [0.01, 10], [0, 10.1]), ("presence_penalty", [-2, 2], [-2.1, 2.1]),
    ("frequency_penalty", [-2, 2], [-2.1, 2.1])])
def test_the_ranges_in_the_help_are_those_of_the_server(name, good, bad):
    for value in good:
        check_options({name: value})
    for value in bad:
        with pytest.raises(ConfigError, match=f"{name} should be"):
            check_options({name: value})
    least, most = good[0], good[-1]
    if name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"):
        assert f"; {least} to {most} [" in OPTIONS[name].help
    else:
        assert name in ("top_k", "max_tokens", "seed", "repetition_penalty")


def test_options_are_unset_and_shown(tmp_path):
    chat, out = talk(["/set", "/set stop a = b", "/set top-k 5", "/set top_k default", "/set max_tokens 2",
                      "/set temprature 1", "/set top_k", "/set temperature 9", "/SET"])
    assert chat.options == {"stop": ["a = b"], "max_tokens": 2}
    assert "(none is set; this model's own are temperature 0.2)" in out
    assert "there is no option temprature; did you mean temperature? (options: temperature, top_p," in out
    assert "`/set top_k default` unsets it" in out and "temperature should be less than or equal to 2" in out
    assert out.endswith("(stop 'a = b', max_tokens 2)\n")


def test_an_answer_that_was_cut_is_marked():
    _, out = talk(["one two three", "/set max_tokens default", "one two three"], options={"max_tokens": 2})
    assert "one two \n(cut at max_tokens 2; about 2 tokens" in out and out.count("cut") == 1
    turn = Turn(0.0, finish="length", completion_tokens=9)
    assert turn.cut(9) == "cut at max_tokens 9" and turn.cut(10) == turn.cut(None) == "cut at the end of the context"


def test_a_full_context_is_told_with_the_way_out():
    _, out = talk(["too long"])
    assert "! 512 tokens are too many (/clear forgets the conversation)" in out


def test_commands_in_capitals_and_with_too_much():
    chat, out = talk(["hi", "/HELP", "/clear all", "/exit now", "/System none"], system="Be brief.")
    assert "/save FILE" in out and len(chat.messages) == 2 and chat.system is None
    assert "/clear takes nothing after it, but got 'all'" in out and "/exit takes nothing" in out


def test_save_overwrites_only_its_own_file(tmp_path):
    mine, other = tmp_path / "mine.json", tmp_path / "other.json"
    other.write_text("precious")
    _, out = talk(["hi", f"/save {mine}", "again", f"/save {mine}", f"/save {other}", "/save /nowhere/x"])
    assert len(json.loads(mine.read_text())["messages"]) == 4 and other.read_text() == "precious"
    assert f"! {other} exists already: name another file" in out
    assert "! /nowhere/x: no such file or directory" in out


def test_ctrl_c_at_the_prompt_tells_how_to_leave():
    out, asked = io.StringIO(), []

    async def read(prompt):
        asked.append(prompt)
        raise KeyboardInterrupt if len(asked) == 1 else EOFError
    asyncio.run(Chat(Echo(), {}, out=out).talk(read))
    assert out.getvalue() == "(Ctrl-D or /exit leaves)\n"


# ---- the terminal


def screen(written: str) -> list[str]:
    """The lines that a terminal shows: \\x1b[nD moves left, \\x1b[K clears to the end of the line."""
    lines, column = [""], 0
    for step in re.findall(r"\x1b\[\d*[DK]|[^\x1b]", written):
        if step == "\n":
            lines.append("")
            column = 0
        elif step.endswith("D") and len(step) > 1:
            column -= int(step[2:-1])
        elif step == "\x1b[K":
            lines[-1] = lines[-1][:column]
        else:
            lines[-1] = lines[-1][:column] + step
            column += 1
    return lines


@pytest.mark.parametrize("text, lines", [
    ("the quick brown fox jumps", ["the quick", "brown fox", "jumps"]),
    ("one\n\ntwo three four", ["one", "", "two three", "four"]),
    ("a abcdefghijklmnop b", ["a", "abcdefghi", "jklmnop b"]),
    ("exactly 9 wide", ["exactly 9", "wide"]),
    ("  indented words", ["", "indented", "words"]),
    ("\u4f60\u597d\u4f60\u597d\u4f60\u597d", ["\u4f60\u597d\u4f60\u597d", "\u4f60\u597d"]),
])
@pytest.mark.parametrize("piece", [1, 3, 100])
def test_words_are_not_broken(text, lines, piece):
    wrap = WordWrap(10)
    written = "".join(wrap.feed(text[i:i + piece]) for i in range(0, len(text), piece))
    assert [line.rstrip() for line in screen(written)] == lines


@pytest.mark.parametrize("text, unfinished", [
    ('"""', True), ('"""one\ntwo', True), ('"""one\ntwo"""', False), ('""""""', False), ("one", False), ("", False),
    ('  """one\n"""  ', False), ('one """', False)])
def test_enter_sends_a_block_only_when_it_is_closed(text, unfinished):
    assert is_open_block(text) is unfinished


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo terminals")
def test_keys_are_not_echoed_during_an_answer_and_kept_for_the_prompt():
    import pty
    import termios
    main_end, terminal = pty.openpty()
    with os.fdopen(terminal, "r") as stream:
        with quiet_terminal(stream):
            os.write(main_end, b"typed ahead\n")
            assert not select.select([main_end], [], [], 0.2)[0], "it was echoed"
        assert termios.tcgetattr(stream)[3] & termios.ECHO
        assert stream.readline() == "typed ahead\n"
        os.write(main_end, b"x")
        assert os.read(main_end, 10) == b"x"
    os.close(main_end)


# ---- a server as the other side


class Canned(BaseHTTPRequestHandler):
    """Speaks the part of OpenAI's API that the client uses."""

    def log_message(self, *_):
        pass

    def do_GET(self):
        if self.server.key and self.headers.get("Authorization") != f"Bearer {self.server.key}":
            self.answer(401, b'{"error": {"message": "send it as `Authorization: Bearer KEY`"}}')
        elif self.path == "/v1/models":
            self.answer(200, b'{"data": [{"id": "canned"}]}')
        elif self.path == "/page/v1/models":
            self.answer(200, b"<html>hello</html>")
        else:
            self.answer(404, b"what?")

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            return self.answer(*self.server.tokenize)
        self.server.seen.append((self.path, self.headers.get("Authorization"), body))
        content = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
        if content == "refuse":
            return self.answer(400, b'{"error": {"message": "too long: 9 > 8"}}')
        if content == "small context" and body.get("max_tokens", 0) > 40:
            return self.answer(400, b'{"error": {"message": "no room", "code": "context_length_exceeded"}}')
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.wfile.write(b": a comment\n\n")
        events = [{"choices": [{"index": 0, "delta": {"role": "assistant"}}]}]
        events += [{"choices": [{"index": 0, "delta": {"content": w + " "}, "text": w + " "}]} for w in content.split()]
        if content == "break":
            events.append({"error": {"message": "the engine is gone"}})
        events += [{"choices": [{"delta": {}, "finish_reason": "stop"}]},
                   {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3,
                                             "prompt_tokens_details": {"cached_tokens": 4}}}]
        for event in events:
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        try:
            while content == "endless":
                self.wfile.write(b"data: {\"choices\": []}\n\n")
                time.sleep(0.01)
        except OSError:
            self.server.left.set()
            return
        self.wfile.write(b"data: [DONE]\n\n")

    def answer(self, status, data):
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def canned():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Canned)
    server.seen, server.left, server.tokenize, server.key = [], threading.Event(), (404, b"{}"), None
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_chat_against_a_server(canned):
    async def body():
        backend = RemoteBackend(f"127.0.0.1:{canned.server_port}/v1", api_key="k")
        await backend.open(lambda *_: None)
        turn, message = Turn(time.monotonic()), [{"role": "user", "content": "one two"}]
        pieces = [p async for p in backend.stream(message, {"temperature": 0.0}, turn)]
        raw = [p async for p in backend.stream("raw text", {}, Turn(time.monotonic()))]
        with pytest.raises(RequestError, match="too long: 9 > 8"):
            [p async for p in backend.stream("refuse", {}, Turn(0))]
        with pytest.raises(RequestError, match="the engine is gone"):
            [p async for p in backend.stream("break", {}, Turn(0))]
        async with aclosing(backend.stream("endless", {}, Turn(0))) as endless:
            assert await anext(endless) == "endless "
        assert await asyncio.to_thread(canned.left.wait, SOON), "leaving early must close the connection"
        return backend.name, pieces, raw, turn
    name, pieces, raw, turn = asyncio.run(body())
    assert name.startswith("canned at ") and pieces == ["one ", "two "] and raw == ["raw ", "text "]
    assert (turn.finish, turn.prompt_tokens, turn.completion_tokens, turn.cached_tokens) == ("stop", 9, 3, 4)
    path, key, body = canned.seen[0]
    assert path == "/v1/chat/completions" and key == "Bearer k"
    assert body["model"] == "canned" and body["temperature"] == 0.0 and body["stream"] is True
    assert canned.seen[1][0] == "/v1/completions"


def test_the_numbers_of_an_answer_that_was_left_are_those_seen(canned):
    async def body():
        backend, turn = RemoteBackend(f"127.0.0.1:{canned.server_port}"), Turn(time.monotonic())
        await backend.open(lambda *_: None)
        async with aclosing(backend.stream("endless", {}, turn)) as pieces:
            await anext(pieces)
        return turn.summary()
    assert re.fullmatch(r"about 1 token, first after \d+\.\d\d s", asyncio.run(body()))


def test_a_default_that_does_not_fit_leaves_the_length_to_the_server(canned):
    async def body():
        backend = RemoteBackend(f"127.0.0.1:{canned.server_port}")
        await backend.open(lambda *_: None)
        said = [p async for p in backend.stream("small context", {}, Turn(0), 512)]
        with pytest.raises(RequestError, match="no room"):
            [p async for p in backend.stream("small context", {"max_tokens": 500}, Turn(0), 512)]
        await anext(backend.stream("hello", {}, Turn(0), 512))
        return said
    assert asyncio.run(body()) == ["small ", "context "]
    assert [body.get("max_tokens") for _, _, body in canned.seen] == [512, None, 500, 512]


def test_what_comes_after_the_reader_has_left_troubles_nobody(canned, monkeypatch):
    faults, was = [], set(threading.enumerate())
    monkeypatch.setattr(threading, "excepthook", faults.append)

    async def body():
        backend = RemoteBackend(f"127.0.0.1:{canned.server_port}")
        await backend.open(lambda *_: None)
        await anext(backend.stream("endless", {}, Turn(0)))
    asyncio.run(body())
    for thread in set(threading.enumerate()) - was:
        if thread.name.endswith("(read)"):
            thread.join(SOON)
    assert not faults, faults[0]


BASE = (400, b'{"error": {"message": "this model has no chat template: use /v1/completions"}}')


def test_a_base_model_at_a_server_is_continued_by_generate_and_refused_by_chat(canned):
    canned.tokenize = BASE
    url = f"http://127.0.0.1:{canned.server_port}"
    done = command_line("generate", "once upon", "--url", url)
    assert done.returncode == 0 and done.stdout == "once upon \n"
    assert "has no chat template: the text is continued as it is, as with --raw" in done.stderr
    assert [path for path, *_ in canned.seen] == ["/v1/completions"]
    done = command_line("chat", "--url", url, input="hello\n")
    assert done.returncode == 2 and "has no chat template: `isthmus generate` continues" in done.stderr
    done = command_line("generate", "once upon", "--url", url, "--system", "x")
    assert done.returncode == 2 and "--system has no place" in done.stderr
    assert len(canned.seen) == 1


def test_what_the_server_does_not_have_is_refused_at_once(canned, capsys):
    address = f"127.0.0.1:{canned.server_port}"
    assert main(["chat", "other", "--url", address]) == 2
    assert f"{address} has no model other; it serves canned" in capsys.readouterr().err
    for path in ("/nope", "/page"):
        assert main(["generate", "hello", "--url", address + path]) == 2
        assert f"--url: {address} has no {path}/v1/models" in capsys.readouterr().err
    assert canned.seen == []


def test_a_model_of_the_settings_is_not_asked_of_a_server(canned, monkeypatch, capsys):
    monkeypatch.setenv("ISTHMUS_MODEL", "/some/file.gguf")
    monkeypatch.setenv("ISTHMUS_API_KEY", " k, another")  # of several the first is sent
    assert main(["generate", "hello", "--url", f"127.0.0.1:{canned.server_port}", "--temperature", "0.5"]) == 0
    assert capsys.readouterr().out == "hello \n"
    path, key, body = canned.seen[0]
    assert key == "Bearer k" and body.items() >= {"model": "canned", "temperature": 0.5, "max_tokens": 512}.items()
    assert "top_p" not in body


@pytest.mark.parametrize("command", [["chat"], ["generate", "hello"]])
def test_a_key_that_is_missing_or_wrong_is_told_in_flags(canned, command, capsys, monkeypatch):
    canned.key, url = "k", f"127.0.0.1:{canned.server_port}"
    monkeypatch.delenv("ISTHMUS_API_KEY", raising=False)
    assert main([*command, "--url", url]) == 2
    assert f"isthmus: {url} asks for an API key: give it as --api-key or ISTHMUS_API_KEY\n" in capsys.readouterr().err
    assert main([*command, "--url", url, "--api-key", "j"]) == 2
    assert f"isthmus: {url} refuses this API key: give another as --api-key" in capsys.readouterr().err


def test_https_against_a_server_without_it_is_told_in_words(canned, capsys):
    assert main(["generate", "hello", "--url", f"https://127.0.0.1:{canned.server_port}"]) == 2
    address = f"127.0.0.1:{canned.server_port}"
    assert capsys.readouterr().err.endswith(f"isthmus: {address} does not speak https: --url http://{address}\n")


def test_no_server_and_no_address(capsys):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert main(["chat", "--url", f"127.0.0.1:{port}"]) == 2
    reason = f"no server answers at 127.0.0.1:{port} (connection refused): start one with `isthmus serve`, or check"
    assert reason in capsys.readouterr().err
    assert main(["chat", "--url", "ftp://x"]) == 2


def test_chat_from_a_pipe_against_a_server(canned):
    done = command_line("chat", "--url", f"http://127.0.0.1:{canned.server_port}", input="good day\n/exit\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("good day \n") and "(3 tokens" in done.stdout
    assert "temperature" not in canned.seen[0][2], "the server's own default counts"


def test_a_message_of_a_pipe_that_fails_makes_the_chat_fail(canned):
    url = f"http://127.0.0.1:{canned.server_port}"
    done = command_line("chat", "--url", url, input="refuse\ngood day\n")
    assert done.returncode == 1 and "! too long: 9 > 8" in done.stdout and "good day \n" in done.stdout


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo terminals")
def test_a_block_typed_fast_into_a_terminal_is_one_message(canned, tmp_path):
    import pty
    person, terminal = pty.openpty()
    words = [sys.executable, "-m", "isthmus.core.cli.main", "chat", "--url", f"127.0.0.1:{canned.server_port}"]
    process = subprocess.Popen(words, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True, env={
        **os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "ISTHMUS_CACHE": str(tmp_path)})
    os.close(terminal)
    seen, prompts = b"", 0
    typed = [b'"""\nfirst\nsecond\n"""\n', b"\x03", b"\x04"]  # one at each prompt; the last two are Ctrl-C and Ctrl-D
    try:
        while process.poll() is None:
            assert select.select([person], [], [], 20)[0], seen
            with contextlib.suppress(OSError):  # it may end meanwhile
                seen += os.read(person, 4096)
            if seen.count(b"\x1b[?2004h") > prompts:  # the editor is ready
                os.write(person, typed[prompts])
                prompts += 1
        assert process.returncode == 0 and b"Ctrl-D or /exit leaves" in seen
    finally:
        process.kill()
        os.close(person)
    assert [body["messages"] for _, _, body in canned.seen] == [[{"role": "user", "content": "first\nsecond"}]]
