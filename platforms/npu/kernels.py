"""What Ascend NPUs compute with: torch_npu's fused operators where they take the case, else torch operators.

Operators are reached by `torch.ops.npu`, where torch_npu registers them; the emulation of the tests registers its own
under the same schemas.
"""
from __future__ import annotations

from collections.abc import Sequence

import torch

from ...core.platform import AttentionSpec, MoESpec, RawTensor, RopeSpec, WeightSpec
from ..accelerator.attention import Backend, Composed
from ..accelerator.cache import LayerCache
from ..accelerator.device import Device
from ..accelerator.kernels import Kernels
from ..accelerator.quant import Experts, Leaf, Vector
from . import moe, quant
from .attention import TRIANGLE, Fused, reason_against
from .quant import KEPT, Codes, Int8, Norm, Policy


class Table:
    """Cosines or sines [T, 1, rotated] of a step in float32, and in each dtype that was asked for."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = {values.dtype: values}
        self.wide = values

    def of(self, dtype: torch.dtype) -> torch.Tensor:
        if dtype not in self.values:
            self.values[dtype] = self.wide.to(dtype)
        return self.values[dtype]


class NpuKernels(Kernels):
    """torch_npu's operators on one NPU."""

    kept = KEPT

    def __init__(self, device: Device, policy: Policy) -> None:
        super().__init__(device)
        self.policy = policy
        self.triangle = torch.ones(TRIANGLE, TRIANGLE, dtype=torch.bool, device=device.torch).triu(1)
        self.fused: dict[int | None, Fused] = {None: Fused(self.triangle, None)}
        self.backends = (self.fused[None], Composed())

    def load(self, raws: Sequence[RawTensor], spec: WeightSpec, dtype: str) -> Leaf | Codes | Int8:
        return quant.load_weight(raws, spec, dtype, self.device, self.policy)

    def backend(self, q: torch.Tensor, cache: LayerCache, spec: AttentionSpec) -> Backend:
        """The operator where it takes the case, one object for each window; else the composed path."""
        chosen = super().backend(q, cache, spec)
        if not isinstance(chosen, Fused):
            return chosen
        if spec.window not in self.fused:
            self.fused[spec.window] = Fused(self.triangle, spec.window)
        return self.fused[spec.window]

    def takes(self, backend: Backend, q: torch.Tensor, cache: LayerCache, spec: AttentionSpec) -> bool:
        return not isinstance(backend, Fused) or reason_against(q, cache, spec) is None

    def write(self, cache: LayerCache, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        if cache.kv.dtype.itemsize == 1:
            return cache.write(slots, k, v)
        page_size, flat = cache.page_size, cache.kv.view(-1, *cache.kv.shape[3:])
        at = (slots + slots // page_size * page_size)[:, None]  # V lies a page behind K
        for into, values in ((flat, k), (flat[page_size:], v)):
            torch.ops.npu.npu_scatter_nd_update_(into, at, values.to(flat.dtype).contiguous())

    def rms_norm(self, x: torch.Tensor, weight: Vector, eps: float) -> torch.Tensor:
        if isinstance(weight, Norm) and weight.exact:
            return torch.ops.npu.npu_rms_norm(x.contiguous(), weight.cast, epsilon=eps)[0]
        return torch.ops.npu.npu_rms_norm(x.float().contiguous(), weight.values, epsilon=eps)[0].to(x.dtype)

    def angles(self, positions: torch.Tensor, spec: RopeSpec) -> tuple[Table, Table]:
        cos, sin = (torch.cat((part, part), -1)[:, None] for part in self.turns.at(positions, spec))
        return Table(cos), Table(sin)

    def rope(self, x: torch.Tensor, cos: Table, sin: Table) -> torch.Tensor:
        rotated = cos.wide.shape[-1]
        part = x[..., :rotated]
        turned = torch.ops.npu.npu_rotary_mul(part.contiguous(), cos.of(x.dtype), sin.of(x.dtype))
        return turned if rotated == x.shape[-1] else torch.cat((turned, x[..., rotated:]), -1)

    def act_mul(self, gate: torch.Tensor, up: torch.Tensor, kind: str) -> torch.Tensor:
        return moe.act_mul(gate, up, kind)

    def moe(self, x: torch.Tensor, logits: torch.Tensor, w13: Experts, w2: Experts, spec: MoESpec,
            bias: torch.Tensor | None, live: torch.Tensor | None = None) -> torch.Tensor:
        return moe.moe(x, logits, w13, w2, spec, bias)
