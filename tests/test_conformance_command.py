"""The conformance kit's reports, its command, and an installed package as the platform."""
from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from isthmus.conformance import (
    Ledger,
    Outcome,
    run_suite,
)
from isthmus.conformance.terminal import show
from isthmus.core.cli.main import main
from rich.console import Console

from .platform_mutants import Mutant
from .test_conformance import Mistaken

COST = 20  # seconds

# ---- reports and the command

def test_report_as_data_and_markdown() -> None:
    report = run_suite(Mistaken, only=["moe[softmax,f64]", "attention[copied_pages,4*f64]", "rope[1x*f64]"], seed=5,
                       ledger=Ledger())
    data = json.loads(report.as_json())
    assert (data["platform"], data["seed"], data["ok"]) == ("reference", 5, False)
    assert data["counts"] == {"passed": 1, "unavailable": 0, "unsupported": 1, "expected failure": 0,
                              "unexpected pass": 0, "wrong": 1, "error": 0}
    assert data["versions"]["numpy"] == np.__version__ and data["manifest"]["determinism"] == "T1"
    case = next(c for c in data["cases"] if c["outcome"] == "wrong")
    assert case["id"] == "attention[copied_pages,4/2x32,page16,f64]" and case["law"] == "ops"
    assert case["needs"] == ["f64", "kv f64", "pages of 16"] and case["numbers"]["nmse"] > 0 and case["seconds"] > 0
    text = report.as_markdown()
    assert "| ops | attention | 0, 1 wrong |" in text and "| ops | moe | unsupported |" in text
    assert f"- `{case['id']}` wrong: launch 2" in text and "- 1 cases: no experts on this chip" in text


def test_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    only = ["--only", "rope", "--only", "state[slots*f64]"]
    files = ["--json", str(tmp_path / "r.json"), "--markdown", str(tmp_path / "r.md")]
    assert main(["conformance", "--platform=reference", "--seed", "3", *only, *files]) == 0
    out = capfd.readouterr().out
    assert "conformance of reference" in out and "rope" in out and "slots" in out and "holds" in out
    data = json.loads((tmp_path / "r.json").read_text())
    assert data["seed"] == 3 and data["counts"]["passed"] == 13
    assert (tmp_path / "r.md").read_text().startswith("# Conformance of reference")
    assert main(["conformance", "--list", "--only", "scheduler"]) == 0
    assert "scheduler[retracted,f64]" in capfd.readouterr().out


@pytest.mark.parametrize("arguments, message", [
    (["--platform=null"], "null cannot be held to the laws: no mathematics"),
    (["--platform=reference", "--only", "dance"], "'dance' is no law and no case"),
    (["--platform=reference", "--json", "/nowhere/at/all.json"], "there is no such folder"),
    (["--platform=reference", "--json", "/tmp"], "/tmp is a folder: name a file"),
    (["--platform=reference", "--json="], "is a folder: name a file"),
    (["--platform=reference", "--json=a", "--markdown=a"], "--json and --markdown both name a"),
    (["--list", "--json=a"], "a: --list runs nothing"),
    (["--platform=reference", "--timeout=inf"], "--timeout inf: more than 0 seconds are needed, at most 86400"),
    (["--platform=reference", "--timeout=nan"], "--timeout nan"),
    (["--platform=reference", "--seed", "-1"], "--seed -1 is below 0"),
    (["--platform=reference", "--platform-option", "speed"], "key=value"),
    (["--platform=reference", "--platform-option", "speed=9", "--only", "rope"], "speed"),
])
def test_command_refuses(arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", *arguments]) == 2
    captured = capfd.readouterr()
    assert message in captured.err + captured.out


def test_command_says_when_a_platform_is_not_there(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "r.json"
    assert main(["conformance", "--platform=warp", "--only", "rope", "--json", str(file)]) == 2
    assert "warp is unavailable here: platform 'warp' is not installed" in capfd.readouterr().out
    assert {case["outcome"] for case in json.loads(file.read_text())["cases"]} == {"unavailable"}


@pytest.fixture
def package(tmp_path: Path) -> Iterator[Path]:
    """A folder like site-packages with an installed package that offers the platform "faulty"."""
    info, home = tmp_path / "isthmus_faulty-1.0.dist-info", tmp_path / "isthmus_faulty"
    info.mkdir()
    home.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: isthmus-faulty\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[isthmus.platforms]\nfaulty = isthmus_faulty.platform:Platform\n")
    (home / "__init__.py").write_text("")
    (home / "platform.py").write_text("""
from isthmus.platforms.reference.platform import Platform as Reference

class Platform(Reference):
    def copy_pages(self, state, src, dst):
        return state
""")
    yield tmp_path


def test_an_installed_package_is_held_to_the_laws_and_has_its_ledger(package: Path) -> None:
    """In a process that knows the folder only, and starts elsewhere."""
    def command() -> subprocess.CompletedProcess[str]:
        code = f"import sys; sys.path.insert(0, {str(package)!r}); from isthmus.core.cli.main import main; " \
               "sys.exit(main(['conformance', '--platform=faulty', '--only', 'attention[*f64]']))"
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=package, timeout=600)
    done = command()
    assert done.returncode == 1 and "wrong attention[copied_pages" in done.stdout, done.stdout + done.stderr
    (package / "isthmus_faulty" / "ledger.toml").write_text(
        "[[xfail]]\ncase = 'attention[copied_pages*]'\nreason = 'waits for firmware 2'\n")
    done = command()
    assert done.returncode == 0 and "waits for firmware 2" in done.stdout, done.stdout + done.stderr


def test_a_mistake_in_a_platforms_code_is_no_reason_to_let_it_off(package: Path) -> None:
    (package / "isthmus_faulty" / "platform.py").write_text("import os\nundefined_name\n")
    script = f"import sys; sys.path.insert(0, {str(package)!r}); from isthmus.core.cli.main import main; " \
             "sys.exit(main(['conformance', '--platform=faulty', '--only', 'rope']))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600)
    assert done.returncode == 1
    assert "platform 'faulty': isthmus_faulty/platform.py:2: NameError: name 'undefined_name'" in done.stderr


@pytest.mark.parametrize("line, code, told", [
    ("os.abort()", 1, "was ended by signal 6 in case 1 of 24, rope[3x64,to1000,scale1,f64]: nothing is shown"),
    ("ctypes.string_at(0)", 1, "was ended by signal 11 in case 1 of 24, rope[3x64,to1000,scale1,f64]"),
    ("os._exit(0)", 1, "was ended with exit code 0 in case 1 of 24, rope[3x64,to1000,scale1,f64]"),
    ("time.sleep(600)", 1, "error rope[3x64,to1000,scale1,f64]: TimeoutError: took longer than 1 s"),
    ("threading.Thread(target=time.sleep, args=(600,)).start(); threading.Event().wait()", 1, "took longer than 1 s"),
])
def test_a_case_that_crashes_or_never_ends_is_named(package: Path, line: str, code: int, told: str) -> None:
    (package / "isthmus_faulty" / "platform.py").write_text(f"""
import ctypes, os, threading, time
from isthmus.platforms.reference.platform import Platform as Reference

class Platform(Reference):
    def load(self, raws, spec, dtype):
        {line}
""")
    limit = 1 if "longer" in told else 300
    script = f"import sys; sys.path.insert(0, {str(package)!r}); from isthmus.core.cli.main import main; " \
             f"sys.exit(main(['conformance', '--platform=faulty', '--only=rope', '--timeout={limit}', '--verbose']))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600,
                          env={**os.environ, "COLUMNS": "200"})
    assert done.returncode == code and told in done.stdout + done.stderr, done.stdout + done.stderr
    assert done.stderr.startswith("1/")
    assert ("the cases behind" in done.stdout) == ("took longer" in told), done.stdout


def test_what_a_platform_does_not_choose_to_offer_is_counted_apart() -> None:
    report = run_suite("reference", only=["rope", "parallel[llama,whole,f64]"])
    assert report.ok and report.summary() == "reference: 12 passed, 13 not claimed"
    data = report.as_dict()
    assert data["not_claimed"] == data["counts"]["unsupported"] == 13
    assert [case["outcome"] for case in data["cases"] if not case["claimed"]] == ["unsupported"] * 13
    console = Console(file=io.StringIO(), width=200)
    show(report, console)
    told = console.file.getvalue()
    assert "bf16 is not computed (6)" in told and "unsupported" not in told
    assert re.search(r"law +┃ subject +┃ f64 +┃ f32 +┃$", told, re.MULTILINE)
    assert "| parallel | llama | not claimed | - |" in report.as_markdown()


def test_what_fails_alike_is_one_line(tmp_path: Path) -> None:
    broken = Mutant("no such op", "ops", (), (("ops", "def act_mul(", "def act_mull("),)).load(tmp_path)
    report = run_suite(broken, only=["act_mul[*f64]"], ledger=Ledger())
    Mutant.forget()
    console = Console(file=io.StringIO(), width=300)
    show(report, console)
    lines = [line for line in console.file.getvalue().splitlines() if line.startswith("error ")]
    assert len(report.failures()) == 9 and len(lines) == 1
    assert lines[0].startswith("error act_mul[silu,f64] and 8 more, such as act_mul[")
    assert lines[0].count("has no attribute 'act_mul'") == 1


@pytest.mark.skipif(sys.platform == "win32", reason="processes are ended without a signal there")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_ended_early_tells_what_was_done(package: Path, number: int) -> None:
    (package / "isthmus_faulty" / "platform.py").write_text("""
import time
from isthmus.platforms.reference.platform import Platform as Reference

class Platform(Reference):
    def __init__(self, options):
        self.compiled = 0

    def compile(self, forward, weights, bucket):
        self.compiled += 1
        time.sleep(600 if self.compiled == 3 else 0)
        return super().compile(forward, weights, bucket)
""")
    script = f"import sys; sys.path.insert(0, {str(package)!r}); from isthmus.core.cli.main import main; " \
             "sys.exit(main(['conformance', '--platform=faulty', '--only=rope[*f64]', '--verbose', '--json=r.json']))"
    running = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               text=True, cwd=package, env={**os.environ, "COLUMNS": "200"})
    lines = [running.stderr.readline(), running.stderr.readline()]
    running.send_signal(number)  # to the parent alone
    output, rest = running.communicate(timeout=600)
    assert running.returncode == 130
    assert all(re.fullmatch(r"[12]/6 rope\[\S+,f64] passed, \d+\.\d\d s\n", line) for line in lines), lines
    third = "rope[1x128,to5,scale1.25,f64]"
    assert rest.strip() in ("", f"3/6 {third}")  # it may come before that is printed
    assert f"interrupted: {third} and the cases behind it were not run" in output
    assert "faulty: 2 passed" in output
    assert [case["outcome"] for case in json.loads((package / "r.json").read_text())["cases"]] == ["passed"] * 2


def test_the_kit_imports_no_framework() -> None:
    code = ("import sys, isthmus.conformance, isthmus.conformance.terminal; "
            "print([m for m in ('torch', 'jax', 'mlx', 'gguf', 'transformers', 'pytest') if m in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_an_error_says_where_in_the_platform_it_was_raised(tmp_path) -> None:
    broken = Mutant("a typing error", "ops", (), (("moe", "x * sigmoid(x)", "x * sigmoid(x, 1)"),)).load(tmp_path)
    report = run_suite(broken, only=["act_mul[silu,f32]"], ledger=Ledger())
    Mutant.forget()
    assert [result.outcome for result in report.results] == [Outcome.ERROR]
    reason = report.results[0].reason
    assert "(moe.py:" in reason and "in activation: return x * sigmoid(x, 1))" in reason
