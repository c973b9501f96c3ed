"""Write docs/platforms.md from the manifests and the conformance reports recorded in docs/conformance.

`python ci/tables.py` writes it, `--check` fails when it is stale. Record a report with
`python ci/job.py NAME --report docs/conformance/NAME.json`.
"""
from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import cells
import matrix
from graph import ROOT
from isthmus.core.quant.formats import FORMATS, GGUF_TYPES
from isthmus.core.quant.schemes import SCHEMES
from isthmus.core.registry import RegistrationError

PAGE = Path("docs/platforms.md")
REASON = 90  # characters of a failure's reason in a cell
PLAIN = ("f32", "f16", "bf16")  # formats that are cast, so that there is nothing to keep

INTRO = """\
# Platforms

Written by `python ci/tables.py` from each platform's `manifest.toml` and the conformance reports in
[conformance/](conformance/); do not edit. `isthmus explain --platform NAME` prints a manifest in full.

A cell says only what was run: **yes** passed there (with the number of cases where some do not apply), **interpreted**
passed in Triton's interpreter without the device, its kernels compiled for every target in
[triton_kernels.md](triton_kernels.md), **signature-checked** passed with stand-ins for the vendor's operators under
their own schemas, **verified on the device** passed on one. **expanded** passed with the weights expanded at load,
**unsupported** is declared with its reason, **failed** is a failure, also one that the platform's ledger expects, and
**unverified** was claimed and not run.
"""


def page() -> str:
    """The whole page."""
    data, reports = cells.read_matrix(), cells.read_reports(ROOT / "docs" / "conformance")
    parts = [INTRO, "## What each claims\n", _claims(),
             "\n## Quantized checkpoints that every platform reads\n", _schemes(),
             "\n## Where it was run\n", _runs(data, reports),
             "\n## What was found\n",
             cells.markdown(data, reports, lambda *about: _words(data["jobs"], *about))]
    return "\n".join(parts)


def _claims() -> str:
    lines = ["| platform | title | devices | computes in | K and V in | pages | ranks | determinism |",
             "|---|---|---|---|---|---|---|---|"]
    for name, claim in matrix.claims().items():
        pages = ", ".join(map(str, sorted(claim.page_sizes)))
        lines.append(f"| {name} | {claim.title} | {claim.devices} | {', '.join(claim.compute_dtypes)} | "
                     f"{', '.join(claim.kv_dtypes)} | {pages} | {claim.max_ranks} | {claim.determinism} |")
    return "\n".join(lines) + "\n"


def _schemes() -> str:
    lines = ["Each as it is, or expanded to the compute dtype where a platform has no kernel for its format.", "",
             "| quant_method, or kind | what is read |", "|---|---|",
             f"| GGUF files | {', '.join(name for name in GGUF_TYPES.values() if FORMATS[name].kind == 'quantized')} |",
             "| MLX folders | affine groups of 32, 64 and 128 with 2, 3, 4, 5, 6 and 8 bits |"]
    return "\n".join(lines + [f"| {name} | {scheme.reads} |" for name, scheme in SCHEMES.items()]) + "\n"


def _runs(data: dict[str, Any], reports: dict[str, dict[str, Any]]) -> str:
    lines = ["| column | platform | on | conformance | versions |", "|---|---|---|---|---|"]
    for name, job in data["jobs"].items():
        report = reports.get(name)
        if report is None:
            lines.append(f"| {name} | {job['platform']} | {job['device']} | unverified: never run | |")
            continue
        if "counts" not in report:
            lines.append(f"| {name} | {job['platform']} | {job['device']} | **failed**: {report['date']}, the suite "
                         "gave no report | |")
            continue
        counts = ", ".join(f"{n} {outcome}" for outcome, n in report["counts"].items() if n)
        versions = ", ".join(f"{k} {v}" for k, v in report["versions"].items())
        lines.append(f"| {name} | {job['platform']} | {job['device']} | {report['date']}, {counts}, in "
                     f"{report['seconds']:.0f} s | {cells.escape(versions)} |")
    return "\n".join(lines) + "\n"


def _words(jobs: dict[str, Any], section: str, row: str, name: str, cell: cells.Cell) -> str:
    """A cell for readers of the page."""
    if cell.state == cells.PASSED:
        kept = section != "format" or row in PLAIN or row in jobs[name]["capabilities"]
        word = jobs[name]["shown"] if kept else "expanded"
        limit = jobs[name]["limits"].get(row) if section == "op" else None
        notes = [limit] * bool(limit) + [f"{cell.passed} of {cell.total}"] * (cell.passed < cell.total)
        return word + (f" ({'; '.join(notes)})" if notes else "")
    if cell.state == cells.FAILED:
        return f"**failed**: {cells.escape(cell.reason)[:REASON]}" if cell.reason else "**failed**"
    return cell.state + (f": {cells.escape(cell.reason)}" if cell.reason else "")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; 1 when the page is stale")
    check = parser.parse_args(argv).check
    try:
        text, path = page(), ROOT / PAGE
    except RegistrationError as error:  # of a manifest; it names the file
        raise SystemExit(str(error)) from error
    if check:
        fresh = path.is_file() and path.read_text("utf-8") == text
        print(f"{PAGE} is {'as it should be' if fresh else 'stale (python ci/tables.py)'}")
        return 0 if fresh else 1
    path.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
