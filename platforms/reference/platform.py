"""The reference platform: numpy in float64, slow, obvious and complete. The oracle of every other platform, and the
skeleton to copy for a new one.
"""
from __future__ import annotations

import platform as machine
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import psutil

from ...core.platform import (
    FEATURES,
    INTERFACE_VERSION,
    Batch,
    Bucket,
    Manifest,
    RawTensor,
    StateSpec,
    Unavailable,
    Unsupported,
    WeightSpec,
)
from ..expand import CODECS
from ..options import check_options
from .attention import LayerCache
from .graph import EagerStep
from .kept import KV_DTYPES
from .ops import Ops, State
from .quant import DTYPES, KEPT, Leaf, load_weight

OPS = ("embed", "linear", "rms_norm", "rope", "attention", "act_mul", "moe", "all_reduce", "sample")


class Platform:
    """One rank, in this process."""

    interface_version = INTERFACE_VERSION

    def __init__(self, options: Mapping[str, str]) -> None:
        check_options("reference", options, ())

    def probe(self, rank: int = 0, world: int = 1) -> Manifest:
        if world != 1:
            raise Unavailable(f"the reference runs in a single process; {world} ranks were asked for")
        total, free = self.memory()
        return Manifest(
            name="reference", device=machine.processor() or machine.machine(), interface=INTERFACE_VERSION,
            compute_dtypes=tuple(DTYPES), kv_dtypes=KV_DTYPES, formats=KEPT, page_sizes=(16, 1, 4, 8, 32, 64),
            buckets=None, memory_total=total, memory_free=free, features=frozenset(FEATURES), determinism="T1",
            details={"numpy": np.__version__})

    def supports(self, op: str, **case: Any) -> str | None:
        if op not in OPS and op not in FEATURES:
            return f"{op!r} is no op or feature of interface version {INTERFACE_VERSION}"
        if case.get("dtype", "f64") not in DTYPES:
            return f"dtype {case['dtype']}: the reference computes in {' or '.join(DTYPES)}"
        if case.get("format", "f32") not in CODECS:
            return f"format {case['format']}: known are {', '.join(CODECS)}"
        return None

    def load(self, raws: Sequence[RawTensor], spec: WeightSpec, dtype: str) -> Leaf:
        return load_weight(raws, spec, dtype)

    def describe(self, weight: Leaf) -> str:
        return str(weight)

    def alloc(self, spec: StateSpec, pages: int) -> State:
        if spec.dtype not in KV_DTYPES:
            raise Unsupported(f"K and V in {spec.dtype!r}: the reference keeps {', '.join(KV_DTYPES)}")
        caches = (LayerCache.allocate(spec, layer, pages) for layer in spec.layers)
        return State(spec, tuple(caches), np.zeros(spec.seqs, np.int32))

    def compile(self, forward: Callable[[Ops, Any, Batch], Any], weights: Any, bucket: Bucket | None) -> EagerStep:
        return EagerStep(forward, weights)

    def copy_pages(self, state: State, src: Sequence[int], dst: Sequence[int]) -> State:
        for cache in state.layers:
            for part in cache.parts:
                part[list(dst)] = part[list(src)]
        return state

    def export_pages(self, state: State, pages: Sequence[int]) -> bytes:
        """K, then V, of these pages, layer after layer; in int8 each with its scales behind."""
        return b"".join(part[list(pages)].tobytes() for cache in state.layers for part in cache.parts)

    def import_pages(self, state: State, pages: Sequence[int], data: bytes) -> State:
        """Fill `pages` with what `export_pages` gave for as many. Raises `ValueError` for another number of bytes."""
        expected = len(pages) * state.spec.page_bytes()
        if len(data) != expected:
            raise ValueError(f"{len(pages)} pages take {expected} bytes, not {len(data)}")
        start = 0
        for cache in state.layers:
            for part in cache.parts:
                shape = (len(pages), *part.shape[1:])
                part[list(pages)] = np.frombuffer(data, part.dtype, np.prod(shape), start).reshape(shape)
                start += len(pages) * part[0].nbytes
        return state

    def memory(self) -> tuple[int, int]:
        """Bytes of the machine: total, and free for use without swapping."""
        now = psutil.virtual_memory()
        return now.total, now.available
