"""The steps of ci/device_check.sh, each in a process of its own with a limit of time: what is timed runs alone, what is
only right or wrong at the same time, since it is compilers that this waits for.

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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from report import write_report

ROOT = Path(__file__).resolve().parent.parent.parent
HERE = Path(__file__).resolve().parent
STATUS = "steps.json"
TOGETHER = 175       # seconds for what is not timed
NOTHING_TO_TEST = 5  # pytest's exit status, where Triton is not installed
GRACE = 10  # seconds that an interrupted step has to write what it has
TINY_CASES = ("attention[mha,4/4x16,page16,f32]", "linear[f32*")  # of a run that only shows that this works


@dataclass(frozen=True)
class Step:
    """limit: seconds. results: whether the command writes STEP.json itself; else it is made of the exit status.
    fine: exit statuses of a step that ended well. beside: it runs at the same time as the one before it."""

    name: str
    limit: int
    command: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()
    results: bool = True
    fine: tuple[int, ...] = (0,)
    beside: bool = False


def steps(platform: str, folder: Path, tiny: bool) -> list[Step]:
    """In the order of their worth, should time run out; all together take less than eight minutes."""
    def ours(name: str, limit: int, *before: str, script: str = "") -> Step:
        return Step(name, limit, (sys.executable, str(HERE / f"{script or name}.py"), *before, platform, "--json",
                                  str(folder / f"{name}.json"), "--results", str(folder),
                                  *(("--device", "cpu") if tiny else ())))

    conformance = (sys.executable, "-m", "isthmus.core.cli.main", "conformance",
                   f"--platform={'cpu' if tiny else platform}", f"--json={folder / 'conformance.json'}",
                   *(f"--only={case}" for case in (TINY_CASES if tiny else ())))
    pytest = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    compiled = () if tiny else (("TRITON_INTERPRET", "0"),)
    slow = () if tiny else ("-m", "slow or not slow")
    kernels = [Step(f"kernels_{name}", TOGETHER, (*pytest, *files, *slow), compiled, results=False,
                    fine=(0, NOTHING_TO_TEST), beside=True) for name, files in shards(tiny).items()]
    return [
        ours("facts", 20), ours("ceilings", 25), ours("attention", 45), ours("linears", 35),
        ours("llama", 55, "llama", script="models"), ours("qwen", 60, "qwen", script="models"), ours("engine", 55),
        Step("conformance", TOGETHER, conformance), *kernels]


def shards(tiny: bool) -> dict[str, list[str]]:
    """The kernels' tests in three parts."""
    files = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests" / "triton").glob("test_*.py"))]
    if tiny:
        return {"others": [name for name in files if name.endswith("test_interpreter.py")]}
    parts: dict[str, list[str]] = {"attention": [], "products": [], "others": []}
    for name in files:
        kind = "attention" if "attention" in name else "products" if "linear" in name or "moe" in name else "others"
        parts[kind].append(name)
    return parts


def together(todo: Sequence[Step]) -> list[list[Step]]:
    """Groups of steps that run at the same time."""
    groups: list[list[Step]] = []
    for step in todo:
        if step.beside and groups:
            groups[-1].append(step)
        else:
            groups.append([step])
    return groups


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


def wanted(step: Step, named: Sequence[str], status: dict[str, Any], left: float) -> bool:
    """Whether it is to be run now; says why not, or for how long at most."""
    if named and step.name not in named:
        return False
    if not named and status.get(step.name, {}).get("outcome") == "done":
        print(f"{step.name}: done before")
        return False
    if left < GRACE:
        print(f"{step.name}: no time left; run it again to go on from here")
        return False
    print(f"{step.name}: at most {min(step.limit, left):.0f} s", flush=True)
    return True


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
    for group in together(todo):
        left = ends - time.monotonic() - GRACE
        chosen = [step for step in group if wanted(step, given.step, status, left)]
        with ThreadPoolExecutor(len(group)) as pool:
            done = pool.map(lambda step, left=left: run_step(step, folder, min(step.limit, left)), chosen)
            for step, found in zip(chosen, done, strict=True):
                status[step.name] = found
                print(f"{step.name}: {found['outcome']} in {found['seconds']} s", flush=True)
        (folder / STATUS).write_text(json.dumps(status, indent=1) + "\n", "utf-8")
        write_report(folder, given.platform, given.device == "cpu", [s.name for s in todo], status)
    print(f"see {folder / 'report.md'}")
    return 0 if all(status.get(step.name, {}).get("outcome") == "done" for step in todo) else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
