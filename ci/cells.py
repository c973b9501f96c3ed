"""What is known of each platform in each job: passed, failed, unsupported or unverified. Never more than was run.

`python ci/cells.py FOLDER` prints it in Markdown from the reports in a folder (`ci/job.py --report FOLDER/NAME.json`).
"""
from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PASSED, FAILED, UNSUPPORTED, UNVERIFIED = "passed", "failed", "unsupported", "unverified"
BAD = ("wrong", "error", "unexpected pass", "expected failure")  # a failure that the ledger expects is one
NOT_RUN = "not run"

NEEDED = {"id", "law", "op", "needs", "outcome"}  # of a case


@dataclass(frozen=True)
class Cell:
    """state: one of the four. reason: of what is unsupported or failed. passed of total cases that were asked for, of
    which `missing` were not run."""

    state: str
    reason: str = ""
    passed: int = 0
    total: int = 0
    missing: int = 0


def read_object(path: Path, remedy: str, **fields: type) -> dict[str, Any]:
    """A JSON object that has these fields. Ends the script with one line that names the file where it is none."""
    try:
        found = json.loads(path.read_text("utf-8"))
        if not isinstance(found, dict):
            raise ValueError(f"a JSON object is needed, not a {type(found).__name__}")
        for name, kind in fields.items():
            if not isinstance(found.get(name), kind):
                raise ValueError(f"{name!r} is {found.get(name)!r:.40}, a {kind.__name__} is needed")
    except (OSError, ValueError, RecursionError) as error:
        raise SystemExit(f"{path}: {error}; {remedy}") from error
    return found


def checked(path: Path) -> dict[str, Any]:
    """A report, with the fields that are read of it."""
    remedy = "python ci/job.py NAME --report FILE writes one"
    report = read_object(path, remedy, job=str, tests=str, date=str, cases=list)
    if "counts" in report:  # else the suite gave none
        read_object(path, remedy, counts=dict, versions=dict, seconds=float)
    for case in report["cases"]:
        if not isinstance(case, dict) or not NEEDED <= set(case) or not isinstance(case["needs"], list):
            raise SystemExit(f"{path}: {str(case)[:60]} is no case, which has {', '.join(sorted(NEEDED))}; {remedy}")
    return report


def read_matrix() -> dict[str, Any]:
    return read_object(ROOT / "ci" / "matrix.json", "python ci/matrix.py writes it", jobs=dict)


def read_reports(folder: Path) -> dict[str, dict[str, Any]]:
    """Reports by job; a job without one is missing."""
    return {report["job"]: report for report in map(checked, sorted(folder.glob("*.json")))}


def judge(cases: list[dict[str, Any]]) -> Cell:
    """The cell of these cases: passed only if some did and none failed."""
    outcomes = Counter(case["outcome"] for case in cases)
    bad = [case for case in cases if case["outcome"] in BAD]
    passed, total = outcomes["passed"], len(cases)
    if bad:
        reasons = Counter(case.get("reason", "") for case in bad)
        return Cell(FAILED, reasons.most_common(1)[0][0], passed, total)
    if passed:
        return Cell(PASSED, "", passed, total, total - passed - outcomes["unsupported"])
    reasons = Counter(case.get("reason", "") for case in cases if case["outcome"] == "unsupported")
    if reasons and outcomes["unsupported"] == total:
        return Cell(UNSUPPORTED, reasons.most_common(1)[0][0], 0, total)
    return Cell(UNVERIFIED)


def formats_of(case: dict[str, Any]) -> list[str]:
    """The storage formats that a case of `linear` is about: "linear[q4_0+q4_1,T3,bf16]" -> both."""
    found = re.match(r"linear\[([^,\]]+)", case["id"])
    return found[1].split("+") if found else []


def sections(matrix: dict[str, Any], reports: dict[str, dict[str, Any]]) -> dict[str, dict[str, dict[str, Cell]]]:
    """Section -> row -> job -> cell."""
    tests: dict[str, Callable[[dict[str, Any], str], bool]] = {
        "op": lambda case, row: case["law"] == "ops" and case["op"] == row,
        "format": lambda case, row: row in formats_of(case),
        "feature": lambda case, row: row in case["needs"],
        "law": lambda case, row: case["law"] == row}
    rows = {"op": matrix["ops"], "format": matrix["formats"], "feature": matrix["features"], "law": matrix["laws"]}
    result: dict[str, dict[str, dict[str, Cell]]] = {}
    for section, names in rows.items():
        result[section] = {row: {name: _cell(job, reports.get(name), row, tests[section], section == "format")
                                 for name, job in matrix["jobs"].items()} for row in names}
    result["tests"] = {"tests of its own": {name: Cell(reports[name]["tests"] if name in reports else UNVERIFIED)
                                            for name in matrix["jobs"]}}
    return result


def _cell(job: dict[str, Any], report: dict[str, Any] | None, row: str, about: Callable[[dict[str, Any], str], bool],
          is_format: bool) -> Cell:
    if row in job["lacks"]:
        return Cell(UNSUPPORTED, job["lacks"][row])
    if is_format and row not in job["capabilities"] and not job["expands"]:
        return Cell(UNSUPPORTED, "neither kept nor expanded")
    if report is None:
        return Cell(UNVERIFIED)
    # The first need is the dtype: cases of dtypes that the platform never computes in are not about it.
    computed = ("any", *job["capabilities"])
    return judge([case for case in report["cases"] if case["needs"][0] in computed and about(case, row)])


def markdown(found: dict[str, dict[str, dict[str, Any]]], words: Callable[[str, str, str, Any], str]) -> str:
    """Sections of rows of columns as tables; `words(section, row, column, what is there)` writes a cell. Formats of
    which the same is known share a row."""
    lines = []
    for section, rows in found.items():
        columns = next(iter(rows.values()))
        lines += ["", f"| {section} | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
        told = [(row, " | ".join(words(section, row, name, cell) for name, cell in cells.items()))
                for row, cells in rows.items()]
        for text, same in groupby(told, key=lambda each: each[1] if section == "format" else each):
            lines.append(f"| {', '.join(row for row, _ in same)} | {text if section == 'format' else text[1]} |")
    return "\n".join(lines[1:]) + "\n"


def plain(section: str, row: str, job: str, cell: Cell) -> str:
    return cell.state + (f": {escape(cell.reason)}" if cell.reason else "")


def escape(text: str) -> str:
    """Text that may stand in a cell of a table."""
    return " ".join(text.replace("|", "\\|").split())


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the reports are")
    print(markdown(sections(read_matrix(), read_reports(parser.parse_args(argv).folder)), plain))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
