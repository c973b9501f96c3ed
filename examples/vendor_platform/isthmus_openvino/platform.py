"""Isthmus on OpenVINO: every forward pass is traced into one OpenVINO graph with free sizes and compiled once."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import isthmus.core.platform as neck
import numpy as np
import openvino
import psutil
from isthmus.platforms.options import check_options

from .graph import Launched, Trace
from .layout import State
from .ops import Ops
from .quant import load_weight

FEATURES = frozenset({"sliding_window", "softcap", "logprobs", "penalties", "logit_bias", "grammar_mask", "moe",
                      "late_mask", "expert_groups", "partial_rope", "overlap", "export_pages"})


class Platform:
    """One rank. Everything that touches a state runs on one worker thread, in the order in which it was asked for."""

    interface_version = 1  # what this package was written for: the next core serves it too

    def __init__(self, options: Mapping[str, str]) -> None:
        check_options("openvino", options, ("threads",))
        threads = options.get("threads", "0")
        if not threads.isdecimal():
            raise neck.Unavailable(f"threads={threads!r} is no number of threads; 0 leaves the choice to OpenVINO")
        self.settings = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY",
                         "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0", "INFERENCE_NUM_THREADS": threads}
        self.traces = 0

    def probe(self, rank: int = 0, world: int = 1) -> neck.Manifest:
        if world != 1:
            raise neck.Unavailable(f"openvino runs in a single process; {world} ranks were asked for")
        self.core = openvino.Core()
        self.worker = ThreadPoolExecutor(1, "openvino")
        total, free = self.memory()
        return neck.Manifest(
            name="openvino", device=self.core.get_property("CPU", "FULL_DEVICE_NAME"), interface=self.interface_version,
            compute_dtypes=("f32",), kv_dtypes=("f32",), formats=(), page_sizes=(16, 1, 4, 8, 32, 64, 128),
            buckets=None, memory_total=total, memory_free=free, features=FEATURES, determinism="T2",
            rank=5, details={"openvino": openvino.__version__})

    def supports(self, op: str, **case: Any) -> str | None:
        if op not in FEATURES and not hasattr(Ops, op):
            return f"{op!r} is no op or feature of interface version {self.interface_version}"
        if case.get("dtype", "f32") != "f32":
            return f"dtype {case['dtype']}: only f32 is computed"
        return None

    def load(self, raws: Sequence[neck.RawTensor], spec: neck.WeightSpec, dtype: str) -> np.ndarray:
        return load_weight(raws, spec)

    def describe(self, weight: np.ndarray) -> str:
        return "f32"

    def alloc(self, spec: neck.StateSpec, pages: int) -> State:
        shapes = [(pages * spec.page_size, layer.kv_heads, layer.head_dim) for layer in spec.layers]
        layers = [(np.zeros(shape, np.float32), np.zeros(shape, np.float32)) for shape in shapes]
        return State(spec, layers, np.zeros(spec.seqs, np.int32))

    def compile(self, forward: Callable[[Ops, Any, neck.Batch], Any], weights: Any,
                bucket: neck.Bucket | None) -> neck.Step:
        def build() -> Trace:
            self.traces += 1
            ops = Ops()
            return ops.trace.compile(forward(ops, weights, ops.batch), self.core, self.settings)
        trace = self.worker.submit(build)

        def step(state: State, batch: neck.Batch) -> tuple[Launched, State]:
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
        return psutil.virtual_memory()[:2]

    def close(self) -> None:
        self.worker.shutdown()
