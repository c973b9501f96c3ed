"""Cases that a recording in docs/conformance lacks, added to it: each with the date and the commit of its own run."""
from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import cells

BAD = (*cells.BAD[:3], cells.NOT_RUN)  # a failure that the ledger expects lets the suite hold


def added(recorded: dict[str, Any], found: dict[str, Any], commit: str) -> dict[str, Any]:
    """A recording with the cases of a later run of the suite: what both have is replaced where it stands, the rest
    comes after. Each of them has `date` and `commit`; what has none is of the recording's own. The recording holds if
    nothing in it failed or was not run.

    recorded: as `job.record` writes it. found: as `isthmus conformance --json` does. Ends the script for a run of
    another platform, on another device, of another seed, of the recording's time or before it, or of no platform at
    all: a machine that lacks it says nothing of its cases.
    """
    if not found["cases"] or any(case["outcome"] == "unavailable" for case in found["cases"]):
        raise SystemExit("the platform was not available in the run, or it has no case: there is nothing to add")
    for field in ("platform", "seed"):
        if found.get(field) != recorded.get(field):
            raise SystemExit(f"the run is of {field} {found.get(field)!r}, the recording of {recorded.get(field)!r}")
    device = found["manifest"].get("device")
    if device != recorded.get("on"):
        raise SystemExit(f"the run is of the device {device!r}, the recording of {recorded.get('on')!r}")
    last = max([recorded["started"], *(run["started"] for run in recorded.get("added", ()))])
    if found["started"] <= last:
        raise SystemExit(f"the run was started at {found['started']}, and the recording has one of {last}")
    own = {"date": found["started"][:10], "commit": commit}
    cases = {case["id"]: case for case in recorded["cases"]}
    cases |= {case["id"]: case | own for case in found["cases"]}
    counts = Counter(case["outcome"] for case in cases.values())
    run = own | {"started": found["started"], "seconds": found["seconds"], "versions": found["versions"],
                 "machine": found["machine"], "cases": len(found["cases"]), "unproved": found["unproved"]}
    unproved = [f"{counts[cells.NOT_RUN]} cases were not run"] * bool(counts[cells.NOT_RUN])
    return recorded | {
        "ok": not any(counts[outcome] for outcome in BAD) and not recorded["stale"], "unproved": unproved,
        "counts": {outcome: counts[outcome] for outcome in dict.fromkeys([*recorded["counts"], *counts])},
        "added": [*recorded.get("added", ()), run], "cases": list(cases.values())}


def told(recorded: dict[str, Any]) -> str:
    """What of a recording is of later runs: "; drafts (48), scheduler (11) 2026-12-01 at c0ffee1", or ""."""
    laws: dict[tuple[str, str], Counter[str]] = {}
    for case in recorded["cases"]:
        if "date" in case:
            laws.setdefault((case["date"], case["commit"]), Counter())[case["law"]] += 1
    return "".join(f"; {', '.join(f'{law} ({n})' for law, n in each.items())} {date} at {commit[:7]}"
                   for (date, commit), each in sorted(laws.items()))


def missing(recorded: dict[str, Any]) -> list[str]:
    """Cases of a recording that were not run: ids for `--only`."""
    return [case["id"] for case in recorded["cases"] if case["outcome"] == cells.NOT_RUN]


def read(path: Path) -> dict[str, Any]:
    """A run that `isthmus conformance --json` wrote."""
    return cells.read_object(path, "`isthmus conformance --json=FILE` writes one", platform=str, started=str,
                             seconds=float, versions=dict, machine=str, unproved=list, cases=list, manifest=dict)
