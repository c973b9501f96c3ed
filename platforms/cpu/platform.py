"""The torch platform of host processors: eager, bf16 and f32. Readable first, and the model of later torch platforms.

A step runs on the platform's one worker thread, so `Step` returns at once and steps keep their order; the matrix
products inside use `threads` OpenMP threads.
"""
from __future__ import annotations

import os
import platform as machine
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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
from ..cut import held, rank_spec, shares
from ..expand import CODECS
from ..host import host_memory, physical_cores, read_text
from ..options import check_options

# Read by OpenMP when torch loads it: how long idle threads spin before they sleep. The default, milliseconds, starves
# whatever holds the other cores and then waits for it: 32 tokens took 17 s instead of 5 s beside one busy process. Less
# than this costs a quiet machine: 32 tokens take 0.50 s from 10,000 on, 0.56 s at 5,000, 0.76 s at 1,000.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # GNU, some hundred microseconds
os.environ.setdefault("KMP_BLOCKTIME", "0")      # LLVM and Intel, in milliseconds

try:
    import torch
except ImportError as error:
    raise Unavailable(f"torch cannot be imported ({error}): pip install 'isthmus[cpu]'") from error

from ..collective import join, leave
from .compiled.library import Library, open_best
from .compiled.step import Compiled, Runner
from .graph import Step
from .kept import KV_DTYPES
from .moe import ACTIVATIONS, Share
from .ops import Ops, State
from .quant import DTYPES, KEPT, Leaf, load_weight, reason_to_expand

OPS = ("embed", "linear", "rms_norm", "rope", "attention", "act_mul", "moe", "all_reduce", "sample")


class Platform:
    """One rank, in this process. Options: `threads`, by default one for each physical core that the process may use, or
    that its share of them is among several ranks; `kernels`, "compiled" or "torch", by default the compiled ones where
    they were built, for the matrix unit too if the processor has one: else torch uses that.

    All of torch's work is done on one thread, loading too: each thread that starts a parallel region gets a team of
    OpenMP threads for good, and with more of those than cores they sleep between regions, which halves the speed.
    """

    interface_version = INTERFACE_VERSION

    def __init__(self, options: Mapping[str, str]) -> None:
        self.options = dict(options)
        self._worker: ThreadPoolExecutor | None = None
        self._reduce: Callable[[torch.Tensor], torch.Tensor] | None = None
        self._runner: Runner | None = None

    def probe(self, rank: int = 0, world: int = 1) -> Manifest:
        self._rank, self._world = rank, world
        threads = self._threads()
        torch.set_num_threads(threads)
        self._worker = ThreadPoolExecutor(1, "cpu-step", torch.set_num_threads, (threads,))
        kernels = self._kernels()
        if isinstance(kernels, Library):
            self._runner = Runner(kernels, threads)
        total, free = self.memory()
        capability = torch.backends.cpu.get_cpu_capability()
        dtypes = ("bf16", "f32") if native_bf16() or self._runner is not None else ("f32", "bf16")
        return Manifest(
            name="cpu", device=f"{processor_name()}, {told_threads(threads, world, physical_cores())}, "
                               f"{'torch' if isinstance(kernels, str) else 'compiled'} kernels",
            interface=INTERFACE_VERSION,
            compute_dtypes=dtypes, kv_dtypes=tuple(dict.fromkeys((*dtypes, *KV_DTYPES))), formats=KEPT,
            page_sizes=(16, 1, 4, 8, 32, 64, 128), buckets=None, memory_total=total, memory_free=free,
            features=frozenset(FEATURES), determinism="T2", rank=10,
            details={"torch": str(torch.__version__), "capability": capability, "threads": str(threads),
                     "matrix units": "AMX" if has_amx() else "none",
                     "kernels": kernels if isinstance(kernels, str) else f"compiled, {kernels.name}"})

    def supports(self, op: str, **case: Any) -> str | None:
        if op not in OPS and op not in FEATURES and op != "expert_parallel":
            return f"{op!r} is no op or feature of interface version {INTERFACE_VERSION}"
        dtype = case.get("dtype", "f32")
        if dtype not in DTYPES:
            return f"dtype {dtype}: the cpu platform computes in {' or '.join(DTYPES)}"
        if case.get("kind", "silu") not in ACTIVATIONS:
            return f"activation {case['kind']!r}; there are: {', '.join(ACTIVATIONS)}"
        name = case.get("format", "f32")
        if name not in CODECS:
            return f"format {name}: known are {', '.join(CODECS)}"
        return reason_to_expand(name, dtype) if op in ("linear", "moe") and name in KEPT else None

    def load(self, raws: Sequence[RawTensor], spec: WeightSpec, dtype: str) -> Leaf:
        place = self._rank, self._world
        leaf = self._in_order(load_weight, shares(raws, spec, *place), rank_spec(spec, *place), dtype, self._runner)
        return Share(leaf.parts, held(spec.experts, *place)) if spec.cut == "expert" else leaf

    def describe(self, weight: Leaf) -> str:
        return str(weight)

    def alloc(self, spec: StateSpec, pages: int) -> State:
        if spec.dtype not in KV_DTYPES:
            raise Unsupported(f"K and V in {spec.dtype!r}: the cpu platform keeps {', '.join(KV_DTYPES)}")
        if self._world > 1 and self._reduce is None:
            self._reduce = self._in_order(join, "gloo", self._rank, self._world)
        return self._in_order(State.allocate, spec, pages)

    def compile(self, forward: Callable[[Ops, Any, Batch], Any], weights: Any, bucket: Bucket | None) -> Step:
        compiled = None if self._runner is None or self._world > 1 else Compiled(self._runner, forward, weights)
        return Step(forward, weights, self._ready(), self._reduce, compiled)

    def copy_pages(self, state: State, src: Sequence[int], dst: Sequence[int]) -> State:
        self._in_order(state.copy_pages, src, dst)
        return state

    def export_pages(self, state: State, pages: Sequence[int]) -> bytes:
        """K and V of these pages, layer after layer, each as [pages, page_size, 2, kv_heads, head_dim]; in int8 the
        scales follow, [pages, page_size, 2, kv_heads]."""
        return self._in_order(state.export_pages, pages)

    def import_pages(self, state: State, pages: Sequence[int], data: bytes) -> State:
        """Fill `pages` with what `export_pages` gave for as many. Raises `ValueError` for another number of bytes."""
        expected = len(pages) * state.spec.page_bytes()
        if len(data) != expected:
            raise ValueError(f"{len(pages)} pages take {expected} bytes, not {len(data)}")
        self._in_order(state.import_pages, pages, data)
        return state

    def memory(self) -> tuple[int, int]:
        """Bytes that this process may use: total, and free without swapping; a control group's limit counts."""
        return host_memory()

    def close(self) -> None:
        """Wait for the running step; later ones are refused."""
        if self._worker is not None:
            if self._reduce is not None:
                self._in_order(leave)
            self._worker.shutdown(wait=True, cancel_futures=True)
        if self._runner is not None:
            self._runner.close()

    def _ready(self) -> ThreadPoolExecutor:
        if self._worker is None:
            raise Unavailable("the cpu platform was not probed yet: call probe() first")
        return self._worker

    def _in_order(self, work: Callable[..., Any], *args: Any) -> Any:
        """Run after the steps that were launched before, and wait."""
        return self._ready().submit(torch.inference_mode()(work), *args).result()

    def _kernels(self) -> Library | str:
        """The compiled kernels, or why torch's are used."""
        asked = self.options.get("kernels")
        if asked not in (None, "compiled", "torch"):
            raise Unavailable(f"kernels={asked!r}: compiled or torch is needed")
        if asked == "torch":
            return "torch's, asked for"
        library = open_best(torch.backends.cpu.get_cpu_capability())
        if asked is None and has_amx() and not (isinstance(library, Library) and library.name == "amx"):
            return "torch's, which use the matrix units, for which no kernels were built"
        if isinstance(library, str) and asked == "compiled":
            raise Unavailable(f"kernels=compiled: {library}")
        return f"torch's; the compiled ones are {library}" if isinstance(library, str) else library

    def _threads(self) -> int:
        check_options("cpu", self.options, ("threads", "kernels"))
        asked = self.options.get("threads")
        if asked is None:
            return max(1, physical_cores() // self._world)
        if not asked.isdecimal() or not 1 <= int(asked) <= 1024:
            raise Unavailable(f"threads={asked!r}: a number from 1 to 1024 is needed")
        return int(asked)


def told_threads(threads: int, world: int, cores: int) -> str:
    """How many there are, for people: a warning where all ranks together have more than there are cores."""
    number = f"{threads} thread{'s' if threads > 1 else ''}"
    if threads * world <= cores:
        return number
    return (f"{number}{f' in each of {world} ranks' if world > 1 else ''} on {cores} core{'s' if cores > 1 else ''} "
            "(warning: they take turns, which is slow)")


def processor_name() -> str:
    for line in (read_text("/proc/cpuinfo") or "").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return machine.processor() or machine.machine()


def has_amx() -> bool:
    return bool(torch.cpu._is_amx_tile_supported())


def native_bf16() -> bool:
    """Whether the processor multiplies bf16 itself."""
    return has_amx() or bool(torch.cpu._is_avx512_bf16_supported())
