"""Weights as the NPU's products read them: codes of 4 and 8 bits, 8-bit products, and matrices in the NZ order.

Kept are the formats whose groups have whole numbers as zeros, since the operators take zeros in the compute dtype:
w = (code + offset) * scale. The others are expanded at load.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...core.platform import RawTensor, Unsupported, WeightSpec
from ..accelerator import quant
from ..accelerator.device import Device
from ..accelerator.quant import DTYPES, Dense, Experts, Leaf, Vector
from ..expand import INTEGERS, affine, group_of
from ..experts import by_expert

NZ = ("quantized", "all", "off")
FRACTAL_NZ = 29  # of aclFormat
LIMIT = 65535    # rows and columns of a product of codes
EXPERTS = 1024   # of a grouped product
BLOCKS = ("q4_0", "q5_0", "q8_0")
KEPT = (*BLOCKS, *INTEGERS)
FOUR_BITS = ("q4_0", *(name for name, bits in INTEGERS.items() if bits <= 4))


@dataclass(frozen=True)
class Policy:
    """narrow: activations of int8 weights are quantized per token. nz: which matrices lie in NZ, one of `NZ`."""

    narrow: bool = False
    nz: str = NZ[0]


@dataclass(frozen=True)
class Norm(Vector):
    """exact: whether the compute dtype holds the values."""

    exact: bool


@dataclass(frozen=True)
class Ordered(Dense):
    """A matrix in NZ, [out, in] still for whoever asks. Rows are not taken from it."""

    def __str__(self) -> str:
        return f"{super().__str__()}, NZ"


@dataclass(frozen=True)
class Codes:
    """codes: int8 [in, out], or eight of 4 bits in an int32 [in, out / 8]; of experts, along a first axis.

    scale, offset: in the compute dtype, [in / group, out]; of experts [experts, in / group, out], or [experts, out] for
    whole rows. offset None = zeros.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor | None
    group: int
    bits: int

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[T, in] -> [T, out]."""
        if bias is not None and x.dtype == torch.bfloat16:
            bias = bias.float()
        return torch.ops.npu.npu_weight_quant_batchmatmul(
            x.contiguous(), self.codes, self.scale, antiquant_offset=self.offset, bias=bias,
            antiquant_group_size=self.group if len(self.scale) > 1 else 0)

    def grouped(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Rows sorted by expert, `counts` of each -> their products."""
        return grouped_product(x, self.codes, counts, antiquant_scale=[self.scale], antiquant_offset=[self.offset])

    def __str__(self) -> str:
        width = self.codes.shape[-2]
        return f"int{self.bits} " + ("rows" if self.group == width else f"groups of {self.group}")


@dataclass(frozen=True)
class Int8:
    """codes: int8 [in, out]. scale: float32 [out]. Activations are quantized per token."""

    codes: torch.Tensor
    scale: torch.Tensor

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[T, in] -> [T, out]."""
        values, scale = torch.ops.npu.npu_dynamic_quant(x.contiguous())
        return torch.ops.npu.npu_quant_matmul(values, self.codes, self.scale, pertoken_scale=scale,
                                              bias=None if bias is None else bias.float(), output_dtype=x.dtype)

    def __str__(self) -> str:
        return "int8, 8-bit activations"


@dataclass(frozen=True)
class Stacked:
    """Matrices of experts as their grouped product reads them, [experts, in, out]."""

    values: torch.Tensor

    def grouped(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Rows sorted by expert, `counts` of each -> their products."""
        return grouped_product(x, self.values, counts)

    def __str__(self) -> str:
        return str(self.values.dtype).removeprefix("torch.")


def grouped_product(x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor,
                    **more: list[torch.Tensor]) -> torch.Tensor:
    return torch.ops.npu.npu_grouped_matmul([x], [weight], group_list=counts, group_list_type=1, group_type=0,
                                            split_item=2, **more)[0]


def load_weight(raws: Sequence[RawTensor], spec: WeightSpec, dtype: str, device: Device,
                policy: Policy) -> Leaf | Codes | Int8:
    """The leaf of one weight: kept where an operator reads its format, else as `accelerator.quant.load_weight`."""
    if spec.role == "norm":
        plain = quant.load_weight(raws, spec, dtype, device, groups=None)
        return Norm(plain.values, plain.cast, bool((plain.cast.float() == plain.values).all()))
    if spec.role == "experts":
        return Experts(load_experts(raws, spec, dtype, device, policy))
    if spec.role == "linear" and reason_to_expand(raws, dtype) is None:
        made = kept(raws, dtype, device, policy)
        if made is not None:
            return made
    leaf = quant.load_weight(raws, spec, dtype, device, groups=None)
    if spec.role == "linear" and policy.nz == "all" and fits_nz(leaf.values):
        return Ordered(in_nz(leaf.values))
    return leaf


def reason_to_expand(raws: Sequence[RawTensor], dtype: str) -> str | None:
    """Why a matrix of these parts is not kept in its format."""
    names, groups = {raw.dtype for raw in raws}, {group_of(raw) for raw in raws if raw.dtype in KEPT}
    width, height = raws[0].shape[-1], sum(raw.shape[-2] for raw in raws)
    if len(names) != 1 or not names <= set(KEPT):
        return f"no operator reads {', '.join(sorted(names))}"
    if dtype not in ("bf16", "f16"):
        return f"products of codes take bfloat16 and float16, not {dtype}"
    if len(groups) != 1 or (width not in groups and min(groups) % 32):
        return f"groups of {sorted(groups)}: multiples of 32, or the whole row, are read"
    if max(width, height) > LIMIT or height % 8:
        return f"{height} x {width}: up to {LIMIT}, and a multiple of 8 outputs, are read"
    return None


def kept(raws: Sequence[RawTensor], dtype: str, device: Device, policy: Policy) -> Codes | Int8 | None:
    """The codes of a matrix; None where its zeros are no whole numbers."""
    codes, scale, minimum = stacked(raws)
    if policy.narrow and raws[0].dtype == "int8" and scale.shape[-1] == 1:
        return Int8(moved(codes.T, device, nz=policy.nz != "off"), moved(scale[:, 0], device))
    bits = bits_of(raws[0])
    parts = centred(codes, scale, minimum, bits)
    if parts is None:
        return None
    kind, offset = DTYPES[dtype], parts[1]
    return Codes(packed(parts[0], bits, device), moved(scale.T, device).to(kind),
                 None if offset is None else moved(offset.T, device).to(kind), codes.shape[-1] // scale.shape[-1], bits)


def bits_of(raw: RawTensor) -> int:
    return 4 if raw.dtype in FOUR_BITS else 8


def stacked(raws: Sequence[RawTensor]) -> tuple[np.ndarray, ...]:
    """Codes, scale and minimum of matrices one below the other."""
    return tuple(np.concatenate(part) for part in zip(*map(affine, raws), strict=True))


def packed(codes: np.ndarray, bits: int, device: Device) -> torch.Tensor:
    """int8 [out, in] -> as `Codes` holds them."""
    there = moved(codes.T, device)
    return there if bits == 8 else torch.ops.npu.npu_convert_weight_to_int4pack(there.int())


def centred(codes: np.ndarray, scale: np.ndarray, minimum: np.ndarray,
            bits: int) -> tuple[np.ndarray, np.ndarray | None] | None:
    """Codes around zero as int8, and the offset of each group that is added to them, None = none has one; or None where
    an offset is no whole number that bfloat16 holds."""
    offset = np.divide(minimum, scale, out=np.zeros_like(minimum), where=scale != 0)
    whole = np.rint(offset)
    if np.abs(offset - whole).max(initial=0) > 1e-3 or (minimum[scale == 0] != 0).any():
        return None
    if codes.dtype != np.int8:
        half = 1 << bits - 1
        codes, whole = (codes.astype(np.int16) - half).astype(np.int8), whole + half
    if np.abs(whole).max(initial=0) > 256:
        return None
    return codes, whole if whole.any() else None


def load_experts(raws: Sequence[RawTensor], spec: WeightSpec, dtype: str, device: Device,
                 policy: Policy) -> Codes | Stacked:
    """Codes where the grouped product reads them; everything else expanded, in NZ where that fits."""
    experts = by_expert(raws, spec)
    if len(experts) > EXPERTS:
        raise Unsupported(f"{len(experts)} experts: one grouped product has up to {EXPERTS}")
    made = kept_experts(experts, dtype, device)
    if made is not None:
        return made
    values = quant.load_weight(raws, spec, dtype, device, groups=None).weight.values.transpose(1, 2).contiguous()
    return Stacked(in_nz(values) if policy.nz != "off" and fits_nz(values) else values)


def kept_experts(experts: Sequence[Sequence[RawTensor]], dtype: str, device: Device) -> Codes | None:
    """4-bit codes in groups, or 8-bit codes of whole rows; None for the others."""
    if len({raw.dtype for parts in experts for raw in parts}) != 1 or any(
            reason_to_expand(parts, dtype) is not None for parts in experts):
        return None
    bits, words, scales, offsets = bits_of(experts[0][0]), [], [], []
    for codes, scale, minimum in map(stacked, experts):
        parts = centred(codes, scale, minimum, bits)
        if parts is None or (bits == 8 and scale.shape[-1] > 1):
            return None
        words.append(packed(parts[0], bits, device))
        scales.append(scale.T)
        offsets.append(np.zeros_like(scale.T) if parts[1] is None else parts[1].T)
    scale, offset = (moved(np.stack(part), device).to(DTYPES[dtype]) for part in (scales, offsets))
    whole = scale.shape[1] == 1
    return Codes(torch.stack(words), scale[:, 0] if whole else scale, offset[:, 0] if whole else offset,
                 experts[0][0].shape[-1] // scale.shape[1], bits)


def moved(part: np.ndarray, device: Device, nz: bool = False) -> torch.Tensor:
    """On the device, contiguous."""
    there = torch.from_numpy(np.ascontiguousarray(part)).to(device.torch)
    return in_nz(there) if nz and fits_nz(there) else there


def fits_nz(values: torch.Tensor) -> bool:
    """Are both sides whole blocks? float32 has no NZ products."""
    unit = 32 if values.dtype == torch.int8 else 16
    return values.element_size() <= 2 and not values.shape[-1] % unit and not values.shape[-2] % unit


def in_nz(values: torch.Tensor) -> torch.Tensor:
    """In blocks of 16 rows and 32 bytes, the order in which the matrix unit reads; its shape seems the same."""
    return torch.ops.npu.npu_format_cast(values, FRACTAL_NZ)


__all__ = ["KEPT", "NZ", "Codes", "Int8", "Norm", "Ordered", "Policy", "Stacked", "load_weight",
           "reason_to_expand"]
