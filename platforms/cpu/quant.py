"""Weights: vectors, dense matrices, and matrices that keep the checkpoint's codes in groups."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch.nn import functional as F

from ...core.platform import RawTensor, Unsupported, WeightSpec
from ..expand import CODECS, INTEGERS, PACKED, affine, expand, group_of
from ..experts import by_expert
from .compiled.step import Runner
from .compiled.weights import Packed, pack_codes, pack_values

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
BITS = {"q4_0": 4, "q4_1": 4, "q4_k": 4, "q5_0": 5, "q5_1": 5, "q5_k": 5, "q8_0": 8,
        **{name: bits for name, (bits, _) in PACKED.items()}, **INTEGERS}
KEPT = tuple(BITS)
GROUPS = (256, 128, 64, 32)  # that torch's kernel takes
TOKENS = 32      # tokens that oneDNN chooses its order of a dense matrix for
MANY = 256       # tokens from which expanding int4 weights pays, measured with AVX-512
PIECE = 1 << 21  # weights expanded at once: bounds the buffer, and fits the cache
LANES = 64       # outputs in a block of torch's int4 layout with AVX-512
CHAIN = 1024     # inputs that oneDNN sums one after the other, at any number of tokens

_pack_int4 = torch.ops.aten._convert_weight_to_int4pack_for_cpu.default
_int4_product = torch.ops.aten._weight_int4pack_mm_for_cpu.default
_transposed_convolution = torch.ops.mkldnn._convolution_transpose_pointwise.default


@dataclass(frozen=True)
class Vector:
    """A norm's or bias's values in float32, and in the compute dtype."""

    values: torch.Tensor
    cast: torch.Tensor

    def __str__(self) -> str:
        return "float32"


class Dense:
    """[out, in] values, in oneDNN's own order, which is read faster than rows are; in rows where there is no oneDNN."""

    def __init__(self, values: torch.Tensor) -> None:
        self.dtype = values.dtype
        self.blocked = torch.backends.mkldnn.is_available() and (
            values.dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported())
        self.weight = torch.ops.mkldnn._reorder_linear_weight(values, TOKENS) if self.blocked else values

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[T, in] -> [T, out]."""
        if not self.blocked:
            return F.linear(x, self.weight, bias)
        if len(x) == 1 and x.shape[1] > CHAIN:  # a row alone would be summed in another order than among others
            return self.product(x.expand(2, -1), bias)[:1]
        return torch.ops.mkldnn._linear_pointwise.default(x, self.weight, bias, "none", [], "")

    def __str__(self) -> str:
        return str(self.dtype).removeprefix("torch.")


class Table:
    """[vocabulary, in] values for look-up by row; a tied head asks for products, and then has them in blocked order."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values
        self.head: Dense | None = None

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """[n] row numbers -> [n, in]."""
        return self.values[ids]

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if self.head is None:
            self.head = Dense(self.values)
        return self.head.product(x, bias)

    def __str__(self) -> str:
        return str(self.values.dtype).removeprefix("torch.")


def unpack_int4(blocks: torch.Tensor) -> torch.Tensor:
    """[in, outputs] digits out of torch's blocks [outputs / 64, in * 32]: 64 outputs, two to a byte."""
    halves = blocks.view(len(blocks), -1, LANES // 2)
    return torch.cat((halves & 15, halves >> 4), -1).transpose(0, 1).reshape(halves.shape[1], -1)


@cache
def layout_is_known() -> bool:
    """Does `unpack_int4` undo torch's packing here? The layout is torch's own affair and differs by processor."""
    digits = torch.arange(2 * LANES * 32, dtype=torch.int32).mul_(7).bitwise_right_shift_(3).bitwise_and_(15)
    digits = digits.view(2 * LANES, 32)
    return torch.equal(unpack_int4(_pack_int4(digits, 1).view(2, -1)), digits.T)


def ordered_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [parts, T, in / parts] and weight [parts, in / parts, out], whose last part comes first -> [T, out], float32.

    A matrix product sums in an order of its own. oneDNN's convolution over the parts keeps every sum in a register from
    the first input to the last, as torch's int4 kernel does.
    """
    parts, tokens, _ = x.shape
    out = _transposed_convolution(x[None].permute(0, 3, 1, 2), weight.permute(1, 2, 0)[..., None], None,
                                  (parts - 1, 0), (0, 0), (1, 1), (1, 1), 1, "none", [], "")
    return out.permute(0, 2, 3, 1).reshape(tokens, -1)


class Int4Groups:
    """w = scale * code + minimum with 4-bit digits of codes in torch's int4 layout, one scale and zero per group.

    torch computes scale * (digit - 8) + zero with scale and zero in bf16 and sums in float32, one input after another.
    Codes of more than 4 bits are two columns of the same kernel, code = 16 * high + low. The kernel is made for few
    tokens; for `MANY` and more the weights are expanded piece by piece, and summed in the same order, so that a row's
    bits do not depend on the others. Only where the processor has a matrix unit, speed goes first.
    """

    def __init__(self, codes: np.ndarray, scale: np.ndarray, minimum: np.ndarray, bits: int) -> None:
        self.digits, self.outputs, self.group = (bits + 3) // 4, len(codes), codes.shape[1] // scale.shape[1]
        spare = -self.outputs % 16  # torch's packing wants whole blocks of outputs
        codes, scale, minimum = (np.pad(part, ((0, spare), (0, 0))) for part in (codes, scale, minimum))
        if codes.dtype == np.uint8:  # around 0, where the zero is small and its rounding too
            middle = 1 << (bits - 1)
            codes, minimum = (codes - np.uint8(middle)).view(np.int8), minimum + middle * scale
        columns = [(codes + 8, scale, minimum)] if self.digits == 1 else \
            [((codes >> 4) + 8, 16 * scale, minimum), (codes & 15, scale, 8 * scale)]
        stacked, scales, zeros = (torch.from_numpy(np.concatenate(part, 1)) for part in zip(*columns, strict=True))
        self.packed = _pack_int4(stacked.to(torch.int32), 1)
        self.scales = torch.stack([scales.T, zeros.T], -1).to(torch.bfloat16).contiguous()
        self.expandable = self.outputs % LANES == 0 and layout_is_known()

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[T, in] -> [T, out]."""
        x = x.contiguous() if self.digits == 1 else torch.cat((x, x), 1)
        product = self._many_product() if self.expandable and len(x) >= MANY else self.few
        out = product(x)
        return out if bias is None else out + bias

    def few(self, x: torch.Tensor) -> torch.Tensor:
        """[T, digits * in] -> [T, out] by torch's kernel."""
        return _int4_product(x, self.packed, self.group, self.scales)[:, :self.outputs]

    def many(self, x: torch.Tensor) -> torch.Tensor:
        """The same bits by expanded weights."""
        groups, inputs = self.scales.shape[0], x.shape[1]
        parts = next(n for n in range(1, groups + 1) if groups % n == 0 and inputs // n <= CHAIN)
        wide = x.view(len(x), parts, -1).transpose(0, 1).to(torch.float32, memory_format=torch.contiguous_format)
        return torch.cat([ordered_product(wide, weight).to(x.dtype) for weight in self._expanded(parts)], 1)

    def fast(self, x: torch.Tensor) -> torch.Tensor:
        """Nearly the same by a matrix unit, which sums in another order."""
        wide = x.chunk(self.digits, 1)[0]
        weights = (sum(weight[0].chunk(self.digits)).to(x.dtype) for weight in self._expanded(1))
        return torch.cat([wide @ weight for weight in weights], 1)

    def _many_product(self) -> Callable[[torch.Tensor], torch.Tensor]:
        if torch.cpu._is_amx_tile_supported():
            return self.fast
        inputs = self.scales.shape[0] * self.group // self.digits
        return self.many if orders_agree(inputs, self.group, self.digits) else self.few

    def _expanded(self, parts: int) -> Iterator[torch.Tensor]:
        """What some outputs after others multiply, the last of `parts` parts of the inputs first:
        [parts, digits * in / parts, some] in float32."""
        step = max(LANES, PIECE // (self.scales.shape[0] * self.group) // LANES * LANES)
        blocks = self.packed.view(self.outputs // LANES, -1)
        for start in range(0, self.outputs, step):
            stop = min(start + step, self.outputs)
            digits = unpack_int4(blocks[start // LANES:stop // LANES])
            codes = (digits - 8).view(torch.int8).view(parts, -1, self.group, stop - start)
            scale, zero = self.scales[:, None, start:stop].to(torch.float32).unflatten(0, (parts, -1)).unbind(-1)
            values = torch.empty(codes.shape, dtype=torch.float32)
            for part in range(parts):
                torch.addcmul(zero[part], codes[part].to(torch.float32), scale[part], out=values[parts - 1 - part])
            yield values.flatten(1, 2)

    def __str__(self) -> str:
        return f"int{4 * self.digits}"


@cache
def orders_agree(inputs: int, group: int, digits: int) -> bool:
    """Do `few` and `many` give the same bits here? Orders of sums are torch's and oneDNN's own affair."""
    random = torch.Generator().manual_seed(inputs)
    codes = torch.randint(0, 16 ** digits, (3 * LANES, inputs), generator=random).to(torch.uint8).numpy()
    scale = torch.rand(3 * LANES, inputs // group, generator=random).numpy()
    leaf = Int4Groups(codes, scale, -8 * scale, 4 * digits)
    x = torch.randn(LANES, digits * inputs, generator=random).bfloat16()
    return torch.equal(leaf.few(x), leaf.many(x))


@dataclass(frozen=True)
class Experts:
    """One matrix for each expert."""

    parts: tuple[Dense | Int4Groups | Packed, ...]

    def __str__(self) -> str:
        return f"{len(self.parts)} experts, {self.parts[0]}"


Leaf = Vector | Dense | Table | Int4Groups | Packed | Experts


def reason_to_expand(name: str, dtype: str) -> str | None:
    """Why a format of `KEPT` is expanded in this compute dtype; None = it is kept."""
    if dtype == "bf16":
        return None
    return "torch's int4 kernel is scalar in float32, six times slower than expanded weights"


def load_weight(raws: Sequence[RawTensor], spec: WeightSpec, dtype: str, runner: Runner | None = None) -> Leaf:
    """The leaf of one weight, its parts stacked along the output axis. Copies: the bytes may go away afterwards.
    runner: of the compiled kernels, which compute in bf16; None = by torch."""
    if dtype not in DTYPES:
        raise Unsupported(f"compute dtype {dtype!r}: the cpu platform computes in {' or '.join(DTYPES)}")
    unknown = sorted({raw.dtype for raw in raws} - CODECS.keys())
    if unknown:
        raise Unsupported(f"{spec.names[0]}: format {', '.join(unknown)} is unknown; known: {', '.join(CODECS)}")
    if spec.role in ("norm", "bias"):
        values = torch.from_numpy(np.concatenate([expand(raw) for raw in raws]))
        return Vector(values, values.to(DTYPES[dtype]))
    runner = runner if dtype == "bf16" else None
    if spec.role == "experts":
        return Experts(tuple(_packed(parts, dtype, runner) or _matrix(parts, dtype) for parts in by_expert(raws, spec)))
    leaf = _packed(raws, dtype, runner)
    if leaf is not None:
        return leaf
    return Table(_stacked(raws, dtype)) if spec.role == "embed" else _matrix(raws, dtype)


def _packed(raws: Sequence[RawTensor], dtype: str, runner: Runner | None) -> Packed | None:
    """For the compiled kernels, in the checkpoint's own codes where all parts have the same format and groups; None
    without them, and for shapes that they lack."""
    if runner is None:
        return None
    if len({(raw.dtype, group_of(raw)) for raw in raws}) == 1 and raws[0].dtype in KEPT and not group_of(raws[0]) % 32:
        parts = (np.concatenate(part) for part in zip(*map(affine, raws), strict=True))
        leaf = pack_codes(runner, *parts, BITS[raws[0].dtype])
        if leaf is not None:
            return leaf
    return None if raws[0].shape[-1] % 2 else pack_values(runner, _stacked(raws, dtype))


def _matrix(raws: Sequence[RawTensor], dtype: str) -> Dense | Int4Groups:
    """Kept when all parts have the same format and groups, so that one kernel call serves them; otherwise all are
    expanded."""
    kept = all(raw.dtype in KEPT for raw in raws) and reason_to_expand(raws[0].dtype, dtype) is None
    if kept and len({(raw.dtype, group_of(raw)) for raw in raws}) == 1:
        group = group_of(raws[0])
        fitting = next((size for size in GROUPS if group % size == 0), None)
        if fitting is not None:
            codes, scale, minimum = (np.concatenate(part) for part in zip(*map(affine, raws), strict=True))
            scale, minimum = (np.repeat(part, group // fitting, axis=1) for part in (scale, minimum))
            return Int4Groups(codes, scale, minimum, BITS[raws[0].dtype])
    return Dense(_stacked(raws, dtype))


def _stacked(raws: Sequence[RawTensor], dtype: str) -> torch.Tensor:
    parts = [torch.from_numpy(expand(raw)).to(DTYPES[dtype]) for raw in raws]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
