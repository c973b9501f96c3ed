"""The life cycle that the accelerator platforms share; each names its device, its kernels and what it claims.

Launching is asynchronous by nature here: `Step` returns when all is queued on the device's stream, and `collect` waits
for an event. Streams, events, memory and graphs are `torch.accelerator`'s, so a platform's folder holds what differs.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from ...core.platform import (
    FEATURES,
    INTERFACE_VERSION,
    Batch,
    Bucket,
    Buckets,
    Manifest,
    RawTensor,
    StateSpec,
    Unavailable,
    Unsupported,
    WeightSpec,
)
from ..collective import join, leave
from ..cut import held, rank_spec, shares
from ..options import check_options
from .cache import KV_DTYPES
from .device import Device
from .graph import Graph, accelerator_graph
from .kernels import Kernels, reason_against
from .ops import Ops
from .quant import DTYPES, Leaf
from .staging import Staging
from .state import State
from .step import Runtime, Step

OPS = ("embed", "linear", "rms_norm", "rope", "attention", "act_mul", "moe", "all_reduce", "sample")
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
BUCKETS = Buckets(tokens=(*SIZES, 384, 512, 1024, 2048, 4096, 8192), rows=SIZES,
                  pages=(16, 64, 256, 1024, 4096, 16384))
SMALL_FLOATS = frozenset(("f8_e4m3", "f8_e5m2"))
MODES = ("background", "first", "second", "off")


class AcceleratorPlatform:
    """One rank on one device. Options: `graphs`, when steps are captured: in the "background" while they are launched
    eagerly (the default), by a bucket's "first" or "second" launch, or "off". `traces` counts the steps that were
    captured or are to be."""

    interface_version = INTERFACE_VERSION
    name = ""
    kind = ""  # torch's word for such devices, and the name of its module
    noun = "GPU"
    unusable = ""  # said where torch finds none that it can use: what, and the way out
    compute_dtypes: tuple[str, ...] = ("bf16", "f16", "f32")
    kv_dtypes: tuple[str, ...] = ("bf16", "f16", "f32", "i8")
    page_sizes: tuple[int, ...] = (16, 32, 64, 128, 8, 1)
    buckets = BUCKETS
    options_known: tuple[str, ...] = ("graphs",)
    default_graphs = MODES[0]
    collective = "nccl"  # torch.distributed's backend
    kv_share = 0.9
    rank = 20

    def __init__(self, options: Mapping[str, str]) -> None:
        self.options = dict(options)
        self.traces = 0
        self._runtime: Runtime | None = None

    # What a platform's folder says.

    def device(self, rank: int) -> Device:
        """The device of this number, which is this thread's now. Raises `Unavailable` for one that is not served."""
        raise Unavailable(f"the {self.name} platform names no device")

    def claim(self, rank: int, world: int) -> Device:
        """The device of this rank. Raises `Unavailable` with the reason and the way out."""
        module = getattr(torch, self.kind)
        if not module.is_available():
            raise Unavailable(f"torch {torch.__version__} finds no usable {self.unusable}")
        if rank >= (count := module.device_count()):
            raise Unavailable(f"rank {rank} has no {self.noun}: {count} are visible")
        module.set_device(rank)
        return self.device(rank)

    def kernels(self, device: Device) -> Kernels:
        """What the platform computes with on this device."""
        return Kernels(device)

    def graphs(self, device: Device) -> Callable[[], Graph] | str:
        """Makes graphs, or says why there are none."""
        return accelerator_graph(device)

    def features(self) -> frozenset[str]:
        """Words of `FEATURES`; scales of K and V are for 8-bit floats alone."""
        return frozenset(FEATURES) - ({"kv_scales"} if SMALL_FLOATS.isdisjoint(self.kv_dtypes) else set())

    # The neck.

    def probe(self, rank: int = 0, world: int = 1) -> Manifest:
        check_options(self.name, self.options, self.options_known)
        mode = self.options.get("graphs", self.default_graphs)
        if mode not in MODES:
            raise Unavailable(f"graphs={mode!r}: one of {', '.join(MODES)} is needed")
        self._rank, self._world = rank, world
        device = self.claim(rank, world)
        kernels, graphs = self.kernels(device), self.graphs(device) if mode != "off" else "turned off by an option"
        # Ranks must do what they sum in the same order, and so capture at the same steps.
        background = ThreadPoolExecutor(1, f"{self.name}-graphs", device.enter) if (
            mode == "background" and world == 1) else None
        self._runtime = Runtime(device, kernels, Staging(device), graphs, background, self._captured,
                                1 + (mode == "second"))
        total, free = self.memory()
        details = device.details | kernels.describe() | {
            "torch": str(torch.__version__), "graphs": graphs if isinstance(graphs, str) else f"captured, {mode}"}
        return Manifest(
            name=self.name, device=device.name, interface=INTERFACE_VERSION, compute_dtypes=self.compute_dtypes,
            kv_dtypes=self.kv_dtypes, formats=kernels.kept, page_sizes=self.page_sizes, buckets=self.buckets,
            memory_total=total, memory_free=free, features=self.features(), determinism="T2", rank=self.rank,
            kv_share=self.kv_share, details=details)

    def supports(self, op: str, **case: Any) -> str | None:
        if op not in OPS and op not in FEATURES and op != "expert_parallel":
            return f"{op!r} is no op or feature of interface version {INTERFACE_VERSION}"
        return reason_against(op, case, self.compute_dtypes)

    def load(self, raws: Sequence[RawTensor], spec: WeightSpec, dtype: str) -> Leaf:
        if dtype not in DTYPES:
            raise Unsupported(f"compute dtype {dtype!r}: the {self.name} platform computes in {' or '.join(DTYPES)}")
        rank, world = self._rank, self._world
        leaf = self._ready().kernels.load(shares(raws, spec, rank, world), rank_spec(spec, rank, world), dtype)
        return replace(leaf, held=held(spec.experts, rank, world)) if spec.cut == "expert" else leaf

    def describe(self, weight: Leaf) -> str:
        return str(weight)

    def alloc(self, spec: StateSpec, pages: int) -> State:
        if spec.dtype not in self.kv_dtypes or spec.dtype not in KV_DTYPES:
            raise Unsupported(f"K and V in {spec.dtype!r}: the {self.name} platform keeps {', '.join(self.kv_dtypes)}")
        runtime = self._ready()
        if self._world > 1 and runtime.reduce is None:
            runtime.reduce = join(self.collective, self._rank, self._world)
        for step in runtime.steps:
            step.forget()
        runtime.device.give_back()
        return State.allocate(spec, pages, runtime.device)

    def compile(self, forward: Callable[[Ops, Any, Batch], Any], weights: Any, bucket: Bucket | None) -> Step:
        return Step(self._ready(), forward, weights, bucket)

    def copy_pages(self, state: State, src: Sequence[int], dst: Sequence[int]) -> State:
        if len(src):
            state.copy_pages(src, dst)
        return state

    def export_pages(self, state: State, pages: Sequence[int]) -> bytes:
        """K and V of these pages, layer after layer, each as [pages, 2, page_size, kv_heads, head_dim]; in int8 the
        scales follow, [pages, 2, page_size, kv_heads]."""
        return state.export_pages(pages) if len(pages) else b""

    def import_pages(self, state: State, pages: Sequence[int], data: bytes) -> State:
        """Fill `pages` with what `export_pages` gave for as many. Raises `ValueError` for another number of bytes."""
        expected = len(pages) * state.spec.page_bytes()
        if len(data) != expected:
            raise ValueError(f"{len(pages)} pages take {expected} bytes, not {len(data)}")
        if len(pages):
            state.import_pages(pages, data)
        return state

    def memory(self) -> tuple[int, int]:
        """Bytes of the device: total, and free now."""
        return self._ready().device.memory()

    def close(self) -> None:
        """Wait for captures and running steps, and let the memory that nobody uses go."""
        if self._runtime is not None:
            if self._runtime.background is not None:
                self._runtime.background.shutdown(wait=True, cancel_futures=True)
            self._runtime.device.wait()
            if self._runtime.reduce is not None:
                leave()
            self._runtime.device.give_back()

    def _ready(self) -> Runtime:
        if self._runtime is None:
            raise Unavailable(f"the {self.name} platform was not probed yet: call probe() first")
        return self._runtime

    def _captured(self) -> None:
        self.traces += 1
