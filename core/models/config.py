"""A model's configuration, decided once at load: sizes, and one rotary and one attention description per layer."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import gcd
from typing import Any

from ..errors import CheckpointError
from ..specs import AttentionSpec, LayerState, MoESpec, RopeSpec
from .fields import Fields
from .rope import LOCAL, rope_inv_freq, static_limit

FULL = "full_attention"
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu",
               "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}


@dataclass(frozen=True)
class Sparse:
    """The sparse feed-forward of a model.

    layers: for each layer, whether it has one.  width: of one expert.  shared: of the expert that every token goes
    through, 0 = there is none.  gated: is that one weighed by a sigmoid gate?  bias: has the router one of scores?
    apart: has each rank some of the experts, and not a part of every one?
    """

    spec: MoESpec
    layers: tuple[bool, ...]
    width: int
    shared: int
    gated: bool = True
    bias: bool = False
    apart: bool = False

    @property
    def grouped(self) -> bool:
        """Does the choice need the feature "expert_groups"?"""
        return self.bias or self.spec.groups > 1


@dataclass(frozen=True)
class Family:
    """What a model type fixes beyond the words of its configuration.

    defaults:    values for keys that its configurations may leave out.
    layer_types: (fields, layers) -> one of "full_attention", "sliding_attention" per layer, when none are listed.
    qkv_bias, o_bias: True or False where the type fixes it, None where the key `attention_bias` decides.
    qk_norm:     likewise, with the key `use_qk_norm`.  partial_rope: does `partial_rotary_factor` mean something?
    sparse:      (fields, layers) -> the sparse feed-forward, for the types that have one.
    """

    layer_types: Callable[[Fields, int], tuple[str, ...]]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    qkv_bias: bool | None = None
    o_bias: bool | None = None
    qk_norm: bool | None = False
    partial_rope: bool = False
    scaled_embedding: bool = False
    norms_add_one: bool = False
    sparse: Callable[[Fields, int], Sparse] | None = None


@dataclass(frozen=True)
class ModelConfig:
    """One model. `rope[i]` and `attention[i]` belong to layer i; layers alike share one object.

    hidden, intermediate: widths of the residual stream and of the feed-forward.  eps: of every RMS norm.
    max_position: longest context in tokens.  embed_scale: factor on embeddings.  logit_softcap: as in `Ops.sample`.
    eos_ids: ids that end a text.  tied: the head is the embedding matrix.  sparse: None = every layer is dense.
    drafts: layers behind the model's own, for drafts of later tokens, which a checkpoint may have.
    first_state: where its layers' caches begin in State: behind those of the model that it drafts for.
    """

    name: str
    model_type: str
    vocab_size: int
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    max_position: int
    eps: float
    act: str
    tied: bool
    embed_scale: float
    logit_softcap: float | None
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    norms_add_one: bool
    eos_ids: tuple[int, ...]
    rope: tuple[RopeSpec, ...]
    attention: tuple[AttentionSpec, ...]
    sparse: Sparse | None = None
    drafts: int = 0
    first_state: int = 0

    @property
    def qkv_widths(self) -> tuple[int, int, int]:
        """Output widths of the q, k and v projections."""
        return self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim

    def experts_apart(self, world: int) -> ModelConfig:
        """With whole experts on each rank. Raises `CheckpointError` where there are none, or they do not divide."""
        if self.sparse is None or not any(self.sparse.layers):
            raise CheckpointError("--expert-parallel: this model has no experts, leave it out")
        if self.sparse.spec.experts % world:
            raise CheckpointError(f"--expert-parallel: {self.sparse.spec.experts} experts cannot be shared evenly by "
                                  f"{world} ranks (--tensor-parallel-size); without it each is cut along its width")
        return replace(self, sparse=replace(self.sparse, apart=True))

    def per_rank(self, world: int) -> ModelConfig:
        """The view of one of `world` ranks of tensor parallelism: its share of the heads and of the feed-forward.

        Raises `CheckpointError` with the numbers that would do when something does not divide.
        """
        sparse = self.sparse
        shared = [("attention heads", self.heads), ("key and value heads", self.kv_heads)]
        if sparse is None or not all(sparse.layers):
            shared.append(("the feed-forward's width", self.intermediate))
        if sparse is not None:
            shared += [("an expert's width", sparse.width)] * (not sparse.apart)
            shared.append(("the shared expert's width", sparse.shared))
        for what, count in shared:
            if count % world:
                raise CheckpointError(f"--tensor-parallel-size {world}: {what}, {count}, cannot be shared evenly; "
                                      f"{_shares(gcd(*(count for _, count in shared)))}")
        if sparse is not None:
            width = sparse.width if sparse.apart else sparse.width // world
            sparse = replace(sparse, width=width, shared=sparse.shared // world)
        return replace(self, heads=self.heads // world, kv_heads=self.kv_heads // world,
                       intermediate=self.intermediate // world, sparse=sparse)

    @property
    def state_layers(self) -> tuple[LayerState, ...]:
        """The cache that each layer needs."""
        return (LayerState(self.kv_heads, self.head_dim),) * self.layers


def _shares(common: int) -> str:
    """Which numbers of ranks divide `common`, for a message."""
    able = [str(ranks) for ranks in range(2, common + 1) if common % ranks == 0]
    if not able:
        return "leave it out: no number of ranks can share this model"
    return f"{' or '.join((', '.join(able[:-1]), able[-1]) if able[1:] else able)} would do"


def parse_config(config: Mapping[str, Any], family: Family, name: str = "") -> ModelConfig:
    """Check a configuration in the words of a Hugging Face config.json and settle everything that depends on it.

    Raises `CheckpointError` naming the key, its value and what is supported.
    """
    fields = Fields(dict(family.defaults) | {k: v for k, v in Fields(config).values.items() if v is not None})
    _refuse(fields)
    layers = fields.integer("num_hidden_layers", high=4096)
    heads = fields.integer("num_attention_heads", high=4096)
    kv_heads = fields.integer("num_key_value_heads", heads, high=4096)
    hidden = fields.integer("hidden_size", high=2**20)
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads = {heads}")
    if "head_dim" not in fields and hidden % heads:
        raise fields.error("num_attention_heads", heads, f"a divisor of hidden_size = {hidden}, or head_dim be given")
    head_dim = fields.integer("head_dim", hidden // heads, low=2, high=4096)
    types = _layer_types(fields, family, layers)
    attention_bias = fields.flag("attention_bias", False)
    vocab_size = fields.integer("vocab_size", high=2**24)
    return ModelConfig(
        name=name, model_type=fields.get("model_type", ""), vocab_size=vocab_size, layers=layers, hidden=hidden,
        intermediate=fields.integer("intermediate_size", high=2**22), heads=heads, kv_heads=kv_heads, head_dim=head_dim,
        max_position=_max_position(fields, types), eps=fields.number("rms_norm_eps", 1e-6, high=1.0),
        act=fields.choice("hidden_activation" if "hidden_activation" in fields else "hidden_act", ACTIVATIONS, "silu"),
        tied=fields.flag("tie_word_embeddings", False), embed_scale=hidden**0.5 if family.scaled_embedding else 1.0,
        logit_softcap=fields.optional_number("final_logit_softcapping"),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention_bias if family.o_bias is None else family.o_bias,
        qk_norm=fields.flag("use_qk_norm", False) if family.qk_norm is None else family.qk_norm,
        mlp_bias=fields.flag("mlp_bias", False), norms_add_one=family.norms_add_one,
        eos_ids=eos_ids(fields.get("eos_token_id", ()), vocab_size), rope=_ropes(fields, types, family.partial_rope),
        attention=_attentions(fields, types, head_dim), sparse=family.sparse and family.sparse(fields, layers),
        drafts=fields.integer("num_nextn_predict_layers", 0, low=0, high=4096))


def eos_ids(value: Any, vocab_size: int) -> tuple[int, ...]:
    """Distinct ids that end a text, from one id or a list; ids outside the vocabulary can never be sampled: dropped."""
    values = value if isinstance(value, (list, tuple)) else (value,)
    if any(not isinstance(v, int) or isinstance(v, bool) for v in values):
        raise Fields({}).error("eos_token_id", value, "a token id or a list of them")
    return tuple(sorted({v for v in values if 0 <= v < vocab_size}))


def _refuse(fields: Fields) -> None:
    """Settings that would change the result and that nothing here computes."""
    if fields.flag("use_bidirectional_attention", False):
        raise fields.error("use_bidirectional_attention", True, "false: only causal models generate")


def _layer_types(fields: Fields, family: Family, layers: int) -> tuple[str, ...]:
    if "layer_types" not in fields:
        return family.layer_types(fields, layers)
    types = fields.get("layer_types")
    if not isinstance(types, (list, tuple)) or len(types) != layers:
        raise fields.error("layer_types", types, f"a list of {layers}, one per layer")
    return tuple(Fields({f"layer_types[{i}]": t}).choice(f"layer_types[{i}]", {FULL: FULL, LOCAL: LOCAL})
                 for i, t in enumerate(types))


def _max_position(fields: Fields, types: tuple[str, ...]) -> int:
    limits = [static_limit(fields.values, t) for t in set(types)]
    return min([fields.integer("max_position_embeddings", 2048)] + [limit for limit in limits if limit is not None])


def _ropes(fields: Fields, types: tuple[str, ...], partial: bool) -> tuple[RopeSpec, ...]:
    specs = {}
    for kind in set(types):
        inv_freq, scale = rope_inv_freq(fields.values, kind, partial)
        specs[kind] = RopeSpec(tuple(inv_freq.tolist()), scale)
    return tuple(specs[t] for t in types)


def _attentions(fields: Fields, types: tuple[str, ...], head_dim: int) -> tuple[AttentionSpec, ...]:
    scale = fields.number("query_pre_attn_scalar", head_dim) ** -0.5
    softcap = fields.optional_number("attn_logit_softcapping")
    specs = {FULL: AttentionSpec(scale, None, softcap)}
    if LOCAL in types:
        specs[LOCAL] = AttentionSpec(scale, fields.integer("sliding_window"), softcap)
    return tuple(specs[t] for t in types)
