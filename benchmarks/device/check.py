"""The steps of ci/device_check.sh, one after the other, each in a process of its own with a limit of time.

A step's results are FOLDER/STEP.json, what it printed FOLDER/STEP.log. A step that ended well is not done again while
they lie there; one that fails, or is ended at its limit, leaves what it had, and the rest go on. FOLDER/report.md and
report.json tell all of it. Nothing here needs a network.
"""
from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from report import write_report

ROOT = Path(__file__).resolve().parent.parent.parent
HERE = Path(__file__).resolve().parent
STATUS = "steps.json"
NOTHING_TO_TEST = 5  # pytest's exit status, where Triton is not installed
GRACE = 10  # seconds that an interrupted step has to write what it has
TINY_CASES = ("attention[mha,4/4x16,page16,f32]", "linear[f32*")  # of a run that only shows that this works


@dataclass(frozen=True)
class Step:
    """limit: seconds. results: whether the command writes STEP.json itself; else it is made of the exit status.
    fine: exit statuses of a step that ended well."""

    name: str
    limit: int
    command: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()
    results: bool = True
    fine: tuple[int, ...] = (0,)


def steps(platform: str, folder: Path, tiny: bool) -> list[Step]:
    """In the order of their worth, should time run out; the sum of the limits is below eight minutes."""
    def ours(name: str, limit: int, *before: str, script: str = "") -> Step:
        return Step(name, limit, (sys.executable, str(HERE / f"{script or name}.py"), *before, platform, "--json",
                                  str(folder / f"{name}.json"), "--results", str(folder),
                                  *(("--device", "cpu") if tiny else ())))

    conformance = (sys.executable, "-m", "isthmus.core.cli.main", "conformance",
                   f"--platform={'cpu' if tiny else platform}", f"--json={folder / 'conformance.json'}",
                   *(f"--only={case}" for case in (TINY_CASES if tiny else ())))
    tests = ("tests/triton/test_interpreter.py",) if tiny else ("tests/triton", "-m", "slow or not slow")
    return [
        ours("facts", 20), ours("ceilings", 25), ours("attention", 45), ours("linears", 35),
        ours("llama", 55, "llama", script="models"), ours("qwen", 60, "qwen", script="models"), ours("engine", 55),
        Step("conformance", 115, conformance),
        Step("kernels", 60, (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests),
             (() if tiny else (("TRITON_INTERPRET", "0"),)), results=False,
             fine=(0, NOTHING_TO_TEST))]


def run_step(step: Step, folder: Path, limit: float) -> dict[str, Any]:
    """Run it; what became of it. Interrupted at its limit as by Ctrl-C, then ended."""
    began = time.monotonic()
    with open(folder / f"{step.name}.log", "w", encoding="utf-8") as log:
        # A process group of its own, so that what it started ends with it.
        process = subprocess.Popen(step.command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                                   stdin=subprocess.DEVNULL, env={**os.environ, **dict(step.environment)})
        outcome = wait(process, limit, step.fine)
    status = {"outcome": outcome, "seconds": round(time.monotonic() - began, 1),
              "date": datetime.now(UTC).isoformat(timespec="seconds")}
    if not step.results:
        lines = (folder / f"{step.name}.log").read_text("utf-8", "replace").strip().splitlines()
        about = {"rows": [{"exit": process.returncode, "last line": lines[-1] if lines else ""}]}
        (folder / f"{step.name}.json").write_text(json.dumps(about, indent=1) + "\n", "utf-8")
    return status


def wait(process: subprocess.Popen[bytes], limit: float, fine: tuple[int, ...]) -> str:
    try:
        code = process.wait(limit)
        return "done" if code in fine else f"failed with {code}"
    except subprocess.TimeoutExpired:
        for signum in (signal.SIGINT, signal.SIGKILL):
            os.killpg(process.pid, signum)
            try:
                process.wait(GRACE)
                break
            except subprocess.TimeoutExpired:
                continue
        return f"ended after {limit:.0f} s"


def read_status(folder: Path) -> dict[str, Any]:
    path = folder / STATUS
    return json.loads(path.read_text("utf-8")) if path.is_file() else {}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("platform", nargs="?", default="cuda", choices=("cuda", "rocm", "xpu", "npu"))
    parser.add_argument("--folder", type=Path, default=Path("device_check"), help="where the results go")
    parser.add_argument("--device", choices=("own", "cpu"), default="own", help="cpu: emulated, tiny, a test")
    parser.add_argument("--seconds", type=float, default=475, help="for all of it")
    parser.add_argument("--step", action="append", default=[], help="these alone; done again if they were done")
    given = parser.parse_args(argv)
    folder = given.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    todo, ends = steps(given.platform, folder, given.device == "cpu"), time.monotonic() + given.seconds
    if unknown := set(given.step) - {step.name for step in todo}:
        parser.error(f"there is no step {', '.join(sorted(unknown))}; there are: {', '.join(s.name for s in todo)}")
    status = read_status(folder)
    for step in todo:
        if given.step and step.name not in given.step:
            continue
        if not given.step and status.get(step.name, {}).get("outcome") == "done":
            print(f"{step.name}: done before")
            continue
        left = ends - time.monotonic() - GRACE
        if left < GRACE:
            print(f"{step.name}: no time left; run it again to go on from here")
            continue
        print(f"{step.name}: at most {min(step.limit, left):.0f} s", end="", flush=True)
        status[step.name] = run_step(step, folder, min(step.limit, left))
        print(f", {status[step.name]['outcome']} in {status[step.name]['seconds']} s", flush=True)
        (folder / STATUS).write_text(json.dumps(status, indent=1) + "\n", "utf-8")
        write_report(folder, given.platform, given.device == "cpu", [s.name for s in todo], status)
    print(f"see {folder / 'report.md'}")
    return 0 if all(status.get(step.name, {}).get("outcome") == "done" for step in todo) else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
