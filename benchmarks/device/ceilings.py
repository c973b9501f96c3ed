"""Measured ceilings: memory's bandwidth, and products of large matrices. Everything else is told as a part of them."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from place import Place, figure, main, timed

GEMM = 8192


def bandwidth(place: Place) -> Iterator[dict[str, Any]]:
    """Bytes a second: of a copy, read and written; and of a sum, read alone."""
    size = place.pick(1 << 29, 1 << 12)  # elements
    x, y = place.random(size), place.empty(size)
    for name, call, nbytes in (("copy", lambda: y.copy_(x), 4 * size),
                               ("read", lambda: torch.sum(x, dtype=torch.float32), 2 * size)):
        seconds, how = timed([call], place)
        yield {"what": f"bandwidth, {name}", "GB/s": figure(nbytes / seconds / 1e9), "how": how}


def products(place: Place) -> Iterator[dict[str, Any]]:
    """Operations a second of n x n x n products."""
    n = place.pick(GEMM, 32)
    a, b = place.random(n, n), place.random(n, n)
    calls: dict[str, Callable[[], object]] = {"bf16": lambda: a @ b.t()}
    if hasattr(torch, "_scaled_mm"):
        a8, b8 = (part.to(torch.float8_e4m3fn) for part in (a, b))
        one = torch.ones((), dtype=torch.float32, device=place.device.torch)
        calls["fp8"] = lambda: torch._scaled_mm(a8, b8.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    if hasattr(torch, "_int_mm"):
        ai, bi = (part.clamp(-9, 9).to(torch.int8) for part in (a, b))
        calls["int8"] = lambda: torch._int_mm(ai, bi.t())
    for name, call in calls.items():
        try:
            seconds, how = timed([call], place)
            yield {"what": f"product, {name}", "TFLOP/s": figure(2 * n ** 3 / seconds / 1e12), "how": how}
        except RuntimeError as error:
            yield {"what": f"product, {name}", "error": str(error)[:200]}


def run(place: Place, ceilings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from bandwidth(place)
    yield from products(place)


def bytes_a_second(ceilings: dict[str, Any]) -> float | None:
    return max((1e9 * row["GB/s"] for row in ceilings.get("rows", ()) if "GB/s" in row), default=None)


def flops_a_second(ceilings: dict[str, Any], kind: str = "bf16") -> float | None:
    return next((1e12 * row["TFLOP/s"] for row in ceilings.get("rows", ())
                 if row["what"] == f"product, {kind}" and "TFLOP/s" in row), None)


if __name__ == "__main__":
    main(__doc__, run)
