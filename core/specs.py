"""Descriptions that core hands to a platform: what to load, what to allocate, what an op must do.

All are immutable and hashable, so that a platform may key its caches and traces on them.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple


class RawTensor(NamedTuple):
    """One tensor as the checkpoint stores it.

    dtype: a name of `core.quant.formats` ("f32", "bf16", "q4_1", ...).
    shape: logical shape; the last axis is contiguous and, for block formats, a multiple of the block length.
    data:  uint8 numpy array or memoryview over the bytes, usually a view of a memory-mapped file; row-major unless
           the format says otherwise (awq4 and gptq keep words along the other axis).
    extra: further tensors that the format keeps beside the codes, in the order that it names (scales, biases ...).
    """

    dtype: str
    shape: tuple[int, ...]
    data: Any
    extra: tuple[RawTensor, ...] = ()


Role = Literal["linear", "embed", "norm", "bias", "experts"]
Cut = Literal[0, 1, "expert"] | None


@dataclass(frozen=True)
class WeightSpec:
    """How `Platform.load` must treat a weight.

    names: tensors of the checkpoint that are stacked along the output axis (axis 0; axis 1 for "experts", whose
           axis 0 is the expert), so that q, k and v, or gate and up, can be one matrix product. Where a checkpoint
           keeps each expert by itself, the tensors have two axes and come expert by expert, with the same parts each.
    role:  "linear" is used by `Ops.linear`, "embed" by `Ops.embed` and, when tied, also by `Ops.linear`;
           "norm" and "bias" are vectors; "experts" is [experts, out, in] for `Ops.moe`.
           The bias of an `Ops.moe` is loaded with the dtype "f32" whatever the model computes in.
    cut:   axis that tensor parallelism splits (0 = out, 1 = in), counted as for one expert; None = replicated.
           "expert": rank r of n has the experts from r * experts / n on, whole (only for platforms that support
           "expert_parallel").
           A "bias" with cut 1 belongs to a linear that is cut along in: rank 0 alone adds it, `all_reduce` follows.
           Each part is cut by itself, before they are stacked.
    experts: number of experts, for the role "experts"; 0 otherwise.
    narrow: the checkpoint was made for activations in 8 bits, quantized by token, where the weight has 8. A platform
            with such products uses them, unless an option says otherwise; any other computes as ever.
    input_scale: those activations were calibrated to one scale for all tokens: codes times it. Where several are
            stacked, the largest. A platform that has products in 8 bits may use it, and then says "static" in
            `describe`; core tells where none does. None = each token has its own.
    """

    names: tuple[str, ...]
    role: Role
    cut: Cut = None
    experts: int = 0
    narrow: bool = False
    input_scale: float | None = None


@dataclass(frozen=True)
class LayerState:
    """Cache of one layer: `kv_heads` x `head_dim` for K and as many for V, per token and per rank.

    k_scale, v_scale: K and V in an 8-bit float are kept divided by these, and read times them; no matter for other
                      dtypes. From a checkpoint that was calibrated for it; for platforms with the feature "kv_scales".
    """

    kv_heads: int
    head_dim: int
    k_scale: float = 1.0
    v_scale: float = 1.0


class KvFormat(NamedTuple):
    """What K and V take in memory: bytes of a value, and bytes kept beside each head's vector of them."""

    value: int
    vector: int = 0


# "f8_e4m3" (largest 448, no infinity) and "f8_e5m2" are OCP's 8-bit floats (2023), values beyond the range kept as the
# largest in it; "i8" is symmetric, with a float32 scale for each head's vector of one token.
KV_FORMATS = {"f64": KvFormat(8), "f32": KvFormat(4), "bf16": KvFormat(2), "f16": KvFormat(2), "f8_e4m3": KvFormat(1),
              "f8_e5m2": KvFormat(1), "i8": KvFormat(1, 4)}


@dataclass(frozen=True)
class StateSpec:
    """What `Platform.alloc` allocates for a model.

    dtype: of K and V, a name of `KV_FORMATS`.  page_size: tokens in a page.
    seqs:  number of sequence slots (slot 0 is nobody's, as page 0 is); State keeps the last sampled token of each.
    """

    layers: tuple[LayerState, ...]
    dtype: str
    page_size: int
    seqs: int

    def page_bytes(self) -> int:
        """Bytes that one page takes over all layers, K and V together."""
        kept = KV_FORMATS[self.dtype]
        return sum(2 * s.kv_heads * (s.head_dim * kept.value + kept.vector) for s in self.layers) * self.page_size


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding, half-split layout (the first half of what rotates turns with the second).

    inv_freq: angular frequencies in radians per position, float64, scaling already applied: head_dim / 2 of them. With
              fewer, r, the first 2 r elements of a head rotate, element i with i + r, and the others pass as they are,
              without `scale` too; only for platforms with the feature "partial_rope".
    scale:    factor on cosine and sine (YaRN's attention factor); 1 otherwise.
    Source: Su et al. 2021 (RoFormer); scaling rules per `core.models.rope`.
    """

    inv_freq: tuple[float, ...]
    scale: float = 1.0


@dataclass(frozen=True)
class AttentionSpec:
    """Causal attention of one layer: softmax(softcap(q k^T scale)) v.

    window:  a query at position p sees keys at positions p - window + 1 .. p; None = all up to p.
    softcap: s -> softcap * tanh(s / softcap) on the scaled scores, before masking; None = off.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True)
class MoESpec:
    """Sparse feed-forward: route each token to `top_k` experts.

    scoring:     "softmax" or "sigmoid" over the router's logits (float32), before the choice.
    renormalize: divide the chosen scores by their sum + 1e-20 (which tells only where sigmoids are next to 0).
    act:         as in `Ops.act_mul`.  Ties in the choice go to the lower expert number.
    scale:       factor on the weights, after that.
    groups:      equal runs of neighbouring experts.  top_groups: the best groups, out of which alone experts are
                 chosen; both 1 = no groups. See `Ops.moe`; only for platforms with the feature "expert_groups".
    """

    experts: int
    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = True
    act: str = "silu"
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1


@dataclass(frozen=True)
class Bucket:
    """Static sizes of one compiled step: tokens T, rows B, pages per row P, logit rows L."""

    tokens: int
    rows: int
    pages: int
    logits: int


@dataclass(frozen=True)
class Buckets:
    """Sizes a platform compiles for, ascending. A platform that takes any size has `Manifest.buckets = None`."""

    tokens: tuple[int, ...]
    rows: tuple[int, ...]
    pages: tuple[int, ...]
