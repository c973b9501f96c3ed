"""The accelerator base's `Kernels` in Triton: what a GPU platform computes with unless it knows better."""
from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch.nn import functional as F

from ...core.platform import AttentionSpec, Batch, Bucket, MoESpec, RawTensor, RopeSpec, Sampling, WeightSpec
from ..accelerator.attention import Backend, Composed, View
from ..accelerator.cache import LayerCache
from ..accelerator.device import Device
from ..accelerator.kernels import Kernels
from ..accelerator.quant import Experts, Leaf, Vector
from ..accelerator.sampling import Sampled
from . import activation, attention_decode, attention_ragged, kv_write, moe_gemm, norm, rope, sampling
from .paged import PagedKV, paged_kv
from .tiles import Tile, converts_fp8, decode_tile, ragged_tile, refusal
from .weights import KEPT, Kept, Policy, load_weight


class Attention:
    """Decode with split contexts and ragged prefill over the pages as they lie.

    long: tokens of a context from which a row of one token among prompts is worth two launches of its own. In a
    prompt's tile one program would walk over all of it.
    """

    name = "Triton kernels over pages"
    long = 1024

    def __init__(self, device: Device) -> None:
        self.family, self.processors = device.arch, max(1, device.processors)
        self.native_fp8 = converts_fp8(device.arch)

    def paged(self, cache: LayerCache) -> PagedKV:
        return paged_kv(cache.kv, cache.scales, cache.k_scale, cache.v_scale, self.native_fp8)

    def takes(self, q: torch.Tensor, cache: LayerCache) -> bool:
        return refusal(self.family, q.shape[2], q.element_size(), cache.kv.element_size()) is None

    def ragged_tile(self, q: torch.Tensor, cache: LayerCache) -> Tile:
        return ragged_tile(self.family, q.shape[2], q.element_size(), cache.kv.element_size())

    def wants(self, q: torch.Tensor, cache: LayerCache, view: View) -> tuple[str, ...]:
        if view.decode:
            return ()
        return (f"tiles.{attention_ragged.tokens_per_tile(self.ragged_tile(q, cache), q.shape[1], cache.kv_heads)}",)

    def plan(self, view: View, name: str) -> np.ndarray:
        host, each = view.host, int(name.removeprefix("tiles."))
        return attention_ragged.plan_tiles(host.starts, host.lengths, len(host.tokens), each, self.alone(host))

    def alone(self, host: Batch) -> int:
        """How many rows at the front of a mixed batch are attended as in a decode step: those of one token, if one of
        them is long. Mixed batches are in no graph, so the host's numbers may decide."""
        single = int(np.argmin(np.append(np.diff(host.starts) == 1, False)))
        return single if host.lengths[:single].max(initial=0) > self.long else 0

    def whole(self, bucket: Bucket, page_size: int) -> str | None:
        return None

    def prepare(self, view: View) -> None:
        """Nothing: all that a step needs was fed."""

    def attend(self, q: torch.Tensor, cache: LayerCache, view: View, spec: AttentionSpec) -> torch.Tensor:
        pages, lengths = view.fed["pages"], view.fed["lengths"]
        rows, tokens = len(lengths), len(q)
        if view.decode:
            out = self._decode(q[:rows], cache, pages[:tokens], lengths[:tokens], view.page_size, spec)
            return out if rows >= tokens else F.pad(out, (0, 0, 0, 0, 0, tokens - rows))
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        if alone := self.alone(view.host):
            used = -(-int(view.host.lengths[:alone].max()) // view.page_size)
            self._decode(q[:alone], cache, pages[:alone, :used], lengths[:alone], view.page_size, spec, out[:alone])
        (name,) = self.wants(q, cache, view)
        attention_ragged.ragged_attention(
            q, self.paged(cache), pages, lengths, view.fed["starts"], view.fed[name], tile=self.ragged_tile(q, cache),
            scale=spec.scale, window=spec.window, softcap=spec.softcap, out=out)
        return out

    def _decode(self, q: torch.Tensor, cache: LayerCache, pages: torch.Tensor, lengths: torch.Tensor, page_size: int,
                spec: AttentionSpec, out: torch.Tensor | None = None) -> torch.Tensor:
        """Rows of one token each; contexts are shared as far as the table's width makes it worth it."""
        kv_heads = cache.kv_heads
        tile = decode_tile(self.family, q.shape[1] // kv_heads, 1, q.shape[2], cache.kv.element_size())
        splits = attention_decode.plan_splits(len(q), kv_heads, pages.shape[1], page_size, self.processors)
        return attention_decode.decode_attention(
            q, self.paged(cache), pages, lengths, tile=tile, splits=splits, scale=spec.scale, window=spec.window,
            softcap=spec.softcap, out=out)[0]


class TritonKernels(Kernels):
    """Every op by a kernel of this folder, on one device."""

    kept = KEPT
    fuses_rope = True

    def __init__(self, device: Device, policy: Policy) -> None:
        super().__init__(device)
        self.policy = policy
        self.backends = (Attention(device), Composed())
        self.frequencies: dict[RopeSpec, torch.Tensor] = {}
        self.maps: dict[tuple[range, int], torch.Tensor] = {}

    def takes(self, backend: Backend, q: torch.Tensor, cache: LayerCache, spec: AttentionSpec) -> bool:
        return not isinstance(backend, Attention) or backend.takes(q, cache)

    def load(self, raws: Sequence[RawTensor], spec: WeightSpec, dtype: str) -> Leaf | Kept:
        return load_weight(raws, spec, dtype, self.device, self.policy)

    def write(self, cache: LayerCache, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        kv_write.write_kv(k, v, slots, self.backends[0].paged(cache))

    def rope_write(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
                   cache: LayerCache, slots: torch.Tensor) -> torch.Tensor:
        return kv_write.rope_write(q, k, v, cos, sin, slots, self.backends[0].paged(cache))

    def rms_norm(self, x: torch.Tensor, weight: Vector, eps: float) -> torch.Tensor:
        return norm.rms_norm(x, weight.values, eps)

    def angles(self, positions: torch.Tensor, spec: RopeSpec) -> tuple[torch.Tensor, torch.Tensor]:
        if spec not in self.frequencies:
            self.frequencies[spec] = rope.turns_of(spec.inv_freq, self.device.torch)
        return rope.rope_tables(positions, self.frequencies[spec], spec.scale)

    def rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return rope.apply_rope(x, cos, sin)

    def act_mul(self, gate: torch.Tensor, up: torch.Tensor, kind: str) -> torch.Tensor:
        return activation.act_mul(gate, up, kind)

    def moe(self, x: torch.Tensor, logits: torch.Tensor, w13: Experts, w2: Experts, spec: MoESpec,
            bias: torch.Tensor | None, live: torch.Tensor | None = None) -> torch.Tensor:
        return moe_gemm.moe(x, logits, w13.weight.matrix, w2.weight.matrix, spec, bias, family=self.device.arch,
                            expert_map=self._own(w13, spec.experts), live=live)

    def _own(self, weight: Experts, experts: int) -> torch.Tensor | None:
        """The number of each expert among those that this rank has, -1 = another rank's; None = all are here."""
        if weight.held is None:
            return None
        key = weight.held, experts
        if key not in self.maps:
            self.maps[key] = torch.tensor([n - weight.held.start if n in weight.held else -1 for n in range(experts)],
                                          dtype=torch.int32, device=self.device.torch)
        return self.maps[key]

    def sampling_arrays(self, sampling_: Sampling, targets: np.ndarray) -> dict[str, np.ndarray]:
        return sampling.host_arrays(sampling_, len(targets)) | {"targets": targets}

    def sample(self, logits: torch.Tensor, fed: Mapping[str, torch.Tensor], inputs: torch.Tensor, top: int | None,
               scored: bool) -> Sampled:
        found = sampling.sample(logits, fed["targets"], fed, inputs=inputs, top_logprobs=top)
        scores = () if top is None else (found.logprobs, found.top_ids, found.top_logprobs)
        return Sampled(found.tokens, scores)
