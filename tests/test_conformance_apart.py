"""Platforms that misbehave under the conformance kit: what they do to their process, their inputs and their answers is
a finding with a name, and never looks like success.
"""
from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from isthmus.conformance import Ledger, Outcome, Report, read_ledger, run_suite
from isthmus.core.registry import RegistrationError
from isthmus.platforms.reference.platform import Platform as Reference

from .effort import until

COST = 40  # seconds
Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def command(tmp_path: Path) -> Command:
    """command(body, *words): `isthmus conformance` on an installed package's platform, the reference with this body."""
    home, info = tmp_path / "isthmus_odd", tmp_path / "isthmus_odd-1.0.dist-info"
    home.mkdir()
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: isthmus-odd\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[isthmus.platforms]\nodd = isthmus_odd.platform:Platform\n")
    (home / "__init__.py").write_text("")

    def run(body: str, *words: str, prefix: str = "", **more: Any) -> subprocess.CompletedProcess[str]:
        (home / "platform.py").write_text(
            "import os, sys, threading, time\nfrom dataclasses import replace\n"
            "from isthmus.platforms.reference.platform import Platform as Reference\n"
            f"{prefix}\nclass Platform(Reference):\n    {body}\n")
        script = (f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from isthmus.core.cli.main import main; "
                  f"sys.exit(main(['conformance', '--platform=odd', '--only=all_reduce', *{list(words)!r}]))")
        return subprocess.run([sys.executable, "-c", script], text=True, timeout=600, **{
            "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": {**os.environ, "COLUMNS": "300"}, **more})
    return run


LOAD = "def load(self, raws, spec, dtype):\n        {}\n        return super().load(raws, spec, dtype)"


# ---- what they do to the process

@pytest.mark.parametrize("body, prefix, told", [
    (LOAD.format("os._exit(0)"), "", "was ended with exit code 0 in case 1 of "),
    (LOAD.format("os._exit(3)"), "", "was ended with exit code 3 in case 1 of "),
    (LOAD.format("os.kill(os.getpid(), 9)"), "", "was ended by signal 9 in case 1 of "),
    ("def probe(self, rank=0, world=1):\n        os._exit(0)", "", "was ended with exit code 0 before the first case"),
    ("def close(self):\n        os._exit(0)", "", "was ended with exit code 0 after the last case"),
    ("pass", "os._exit(0)", "was ended with exit code 0 before the first case"),
    ("def probe(self, rank=0, world=1):\n        sys.exit(0)", "", "isthmus_odd/platform.py:7: SystemExit: 0"),
    ("def __init__(self, options):\n        sys.exit(0)", "", "isthmus_odd/platform.py:7: SystemExit: 0"),
    ("def probe(self, rank=0, world=1):\n        return None", "", "probe returned a NoneType, a Manifest is needed"),
])
def test_a_run_that_ends_early_is_no_success(command: Command, tmp_path: Path, body: str, prefix: str,
                                             told: str) -> None:
    old = tmp_path / "r.json"
    old.write_text('{"ok": true}')
    done = command(body, f"--json={old}", prefix=prefix)
    assert done.returncode == 1 and told in done.stderr, done.stdout + done.stderr
    assert not old.exists(), "the report of an older run would be taken for this one's"


def test_threads_that_a_platform_left_are_not_waited_for(command: Command) -> None:
    done = command(LOAD.format("threading.Thread(target=time.sleep, args=(600,)).start()"))
    assert done.returncode == 0 and "holds" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("line", ["sys.stdout.close()", "os.close(1)", "os.chdir('/')"])
def test_the_report_does_not_depend_on_what_the_platform_leaves(command: Command, tmp_path: Path, line: str) -> None:
    body = LOAD.format(f"if not hasattr(self, 'once'):\n            {line}\n        self.once = True")
    done = command(body, "--json=r.json", cwd=tmp_path)
    assert done.returncode == 0 and "holds" in done.stdout, done.stdout + done.stderr
    assert json.loads((tmp_path / "r.json").read_text())["ok"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full here")
def test_a_report_that_cannot_be_written_costs_only_itself(command: Command, tmp_path: Path) -> None:
    done = command("pass", "--json=/dev/full", f"--markdown={tmp_path / 'r.md'}")
    assert done.returncode == 2 and "holds" in done.stdout and (tmp_path / "r.md").read_text()
    assert done.stderr == ("isthmus: the report cannot be written to /dev/full: [Errno 28] No space left on device\n")
    with open("/dev/full", "w") as full:
        done = command("pass", f"--json={tmp_path / 'r.json'}", stdout=full)
    assert done.returncode == 2 and "cannot be written to standard output" in done.stderr
    assert json.loads((tmp_path / "r.json").read_text())["ok"]


def test_no_width_is_no_reason_to_show_nothing(command: Command) -> None:
    done = command("pass", env={**os.environ, "COLUMNS": "0"})
    assert done.returncode == 0 and "holds" in done.stdout and "all_reduce" in done.stdout


def test_ctrl_c_leaves_the_report_of_what_was_run(command: Command, tmp_path: Path) -> None:
    body = LOAD.format("self.n = getattr(self, 'n', 0) + 1\n        if self.n == 2:\n"
                       "            os.kill(os.getpid(), 2)\n            time.sleep(1)")
    done = command(body, f"--json={tmp_path / 'r.json'}")
    assert done.returncode == 130 and "Traceback" not in done.stderr, done.stdout + done.stderr
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["counts"]["passed"] == 1 and not report["ok"]
    assert "interrupted: all_reduce" in report["unproved"][0]


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_the_process_ends_with_the_command(command: Command, tmp_path: Path) -> None:
    body = LOAD.format(f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
                       f"        os.kill(os.getppid(), {signal.SIGKILL:d})\n        time.sleep(600)")
    assert command(body, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == -signal.SIGKILL
    pid = int((tmp_path / "pid").read_text())
    def ended() -> bool:
        try:
            os.kill(pid, 0)
            return ") Z " in Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return not psutil.pid_exists(pid)
    until(ended)


# ---- what they raise

class Odd(Reference):
    """raised: by `load` of the first case."""

    raised: BaseException

    def load(self, raws: Any, spec: Any, dtype: str) -> Any:
        if not getattr(self, "once", False):
            self.once = True
            raise self.raised
        return super().load(raws, spec, dtype)


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def run(kind: type, *only: str) -> Report:
    return run_suite(kind, only=only, ledger=Ledger())


@pytest.mark.parametrize("error, told", [
    (SystemExit(0), "SystemExit: 0"), (GeneratorExit(), "GeneratorExit: "), (Mute(), "Mute: "),
    (BaseException("odd"), "BaseException: odd"), (ValueError("a\x1b[2J\udc80b"), "ValueError: a?[2J?b")])
def test_whatever_is_raised_is_an_error_of_that_case(error: BaseException, told: str) -> None:
    report = run(type("Odder", (Odd,), {"raised": error}), "all_reduce*")
    assert [result.outcome for result in report.results][0] is Outcome.ERROR and not report.ok
    assert report.counts()[Outcome.PASSED] >= 1 and report.results[0].reason.startswith(told)
    report.as_json().encode()


def test_what_supports_and_close_raise_is_told() -> None:
    def leave(self: Any, *words: Any, **case: Any) -> None:
        sys.exit(0)
    report = run(type("Leaving", (Reference,), {"supports": leave}), "attention[mha,4/4x16,page16,f32]")
    assert set(report.counts()) == {Outcome.ERROR}
    report = run(type("Leaving", (Reference,), {"close": leave}), "all_reduce")
    assert not report.ok and report.unproved()[0].startswith("close() raised ")
    assert report.unproved()[0].endswith("SystemExit: 0") and report.unproved()[0] in report.as_markdown()


# ---- what they do to what they get

class Writing(Reference):
    """Overwrites an array of the batch: when it is launched, or when it is collected."""

    when, name = "launch", "positions"

    def compile(self, forward: Any, weights: Any, bucket: Any) -> Any:
        step = super().compile(forward, weights, bucket)

        def launch(state: Any, batch: Any) -> Any:
            out, state = step(state, batch)

            def write() -> None:
                array = getattr(batch, self.name, None)
                if array is None:
                    array = getattr(batch.sampling, self.name)
                array[...] = 1 - array
            if self.when == "launch":
                write()
                return out, state
            collect = out.collect

            class Late:
                def collect(self) -> Any:
                    write()
                    return collect()
            return Late(), state
        return launch


@pytest.mark.parametrize("when", ["launch", "collect"])
@pytest.mark.parametrize("name, only, told", [("positions", "rms_norm[5x576*f32]", "positions"),
                                              ("temperature", "sample[top_p,f32]", "sampling.temperature")])
def test_an_input_that_is_written_to_is_wrong(when: str, name: str, only: str, told: str) -> None:
    [result] = run(type("Writer", (Writing,), {"when": when, "name": name}), only).results
    assert result.outcome is Outcome.WRONG
    assert result.reason == f"the step wrote into batch.{told}: what it gets is for reading only"


def test_a_tensor_of_the_checkpoint_that_is_written_to_is_wrong() -> None:
    class Loading(Reference):
        def load(self, raws: Any, spec: Any, dtype: str) -> Any:
            weight = super().load(raws, spec, dtype)
            raws[0].data[...] = 0
            return weight
    [result] = run(Loading, "rms_norm[5x576*f32]").results
    assert result.outcome is Outcome.WRONG and "load wrote into a tensor of the checkpoint" in result.reason


# ---- what they claim

@pytest.mark.parametrize("fields, told", [
    ({"local_ranks": 0}, "local_ranks is 0, it was probed with a world of 1"), ({"local_ranks": 2}, "local_ranks is 2"),
    ({"max_top_logprobs": -1}, "max_top_logprobs is -1, below 0"), ({"memory_floor": 1.5}, "memory_floor is 1.5"),
    ({"memory_floor": float("nan")}, "memory_floor is nan")])
def test_numbers_that_cannot_be_are_wrong(fields: dict[str, Any], told: str) -> None:
    class Claiming(Reference):
        def probe(self, rank: int = 0, world: int = 1) -> Any:
            return replace(super().probe(rank, world), **fields)
    [result] = run(Claiming, "manifest[words]").results
    assert result.outcome is Outcome.WRONG and told in result.reason


def test_a_platform_is_called_what_it_is_installed_as(command: Command) -> None:
    done = command("pass", "--only=manifest[words]")
    assert done.returncode == 1 and "conformance of odd" in done.stdout
    assert "name is 'reference', the platform is installed as 'odd'" in done.stdout


@pytest.mark.parametrize("answer", [None, (1,), ("a", None), (1, 2), (2.5, 1), (1, -1)])
def test_memory_is_two_whole_numbers(answer: Any) -> None:
    class Telling(Reference):
        def probe(self, rank: int = 0, world: int = 1) -> Any:
            return Reference({}).probe(rank, world)

        def memory(self) -> Any:
            return answer
    [result] = run(Telling, "manifest[returns]").results
    assert result.outcome is Outcome.WRONG and f"memory() returned {answer!r}, (total, free)" in result.reason


@pytest.mark.parametrize("text, told", [
    ("xfail = 3", r"xfail is 3; tables \[\[xfail\]\] are needed"), ("[xfail]\na = 1", "xfail is {'a': 1}"),
    ("[[xfail]]\ncase = 7\nreason = 'a'", "case must be a text that says something"),
    ("[[unsupported]]\ncase = 'a'\nreason = ''", "reason must be a text that says something"),
    ("[[unsupported]]\ncase = 'a'\nreason = ' '", "reason must be"),
    ("[[xfail]]\ncase = 'a'\nreason = 3", "reason must be"),
    ("x = " + "[" * 5000, "recursion"), ("x", "ledger.toml: ")])
def test_a_malformed_ledger_is_the_platforms_own_mistake(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "ledger.toml"
    path.write_text(text)
    with pytest.raises(RegistrationError, match=f"ledger.toml: .*{told}" if told != "ledger.toml: " else told):
        read_ledger(path)


def test_a_malformed_ledger_fails_the_run(tmp_path: Path, command: Command) -> None:
    (tmp_path / "isthmus_odd" / "ledger.toml").write_text("xfail = 3")
    done = command("pass")
    assert done.returncode == 1 and "ledger.toml: xfail is 3" in done.stderr


def test_a_manifest_for_two_ranks_is_looked_at_too() -> None:
    class Doubled(Reference):
        def probe(self, rank: int = 0, world: int = 1) -> Any:
            manifest = Reference({}).probe()
            return manifest if world == 1 else replace(manifest, local_ranks="two")
    report = run(Doubled, "parallel[llama,whole*f32]")
    assert set(report.counts()) == {Outcome.ERROR}
    assert "Expected `int`, got `str` - at `$.local_ranks`" in report.results[0].reason
