"""Record the signatures of AITER's operators that the rocm platform calls: `python ci/aiter_signatures.py FOLDER`,
where `pip install --no-deps --target FOLDER amd-aiter` has put the package.

Its start-up asks for a device, so the sources are read, not imported; tests/triton/test_aiter.py binds every call to
what is written to ci/aiter_signatures.json. The one part that is plain torch, `shuffle_weight`, is run, and what undoes
it here is held to it. Needs torch and Triton.
"""
from __future__ import annotations

import ast
import datetime
import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import graph

TABLE = Path(__file__).with_suffix(".json")
SOURCES = {"gemm_a8w8": "ops/gemm_op_a8w8.py", "gemm_a8w8_blockscale": "ops/gemm_op_a8w8.py",
           "fused_moe": "fused_moe.py", "shuffle_weight": "ops/shuffle.py",
           "unified_attention": "ops/triton/unified_attention.py"}


def read_table() -> dict[str, Any]:
    return json.loads(TABLE.read_text("utf-8"))


def parameters(source: str, name: str) -> list[list[Any]]:
    """As `flashinfer_signatures.recorded`, of a function in a source."""
    (found,) = (node.args for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == name)
    plain = [*found.posonlyargs, *found.args]
    first = len(plain) - len(found.defaults)
    return [[each.arg, "POSITIONAL_OR_KEYWORD", place >= first] for place, each in enumerate(plain)] + [
        [each.arg, "KEYWORD_ONLY", default is not None]
        for each, default in zip(found.kwonlyargs, found.kw_defaults, strict=True)]


def words(folder: Path) -> dict[str, list[str]]:
    """Of its enumerations, which are compiled: as they are bound to Python."""
    text = (folder / "csrc" / "include" / "rocm_ops.hpp").read_text("utf-8")
    return {name: re.findall(r'\.value\("(\w+)", *' + name + "::", text) for name in ("ActivationType", "QuantType")}


def shuffled_right(folder: Path) -> int:
    """How many shapes and types of experts come back as they were from the library's order."""
    import torch  # noqa: TID251
    from isthmus.platforms.rocm.aiter_products import TILE, unshuffled
    spec = importlib.util.spec_from_file_location("shuffle", folder / SOURCES["shuffle_weight"])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    shapes = [(3, 64, 32), (1, 16, 128), (2, 256, 64)]
    for shape in shapes:
        for kind in (torch.bfloat16, torch.float16, torch.float8_e4m3fnuz, torch.float8_e4m3fn):
            codes = torch.randint(0, 120, (*shape[:-1], shape[-1] * kind.itemsize), dtype=torch.uint8).view(kind)
            back = unshuffled(module.shuffle_weight(codes, layout=TILE))
            assert torch.equal(back.view(torch.uint8), codes.view(torch.uint8)), (shape, kind)
    return 4 * len(shapes)


def main(folder: Path) -> int:
    from tests.emulation.interpreter import interpret
    interpret()
    package = folder / "aiter"
    found = {name: parameters((package / source).read_text("utf-8"), name) for name, source in SOURCES.items()}
    (version,) = re.findall(r"'([^']+)'", (package / "_version.py").read_text("utf-8"))
    enums = words(folder / "aiter_meta")
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(part)}" for name, part in found.items())
    about = json.dumps({"library": "amd-aiter", "version": version, "date": datetime.date.today().isoformat(),
                        "shuffled": shuffled_right(package), "enums": enums}, indent=1)
    TABLE.write_text(about.removesuffix("\n}") + ',\n "signatures": {\n' + lines + "\n }\n}\n", "utf-8")
    print(f"amd-aiter {version}: {len(found)} signatures, {enums}")
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(graph.ROOT))
    sys.exit(main(Path(sys.argv[1])))
