"""Heads that draft from a model's own hidden states: EAGLE-1, and the MTP layers that checkpoints of DeepSeek-V3's kind
carry.

Both combine a token with the model's hidden state one place before it, h(p - 1), and go through decoder layers of their
own to a guess of h(p), on which the model's head gives the token after it. Step by step:

- `keep` runs inside each step of the model, on all its tokens: it keeps h in a cache layer of its own, where V at a
  place is h, and computes the head's K and V there.
- `draft` is the head's own step, one token a row: h(p - 1) comes from the cache, and the guess of h(p) is kept in its
  place for the step after, until the model's own step puts h(p) there.

A hidden state is read from the cache by attention that has nothing to choose: with queries and keys of 0 and a window
of 2 it is the mean over this place and the one before. Place 0 has none before it and takes its own h; the papers leave
this place out.

A head may have a matrix of its own, over a part of the model's vocabulary. Then what its step draws are numbers among
its own tokens, and the steps after the first look up by these.

Sources: Li et al. 2024, EAGLE; DeepSeek-AI 2024, DeepSeek-V3, section 2.2.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..platform import Batch, Ops, Tensor
from ..specs import AttentionSpec, LayerState
from . import blocks, feed_forward
from .blocks import Entry, Layout
from .config import ModelConfig
from .llama import NORMS

PAIR = AttentionSpec(1.0, window=2)
OWN_HEAD = "lm_head.weight"
OWN_EMBED, OWN_IDS = "lm_head.embedded.weight", "d2t"  # the model's embedding of the head's own tokens; made of these
EMBEDDED, HIDDEN = "combine.embedded.weight", "combine.hidden.weight"  # the halves of what combines both, by columns


@dataclass(frozen=True)
class DraftHead:
    """config: of its decoder layers, `first_state` behind the model's.  target: the model's.  combine: name of the
    matrix that combines both, [hidden, 2 * hidden], the token's embedding first.

    normed: both have a norm of their own before, and the head one behind it (MTP); else (EAGLE) there is none, nor one
    before the first layer's attention.  bias: has the combining matrix one?  own: tokens of its own vocabulary, and 0
    where the model's head is used.
    """

    config: ModelConfig
    target: ModelConfig
    combine: str
    normed: bool
    bias: bool = False
    own: int = 0

    @property
    def reduced(self) -> bool:
        """Does it know a part of the vocabulary only?"""
        return 0 < self.own < self.config.vocab_size

    @property
    def state_layers(self) -> tuple[LayerState, ...]:
        """Those of its decoder layers, then the one with hidden states."""
        return (*self.config.state_layers, LayerState(self.target.hidden // self.target.head_dim, self.target.head_dim))

    def layout(self) -> Layout:
        """Its weights; embedding and head are the model's."""
        config, width = self.config, self.config.hidden
        layers = [blocks.attention_layout(config, i) | feed_forward.layout(config, i) | blocks.norm_layout(
            i, width, NORMS if self.normed or i else {"mlp_norm": NORMS["mlp_norm"]}) for i in range(config.layers)]
        tree: Layout = {"layers": layers, "embedded": Entry(EMBEDDED, "linear", (width, width)),
                        "hidden": Entry(HIDDEN, "linear", (width, width))}
        if self.bias:
            tree["bias"] = Entry(self.combine.replace("weight", "bias"), "bias", (width,))
        if self.normed:
            tree |= blocks.norm_layout(0, width, {"embed_norm": "enorm", "hidden_norm": "hnorm",
                                                  "norm": "shared_head.norm"})
        return tree | self.own_layout()

    def own_layout(self) -> Layout:
        """Of what belongs to its own vocabulary."""
        tree: Layout = {"head": Entry(OWN_HEAD, "linear", (self.own, self.target.hidden))} if self.own else {}
        if self.reduced:
            tree["embed"] = Entry(OWN_EMBED, "embed", (self.own, self.target.hidden))
        return tree

    def wholes(self) -> dict[str, str]:
        """What the layout has and a checkpoint has otherwise -> what it is made of there."""
        return dict.fromkeys((EMBEDDED, HIDDEN), self.combine) | ({OWN_EMBED: OWN_IDS} if self.reduced else {})

    def keep(self, ops: Ops, weights: Mapping[str, Any], batch: Batch, x: Tensor) -> None:
        """In a step of the model. x: [T, hidden], what its last layer gives; `weights` are its own, the head's under
        "draft"."""
        h = ops.rms_norm(x, weights["norm"], self.target.eps)
        nothing, own = h * 0.0, weights["draft"]
        before = self._read(ops, nothing, h) * 2.0 + h * -1.0
        self._layers(ops, self._combined(ops, weights, batch, before), own, kept_only=True)

    def draft(self, ops: Ops, weights: Mapping[str, Any], batch: Batch) -> Tensor:
        """The head's own step. weights: the model's "embed" (or its own) and "head", its own under "draft"."""
        own = weights["draft"]
        nothing = ops.embed(batch.tokens, weights["embed"]) * 0.0
        before = self._read(ops, nothing, nothing) * 2.0
        h = self._layers(ops, self._combined(ops, weights, batch, before), own)
        self._read(ops, nothing, h)
        rows = h[batch.logit_rows]
        if self.normed:
            rows = ops.rms_norm(rows, own["norm"], self.config.eps)
        return ops.sample(ops.linear(rows, own.get("head", weights["head"])), self.target.logit_softcap)

    def _read(self, ops: Ops, nothing: Tensor, kept: Tensor) -> Tensor:
        """Keep [T, hidden] at the places of this step, and read the mean of each and the one before it."""
        heads = kept.shape[0], -1, self.target.head_dim
        none, last = nothing.reshape(*heads), self.config.first_state + self.config.layers
        return ops.attention(none, none, kept.reshape(*heads), last, PAIR).reshape(kept.shape[0], self.target.hidden)

    def _combined(self, ops: Ops, weights: Mapping[str, Any], batch: Batch, before: Tensor) -> Tensor:
        own, embedded = weights["draft"], ops.embed(batch.tokens, weights["embed"])
        if self.target.embed_scale != 1.0:
            embedded = embedded * self.target.embed_scale
        if self.normed:
            embedded = ops.rms_norm(embedded, own["embed_norm"], self.config.eps)
            before = ops.rms_norm(before, own["hidden_norm"], self.config.eps)
        bias = (own["bias"],) if self.bias else ()
        return ops.linear(embedded, own["embedded"], *bias) + ops.linear(before, own["hidden"])

    def _layers(self, ops: Ops, x: Tensor, own: Mapping[str, Any], kept_only: bool = False) -> Tensor:
        """The decoder layers; with `kept_only` nobody wants what comes out of the last, only its K and V."""
        config = self.config
        for i, layer in enumerate(own["layers"]):
            y = ops.rms_norm(x, layer["attn_norm"], config.eps) if "attn_norm" in layer else x
            q, k, v = blocks.qkv(ops, y, layer, config)
            if kept_only and i == config.layers - 1:
                rope = config.rope[i]
                ops.attention(ops.rope(q, rope), ops.rope(k, rope), v, config.first_state + i, config.attention[i])
                break
            x = x + blocks.attention(ops, q, k, v, layer, config, i)
            x = x + feed_forward.forward(ops, ops.rms_norm(x, layer["mlp_norm"], config.eps), layer, config, i)
        return x


def mtp_config(target: ModelConfig, first_state: int) -> ModelConfig:
    """Of a model's first MTP layer: as its last layer."""
    sparse = target.sparse and replace(target.sparse, layers=target.sparse.layers[-1:])
    return replace(target, layers=1, rope=target.rope[-1:], attention=target.attention[-1:], sparse=sparse,
                   first_state=first_state)
