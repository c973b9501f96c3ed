"""The JAX platform: TPUs through Pallas kernels, and any host processor through the composed paths.

One object runs all ranks of tensor parallelism as one program over a mesh of devices. Every choice between a kernel
and its composed path follows from the backend and the shapes, when a step is traced.
"""
from __future__ import annotations

import os
import platform as machine
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

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
from ..expand import CODECS
from ..host import host_memory
from ..options import check_options

try:
    import jax
    import jaxlib
except ImportError as error:
    raise Unavailable(f"jax cannot be imported ({error}): pip install 'isthmus[tpu]'") from error

import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from .graph import CACHE, WHOLE, CompiledStep, fill
from .moe import ACTIVATIONS
from .ops import Ops, State
from .quant import DTYPES, KEPT, RANKS, Leaf, load_weight

OPS = ("embed", "linear", "rms_norm", "rope", "attention", "act_mul", "moe", "all_reduce", "sample")
CHOICES = {"backend": ("auto", "tpu", "cpu"), "kernels": ("auto", "mosaic", "interpret", "composed"),
           "compile_cache": ("on", "off")}
# Few sizes: each that is met is compiled. The largest number of tokens is a chunk beside a full batch of decode rows.
BUCKETS = {"tpu": Buckets(tokens=(16, 64, 256, 640), rows=(16, 128), pages=(64, 1024, 16384)),
           "cpu": Buckets(tokens=(8, 64, 576), rows=(8, 64), pages=(64, 1024, 16384))}
HOST_DEVICES = 8  # that a host processor counts as: ranks to try tensor parallelism with
PAGE_SIZES = {"tpu": (32, 16, 64, 128, 1, 4, 8), "cpu": (16, 1, 4, 8, 32, 64, 128)}


class Platform:
    """All ranks, in this process. Options: `backend` (auto, tpu, cpu), `kernels` (auto, mosaic, interpret, composed),
    `compile_cache` (on, off)."""

    interface_version = INTERFACE_VERSION

    def __init__(self, options: Mapping[str, str]) -> None:
        self.options = dict(options)
        self._mesh: Mesh | None = None
        self._mode = "composed"
        self._keep = True

    def probe(self, rank: int = 0, world: int = 1) -> Manifest:
        check_options("tpu", self.options, tuple(CHOICES))
        chosen = {name: self.options.get(name, values[0]) for name, values in CHOICES.items()}
        for name, value in chosen.items():
            if value not in CHOICES[name]:
                raise Unavailable(f"{name}={value!r}: one of {', '.join(CHOICES[name])} is needed")
        if rank != 0:
            raise Unavailable(f"--platform=tpu runs all ranks in one process, as rank 0; rank {rank} was asked for")
        devices = find_devices(chosen["backend"], world)
        kind = devices[0].platform
        self._mesh = Mesh(np.array(devices[:world]), (RANKS,))
        self._mode = chosen["kernels"] if chosen["kernels"] != "auto" else "mosaic" if kind == "tpu" else "composed"
        self._keep = kind == "tpu" or chosen["kernels"] != "auto"
        if chosen["compile_cache"] == "on":
            keep_compiled_programs()
        total, free = self.memory()
        dtypes = ("bf16", "f32") if kind == "tpu" else ("f32", "bf16")
        return Manifest(
            name="tpu", device=f"{world} x {devices[0].device_kind}" if world > 1 else devices[0].device_kind,
            interface=INTERFACE_VERSION, compute_dtypes=dtypes, kv_dtypes=dtypes,
            formats=KEPT if self._keep else (),
            page_sizes=PAGE_SIZES[kind], buckets=BUCKETS[kind], memory_total=total, memory_free=free,
            features=frozenset(FEATURES) - {"kv_scales"}, determinism="T2", rank=20 if kind == "tpu" else 5,
            kv_share=0.85 if kind == "tpu" else 0.25, local_ranks=world,
            details={"jax": jax.__version__, "jaxlib": jaxlib.__version__, "backend": kind, "kernels": self._mode,
                     "processor": machine.machine()})

    def supports(self, op: str, **case: Any) -> str | None:
        if op == "expert_parallel":
            return "every expert is cut along its width over the devices"
        if op not in OPS and op not in FEATURES:
            return f"{op!r} is no op or feature of interface version {INTERFACE_VERSION}"
        if op == "kv_scales":
            return "K and V are not kept in 8-bit floats"
        dtype = case.get("dtype", "f32")
        if dtype not in DTYPES:
            return f"dtype {dtype}: the tpu platform computes in {' or '.join(DTYPES)}"
        if case.get("kind", "silu") not in ACTIVATIONS:
            return f"activation {case['kind']!r}; there are: {', '.join(ACTIVATIONS)}"
        name = case.get("format", "f32")
        if name not in CODECS:
            return f"format {name}: known are {', '.join(CODECS)}"
        if op == "linear" and name in KEPT and not self._keep:
            return "a host processor has no kernel for it, and would expand it in every step"
        return None

    def load(self, raws: Sequence[RawTensor], spec: WeightSpec, dtype: str) -> Leaf:
        return load_weight(raws, spec, dtype, self._ready(), self._keep)

    def describe(self, weight: Leaf) -> str:
        return str(weight)

    def alloc(self, spec: StateSpec, pages: int) -> State:
        if spec.dtype not in DTYPES:
            raise Unsupported(f"K and V in {spec.dtype!r}: the tpu platform keeps {' or '.join(DTYPES)}")
        mesh = self._ready()

        def zeros(shape: tuple[int, ...], dtype: Any, share: Any) -> jax.Array:
            return jnp.zeros(shape, dtype, device=NamedSharding(mesh, share))
        layers = tuple(zeros((pages, spec.page_size, mesh.size * 2 * layer.kv_heads * layer.head_dim),
                             DTYPES[spec.dtype], CACHE) for layer in spec.layers)
        return State(spec, layers, zeros((spec.seqs,), jnp.int32, WHOLE))

    def compile(self, forward: Callable[[Ops, Any, Batch], Any], weights: Any, bucket: Bucket | None) -> CompiledStep:
        return CompiledStep(forward, weights, self._ready(), self._mode)

    def copy_pages(self, state: State, src: Sequence[int], dst: Sequence[int]) -> State:
        source, target = fill(np.asarray(src, np.int32)), fill(np.asarray(dst, np.int32), NOWHERE)
        return State(state.spec, _copy(state.layers, source, target), state.last)

    def export_pages(self, state: State, pages: Sequence[int]) -> bytes:
        """K and V of these pages, layer after layer, each [pages, page_size, ranks, K or V, kv_heads, head_dim]."""
        parts = jax.device_get(_gather(state.layers, fill(np.asarray(pages, np.int32))))
        return b"".join(part[:len(pages)].tobytes() for part in parts)

    def import_pages(self, state: State, pages: Sequence[int], data: bytes) -> State:
        """Fill `pages` with what `export_pages` gave for as many. Raises `ValueError` for another number of bytes."""
        expected = len(pages) * state.spec.page_bytes() * self._ready().size
        if len(data) != expected:
            raise ValueError(f"{len(pages)} pages take {expected} bytes, not {len(data)}")
        target, parts, start = fill(np.asarray(pages, np.int32), NOWHERE), [], 0
        for cache in state.layers:
            shape = (len(pages), *cache.shape[1:])
            count = int(np.prod(shape))
            parts.append(fill(np.frombuffer(data, cache.dtype, count, start).reshape(shape)))
            start += count * cache.dtype.itemsize
        return State(state.spec, _scatter(state.layers, target, tuple(parts)), state.last)

    def memory(self) -> tuple[int, int]:
        """Bytes of one device: total and free. A host's memory is shared by its ranks."""
        mesh = self._ready()
        stats = [device.memory_stats() for device in mesh.devices]
        if all(stats):
            total = min(each["bytes_limit"] for each in stats)
            return total, total - max(each["bytes_in_use"] for each in stats)
        total, free = host_memory()
        return total // mesh.size, free // mesh.size

    def close(self) -> None:
        """Nothing is held beyond the arrays themselves."""
        self._mesh = None

    def _ready(self) -> Mesh:
        if self._mesh is None:
            raise Unavailable("the tpu platform was not probed yet: call probe() first")
        return self._mesh


NOWHERE = np.iinfo(np.int32).max  # a page that does not exist: writes to it are dropped


@jax.jit
def _gather(layers: tuple[jax.Array, ...], pages: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(cache[pages] for cache in layers)


def _scatter_pages(layers: tuple[jax.Array, ...], pages: jax.Array, parts: tuple[jax.Array, ...]) -> tuple:
    return tuple(cache.at[pages].set(part, mode="drop") for cache, part in zip(layers, parts, strict=True))


def _copy_pages(layers: tuple[jax.Array, ...], src: jax.Array, dst: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(cache.at[dst].set(cache[src], mode="drop") for cache in layers)


_copy = jax.jit(_copy_pages, donate_argnums=0)
_scatter = jax.jit(_scatter_pages, donate_argnums=0)


def find_devices(backend: str, world: int) -> list[jax.Device]:
    """Local devices of a backend, at least `world`. Raises `Unavailable` with the way out."""
    if "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        try:  # a host processor counts as one device unless more are asked for before jax starts
            jax.config.update("jax_num_cpu_devices", max(world, HOST_DEVICES))
        except RuntimeError:
            pass  # it has started, with the devices that it has
    wanted = backend
    if backend == "auto":
        try:
            wanted = "tpu" if jax.default_backend() == "tpu" else "cpu"
        except RuntimeError as error:
            raise Unavailable(f"jax finds no device: {error}") from error
    try:
        devices = jax.local_devices(backend=wanted)
    except RuntimeError as error:
        hint = "; pip install 'jax[tpu]' brings libtpu" * (wanted == "tpu")
        raise Unavailable(f"jax has no {wanted} device: {error}{hint}") from error
    if len(devices) < world:
        force = ("; XLA_FLAGS=--xla_force_host_platform_device_count="
                 f"{world} makes a host processor count as {world}") * (wanted == "cpu")
        raise Unavailable(f"{world} ranks need {world} {wanted} devices, jax finds {len(devices)}{force}")
    return devices


def keep_compiled_programs() -> None:
    """Let jax keep what it compiled in the user's cache folder, unless the user chose a folder for it."""
    if jax.config.jax_compilation_cache_dir is None:
        chosen = os.environ.get("ISTHMUS_CACHE") or os.environ.get("XDG_CACHE_HOME")
        folder = Path(chosen).expanduser() if chosen else Path.home() / ".cache"
        folder = folder if os.environ.get("ISTHMUS_CACHE") else folder / "isthmus"
        jax.config.update("jax_compilation_cache_dir", str(folder / "jax"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
