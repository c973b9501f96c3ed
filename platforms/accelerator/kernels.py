"""What a platform computes with: the paths composed of torch operators, to be overridden by a platform's kernels.

One object for each platform object. Nothing here is chosen in a step: `backend` remembers what attends a case.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from ...core.platform import AttentionSpec, MoESpec, RawTensor, RopeSpec, Sampling, WeightSpec
from . import moe, quant
from .attention import Backend, Composed
from .cache import KV_DTYPES, LayerCache
from .device import Device
from .quant import Experts, Leaf, Vector
from .sampling import Sampled, sample
from .sampling import arrays as sampling_arrays
from .turns import Turns, rotate


class Maker(Protocol):
    """Makes a backend for one case, or leaves the case to others: q, a layer's memory, and the spec."""

    name: str

    def __call__(self, q: torch.Tensor, cache: LayerCache, spec: AttentionSpec) -> Backend | None:
        ...


class Kernels:
    """Defaults composed of torch operators.

    kept: formats whose codes stay as they are. backends: ways to compute attention, the preferred first; the last one
    takes every case. makers: asked before them to make one for a case, or None. notes: more of the manifest's details.
    """

    kept: tuple[str, ...] = ()
    fuses_rope = False  # whether `rope_write` is one launch

    def __init__(self, device: Device) -> None:
        self.device, self.turns = device, Turns(device)
        self.backends: Sequence[Backend] = (Composed(),)
        self.makers: Sequence[Maker] = ()
        self.notes: dict[str, str] = {}
        self._chosen: dict[tuple[Any, ...], Backend] = {}

    def describe(self) -> dict[str, str]:
        """Which paths serve, for the manifest's details."""
        return {"attention": ", else ".join([*(make.name for make in self.makers), self.backends[0].name])} | self.notes

    def load(self, raws: Sequence[RawTensor], spec: WeightSpec, dtype: str) -> Leaf:
        return quant.load_weight(raws, spec, dtype, self.device)

    def backend(self, q: torch.Tensor, cache: LayerCache, spec: AttentionSpec) -> Backend:
        """The first backend that takes the case."""
        key = (spec, q.dtype, q.shape[1:], cache.kv.dtype, cache.kv.shape[2:])
        if key not in self._chosen:
            made = (make(q, cache, spec) for make in self.makers)
            self._chosen[key] = next((backend for backend in made if backend is not None), None) or (
                self.plain_backend(q, cache, spec))
        return self._chosen[key]

    def plain_backend(self, q: torch.Tensor, cache: LayerCache, spec: AttentionSpec) -> Backend:
        """The first of `backends` that takes the case, the makers not asked."""
        return next(backend for backend in self.backends if self.takes(backend, q, cache, spec))

    def takes(self, backend: Backend, q: torch.Tensor, cache: LayerCache, spec: AttentionSpec) -> bool:
        return True

    def write(self, cache: LayerCache, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """K and V [T, kv_heads, head_dim] to their slots of a layer's memory."""
        cache.write(slots, k, v)

    def rope_write(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
                   cache: LayerCache, slots: torch.Tensor) -> torch.Tensor:
        """Rotate q and k, write K and V as `write` does -> rotated q."""
        self.write(cache, slots, self.rope(k, cos, sin), v)
        return self.rope(q, cos, sin)

    def rms_norm(self, x: torch.Tensor, weight: Vector, eps: float) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.values).to(x.dtype)

    def rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return rotate(x, cos, sin)

    def angles(self, positions: torch.Tensor, spec: RopeSpec) -> tuple[torch.Tensor, torch.Tensor]:
        return self.turns.at(positions, spec)

    def act_mul(self, gate: torch.Tensor, up: torch.Tensor, kind: str) -> torch.Tensor:
        return moe.act_mul(gate, up, kind)

    def moe(self, x: torch.Tensor, logits: torch.Tensor, w13: Experts, w2: Experts, spec: MoESpec,
            bias: torch.Tensor | None, live: torch.Tensor | None = None) -> torch.Tensor:
        """live: bool [T], the tokens that are a row's; what comes of the others is read by nobody, and a kernel need
        not compute it."""
        return moe.moe(x, logits, w13, w2, spec, bias)

    def sampling_arrays(self, sampling: Sampling, targets: np.ndarray) -> dict[str, np.ndarray]:
        """What `sample` needs on the device, as arrays to be fed; "targets" is one of them."""
        return sampling_arrays(sampling, targets)

    def sample(self, logits: torch.Tensor, fed: Mapping[str, torch.Tensor], inputs: torch.Tensor, top: int | None,
               scored: bool) -> Sampled:
        return sample(logits, fed, inputs, top, scored)


def reason_against(op: str, case: Mapping[str, Any], dtypes: Sequence[str]) -> str | None:
    """Why no path composed of torch operators takes a case of `Platform.supports`."""
    dtype = case.get("dtype", dtypes[0])
    if dtype not in dtypes and not (op == "attention" and dtype in KV_DTYPES):
        return f"dtype {dtype}: it computes in {', '.join(dtypes)}"
    if case.get("kind", "silu") not in moe.ACTIVATIONS:
        return f"activation {case['kind']!r}; there are: {', '.join(moe.ACTIVATIONS)}"
    name = case.get("format", "f32")
    return None if name in quant.CODECS else f"format {name}: known are {', '.join(quant.CODECS)}"

