"""What this platform can do at best, measured: bytes of memory and operations a second. All else is told as a share.

Both are measured through the neck: products of one token, which do nothing but read weights, and of many, which do
little else than multiply. Where the platform's memory is the host's, numpy's own reading counts too, as a platform's
product may be slower than the memory.
"""
from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil

from ..platform import Batch, LayerState, Ops, Tensor
from ..specs import StateSpec
from .steps import Place, make_batch

WIDTH, MANY = 2048, 512  # of the matrices; tokens of a product that multiplies
VOCAB = 64              # of the embedding in front of them
SAME_MEMORY = 0.02      # memory of the host's size, within this share, is the host's
LEAST_BYTES, MOST_BYTES = 64 << 20, 1 << 30
CHAIN = 4               # products of a step
ALSO = ("q8_0",)        # formats in which products may be faster than in the compute dtype
CLEAR = 0.25            # of a step's time that a difference must have
REPEATS = 5


@dataclass(frozen=True)
class Ceilings:
    """bytes_per_s, operations_per_s (a multiplication and an addition are two), and how each was found."""

    bytes_per_s: float
    operations_per_s: float
    how: dict[str, str]

    def seconds(self, nbytes: float, operations: float) -> float:
        """The least time for so much."""
        return max(nbytes / self.bytes_per_s, operations / self.operations_per_s)

    def bound(self, nbytes: float, operations: float) -> str:
        """What limits so much: "memory" or "products"."""
        return "memory" if nbytes / self.bytes_per_s >= operations / self.operations_per_s else "products"


def chain(ops: Ops, weights: Any, batch: Batch) -> Tensor:
    """All products one after the other, and a small one as a model ends with: what platforms compile."""
    x = ops.embed(batch.tokens, weights["embed"])
    for weight in weights["chain"]:
        x = ops.linear(x, weight)
    return ops.sample(ops.linear(x[batch.logit_rows], weights["embed"]))


def rate_of(count: int, many: float, one: float) -> float:
    """Calls a second, from the seconds of a step with so many of them and of a step with one: what steps cost beside
    them is left out, unless the difference is so small that it may be noise."""
    return (count - 1) / (many - one) if many - one >= CLEAR * many else count / many


def plain_state(place: Place, rows: int) -> StateSpec:
    """Memory of K and V that nothing is kept in."""
    return StateSpec((LayerState(1, 64),), place.manifest.kv_dtypes[0], place.page_size, rows + 1)


def measure(place: Place, size: int, width: int = WIDTH) -> Ceilings:
    """The ceilings for weights of `size` bytes: what fits a cache is read faster."""
    most = place.manifest.buckets.tokens[-1] if place.manifest.buckets else MANY
    each = width * width * np.dtype("f8" if place.dtype == "f64" else "f4" if place.dtype == "f32" else "f2").itemsize
    count = max(4, int(min(max(size, LEAST_BYTES), MOST_BYTES) // each))
    embed, forms = place.weight((VOCAB, width), "embed"), [place.dtype]
    forms += [form for form in ALSO if form in place.manifest.formats]

    def seconds(leaves: list[Any], new: int) -> float:
        batch = make_batch(1, new, new, place.page_size, VOCAB, logits=False)
        return place.timed(chain, {"embed": embed, "chain": leaves}, batch, plain_state(place, 1)).median
    leaves = [place.weight((width, width), seed=i) for i in range(count)]
    read = each * rate_of(count, seconds(leaves, 1), seconds(leaves[:1], 1))
    new, many, found = min(MANY, most), 0.0, ""
    for form in forms:
        some = leaves[:CHAIN] if form == place.dtype else [place.weight((width, width), form=form)] * CHAIN
        rate = 2 * new * width * width * rate_of(len(some), seconds(some, new), seconds(some[:1], new))
        many, found = max((many, found), (rate, form))
    how = {"bytes": f"products of one token with {count} matrices of {width} x {width} in {place.dtype}",
           "operations": f"products of {new} tokens with such a matrix in {found}"}
    if _is_host(place.manifest.memory_total):
        own = host_read(count * each)
        if own > read:
            read, how["bytes"] = own, "numpy reading as many bytes on all cores"
    return Ceilings(read, many, how)


def _is_host(total: int) -> bool:
    return abs(total - psutil.virtual_memory().total) <= SAME_MEMORY * total


def host_read(nbytes: int) -> float:
    """Bytes a second that all usable cores read together, each a part of so many; the best of a few tries."""
    cores = len(psutil.Process().cpu_affinity()) if hasattr(psutil.Process, "cpu_affinity") else psutil.cpu_count() or 1
    parts = [np.ones(max(1, nbytes // cores // 4), np.float32) for _ in range(cores)]
    read: Callable[[np.ndarray], Any] = lambda part: np.dot(part, part)  # noqa: E731
    with ThreadPoolExecutor(cores) as pool:
        list(pool.map(read, parts))
        times = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            list(pool.map(read, parts))
            times.append(time.perf_counter() - began)
    return sum(part.nbytes for part in parts) / statistics.median(times)
