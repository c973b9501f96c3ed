"""The neck: all that core asks of hardware. Six methods of `Platform`, nine of `Ops`; the docstrings are the contract.

A platform is a folder in `platforms/` with a module `platform.py`, or an installed package's entry point in the group
`isthmus.platforms`; either gives one class named `Platform`. It imports nothing else from core than this module.

Rules of the model definitions that call `Ops`: tensors are opaque; only `+ - *` (also with Python numbers), `.shape`,
`.reshape`, basic slices and integer indexing on axis 0 are used on them. Loops and branches run over Python
configuration, never over data or platform.

Versions: a core serves the platforms of its own `INTERFACE_VERSION` and of the one before (`SERVED`). A new version may
add, and what it adds is optional for a platform of the version before: a method by being absent, an op or feature by
`supports` giving a reason, a field by its default. What exists keeps its name, its parameters and its meaning; what is
to go is deprecated in one version and gone two later at the earliest (docs/adding_a_platform.md).
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from .plan import Batch, Bias, Mask, Out, Penalties, Sampling, StepResult
from .specs import AttentionSpec, Bucket, Buckets, LayerState, MoESpec, RawTensor, RopeSpec, StateSpec, WeightSpec

__all__ = ["INTERFACE_VERSION", "AttentionSpec", "Batch", "Bias", "Bucket", "Buckets", "LayerState", "Manifest", "Mask",
           "MoESpec", "Ops", "Out", "Penalties", "Platform", "RawTensor", "RopeSpec", "Sampling", "State", "StateSpec",
           "Step", "StepResult", "Tensor", "Unavailable", "Unsupported", "Weight", "WeightSpec"]

INTERFACE_VERSION = 1
SERVED = range(max(1, INTERFACE_VERSION - 1), INTERFACE_VERSION + 1)

Tensor = Any  # a platform's own array
Weight = Any  # opaque leaf made by Platform.load
State = Any   # opaque memory made by Platform.alloc


class Unavailable(Exception):
    """The platform cannot run on this machine; the message is the reason and, where there is one, the way out."""


class Unsupported(Exception):
    """The platform runs but cannot do this case; the message is the reason."""


@dataclass(frozen=True)
class Manifest:
    """What a platform offers on this device, as data. Validation, start-up choices, `doctor` and docs read it.

    compute_dtypes: names a model can run in, the best first.  kv_dtypes: of K and V, the default first.
    formats:        checkpoint formats kept in their own precision by a kernel; all others are expanded at load.
    page_sizes:     tokens per page, the default first.  buckets: sizes it compiles for, None = any size.
    memory_total, memory_free: bytes on the device at probe.
    features:       words of `FEATURES` that the platform has.
    determinism:    "T0" a position's logits are the same bits, and so its token the same, in every batch, chunking
                    and cache hit; "T1" the same batch gives the same bits; "T2" logits within tolerance of the
                    reference. The law `model[*,determinism,*]` compares the bits.
    rank:           preference when several platforms can run and none was named; the highest is taken. The reference
                    is 0, a host processor 10, an accelerator 20.
    kv_share:       share of the memory left after the weights that K and V may take unless the user says otherwise.
    memory_floor:   share of memory_total; when `memory()` says that less is free, core gives pages of K and V back.
    local_ranks:    ranks of tensor parallelism that this one object runs itself (one program over several devices);
                    the same `world` that it was probed with. 1 = one rank, as `probe(rank, world)` says which.
    details:        further facts for people (threads, driver, library versions).
    """

    name: str
    device: str
    interface: int
    compute_dtypes: tuple[str, ...]
    kv_dtypes: tuple[str, ...]
    formats: tuple[str, ...]
    page_sizes: tuple[int, ...]
    buckets: Buckets | None
    memory_total: int
    memory_free: int
    features: frozenset[str]
    determinism: str
    max_top_logprobs: int = 20
    rank: int = 0
    kv_share: float = 0.25
    memory_floor: float = 0.0
    local_ranks: int = 1
    details: Mapping[str, str] = field(default_factory=dict)


FEATURES = {
    "sliding_window": "attention limited to the last tokens",
    "softcap": "tanh soft cap on attention scores",
    "logprobs": "log-probabilities of sampled and prompt tokens",
    "penalties": "repetition, presence and frequency penalties",
    "logit_bias": "per-token bias and bans",
    "grammar_mask": "token masks of a grammar",
    "late_mask": "a step can be launched before its masks are known",
    "moe": "sparse feed-forward layers",
    "expert_groups": "experts chosen in groups, or by scores that a bias corrects",
    "partial_rope": "rotation of a head's first elements only",
    "kv_scales": "scales of K and V in 8-bit floats",
    "overlap": "a step can be launched before the previous one is collected",
    "export_pages": "pages can be copied to the host and back",
    "adapters": "rows of one batch with different low-rank adapters",
}


# Words that came after platforms of this version were written: a manifest.toml need not say that it lacks them.
LATER = ("expert_groups", "partial_rope", "kv_scales", "late_mask", "adapters")


class Step(Protocol):
    """A compiled forward pass."""

    def __call__(self, state: State, batch: Batch) -> tuple[Out, State]:
        """Launch one step; may return before it is done. The state passed in must not be used again.

        Steps run in the order they were launched, each seeing the state the one before it left, so a second step may
        be launched before the first is collected. A step that fails leaves other pages untouched and raises in
        `Out.collect`.
        """
        ...


class Ops(Protocol):
    """The mathematics that model definitions are written in. Built anew inside each step (or trace) from the state and
    the batch; it holds the state, the only mutable thing. Shapes: T tokens, D model width, L logit rows, V vocabulary.
    """

    def embed(self, ids: Tensor, weight: Weight) -> Tensor:
        """[T] ids -> [T, D] in the compute dtype. Ids below 0 stand for the last sampled token of their row's sequence
        slot (see `Batch.tokens`): ids are the batch's tokens, and each is looked up in State under its row's slot. With
        the feature "adapters" also of the batch's `adapters`, none of which is below 0."""
        ...

    def linear(self, x: Tensor, weight: Weight, bias: Weight | None = None) -> Tensor:
        """[T, in] -> [T, out]: x @ w.T + bias. The weight's leaf decides the kernel, once. Stacked parts stay stacked
        in order. The result is in x's dtype, except that a platform may return float32 for the vocabulary's."""
        ...

    def rms_norm(self, x: Tensor, weight: Weight, eps: float) -> Tensor:
        """Over the last axis: x / sqrt(mean(x^2) + eps) * weight, in float32 inside. Also on [T, heads, head_dim]."""
        ...

    def rope(self, x: Tensor, spec: RopeSpec) -> Tensor:
        """[T, heads, head_dim] rotated by each token's position in the batch; angles in float32 or better. Fewer
        frequencies than head_dim / 2 rotate the first elements only, see `RopeSpec`."""
        ...

    def attention(self, q: Tensor, k: Tensor, v: Tensor, layer: int, spec: AttentionSpec) -> Tensor:
        """q [T, heads, d], k and v [T, kv_heads, d] -> [T, heads, d].

        Writes k and v to the batch's slots of this layer's pages first, then lets each token see its row's pages up to
        its own position (and window). heads is a multiple of kv_heads; query head h reads kv head
        h // (heads / kv_heads). A slot of page 0 may be written, and is never read by a real row.
        """
        ...

    def act_mul(self, gate: Tensor, up: Tensor, kind: str) -> Tensor:
        """act(gate) * up; kind is "silu", "gelu_tanh", "gelu" (exact) or "sigmoid". A gate of [T, 1] goes over up's
        last axis."""
        ...

    def moe(self, x: Tensor, router_logits: Tensor, w13: Weight, w2: Weight, spec: MoESpec,
            bias: Weight | None = None) -> Tensor:
        """[T, D], router logits [T, experts] -> [T, D]; w13 [experts, 2F, D] (gate above up), w2 [experts, D, F].

        bias [experts], float32 in every compute dtype, is added to the scores for the choice alone; the weights are
        the scores without it, then `renormalize` and `scale`. A group's score is the sum of its two best corrected
        scores where there is a bias (groups have two experts at least then), else its best score; ties go to the
        lower group. An expert outside the `top_groups` best is never chosen, whatever is left, below 0 too.
        A platform without the feature "expert_groups" gets neither groups nor a bias, and need not take one.
        Source: DeepSeek-AI 2024, DeepSeek-V2 (best score of a group) and DeepSeek-V3 (bias, two best).
        """
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over the ranks of tensor parallelism; x itself with one rank. May work in place on x."""
        ...

    def sample(self, logits: Tensor, softcap: float | None = None) -> Tensor:
        """[L, V] -> the step's output, in the order that `plan.Sampling` states; logits first become
        softcap * tanh(logits / softcap) where a cap is given. Keeps each sampled token in State under the row's
        sequence slot. The model returns what this returns."""
        ...


class Platform(Protocol):
    """One rank on one device. The constructor takes `options`, a mapping of strings, and does nothing costly.

    interface_version: that the platform was written for, a literal in its own code; core takes those of `SERVED`.
    """

    interface_version: int

    def probe(self, rank: int = 0, world: int = 1) -> Manifest:
        """Claim the device for this rank. Raises `Unavailable` with the reason. Called first and once."""
        ...

    def supports(self, op: str, **case: Any) -> str | None:
        """None if the platform can do the case, else the reason. Asked at load with the real case, never in a step.

        Ops by name with what they would get: linear(format, dtype), attention(head_dim, heads, kv_heads, page_size,
        window, softcap, dtype), moe(experts, top_k, format, dtype), and features by their word in `FEATURES`. Asked
        only of platforms with the feature: moe(..., groups, top_groups, bias) and rope(head_dim, rotated, dtype), with
        bias True or False and the number of elements that rotate. "expert_parallel", asked without more: may each rank
        have some of the experts (`WeightSpec.cut`), and `moe` give their part of the sum?
        """
        ...

    def load(self, raws: Sequence[RawTensor], spec: WeightSpec, dtype: str) -> Weight:
        """Place one weight: cut for this rank, stacked along the output axis, cast to `dtype` or kept in its format.

        `raws` correspond to `spec.names`. Norms and biases may be kept in float32. The bytes may be read only until
        return. Raises `Unsupported` for a format it can neither keep nor expand.
        """
        ...

    def alloc(self, spec: StateSpec, pages: int) -> State:
        """Memory for `pages` pages (page 0 included) and `spec.seqs` sequence slots."""
        ...

    def compile(self, forward: Callable[[Ops, Any, Batch], Tensor], weights: Any, bucket: Bucket | None) -> Step:
        """Make a step of `forward(ops, weights, batch)` for one bucket; `None` = any size. Eager, captured or compiled
        is the platform's business; it may return before it is done and serve eagerly meanwhile. A forward that returns
        another tensor than `Ops.sample`'s (conformance, of a single op) has it collected: `Out.collect` then gives a
        numpy array of float32 or float64."""
        ...

    def copy_pages(self, state: State, src: Sequence[int], dst: Sequence[int]) -> State:
        """Copy whole pages of all layers, src[i] to dst[i]; the lists are disjoint."""
        ...

    # Optional, each with a default in core when absent:
    #   export_pages(state, pages) -> bytes-like, import_pages(state, pages, data) -> State: Unsupported when absent
    #   memory() -> (total, free) bytes now: the manifest's figures when absent
    #   describe(weight) -> str, e.g. "int4 groups of 32": the leaf's class name when absent
    #   close() -> None: nothing when absent
