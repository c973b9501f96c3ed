"""The mathematics of the models on an accelerator. What every layer needs alike is computed once per step, here."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ...core.platform import AttentionSpec, Batch, MoESpec, RopeSpec
from .attention import Backend, View
from .kernels import Kernels
from .quant import Dense, Experts, Groups, Vector
from .state import State


@dataclass(frozen=True)
class Logits:
    """What `Ops.sample` gives: raw logits [L, V] in float32 after a soft cap. The step samples from them."""

    values: torch.Tensor


class Rotated:
    """A rotation put off: with q and k, it is one launch with the write to the pages. Anything else computes it."""

    def __init__(self, kernels: Kernels, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        self.kernels, self.x, self.cos, self.sin = kernels, x, cos, sin

    @property
    def shape(self) -> torch.Size:
        return self.x.shape

    def tensor(self) -> torch.Tensor:
        return self.kernels.rope(self.x, self.cos, self.sin)

    def reshape(self, *shape: int) -> torch.Tensor:
        return self.tensor().reshape(*shape)

    def __getitem__(self, at: Any) -> torch.Tensor:
        return self.tensor()[at]

    def __add__(self, other: Any) -> torch.Tensor:
        return self.tensor() + plain(other)

    def __sub__(self, other: Any) -> torch.Tensor:
        return self.tensor() - plain(other)

    def __mul__(self, other: Any) -> torch.Tensor:
        return self.tensor() * plain(other)

    def __rsub__(self, other: Any) -> torch.Tensor:
        return other - self.tensor()

    __radd__, __rmul__ = __add__, __mul__


def plain(x: Any) -> Any:
    """The tensor itself."""
    return x.tensor() if isinstance(x, Rotated) else x


class Between(Protocol):
    """What a capture in pieces asks of `Ops`: to have this call made at each replay, outside of the graphs."""

    def between(self, call: Callable[[], None]) -> None:
        ...


class Ops:
    """One step's view of the state and the batch, whose arrays are on the device.

    pieces: set while a graph is captured in pieces. need: makes sure that the arrays that a backend wants were fed.
    """

    def __init__(self, state: State, batch: Batch, view: View, kernels: Kernels,
                 need: Callable[[Backend, tuple[str, ...]], None],
                 reduce: Callable[[torch.Tensor], torch.Tensor] | None = None, pieces: Between | None = None) -> None:
        self.state, self.batch, self.view, self.kernels = state, batch, view, kernels
        self.need, self.reduce, self.pieces = need, reduce, pieces
        self.angles: dict[RopeSpec, tuple[torch.Tensor, torch.Tensor]] = {}
        self.live: torch.Tensor | None = None

    def embed(self, ids: torch.Tensor, weight: Dense | Groups) -> torch.Tensor:
        return weight.rows(ids)

    def linear(self, x: torch.Tensor, weight: Dense | Groups, bias: Vector | None = None) -> torch.Tensor:
        return weight.product(x, None if bias is None else bias.cast)

    def rms_norm(self, x: torch.Tensor, weight: Vector, eps: float) -> torch.Tensor:
        return self.kernels.rms_norm(x, weight, eps)

    def rope(self, x: torch.Tensor, spec: RopeSpec) -> torch.Tensor:
        if spec not in self.angles:
            self.angles[spec] = self.kernels.angles(self.batch.positions, spec)
        turned = Rotated(self.kernels, x, *self.angles[spec])
        return turned if self.kernels.fuses_rope else turned.tensor()

    def attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int,
                  spec: AttentionSpec) -> torch.Tensor:
        cache = self.state.caches[layer]
        if isinstance(q, Rotated) and isinstance(k, Rotated) and q.cos is k.cos:
            q = self.kernels.rope_write(q.x, k.x, v, q.cos, q.sin, cache, self.batch.slots)
        else:
            q, k, v = map(plain, (q, k, v))
            self.kernels.write(cache, self.batch.slots, k, v)
        backend, view = self.kernels.backend(q, cache, spec), self.view
        self.need(backend, backend.wants(q, cache, view))
        if self.pieces is None:
            return backend.attend(q, cache, view, spec)
        out = torch.zeros_like(q)
        self.pieces.between(lambda: out.copy_(backend.attend(q, cache, view, spec)))
        return out

    def act_mul(self, gate: torch.Tensor, up: torch.Tensor, kind: str) -> torch.Tensor:
        return self.kernels.act_mul(gate, up, kind)

    def moe(self, x: torch.Tensor, router_logits: torch.Tensor, w13: Experts, w2: Experts, spec: MoESpec,
            bias: Vector | None = None) -> torch.Tensor:
        if self.live is None:  # a token without a row writes to page 0, which is nobody's
            self.live = self.batch.slots >= self.view.page_size
        return self.kernels.moe(x, router_logits, w13, w2, spec, None if bias is None else bias.values, self.live)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.reduce is None else self.reduce(x)

    def sample(self, logits: torch.Tensor, softcap: float | None = None) -> Logits:
        logits = logits.float()
        return Logits(logits if softcap is None else (logits / softcap).tanh() * softcap)
