"""ci/device_check.sh: all of it on the emulated platform with tiny sizes, and that it goes on where it was."""
from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

COST = 150  # seconds, 5 of them without the slow test
ROOT = Path(__file__).resolve().parent.parent
SCRIPT, FOLDER = ROOT / "ci" / "device_check.sh", ROOT / "benchmarks" / "device"
STEPS = ("facts", "ceilings", "attention", "linears", "llama", "qwen", "engine", "conformance", "kernels_attention",
         "kernels_products", "kernels_others")


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = spec_from_file_location("device_check_steps", FOLDER / "check.py")
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def three(check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[int, dict]]:
    """A check of three small steps, the second of which ends as a file says."""
    code = tmp_path / "code"
    code.write_text("3")
    scripts = {"first": "print('fine')", "second": f"raise SystemExit(int(open({str(code)!r}).read()))",
               "third": "import time; time.sleep(60)"}
    monkeypatch.setattr(check, "steps", lambda *_: [
        check.Step(name, 1, (sys.executable, "-c", script), results=False) for name, script in scripts.items()])
    monkeypatch.setattr(sys.modules["report"], "TITLES", {name: name for name in scripts})

    def run(*words: str) -> tuple[int, dict]:
        done = check.main(["cuda", f"--folder={tmp_path}", *words])
        return done, {name: part["outcome"] for name, part in check.read_status(tmp_path).items()}
    run.code = code
    return run


def test_a_failed_step_and_a_slow_one_do_not_end_the_rest_and_a_done_one_is_not_done_again(three, tmp_path, capsys):
    code, outcomes = three()
    assert code == 1
    assert outcomes == {"first": "done", "second": "failed with 3", "third": "ended after 1 s"}
    report = (tmp_path / "report.md").read_text()
    assert "| second | failed with 3 |" in report and "last line: fine" in report
    three.code.write_text("0")
    capsys.readouterr()
    _, outcomes = three("--step=second")
    assert outcomes["second"] == "done"
    assert "first" not in capsys.readouterr().out
    three()
    said = capsys.readouterr().out
    assert "first: done before" in said and "second: done before" in said and "third: at most 1 s" in said


def test_no_step_begins_without_time(three, capsys):
    code, outcomes = three("--seconds=5")
    assert code == 1 and not outcomes and "no time left" in capsys.readouterr().out


def test_a_step_that_ignores_the_interrupt_is_ended(check, monkeypatch, tmp_path):
    monkeypatch.setattr(check, "GRACE", 1)
    script = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(60)"
    step = check.Step("deaf", 2, (sys.executable, "-c", script), results=False)
    assert check.run_step(step, tmp_path, 2)["outcome"] == "ended after 2 s"
    assert json.loads((tmp_path / "deaf.json").read_text())["rows"][0]["exit"] == -signal.SIGKILL


def test_the_limits_of_all_steps_are_below_eight_minutes(check, tmp_path):
    steps = check.steps("cuda", tmp_path, False)
    assert tuple(step.name for step in steps) == STEPS
    assert sum(max(step.limit for step in group) for group in check.together(steps)) <= 470
    tests = sorted(word for step in steps for word in step.command if word.startswith("tests/triton/"))
    assert tests == sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "triton").glob("test_*.py"))


def test_steps_beside_each_other_run_at_the_same_time(check, monkeypatch, tmp_path):
    """Each waits for the other's file."""
    scripts = [f"import pathlib, time; pathlib.Path({str(tmp_path)!r}, '{a}').touch()\n"
               f"while not pathlib.Path({str(tmp_path)!r}, '{b}').exists(): time.sleep(0.01)" for a, b in ("xy", "yx")]
    monkeypatch.setattr(check, "steps", lambda *_: [
        check.Step(f"s{at}", 30, (sys.executable, "-c", script), results=False, beside=bool(at))
        for at, script in enumerate(scripts)])
    monkeypatch.setattr(sys.modules["report"], "TITLES", {"s0": "", "s1": ""})
    assert check.main(["cuda", f"--folder={tmp_path}"]) == 0


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
    logs = {path.name: path.read_text()[-800:] for path in tmp_path.glob("*.log")}
    assert done.returncode == 0, (done.stdout + done.stderr, logs)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["emulated"] and tuple(report["results"]) == (*STEPS[:-3], STEPS[-1])
    rows = {name: found.get("rows", []) for name, found in report["results"].items()}
    errors = [row for found in rows.values() for row in found if "error" in row]
    assert [row for row in errors if "not installed" not in row["error"]] == []
    ways = {row["by"] for row in rows["attention"]}
    assert "torch SDPA, contiguous" in ways and ("FlashInfer stand-in" in ways) == (platform == "cuda")
    assert {row["format"] for row in rows["linears"]} == {"bf16", "fp8", "q4_0", "q8_0"}
    for name in ("llama", "qwen"):
        steps = {(row["what"], row["graphs"]) for row in rows[name] if "what" in row}
        assert steps == {("decode", True), ("decode", False), ("prefill", True)}
        assert all(row["times floor"] > 0 and row["captured"] == row["graphs"] for row in rows[name] if "what" in row)
    assert report["results"]["conformance"]["ok"]
    page = (tmp_path / "report.md").read_text()
    assert "No number here says anything of a device" in page and "| decode |" in page
