"""The command line as people meet it."""
from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import aclosing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from isthmus.core.cli.backends import RemoteBackend, Turn, parse_option
from isthmus.core.cli.chat import Chat
from isthmus.core.cli.commands import COMMANDS
from isthmus.core.cli.main import main
from isthmus.core.cli.parser import build_parser, given_settings
from isthmus.core.cli.progress import ProgressLine
from isthmus.core.errors import RequestError

from .checkpoints import tiny_llama_gguf


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch):
    for name in list(os.environ):
        if name.startswith("ISTHMUS_") and name != "ISTHMUS_CACHE":
            monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(tiny_llama_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf"))


def command_line(*words: str, **more):
    return subprocess.run([sys.executable, "-m", "isthmus.core.cli.main", *words], capture_output=True, text=True,
                          timeout=60, **more)


# ---- help, typos, errors


def test_help_is_quick_and_imports_nothing_heavy():
    code = ("import sys; from isthmus.core.cli.main import main; main(['--help'])\n"
            "try: main(['serve', '--help'])\nexcept SystemExit: pass\n"
            "heavy = {'numpy', 'torch', 'zmq', 'uvicorn', 'starlette', 'pydantic', 'rich', 'tokenizers', 'yaml'}\n"
            "sys.exit('imported: ' + ', '.join(sorted(heavy & set(sys.modules))) if heavy & set(sys.modules) else 0)")
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        best = min(best, time.perf_counter() - began)
        assert done.returncode == 0, done.stderr
    assert best < 1.0, f"{best:.2f} s, with an allowance for a busy machine"


def test_the_overview_names_every_command_and_each_has_its_own_help(capsys):
    assert main(["--help"]) == 0
    overview = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert f"  {name} " in overview and command.help in overview
        with pytest.raises(SystemExit) as caught:
            main(["help", name])
        assert caught.value.code == 0
        text = capsys.readouterr().out
        assert all(example in text for example in command.examples)


def test_the_help_of_serve_is_grouped_and_has_every_flag_that_people_type(capsys):
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    text = capsys.readouterr().out
    for flag in ("platform", "model", "host", "port", "api-key", "max-model-len", "dtype", "page-size",
                 "max-running-requests", "chunked-prefill-size", "schedule-policy", "served-model-name", "config",
                 "in-process"):
        assert f"--{flag}" in text
    assert [text.index(f"\n{group}: ") for group in ("model", "platform", "cache", "scheduler", "server")] == sorted(
        text.index(f"\n{group}: ") for group in ("model", "platform", "cache", "scheduler", "server"))


@pytest.mark.parametrize("words, parts", [
    (["srve"], ["unknown command srve", "did you mean serve?"]),
    (["--verison"], ["unknown option --verison", "did you mean --version?"]),
    (["serve", "--modle", "x"], ["unknown option --modle", "did you mean --model?"]),
    (["serve", "--prot=9"], ["unknown option --prot=9", "did you mean --port?"]),
    (["serve", "--max-model"], ["unknown option --max-model", "--max-model-len"]),
    (["serve", "--port"], ["--port", "expected one argument"]),
    (["serve", "--port", "x"], ["--port: 'x' is not a whole number"]),
    (["serve", "--dtype", "int3"], ["--dtype: 'int3' is not one of auto, float32, bfloat16"]),
    (["serve", "a", "--model", "b"], ["two models are named: a and --model b"]),
    (["serve", "a", "b"], ["unknown argument b"]),
    (["serve", "--config", "/nowhere.yaml"], ["--config /nowhere.yaml: there is no such file"]),
    (["explain", "--platform-option", "threads"], ["key=value"]),
    (["generate", "--top-k", "x", "hello"], ["top_k: 'x' is not a whole number"]),
    (["generate", "hello", "--model", "/nowhere/model.gguf"], ["/nowhere/model.gguf"]),
    (["generate", "hello", "--model", "smollm2-135m-instrct"], ["did you mean smollm2-135m-instruct?"]),
])
def test_mistakes_get_one_line_and_exit_code_2(words, parts, capsys):
    assert main(words) == 2
    shown = "".join(capsys.readouterr())
    assert all(part in shown for part in parts), shown
    if words[0] != "explain":
        assert shown.startswith("isthmus: ") and "Traceback" not in shown


def test_debug_shows_where_an_error_came_from(monkeypatch, capsys):
    monkeypatch.setenv("ISTHMUS_DEBUG", "1")
    assert main(["srve"]) == 2
    assert "Traceback" in capsys.readouterr().err
    main(["explain", "--port", "99", "--platform", "nosuch"])
    assert "isthmus: --port 99 (command line)" in capsys.readouterr().err


def test_flags_become_settings_by_name():
    parser = build_parser(COMMANDS["serve"])
    arguments = parser.parse(["--no-prefix-cache", "--strict", "--port", "1", "--platform-option", "a=b",
                              "--platform-option", "c=d"])
    assert given_settings(arguments) == {"prefix_cache": False, "strict": True, "port": "1",
                                         "platform_option": ["a=b", "c=d"]}
    assert given_settings(parser.parse([])) == {}


def test_version(capsys):
    assert main(["version"]) == 0 and main(["--version"]) == 0
    assert capsys.readouterr().out.count("isthmus ") == 2


def test_a_warning_for_a_variable_that_is_no_setting(monkeypatch, capsys):
    monkeypatch.setenv("ISTHMUS_PLATFROM", "cpu")
    main(["doctor"])
    assert "ISTHMUS_PLATFROM is not a setting; did you mean ISTHMUS_PLATFORM?" in capsys.readouterr().err


# ---- models


def test_models_lists_the_known_ones(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("ISTHMUS_CACHE", str(tmp_path))
    assert main(["models"]) == 0
    assert "smollm2-135m-instruct" in capsys.readouterr().out
    assert main(["models", "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)
    assert [e["name"] for e in entries if e["default"]] == ["smollm2-135m-instruct"]
    assert all(e["path"] is None for e in entries if e["source"] == "registry")


# ---- progress


def test_progress_is_one_line_a_stage_where_no_person_watches():
    out = io.StringIO()
    with ProgressLine(out) as line:
        for done in range(100):
            line("download", done, 100)
        line("load weights", 0, None)
    assert out.getvalue() == "isthmus: download ...\nisthmus: load weights ...\n"


def test_progress_on_a_terminal_has_amounts():
    out = io.StringIO()
    with ProgressLine(out, live=True) as line:
        line("download", 500_000_000, 1_000_000_000)
        line("warm up", 1, 3)
        assert line._amount(500_000_000, 1_000_000_000).startswith("0.50/1.00 GB")
        assert line._amount(1, 3) == "1/3"
    assert "warm up" in out.getvalue()


# ---- chat


class Echo:
    """Answers with the last message, word by word."""

    name, can_chat = "echo", True

    def __init__(self):
        self.seen = []

    async def stream(self, prompt, options, turn):
        self.seen.append((list(prompt), dict(options)))
        for word in prompt[-1]["content"].split():
            await asyncio.sleep(0)
            turn.mark()
            turn.completion_tokens += 1
            yield word + " "
        if prompt[-1]["content"] == "fail":
            raise RequestError("the context is full")
        if prompt[-1]["content"] == "endless":
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(10)


def talk(lines: list[str], **more) -> tuple[Chat, str]:
    out = io.StringIO()
    chat = Chat(Echo(), {"temperature": 0.7}, out=out, **more)
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
    assert "Ctrl-C stops an answer" in out and "(temperature 0.0, top_k 5)" in out
    assert [m["content"] for m in json.loads(file.read_text())["messages"]] == ["Speak French.", "hi", "hi "]
    assert [m["content"] for m in chat.messages] == ["next", "next "], "cleared before, and left before `never`"


def test_chat_takes_many_lines_between_quotes():
    chat, _ = talk(['"""first', "second", 'third"""', '"""one line"""'])
    assert [m["content"] for m in chat.messages if m["role"] == "user"] == ["first\nsecond\nthird", "one line"]


def test_an_error_does_not_end_the_chat_nor_enter_the_conversation():
    chat, out = talk(["fail", "fine"])
    assert "! the context is full" in out
    assert [m["content"] for m in chat.messages] == ["fine", "fine "]


def test_ctrl_c_stops_the_answer_only():
    chat, out = talk(["endless", "after"])
    assert "(stopped)" in out
    assert [m["content"] for m in chat.messages] == ["endless", "endless ", "after", "after "]


def test_options_are_parsed_by_kind():
    assert parse_option("max-tokens", "7") == 7 and parse_option("temperature", "0.5") == 0.5
    assert parse_option("stop", "x") == ("x",)


# ---- a server as the other side


class Canned(BaseHTTPRequestHandler):
    """Speaks the part of OpenAI's API that the client uses."""

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.answer(200, b'{"data": [{"id": "canned"}]}')

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, self.headers.get("Authorization"), body))
        content = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
        if content == "refuse":
            return self.answer(400, b'{"error": {"message": "too long: 9 > 8"}}')
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
    server.seen, server.left = [], threading.Event()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_chat_against_a_server(canned):
    async def body():
        backend = RemoteBackend(f"127.0.0.1:{canned.server_port}/v1", api_key="k")
        await backend.start(lambda *_: None)
        turn, message = Turn(time.monotonic()), [{"role": "user", "content": "one two"}]
        pieces = [p async for p in backend.stream(message, {"temperature": 0.0}, turn)]
        raw = [p async for p in backend.stream("raw text", {}, Turn(time.monotonic()))]
        with pytest.raises(RequestError, match="too long: 9 > 8"):
            [p async for p in backend.stream("refuse", {}, Turn(0))]
        with pytest.raises(RequestError, match="the engine is gone"):
            [p async for p in backend.stream("break", {}, Turn(0))]
        async with aclosing(backend.stream("endless", {}, Turn(0))) as endless:
            assert await anext(endless) == "endless "
        assert await asyncio.to_thread(canned.left.wait, 5), "leaving early must close the connection"
        return backend.name, pieces, raw, turn
    name, pieces, raw, turn = asyncio.run(body())
    assert name.startswith("canned at ") and pieces == ["one ", "two "] and raw == ["raw ", "text "]
    assert (turn.finish, turn.prompt_tokens, turn.completion_tokens, turn.cached_tokens) == ("stop", 9, 3, 4)
    path, key, body = canned.seen[0]
    assert path == "/v1/chat/completions" and key == "Bearer k"
    assert body["model"] == "canned" and body["temperature"] == 0.0 and body["stream"] is True
    assert canned.seen[1][0] == "/v1/completions"


def test_no_server_and_no_address(capsys):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert main(["chat", "--url", f"127.0.0.1:{port}"]) == 2
    assert f"no server answers at 127.0.0.1:{port}" in capsys.readouterr().err
    assert main(["chat", "--url", "ftp://x"]) == 2


def test_chat_from_a_pipe_against_a_server(canned):
    done = command_line("chat", "--url", f"http://127.0.0.1:{canned.server_port}", input="good day\n/exit\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("good day \n") and "3 tokens" in done.stdout


# ---- the real thing, on the platform without a model


def test_generate_on_the_null_platform(tiny):
    done = command_line("generate", "hello", "--model", tiny, "--platform", "null", "--max-tokens", "5", "--json",
                        "--temperature", "0")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["usage"]["completion_tokens"] <= 5 and answer["finish_reason"] in ("length", "stop")
