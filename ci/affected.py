"""Which jobs of ci/matrix.json a change needs: `python ci/affected.py FILE...`, or `--since COMMIT`.

Derived from the import graph. Core is in every job; a platform's folder is in its own jobs and in those whose tests
import it; what the jobs of single platforms test is not run again by the one with the whole suite; prose is in none.
Within a job a change needs the test files that reach it, and conformance where the platform does (`shard`).
What nothing is known about needs every job: a file, a commit, a checkout with changes that are not committed, no files
at all. Style and layout are checked always.
"""
from __future__ import annotations

import argparse
import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import cells
import graph

PROSE = (".md", ".rst", ".txt")
PROSE_FOLDERS = ("docs", "benchmarks")
RUNNING = ("ci", ".ci", ".github")  # how jobs are run


@cache
def jobs() -> dict[str, Any]:
    return cells.read_matrix()["jobs"]


def everywhere() -> set[str]:
    """Platforms that compute with nothing beyond core's libraries: every job has them, to compare with."""
    return {p.parts[1] for p in graph.sources() if p.match("platforms/*/platform.py")
            and graph.libraries(p) <= graph.installed_by([])}


def tests_of(name: str) -> list[Path]:
    """Test files that a job runs. Of the whole suite those that no other job of an ordinary machine does."""
    job = jobs()[name]
    if not job["whole"]:
        return list(map(Path, job["tests"]))
    others = {test for other in jobs().values() if other["hosted"] for test in other["tests"]}
    return [test for test in graph.whole_suite({other["library"] for other in jobs().values()} - {job["library"], ""})
            if str(test) not in others or graph.needs(test)]


@cache
def platform_files(name: str) -> frozenset[Path]:
    """Sources that a job's conformance run uses: core, its platform, the suite, and all that these import."""
    job = jobs()[name]
    folders = [Path("core"), Path("tests/conformance"), Path(job["folder"])]
    folders += [Path("platforms", platform) for platform in everywhere()]
    roots = {p for p in graph.sources() if any(p.is_relative_to(folder) for folder in folders)}
    if job["stand_in"] in graph.stand_ins():
        roots.add(graph.find(graph.stand_ins()[job["stand_in"]]))
    return frozenset(graph.reach(roots))


@cache
def files_of(name: str) -> frozenset[Path]:
    """Sources that a job runs: `platform_files`, its test files, and all that these import."""
    return platform_files(name) | brought(name, *tests_of(name))


def brought(name: str, *tests: Path) -> frozenset[Path]:
    """Sources that test files of a job bring in. A platform whose own job runs such a test too is not this one's."""
    def others(test: Path) -> set[Path]:
        if graph.needs(test):
            return set()
        return {Path(job["folder"]) for job in jobs().values() if str(test) in job["tests"]} - {own}
    own = Path(jobs()[name]["folder"])
    apart = [test for test in tests if others(test)]
    found = graph.reach({test for test in tests if test not in apart} | {Path("tests/conftest.py")} if tests else set())
    for test in apart:
        found |= {p for p in graph.reach({test}) if p in platform_files(name) or others(test).isdisjoint(p.parents)}
    return frozenset(found)


def shard(name: str, files: list[str]) -> tuple[bool, list[str]]:
    """What a job has to run for a change of these files: whether conformance, and which test files. All, where
    something else has changed than sources that it knows. Of the whole suite, which loads platforms by their names,
    single files only where nothing but tests has changed."""
    job, changed = jobs()[name], {Path(file) for file in files if not _prose(Path(file))}
    known = all(path in files_of(name) or any(path in files_of(other) for other in jobs()) for path in changed)
    if not known or job["whole"] and not all(path.parts[0] == "tests" for path in changed - platform_files(name)):
        return True, job["tests"]
    conformance = not changed.isdisjoint(platform_files(name))
    if conformance and job["whole"]:
        return True, job["tests"]
    return conformance, [str(test) for test in tests_of(name) if not changed.isdisjoint(brought(name, test))]


def _prose(path: Path) -> bool:
    return path.suffix in PROSE or path.parts[:1] in [(folder,) for folder in PROSE_FOLDERS] or path.name == "LICENSE"


def affected(files: list[str]) -> list[str]:
    """Names of the jobs that a change of these files needs, in the matrix's order."""
    needed: set[str] = set()
    for path in map(Path, files):
        if _prose(path):
            continue
        running = path.parts[:1] in [(top,) for top in RUNNING]
        having = set() if running else {name for name in jobs() if path in files_of(name)}
        if not having and not any(path.is_relative_to(Path("platforms", name)) for name in everywhere()):
            having = {name for name, job in jobs().items() if path.is_relative_to(job["folder"])}  # as a ledger.toml
        needed |= having or set(jobs())
    return [name for name in jobs() if name in needed]


def changed_since(commit: str) -> list[str] | None:
    """Files that differ between a commit and the checkout, one that was moved by both its names; None when git cannot
    say, or knows changes that no commit has."""
    if not commit:
        return None
    changed = _git("diff", "--no-renames", "--name-only", "-z", "--end-of-options", f"{commit}...HEAD")
    return changed if _git("status", "--porcelain", "-z") == [] else None


def _git(*words: str) -> list[str] | None:
    """What git says, its items apart; None when it fails or is not there."""
    try:
        done = subprocess.run(["git", *words], cwd=graph.ROOT, capture_output=True)
    except OSError:
        return None
    items = done.stdout.decode("utf-8", "surrogateescape").split("\0")
    return list(filter(None, items)) if done.returncode == 0 else None


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", metavar="FILE", help="relative to the repository's root")
    parser.add_argument("--since", metavar="COMMIT", help="the files that differ from it; all jobs if git cannot say, "
                        "or while there are changes that are not committed")
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    given = parser.parse_args(argv)
    files = (given.files or None) if given.since is None else changed_since(given.since)
    names = list(jobs()) if files is None else affected(files)
    print(json.dumps(names) if given.json else "\n".join(names))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
