"""Write docs/platforms.md from the manifests and the conformance reports recorded in docs/conformance.

`python ci/tables.py` writes it, `--check` fails when it is stale. Record a report with
`python ci/job.py NAME --report docs/conformance/NAME.json`; what it lacks is run and added by
`python ci/job.py NAME --report docs/conformance/NAME.json --missing LAW`.
"""
from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import cells
import matrix
import recordings
from graph import ROOT
from isthmus.core.quant.formats import FORMATS, GGUF_TYPES
from isthmus.core.quant.schemes import SCHEMES
from isthmus.core.registry import RegistrationError

PAGE = Path("docs/platforms.md")
REASON = 90  # characters of a failure's reason in a cell
PLAIN = ("f32", "f16", "bf16")  # formats that are cast, so that there is nothing to keep

EVIDENCE = ("verified on", "runs here", "compiled and interpreted", "signature-checked")  # the strongest first

INTRO = """\
# Platforms

Written by `python ci/tables.py` from each platform's `manifest.toml` and the conformance reports in
[conformance/](conformance/); do not edit. `isthmus explain --platform NAME` prints a manifest in full, `isthmus doctor`
says which platforms this machine can have and what the others lack.

Six words say what is known, and none says more than was run:

| word | meaning |
|---|---|
| runs here | its conformance cases pass on the machine that builds this project, a host processor (MLX by its CPU \
build, JAX on the CPU) |
| compiled and interpreted | they pass on a host processor with the kernels in Triton's interpreter, and the kernels \
compile for every device named in [triton_kernels.md](triton_kernels.md) (Intel's: `ci/xpu_aot.json`); no device has \
run them |
| signature-checked | they pass on a host processor with stand-ins for the vendor's operators, under the schemas that \
the vendor's own package declares; no device has run them |
| verified on (device, date) | they pass on that device |
| unsupported (reason) | the platform says that it does not do this, and why |
| unverified | the platform claims it, and nothing has shown it: no run, or none since its law is there |

Where cases failed, **failed** stands in their place, also for a failure that the platform's ledger expects. "Expanded"
formats are read, and held in the type that the model computes in. Speed, memory, captured graphs of a real device and
sums over several devices are unverified wherever no cell says "verified on"; what was measured on one is in
[measurements/](measurements/).

## What is known of each platform

The strongest of the runs that are listed below.

"""


def page() -> str:
    """The whole page."""
    data, reports = cells.read_matrix(), cells.read_reports(ROOT / "docs" / "conformance")
    found = cells.sections(data, reports)
    tests = found.pop("tests")["tests of its own"]
    if any(cell.state != cells.UNVERIFIED for cell in tests.values()):
        found["tests"] = {"tests of its own": tests}
    known = {section: {row: _by_platform(data["jobs"], by_job) for row, by_job in found[section].items()}
             for section in ("op", "format", "feature")}

    def words(section: str, row: str, name: str, cell: cells.Cell) -> str:
        return word(data["jobs"][name], reports.get(name, {}), section, row, cell)

    def best(section: str, row: str, platform: str, by_job: dict[str, cells.Cell]) -> str:
        name = strongest(data["jobs"], by_job)
        return word(data["jobs"][name], reports.get(name, {}), section, row, by_job[name], counts=False)

    about = ("\"28 of 36\" is no failure: 28 of the row's 36 cases passed, and the platform declares the others "
             "unsupported, or they were not run.\n\nEach column is a run; wide tables are for looking a cell up.\n")
    return INTRO + cells.markdown(known, best) + "\n".join([
        "\n## What each claims\n", _claims(), "\n## Quantized checkpoints that every platform reads\n", _schemes(),
        "\n## Where it was run\n", _runs(data, reports),
        "\n## Each run by itself\n", about, cells.markdown(found, words)])


def _by_platform(jobs: dict[str, Any], by_job: dict[str, cells.Cell]) -> dict[str, dict[str, cells.Cell]]:
    found: dict[str, dict[str, cells.Cell]] = {}
    for name, cell in by_job.items():
        found.setdefault(jobs[name]["platform"], {})[name] = cell
    return found


def strongest(jobs: dict[str, Any], by_job: dict[str, cells.Cell]) -> str:
    """The job of a platform whose cell counts: a failure first, then what has passed by the strongest evidence. What
    one stand-in lacks and the platform claims is unverified."""
    order = (cells.FAILED, cells.PASSED, cells.UNVERIFIED, cells.UNSUPPORTED)
    return min(by_job, key=lambda name: (order.index(by_job[name].state), EVIDENCE.index(jobs[name]["shown"])))


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
                     f"{report['seconds']:.0f} s{recordings.told(report)} | {cells.escape(versions)} |")
    return "\n".join(lines) + "\n"


def word(job: dict[str, Any], report: dict[str, Any], section: str, row: str, cell: cells.Cell,
         counts: bool = True) -> str:
    """A cell for readers of the page. counts: of cases that do not apply too."""
    if cell.state == cells.PASSED:
        on = f" ({report.get('on', job['device'])}, {report['date']})" if job["shown"] == EVIDENCE[0] else ""
        kept = section != "format" or row in PLAIN or row in job["capabilities"]
        limit = job["limits"].get(row) if section == "op" else None
        notes = ["expanded"] * (not kept) + [limit] * bool(limit)
        if cell.passed < cell.total and (counts or cell.missing):
            notes.append(f"{cell.passed} of {cell.total}")
        return cells.escape(job["shown"] + on) + (f" ({'; '.join(notes)})" if notes else "")
    if cell.state == cells.FAILED:
        return f"**failed**: {cells.escape(cell.reason)[:REASON]}" if cell.reason else "**failed**"
    return cell.state + (f" ({cells.escape(cell.reason)})" if cell.reason else "")


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
