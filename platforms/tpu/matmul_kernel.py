"""Pallas kernel: rows of x times the matrix of their tile's expert, with weights dense or expanded from codes in VMEM.

Rows come in tiles of one expert each, so the kernel needs no masks: a plain product is one expert, a sparse layer
sorts its rows by expert and fills each expert's up to whole tiles. Grid: outputs, tiles, inputs; the weight's block
stays in VMEM while tiles of one expert follow each other.
"""
from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .quant import Experts, Groups, precision

OUTPUTS = 256  # outputs of a block
INPUTS = 1024  # inputs of a block where the input axis is longer than `WHOLE`
WHOLE = 2048   # longest input axis that one block takes
LANES = 128


def refusal(weight: Experts | Groups) -> str | None:
    """Why the kernel cannot take a weight on a TPU; None = it can."""
    inputs = weight.shape[1]
    if inputs % LANES and inputs > WHOLE:
        return f"{inputs} inputs are no multiple of {LANES}"
    if inputs > WHOLE and inputs % INPUTS:
        return f"{inputs} inputs are more than {WHOLE} and no multiple of {INPUTS}"
    if isinstance(weight, Groups) and weight.group % 32:
        return f"groups of {weight.group} are no multiple of 32"
    return None


def grouped_matmul(x: jax.Array, weight: Experts | Groups, experts: jax.Array, tiles: jax.Array | int,
                   interpret: bool = False) -> jax.Array:
    """x [n * rows, in], n tiles; experts [n] int32, the expert of each tile -> [n * rows, out] float32.

    tiles: how many of the n are computed; what lies after them is undefined.
    """
    _, inputs, outputs = weight.shape
    rows = len(x) // len(experts)
    wide = min(OUTPUTS, outputs)
    deep = inputs if inputs <= WHOLE else INPUTS
    arrays, specs, decode = _operands(weight, deep, wide)
    grid = (pl.cdiv(outputs, wide), tiles, inputs // deep)
    return pl.pallas_call(
        partial(_kernel, decode=decode, last=inputs // deep - 1),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=grid,
            in_specs=[pl.BlockSpec((rows, deep), lambda o, t, i, experts: (t, i)), *specs],
            out_specs=pl.BlockSpec((rows, wide), lambda o, t, i, experts: (t, o)),
            scratch_shapes=[pltpu.VMEM((rows, wide), jnp.float32)]),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
        out_shape=jax.ShapeDtypeStruct((len(x), outputs), jnp.float32), interpret=interpret,
    )(experts, x, *arrays)


def _operands(weight: Experts | Groups, deep: int, wide: int) -> tuple[list[jax.Array], list[pl.BlockSpec], Callable]:
    """The weight's arrays, their blocks, and what makes [deep, wide] values of the blocks."""
    def block(depth: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, depth, wide), lambda o, t, i, experts: (experts[t], i, o))
    if isinstance(weight, Experts):
        return [weight.values], [block(deep)], lambda dtype, values: values[0].astype(dtype)
    groups = deep // weight.group
    specs = [block(deep // 2 if weight.bits == 4 else deep), block(groups), block(groups)]
    return [weight.codes, weight.scale, weight.minimum], specs, partial(_decode, weight.bits, weight.group)


def _decode(bits: int, group: int, dtype: jnp.dtype, codes: jax.Array, scale: jax.Array,
            minimum: jax.Array) -> jax.Array:
    """Blocks of `Groups` -> values [deep, wide]."""
    wide = codes.shape[-1]
    whole = codes[0].astype(jnp.int32)
    if bits == 4:
        pairs = whole.reshape(-1, 1, group, wide)
        whole = jnp.concatenate([pairs & 15, pairs >> 4], 1) - 8
    values = whole.reshape(-1, group, wide).astype(jnp.float32)
    scale, minimum = (part[0].astype(jnp.float32)[:, None] for part in (scale, minimum))
    return (values * scale + minimum).reshape(-1, wide).astype(dtype)


def _kernel(experts, x, *refs, decode: Callable, last: int) -> None:
    *weight, out, total = refs
    step = pl.program_id(2)

    @pl.when(step == 0)
    def _() -> None:
        total[...] = jnp.zeros_like(total)

    values = decode(x.dtype, *(ref[...] for ref in weight))
    total[...] += lax.dot_general(x[...], values, (((1,), (0,)), ((), ())), precision=precision(x.dtype),
                                  preferred_element_type=jnp.float32)

    @pl.when(step == last)
    def _() -> None:
        out[...] = total[...]
