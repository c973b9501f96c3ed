"""The steps of a device check, in the order of their worth, and how their processes are run and ended."""
from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from report import write_whole
from subject import HERE, NO_DEVICE, ROOT, Subject, stamp

TOGETHER = 175       # seconds for what is not timed
NOTHING_TO_TEST = 5  # pytest's exit status, where Triton is not installed
GRACE = 10           # seconds that an interrupted step has to write what it has
TINY_CASES = ("attention[mha,4/4x16,page16,f32]", "linear[f32*")  # of a run that only shows that this works
GROUPS = os.name == "posix"


@dataclass(frozen=True)
class Step:
    """limit: seconds. tests: whether pytest runs it, and STEP.json is made here; else the command writes that itself.
    empty: exit statuses of a step that had nothing to run on. beside: it runs at the same time as the one before."""

    name: str
    limit: int
    command: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()
    tests: bool = False
    empty: tuple[int, ...] = ()
    beside: bool = False


def steps(platform: str, folder: Path, tiny: bool) -> list[Step]:
    """All together take less than eight minutes."""
    def ours(name: str, limit: int, *before: str, script: str = "") -> Step:
        return Step(name, limit, (sys.executable, str(HERE / f"{script or name}.py"), *before, platform, "--json",
                                  str(folder / f"{name}.json"), "--results", str(folder),
                                  *(("--device", "cpu") if tiny else ())), empty=(NO_DEVICE,))

    conformance = (sys.executable, "-m", "isthmus.core.cli.main", "conformance",
                   f"--platform={'cpu' if tiny else platform}", f"--json={folder / 'conformance.json'}",
                   *(f"--only={case}" for case in (TINY_CASES if tiny else ())))
    pytest = (sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider")
    compiled = () if tiny else (("TRITON_INTERPRET", "0"),)
    slow = () if tiny else ("-m", "slow or not slow")
    kernels = [Step(name, TOGETHER, (*pytest, f"--junitxml={counts(folder, name)}", *files, *slow), compiled,
                    tests=True, empty=(NOTHING_TO_TEST,), beside=True)
               for name, files in shards(tiny).items()]
    return [
        ours("facts", 20), ours("ceilings", 25), ours("attention", 45), ours("linears", 35),
        ours("llama", 55, "llama", script="models"), ours("qwen", 60, "qwen", script="models"), ours("engine", 55),
        Step("conformance", TOGETHER, conformance, empty=(NO_DEVICE,)), *kernels]


def shards(tiny: bool) -> dict[str, list[str]]:
    """The kernels' tests in three parts."""
    files = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests" / "triton").glob("test_*.py"))]
    if tiny:
        return {"kernels_others": [name for name in files if name.endswith("test_interpreter.py")]}
    parts: dict[str, list[str]] = {"kernels_attention": [], "kernels_products": [], "kernels_others": []}
    for name in files:
        kind = "attention" if "attention" in name else "products" if "linear" in name or "moe" in name else "others"
        parts[f"kernels_{kind}"].append(name)
    return parts


def counts(folder: Path, name: str) -> Path:
    """Where pytest leaves a step's counts."""
    return folder / f"{name}.xml"


def together(todo: Sequence[Step]) -> list[list[Step]]:
    """Groups of steps that run at the same time."""
    groups: list[list[Step]] = []
    for step in todo:
        if step.beside and groups:
            groups[-1].append(step)
        else:
            groups.append([step])
    return groups


class Running:
    """A step's process, in a group of its own, so that what it started ends with it."""

    def __init__(self, step: Step, folder: Path, subject: Subject, limit: float) -> None:
        self.step, self.folder, self.subject, self.limit = step, folder, subject, limit
        self.outcome, self.began = "", time.monotonic()
        for old in (folder / f"{step.name}.json", counts(folder, step.name)):
            old.unlink(missing_ok=True)  # what an earlier run found is not this one's
        self.log = folder / f"{step.name}.log"
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(step.command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT,
                                            start_new_session=True, stdin=subprocess.DEVNULL,
                                            env={**os.environ, **dict(step.environment)})

    def ended(self) -> bool:
        """Whether it has ended; interrupted at its limit as by Ctrl-C, then ended."""
        over = time.monotonic() - self.began - self.limit
        code = self.process.poll()
        if code is not None:
            self.outcome = self.outcome or self._outcome(code)
        elif over > GRACE:
            self.end(signal.SIGKILL)
        elif over > 0 and not self.outcome:
            self.outcome = f"ended after {self.limit:.0f} s"
            self.end(signal.SIGINT)
        return code is not None

    def end(self, signum: int) -> None:
        with suppress(ProcessLookupError):
            if GROUPS:
                os.killpg(self.process.pid, signum)
            else:
                self.process.kill()

    def stop(self) -> None:
        """End it at once, with all that it started."""
        if self.process.poll() is None:
            self.outcome = "interrupted"
        self.end(signal.SIGKILL)
        self.process.wait()

    def _outcome(self, code: int) -> str:
        passed, reason = self._tests() if self.step.tests else (1, "")
        if code in self.step.empty or (code == 0 and not passed):
            return f"not run: {reason or self._last()}"[:300]
        return "done" if code == 0 else f"failed with {code}"

    def _last(self) -> str:
        """The last line that it printed."""
        lines = self.log.read_text("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else ""

    def _tests(self) -> tuple[int, str]:
        """How many of pytest's tests passed, and why the first one did not run."""
        try:
            cases = list(ElementTree.parse(counts(self.folder, self.step.name)).iter("testcase"))
        except (OSError, ElementTree.ParseError):
            return 0, ""
        bad = ("skipped", "failure", "error")
        told = []
        for each in (each for case in cases for each in case.iter("skipped")):
            inside = (each.text or "").partition("Skipped: ")[2].rstrip("')\"")  # where a whole file is skipped
            told.append(inside if each.get("message") == "collection skipped" else each.get("message", ""))
        return sum(all(case.find(kind) is None for kind in bad) for case in cases), next(iter(told), "")

    def status(self) -> dict[str, Any]:
        """What became of it; writes STEP.json where that is made of pytest's counts, and whose results they are."""
        code, path = self.process.returncode, self.folder / f"{self.step.name}.json"
        if self.step.tests:
            row = {"exit": code, "passed": self._tests()[0], "last line": self._last()}
            write_whole(path, json.dumps({"rows": [row]}))
        found: Any = None
        with suppress(OSError, ValueError):
            found = json.loads(path.read_text("utf-8"))
        if isinstance(found, dict):
            write_whole(path, json.dumps({"of": stamp(self.subject), **found}, indent=1, ensure_ascii=False) + "\n")
        return {"outcome": self.outcome, "seconds": round(time.monotonic() - self.began, 1),
                "date": datetime.now(UTC).isoformat(timespec="seconds")}


def run_steps(chosen: Sequence[Step], folder: Path, subject: Subject, left: float, status: dict[str, Any],
              pause: Callable[[], None]) -> None:
    """Run these at the same time and write into `status` what became of each. pause: a short sleep; if it raises, all
    of them are ended at once."""
    running: list[Running] = []
    try:
        for step in chosen:
            running.append(Running(step, folder, subject, min(step.limit, left)))
        waiting = list(running)
        while waiting:
            for each in [each for each in waiting if each.ended()]:
                waiting.remove(each)
                status[each.step.name] = found = each.status()
                print(f"{each.step.name}: {found['outcome']} in {found['seconds']} s", flush=True)
            pause()
    except BaseException:
        for each in running:
            each.stop()
        for each in running:
            if each.outcome == "interrupted":
                status[each.step.name] = each.status()
        raise
