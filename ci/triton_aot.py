"""Compile every kernel of platforms/triton_kit for GPUs that are not there: `python ci/triton_aot.py [--changed]`.

Needs torch and Triton, no device. What each configuration takes of each target's registers and memory goes to
ci/triton_kernels.json and docs/triton_kernels.md; a spill or a tile over the target's limits fails. Results are kept
under --cache by kernel, configuration, target and Triton version, so that a stopped run goes on where it was.
"""
from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import io
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import graph

KIT = Path("platforms/triton_kit")
PACKAGE = "isthmus.platforms.triton_kit"
TABLE, PAGE = graph.ROOT / "ci" / "triton_kernels.json", graph.ROOT / "docs" / "triton_kernels.md"


class Target(NamedTuple):
    """shared: bytes of shared memory (AMD: LDS) that one program may have. Source: NVIDIA's CUDA C++ programming guide,
    table of compute capabilities; AMD's architecture guides. warp: threads."""

    backend: str
    arch: int | str
    warp: int
    shared: int
    about: str


TARGETS = {
    "sm_80": Target("cuda", 80, 32, 163 << 10, "A100"),
    "sm_90": Target("cuda", 90, 32, 227 << 10, "H100, H200"),
    "sm_100": Target("cuda", 100, 32, 227 << 10, "B200"),
    "sm_120": Target("cuda", 120, 32, 99 << 10, "RTX 50, RTX PRO"),
    "gfx90a": Target("hip", "gfx90a", 64, 64 << 10, "MI200"),
    "gfx942": Target("hip", "gfx942", 64, 64 << 10, "MI300"),
    "gfx950": Target("hip", "gfx950", 64, 160 << 10, "MI350"),
    "gfx1100": Target("hip", "gfx1100", 32, 64 << 10, "RX 7900"),
    "gfx1201": Target("hip", "gfx1201", 32, 64 << 10, "RX 9070"),
}
MATRIX = {"cuda": r"\b(wgmma\.mma_async|tcgen05\.mma|mma\.sync)\S*", "hip": r"\b(v_mfma_\w+|v_wmma_\w+)"}


# What is to be compiled

def modules() -> dict[str, str]:
    """Module of the kit -> hash of its source and of what it imports of the kit. Needs no Triton."""
    found = {}
    for path in sorted(p for p in graph.sources() if p.parent == KIT and p.name != "__init__.py"):
        if "def specializations(" in (graph.ROOT / path).read_text("utf-8"):
            sources = sorted(p for p in graph.reach({path}) if p.parent == KIT)
            text = b"".join((graph.ROOT / p).read_bytes() for p in sources)
            found[path.stem] = hashlib.sha256(text).hexdigest()[:16]
    return found


def read_table() -> dict[str, Any]:
    """What is committed: {"triton": version, "modules": see `run`}."""
    return json.loads(TABLE.read_text("utf-8")) if TABLE.is_file() else {"triton": "", "modules": {}}


def stale(table: dict[str, Any]) -> list[str]:
    """Modules that are not as they were when the table was made, or are no more."""
    current, recorded = modules(), {name: entry["source"] for name, entry in table["modules"].items()}
    return sorted(name for name in current.keys() | recorded.keys() if current.get(name) != recorded.get(name))


def specializations(module: str) -> dict[str, Any]:
    """By name. Imports Triton, in the mode that compiles."""
    os.environ["TRITON_INTERPRET"] = "0"
    found = {}
    for spec in importlib.import_module(f"{PACKAGE}.{module}").specializations():
        if spec.name in found:
            raise SystemExit(f"{module}: two specializations have the name {spec.name!r}")
        found[spec.name] = spec
    return found


def arguments(spec: Any) -> tuple[dict[str, str], dict[tuple[int], list[list[Any]]]]:
    """Triton's signature in the order of the parameters, and the promises of divisibility."""
    names = spec.kernel.arg_names
    given = {name: "constexpr" for name in spec.constants} | dict(spec.signature)
    if set(given) != set(names) or len(given) != len(spec.constants) + len(spec.signature):
        raise ValueError(f"{spec.name}: without a type or value: {sorted(set(names) - set(given))}; with both: "
                         f"{sorted(set(spec.constants) & set(spec.signature))}; not of the kernel: "
                         f"{sorted(set(given) - set(names))}")
    attrs = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if given[name].endswith(":16")}
    return {name: given[name].removesuffix(":16") for name in names}, attrs


def key(spec: Any, target: str) -> str:
    """Hash of all that the result depends on; lines that a kernel moves down its file do not change it."""
    import triton
    from triton.runtime.jit import JITFunction
    for module in [m for name, m in sys.modules.items() if name.startswith(PACKAGE)]:
        for value in vars(module).values():
            if isinstance(value, JITFunction):
                value.starting_line_number = 0
    signature, attrs = arguments(spec)
    told = (triton.__version__, spec.kernel.cache_key, signature, sorted(spec.constants.items()), sorted(attrs),
            sorted(spec.options(target).items()), target)
    return hashlib.sha256(repr(told).encode()).hexdigest()[:32]


# Compiling

def compile_one(module: str, name: str, target: str, cache: str) -> dict[str, Any]:
    """In a worker: one result, from the cache or new. Keys: see `measure`; or "error" alone."""
    spec = specializations(module)[name]
    kept = Path(cache, f"{key(spec, target)}.json")
    if kept.is_file():
        return json.loads(kept.read_text("utf-8"))
    os.environ["TRITON_DUMP_PTXAS_LOG"] = "1"
    started, log = time.monotonic(), io.StringIO()
    with tempfile.TemporaryDirectory(dir=cache) as folder, contextlib.redirect_stdout(log):
        os.environ["TRITON_CACHE_DIR"] = folder
        try:
            result = measure(spec, target, log)
        except Exception as error:  # whatever a compiler raises is the cell's content
            lines = [line for line in str(error).strip().splitlines() if line.strip()]
            result = {"error": f"{type(error).__name__}: {lines[-1].strip()[:200] if lines else ''}"}
    result["seconds"] = round(time.monotonic() - started, 1)
    scratch = kept.with_suffix(f".{os.getpid()}")
    scratch.write_text(json.dumps(result), "utf-8")
    scratch.replace(kept)
    return result


def measure(spec: Any, target: str, log: io.StringIO) -> dict[str, Any]:
    """registers of a thread, spills and shared memory in bytes, size of the code, matrix instructions used."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    about = TARGETS[target]
    signature, attrs = arguments(spec)
    done = triton.compile(ASTSource(spec.kernel, signature, dict(spec.constants), attrs),
                          target=GPUTarget(about.backend, about.arch, about.warp), options=spec.options(target))
    code, binary = (done.asm[kind] for kind in (("ptx", "cubin") if about.backend == "cuda" else ("amdgcn", "hsaco")))
    if binary[:4] != b"\x7fELF":
        raise ValueError("the binary is no ELF file")
    shared = done.metadata.shared
    if about.backend == "cuda":
        told = log.getvalue()
        registers = int(re.search(r"Used (\d+) registers", told)[1])
        spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", told))
    else:
        numbers = {field: int(re.search(rf"\.{field}:\s*(\d+)", code)[1]) for field in (
            "vgpr_count", "vgpr_spill_count", "group_segment_fixed_size", "private_segment_fixed_size")}
        registers, shared = numbers["vgpr_count"], max(shared, numbers["group_segment_fixed_size"])
        spills = max(4 * numbers["vgpr_spill_count"], numbers["private_segment_fixed_size"])
    return {"registers": registers, "spills": spills, "shared": shared, "size": len(binary),
            "matrix": sorted({m[0] for m in re.finditer(MATRIX[about.backend], code)})[:4]}


def compile_all(jobs: list[tuple[str, str, str]], cache: Path, workers: int) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Results as they come. What a crash of a compiler took with it is tried again by itself."""
    context = get_context("spawn")
    waiting = list(jobs)
    while waiting:
        with ProcessPoolExecutor(workers, mp_context=context) as pool:
            futures = {pool.submit(compile_one, *job, str(cache)): job for job in waiting}
            broken = False
            for future in as_completed(futures):
                try:
                    result = future.result()
                except BrokenProcessPool:
                    broken = True
                    continue
                except Exception as error:  # as of a module that cannot be imported
                    result = {"error": f"{type(error).__name__}: {error}"[:200]}
                waiting.remove(futures[future])
                yield futures[future], result
        if broken:  # those in flight are among the first that are left
            alone, waiting = waiting[:2 * workers], waiting[2 * workers:]
            for job in alone:
                with ProcessPoolExecutor(1, mp_context=context) as pool:
                    try:
                        yield job, pool.submit(compile_one, *job, str(cache)).result()
                    except BrokenProcessPool:
                        yield job, {"error": "the compiler crashed"}


# Judging and telling

def complaint(result: dict[str, Any], target: str) -> str | None:
    """Why a result fails, or None."""
    if "error" in result:
        return result["error"]
    if "unsupported" in result:
        return None
    if result["spills"]:
        return f"spills {result['spills']} bytes a thread"
    if result["shared"] > TARGETS[target].shared:
        return f"{result['shared']} bytes of shared memory, of {TARGETS[target].shared}"
    return None


def complaints(table: dict[str, Any]) -> list[str]:
    return [f"{module}: {name} on {target}: {why}" for module, entry in table["modules"].items()
            for name, cells in entry["kernels"].items() for target, result in cells.items()
            if (why := complaint(result, target))]


def page(table: dict[str, Any]) -> str:
    """docs/triton_kernels.md."""
    reasons: dict[str, int] = {}
    rows = []
    for module, entry in sorted(table["modules"].items()):
        rows.append(f"\n## {module}\n\n| configuration | {' | '.join(TARGETS)} |\n|---{'|---' * len(TARGETS)}|")
        for name, cells in entry["kernels"].items():
            rows.append(f"| {name} | {' | '.join(cell(cells[t], t, reasons) for t in TARGETS)} |")
    counts = Counter("failed" if complaint(r, t) else "unsupported" if "unsupported" in r else "compiled"
                     for entry in table["modules"].values() for cells in entry["kernels"].values()
                     for t, r in cells.items())
    kernels = sum(len(entry["kernels"]) for entry in table["modules"].values())
    devices = ", ".join(f"{name} ({t.about}, {t.shared >> 10} KiB)" for name, t in TARGETS.items())
    notes = [f"{number}. {reason}" for reason, number in reasons.items()]
    return "\n".join([
        "# Triton kernels, compiled ahead of time", "",
        "Written by `python ci/triton_aot.py`; do not edit. Compiled is not run: numbers are right where "
        "`tests/triton` says so, and speed is known where `docs/measurements` says so.", "",
        f"Triton {table['triton']}, {kernels} configurations, {len(TARGETS)} targets: "
        + ", ".join(f"{counts[word]} {word}" for word in ("compiled", "unsupported", "failed")) + ". A cell: registers "
        "of a thread, KiB of shared memory of a program; m = matrix instructions; -(n) = not for this target, for "
        "reason n below. A spill or more memory than the target has fails.", "",
        f"Targets, and the shared memory that a program may have there: {devices}.", "",
        "The name of an attention ends in its tile: 16x64 w4 s5 = 16 rows by 64 keys, 4 warps, 5 stages. A target runs "
        "the tile that suits it: of lines that differ in their tile alone it has one, and the others are unsupported.",
        *rows,
        *(["\n## Reasons\n", *notes] if notes else []), ""])


def cell(result: dict[str, Any], target: str, reasons: dict[str, int]) -> str:
    if "unsupported" in result:
        return f"-({reasons.setdefault(result['unsupported'], len(reasons) + 1)})"
    why = complaint(result, target)
    if why:
        return f"**{why}**".replace("|", "\\|")
    return f"{result['registers']}, {result['shared'] / 1024:.3g}{' m' if result['matrix'] else ''}"


def run(names: Iterable[str], targets: Iterable[str], match: str, cache: Path, workers: int) -> dict[str, Any]:
    """Modules -> {"source", "kernels": {name: {target: result}}}."""
    cache.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    jobs = []
    for module in names:
        specs = {name: spec for name, spec in specializations(module).items() if match in name}
        found[module] = {"source": modules()[module], "kernels": {name: {} for name in specs}}
        for name, spec in specs.items():
            for target in targets:
                reason = spec.reason(target)
                if reason is not None:
                    found[module]["kernels"][name][target] = {"unsupported": reason}
                else:
                    jobs.append((module, name, target))
    started = time.monotonic()
    for number, ((module, name, target), result) in enumerate(compile_all(jobs, cache, workers), 1):
        found[module]["kernels"][name][target] = {k: v for k, v in result.items() if k != "seconds"}
        why = complaint(result, target)
        print(f"{number}/{len(jobs)} {time.monotonic() - started:.0f} s  {module}: {name} on {target}: "
              + (f"FAILED, {why}" if why else f"{result['registers']} registers, {result['shared']} bytes shared, "
                 f"{result['seconds']} s"), flush=True)
    for entry in found.values():
        entry["kernels"] = {name: {t: cells[t] for t in TARGETS if t in cells}
                            for name, cells in entry["kernels"].items()}
    return found


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--changed", action="store_true", help="only modules that the table is not of today for")
    parser.add_argument("--only", nargs="+", metavar="MODULE", help="these modules; the others stay as told")
    parser.add_argument("--match", default="", metavar="TEXT", help="those with this in their name; prints only")
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), choices=list(TARGETS),
                        help="prints only, if not all")
    parser.add_argument("--check", action="store_true", help="compile nothing: is the table of today, and does it pass")
    parser.add_argument("--cache", type=Path, default=graph.ROOT / ".build" / "triton_aot", metavar="FOLDER")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="compilers at once")
    given = parser.parse_args(argv)
    table = read_table()
    outdated = stale(table)
    if given.check:
        for module in outdated:
            print(f"{module}: the table is older than its source; run python ci/triton_aot.py --changed")
        bad = complaints(table)
        print("\n".join(bad) or f"{len(table['modules'])} modules pass")
        return 1 if outdated or bad else 0
    import triton
    whole = not given.changed or table["triton"] != triton.__version__
    names = given.only or [name for name in modules() if whole or name in outdated]
    results = run(names, given.targets, given.match, given.cache, given.jobs)
    table = read_table()  # another run may have written meanwhile
    new = {"triton": triton.__version__,
           "modules": {name: results.get(name) or table["modules"][name] for name in sorted(modules())
                       if name in results or name in table["modules"]}}
    if not given.match and given.targets == list(TARGETS):
        TABLE.write_text(json.dumps(new, indent=1, sort_keys=False) + "\n", "utf-8")
        PAGE.write_text(page(new), "utf-8")
    else:
        new["modules"] = results
    bad = complaints(new)
    count = sum(len(entry["kernels"]) for entry in results.values())
    print("\n".join(["", *bad, f"{count} configurations, {len(bad)} failed"]))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
