"""Compile the shared Triton kernels for Ascend NPUs, with no NPU: `python ci/npu_triton.py`.

Needs an environment of its own with torch, `triton-ascend` (it installs as `triton`; 3.2.0 is what there is to install)
and `ascendnpu-ir`, Huawei's compiler. Each configuration becomes Linalg by the first and HIVM for an Ascend 910B3 by
the second, which refuses tiles that the buffers do not hold; the last step, machine code, is CANN's, so that a program
that does nothing stands in its place. The npu platform runs none of them: it calls torch_npu's operators. What is
compiled, and what is not for which reason, goes to ci/npu_triton.json.
"""
from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

import graph
import triton_aot
from xpu_aot import constexpr_functions, reason

TABLE = graph.ROOT / "ci" / "npu_triton.json"
DEVICE = "Ascend910B3"
SIMPLEST = ("activation", "norm", "rope", "merge", "quantize", "kv_write")
PASSES = ("--enable-auto-multi-buffer=true", "--enable-hfusion-compile=true", "--enable-hivm-compile=true",
          "--enable-triton-kernel-compile=true")


def specializations(module: str) -> dict[str, Any]:
    os.environ["TRITON_INTERPRET"] = "0"
    constexpr_functions()
    return triton_aot.specializations(module)


def to_linalg(spec: Any) -> str:
    """The module in MLIR, as Huawei's compiler takes it."""
    from triton._C.libtriton import ir
    from triton.backends import backends
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    target = GPUTarget("npu", DEVICE, 0)
    backend = backends["ascend"].compiler(target)
    signature, _ = triton_aot.arguments(spec)
    constants = {name: value for name, value in spec.constants.items()}
    source = ASTSource(spec.kernel, {name: kind for name, kind in signature.items() if kind != "constexpr"}, constants)
    options, context, stages = backend.parse_options({}), ir.context(), {}
    ir.load_dialects(context)
    backend.load_dialects(context)
    module = source.make_ir(options, backend.get_codegen_implementation(), backend.get_module_map(), context)
    backend.add_stages(stages, options)
    about = {"hash": "none", "target": target, **vars(options)}
    for stage in ("ttir", "ttadapter"):
        module = stages[stage](module, about)
    return str(module)


def to_hivm(text: str, folder: Path) -> str | None:
    """None = it went through every pass to the door of the machine code; else what the compiler says."""
    import ascendnpuir
    compiler = Path(ascendnpuir.__file__).parent / "bin" / "bishengir-compile"
    compiler.chmod(0o755)
    last = folder / "hivmc"
    last.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "hivmc 1.2.0"\nexit 0\n', "utf-8")
    last.chmod(0o755)
    source = folder / "kernel.mlir"
    source.write_text(text, "utf-8")
    done = subprocess.run([str(compiler), str(source), f"--target={DEVICE}", *PASSES, "-o", str(folder / "kernel")],
                          capture_output=True, text=True, timeout=300,
                          env=os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"})
    # What it tries anew with other settings is a note.
    lines = [line.rpartition("): ")[2].strip() for line in (done.stdout + done.stderr).splitlines()
             if ("rror" in line or "verflow" in line) and "[NOTE]" not in line]
    if done.returncode == 0 and not lines:
        return None
    causes = [line.partition("! (")[0].removeprefix("error: ") for line in lines if "BiSheng" not in line]
    return (causes or lines or [f"ended with {done.returncode}"])[0][:200]


def compile_one(spec: Any) -> dict[str, Any]:
    """{"linalg": characters} and, where the second compiler takes it, {"hivm": True}; or the reason."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        try:
            text = to_linalg(spec)
        except Exception as error:  # whatever a compiler raises is the entry's content
            return {"error": reason(error)}
        try:
            why = to_hivm(text, Path(folder))
        except subprocess.TimeoutExpired:
            why = "it did not end within 300 s"
        return {"linalg": len(text)} | ({"hivm": True} if why is None else {"hivm_error": why})


def word(result: dict[str, Any]) -> str:
    return "no Linalg" if "error" in result else "HIVM" if "hivm" in result else "Linalg, no HIVM"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=SIMPLEST, metavar="MODULE")
    parser.add_argument("--match", default="", metavar="TEXT", help="those with this in their name; prints only")
    given = parser.parse_args(argv)
    sources, results = triton_aot.modules(), {}
    for module in given.only:
        results[module] = {}
        for name, spec in specializations(module).items():
            if given.match in name:
                result = results[module][name] = compile_one(spec)
                print(f"{module}: {name}: {result.get('error') or result.get('hivm_error') or 'HIVM'}", flush=True)
    counts = Counter(word(result) for part in results.values() for result in part.values())
    print(dict(counts))
    if not given.match and tuple(given.only) == SIMPLEST:
        TABLE.write_text(json.dumps({
            "date": datetime.date.today().isoformat(), "device": DEVICE,
            "triton-ascend": metadata.version("triton-ascend"), "ascendnpu-ir": metadata.version("ascendnpu-ir"),
            "counts": dict(counts), "modules": {
                name: {"source": sources[name], "kernels": part} for name, part in sorted(results.items())},
        }, indent=1) + "\n", "utf-8")
    return 0 if counts else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
