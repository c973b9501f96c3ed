"""Hold the npu platform's calls to the torch_npu that is installed, on a machine without CANN and without an NPU.

    python ci/npu_schemas.py [--python FOLDER/bin/python] [--report ci/npu_schemas.json]

Needs an environment with `pip install -e .[npu]` and `pip install --no-deps -e tests/emulation`, a C compiler
and ldd. CANN is stood in for by libraries whose functions fail. Shown is that
 * the schemas of tests/emulation/npu/operators.txt are those that the wheel registers, word for word;
 * each call that the platform makes in conformance cases is taken by these schemas, and its results have the shapes and
   dtypes that the wheel's own shape functions give for the same arguments on the device "meta";
 * a wrong keyword and a wrong shape are refused.
What the operators compute is not shown: their kernels are CANN's.
"""
from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REPORT = ROOT / "ci" / "npu_schemas.json"
ERROR = 100000  # what a function of the stand-in returns: an error of ACL's
FOLDERS = "import importlib.util as u; print(*(u.find_spec(n).submodule_search_locations[0] for n in " \
          "('torch', 'torch_npu')))"


# Before torch_npu can be imported.

def unresolved(libraries: list[Path], environment: dict[str, str]) -> tuple[set[str], set[str]]:
    """Libraries that are not found, and functions that none of those that are found has."""
    missing, functions = set(), set()
    for library in libraries:
        done = subprocess.run(["ldd", "-r", library], capture_output=True, text=True, env=environment)
        for line in (done.stdout + done.stderr).splitlines():
            if found := re.match(r"\s*(\S+) => not found", line):
                missing.add(found[1])
            elif found := re.match(r"undefined symbol: (\w+)", line):
                functions.add(found[1])
    return missing, {name for name in functions if not re.match(r"_?Py|_Z", name)}


def stand_in(folder: Path, libraries: list[Path], environment: dict[str, str]) -> int:
    """Write libraries in the place of CANN's -> number of functions that they have."""
    missing, _ = unresolved(libraries, environment)
    for name in missing:
        subprocess.run(["gcc", "-shared", "-fPIC", "-x", "c", os.devnull, "-o", folder / name], check=True)
    _, functions = unresolved(libraries, environment)
    source = folder / "functions.c"
    source.write_text("".join(f"long {name}(void) {{ return {ERROR}; }}\n" if name != "aclGetRecentErrMsg" else
                              f'const char *{name}(void) {{ return "no CANN here"; }}\n' for name in sorted(functions)))
    subprocess.run(["gcc", "-shared", "-fPIC", "-w", source, "-o", folder / "libascendcl.so"], check=True)
    return len(functions)


def launch(python: Path, report: Path) -> int:
    """Run `tests/emulation/npu/wheel.py` in that environment, with the stand-in."""
    torch, torch_npu = map(Path, subprocess.run([python, "-c", FOLDERS], check=True, capture_output=True,
                                                text=True).stdout.split())
    libraries = [*torch_npu.glob("lib/*.so"), *torch_npu.glob("_C*.so")]
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"LD_LIBRARY_PATH": f"{folder}:{torch / 'lib'}:{torch_npu / 'lib'}",
                                    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "OMP_NUM_THREADS": "1"}
        count = stand_in(Path(folder), libraries, environment)
        print(f"{count} functions of CANN stood in for", flush=True)
        return subprocess.run([python, "-m", "isthmus_emulation.npu.wheel", report], env=environment).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", type=Path, default=Path(sys.executable), help="of the environment with torch_npu")
    parser.add_argument("--report", type=Path, default=REPORT)
    given = parser.parse_args()
    return launch(given.python, given.report)


if __name__ == "__main__":
    sys.exit(main())
