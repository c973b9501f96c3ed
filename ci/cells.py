"""What is known of each platform in each job: passed, failed, unsupported or unverified. Never more than was run.

`python ci/cells.py FOLDER` prints it in Markdown from the reports in a folder (`ci/job.py --report FOLDER/NAME.json`).
"""
from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PASSED, FAILED, UNSUPPORTED, UNVERIFIED = "passed", "failed", "unsupported", "unverified"
BAD = ("wrong", "error", "unexpected pass", "expected failure")  # a failure that the ledger expects is one


@dataclass(frozen=True)
class Cell:
    """state: one of the four. reason: of what is unsupported or failed. passed of total cases that were asked for."""

    state: str
    reason: str = ""
    passed: int = 0
    total: int = 0


def read_matrix() -> dict[str, Any]:
    return json.loads((ROOT / "ci" / "matrix.json").read_text("utf-8"))


def read_reports(folder: Path) -> dict[str, dict[str, Any]]:
    """Reports by job; a job without one is missing."""
    reports = [json.loads(path.read_text("utf-8")) for path in sorted(folder.glob("*.json"))]
    return {report["job"]: report for report in reports}


def judge(cases: list[dict[str, Any]]) -> Cell:
    """The cell of these cases: passed only if some did and none failed."""
    outcomes = Counter(case["outcome"] for case in cases)
    bad = [case for case in cases if case["outcome"] in BAD]
    passed, total = outcomes["passed"], len(cases)
    if bad:
        reasons = Counter(case.get("reason", "") for case in bad)
        return Cell(FAILED, reasons.most_common(1)[0][0], passed, total)
    if passed:
        return Cell(PASSED, "", passed, total)
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
    laws = dict.fromkeys(case["law"] for report in reports.values() for case in report["cases"])
    tests: dict[str, Callable[[dict[str, Any], str], bool]] = {
        "op": lambda case, row: case["law"] == "ops" and case["op"] == row,
        "format": lambda case, row: row in formats_of(case),
        "feature": lambda case, row: row in case["needs"],
        "law": lambda case, row: case["law"] == row}
    rows = {"op": matrix["ops"], "format": matrix["formats"], "feature": matrix["features"], "law": list(laws)}
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


def markdown(matrix: dict[str, Any], reports: dict[str, dict[str, Any]], words: Callable[..., str]) -> str:
    """The sections as tables; `words(section, row, job name, cell)` writes a cell."""
    jobs = matrix["jobs"]
    lines = []
    for section, rows in sections(matrix, reports).items():
        lines += ["", f"| {section} | " + " | ".join(jobs) + " |", "|---|" + "---|" * len(jobs)]
        for row, cells in rows.items():
            lines.append(f"| {row} | " + " | ".join(words(section, row, name, cells[name]) for name in jobs) + " |")
    return "\n".join(lines[1:]) + "\n"


def plain(section: str, row: str, job: str, cell: Cell) -> str:
    return cell.state + (f": {escape(cell.reason)}" if cell.reason else "")


def escape(text: str) -> str:
    """Text that may stand in a cell of a table."""
    return " ".join(text.replace("|", "\\|").split())


if __name__ == "__main__":
    print(markdown(read_matrix(), read_reports(Path(sys.argv[1])), plain))
