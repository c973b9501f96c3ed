"""What the command line says about settings and this machine: doctor, explain, the banner."""
from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from isthmus.core import startup
from isthmus.core.cli import doctor
from isthmus.core.cli.banner import banner, base_url, count, example
from isthmus.core.cli.main import main
from isthmus.core.cli.serve import open_to_others
from isthmus.core.config import Config, ModelSettings, PlatformSettings, ServerSettings
from isthmus.core.errors import CheckpointError, RequestError
from isthmus.core.platform import Unavailable
from isthmus.core.settings import resolve
from isthmus.platforms.options import check_options

from .checkpoints import tiny_llama_gguf, write_safetensors

COST = 20  # seconds


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch):
    for name in list(os.environ):
        if name.startswith("ISTHMUS_") and name != "ISTHMUS_CACHE":
            monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(tiny_llama_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf"))


def test_doctor_has_a_verdict_in_twenty_lines_of_a_pipe(capsys):
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= 20
    assert "* " in text and "reference" in text and "`isthmus serve` runs on" in text
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["platforms"]["reference"]["available"] and report["libraries"]["numpy"]
    assert report["chosen"] in report["platforms"]


@pytest.mark.parametrize("words, code, parts", [
    (["--platform", "reference"], 0, ["* reference", "(asked for)", "`isthmus serve --platform reference` runs on"]),
    (["--platform", "null"], 0, ["* null", "makes words up", "+ reference"]),
    (["--platform", "referense"], 1, ["- referense", "not installed; did you mean reference? (asked for)",
                                      "`isthmus serve --platform referense` cannot run here; what can: "]),
    (["--platform", "null", "--platform-option", "dealy_ms=5"], 1,
     ["- null", "the null platform has no option dealy_ms; did you mean delay_ms? (asked for)", "+ reference"]),
    (["--platform", "null", "--platform-option", "delay_ms=soon"], 1, ["delay_ms='soon': a whole number is needed"]),
    (["--platform", "null", "--platform-option", "delay_ms=5"], 0, ["* null", "+ reference"]),
])
def test_doctor_says_whether_the_platform_that_was_asked_for_can_run(words, code, parts, capsys):
    assert main(["doctor", *words]) == code
    text = capsys.readouterr().out
    assert all(part in text for part in parts), text
    assert text.count("* ") == (2 if code == 0 else 1), "the legend, and the one that is taken"
    assert main(["doctor", "--json", *words]) == code
    report = json.loads(capsys.readouterr().out)
    assert report["asked"] == words[1] and report["chosen"] == (None if code else words[1])


def test_a_bug_report_has_what_is_asked_first_and_no_secret(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("ISTHMUS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("ISTHMUS_API_KEY", "sekret")
    monkeypatch.setenv("ISTHMUS_PORT", "9009")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("ISTHMUS_OTHER_TOKEN", "sekret")
    assert main(["doctor", "--bug-report", "--platform", "reference"]) == 0
    text = capsys.readouterr().out
    assert "sekret" not in text and str(tmp_path) not in text and "~/cache" in text
    for part in ("### isthmus doctor", "* reference", "--port 9009   (environment ISTHMUS_PORT)",
                 "--api-key (hidden)", "ISTHMUS_OTHER_TOKEN=(hidden)", "### servers that run", "torch"):
        assert part in text, part


def test_doctor_explains_its_marks_and_tells_peers_from_helpers(capsys):
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "(* would be taken, + can run too, - cannot run here)" in text
    lines = {line.split()[1]: line for line in text.splitlines() if line.startswith("  ")}
    assert "makes words up" in lines["null"] and "slow" in lines["reference"]


def test_doctor_tells_the_whole_reason_at_any_width():
    reason = "no driver found: " + "install it, in a container pass --device=/dev/a-b --device=/dev/c; " * 9 + "the end"
    platforms = {"chip": {"available": False, "reason": f"platform 'chip': {reason}"},
                 "other": {"available": True, "device": "d", "dtypes": ["f32"], "memory_free": 1, "rank": 1}}
    report = {"isthmus": "1", "python": "3", "system": "s", "cpus": 2, "memory": {"free": 1, "total": 2},
              "libraries": {f"library{n}": "1.2.3" for n in range(20)} | {"none": None}, "cache": "/c",
              "platforms": platforms, "asked": None, "chosen": "other", "problem": None}
    whole = doctor.lines(report)
    assert any(line.endswith(reason) for line in whole), "one line of a pipe has it all"
    for columns in (40, 80, 120):
        broken = doctor.lines(report, columns)
        assert max(map(len, broken)) <= columns
        assert " ".join(broken).split() == " ".join(whole).split(), "nothing is lost, no word broken"
        first = next(i for i, line in enumerate(broken) if line.startswith("  - chip"))
        assert broken[first + 1].startswith(" " * len("  - chip   ")), "below its own beginning"


@pytest.mark.parametrize("module", ["cpu", "null", "reference"])
def test_an_option_that_a_platform_lacks_is_named_with_what_was_meant(module):
    platform = pytest.importorskip(f"isthmus.platforms.{module}.platform", exc_type=Exception)
    with pytest.raises(Unavailable, match=f"the {module} platform has no option threds"):
        platform.Platform({"threds": "2"}).probe()


def test_options_of_platforms():
    check_options("x", ["threads"], ("threads", "check"))
    with pytest.raises(Unavailable, match=r"the x platform has no option thread; did you mean threads\?"):
        check_options("x", ["threads", "thread"], ("threads", "check"))
    with pytest.raises(Unavailable, match="no option zebra; it has threads, check"):
        check_options("x", ["zebra"], ("threads", "check"))
    with pytest.raises(Unavailable, match="no option a; it has none"):
        check_options("x", ["a"], ())


def test_doctor_survives_whatever_is_broken(monkeypatch, capsys):
    def broken(*_):
        raise OSError("/proc is not mounted")
    monkeypatch.setattr(doctor, "_memory", broken)
    monkeypatch.setattr(doctor, "version", broken)
    monkeypatch.setattr("isthmus.core.discovery.probe_all", lambda options=None: {
        **{f"p{i}": ImportError("no module\nnamed " + "x" * 500) for i in range(30)}, "q": RuntimeError()})
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= 20 and "no platform can run here" in text and "pip install" in text
    monkeypatch.setattr("isthmus.core.discovery.probe_all", broken)
    assert main(["doctor"]) == 1
    assert "/proc is not mounted" in capsys.readouterr().out


def probing(folder: Path, line: str, seconds: int) -> list[str]:
    """Python's arguments for `isthmus doctor` where an installed package's platform runs this line in its probe."""
    info = folder / "acme-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[isthmus.platforms]\nacme = acme_chip:Platform\n")
    (folder / "acme_chip.py").write_text(
        "import os, sys\nfrom isthmus.platforms.null.platform import Platform as Null\nclass Platform(Null):\n"
        f"    def probe(self, rank=0, world=1):\n        {line}\n")
    (folder / "null").mkdir()
    (folder / "null" / "platform.py").touch()  # the only one of the folders that is listed
    return [sys.executable, "-c", f"import pathlib, sys; sys.path.insert(0, {str(folder)!r}); from isthmus.core import "
            f"discovery; from isthmus.core.cli import doctor, main; doctor.MAX_SECONDS = {seconds}; discovery."
            f"platform_root = lambda: pathlib.Path({str(folder)!r}); sys.exit(main.main(['doctor']))"]


@pytest.mark.parametrize("line, reason, shown", [
    ("sys.exit(0)", "acme_chip.py:5: SystemExit: 0", ""),
    ("os._exit(0)", "its probe ends the process: exit status 0", ""),
    ("os.abort()", f"its probe ends the process: signal {signal.SIGABRT}", "acme_chip.py\", line 5 in probe"),
    ("[iter(int, 1) and None for _ in iter(int, 1)]", "its probe ends the process: exit status 1",
     "acme_chip.py\", line 5 in probe"),
])
def test_doctor_names_the_platform_that_ends_its_process_or_never_ends(tmp_path, line, reason, shown):
    arguments = probing(tmp_path, line, 10 if "iter" in line else 300)
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=600, env={**os.environ, "COLUMNS": "200"})
    told = next(told for told in done.stdout.splitlines() if "acme" in told)
    assert done.returncode == 0 and reason in told and shown in done.stderr, done.stdout + done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full here")
@pytest.mark.parametrize("words", [["doctor"], ["doctor", "--json"], ["version"]])
def test_output_that_cannot_be_written_is_told_in_one_line(words):
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "isthmus.core.cli.main", *words], stdout=full,
                              stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2 and done.stderr == "isthmus: [Errno 28] No space left on device\n"


def test_explain_names_values_origins_and_decisions(tiny, capsys, monkeypatch):
    monkeypatch.setenv("ISTHMUS_PORT", "8123")
    monkeypatch.setenv("ISTHMUS_API_KEY", "hunter2")
    assert main(["explain", tiny, "--platform", "reference", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    settings = report["settings"]
    assert settings["port"] == {"group": "server", "set_by": "environment ISTHMUS_PORT", "variable": "ISTHMUS_PORT",
                                "value": 8123}
    assert settings["platform"]["set_by"] == "command line" and settings["dtype"]["set_by"] == "default"
    decided = {d["what"]: d["value"] for d in report["decisions"]}
    assert decided["platform"] == "reference" and decided["model"] == "tiny" and decided["context"] == "256 tokens"
    assert main(["explain", tiny, "--platform", "reference"]) == 0
    text = capsys.readouterr().out
    assert "hunter2" not in text + json.dumps(report)
    assert "environment ISTHMUS_PORT" in text and "named by the user" in text


def test_explain_says_what_cannot_work(tiny, capsys):
    assert main(["explain", tiny, "--platform", "nosuch"]) == 2
    assert "no such platform is installed" in capsys.readouterr().err
    for words, problem in ((["--max-model-len", "100000"], "--max-model-len 100000"),
                           (["--page-size", "7"], "--page-size 7: reference offers 1, 4, 8, 16"),
                           (["--chat-template", "/no.jinja"], "--chat-template /no.jinja: no such file")):
        assert main(["explain", tiny, "--platform", "reference", *words]) == 2
        assert problem in capsys.readouterr().out


@pytest.mark.parametrize("model, words", [("nope", "'nope' is no known model"), ("./nope.gguf", "no such file"),
                                          ("/no/where", "no such file"), ("a/b.gguf", "no such file")])
def test_explain_finds_that_there_is_no_such_model(model, words, capsys):
    assert main(["explain", model, "--platform", "reference"]) == 2
    assert words in capsys.readouterr().out


def test_explain_downloads_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("ISTHMUS_CACHE", str(tmp_path))
    monkeypatch.setattr("isthmus.core.weights.sources.resolve_model", lambda *_: pytest.fail("would download"))
    for model in ("gemma3-270m", "SmolLM2-135M-instruct", "owner/name", "owner/name:Q4_K_M"):
        assert main(["explain", model, "--platform", "reference"]) == 0
        assert "not on this machine yet" in capsys.readouterr().out


def test_explain_shows_the_variables_that_are_no_settings(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("ISTHMUS_CACHE", str(tmp_path))
    main(["explain", "nope"])
    text = capsys.readouterr().out
    assert str(tmp_path) in text and "folder for downloaded models" in text and "ISTHMUS_CONFIG" in text
    main(["explain", "nope", "--json"])
    assert json.loads(capsys.readouterr().out)["environment"]["ISTHMUS_CACHE"] == str(tmp_path)


def test_help_shows_how_a_settings_file_looks_and_the_file_works(capsys, tmp_path):
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    text = capsys.readouterr().out
    for word in ("fcfs,lpm,priority", "lru,priority", "ISTHMUS_CACHE", "ISTHMUS_CONFIG"):
        assert word in text
    assert "/health stays 200" in " ".join(text.split()) and "exit code 1" in text
    lines = text[text.index("settings in a YAML file"):].splitlines()
    file = tmp_path / "c.yaml"
    file.write_text("\n".join(line[2:] for line in lines if line.startswith("  ")))
    config = resolve({}, {}, file).config
    assert (config.server.port, config.scheduler.max_running_requests) == (9000, 64)
    assert config.platform.platform_option == ("threads=8",)


INFO = {"served_name": "m", "dtype": "bf16", "page_size": 16, "pages": 1000, "max_model_len": 4000, "max_running": 256,
        "report": [f"note {i}" for i in range(9)], "platform": "cpu", "platform_reason": "the fastest found",
        "weight_bytes": 98e6, "kv_bytes": 2.5e9}
URL = "http://127.0.0.1:8000"


class Words:
    """A text service whose template adds `extra` tokens to one per character."""

    tokenizer = SimpleNamespace(encode=lambda text, add_special=False: [0] * len(text))

    def __init__(self, extra: int | None = 10, error: Exception | None = None):
        def encode(messages):
            if error is not None:
                raise error
            return [0] * (extra + len(messages[0]["content"]))
        self.template = None if extra is None else SimpleNamespace(encode=encode)


def command_in(text: str) -> list[str]:
    """The words of the banner's curl command, as a shell reads them."""
    lines = text.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("  try "))
    last = next(i for i in range(first, len(lines)) if not lines[i].endswith("\\"))
    return shlex.split("\n".join(line[11:] for line in lines[first:last + 1]).replace("\\\n", ""))


@pytest.mark.parametrize("info", [
    INFO, INFO | {"served_name": "owner/" + "long-name-" * 20, "platform_reason": "because " * 40,
                  "report": ["210 x q4_1 expanded to float32 (" + "for some reason " * 20 + ")"] * 4}])
@pytest.mark.parametrize("key", [None, "hunter2"])
def test_the_banner_fits_and_can_be_pasted(info, key):
    text = banner(info, Config(server=ServerSettings(api_key=key)), URL, 3.21, Words())
    lines = text.splitlines()
    assert len(lines) <= 12 and max(map(len, lines)) < 100
    words = command_in(text)
    assert words[:2] == ["curl", f"{URL}/v1/chat/completions"]
    body = json.loads(words[words.index("-d") + 1])
    assert body.get("model", info["served_name"]) == info["served_name"] and body["messages"][0]["role"] == "user"
    assert "hunter2" not in text and ("x-api-key: $OPENAI_API_KEY" in words) == (key is not None)
    sent = "<your key>" if key else "none"
    exports = [dict(word.split("=", 1) for word in shlex.split(line[11:])[1:]) for line in lines[-2:]]
    assert exports == [{"OPENAI_BASE_URL": f"{URL}/v1", "OPENAI_API_KEY": sent},
                       {"ANTHROPIC_BASE_URL": URL, "ANTHROPIC_AUTH_TOKEN": sent}]
    assert f"  page     open {URL} in a browser" in text


def test_the_banner_says_what_it_knows():
    text = banner(INFO, Config(), URL, 3.21, Words())
    assert "4 requests of that length" in text and "93 MiB of weights, 2.33 GiB of KV cache for 16000 tokens" in text
    assert "  weights  tensors: note 0; note 1; note 2; note 3; note 4; note 5; note 6; note 7; note 8\n" in text
    many = banner(INFO | {"report": ["a note of thirty letters"] * 9}, Config(), URL, 1, Words())
    two = "a note of thirty letters; a note of thirty letters"
    assert f"  weights  tensors: {two}; 7 more (all: /server_info)\n" in many
    long = INFO | {"report": ["14 x fp8_128 expanded to bfloat16 (no kernel on cpu)", "2 x f32 cast to bfloat16"] +
                   ["a note"]}
    assert ("  weights  tensors: 14 x fp8_128 expanded to bfloat16 (no kernel on ...; 2 more (all: /server_info)\n" in
            banner(long, Config(), URL, 1, Words()))
    default = banner(INFO | {"served_name": "smollm2-135m-instruct"}, Config(), URL, 1, Words())
    assert '"model": "smollm2-135m-instruct"' in default, "the default model's name has room"
    assert '"model": "m"' in text and "cpu: the fastest found" in text
    assert "cpu on a chip, 2 threads: the fastest" in banner(INFO | {"device": "a chip, 2 threads"}, Config(), URL, 1,
                                                             Words())
    ranks = banner(INFO | {"ranks": 3}, Config(), URL, 1, Words())
    assert "cpu, 3 ranks: the fastest" in ranks
    assert "weights among 3 ranks, " in ranks and "KV cache in each for" in ranks
    assert "ranks" not in banner(INFO | {"ranks": 1}, Config(), URL, 1, Words())
    small = banner(INFO | {"pages": 250, "report": []}, Config(), URL, 1, Words())
    assert "; 1 request of that length at once" in small and "weights  " not in small
    assert "; 1 request of" in banner(INFO | {"pages": 375}, Config(), URL, 1, Words())
    longer = banner(INFO | {"platform_reason": "acme: no driver for it " * 18}, Config(), URL, 1, Words())
    assert " ... (why: `isthmus explain`)\n" in longer
    reason = "the fastest found, before mlx; cuda, npu, rocm, tpu, xpu cannot run here (isthmus doctor says why)"
    named = banner(INFO | {"platform_reason": reason, "device": "AMD EPYC, 2 threads"}, Config(), URL, 1, Words())
    assert "on AMD EPYC, 2 threads: the fastest found, before mlx (why: `isthmus explain`)\n" in named
    assert "prefixes are not kept" in banner(INFO | {"prefix_cache": False}, Config(), URL, 1, Words())


def test_the_banner_tells_where_else_it_listens_and_how_it_samples():
    text = banner(INFO | {"sampling_defaults": {"temperature": 0.2, "top_p": 0.9}}, Config(), URL, 1, Words())
    assert "  sampling temperature 0.2, top_p 0.9 as the model's makers advise, unless a request sets any\n" in text
    assert "on every address" not in text and "sampling" not in banner(INFO, Config(), URL, 1, Words())
    for host, address in (("0.0.0.0", "0.0.0.0:8000"), ("::", "[::]:8000")):
        wide = banner(INFO, Config(server=ServerSettings(host=host)), URL, 1, Words()).splitlines()[0]
        assert wide.endswith(f"{URL} (on every address, {address})")


@pytest.mark.parametrize("host, address, key, warned", [
    ("0.0.0.0", "0.0.0.0", None, True), ("::", "::", None, True), ("box", "192.168.1.5", None, True),
    ("0.0.0.0", "0.0.0.0", "k", False), ("127.0.0.1", "127.0.0.1", None, False), ("localhost", "::1", None, False)])
def test_a_server_that_others_can_use_without_a_key_says_so(host, address, key, warned):
    told = open_to_others(Config(server=ServerSettings(host=host, api_key=key)), address)
    assert bool(told) == warned and (not warned or f"--host {host}" in told and "ISTHMUS_API_KEY" in told)


def test_explain_warns_of_a_slow_platform_and_tells_the_recommended_sampling(tiny, capsys, monkeypatch):
    assert main(["explain", tiny, "--platform", "reference"]) == 0
    text = capsys.readouterr().out
    assert "(named by the user; warning: reference is the slow oracle" in text and "nothing is recommended" in text
    monkeypatch.setattr("isthmus.core.weights.sources.recommended_sampling", lambda *_: {"temperature": 0.2})
    assert main(["explain", tiny, "--platform", "reference", "--kv-cache-memory", "2MiB"]) == 0
    text = capsys.readouterr().out
    assert "temperature 0.2  (recommended by the model's makers" in text and "2MiB asked for" in text


def test_a_model_of_an_unknown_kind_is_named(tmp_path, capsys):
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text('{"model_type": "odd", "architectures": ["OddModel"]}')
    write_safetensors(tmp_path / "odd" / "model.safetensors", {"x": np.zeros(2, np.float32)})
    main(["explain", str(tmp_path / "odd"), "--platform", "reference"])
    assert f"{tmp_path / 'odd'}: " in capsys.readouterr().out
    with pytest.raises(CheckpointError, match=f"{tmp_path / 'odd'}: .*odd"):
        startup.load(Config(model=ModelSettings(str(tmp_path / "odd")), platform=PlatformSettings("null")))


@pytest.mark.parametrize("words, context, path, body", [
    (Words(), 100, "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
    (Words(), 13, "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
    (Words(), 12, "/v1/completions", {"prompt": "A"}),
    (Words(None), 100, "/v1/completions", {"prompt": "Once upon a time"}),
    (Words(error=RequestError("a tool is needed")), 100, "/v1/completions", {"prompt": "Once upon a time"}),
    (Words(None), 2, "/v1/completions", {"prompt": "A"}),
    (Words(None), 1, "/v1/models", None),
])
def test_the_example_is_one_that_this_model_can_answer(words, context, path, body):
    assert example(words, context) == (path, body)
    text = banner(INFO | {"max_model_len": context}, Config(server=ServerSettings(api_key="k")), URL, 1, words)
    assert URL + path in command_in(text) and "x-api-key" in text


def test_numbers_and_their_words_agree():
    assert [count(n, "request") for n in (0, 1, 1.04, 1.5, 2, 256.0)] == [
        "0 requests", "1 request", "1 request", "1.5 requests", "2 requests", "256 requests"]


@pytest.mark.parametrize("host, url", [("0.0.0.0", "http://127.0.0.1:1"), ("::", "http://[::1]:1"),
                                       ("10.0.0.1", "http://10.0.0.1:1"), ("::1", "http://[::1]:1")])
def test_the_address_for_clients_of_this_machine(host, url):
    assert base_url(host, 1) == url
