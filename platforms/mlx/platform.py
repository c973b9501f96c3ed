"""The MLX platform: Apple GPUs through Metal, and host processors through MLX's CPU build. Needs no torch.

MLX is lazy: a step is a graph of arrays that is compiled once per size. Everything runs on one worker thread (see
`graph`), so `Step` returns at once and steps keep their order.
"""
from __future__ import annotations

import platform as machine
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
from ..host import physical_cores
from ..options import check_options

try:
    import mlx.core as mx
except ImportError as error:
    raise Unavailable(f"mlx cannot be imported ({error}): pip install 'isthmus[mlx]'") from error

from .attention import BUCKETS
from .graph import Step
from .memory import Budget
from .moe import ACTIVATIONS
from .ops import Ops, State, Turns
from .quant import DTYPES, KEPT, Device, Leaf, load_weight
from .worker import Line

OPS = ("embed", "linear", "rms_norm", "rope", "attention", "act_mul", "moe", "all_reduce", "sample")
MEMORY_SHARE = 0.75  # of the working set, unless the option says otherwise
MEMORY_FLOOR = 0.05  # of the budget: K and V give way when less is left


class Platform:
    """One rank, in this process. Options: `memory_share`, the share of the device's working set that weights, K and V
    and buffers may take together, 0.75 by default; `threads` of a host processor, by default one for each physical core
    that the process may use. `traces` counts how often a step was traced."""

    interface_version = INTERFACE_VERSION

    def __init__(self, options: Mapping[str, str]) -> None:
        self.options = dict(options)
        self._line: Line | None = None
        self.traces = 0

    def probe(self, rank: int = 0, world: int = 1) -> Manifest:
        if world != 1:
            raise Unavailable(f"--platform=mlx runs in a single process for now; {world} ranks were asked for")
        check_options("mlx", self.options, ("memory_share", "threads"))
        share, threads = self._memory_share(), self._threads()
        self._line, self._turns = Line("mlx-step"), Turns()
        return self._line.call(self._claim, share, threads)

    def supports(self, op: str, **case: Any) -> str | None:
        if op not in OPS and op not in FEATURES:
            return f"{op!r} is no op or feature of interface version {INTERFACE_VERSION}"
        if op == "kv_scales":
            return "K and V are not kept in 8-bit floats"
        dtype = case.get("dtype", "f32")
        if dtype not in DTYPES:
            return f"dtype {dtype}: the mlx platform computes in {' or '.join(DTYPES)}"
        if case.get("kind", "silu") not in ACTIVATIONS:
            return f"activation {case['kind']!r}; there are: {', '.join(ACTIVATIONS)}"
        name = case.get("format", "f32")
        return None if name in CODECS else f"format {name}: known are {', '.join(CODECS)}"

    def load(self, raws: Sequence[RawTensor], spec: WeightSpec, dtype: str) -> Leaf:
        return self._ready().call(load_weight, raws, spec, dtype, self._device)

    def describe(self, weight: Leaf) -> str:
        return str(weight)

    def alloc(self, spec: StateSpec, pages: int) -> State:
        if spec.dtype not in DTYPES:
            raise Unsupported(f"K and V in {spec.dtype!r}: the mlx platform keeps {' or '.join(DTYPES)}")
        return self._ready().call(_allocate, spec, pages)

    def compile(self, forward: Callable[[Ops, Any, Batch], Any], weights: Any, bucket: Bucket | None) -> Step:
        """A bucket's step is compiled by MLX at its first launch; a step of any size (`None`) runs eagerly."""
        return Step(forward, weights, self._ready(), self._turns, self._device, bucket is not None and self._compiling,
                    self._budget.relieve, self._traced)

    def copy_pages(self, state: State, src: Sequence[int], dst: Sequence[int]) -> State:
        if len(src):
            self._ready().call(state.copy_pages, list(src), list(dst))
        return state

    def export_pages(self, state: State, pages: Sequence[int]) -> bytes:
        """K and V of these pages, layer after layer, each as [2 * kv_heads, pages, page_size, head_dim]."""
        return self._ready().call(state.export_pages, list(pages)) if len(pages) else b""

    def import_pages(self, state: State, pages: Sequence[int], data: bytes) -> State:
        """Fill `pages` with what `export_pages` gave for as many. Raises `ValueError` for another number of bytes."""
        expected = len(pages) * state.spec.page_bytes()
        if len(data) != expected:
            raise ValueError(f"{len(pages)} pages take {expected} bytes, not {len(data)}")
        if len(pages):
            self._ready().call(state.import_pages, list(pages), data)
        return state

    def memory(self) -> tuple[int, int]:
        """Bytes of the budget, and what is left of it now."""
        self._ready()
        return self._budget.figures()

    def close(self) -> None:
        """Wait for the running step and give cached buffers back; later steps are refused."""
        if self._line is not None:
            self._line.close()

    def _claim(self, share: float, threads: int) -> Manifest:
        """On the worker, whose streams all later work uses."""
        gpu = mx.default_device() == mx.Device(mx.gpu)
        metal = gpu and mx.metal.is_available()
        # On a host processor MLX compiles its fused kernels with the system's C++ compiler.
        self._compiling = gpu or shutil.which("g++") is not None
        streams = () if gpu or threads < 2 else (mx.default_stream(mx.cpu),
                                                 *(mx.new_stream(mx.cpu) for _ in range(threads - 1)))
        self._device, self._budget = Device(metal, streams), Budget(share, metal)
        total, free = self._budget.figures()
        info = mx.device_info()
        details = self._budget.details
        details |= {"mlx": mx.__version__, "backend": "Metal" if metal else "GPU" if gpu else "CPU",
                    "architecture": str(info.get("architecture", machine.machine())),
                    "threads": "1" if gpu else str(threads),
                    "steps": "compiled" if self._compiling else "eager: MLX finds no C++ compiler (g++)",
                    "decode attention": "Metal kernel over pages" if metal else "gathered pages"}
        return Manifest(
            name="mlx", device=str(info.get("device_name", machine.processor() or machine.machine())),
            interface=INTERFACE_VERSION, compute_dtypes=("bf16", "f16", "f32") if gpu else ("f32", "bf16"),
            kv_dtypes=("bf16", "f16", "f32") if gpu else ("f32", "bf16"), formats=KEPT,
            page_sizes=(16, 1, 4, 8, 32, 64, 128), buckets=BUCKETS, memory_total=total, memory_free=free,
            features=frozenset(FEATURES) - {"kv_scales"}, determinism="T2", rank=20 if gpu else 5,
            memory_floor=MEMORY_FLOOR, details=details)

    def _traced(self) -> None:
        self.traces += 1

    def _ready(self) -> Line:
        if self._line is None:
            raise Unavailable("the mlx platform was not probed yet: call probe() first")
        return self._line

    def _memory_share(self) -> float:
        asked = self.options.get("memory_share", str(MEMORY_SHARE))
        try:
            share = float(asked)
        except ValueError:
            share = 0.0
        if not 0 < share <= 1:
            raise Unavailable(f"memory_share={asked!r}: a number over 0 up to 1 is needed, such as {MEMORY_SHARE}")
        return share

    def _threads(self) -> int:
        asked = self.options.get("threads")
        if asked is None:
            return physical_cores()
        if not asked.isdecimal() or not 1 <= int(asked) <= 1024:
            raise Unavailable(f"threads={asked!r}: a number from 1 to 1024 is needed")
        return int(asked)


def _allocate(spec: StateSpec, pages: int) -> State:
    """The cache goes first: in it may be the memory of a larger state that is given up for this one."""
    mx.clear_cache()
    return State.allocate(spec, pages)
