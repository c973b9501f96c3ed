"""Compile the shared Triton kernels for Intel's Max GPUs, with no GPU: `python ci/xpu_aot.py --ocloc auto`.

Needs an environment of its own with torch and `triton-xpu` (it installs as `triton`; 3.3.0b1 of March 2025 is what
there is to install). Each configuration that the xpu platform runs becomes SPIR-V and, where Intel's offline compiler
`ocloc` is installed (Debian: intel-opencl-icd), code of Ponte Vecchio. A spill, or what does not compile, fails; what
the platform does not choose is listed with the reason. Results are kept under --cache, and go to ci/xpu_aot.json.
"""
from __future__ import annotations

import argparse
import datetime
import hashlib
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import graph
import triton_aot

TABLE = graph.ROOT / "ci" / "xpu_aot.json"
FAMILY = "pvc"
# What the compiler asks of a device: a Max 1550. Source: Intel's product brief, and `sycl-ls --verbose` on one.
DEVICE = {
    "name": "Intel(R) Data Center GPU Max 1550", "vendor": "Intel(R) Corporation", "version": "12.60.7",
    "platform_name": "Intel(R) oneAPI Unified Runtime over Level-Zero", "architecture": 0, "gpu_eu_count": 512,
    "gpu_subslice_count": 64, "max_work_group_size": 1024, "max_num_sub_groups": 64, "sub_group_sizes": [16, 32],
    "has_fp64": True, "has_subgroup_matrix_multiply_accumulate": True, "has_subgroup_2d_block_io": True,
    "has_subgroup_matrix_multiply_accumulate_tensor_float32": True, "has_bfloat16_conversions": True}
LOCAL = 128 << 10  # bytes of shared local memory of a work group. Source: Intel, oneAPI GPU Optimization Guide
MATRIX = re.compile(r"SubgroupMatrixMultiplyAccumulate|matrix_mad|__spirv_\w*dpas", re.IGNORECASE)


def specializations(module: str) -> dict[str, Any]:
    """All of them by name, with the tiles that the platform chooses."""
    os.environ["TRITON_INTERPRET"] = "0"
    importlib.import_module(f"{triton_aot.PACKAGE}.launch").TARGETS = (FAMILY,)  # before the modules that read it
    stand_in()
    return triton_aot.specializations(module)


def unchosen(spec: Any) -> str | None:
    """Why the platform does not run it, or None."""
    if any("fp8" in kind for kind in spec.signature.values()) or spec.constants.get("KIND") == "int8":
        return "activations stay in 16 bits, and fp8 is decoded by integers"
    return spec.reason(FAMILY)


def stand_in() -> None:
    """For what is not here: the device's name, which the compiler builds a helper against Level Zero's headers to ask
    for."""
    from triton.backends import backends
    module = backends["intel"].compiler.__init__.__globals__  # it is in no sys.modules
    module["compile_module_from_src"] = lambda *_: SimpleNamespace(parse_device_arch=lambda _: FAMILY)
    constexpr_functions()


def constexpr_functions() -> None:
    """`triton.constexpr_function` for versions from before it: a call is folded, here as there."""
    import triton
    import triton.language as tl

    def constexpr_function(function: Callable[..., Any]) -> Callable[..., Any]:
        @tl.core.builtin
        def folded(*args: Any, _builder: Any = None) -> Any:
            return tl.constexpr(function(*map(tl.core._unwrap_if_constexpr, args)))
        folded.__module__ = tl.__name__  # else it may not be called from a kernel
        return folded

    if not hasattr(triton, "constexpr_function"):
        triton.constexpr_function = constexpr_function


def compile_one(module: str, name: str, cache: str, ocloc: str) -> dict[str, Any]:
    """In a worker: {"spirv", "matrix", "shared"} and, by ocloc, {"native", "spills"}; or {"error"}."""
    spec = specializations(module)[name]
    told = (triton_aot.key(spec, FAMILY), bool(ocloc))
    kept = Path(cache, hashlib.sha256(repr(told).encode()).hexdigest()[:32] + ".json")
    if kept.is_file():
        return json.loads(kept.read_text("utf-8"))
    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        try:
            result = to_spirv(spec, Path(folder))
            if ocloc:
                result |= to_native(ocloc, Path(folder))
        except Exception as error:  # whatever a compiler raises is the entry's content
            result = {"error": reason(error)}
    result["seconds"] = round(time.monotonic() - started, 1)
    kept.write_text(json.dumps(result), "utf-8")
    return result


def reason(error: BaseException) -> str:
    """The innermost cause; Triton's messages begin with the source and end with what is wrong."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" ^")]
    return f"{type(error).__name__}: {lines[-1][:200] if lines else ''}"


def to_spirv(spec: Any, folder: Path) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    signature, attrs = triton_aot.arguments(spec)
    done = triton.compile(ASTSource(spec.kernel, signature, dict(spec.constants), attrs),
                          target=GPUTarget("xpu", DEVICE, 32), options=spec.options(FAMILY))
    code = done.asm["spv"]
    if code[:4] != b"\x03\x02\x23\x07":
        raise ValueError("the result is no SPIR-V module")
    (folder / "kernel.spv").write_bytes(code)
    return {"spirv": len(code), "matrix": bool(MATRIX.search(done.asm["llir"])), "shared": done.metadata.shared}


def to_native(ocloc: str, folder: Path) -> dict[str, Any]:
    """With 256 registers of a thread, the mode that Triton's driver falls back to where 128 spill."""
    done = subprocess.run([
        ocloc, "compile", "-file", str(folder / "kernel.spv"), "-spirv_input", "-device", FAMILY, "-output", "kernel",
        "-out_dir", str(folder / "native"), "-options", "-cl-intel-256-GRF-per-thread"], capture_output=True, text=True,
        timeout=600)
    text = done.stdout + done.stderr
    binaries = [path.stat().st_size for path in (folder / "native").glob("*.bin")]
    if done.returncode or not binaries:
        lines = [line.strip() for line in text.splitlines() if "rror" in line]
        return {"native_error": (lines or [f"ocloc ended with {done.returncode}"])[0][:200]}
    return {"native": max(binaries), "spills": max(map(int, re.findall(r"spilled around (\d+)", text)), default=0)}


def complaint(result: dict[str, Any]) -> str | None:
    if "unchosen" in result:
        return None
    if "error" in result or "native_error" in result:
        return result.get("error") or f"ocloc: {result['native_error']}"
    if result["shared"] > LOCAL:
        return f"{result['shared']} bytes of shared local memory, of {LOCAL}"
    return f"spills around {result['spills']} registers" if result.get("spills") else None


def run(names: list[str], match: str, cache: Path, ocloc: str, workers: int, seconds: float) -> dict[str, Any]:
    """Modules -> configurations -> results; what was not reached in time is {"error"} too."""
    cache.mkdir(parents=True, exist_ok=True)
    jobs = []
    found: dict[str, Any] = {module: {} for module in names}
    for module in names:
        for name, spec in specializations(module).items():
            why = unchosen(spec)
            found[module][name] = {"unchosen": why} if why else {"error": "not reached in the time given"}
            if why is None and match in name:
                jobs.append((module, name))
    started = time.monotonic()
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(compile_one, *job, str(cache), ocloc): job for job in jobs}
        try:
            for number, future in enumerate(as_completed(futures, timeout=seconds), 1):
                module, name = futures[future]
                result = found[module][name] = {k: v for k, v in future.result().items() if k != "seconds"}
                print(f"{number}/{len(jobs)} {time.monotonic() - started:.0f} s  {module}: {name}: "
                      f"{complaint(result) or result}", flush=True)
        except TimeoutError:
            pool.shutdown(wait=False, cancel_futures=True)
    return found


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="MODULE")
    parser.add_argument("--match", default="", metavar="TEXT", help="those with this in their name; prints only")
    parser.add_argument("--ocloc", default="auto", metavar="PATH", help="Intel's offline compiler; '' = SPIR-V alone")
    parser.add_argument("--cache", type=Path, default=graph.ROOT / ".build" / "xpu_aot", metavar="FOLDER")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="compilers at once")
    parser.add_argument("--seconds", type=float, default=3600, help="to spend at most")
    given = parser.parse_args(argv)
    ocloc = (shutil.which("ocloc") or "") if given.ocloc == "auto" else given.ocloc
    import triton
    modules = triton_aot.modules()
    results = run(given.only or list(modules), given.match, given.cache, ocloc, given.jobs, given.seconds)
    counts = Counter("not chosen" if "unchosen" in r else "compiled" if complaint(r) is None else "spill"
                     if r.get("spills") else "not compiled" for part in results.values() for r in part.values())
    print(dict(counts))
    if not given.match and not given.only:
        TABLE.write_text(json.dumps({
            "date": datetime.date.today().isoformat(), "triton-xpu": triton.__version__, "device": FAMILY,
            "ocloc": ocloc_version(ocloc), "counts": dict(counts),
            "modules": {name: {"source": modules[name], "kernels": part} for name, part in sorted(results.items())},
        }, indent=1) + "\n", "utf-8")
    return 1 if counts["spill"] or counts["not compiled"] and not given.match else 0


def ocloc_version(ocloc: str) -> str | None:
    """Of the package that it came with, as far as Debian's tool knows."""
    if not ocloc:
        return None
    tool = shutil.which("dpkg-query")
    told = subprocess.run([tool, "-W", "-f", "${Version}", "intel-opencl-icd"], capture_output=True,
                          text=True).stdout if tool else ""
    return told or "unknown"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
