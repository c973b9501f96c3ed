"""Products and experts of a vendor's library in the place of the kernels here, by weight, where a trial let them.

An `Offer` reads a matrix as it lies here: it serves the numbers of tokens at which it was right and no slower, Triton
the others. A `Packed` one keeps the matrix in an order of its own, and a library's experts theirs: those serve every
step, or none. All is settled when a weight is loaded.
"""
from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Protocol

import torch

from ...core.platform import MoESpec, RawTensor, WeightSpec
from ..accelerator.device import Device
from ..accelerator.quant import DTYPES, Experts, Leaf
from ..accelerator.trial import Inputs, Trials, activations
from . import moe_gemm
from .kernels import TritonKernels
from .linear_tiles import Matrix
from .routing import route
from .weights import Kept, Policy

log = logging.getLogger(__name__)

EXPERT_BYTES = 2 << 30  # that the experts of a trial take at most


class Offer(Protocol):
    """A library's product with a matrix that lies as ours. limit: of the normalised mean squared error beside ours."""

    name: str
    limit: float

    def reason_against(self, kept: Kept, dtype: torch.dtype) -> str | None:
        ...

    def product(self, x: torch.Tensor, kept: Kept) -> torch.Tensor:
        ...


class Packed(Protocol):
    """A library's product with a matrix of its own, made of a checkpoint's parts; `product` is of what `pack` gave."""

    name: str
    limit: float

    def reason_against(self, raws: Sequence[RawTensor], kept: Kept, dtype: torch.dtype) -> str | None:
        ...

    def pack(self, raws: Sequence[RawTensor], device: torch.device) -> Any:
        ...

    def product(self, x: torch.Tensor, packed: Any) -> torch.Tensor:
        ...


class ExpertOffer(Protocol):
    """A library's sparse layer after routing: experts [2 inner, width], gate above up, and [width, inner]. first: of
    those above. `unpack` undoes `pack`; both give the kind that they got. acts: the activations that it has."""

    name: str
    limit: float
    acts: tuple[str, ...]

    def reason_against(self, matrix: Matrix, width: int, inner: int, dtype: torch.dtype) -> str | None:
        ...

    def pack(self, matrix: Matrix, first: bool) -> Matrix:
        ...

    def unpack(self, packed: Matrix, first: bool) -> Matrix:
        ...

    def moe(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, w13: Matrix, w2: Matrix,
            act: str) -> torch.Tensor:
        ...


class Served:
    """A weight that a library serves; its copies are served by the same."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Served:
        memo[id(self.offer)] = self.offer
        made = copy(self)
        for name, value in vars(self).items():
            object.__setattr__(made, name, deepcopy(value, memo))
        return made


@dataclass(frozen=True)
class Shared(Served):
    """A matrix whose products of `sizes` tokens are a library's, and all others Triton's."""

    kept: Kept
    offer: Offer
    sizes: frozenset[int]

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[T, in] -> [T, out]."""
        if len(x) not in self.sizes:
            return self.kept.product(x, bias)
        out = self.offer.product(x, self.kept)
        return out if bias is None else out.add_(bias)

    def __str__(self) -> str:
        return f"{self.kept.label}, {self.offer.name} for {len(self.sizes)} sizes from {min(self.sizes)} tokens"


@dataclass(frozen=True)
class Whole(Served):
    """A matrix in a library's own order."""

    offer: Packed
    packed: Any
    label: str

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[T, in] -> [T, out]."""
        out = self.offer.product(x, self.packed)
        return out if bias is None else out.add_(bias)

    def __str__(self) -> str:
        return f"{self.label}, {self.offer.name}"


class Fused(Served):
    """Experts in a library's own order, until a layer comes that it does not have: then they are put back for good."""

    def __init__(self, kept: Kept, offer: ExpertOffer, first: bool, dtype: torch.dtype) -> None:
        self.offer, self.first, self.dtype, self.label, self.experts = offer, first, dtype, kept.label, kept.experts
        self.packed: Matrix | None = offer.pack(kept.matrix, first)
        self.matrix: Matrix | None = None

    def serves(self, x: torch.Tensor, spec: MoESpec) -> bool:
        return self.packed is not None and spec.act in self.offer.acts and x.dtype == self.dtype

    def put_back(self) -> None:
        if self.packed is not None:
            self.matrix, self.packed = self.offer.unpack(self.packed, self.first), None

    def __str__(self) -> str:
        return f"{self.label}, {self.offer.name}"


class LibraryKernels(TritonKernels):
    """Triton's, and a library's where its trials let it. trials: made while weights are loaded."""

    def __init__(self, device: Device, policy: Policy, trials: Trials) -> None:
        super().__init__(device, policy)
        self.trials = trials
        self.offers: list[Offer] = []
        self.packed: list[Packed] = []
        self.experts: list[ExpertOffer] = []

    def load(self, raws: Sequence[RawTensor], spec: WeightSpec, dtype: str) -> Leaf | Any:
        leaf, kind = super().load(raws, spec, dtype), DTYPES[dtype]
        if isinstance(leaf, Kept):
            return self._shared(leaf, kind) or self._whole(leaf, raws, kind) or leaf
        if isinstance(leaf, Experts) and isinstance(leaf.weight, Kept) and spec.cut in (0, 1):
            return self._fused(leaf, spec.cut == 0, kind)
        return leaf

    def _shared(self, kept: Kept, dtype: torch.dtype) -> Shared | None:
        matrix = kept.matrix
        for offer in self.offers:
            if offer.reason_against(kept, dtype) is None:
                key = (offer.name, kept.label, f"{matrix.rows}x{matrix.width}", str(dtype).removeprefix("torch."))
                found = self.trials.verdict(key, lambda x, offer=offer: offer.product(x, kept), kept.product,
                                            self._inputs(matrix.width, dtype), offer.limit)
                if found.faster:
                    return Shared(kept, offer, found.faster)
        return None

    def _whole(self, kept: Kept, raws: Sequence[RawTensor], dtype: torch.dtype) -> Whole | None:
        matrix = kept.matrix
        for offer in self.packed:
            if offer.reason_against(raws, kept, dtype) is None:
                key = (offer.name, kept.label, f"{matrix.rows}x{matrix.width}", str(dtype).removeprefix("torch."))
                if (found := self.trials.verdicts.get(key)) is not None and not found.everywhere:
                    continue
                packed = cache(partial(offer.pack, raws, self.device.torch))  # a failure is the trial's
                found = self.trials.verdict(
                    key, lambda x, offer=offer, packed=packed: offer.product(x, packed()), kept.product,
                    self._inputs(matrix.width, dtype), offer.limit)
                if found.everywhere:
                    return Whole(offer, packed(), kept.label)
        return None

    def _inputs(self, width: int, dtype: torch.dtype) -> Callable[[int, int], Inputs]:
        return lambda tokens, seed: activations(tokens, width, dtype, self.device.torch, seed)

    # Experts: the trial is of random ones of the same shapes, since one of the two weights is loaded before the other.

    def _fused(self, leaf: Experts, first: bool, dtype: torch.dtype) -> Experts:
        matrix = leaf.weight.matrix
        width, inner = (matrix.width, matrix.rows // 2) if first else (matrix.rows, matrix.width)
        for offer in self.experts:
            if offer.reason_against(matrix, width, inner, dtype) is None:
                key = (offer.name, "experts", matrix.kind, f"{matrix.experts} of {width}x{inner}",
                       str(dtype).removeprefix("torch."))
                if key not in self.trials.verdicts:
                    self._try_experts(key, offer, matrix, width, inner, dtype)
                if self.trials.verdicts[key].everywhere:
                    try:
                        return replace(leaf, weight=Fused(leaf.weight, offer, first, dtype))
                    except torch.OutOfMemoryError:
                        log.warning("%s: no memory to put these weights in order: Triton serves", " ".join(key))
        return leaf

    def _try_experts(self, key: tuple[str, ...], offer: ExpertOffer, like: Matrix, width: int, inner: int,
                     dtype: torch.dtype) -> None:
        each = 3 * width * inner * like.codes.element_size()
        experts = min(like.experts, max(8, EXPERT_BYTES // each))
        spec = MoESpec(experts, min(8, experts), act=offer.acts[0])

        @cache  # within the trial, which may fail for want of memory
        def pairs() -> tuple[list[Matrix], list[Matrix]]:
            own = [random_experts(like, experts, *shape) for shape in ((2 * inner, width), (width, inner))]
            return own, [offer.pack(each, each is own[0]) for each in own]

        def inputs(tokens: int, seed: int) -> Inputs:
            x, live = activations(tokens, width, dtype, self.device.torch, seed)
            logits = activations(tokens, experts, torch.float32, self.device.torch, seed + 1).tensors[0]
            return Inputs((*x, logits.nan_to_num(), live), live)  # zeros: experts that tie

        def call(x: torch.Tensor, logits: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
            return run(offer, x, logits, *pairs()[1], spec, None, live)

        def ours(x: torch.Tensor, logits: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
            return moe_gemm.moe(x, logits, *pairs()[0], spec, family=self.device.arch, live=live)
        self.trials.verdict(key, call, ours, inputs, offer.limit)

    def moe(self, x: torch.Tensor, logits: torch.Tensor, w13: Experts, w2: Experts, spec: MoESpec,
            bias: torch.Tensor | None, live: torch.Tensor | None = None) -> torch.Tensor:
        first, second = w13.weight, w2.weight
        if isinstance(first, Fused) and isinstance(second, Fused) and first.serves(x, spec) and (
                second.offer is first.offer):
            return run(first.offer, x, logits, first.packed, second.packed, spec, bias, live)
        for each in (first, second):
            if isinstance(each, Fused):
                each.put_back()
        return super().moe(x, logits, w13, w2, spec, bias, live)


def run(offer: ExpertOffer, x: torch.Tensor, logits: torch.Tensor, w13: Matrix, w2: Matrix, spec: MoESpec,
        bias: torch.Tensor | None, live: torch.Tensor | None) -> torch.Tensor:
    """A library's layer behind our routing. A padding token goes to expert 0 with a weight of nothing, since a library
    need not know of tokens that go nowhere."""
    ids, weights = route(logits, spec, bias, live)
    return offer.moe(x, ids if live is None else ids.clamp_min_(0), weights, w13, w2, spec.act)


def random_experts(like: Matrix, experts: int, rows: int, width: int) -> Matrix:
    """Of the kind, of other sizes, with values of about a model's size."""
    codes, device = like.codes, like.codes.device
    kind = torch.float32 if device.type == "cpu" else torch.bfloat16
    values = torch.randn(experts, rows, width, device=device, dtype=kind).mul_(0.02 if like.scale is None else 30)
    scale = None
    if like.scale is not None:
        shape = (-(-rows // 128), -(-width // 128)) if like.kind == "fp8_block" else (rows,)
        scale = torch.rand(experts, *shape, device=device).add_(0.5).mul_(0.02 / 30)
    return Matrix(like.kind, values.to(codes.dtype), rows, width, scale, experts=experts)
