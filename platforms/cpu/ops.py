"""The mathematics of the models, in torch. What every layer needs alike is computed once per step, here."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...core.platform import AttentionSpec, Batch, MoESpec, RopeSpec, StateSpec, StepResult
from .attention import AttentionPlan
from .kept import LayerCache
from .moe import act_mul, moe
from .quant import Dense, Experts, Int4Groups, Table, Vector
from .sampling import sample


@dataclass(frozen=True)
class State:
    """K and V of every layer, and the last sampled token of each sequence slot. Changed in place, by the worker."""

    spec: StateSpec
    layers: tuple[LayerCache, ...]
    last: torch.Tensor

    @classmethod
    def allocate(cls, spec: StateSpec, pages: int) -> State:
        caches = tuple(LayerCache.allocate(pages, spec, layer) for layer in spec.layers)
        return cls(spec, caches, torch.zeros(spec.seqs, dtype=torch.int64))

    def copy_pages(self, src: Sequence[int], dst: Sequence[int]) -> None:
        for part in self._parts():
            part[list(dst)] = part[list(src)]

    def export_pages(self, pages: Sequence[int]) -> bytes:
        return b"".join(part[list(pages)].view(torch.uint8).numpy().tobytes() for part in self._parts())

    def import_pages(self, pages: Sequence[int], data: bytes) -> None:
        flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        start = 0
        for part in self._parts():
            size = len(pages) * part[0].nbytes
            part[list(pages)] = flat[start:start + size].view(part.dtype).view(len(pages), *part.shape[1:])
            start += size

    def _parts(self) -> list[torch.Tensor]:
        """All memory, each part with pages first."""
        return [part for cache in self.layers for part in cache.parts]


class Ops:
    """One step's view of the state and the batch. `batch` has torch tensors where a forward indexes with them."""

    def __init__(self, state: State, batch: Batch,
                 reduce: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        self.state, self.reduce = state, reduce
        self.plan = AttentionPlan(batch, state.spec.page_size)
        self.positions = torch.from_numpy(batch.positions)
        self.turns: dict[RopeSpec, tuple[torch.Tensor, torch.Tensor]] = {}
        tokens = torch.from_numpy(batch.tokens)
        if (batch.tokens < 0).any():
            last = state.last[torch.from_numpy(batch.seqs[batch.rows])]
            tokens = torch.where(tokens < 0, last, tokens)
        self.host = batch
        adapters = None if batch.adapters is None else torch.from_numpy(batch.adapters)
        self.batch = batch._replace(tokens=tokens, logit_rows=torch.from_numpy(batch.logit_rows), adapters=adapters)

    def embed(self, ids: torch.Tensor, weight: Table) -> torch.Tensor:
        return weight.rows(ids)

    def linear(self, x: torch.Tensor, weight: Dense | Table | Int4Groups, bias: Vector | None = None) -> torch.Tensor:
        return weight.product(x, None if bias is None else bias.cast)

    def rms_norm(self, x: torch.Tensor, weight: Vector, eps: float) -> torch.Tensor:
        wide = x.to(torch.float32, copy=True)
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        return wide.mul_(scale).mul_(weight.values).to(x.dtype)

    def rope(self, x: torch.Tensor, spec: RopeSpec) -> torch.Tensor:
        cos, sin = self.turns.get(spec) or self._turn(spec)
        half = len(spec.inv_freq)
        wide = x[..., :2 * half].float()
        turned = (wide * cos).addcmul_(wide.roll(half, -1), sin).to(x.dtype)
        return turned if 2 * half == x.shape[-1] else torch.cat((turned, x[..., 2 * half:]), -1)

    def attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int,
                  spec: AttentionSpec) -> torch.Tensor:
        cache = self.state.layers[layer]
        cache.write(self.plan.slots, k, v)
        return self.plan.attend(q, cache, spec)

    def act_mul(self, gate: torch.Tensor, up: torch.Tensor, kind: str) -> torch.Tensor:
        return act_mul(gate, up, kind)

    def moe(self, x: torch.Tensor, router_logits: torch.Tensor, w13: Experts, w2: Experts,
            spec: MoESpec, bias: Vector | None = None) -> torch.Tensor:
        return moe(x, router_logits, w13, w2, spec, bias)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.reduce is None else self.reduce(x)

    def sample(self, logits: torch.Tensor, softcap: float | None = None) -> StepResult:
        return finish(self.state, self.host, self.batch.tokens[self.batch.logit_rows].numpy(), logits, softcap)

    def _turn(self, spec: RopeSpec) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and signed sine [T, 1, rotated] of this step's positions: y = x * cos + roll(x, half) * sin."""
        frequencies = torch.tensor(spec.inv_freq, dtype=torch.float64)
        angles = self.positions.double()[:, None, None] * frequencies
        cos, sin = ((spec.scale * part).float() for part in (angles.cos(), angles.sin()))
        self.turns[spec] = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        return self.turns[spec]


def finish(state: State, batch: Batch, inputs: np.ndarray, logits: torch.Tensor, softcap: float | None) -> StepResult:
    """From logits [L, V] to the step's result; `state` keeps what was sampled. inputs [L]: the token that each logit
    row follows."""
    if softcap is not None:
        logits = logits.float().div_(softcap).tanh_().mul_(softcap)
    result = sample(logits, batch.targets, batch.sampling, inputs)
    sampled = batch.targets == -1
    slots = batch.seqs[batch.rows[batch.logit_rows[sampled]]]
    state.last[torch.from_numpy(slots)] = torch.from_numpy(result.tokens[sampled].astype(np.int64))
    return result
