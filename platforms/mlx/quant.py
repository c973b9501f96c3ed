"""Weights: vectors, dense matrices, and matrices whose codes stay in affine groups for MLX's quantized kernels.

MLX packs codes of `bits` bits, the lowest first, into uint32 words along the input axis, with a scale and a bias for
each group: w = scale * code + bias. Block formats whose groups have 32 weights are the same thing in another order, so
they are repacked without loss: Q4_0 is (d, -8d), Q4_1 (d, m), Q5_0 (d, -16d), Q5_1 (d, m), Q4_K and Q5_K (d * s,
-dmin * m) of each group, Q8_0 (d, -128d) with codes moved up by 128. So are AWQ, GPTQ and compressed-tensors in groups
that are whole runs of 32 weights, as (scale, -zero * scale). Layouts: the GGUF specification, `core/quant/formats.py`,
and the documentation of `mlx.core.quantize`.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from ...core.platform import RawTensor, Unsupported, WeightSpec
from ..expand import CODECS, INTEGERS, PACKED, affine, expand, group_of
from ..experts import by_expert

DTYPES = {"f32": mx.float32, "bf16": mx.bfloat16, "f16": mx.float16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
# Format -> bits of a code, in groups of 32.
BLOCKS = {"q4_0": 4, "q4_1": 4, "q4_k": 4, "q5_0": 5, "q5_1": 5, "q5_k": 5, "q8_0": 8}
KEPT = (*BLOCKS, *PACKED, *INTEGERS)
GROUPS = (128, 64, 32)  # that MLX's kernels take
MANY = 64  # tokens from which a host processor multiplies expanded values faster, measured
SHARED = 1 << 19  # bytes of a matrix from which on its outputs are shared out among streams


@dataclass(frozen=True)
class Device:
    """What decides between kernels. metal: an Apple GPU, with its own kernels; otherwise compositions run.

    streams: of a host processor, where each stream is one thread; large products are shared out among them.
    """

    metal: bool
    streams: tuple[mx.Stream, ...] = ()


@dataclass(frozen=True)
class Vector:
    """A norm's or a bias's values, in the compute dtype."""

    values: mx.array

    def __str__(self) -> str:
        return NAMES[self.values.dtype]


@dataclass(frozen=True)
class Dense:
    """[out, in] values. `transposed`: stored as [in, out], which float32 products on a host processor read faster."""

    values: mx.array
    transposed: bool = False

    def product(self, x: mx.array) -> mx.array:
        """[T, in] -> [T, out]."""
        return x @ (self.values if self.transposed else self.values.T)

    def rows(self, ids: mx.array) -> mx.array:
        """[n] row numbers -> [n, in]. Only of a matrix that is not transposed."""
        return mx.take(self.values, ids, axis=0)

    def gathered(self, x: mx.array, experts: mx.array, in_order: bool) -> mx.array:
        """values [experts, out, in], x [n, 1, in], experts [n] -> [n, 1, out]."""
        return mx.gather_mm(x.astype(self.values.dtype), self.values.swapaxes(-1, -2), rhs_indices=experts,
                            sorted_indices=in_order).astype(x.dtype)

    def __str__(self) -> str:
        return NAMES[self.values.dtype]


@dataclass(frozen=True)
class Affine:
    """Codes in groups. packed: [.., out, in * bits / 32] uint32; scales, biases: [.., out, in / group] in one dtype."""

    packed: mx.array
    scales: mx.array
    biases: mx.array
    group: int
    bits: int
    dtype: mx.Dtype  # of what goes in and comes out
    many: int | None = None  # tokens from which the product of expanded values is faster

    def product(self, x: mx.array) -> mx.array:
        """[T, in] -> [T, out], computed in the scales' dtype."""
        if self.many is not None and len(x) >= self.many:
            values = mx.dequantize(self.packed, self.scales, self.biases, group_size=self.group, bits=self.bits)
            return (x.astype(values.dtype) @ mx.contiguous(values.T)).astype(x.dtype)
        return mx.quantized_matmul(x.astype(self.scales.dtype), self.packed, self.scales, self.biases, transpose=True,
                                   group_size=self.group, bits=self.bits).astype(x.dtype)

    def rows(self, ids: mx.array) -> mx.array:
        """[n] row numbers -> [n, in] in the compute dtype."""
        parts = (mx.take(part, ids, axis=0) for part in (self.packed, self.scales, self.biases))
        return mx.dequantize(*parts, group_size=self.group, bits=self.bits).astype(self.dtype)

    def gathered(self, x: mx.array, experts: mx.array, in_order: bool) -> mx.array:
        """As of `Dense`."""
        return mx.gather_qmm(x.astype(self.scales.dtype), self.packed, self.scales, self.biases, rhs_indices=experts,
                             transpose=True, group_size=self.group, bits=self.bits,
                             sorted_indices=in_order).astype(x.dtype)

    def __str__(self) -> str:
        return f"int{self.bits} groups of {self.group}"


@dataclass(frozen=True)
class Shared:
    """A matrix whose outputs are computed in shares, one on each stream. `whole` is for lookups by row."""

    whole: Dense | Affine
    shares: tuple[Dense | Affine, ...]
    streams: tuple[mx.Stream, ...]

    def product(self, x: mx.array) -> mx.array:
        """[T, in] -> [T, out]."""
        outputs = []
        for share, stream in zip(self.shares, self.streams, strict=True):
            with mx.stream(stream):
                outputs.append(share.product(x))
        return mx.concatenate(outputs, axis=-1)

    def rows(self, ids: mx.array) -> mx.array:
        """[n] row numbers -> [n, in]."""
        return self.whole.rows(ids)

    def __str__(self) -> str:
        return str(self.whole)


@dataclass(frozen=True)
class Experts:
    """One matrix for each expert, in one array with the expert first."""

    matrices: Dense | Affine
    count: int

    def __str__(self) -> str:
        return f"{self.count} experts, {self.matrices}"


Matrix = Dense | Affine | Shared
Leaf = Vector | Matrix | Experts


def arrays(leaf: Leaf) -> list[mx.array]:
    """What a leaf holds on the device."""
    inner = leaf.matrices if isinstance(leaf, Experts) else leaf
    if isinstance(inner, Shared):
        return [array for part in (inner.whole, *inner.shares) for array in arrays(part)]
    return [value for value in vars(inner).values() if isinstance(value, mx.array)]


def load_weight(raws: Sequence[RawTensor], spec: WeightSpec, dtype: str, device: Device) -> Leaf:
    """The leaf of one weight, its parts stacked along the output axis. Copies: the bytes may go away afterwards."""
    if dtype not in DTYPES:
        raise Unsupported(f"compute dtype {dtype!r}: the mlx platform computes in {' or '.join(DTYPES)}")
    unknown = sorted({raw.dtype for raw in raws} - CODECS.keys())
    if unknown:
        raise Unsupported(f"{spec.names[0]}: format {', '.join(unknown)} is unknown; known: {', '.join(CODECS)}")
    if spec.role in ("norm", "bias"):
        leaf: Leaf = Vector(mx.array(np.concatenate([expand(raw) for raw in raws])).astype(DTYPES[dtype]))
    elif spec.role == "experts":
        each = by_expert(raws, spec)
        leaf = Experts(_matrix(each, dtype, device, stacked=True), len(each))
    else:
        leaf = _shared(_matrix([raws], dtype, device), spec, device)
    mx.eval(arrays(leaf))
    return leaf


def _shared(leaf: Dense | Affine, spec: WeightSpec, device: Device) -> Matrix:
    """The form in which the device multiplies fastest. Shares are views of the whole."""
    if isinstance(leaf, Dense) and spec.role == "linear" and leaf.values.dtype == mx.float32 and not device.metal:
        leaf = Dense(mx.contiguous(leaf.values.T), True)
    held, axis = arrays(leaf), int(isinstance(leaf, Dense) and leaf.transposed)
    ways = len(device.streams)
    if ways < 2 or sum(array.nbytes for array in held) < SHARED or held[0].shape[axis] < ways:
        return leaf
    mx.eval(held)
    split = [mx.split(array, [held[0].shape[axis] * way // ways for way in range(1, ways)], axis) for array in held]
    named = [name for name, value in vars(leaf).items() if isinstance(value, mx.array)]
    shares = tuple(replace(leaf, **dict(zip(named, parts, strict=True))) for parts in zip(*split, strict=True))
    return Shared(leaf, shares, device.streams)


def _matrix(experts: Sequence[Sequence[RawTensor]], dtype: str, device: Device,
            stacked: bool = False) -> Dense | Affine:
    """Parts of each expert -> [experts, out, in], or [out, in] of the only one where they are not stacked.

    Kept as codes when all parts have the same bits and groups, so that one kernel call serves them.
    """
    kinds = {_kind(raw) for parts in experts for raw in parts}
    if len(kinds) == 1 and None not in kinds:
        (bits, group), = kinds
        stored = {_scale_dtype(raw) for parts in experts for raw in parts}
        # Scales in another dtype than the input's would be converted in every step; float32 holds every one exactly.
        # A host processor multiplies float32 many times faster than the narrow dtypes.
        scale = DTYPES[dtype] if stored == {dtype} and device.metal else mx.float32
        joined = [tuple(map(np.concatenate, zip(*map(_packed, parts), strict=True))) for parts in experts]
        packed, scales, biases = map(np.stack, zip(*joined, strict=True)) if stacked else joined[0]
        if scale == mx.float16 and np.abs(biases).max() > np.finfo(np.float16).max:
            scale = mx.float32
        return Affine(mx.array(packed), mx.array(scales).astype(scale), mx.array(biases).astype(scale), group, bits,
                      DTYPES[dtype], None if device.metal else MANY)
    # The gathered product of MLX's CPU build takes float32 only.
    wide = mx.float32 if stacked and not device.metal else DTYPES[dtype]
    rows = [mx.concatenate([mx.array(expand(raw)).astype(wide) for raw in parts]) for parts in experts]
    return Dense(mx.stack(rows) if stacked else rows[0])


def _kind(raw: RawTensor) -> tuple[int, int] | None:
    """Bits and group that a tensor is kept with; None: it is expanded."""
    if raw.dtype in INTEGERS:
        group = next((size for size in GROUPS if group_of(raw) % size == 0), None)
        return group and (INTEGERS[raw.dtype], group)
    return (BLOCKS[raw.dtype], 32) if raw.dtype in BLOCKS else PACKED.get(raw.dtype)


def _scale_dtype(raw: RawTensor) -> str:
    """The narrowest dtype that holds a kept tensor's scales and biases as they are."""
    if raw.dtype in PACKED:
        return raw.extra[0].dtype
    return "f32" if raw.dtype in ("q4_k", "q5_k", *INTEGERS) else "f16"


def _packed(raw: RawTensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Words [out, in * bits / 32] uint32, scales and biases [out, in / group] float32 of a kept format."""
    if raw.dtype in PACKED:
        words = np.frombuffer(raw.data, "<u4").reshape(*raw.shape[:-1], -1)
        scale, bias = map(expand, raw.extra)
        return words, scale, bias
    codes, scale, bias = affine(raw)
    if codes.dtype == np.int8:
        codes, bias = codes.view(np.uint8) ^ np.uint8(128), bias - np.float32(128) * scale
    bits, group = _kind(raw)
    scale, bias = (np.repeat(part, codes.shape[-1] // part.shape[-1] // group, axis=-1) for part in (scale, bias))
    return pack(codes, bits), scale, bias


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes [out, in] uint8 -> words [out, in * bits / 32] uint32, the lowest bits first."""
    if bits == 8:
        stream = np.ascontiguousarray(codes)
    elif bits == 4:
        stream = codes[:, 0::2] | codes[:, 1::2] << np.uint8(4)
    else:
        single = np.unpackbits(codes[:, :, None], axis=2, count=bits, bitorder="little")
        stream = np.packbits(single.reshape(len(codes), -1), axis=1, bitorder="little")
    return stream.view("<u4")
