"""What Intel GPUs compute with: vllm-xpu-kernels' operators where they take the case, Triton's kernels, else torch.

torch's own operators are oneDNN's on these devices: products of dense weights, and attention where nothing else takes
it. Every choice is made once: by weight at load, by `AttentionSpec` at its first step.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from ...core.platform import AttentionSpec, MoESpec, RawTensor, RopeSpec, Sampling, WeightSpec
from ..accelerator.attention import Backend
from ..accelerator.cache import LayerCache
from ..accelerator.device import Device
from ..accelerator.kernels import Kernels
from ..accelerator.quant import Dense, Experts, Leaf, Vector
from ..accelerator.sampling import Sampled
from . import quant
from .attention import DTYPES, PagedAttention
from .moe import ACTIVATIONS, Products, reason_against
from .operators import Operators, install, installed_version, matching
from .quant import Fp8, Grouped, Int4, Norm

NARROW = ("f8_e4m3", "f8_e5m2")


def make_kernels(device: Device, operators: bool = True, triton: bool = True) -> XpuKernels:
    """The kernels for this device. operators, triton: whether these may be used where they are installed."""
    rest = triton_kernels(device) if triton and intel_triton() else Kernels(device)
    if not operators:
        return XpuKernels(device, rest, {}, "turned off by an option")
    reason = install()
    if reason is not None:
        return XpuKernels(device, rest, {}, reason)
    found, others = matching()
    left = f"; not called, being absent or other than expected: {', '.join(others)}" if others else ""
    return XpuKernels(device, rest, found, f"vllm-xpu-kernels {installed_version()}{left}")


def intel_triton() -> bool:
    """Whether the Triton that is installed has Intel's backend, without importing it."""
    spec = find_spec("triton")
    return spec is not None and any(
        Path(place, "backends", "intel").is_dir() for place in spec.submodule_search_locations or ())


def triton_kernels(device: Device) -> Kernels:
    """Every op by the shared kernels. Weights in fp8 are expanded in registers: the matrix units have no fp8."""
    from ..triton_kit.kernels import TritonKernels
    from ..triton_kit.weights import Policy
    return TritonKernels(device, Policy("none", False))


class XpuKernels(Kernels):
    """`rest`, with operators before it where they take the case."""

    def __init__(self, device: Device, rest: Kernels, operators: Operators, about: str) -> None:
        super().__init__(device)
        self.rest, self.operators, self.about = rest, operators, about
        self.fuses_rope = rest.fuses_rope
        own = ("fp8",) * ("fp8_gemm_w8a16" in operators) + quant.FOUR_BITS * ("int4_gemm_w4a16" in operators)
        self.kept = tuple(dict.fromkeys((*rest.kept, *own)))
        self.narrow_kv = NARROW if rest.kept else ()  # Triton's kernels alone keep K and V in fp8
        self.backends: Sequence[Backend] = tuple(rest.backends)
        if "varlen_fwd" in operators:
            self.backends = (PagedAttention(operators["varlen_fwd"]), *rest.backends)
        self.products = Products(operators) if Products.needs <= operators.keys() else None
        self.one = torch.ones(1, dtype=torch.float32, device=device.torch)  # scales of K and V

    def describe(self) -> dict[str, str]:
        below = "Triton" if self.rest.kept else "torch's operators"
        return self.rest.describe() | {
            "attention": " or ".join(backend.name for backend in self.backends), "operators": self.about,
            "called": ", ".join(self.operators) or "none", "below them": below}

    def takes(self, backend: Backend, q: torch.Tensor, cache: LayerCache, spec: AttentionSpec) -> bool:
        if isinstance(backend, PagedAttention):
            return backend.takes(q, cache, spec)
        return self.rest.takes(backend, q, cache, spec)

    def load(self, raws: Sequence[RawTensor], spec: WeightSpec, dtype: str) -> Leaf | Fp8 | Int4:
        made = None
        if spec.role == "linear":
            for name, make in (("fp8_gemm_w8a16", quant.fp8), ("int4_gemm_w4a16", quant.int4)):
                if made is None and name in self.operators:
                    made = make(raws, dtype, self.device, self.operators[name])
        if spec.role == "experts" and self.products is not None and dtype in ("bf16", "f16"):
            made = self._experts(raws, spec, dtype)
        if made is not None:
            return made
        leaf = self.rest.load(raws, spec, dtype)
        return Norm.of(leaf) if spec.role == "norm" else leaf

    def _experts(self, raws: Sequence[RawTensor], spec: WeightSpec, dtype: str) -> Experts | None:
        """Experts in 16 bits for the grouped product; quantized ones are left to the paths below."""
        if any(raw.dtype not in ("f32", "f16", "bf16") for raw in raws):
            return None
        leaf = Kernels.load(self, raws, spec, dtype)
        values = leaf.weight.values if isinstance(leaf.weight, Dense) else None
        if values is None or any(size % 8 for size in values.shape[1:]):
            return None
        return Experts(Grouped(values.transpose(1, 2).contiguous()))

    def write(self, cache: LayerCache, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        write = self.operators.get("reshape_and_cache_flash")
        if write is None or self.fuses_rope or k.dtype not in DTYPES or cache.kv.dtype != k.dtype:
            return self.rest.write(cache, slots, k, v)
        write(key=k.contiguous(), value=v.contiguous(), key_cache=cache.kv[:, 0], value_cache=cache.kv[:, 1],
              slot_mapping=slots.long(), kv_cache_dtype="auto", k_scale=self.one, v_scale=self.one)

    def rope_write(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
                   cache: LayerCache, slots: torch.Tensor) -> torch.Tensor:
        return self.rest.rope_write(q, k, v, cos, sin, cache, slots)

    def rms_norm(self, x: torch.Tensor, weight: Vector, eps: float) -> torch.Tensor:
        norm = self.operators.get("rms_norm")
        if norm is None or not isinstance(weight, Norm) or not weight.exact or weight.cast.dtype != x.dtype:
            return self.rest.rms_norm(x, weight, eps)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        norm(result=out, input=x if x.stride(-1) == 1 else x.contiguous(), weight=weight.cast, epsilon=eps)
        return out

    def rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return self.rest.rope(x, cos, sin)

    def angles(self, positions: torch.Tensor, spec: RopeSpec) -> tuple[torch.Tensor, torch.Tensor]:
        return self.rest.angles(positions, spec)

    def act_mul(self, gate: torch.Tensor, up: torch.Tensor, kind: str) -> torch.Tensor:
        both = joined(gate, up) if ACTIVATIONS.get(kind) in self.operators else None
        if both is None:
            return self.rest.act_mul(gate, up, kind)
        out = torch.empty(up.shape, dtype=up.dtype, device=up.device)
        self.operators[ACTIVATIONS[kind]](out, both)
        return out

    def moe(self, x: torch.Tensor, logits: torch.Tensor, w13: Experts, w2: Experts, spec: MoESpec,
            bias: torch.Tensor | None, live: torch.Tensor | None = None) -> torch.Tensor:
        if not (isinstance(w13.weight, Grouped) and isinstance(w2.weight, Grouped)):
            return self.rest.moe(x, logits, w13, w2, spec, bias, live)
        if reason_against(spec) is not None:
            return Kernels.moe(self, x, logits, w13, w2, spec, bias, live)
        return self.products.moe(x, logits, w13.weight.values, w2.weight.values, spec, bias)

    def sampling_arrays(self, sampling: Sampling, targets: np.ndarray) -> dict[str, np.ndarray]:
        return self.rest.sampling_arrays(sampling, targets)

    def sample(self, logits: torch.Tensor, fed: Mapping[str, torch.Tensor], inputs: torch.Tensor, top: int | None,
               scored: bool) -> Sampled:
        return self.rest.sample(logits, fed, inputs, top, scored)


def joined(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor | None:
    """[T, 2F], if gate and up [T, F] are the halves of such rows one behind the other."""
    if gate.ndim != 2 or gate.shape != up.shape or gate.dtype != up.dtype:
        return None
    tokens, width = gate.shape
    beside = (gate.untyped_storage().data_ptr() == up.untyped_storage().data_ptr()
              and up.storage_offset() == gate.storage_offset() + width)
    if not beside or gate.stride() != (2 * width, 1) or up.stride() != (2 * width, 1):
        return None
    return gate.as_strided((tokens, 2 * width), (2 * width, 1))
