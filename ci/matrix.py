"""Write the CI matrix from the platforms' manifests: ci/matrix.json and .github/workflows/platforms.yml, and what the
emulations of tests/emulation claim.

`python ci/matrix.py` writes all, `--check` fails when they are stale. A job is one platform on one kind of machine.
Its time limit follows from the seconds that its test files and its conformance run declare.
"""
from __future__ import annotations

import argparse
import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import graph
from isthmus.conformance import LAWS
from isthmus.core import manifests
from isthmus.core.discovery import GROUP
from isthmus.core.platform import FEATURES
from isthmus.core.quant.formats import FORMATS
from isthmus.core.registry import RegistrationError

PYTHON = "3.12"
INSTALL = 300   # seconds to make an environment
SLACK = 3       # times slower than declared before a job is stopped
JSON, WORKFLOW = Path("ci/matrix.json"), Path(".github/workflows/platforms.yml")
END = "_emulated"  # of the names of stand-ins; what is before it is their folder
LIGHT = ("tests/test_layout.py", "tests/test_ci.py", "tests/test_registry.py")  # what every change must pass


def folders() -> dict[str, tuple[Path, Path]]:
    """Platform -> its folder and its manifest: those of platforms/, then the packages of examples/."""
    found = {p.parent.name: (p.parent, p.with_name(manifests.FILE)) for p in
             sorted(path for path in graph.sources() if path.match("platforms/*/platform.py"))}
    for project in sorted(graph.ROOT.glob("examples/*/pyproject.toml")):
        package, about = project.parent.relative_to(graph.ROOT), tomllib.loads(project.read_text("utf-8"))
        for name, entry in about["project"].get("entry-points", {}).get(GROUP, {}).items():
            module = Path(package, *entry.partition(":")[0].split("."))
            found[name] = (package, module.with_name(manifests.FILE))
    return found


def claims() -> dict[str, manifests.Claim]:
    """Manifests of the platforms of this repository."""
    return {name: manifests.read_file(graph.ROOT / manifest) for name, (_, manifest) in folders().items()}


def tests_of(platform: str, claim: manifests.Claim, job: manifests.Job) -> list[Path]:
    """Test files about a platform that the job's environment can import: what imports its folder, skips without its
    library, or declares capabilities that it offers. What imports another platform of the same library is about that
    one."""
    present = graph.installed_by(job.install)
    offered = manifests.capabilities(claim)
    folder = folders()[platform][0]
    others = {path for name, (path, _) in folders().items() if name != platform and claim.library
              and claims()[name].library == claim.library}
    chosen = []
    for path in graph.test_files():
        if not graph.libraries(path) <= present:
            continue
        own = any(p.is_relative_to(folder) for p in graph.imports(path)) and bool(claim.library)
        if not own and any(p.is_relative_to(other) for p in graph.imports(path) for other in others):
            continue
        asked = {*graph.libraries(path), *graph.optional_libraries(path)}
        if own or claim.library in asked or any(words <= offered for words in graph.needs(path)):
            chosen.append(path)
    return chosen


def tests_of_stand_ins() -> dict[str, list[Path]]:
    """Job -> the test files that it shows and the whole suite does not, for jobs without the platform's device: those
    that import its stand-in, or its platform's folder and no stand-in, or what platforms share that have stand-ins. Of
    the jobs that can run one of the latter it is the one with the least beyond what the file needs. All else says
    nothing of a platform that is not there."""
    homes = folders()
    every = [(homes[name][0], job) for name, claim in claims().items() for job in claim.ci
             if job.hosted and job.stand_in]
    shared = {Path(*p.parts[:2]) for p in graph.sources() if p.match("platforms/*/*.py")} | {graph.EMULATION}
    shared -= {folder for folder, _ in homes.values()}
    present = {job.name: graph.installed_by(job.install) for _, job in every}
    chosen: dict[str, list[Path]] = {job.name: [] for _, job in every}
    for path in graph.test_files():
        above = {parent for p in graph.imports(path) for parent in p.parents}
        about = [job for _, job in every if graph.EMULATION / job.stand_in.removesuffix(END) in above]
        if not about:
            near = [job for folder, job in every if folder in above] or [job for _, job in every if above & shared]
            able = [job for job in near if graph.libraries(path) <= present[job.name]]
            about = sorted(able, key=lambda job: len(present[job.name]))[:1]
        for job in about:
            chosen[job.name].append(path)
    return chosen


def matrix() -> dict[str, Any]:
    """Every job as plain data, by name."""
    jobs: dict[str, Any] = {}
    stand_ins = tests_of_stand_ins()
    elsewhere = {path for paths in stand_ins.values() for path in paths}
    frameworks = {claim.library for claim in claims().values() if claim.library}
    for platform, claim in claims().items():
        for job in claim.ci:
            if job.name in jobs:
                raise ValueError(f"two jobs have the name {job.name}: {jobs[job.name]['platform']}'s and {platform}'s")
            if job.whole:  # as ci/job.py runs it
                tests = [path for path in graph.whole_suite(frameworks - {claim.library})
                         if path not in elsewhere or graph.needs(path)]
            else:
                tests = stand_ins[job.name] if job.name in stand_ins else tests_of(platform, claim, job)
            seconds = job.conformance / job.every + sum(map(graph.cost, tests))
            without = f" without {', '.join(job.without)}" if job.without else ""
            jobs[job.name] = {
                "title": f"{platform}{without}, on {job.device}", "platform": platform,
                "folder": str(folders()[platform][0]), "device": job.device,
                "runner": job.runner, "hosted": job.hosted, "install": job.install, "without": job.without,
                "environment": job.environment, "whole": job.whole, "library": claim.library, "every": job.every,
                "stand_in": job.stand_in, "shown": job.shown or ("runs here" if job.hosted else "verified on"),
                "tests": ["tests"] if job.whole else [str(p) for p in tests],
                "minutes": -(-int(SLACK * seconds + INSTALL) // 600) * 10,
                "capabilities": sorted(manifests.capabilities(claim)), "lacks": claim.lacks,
                "limits": {op: limit for op, limit in claim.ops.items() if limit}, "expands": claim.expands}
    formats = ["f32", "f16", "bf16", *(f.name for f in FORMATS.values() if f.kind == "quantized")]
    return {"python": PYTHON, "light": LIGHT, "jobs": jobs, "ops": manifests.OPS, "features": list(FEATURES),
            "formats": formats, "laws": list(LAWS)}


def workflow(data: dict[str, Any]) -> str:
    """The same for GitHub Actions. A job on a machine of one's own runs where the variable ISTHMUS_RUNNERS lists it."""
    jobs = data["jobs"]
    return HEAD.format(python=PYTHON, light=" ".join(LIGHT)) + "".join(
        JOB.format(id=name, title=job["title"], runner=json.dumps(job["runner"]), timeout=job["minutes"], python=PYTHON,
                   own="" if job["hosted"] else f" && contains(vars.ISTHMUS_RUNNERS, '{name}')")
        for name, job in jobs.items()) + TAIL.format(needs=json.dumps(["plan", *jobs]), python=PYTHON)


HEAD = """\
# Written by ci/matrix.py from the platforms' manifests; do not edit.
name: platforms
on:
  push:
    branches: [main]
  pull_request:
permissions:
  contents: read
jobs:
  plan:
    runs-on: ubuntu-latest
    timeout-minutes: 10
    outputs:
      jobs: ${{{{ steps.affected.outputs.jobs }}}}
    steps:
      - uses: actions/checkout@v4
        with:
          fetch-depth: 0
      - uses: actions/setup-python@v5
        with:
          python-version: "{python}"
      - id: affected
        env:
          BASE: ${{{{ github.event.pull_request.base.sha || github.event.before }}}}
        run: jobs=$(python ci/affected.py --json --since "$BASE") && echo "jobs=$jobs" >> "$GITHUB_OUTPUT"
  light:
    name: style, layout, generated files
    runs-on: ubuntu-latest
    timeout-minutes: 10
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with:
          python-version: "{python}"
      - run: python -m pip install -e ".[platform-test]" "ruff>=0.8"
      - run: ruff check .
      - run: python -m pytest {light}
"""

JOB = """\
  {id}:
    name: {title}
    needs: plan
    if: contains(fromJSON(needs.plan.outputs.jobs), '{id}'){own}
    runs-on: {runner}
    timeout-minutes: {timeout}
    steps:
      - uses: actions/checkout@v4
        with:
          fetch-depth: 0
      - uses: actions/setup-python@v5
        with:
          python-version: "{python}"
      - uses: actions/cache@v4
        with:
          path: ~/.cache/pip
          key: pip-{id}-${{{{ hashFiles('pyproject.toml') }}}}
      - env:
          BASE: ${{{{ github.event.pull_request.base.sha || github.event.before }}}}
        run: python ci/job.py {id} --sample --since "$BASE" --report reports/{id}.json
      - uses: actions/upload-artifact@v4
        if: always()
        with:
          name: report-{id}
          path: reports
          if-no-files-found: ignore
"""

TAIL = """\
  cells:
    name: what passed, failed, is unsupported or unverified
    needs: {needs}
    if: always()
    runs-on: ubuntu-latest
    timeout-minutes: 10
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with:
          python-version: "{python}"
      - uses: actions/download-artifact@v4
        with:
          pattern: report-*
          path: reports
          merge-multiple: true
      - run: python ci/cells.py reports >> "$GITHUB_STEP_SUMMARY"
"""


def emulated(text: str) -> str:
    """What an emulation claims: what its platform does, but for its rank, since a platform that is what it says comes
    first."""
    head, _, claimed = text.partition("\n[[ci]]")[0].partition("\n")
    return f"{head}\n# Written by ci/matrix.py; do not edit.\n" + re.sub(
        r"(?m)^rank = \d+$", "rank = 1", claimed).rstrip() + "\n"


def outputs() -> dict[Path, str]:
    """What each generated file must hold."""
    data, found = matrix(), folders()
    claimed = {graph.EMULATION / job["stand_in"].removesuffix(END) / manifests.FILE:
               emulated((graph.ROOT / found[job["platform"]][1]).read_text("utf-8"))
               for job in data["jobs"].values() if job["stand_in"].endswith(END)}
    return {JSON: json.dumps(data, indent=1, sort_keys=True) + "\n", WORKFLOW: workflow(data), **claimed}


def stale(files: dict[Path, str]) -> list[str]:
    return [str(path) for path, text in files.items()
            if not (graph.ROOT / path).is_file() or (graph.ROOT / path).read_text("utf-8") != text]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; 1 when a file is stale")
    check = parser.parse_args(argv).check
    try:
        files = outputs()
    except RegistrationError as error:  # of a manifest; it names the file
        raise SystemExit(str(error)) from error
    for name in stale(files):
        print(f"stale: {name} (python ci/matrix.py)" if check else f"written: {name}")
    if check:
        return 1 if stale(files) else 0
    for path, text in files.items():
        (graph.ROOT / path).parent.mkdir(parents=True, exist_ok=True)
        (graph.ROOT / path).write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
