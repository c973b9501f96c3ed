"""Try AITER's `unified_attention`, whose K and V lie as ours, as the rocm platform tries it at load, in Triton's
interpreter: `python ci/aiter_attention.py FOLDER`, where `pip install --no-deps --target FOLDER amd-aiter` has put the
package.

Memory past a row's context may hold anything: each case is tried with no numbers there, as on a device, and with zeros,
which tells whether that alone is wrong. Needs torch and Triton, no device. The package's own start-up asks for one, so
its modules are imported without it. What held goes to ci/aiter_attention.json.
"""
from __future__ import annotations

import datetime
import json
import math
import sys
import types
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import graph

sys.path.insert(0, str(graph.ROOT))
TABLE = graph.ROOT / "ci" / "aiter_attention.json"
SHAPES = [  # heads, heads of K, head dimension, page size, window, soft cap
    (4, 4, 64, 16, None, None), (8, 1, 64, 32, None, None), (6, 2, 80, 16, 7, None), (4, 2, 128, 16, None, 5.0),
    (4, 2, 64, 16, 64, None), (4, 4, 32, 64, None, None)]


def load(folder: Path) -> Any:
    """The function, without what needs a device."""
    from tests.emulation.interpreter import interpret
    interpret()
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    driver.active.get_current_target = lambda: GPUTarget("hip", "gfx942", 64)
    sys.path.insert(0, str(folder))
    for name in ("aiter", "aiter.ops", "aiter.ops.triton"):
        package = types.ModuleType(name)
        package.__path__ = [str(folder / name.replace(".", "/"))]
        sys.modules[name] = package
    module = import_module("aiter.ops.triton.unified_attention")
    module.get_num_sms = lambda: 2  # of which a long context needs several programs
    return module.unified_attention


def cases() -> list[dict[str, Any]]:
    return [{"steps": "decode" if decode else "prompts", "dtype": dtype, "beyond": beyond, "heads": heads,
             "kv_heads": kv_heads, "dim": dim, "page": page, "window": window, "cap": cap}
            for decode in (True, False) for dtype in ("float16", "bfloat16") for beyond in (0.0, math.nan)
            for heads, kv_heads, dim, page, window, cap in SHAPES]


def reason(function: Any, version: str, steps: str, dtype: str, beyond: float, heads: int, kv_heads: int, dim: int,
           page: int, window: int | None, cap: float | None) -> str | None:
    """Of the platform's own trial of its own backend."""
    import torch  # noqa: TID251
    from isthmus.core.platform import AttentionSpec
    from isthmus.platforms.accelerator.attention_trial import reason_against
    from isthmus.platforms.accelerator.cache import LayerCache
    from isthmus.platforms.accelerator.device import Device
    from isthmus.platforms.rocm.aiter_attention import Aiter
    from isthmus.platforms.rocm.aiter_library import Library
    kind, spec = getattr(torch, dtype), AttentionSpec(dim ** -0.5, window, cap)
    backend = Aiter(Library(version, {"unified_attention": function}))
    q, like = torch.zeros(1, heads, dim, dtype=kind), LayerCache(torch.zeros(2, 2, page, kv_heads, dim, dtype=kind))
    try:
        return reason_against(lambda *step: backend.attend(*step, spec), backend, q, like, spec, steps == "decode",
                              Device(torch.device("cpu")), beyond)
    except Exception as failure:
        return f"{type(failure).__name__}: {failure}"[:300]


def main(folder: str) -> int:
    function, found = load(Path(folder)), []
    version = metadata.version("amd-aiter")
    for case in cases():
        why = reason(function, version, **case)
        found.append({**case, "beyond": str(case["beyond"]), "reason": why})
        print("held" if why is None else f"left: {why}", found[-1], flush=True)
    import triton
    held = sum(each["reason"] is None for each in found)
    lines = ",\n".join(f"  {json.dumps(each)}" for each in found)
    about = json.dumps({"date": datetime.date.today().isoformat(), "amd-aiter": version, "triton": triton.__version__,
                        "held": held, "left": len(found) - held}, indent=1)
    TABLE.write_text(about.removesuffix("\n}") + ',\n "cases": [\n' + lines + "\n ]\n}\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
