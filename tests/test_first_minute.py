"""The first minute, point by point of the checklist (shared/anchors/ecosystem.md, section 4), in a real terminal."""
from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from isthmus.core.cli.serve import listen
from isthmus.core.cli.terminal import harmless

from .checkpoints import tiny_llama_gguf
from .effort import SOON

pytest.importorskip("pty", reason="no pseudo terminals on Windows")

from .terminal import Terminal, screen

COST = 12  # seconds
PROMPT, SENT = "\x1b[?2004h", "\x1b[?2004l"  # the line editor turns bracketed paste on and off
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
SLOW_START = """
GATE = ""
import os, time
import isthmus.core.engine as engine
import isthmus.core.startup as startup
load, warm = startup.load_model, engine.EngineCore._warm_up
def slowly(checkpoint, platform, manifest, dtype, strict, tell, *more):
    for done in range(0, 101, 20):
        tell and tell(done * 2**24, 100 * 2**24)
        time.sleep(0.06)
    while GATE and not os.path.exists(GATE):
        time.sleep(0.01)
    return load(checkpoint, platform, manifest, dtype, strict, None, *more)
startup.load_model = slowly
engine.EngineCore._warm_up = lambda self: (time.sleep(0.3), warm(self))[1]
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "chat.jinja").write_text(TEMPLATE)
    return [str(tiny_llama_gguf(folder / "tiny.gguf")), "--platform", "null", "--chat-template",
            str(folder / "chat.jinja")]


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("ISTHMUS_CACHE", str(tmp_path))


# ---- 3 and 4: one line of progress, then the banner


def test_a_server_starts_with_one_live_line_and_a_banner_of_at_most_twelve(tiny):
    with Terminal("serve", *tiny, "--in-process", "--port", "0", before=SLOW_START) as terminal:
        terminal.expect(" is ready after ")
        terminal.expect("ANTHROPIC_AUTH_TOKEN=none")
        terminal.read()
        loading = terminal.seen.partition(" is ready after ")[0]
        assert loading.find("load weights") < loading.find("warm up") and " of 1.56 GiB" in loading
        shown = [line for line in terminal.screen() if line]
        start = next(i for i, line in enumerate(shown) if " is ready after " in line)
        assert [line for line in shown[:start] if not line.startswith("isthmus: warning")] == [], "the line is gone"
        banner = shown[start:]
        assert len(banner) <= 12 and max(map(len, banner)) < 100
        url = re.search(r"http://127\.0\.0\.1:\d+", banner[0])[0]
        text = "\n".join(banner)
        for words in ("  model    ", ", computed in ", "  memory   ", " of weights, ", " of KV cache", "  context  ",
                      "of that length at once", f"open {url} in a browser", f"curl {url}/v1/chat/completions",
                      f"export OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY=none",
                      f"export ANTHROPIC_BASE_URL={url} ANTHROPIC_AUTH_TOKEN=none"):
            assert words in text, words
        command = re.search(r"curl .*\\\n.*", text)[0].replace("\\\n", " ")
        done = subprocess.run(["sh", "-c", command.replace("curl", "curl -s", 1)], capture_output=True, text=True)
        if done.returncode != 127:  # there is curl
            assert json.loads(done.stdout)["choices"][0]["message"]["role"] == "assistant"
        terminal.send("ctrl-c")
        assert terminal.end() == 0


@pytest.mark.slow
def test_without_a_terminal_progress_is_plain_lines(tiny):
    code = f"import sys\n{SLOW_START}\nfrom isthmus.core.cli.main import main\nsys.exit(main())"
    process = subprocess.Popen([sys.executable, "-c", code, "serve", *tiny, "--in-process", "--port", "0"],
                               stderr=subprocess.PIPE, text=True)
    try:
        lines = []
        while not lines or " is ready after " not in lines[-1]:
            lines.append(process.stderr.readline())
            assert lines[-1], lines
        assert lines[0].startswith("isthmus: load weights, ") and all(line.startswith("isthmus") for line in lines)
        assert any(line.startswith("isthmus: allocate KV cache") for line in lines)
        assert "isthmus: warm up ...\n" in lines
        assert "\x1b" not in "".join(lines)
        process.send_signal(signal.SIGINT)
        assert process.wait(SOON) == 0
    finally:
        process.kill()
        process.stderr.close()
        process.wait()


# ---- 11: 503 with the progress while it loads


def test_while_it_loads_the_answer_is_503_with_the_progress_and_browsers_see_the_page(tiny, tmp_path):
    with listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    with Terminal("serve", *tiny, "--in-process", "--port", str(port),
                  before=SLOW_START.replace('GATE = ""', f"GATE = {str(tmp_path / 'go on')!r}")) as terminal:
        terminal.expect("load weights")

        def ask(path: str, **headers: str):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SOON)
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        status, headers, body = ask("/health")
        told = json.loads(body)
        assert status == 503 and told["status"] == "unavailable" and ("retry-after", "1") in headers
        assert told["progress"].keys() == {"stage", "done", "total"}
        assert told["reason"].startswith("the model is loading: " + told["progress"]["stage"])
        status, _, body = ask("/v1/models")
        assert status == 503 and json.loads(body)["error"]["code"] == "loading"
        status, headers, body = ask("/", Accept="text/html")
        assert status == 200 and b"<!doctype html>" in body
        assert ask("/page/chat.js")[0] == 200 and ask("/")[0] == 503
        (tmp_path / "go on").touch()
        terminal.expect(" is ready after ")
        assert ask("/health")[0] == 200


# ---- 6: the chat in the terminal


def test_a_conversation_with_commands_many_lines_and_figures(tiny):
    with Terminal("chat", *tiny, "--max-tokens", "6", "--temperature", "0", "--platform-option", "delay_ms=250",
                  columns=160) as terminal:
        at = terminal.expect(PROMPT, terminal.expect("/help lists the commands"))
        terminal.send("first line", "alt-enter", "second line", "enter")
        at = terminal.expect(PROMPT, terminal.expect("cached (", at))
        assert re.search(r"\d tokens?, (?:[\d.]+ tok/s, )?first after \d+\.\d\d s, 0 of \d+ prompt tokens cached "
                         r"\(0%\)\)", shown_text(terminal))
        terminal.send('"""block one', "enter", 'block two"""', "enter")
        at = terminal.expect(PROMPT, terminal.expect("cached (", at))
        shares = [int(share) for share in re.findall(r"cached \((\d+)%", shown_text(terminal))]
        assert len(shares) == 2 and shares[1] > 0, "the conversation before is in the cache"
        assert re.search(r"\d tokens, [\d.]+ tok/s, ", shown_text(terminal))
        terminal.send("/set", "enter")
        at = terminal.expect(PROMPT, terminal.expect("(temperature 0, max_tokens 6)", at))
        terminal.send("/hlep", "enter")
        terminal.expect(PROMPT, terminal.expect("did you mean /help?", at))
        terminal.send("/exit", "enter")
        assert terminal.end() == 0


def shown_text(terminal: Terminal) -> str:
    return " ".join(screen(terminal.seen)).replace("  ", " ")


# The line editor keeps the terminal for some time after Enter, as on a busy machine: Ctrl-C is a key, not a signal.
SLOW_TO_LEAVE = """
import time
from prompt_toolkit.input.vt100 import raw_mode
leave = raw_mode.__exit__
raw_mode.__exit__ = lambda self, *error: (time.sleep(0.5), leave(self, *error))[1]
"""


@pytest.mark.parametrize("before", ["", SLOW_TO_LEAVE])
def test_ctrl_c_stops_the_answer_and_nothing_else(tiny, before):
    with Terminal("chat", *tiny, "--platform-option", "delay_ms=80", before=before) as terminal:
        at = terminal.expect(PROMPT, terminal.expect("/help lists the commands"))
        terminal.send("hello", "enter")
        at = terminal.expect(SENT, at)
        terminal.send("ctrl-c")
        at = terminal.expect("(stopped; ", at)
        at = terminal.expect(PROMPT, at)
        terminal.send("/set max_tokens 2", "enter")
        at = terminal.expect(PROMPT, terminal.expect("(max_tokens 2)", at))
        terminal.send("again", "enter")
        terminal.expect(PROMPT, terminal.expect("cut at max_tokens 2", at))
        terminal.send("ctrl-d")
        assert terminal.end() == 0


# ---- a model's text and the terminal

FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467 e\u0301"
HOSTILE = f"safe\x1b]0;owned\x07\x1b[2J\x1b[31m\rover\u202etxt\x9b1m {FAMILY}\tend"


@pytest.fixture
def hostile():
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_GET(self):
            self.answer(200, b'{"data": [{"id": "evil"}]}')

        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/tokenize":
                return self.answer(404, b"{}")
            event = {"choices": [{"index": 0, "delta": {"content": HOSTILE}, "finish_reason": "stop"}]}
            self.answer(200, f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n".encode())

        def answer(self, status, data):
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


STEERS = ("\x1b]0;", "\x1b[2J", "\x1b[31m", "\x9b", "\u202e", "\x07")


def test_a_models_text_steers_no_terminal(hostile):
    with Terminal("generate", "hi", "--url", hostile) as terminal:
        assert terminal.end() == 0
        assert "safe" in terminal.seen and not any(steer in terminal.seen for steer in STEERS), terminal.seen
        assert FAMILY in terminal.seen, "letters are left whole"
    with Terminal("chat", "--url", hostile) as terminal:
        terminal.expect(PROMPT, terminal.expect("/help lists the commands"))
        terminal.send("hi", "enter")
        at = terminal.expect("safe")
        terminal.expect(PROMPT, terminal.expect("first after", at))
        answer = terminal.seen[at - 4:]
        assert not any(steer in answer for steer in STEERS), answer
        terminal.send("ctrl-d")
        terminal.end()


def test_a_program_that_reads_the_answer_gets_it_unchanged(hostile):
    done = subprocess.run([sys.executable, "-m", "isthmus.core.cli.main", "generate", "hi", "--url", hostile],
                          capture_output=True, timeout=SOON)
    assert done.stdout.decode() == HOSTILE + "\n"


def test_what_is_harmless_stays():
    assert harmless("plain \u00e4 \u4f60\u597d\n\ttab") == "plain \u00e4 \u4f60\u597d\n\ttab"
    assert harmless("a\r\nb\x00\x7f\x85") == "a\nb\ufffd\ufffd\ufffd"
