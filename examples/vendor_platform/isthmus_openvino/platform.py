"""Isthmus on OpenVINO: every forward pass is traced into one OpenVINO graph with free sizes and compiled once."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openvino
import psutil
from isthmus.core.platform import (
    FEATURES,
    Batch,
    Bucket,
    Manifest,
    RawTensor,
    StateSpec,
    Step,
    Unavailable,
    Unsupported,
    WeightSpec,
)
from isthmus.platforms.expand import CODECS
from isthmus.platforms.options import check_options

from .graph import Launched, Trace
from .layout import State
from .ops import Ops
from .quant import KEPT, Leaf, load_weight

OPS = ("embed", "linear", "rms_norm", "rope", "attention", "act_mul", "moe", "all_reduce", "sample")
INTERFACE = 1  # the version this package was written for; not core's own, which may be newer


class Platform:
    """One rank. Everything that touches a state runs on one worker thread, in the order in which it was asked for."""

    interface_version = INTERFACE

    def __init__(self, options: Mapping[str, str]) -> None:
        check_options("openvino", options, ("threads",))
        threads = options.get("threads", "0")
        if not threads.isdecimal():
            raise Unavailable(f"threads={threads!r} is no number of threads; 0 leaves the choice to OpenVINO")
        self.settings = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY",
                         "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0", "INFERENCE_NUM_THREADS": threads}
        self.traces = 0

    def probe(self, rank: int = 0, world: int = 1) -> Manifest:
        if world != 1:
            raise Unavailable(f"openvino runs in a single process; {world} ranks were asked for")
        self.core = openvino.Core()
        if "CPU" not in self.core.available_devices:
            raise Unavailable(f"OpenVINO has no CPU device here; it has {', '.join(self.core.available_devices)}")
        self.worker = ThreadPoolExecutor(1, "openvino")
        total, free = self.memory()
        return Manifest(
            name="openvino", device=self.core.get_property("CPU", "FULL_DEVICE_NAME"), interface=INTERFACE,
            compute_dtypes=("f32",), kv_dtypes=("f32",), formats=KEPT, page_sizes=(16, 1, 4, 8, 32, 64, 128),
            buckets=None, memory_total=total, memory_free=free, features=frozenset(FEATURES), determinism="T2",
            rank=5, details={"openvino": openvino.__version__})

    def supports(self, op: str, **case: Any) -> str | None:
        if op not in OPS and op not in FEATURES:
            return f"{op!r} is no op or feature of interface version {INTERFACE}"
        if case.get("dtype", "f32") != "f32":
            return f"dtype {case['dtype']}: only f32 is computed"
        if case.get("format", "f32") not in CODECS:
            return f"format {case['format']}: known are {', '.join(CODECS)}"
        return None

    def load(self, raws: Sequence[RawTensor], spec: WeightSpec, dtype: str) -> Leaf:
        if dtype != "f32":
            raise Unsupported(f"compute dtype {dtype!r}: only f32 is computed")
        return load_weight(raws, spec)

    def describe(self, weight: Leaf) -> str:
        return str(weight)

    def alloc(self, spec: StateSpec, pages: int) -> State:
        if spec.dtype != "f32":
            raise Unsupported(f"K and V in {spec.dtype!r}: only f32 is kept")
        return State.allocate(spec, pages)

    def compile(self, forward: Callable[[Ops, Any, Batch], Any], weights: Any, bucket: Bucket | None) -> Step:
        def build() -> Trace:
            self.traces += 1
            ops = Ops(Trace())
            return ops.trace.compile(forward(ops, weights, ops.batch()), self.core, self.settings)
        trace = self.worker.submit(build)

        def step(state: State, batch: Batch) -> tuple[Launched, State]:
            return Launched(self.worker.submit(lambda: trace.result().run(state, batch))), state
        return step

    def copy_pages(self, state: State, src: Sequence[int], dst: Sequence[int]) -> State:
        return self.worker.submit(state.copy_pages, list(src), list(dst)).result()

    def export_pages(self, state: State, pages: Sequence[int]) -> bytes:
        return self.worker.submit(state.export_pages, list(pages)).result()

    def import_pages(self, state: State, pages: Sequence[int], data: bytes) -> State:
        return self.worker.submit(state.import_pages, list(pages), data).result()

    def memory(self) -> tuple[int, int]:
        """Bytes of the machine: total, and free for use without swapping."""
        now = psutil.virtual_memory()
        return now.total, now.available

    def close(self) -> None:
        self.worker.shutdown()
