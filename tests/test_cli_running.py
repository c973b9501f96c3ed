"""`isthmus ls | ps | rm | stop | launch`: models and servers of this machine, and tools on them."""
from __future__ import annotations

import json
import os
import shlex
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import psutil
import pytest
from isthmus.core.cli import launch, ls, rm, running, stop
from isthmus.core.cli.main import main
from isthmus.core.config import Config
from isthmus.core.errors import ConfigError
from isthmus.core.weights import sources
from isthmus.core.weights.wheels import KNOWN

from .checkpoints import tiny_llama_gguf
from .effort import SOON
from .serving import Serving

COST = 8  # seconds


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    for name in list(os.environ):
        if name.startswith("ISTHMUS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("ISTHMUS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.utils._cache_manager.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "cache"


def said(capsys, *words: str) -> tuple[int, str, str]:
    code = main(list(words))
    out, err = capsys.readouterr()
    return code, out, err


def record(folder: Path, pid: int, **fields) -> running.Running:
    import socket
    server = running.Running(**{
        "pid": pid, "started": psutil.Process(os.getpid()).create_time(), "host": "127.0.0.1", "port": 9,
        "machine": socket.gethostname(), "url": "http://127.0.0.1:9", "model": "tiny", **fields})
    (folder / "run").mkdir(parents=True, exist_ok=True)
    (folder / "run" / f"{pid}-{server.port}.json").write_bytes(msgspec.json.encode(server))
    return server


# ---- ps and stop


def test_a_server_is_listed_while_it_runs_and_stops_when_told(own_cache, tmp_path, capsys):
    model = str(tiny_llama_gguf(tmp_path / "tiny.gguf"))
    with Serving(model, "--in-process", "--served-model-name", "mine", temporary=tmp_path,
                 ISTHMUS_CACHE=str(own_cache)) as server:
        port = server.address.rpartition(":")[2]
        folder = own_cache / "run"
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in folder.iterdir())
        code, out, _ = said(capsys, "ps")
        assert code == 0
        heads, line = out.splitlines()
        assert heads.split() == "model port state in use weights KV at most platform since pid".split()
        assert line.split()[:3] == ["mine", port, "ready"] and "MiB" in line and str(server.process.pid) in line
        found = json.loads(said(capsys, "ps", "--json")[1])[0]
        assert found["state"] == "ready" and found["memory"] > 2**20 and found["server"]["path"] == model
        code, _, err = said(capsys, "stop", "other")
        assert code == 2 and f"mine at port {port}" in err
        code, out, _ = said(capsys, "stop", "MINE")
        assert code == 0 and out == f"stopped mine at port {port}\n"
        assert server.process.wait(SOON) == 0 and list(folder.iterdir()) == []
    assert said(capsys, "ps")[1].startswith("No server of yours runs")


@pytest.mark.slow
def test_a_server_that_loads_is_listed_and_running_requests_may_finish_or_are_cut(own_cache, tmp_path, capsys):
    model = str(tiny_llama_gguf(tmp_path / "tiny.gguf"))
    with Serving(model, "--in-process", temporary=tmp_path, delay_ms=100, ISTHMUS_CACHE=str(own_cache)) as server:
        port = server.address.rpartition(":")[2]
        stream = server.stream(200)
        code, out, _ = said(capsys, "stop", "--port", port, "--timeout", "0.2")
        assert code == 1 and "has not ended yet" in out
        code, out, _ = said(capsys, "stop", port, "--now")
        assert code == 0 and "stopped" in out
        stream.read()


def test_files_of_servers_that_died_are_removed_and_those_of_other_machines_left(own_cache, capsys):
    record(own_cache, 2**22 + 1)                                      # no such process
    record(own_cache, os.getpid(), started=1.0)                       # its number is another's now
    record(own_cache, os.getpid(), machine="elsewhere", port=10)
    (own_cache / "run" / "junk.json").write_text("{}")
    alive = record(own_cache, os.getpid(), port=11)
    assert running.list_running() == [alive]
    assert sorted(path.name for path in (own_cache / "run").iterdir()) == sorted([
        f"{os.getpid()}-10.json", f"{os.getpid()}-11.json", "junk.json"])
    assert running.look(alive).state == "gives no answer"
    code, out, _ = said(capsys, "ps")
    assert code == 0 and "gives no answer" in out


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="a system without named pipes")
def test_what_is_no_file_of_a_server_stops_neither_ps_nor_stop_nor_serve(own_cache, capsys):
    folder = own_cache / "run"
    good = record(own_cache, os.getpid(), port=11)
    for pid in (-1, 0):
        record(own_cache, pid)
    record(own_cache, 2**62)  # no such process: removed
    (folder / "folder.json").mkdir()
    os.mkfifo(folder / "pipe.json")
    (folder / "link.json").symlink_to(folder / f"{os.getpid()}-11.json")
    (folder / "endless.json").symlink_to("/dev/zero")
    (folder / "deep.json").write_text('{"x":' + "[" * 60_000)
    (folder / "long.json").write_text(" " * running.MAX_FILE + "{}")
    (folder / "bytes.json").write_bytes(b'{"pid": 1, "url": "\xff')
    there = {path.name for path in folder.iterdir()}
    assert running.list_running() == [good]
    assert {path.name for path in folder.iterdir()} == there - {f"{2**62}-9.json"}, "what is not ours is left alone"
    with running.registered(Config(), "http://127.0.0.1:9", 9):
        assert len(running.list_running()) == 2
    assert said(capsys, "stop", "nothing")[0] == 2
    for number, url in enumerate(("http://[::1", "", "nonsense", "http://a:b", "http://127.0.0.1:1\r\nX: y")):
        record(own_cache, os.getpid(), port=20 + number, url=url)
    code, out, _ = said(capsys, "ps")
    assert code == 0 and out.count("gives no answer") == 6
    assert len(json.loads(said(capsys, "ps", "--json")[1])) == 6


def test_a_folder_that_cannot_be_written_is_no_reason_not_to_serve(own_cache):
    own_cache.parent.mkdir(exist_ok=True)
    own_cache.write_text("a file in its place")
    with running.registered(Config(), "http://127.0.0.1:9", 9) as tell:
        tell({"served_name": "x", "platform": "null", "weight_bytes": 1, "kv_bytes": 1})


def test_which_server_is_meant(own_cache):
    servers = [SimpleNamespace(port=8000, model="a"), SimpleNamespace(port=8001, model="b"),
               SimpleNamespace(port=8002, model="b")]
    assert running.choose("8001", servers) == [servers[1]] and running.choose("A", servers) == [servers[0]]
    with pytest.raises(ConfigError, match="2 servers have this model.*8001, 8002"):
        running.choose("b", servers)
    with pytest.raises(ConfigError, match="no server of yours"):
        running.choose("b", [])


@pytest.mark.parametrize("words", [
    ["stop"], ["stop", "x", "--all"], ["stop", "x", "--port", "1"], ["stop", "--all", "--timeout", "-1"]])
def test_stop_wants_one_or_all(words, capsys):
    assert main(words) == 2 and capsys.readouterr().err.startswith("isthmus: ")


def test_stop_all_of_none_is_no_error(capsys):
    assert said(capsys, "stop", "--all") == (0, "No server of yours runs on this machine.\n", "")


def test_stop_ends_only_the_process_that_wrote_the_file(own_cache):
    mine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        other = record(own_cache, mine.pid, started=1.0)
        stop._signal(other)
        assert mine.poll() is None
        stop._signal(record(own_cache, mine.pid, started=psutil.Process(mine.pid).create_time()))
        assert mine.wait(SOON) != 0
    finally:
        mine.kill()
        mine.wait()


# ---- ls and rm


def test_models_here_are_listed_with_what_serves_them_and_deleted(own_cache, monkeypatch, capsys):
    known = KNOWN["gemma3-270m"]
    small = known._replace(size=5)
    monkeypatch.setitem(KNOWN, "gemma3-270m", small)
    assert said(capsys, "ls")[1].startswith("No model is here yet")
    path = small.path(own_cache / "models")
    path.parent.mkdir(parents=True)
    path.write_bytes(b"12345")
    server = record(own_cache, os.getpid(), port=8001, path=str(path))
    code, out, _ = said(capsys, "ls")
    assert code == 0 and out.splitlines()[1].split() == ["gemma3-270m", "0.0", "KiB", "registry", "8001", str(path)]
    assert json.loads(said(capsys, "ls", "--json")[1]) == [{
        "name": "gemma3-270m", "size": 5, "source": "registry", "path": str(path), "ports": [8001]}]
    code, _, err = said(capsys, "rm", "gemma3-270m")
    assert code == 2 and "is served at port 8001: `isthmus stop 8001` first" in err and path.exists()
    (own_cache / "run" / f"{server.pid}-8001.json").unlink()
    assert said(capsys, "rm", "gemma3-270m")[:2] == (0, "deleted gemma3-270m, 0.0 KiB\n")
    assert not path.parent.exists()
    assert "is not on this machine" in said(capsys, "rm", "gemma3-270m")[2]


def test_a_model_of_the_hub_is_deleted_whole(tmp_path, capsys):
    repo = tmp_path / "hub" / "models--org--name"
    (repo / "blobs").mkdir(parents=True)
    (repo / "blobs" / "abc").write_bytes(b"x" * 4096)
    for commit in ("a" * 40, "b" * 40):
        (repo / "snapshots" / commit).mkdir(parents=True)
        (repo / "snapshots" / commit / "model.gguf").symlink_to(repo / "blobs" / "abc")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("a" * 40)
    assert "org/name" in said(capsys, "ls")[1]
    assert said(capsys, "rm", "org/name")[:2] == (0, "deleted org/name, 4.0 KiB\n") and not repo.exists()


def test_what_is_no_download_is_not_deleted(tmp_path, capsys):
    mine = tmp_path / "mine.gguf"
    mine.write_text("precious")
    code, _, err = said(capsys, "rm", str(mine))
    assert code == 2 and "a file or folder of your own" in err and mine.read_text() == "precious"
    assert "there is no downloaded model 'nothing'; there are: none" in said(capsys, "rm", "nothing")[2]


def test_all_names_are_looked_at_before_one_is_deleted(monkeypatch):
    deleted = []
    monkeypatch.setattr(sources, "find_downloaded", lambda name: SimpleNamespace(
        name=name, path=Path("/m") / name) if name != "bad" else (_ for _ in ()).throw(ConfigError("bad")))
    monkeypatch.setattr(sources, "delete_model", lambda entry: deleted.append(entry.name) or 1)
    with pytest.raises(ConfigError):
        rm.run(SimpleNamespace(model=["a", "bad"]), None)
    assert deleted == []
    rm.run(SimpleNamespace(model=["a", "b", "a"]), None)
    assert deleted == ["a", "b"] and ls._inside("/m/a/x", "/m/a") and not ls._inside("/m/ab", "/m/a")


# ---- launch

TARGET = launch.Target("http://127.0.0.1:8000", "my model", "sekret", 32768)


def shell(text: str, variables: tuple[str, ...]) -> dict[str, str | None]:
    """What a POSIX shell makes of the printed lines: these variables, and the tool's words."""
    program = (f"import json, os, sys; "
               f"print(json.dumps([{{n: os.environ.get(n) for n in {variables!r}}}, sys.argv[1:]]))")
    lines = text.splitlines()
    words = shlex.split(lines[-1])
    lines[-1] = shlex.join([sys.executable, "-c", program, *words[1:]])
    done = subprocess.run(["sh", "-c", "\n".join(lines)], capture_output=True, text=True, check=True,
                          env={**os.environ, "ISTHMUS_API_KEY": "sekret", "ANTHROPIC_API_KEY": "of somebody else"})
    return json.loads(done.stdout)


@pytest.mark.parametrize("name, variables, words", [
    ("claude", {"ANTHROPIC_BASE_URL": "http://127.0.0.1:8000", "ANTHROPIC_AUTH_TOKEN": "sekret",
                "ANTHROPIC_API_KEY": None, "ANTHROPIC_MODEL": "my model",
                "ANTHROPIC_DEFAULT_HAIKU_MODEL": "my model", "CLAUDE_CODE_ATTRIBUTION_HEADER": "0"}, ["-p", "a b"]),
    ("codex", {"OPENAI_API_KEY": "sekret"}, [
        "-c", 'model_provider="isthmus"', "-c", 'web_search="disabled"',
        "-c", 'model_providers.isthmus.name="Isthmus"',
        "-c", 'model_providers.isthmus.base_url="http://127.0.0.1:8000/v1"',
        "-c", 'model_providers.isthmus.env_key="OPENAI_API_KEY"', "-c", 'model_providers.isthmus.wire_api="responses"',
        "-c", "model_context_window=32768", "-m", "my model", "-p", "a b"]),
    ("aider", {"OPENAI_API_BASE": "http://127.0.0.1:8000/v1", "OPENAI_API_KEY": "sekret"},
     ["--model", "openai/my model", "-p", "a b"])])
def test_what_is_printed_is_what_a_shell_needs(name, variables, words):
    text = launch.shown_plan(name, launch.TOOLS[name].plan(TARGET), ["-p", "a b"], "sekret", True)
    assert "sekret" not in text and shell(text, tuple(variables)) == [variables, words]
    without = launch.shown_plan(name, launch.TOOLS[name].plan(TARGET), [], "sekret", False)
    assert "<your key>" in without and "sekret" not in without


@pytest.mark.parametrize("version", (0, 1, 2))
def test_opencode_gets_its_configuration_in_a_variable(version, monkeypatch):
    monkeypatch.setattr(launch, "_major_version", lambda program: version)
    config = json.loads(launch._opencode(TARGET).environment["OPENCODE_CONFIG_CONTENT"])
    assert config["model"] == "isthmus/my model"
    provider = config["provider" if version == 1 else "providers"]["isthmus"]
    assert provider["options" if version == 1 else "settings"]["baseURL"] == "http://127.0.0.1:8000/v1"
    assert provider["models"]["my model"]["limit"]["context"] == 32768


@pytest.fixture(scope="module")
def serving(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    model = str(tiny_llama_gguf(folder / "tiny.gguf"))
    with Serving(model, "--in-process", "--api-key", "sekret", temporary=folder, ISTHMUS_CACHE=str(folder)) as server:
        server.cache = folder
        yield server


def test_the_server_that_runs_is_found_and_the_tool_started_on_it(serving, monkeypatch, tmp_path, capsys):
    tool = tmp_path / "bin" / "aider"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho \"$OPENAI_API_BASE|$OPENAI_API_KEY|$*\"\nexit 3\n")
    tool.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tool.parent}:{os.environ['PATH']}", "ISTHMUS_CACHE": str(serving.cache),
                   "ISTHMUS_API_KEY": "sekret"}
    done = subprocess.run([sys.executable, "-m", "isthmus.core.cli.main", "launch", "aider", "--", "--no-git", "a b"],
                          capture_output=True, text=True, env=environment)
    assert done.returncode == 3, done.stderr
    url, key, words = done.stdout.strip().split("|")
    assert url == f"http://{serving.address}/v1" and key == "sekret" and words.endswith("--no-git a b")
    assert "a model made for more helps" in done.stderr


def test_launch_says_what_is_wrong(serving, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nowhere")
    url = f"http://{serving.address}"
    for words, parts in ((["launch"], ["say which tool", "claude (Claude Code)"]),
                         (["launch", "cladue"], ["did you mean claude?"]),
                         (["launch", "aider"], ["aider is not installed", "--print"]),
                         (["launch", "aider", "--print", "--url", url], ["asks for an API key"]),
                         (["launch", "aider", "--print", "--url", "http://127.0.0.1:9"], ["no server answers"])):
        code, _, err = said(capsys, *words)
        assert code == 2 and all(part in err for part in parts), err
    monkeypatch.setenv("ISTHMUS_API_KEY", "sekret")
    code, _, err = said(capsys, "launch", "aider", "--print", "--url", url, "--model", "nothing")
    assert code == 2 and "--model nothing: " in err
    monkeypatch.setitem(launch.TOOLS, "aider", launch.Tool("aider", "/v1/nothing", launch._aider))
    code, _, err = said(capsys, "launch", "aider", "--print", "--url", url)
    assert code == 2 and "has no /v1/nothing" in err


def test_of_several_servers_one_must_be_named(own_cache, capsys):
    for port in (8001, 8002):
        record(own_cache, os.getpid(), port=port)
    code, _, err = said(capsys, "launch", "aider", "--print")
    assert code == 2 and "2 servers run here, say which: --port 8001 (tiny), --port 8002 (tiny)" in err
