"""Run AITER's `unified_attention`, whose K and V lie as ours, in Triton's interpreter beside plain torch:
`python ci/aiter_attention.py FOLDER`, where `pip install --no-deps --target FOLDER amd-aiter` has put the package.

It is why the rocm platform does not call it (platforms/rocm/README.md): memory past a row's context may hold anything,
and this reads it. Needs torch and Triton, no device. The package's own start-up asks for one, so its modules are
imported without it. What held, and with what error, goes to ci/aiter_attention.json.
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
LIMIT = {"float16": 1e-6, "bfloat16": 5e-5}  # normalised mean squared error: a few roundings of 11 and 8 bits


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
    """Rows (new tokens, context), heads, heads of K, head dimension, page size, window."""
    decode, long, mixed = [(1, 5), (1, 40), (1, 0)], [(1, 700), (1, 3)], [(1, 9), (1, 33), (17, 17), (20, 50), (3, 18)]
    return [{"rows": rows, "heads": heads, "kv_heads": kv, "dim": dim, "page": page, "window": window, "cap": cap,
             "dtype": dtype, "beyond": beyond}
            for beyond in (0.0, math.nan) for dtype in ("float16", "bfloat16")
            for rows, heads, kv, dim, page, window, cap in (
                (decode, 4, 4, 64, 16, None, None), (decode, 8, 1, 64, 32, None, None), (decode, 6, 2, 80, 16, 7, None),
                (decode, 4, 4, 64, 16, None, 5.0), (long, 4, 2, 64, 16, None, None), (long, 4, 2, 64, 16, 64, None),
                (mixed, 4, 2, 64, 16, None, None), (mixed, 6, 2, 128, 32, None, None), (mixed, 4, 1, 64, 16, 5, None),
                (mixed, 4, 4, 32, 64, 1, None))]


def run(function: Any, rows: list[tuple[int, int]], heads: int, kv_heads: int, dim: int, page: int, window: int | None,
        cap: float | None, dtype: str, beyond: float) -> float:
    """The error beside the composed path in float32. beyond: what lies in all memory that no row may read."""
    import numpy as np
    import torch  # noqa: TID251
    from isthmus.core.platform import AttentionSpec, Batch, Sampling
    from isthmus.platforms.accelerator.attention import Composed, View, only_decodes
    from isthmus.platforms.accelerator.cache import LayerCache
    random = torch.Generator().manual_seed(heads * dim + page)
    used, table = 1, np.zeros((len(rows), max(-(-length // page) for _, length in rows) + 1), np.int32)
    kv = torch.full((2 + sum(-(-length // page) for _, length in rows), 2, page, kv_heads, dim), beyond)
    kv[0] = 0  # padding's
    for row, (_, length) in enumerate(rows):
        for first in range(0, length, page):
            table[row, first // page] = used
            held = min(page, length - first)
            kv[used, :, :held] = torch.randn(2, held, kv_heads, dim, generator=random)
            used += 1
    counts = np.array([count if length else 0 for count, length in rows])
    starts, lengths = np.append(0, np.cumsum(counts)).astype(np.int32), np.array([n for _, n in rows], np.int32)
    tokens = int(starts[-1]) + 2
    zeros = np.zeros(tokens, np.int32)
    batch = Batch(zeros, zeros, zeros, zeros, np.zeros(len(rows), np.int32), starts, lengths, table, zeros[:1],
                  zeros[:1], Sampling())
    fed = {name: torch.from_numpy(getattr(batch, name)) for name in ("starts", "lengths", "pages")}
    view, spec = View(batch, fed, None, page, only_decodes(batch)), AttentionSpec(dim ** -0.5, window, cap)
    q, kind = torch.randn(tokens, heads, dim, generator=random), getattr(torch, dtype)
    want = Composed().attend(q.to(kind).float(), LayerCache(kv.to(kind).float()), view, spec)[:starts[-1]]
    used_rows, kv, q = counts > 0, kv.to(kind), q.to(kind)[:starts[-1]]
    got = torch.empty_like(q)
    function(q=q, k=kv[:, 0], v=kv[:, 1], out=got, max_seqlen_q=int(counts.max()), max_seqlen_k=table.shape[1] * page,
             cu_seqlens_q=torch.from_numpy(np.append(0, np.cumsum(counts[used_rows])).astype(np.int32)),
             seqused_k=torch.from_numpy(lengths[used_rows]), block_table=torch.from_numpy(table[used_rows]),
             softmax_scale=spec.scale, causal=True, window_size=(-1 if window is None else window - 1, 0),
             softcap=cap or 0.0, q_descale=None, k_descale=None, v_descale=None)
    return float((got.float() - want).square().mean() / want.square().mean())


def main(folder: str) -> int:
    function, found, bad = load(Path(folder)), [], 0
    for case in cases():
        try:
            error: float | str = run(function, **case)
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"[:300]
        held = isinstance(error, float) and error < LIMIT[case["dtype"]]
        bad += not held
        found.append({**case, "nmse": f"{error:.1e}" if isinstance(error, float) else error, "held": held})
        found[-1] |= {"beyond": str(case["beyond"])}
        print("held" if held else "WRONG", found[-1], flush=True)
    import triton
    TABLE.write_text(json.dumps({
        "date": datetime.date.today().isoformat(), "amd-aiter": metadata.version("amd-aiter"),
        "triton": triton.__version__, "held": len(found) - bad, "wrong": bad,
        "cases": found}, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
