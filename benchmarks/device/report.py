"""A device check's results as one Markdown page and one JSON file."""
from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from goals import verdicts
from subject import Subject, stamp

TITLES = {
    "facts": "Versions and device", "ceilings": "Measured ceilings", "attention": "Attention", "linears": "Products",
    "llama": "Llama-3-8B-shaped model", "qwen": "Qwen3-30B-A3B-shaped model", "engine": "Engine",
    "conformance": "Conformance", "kernels_attention": "The kernels' own tests, compiled: attention",
    "kernels_products": "The kernels' own tests, compiled: products",
    "kernels_others": "The kernels' own tests, compiled: the others"}
EMULATED = ("**Emulated on the host's processor, with tiny sizes: this shows that the scripts run. No number here says "
            "anything of a device.**\n")


def read(folder: Path, name: str) -> dict[str, Any]:
    path = folder / f"{name}.json"
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}


def cell(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else str(value)
    return text.replace("|", "\\|").replace("\n", " ") if value is not None else ""


def tables(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A table for each run of rows with the same first key; columns in the order in which they come up."""
    runs: list[list[dict[str, Any]]] = []
    for row in rows:
        if runs and next(iter(row)) == next(iter(runs[-1][0])) and "report" not in row and "report" not in runs[-1][0]:
            runs[-1].append(row)
        else:
            runs.append([row])
    lines: list[str] = []
    for run in runs:
        if len(run) == 1:
            lines += [f"- {key}: {cell(value)}" for key, value in run[0].items()] + [""]
            continue
        columns = list(dict.fromkeys(key for row in run for key in row))
        lines += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
        lines += ["| " + " | ".join(cell(row.get(column)) for column in columns) + " |" for row in run] + [""]
    return lines


def conformance(found: dict[str, Any]) -> list[str]:
    """Counts, and the cases that do not hold."""
    cases = found.get("cases", [])
    counts: dict[str, int] = {}
    for case in cases:
        counts[case["outcome"]] = counts.get(case["outcome"], 0) + 1
    bad = [case for case in cases if case["outcome"] not in ("passed", "unsupported", "expected")]
    told = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
    lines = [f"{told}; ok: {found.get('ok')}", ""]
    return lines + [f"- `{case['id']}` {case['outcome']}: {cell(case.get('reason', ''))}" for case in bad[:100]] + [""]


def write_whole(path: Path, text: str) -> None:
    """A file that is there whole or as it was: written beside it, then renamed."""
    beside = path.with_name(f".{path.name}.new")
    try:
        beside.write_text(text, "utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def write_report(place: Path, folder: Path, subject: Subject, names: Sequence[str], status: dict[str, Any],
                 reason: str = "") -> None:
    """report.json and report.md in `place`, of the steps that have come so far, whose results lie in `folder`.

    reason: why nothing was run.
    """
    results = {name: read(folder, name) for name in names if name in status}
    measured = {} if subject.emulated else results  # no goal is met or missed by an emulation
    goals = verdicts({name: found.get("rows", ()) for name, found in measured.items()})
    whole = {"of": stamp(subject), "reason": reason, "steps": status, "goals": goals, "results": results}
    write_whole(place / "report.json", json.dumps(whole, indent=1, ensure_ascii=False) + "\n")
    lines = [f"# Device check: {subject.platform} on {subject.device}", "", *([EMULATED] if subject.emulated else []),
             *([f"**Nothing was run: {reason}**", ""] if reason else [f"Commit {subject.commit}.", ""])]
    lines += ["| step | outcome | seconds | date |", "|---|---|---|---|"]
    lines += [f"| {name} | {cell(status[name]['outcome'])} | {status[name]['seconds']} | {status[name]['date']} |"
              if name in status else f"| {name} | not run | | |" for name in names]
    lines += ["", "## Goals, set for an H200", "", *tables(goals)] if not reason else []
    for name, found in results.items():
        lines += ["", f"## {TITLES[name]}", ""]
        lines += conformance(found) if name == "conformance" else tables(found.get("rows", []))
    write_whole(place / "report.md", "\n".join(lines).rstrip() + "\n")
