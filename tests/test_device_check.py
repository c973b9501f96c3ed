"""ci/device_check.sh: all of it on the emulated platform with tiny sizes, and that it goes on where it was."""
from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from .effort import until

COST = 165  # seconds, 20 of them without the slow test
ROOT = Path(__file__).resolve().parent.parent
SCRIPT, FOLDER = ROOT / "ci" / "device_check.sh", ROOT / "benchmarks" / "device"
STEPS = ("facts", "ceilings", "attention", "linears", "llama", "qwen", "engine", "conformance", "kernels_attention",
         "kernels_products", "kernels_others")


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in ("subject", "report", "goals", "steps"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    spec = spec_from_file_location("device_check", FOLDER / "check.py")
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


class Checks:
    """A check of three small steps on a device that is made up; the second one ends as a file says."""

    def __init__(self, check: ModuleType, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.check, self.top, self.code = check, folder / "top", folder / "code"
        self.code.write_text("3")
        self.subject = check.Subject("cuda", "a GPU", False, "c0ffee")
        self.scripts = {
            "first": "print('fine')",
            "second": f"code = int(open({str(self.code)!r}).read()); print('no GPU'); raise SystemExit(code)",
            "third": "import time; time.sleep(60)"}
        self.beside = False
        self.limits = {"third": 1}  # seconds; others have all that they may need
        monkeypatch.setattr(check, "steps", lambda *_: [
            check.Step(name, self.limits.get(name, 60), (sys.executable, "-c", script), empty=(2,),
                       beside=self.beside and at > 0)
            for at, (name, script) in enumerate(self.scripts.items())])
        monkeypatch.setattr(check, "find", lambda *_: self.subject)
        monkeypatch.setattr(sys.modules["report"], "TITLES", {name: name for name in self.scripts})

    @property
    def folder(self) -> Path:
        return self.top / self.subject.folder

    def __call__(self, *words: str) -> tuple[int, dict[str, str]]:
        done = self.check.main(["cuda", f"--folder={self.top}", *words])
        status = self.check.read_status(self.folder, self.subject)
        return done, {name: part["outcome"] for name, part in status.items()}


@pytest.fixture
def three(check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Checks:
    return Checks(check, monkeypatch, tmp_path)


def test_a_failed_step_and_a_slow_one_do_not_end_the_rest_and_a_done_one_is_not_done_again(three, capsys):
    code, outcomes = three()
    assert code == 1
    assert outcomes == {"first": "done", "second": "failed with 3", "third": "ended after 1 s"}
    report = (three.folder / "report.md").read_text()
    assert "| second | failed with 3 |" in report and "cuda on a GPU" in report and "Commit c0ffee" in report
    assert (three.top / "report.md").read_text() == report
    three.code.write_text("0")
    capsys.readouterr()
    code, outcomes = three("--step=second")
    assert (code, outcomes["second"]) == (0, "done")  # what was asked for is done
    assert "first" not in capsys.readouterr().out
    three()
    said = capsys.readouterr().out
    assert "first: done before" in said and "second: done before" in said and "third: at most 1 s" in said


@pytest.mark.parametrize("other", [{"platform": "rocm"}, {"device": "another GPU"}, {"emulated": True},
                                   {"commit": "c0ffee+1"}])
def test_what_is_of_another_platform_device_or_commit_was_not_done_before(three, capsys, other):
    three.scripts = {"first": "print('fine')"}
    assert three()[0] == 0
    before, first = three.subject, three.folder
    kept = {path: path.read_bytes() for path in first.iterdir()}
    three.subject = replace(before, **other)
    assert three.folder != first
    capsys.readouterr()
    assert three()[0] == 0 and "done before" not in capsys.readouterr().out
    assert {path: path.read_bytes() for path in first.iterdir()} == kept
    assert ("No number here" in (three.folder / "report.md").read_text()) == bool(other.get("emulated"))
    (three.folder / "steps.json").write_bytes(kept[first / "steps.json"])  # put there by hand
    three()
    assert "done before" not in capsys.readouterr().out
    three.subject = before
    three()
    assert "first: done before" in capsys.readouterr().out


def test_results_say_what_they_are_of(three, tmp_path):
    told = three.top / three.subject.folder / "first.json"
    three.scripts = {"first": f"open({str(told)!r}, 'w').write('{{\"rows\": [{{\"a\": 1}}]}}')"}
    three()
    assert json.loads(told.read_text()) == {"rows": [{"a": 1}], "of": {
        "platform": "cuda", "device": "a GPU", "emulated": False, "commit": "c0ffee"}}


def test_a_step_that_lost_its_device_was_not_run(three):
    three.code.write_text("2")
    code, outcomes = three("--step=second")
    assert (code, outcomes) == (1, {"second": "not run: no GPU"})


@pytest.mark.parametrize("body, outcome, passed", [
    ("def test_a(): pytest.skip('no device')\ndef test_b(): pytest.skip('no device')", "not run: no device", 0),
    ("def test_a(): pytest.skip('no device')\ndef test_b(): pass", "done", 1),
    ("def test_a(): assert False", "failed with 1", 0),
    ("x = pytest.importorskip('nothing_called_so')", "not run: could not import 'nothing_called_so'", 0),
    ("", "not run: no tests ran", 0)])
def test_tests_that_were_all_skipped_were_not_run(check, tmp_path, body, outcome, passed):
    (tmp_path / "test_it.py").write_text(f"import pytest\n{body}\n")
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={tmp_path / 'k.xml'}",
               str(tmp_path / "test_it.py"))
    step = check.Step("k", 300, command, tests=True, empty=(5,))
    status: dict = {}
    check.run_steps([step], tmp_path, check.Subject("cuda", "a GPU", False, "c"), 300, status, lambda: None)
    found = json.loads((tmp_path / "k.json").read_text())
    assert status["k"]["outcome"].startswith(outcome) and found["rows"][0]["passed"] == passed
    assert found["of"]["device"] == "a GPU"


def test_without_a_device_it_ends_at_once_and_says_why(three, check, monkeypatch, capsys):
    three.scripts = {"first": "print('fine')"}
    assert three()[0] == 0

    def none(*_: object) -> None:
        raise check.NoDevice("platform 'cuda': no NVIDIA driver found: install the driver")
    monkeypatch.setattr(check, "find", none)
    assert three()[0] == 2
    said, report = capsys.readouterr(), (three.top / "report.md").read_text()
    assert "nothing was run: platform 'cuda': no NVIDIA driver found" in said.err and "at most" not in said.err
    assert "Nothing was run: platform 'cuda': no NVIDIA driver found" in report and "| first | not run |" in report
    assert "| first | done |" in (three.folder / "report.md").read_text()  # what another run found stays


@pytest.mark.skipif(os.name == "nt", reason="a shell script")
def test_the_script_without_a_driver_ends_within_seconds(tmp_path):
    if Path("/proc/driver/nvidia/gpus").is_dir():
        pytest.skip("there is an NVIDIA driver")
    done = subprocess.run([SCRIPT, "cuda", "--folder", tmp_path], capture_output=True, text=True, timeout=600,
                          env=os.environ | {"PYTHON": sys.executable})
    assert done.returncode == 2 and "nothing was run: platform 'cuda': " in done.stderr, done
    assert "Nothing was run: platform 'cuda': " in (tmp_path / "report.md").read_text()


def test_no_step_begins_without_time(three, capsys):
    code, outcomes = three("--seconds=5")
    assert code == 1 and not outcomes and "no time left" in capsys.readouterr().out


@pytest.mark.parametrize("word", ["nan", "-1", "inf", "x"])
def test_seconds_are_a_number(check, capsys, word):
    with pytest.raises(SystemExit):
        check.main(["cuda", f"--seconds={word}"])
    assert "--seconds" in capsys.readouterr().err


def test_another_platform_is_told_the_way(check, capsys):
    with pytest.raises(SystemExit):
        check.main(["tpu"])
    assert "tpu: this checks cuda, rocm, xpu, npu; `isthmus conformance --platform=tpu`" in capsys.readouterr().err


def test_an_environment_without_the_package_is_told_the_way():
    bare = subprocess.run([sys.executable, "-I", "-S", FOLDER / "subject.py", "rocm"], capture_output=True, text=True)
    assert bare.returncode == 2 and "pip install -e '.[rocm,platform-test]'" in bare.stdout, bare
    assert bare.stdout.startswith("No module named 'isthmus") and "PYTHON=" in bare.stdout


def test_help_is_whole(check, capsys):
    with pytest.raises(SystemExit):
        check.main(["--help"])
    said = capsys.readouterr().out
    assert said.startswith("usage: ci/device_check.sh") and "are of the latest run.\n" in said
    assert f"steps: {', '.join(STEPS)}\n" in said and "exit status: 0" in said


def test_a_step_that_ignores_the_interrupt_is_ended(three, monkeypatch):
    monkeypatch.setattr(sys.modules["steps"], "GRACE", 1)
    three.scripts = {"first": "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(60)"}
    three.limits = {"first": 1}
    assert three() == (1, {"first": "ended after 1 s"})


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_step_with_all_that_it_started_and_the_rest_can_be_resumed(three, capsys, tmp_path, signum):
    """The second step starts a child of its own, which says who it is, then the signal comes."""
    child = tmp_path / "child"
    three.scripts["second"] = (
        "import os, signal, subprocess, sys, time\n"
        f"c = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(child)!r}, 'w').write(str(c.pid)); os.kill({os.getpid()}, {int(signum)}); time.sleep(60)")
    handler = signal.getsignal(signum)
    code, outcomes = three()
    assert code == 128 + signum
    assert outcomes == {"first": "done", "second": "interrupted"}
    assert capsys.readouterr().err == "device_check: interrupted; run it again to go on from here\n"
    until(lambda: has_ended(int(child.read_text())))  # it was killed, which takes a moment
    assert "| second | interrupted |" in (three.folder / "report.md").read_text()
    assert signal.getsignal(signum) is handler
    three.scripts["second"] = "print('fine')"
    code, outcomes = three()
    assert "first: done before" in capsys.readouterr().out and outcomes["second"] == "done"


def test_a_folder_that_takes_nothing_is_one_line(three, check, capsys, monkeypatch):
    three.top.write_text("a file")
    assert check.main(["cuda", f"--folder={three.top}/x"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"device_check: --folder {three.top}/x cannot take the results: ")
    assert error.count("\n") == 1
    three.top.unlink()
    three.scripts = {"first": "print('fine')"}
    assert three()[0] == 0
    good = (three.top / "report.md").read_text()

    def full(self: Path, *_: object) -> None:
        self.touch()
        raise OSError(errno.ENOSPC, "No space left on device")
    for method in ("write_bytes", "write_text"):
        monkeypatch.setattr(Path, method, full)
        assert three()[0] == 2
        assert capsys.readouterr().err.endswith("cannot take the results: No space left on device\n")
        monkeypatch.undo() if method == "write_text" else monkeypatch.setattr(Path, "write_bytes", lambda *_: None)
    assert (three.top / "report.md").read_text() == good
    assert not [path for path in three.top.rglob(".*")]


def test_the_limits_of_all_steps_are_below_eight_minutes(check, tmp_path):
    steps = check.steps("cuda", tmp_path, False)
    assert tuple(step.name for step in steps) == STEPS
    assert sum(max(step.limit for step in group) for group in check.together(steps)) <= 470
    tests = sorted(word for step in steps for word in step.command if word.startswith("tests/triton/"))
    assert tests == sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "triton").glob("test_*.py"))


def test_steps_beside_each_other_run_at_the_same_time(three, check, monkeypatch, tmp_path):
    """Each waits for the other's file."""
    one, two = (f"import pathlib, time; pathlib.Path({str(tmp_path)!r}, '{a}').touch()\n"
                f"while not pathlib.Path({str(tmp_path)!r}, '{b}').exists(): time.sleep(0.01)" for a, b in ("xy", "yx"))
    three.scripts, three.beside = {"first": one, "second": two}, True
    assert three()[0] == 0


def test_goals_are_judged_by_the_worst_figure(check):
    from goals import verdicts
    decode = {"rows": 16, "context": 32768, "kv": "bfloat16"}
    rows = {"attention": [decode | {"by": "A", "of bandwidth": 0.7}, decode | {"by": "B", "of bandwidth": 0.9},
                          decode | {"by": "torch SDPA, contiguous", "of bandwidth": 0.95}],
            "llama": [{"what": "prefill", "rows": 1, "tokens": 512, "floor": "products", "times floor": 3.0},
                      {"what": "prefill", "rows": 16, "tokens": 512, "floor": "products", "times floor": 1.3},
                      {"what": "decode", "graphs": True, "times floor": 1.2},
                      {"what": "decode", "graphs": False, "times floor": 4.0}],
            "qwen": [{"what": "decode", "graphs": True, "times floor": 1.4}, {"rows": 1, "error": "no memory"}],
            "linears": [{"tokens": 1, "format": "q4_0", "of bandwidth": 0.9}, {"tokens": 1, "format": "bf16"},
                        {"format": "fp8", "error": "none"}]}
    assert [(row["worst"], row["verdict"]) for row in verdicts(rows)] == [
        (0.9, "met"), (0.769, "not met"), (1.4, "not met"), (1.111, "met"), (None, "not measured")]


@pytest.mark.skipif(not find_spec("torch"), reason="torch is not installed")
@pytest.mark.parametrize("kind", ["llama", "qwen"])
def test_models_that_no_file_holds_are_placed(check, kind):
    """As the steps of whole models do it: whatever the loader asks a checkpoint, this one answers."""
    from generated import LLAMA, QWEN, TINY, TINY_EXPERTS, Repeating, Unwritten
    from isthmus.core.models.loader import load_model

    from .emulation.composed.platform import Platform
    config = {"llama": LLAMA | TINY, "qwen": QWEN | TINY_EXPERTS}[kind]
    platform = Platform({"graphs": "off"})
    manifest = platform.probe()
    model = load_model(Unwritten(config, kind), Repeating(platform), manifest, "bf16")
    platform.close()
    assert model.config.layers == len(model.state_layers) == 2 and model.nbytes > 0


def test_the_files_are_short():
    assert all(len(path.read_text().splitlines()) < 300 for path in FOLDER.glob("*.py"))


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="a shell script")
@pytest.mark.skipif(not find_spec("torch"), reason="torch is not installed")
@pytest.mark.parametrize("platform", ["cuda", "npu"])
def test_every_step_runs_on_the_emulated_platform(platform: str, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    command = [SCRIPT, platform, "--device", "cpu", "--folder", tmp_path, "--seconds", "900"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900)
    folder, = (path for path in tmp_path.iterdir() if path.is_dir())
    logs = {path.name: path.read_text()[-800:] for path in folder.glob("*.log")}
    report = json.loads((tmp_path / "report.json").read_text())
    outcomes = {name: part["outcome"] for name, part in report["steps"].items()}
    if not find_spec("triton"):
        assert outcomes.pop(STEPS[-1]).startswith("not run: ")
    assert set(outcomes.values()) == {"done"}, (done.stdout + done.stderr, logs)
    assert done.returncode == (0 if find_spec("triton") else 1)
    assert report["of"]["emulated"] and tuple(report["results"]) == (*STEPS[:-3], STEPS[-1])
    assert all(found["of"] == report["of"] for found in report["results"].values())
    assert {goal["verdict"] for goal in report["goals"]} == {"not measured"}
    rows = {name: found.get("rows", []) for name, found in report["results"].items()}
    errors = [row for found in rows.values() for row in found if "error" in row]
    assert [row for row in errors if "not installed" not in row["error"]] == []
    ways = {row["by"] for row in rows["attention"]}
    assert "torch SDPA, contiguous" in ways and ("FlashInfer stand-in" in ways) == (platform == "cuda")
    assert {row["format"] for row in rows["linears"]} == {"bf16", "fp8", "fp8_128", "q4_0", "q8_0"}
    for name in ("llama", "qwen"):
        steps = {(row["what"], row["graphs"]) for row in rows[name] if "what" in row}
        assert steps == {("decode", True), ("decode", False), ("prefill", True)}
        assert all(row["times floor"] > 0 and row["captured"] == row["graphs"] for row in rows[name] if "what" in row)
    assert report["results"]["conformance"]["ok"]
    page = (tmp_path / "report.md").read_text()
    assert "No number here says anything of a device" in page and "| decode |" in page
