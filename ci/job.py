"""Run one job of ci/matrix.json in a fresh environment: `python ci/job.py mlx [--report FILE] [--venv FOLDER]`.

The environment is made, shown to lack what the job is to do without, then the conformance suite and the job's tests
run. The report (JSON) holds what was found, with date and commit; `ci/cells.py` and `ci/tables.py` read it.
"""
from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import venv
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import affected
import cells
import recordings

ROOT = Path(__file__).resolve().parent.parent
NOT_ASKED = {"ok": True}  # of the suite: no case had to be run
NONE_COLLECTED = 5  # pytest's exit code


def make_environment(folder: Path, words: list[str], kernels: bool = True) -> Path:
    """A virtual environment with `pip install WORDS`, run at the repository's root; its Python. kernels: compile those
    of the host's processor (setup.py)."""
    venv.create(folder, with_pip=True)
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *words], cwd=ROOT, check=True,
                   env=os.environ | {"ISTHMUS_BUILD_KERNELS": "01"[kernels]})
    return python


def check_absent(python: Path, modules: list[str]) -> None:
    """Fail when one of the modules can be imported."""
    for module in modules:
        done = subprocess.run([python, "-I", "-c", f"import {module}"], capture_output=True)  # -I: no folder of here
        if done.returncode == 0:
            raise SystemExit(f"{module} can be imported, and this job is to show that nothing needs it")
        print(f"  {module} cannot be imported, as it should be", flush=True)


def conformance(python: Path, platform: str, every: int = 1, timeout: int | None = None,
                only: tuple[str, ...] = ()) -> dict[str, Any] | None:
    """The suite's report, or None when it gave none. It is ok only if the command says so too. every: only each so
    many-th case, others for each commit. timeout: seconds for one case. only: these laws and cases; none: all."""
    command = [python, "-m", "isthmus.core.cli.main", "conformance"]
    chosen = [f"--timeout={timeout}"] * bool(timeout) + [f"--only={word}" for word in only]
    if every > 1:
        listed = subprocess.run([*command, "--list"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        cases = [line.split()[0] for line in listed.splitlines() if "[" in line.partition(" ")[0]]
        chosen += [f"--only={case}" for case in cases[part_of(commit(), every)::every]]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "report.json")
        done = subprocess.run([*command, f"--platform={platform}", f"--json={path}", *chosen], cwd=ROOT)
        if not path.is_file():
            return None
        found = json.loads(path.read_text("utf-8"))
        return found | {"ok": found["ok"] and done.returncode == 0}


def part_of(commit: str, every: int) -> int:
    """Which of `every` parts of the cases a commit has: any as often as another."""
    return int(commit[:8], 16) % every if re.fullmatch("[0-9a-f]{40}", commit) else 0


def test(python: Path, platform: str, job: dict[str, Any], held: bool = False) -> str:
    """Run the job's tests: "passed", "failed", or "unverified" where there were none. held: the platform has just been
    held to all laws."""
    if not job["tests"]:
        return "unverified"
    marks = "(slow or not slow) and not laws" if held else "slow or not slow"
    chosen = [] if job["whole"] else ["--platform", platform, "-m", marks]
    if job["tests"] == ["tests"]:
        job = job | {"tests": [*job["tests"], *(f"--ignore={path}" for path in elsewhere(job))]}
    codes = [subprocess.run([python, "-m", "pytest", "-q", *job["tests"], *chosen], cwd=ROOT).returncode]
    if job["whole"]:
        codes.append(subprocess.run([python, "-m", "pytest", "-q", "-m", "slow", *job["tests"]], cwd=ROOT).returncode)
    if set(codes) == {NONE_COLLECTED}:
        return "unverified"
    return "passed" if set(codes) <= {0, NONE_COLLECTED} else "failed"


def elsewhere(job: dict[str, Any]) -> list[str]:
    """Test files of the whole suite that other jobs of ordinary machines run, each in the environment that it needs."""
    others = {test for other in cells.read_matrix()["jobs"].values() if other["hosted"] and other["stand_in"]
              for test in other["tests"]}
    return sorted(test for test in others if not affected.graph.needs(Path(test)))


def record(about: dict[str, Any], found: dict[str, Any] | None) -> str:
    """A report as JSON, one case a line, with what tables and people read of it."""
    if "device" in (found or {}).get("manifest", {}):
        about = {**about, "on": found["manifest"]["device"]}
    head = {**about, **{k: v for k, v in (found or {}).items() if k not in ("cases", "manifest")}}
    kept = ("id", "law", "op", "needs", "outcome", "reason", "seconds", "date", "commit")
    cases = [{k: v for k, v in case.items() if k in kept and v != ""} for case in (found or {}).get("cases", ())]
    lines = ",\n".join("  " + json.dumps(case, ensure_ascii=False) for case in cases)
    return json.dumps(head, indent=1, ensure_ascii=False).removesuffix("\n}") + f',\n "cases": [\n{lines}\n ]\n}}\n'


def taken(path: Path, platform: str) -> dict[str, Any]:
    """A report of the suite that was made before, as by ci/device_check.sh. Ends the script for one of another
    platform, and for one of no device."""
    found = cells.read_object(path, "`isthmus conformance --json=FILE` writes one", platform=str, started=str,
                              cases=list, manifest=dict)
    emulated = bool(found.get("of", {}).get("emulated"))
    if found["platform"] != platform or emulated:
        raise SystemExit(f"{path} is of {found['platform']}{' emulated' * emulated}, not of {platform}")
    return found


def add(given: argparse.Namespace, job: dict[str, Any]) -> int:
    """Add to a recording the cases that it says were not run, and the laws that are asked for: the exit code."""
    if given.report is None or not given.report.is_file():
        raise SystemExit(f"--missing adds to a recording: --report {given.report} is none")
    recorded = cells.checked(given.report)
    if recorded["job"] != given.name:
        raise SystemExit(f"{given.report} is of the job {recorded['job']}, not of {given.name}")
    if given.taken:
        found = recordings.read(given.taken)
    else:
        only = (*given.missing, *recordings.missing(recorded))
        if not only:
            raise SystemExit(f"{given.report} lacks no case: name a law after --missing")
        os.environ.update(job["environment"])
        with tempfile.TemporaryDirectory() as folder:
            python = given.python or make_environment(given.venv or Path(folder, "venv"), job["install"], False)
            check_absent(python, job["without"])
            found = conformance(python, job["stand_in"] or job["platform"], 1, given.timeout, only)
        if found is None:
            raise SystemExit(f"{given.name}: the suite gave no report, {given.report} is as it was")
    whole = recordings.added(recorded, found, found.get("of", {}).get("commit") or commit())
    given.report.write_text(record({}, whole), "utf-8")
    print(f"{given.name}: {len(found['cases'])} cases added, conformance {'ok' if whole['ok'] else 'failed'}")
    return 0 if whole["ok"] else 1


def commit() -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def keep(path: Path | None, name: str, job: dict[str, Any], found: dict[str, Any] | None, tests: str) -> int:
    """Write the report of a job, say how it ended, and give its exit code."""
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(record({
            "job": name, "platform": job["platform"], "device": job["device"],
            "date": (found or {}).get("started", datetime.now(UTC).isoformat())[:10],
            "commit": (found or {}).get("of", {}).get("commit") or commit(), "tests": tests}, found), "utf-8")
    ok = found is not None and found["ok"] and tests != "failed"
    said = "not asked for" if found is NOT_ASKED else \
        "gave no report" if found is None else "ok" if found["ok"] else "failed"
    print(f"{name}: conformance {said}, tests {tests}")
    return 0 if ok else 1


def run(given: argparse.Namespace, job: dict[str, Any]) -> int:
    """Make the environment, and run what was asked for of the suite and the tests: the exit code."""
    files = affected.changed_since(given.since) if given.since is not None else None
    suite, chosen = (True, job["tests"]) if files is None else affected.shard(given.name, files)
    job = job | {"tests": [] if given.only_conformance else chosen}
    if not suite and not job["tests"]:
        print(f"{given.name}: nothing of it has changed")
        return 0
    os.environ.update(job["environment"])
    print(f"{given.name}: {job['title']}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        python = given.python or make_environment(given.venv or Path(folder, "venv"), job["install"], job["whole"])
        check_absent(python, job["without"])
        found = conformance(python, job["stand_in"] or job["platform"], job["every"] if given.sample else 1,
                            given.timeout) if suite else NOT_ASKED
        tests = test(python, job["platform"], job, held=suite and job["every"] == 1)
    return keep(given.report, given.name, job, found, tests)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="?")
    parser.add_argument("--list", action="store_true", help="print the hosted jobs beside the whole suite")
    parser.add_argument("--report", type=Path, metavar="FILE", help="where the report goes")
    parser.add_argument("--venv", type=Path, metavar="FOLDER", help="where the environment is made")
    parser.add_argument("--python", type=Path, help="use this one's environment instead of making one")
    parser.add_argument("--taken", type=Path, metavar="FILE", help="run nothing: the suite's own report, of a device")
    parser.add_argument("--missing", nargs="*", metavar="LAW", help="run what --report's recording says was not run, "
                        "and these laws, and add them to it; with --taken add that run of the suite")
    parser.add_argument("--only-conformance", action="store_true", help="leave the tests out")
    parser.add_argument("--sample", action="store_true",
                        help="as for a change: only each so many-th case of the suite where a stand-in is slow")
    parser.add_argument("--timeout", type=int, metavar="SECONDS", help="for one case of the suite, on a busy machine")
    parser.add_argument("--since", metavar="COMMIT", help="of the tests only those that what changed since then is in, "
                        "and conformance only if the platform has changed")
    given = parser.parse_args(argv)
    jobs = cells.read_matrix()["jobs"]
    if given.list:
        print("\n".join(name for name, job in jobs.items() if job["hosted"] and not job["whole"]))
        return 0
    if given.name not in jobs:
        parser.error(f"there is no job {given.name}; there are: {', '.join(jobs)}")
    job = jobs[given.name]
    if given.missing is not None:
        return add(given, job)
    if given.taken:
        return keep(given.report, given.name, job, taken(given.taken, job["stand_in"] or job["platform"]), "unverified")
    return run(given, job)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
