"""A step compiled for a TPU that is not there: XLA and Mosaic come with libtpu and need no device.

What fails on the chip at compile time fails here: a kernel that overflows VMEM or SMEM, an unaligned tile, a program
that does not fit HBM. Nothing is run.
"""
from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ...core.platform import Batch, Bucket, Sampling, StateSpec, Unavailable
from .graph import CACHE, WHOLE, CompiledStep, pack_batch
from .quant import DTYPES, RANKS


@dataclass(frozen=True)
class Memory:
    """What the compiler says about one program, for one device. Sizes in bytes, time in seconds.

    kernels: calls of Pallas kernels in the program.
    """

    arguments: int
    temporary: int
    code: int
    kernels: int
    seconds: float


def topology_mesh(name: str, world: int) -> Mesh:
    """A mesh of the first `world` devices of a topology such as "v5e:2x2". Raises `Unavailable` without libtpu."""
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # else two compiling processes exclude each other
    try:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=name).devices
    except Exception as error:  # a missing or other libtpu raises many kinds
        raise Unavailable(f"libtpu cannot describe {name} ({str(error).splitlines()[0]}): pip install 'jax[tpu]' "
                          "flatbuffers") from error
    if len(devices) < world:
        raise Unavailable(f"{name} has {len(devices)} devices, {world} are needed")
    return Mesh(np.array(devices[:world]), (RANKS,))


def compile_step(forward: Callable[..., Any], weights: Any, spec: StateSpec, pages: int, bucket: Bucket,
                 mesh: Mesh) -> Memory:
    """Compile the model's program of a step for the mesh.

    weights: loaded by a platform on any backend with as many ranks, with `kernels=mosaic` so that they are in the
    form that a TPU keeps; only their shapes and shares are used. spec, pages: of the State, one rank's view.
    """
    def placed(shape: tuple[int, ...], dtype: Any, share: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, share))

    shapes = jax.tree.map(lambda x: placed(x.shape, x.dtype, x.sharding.spec), weights)
    layers = tuple(placed((pages, spec.page_size, mesh.size * 2 * layer.kv_heads * layer.head_dim),
                          DTYPES[spec.dtype], CACHE) for layer in spec.layers)
    packed, layout = pack_batch(empty_batch(bucket))
    step = CompiledStep(forward, shapes, mesh, "mosaic")
    began = time.monotonic()
    compiled = step.program.lower(step.weights, layers, placed((spec.seqs,), jnp.int32, WHOLE),
                                  placed(packed.shape, packed.dtype, WHOLE), layout).compile()
    seconds = time.monotonic() - began
    memory = compiled.memory_analysis()
    return Memory(memory.argument_size_in_bytes, memory.temp_size_in_bytes, memory.generated_code_size_in_bytes,
                  compiled.as_text().count('custom_call_target="tpu_custom_call"'), seconds)


def empty_batch(bucket: Bucket) -> Batch:
    """Zeros in the bucket's sizes."""
    sizes = {"starts": bucket.rows + 1, "logit_rows": bucket.logits, "targets": bucket.logits}
    sizes |= dict.fromkeys(("tokens", "positions", "slots", "rows"), bucket.tokens)
    sizes |= dict.fromkeys(("seqs", "lengths"), bucket.rows)
    arrays = {name: np.zeros(size, np.int32) for name, size in sizes.items()}
    return Batch(**arrays, pages=np.zeros((bucket.rows, bucket.pages), np.int32), sampling=Sampling())
