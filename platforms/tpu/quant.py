"""Weights: vectors, dense matrices, and matrices kept as the checkpoint's codes in groups.

Every leaf is a pytree of arrays that lie on the mesh of ranks, already cut: inside a step a rank sees its share. Groups
and experts have their input axis before the output axis, so that a group's scale is one vector along the lanes.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ...core.platform import RawTensor, Unsupported, WeightSpec
from ..expand import AFFINE, CODECS, PACKED, affine, expand, group_size
from ..experts import by_expert

RANKS = "ranks"  # the mesh's one axis
DTYPES = {"f32": jnp.dtype("float32"), "bf16": jnp.dtype("bfloat16")}
# Format -> bits of a code: up to 4 are kept two to a byte, up to 8 one to a byte.
BITS = {"q4_0": 4, "q4_1": 4, "q5_0": 5, "q5_1": 5, "q8_0": 8} | {name: bits for name, (bits, _) in PACKED.items()}
KEPT = tuple(name for name in AFFINE if name in BITS)


def _leaf(cls: type) -> type:
    """A frozen dataclass that is a pytree; fields marked static belong to its structure."""
    return jax.tree_util.register_dataclass(dataclass(frozen=True)(cls))


def _static() -> Any:
    return field(metadata={"static": True})


@_leaf
class Vector:
    """A norm's or bias's values in float32."""

    values: jax.Array

    def __str__(self) -> str:
        return "float32"


@_leaf
class Dense:
    """[out, in] values. A table of the vocabulary is looked up by row too, and its products stay in float32."""

    values: jax.Array
    table: bool = _static()

    def product(self, x: jax.Array) -> jax.Array:
        """[T, in] -> [T, out], in float32."""
        return lax.dot_general(x, self.values, (((1,), (1,)), ((), ())), precision=precision(x.dtype),
                               preferred_element_type=jnp.float32)

    def rows(self, ids: jax.Array) -> jax.Array:
        """[n] row numbers -> [n, in]."""
        return jnp.take(self.values, ids, axis=0, mode="clip")

    def __str__(self) -> str:
        return str(self.values.dtype)


@_leaf
class Experts:
    """[experts, in, out] values."""

    values: jax.Array

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.values.shape

    def expanded(self, dtype: jnp.dtype) -> jax.Array:
        return self.values

    def __str__(self) -> str:
        return f"{self.shape[0]} experts, {self.values.dtype}"


@_leaf
class Groups:
    """w = scale * code + minimum, with one scale and minimum for each group along the input axis.

    codes:   bits 8: int8 [experts, in, out]. bits 4: uint8 [experts, in / 2, out]; of every two groups, the first is in
             the low halves and the second in the high halves, each code plus 8.
    scale, minimum: [experts, in / group, out] in the compute dtype. Codes lie around zero, so that a minimum that
             stands for a zero point is small or none, and loses little when it is rounded.
    A plain matrix is one expert.
    """

    codes: jax.Array
    scale: jax.Array
    minimum: jax.Array
    bits: int = _static()
    group: int = _static()

    @property
    def shape(self) -> tuple[int, int, int]:
        """Experts, inputs, outputs."""
        return self.codes.shape[0], self.scale.shape[1] * self.group, self.codes.shape[2]

    def expanded(self, dtype: jnp.dtype) -> jax.Array:
        """Values [experts, in, out]."""
        experts, inputs, outputs = self.shape
        codes = self.codes
        if self.bits == 4:
            pairs = codes.reshape(experts, -1, 1, self.group, outputs)
            codes = jnp.concatenate([pairs & 15, pairs >> 4], 2).astype(jnp.int8) - 8
        codes = codes.reshape(experts, -1, self.group, outputs).astype(jnp.float32)
        values = codes * self.scale[:, :, None].astype(jnp.float32) + self.minimum[:, :, None].astype(jnp.float32)
        return values.reshape(experts, inputs, outputs).astype(dtype)

    def __str__(self) -> str:
        experts = f"{self.shape[0]} experts, " * (self.shape[0] > 1)
        return f"{experts}int{self.bits} groups of {self.group}"


Leaf = Vector | Dense | Experts | Groups


def precision(dtype: jnp.dtype) -> lax.Precision:
    """Matrix units multiply float32 in three digits of bf16 unless they are told to take all."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT


# Loading.

def load_weight(raws: Sequence[RawTensor], spec: WeightSpec, dtype: str, mesh: Mesh, keep: bool = True) -> Leaf:
    """The leaf of one weight, its parts stacked along the output axis. Copies: the bytes may go away afterwards.

    keep: formats of `KEPT` stay codes.
    """
    if dtype not in DTYPES:
        raise Unsupported(f"compute dtype {dtype!r}: the tpu platform computes in {' or '.join(DTYPES)}")
    unknown = sorted({raw.dtype for raw in raws} - CODECS.keys())
    if unknown:
        raise Unsupported(f"{spec.names[0]}: format {', '.join(unknown)} is unknown; known: {', '.join(CODECS)}")
    if spec.role in ("norm", "bias"):
        return Vector(_vector([expand(raw) for raw in raws], spec, mesh))
    if spec.role == "embed":
        if spec.cut is not None:
            raise Unsupported(f"{spec.names[0]}: an embedding that is cut among ranks")
        return Dense(_place([expand(raw).astype(DTYPES[dtype]) for raw in raws], None, 0, mesh), table=True)
    experts = by_expert(raws, spec) if spec.role == "experts" else [list(raws)]
    shared = _shared_group(experts[0], spec, mesh.size) if keep else None
    if shared:
        return _groups(experts, spec, DTYPES[dtype], mesh, *shared)
    if spec.role == "experts":
        parts = [np.stack([expand(expert[i]).T for expert in experts]).astype(DTYPES[dtype])
                 for i in range(len(experts[0]))]
        return Experts(_place(parts, _swapped(spec.cut), 2, mesh))
    return Dense(_place([expand(raw).astype(DTYPES[dtype]) for raw in raws], spec.cut, 0, mesh), table=False)


def _shared_group(parts: Sequence[RawTensor], spec: WeightSpec, world: int) -> tuple[int, int] | None:
    """Bits and group that all parts can be kept with in one leaf, or None: then they are expanded."""
    if not all(part.dtype in BITS for part in parts):
        return None
    groups = {group_size(part.dtype) for part in parts}
    group = groups.pop()
    per_rank = parts[0].shape[-1] // (world if spec.cut == 1 else 1)
    if groups or per_rank % group:
        return None
    narrow = max(BITS[part.dtype] for part in parts) <= 4 and per_rank // group % 2 == 0
    return (4 if narrow else 8), group


def _groups(experts: Sequence[Sequence[RawTensor]], spec: WeightSpec, dtype: jnp.dtype, mesh: Mesh, bits: int,
            group: int) -> Groups:
    """Parts are [experts, in, out] here: codes around zero, then packed."""
    columns: list[list[np.ndarray]] = [[], [], []]
    for i in range(len(experts[0])):
        made = [_centred(expert[i]) for expert in experts]
        for column, arrays in zip(columns, zip(*made, strict=True), strict=True):
            column.append(np.stack([array.T for array in arrays]))
    codes, scale, minimum = columns
    if bits == 4:
        codes = [_packed(part, group) for part in codes]
    cut = _swapped(spec.cut)
    return Groups(_place(codes, cut, 2, mesh), *(_place([part.astype(dtype) for part in parts], cut, 2, mesh)
                                                 for parts in (scale, minimum)), bits, group)


def _centred(raw: RawTensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The affine view with int8 codes around zero: w = scale * (code - middle) + (minimum + middle * scale)."""
    codes, scale, minimum = affine(raw)
    if codes.dtype == np.int8:
        return codes, scale, minimum
    middle = 1 << (BITS[raw.dtype] - 1)
    return (codes.astype(np.int16) - middle).astype(np.int8), scale, minimum + np.float32(middle) * scale


def _packed(codes: np.ndarray, group: int) -> np.ndarray:
    """int8 [experts, in, out] in -8 .. 7 -> uint8 [experts, in / 2, out]."""
    pairs = (codes + np.int8(8)).view(np.uint8).reshape(len(codes), -1, 2, group, codes.shape[2])
    return (pairs[:, :, 0] | pairs[:, :, 1] << np.uint8(4)).reshape(len(codes), -1, codes.shape[2])


def _swapped(cut: int | None) -> int | None:
    """`WeightSpec.cut`, of [out, in], as an axis of [experts, in, out]."""
    return None if cut is None else 2 - cut


def _vector(parts: list[np.ndarray], spec: WeightSpec, mesh: Mesh) -> jax.Array:
    if spec.cut != 1:
        return _place(parts, spec.cut, 0, mesh)
    values = np.concatenate(parts)  # rank 0 alone adds it: the ranks' results are summed
    return _place([np.concatenate([values, np.zeros((mesh.size - 1) * len(values), np.float32)])], 0, 0, mesh)


def _place(parts: Sequence[np.ndarray], cut: int | None, axis: int, mesh: Mesh) -> jax.Array:
    """Parts stacked along `axis` on the devices, cut along `cut`: each part by itself, so that a rank has a share of
    every part, in order. Raises `Unsupported` where a part cannot be shared evenly."""
    world = mesh.size
    uneven = [part.shape for part in parts if cut is not None and part.shape[cut] % world]
    if uneven:
        raise Unsupported(f"a weight of shape {uneven[0]} cannot be cut into {world} along axis {cut}")
    if cut == axis and len(parts) > 1:
        pieces = [np.split(part, world, axis) for part in parts]
        parts = [piece[rank] for rank in range(world) for piece in pieces]
    whole = parts[0] if len(parts) == 1 else np.concatenate(parts, axis)
    names = [None] * whole.ndim
    if cut is not None:
        names[cut] = RANKS
    return jax.device_put(np.ascontiguousarray(whole), NamedSharding(mesh, PartitionSpec(*names)))


def abstract(leaf: Leaf) -> Leaf:
    """The same leaf without values: shapes and shares only, for compiling without memory."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), leaf)
