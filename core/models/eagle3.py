"""EAGLE-3 heads: one decoder layer that reads a token's embedding beside what three layers of the model say of the
place before it.

As in `core.models.draft_heads` something is kept for each place: g(p), what is combined from the inputs of three of the
model's layers; the head's own step puts its layer's output in its place for the step after. The layer takes both, side
by side, each behind a norm of its own; here each half of its matrices has its own leaf, and both are added. It
always has a matrix of its own.

Source: Li et al. 2025, EAGLE-3.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..platform import Batch, Ops, Tensor
from . import blocks, feed_forward
from .blocks import Entry, Layout
from .draft_heads import OWN_EMBED, OWN_IDS, DraftHead

LAYER = "model.layers.0."
QKV = tuple(f"{LAYER}self_attn.{part}_proj" for part in "qkv")
SOURCES = ("combine.0.weight", "combine.1.weight", "combine.2.weight")  # thirds of the combining matrix, by columns


def halves(name: str) -> tuple[str, str]:
    """What the two halves of one of the layer's matrices are called: for the embedding, for g."""
    return f"{name}.embedded", f"{name}.hidden"


@dataclass(frozen=True)
class Eagle3(DraftHead):
    """taps: the model's layers whose inputs are combined."""

    taps: tuple[int, ...] = ()

    def layout(self) -> Layout:
        config, width = self.config, self.config.hidden
        embedded, hidden = zip(*map(halves, QKV), strict=True)
        layer = blocks.attention_layout(config, 0) | feed_forward.layout(config, 0) | blocks.norm_layout(0, width, {
            "embed_norm": "input_layernorm", "hidden_norm": "hidden_norm", "mlp_norm": "post_attention_layernorm"})
        layer |= {"qkv": blocks.projections(embedded, config.qkv_widths, width, 0, False),
                  "qkv_hidden": blocks.projections(hidden, config.qkv_widths, width, 0, False)}
        tree: Layout = {"layers": [layer], "norm": Entry("model.norm.weight", "norm", (width,))}
        return tree | {name: Entry(name, "linear", (width, width)) for name in SOURCES} | self.own_layout()

    def wholes(self) -> dict[str, str]:
        found = dict.fromkeys(SOURCES, self.combine) | ({OWN_EMBED: OWN_IDS} if self.reduced else {})
        return found | {f"{half}.weight": f"{name}.weight" for name in QKV for half in halves(name)}

    def keep(self, ops: Ops, weights: Mapping[str, Any], batch: Batch, x: Sequence[Tensor]) -> None:
        """In a step of the model. x: the inputs of the layers `taps`, [T, hidden] each."""
        own = weights["draft"]
        g = sum((ops.linear(each, own[name]) for each, name in zip(x[1:], SOURCES[1:], strict=True)),
                ops.linear(x[0], own[SOURCES[0]]))
        before = self._read(ops, g * 0.0, g) * 2.0 + g * -1.0
        self._layer(ops, weights, batch, before, kept_only=True)

    def draft(self, ops: Ops, weights: Mapping[str, Any], batch: Batch) -> Tensor:
        own, nothing = weights["draft"], ops.embed(batch.tokens, weights["embed"]) * 0.0
        x = self._layer(ops, weights, batch, self._read(ops, nothing, nothing) * 2.0)
        self._read(ops, nothing, x)
        rows = ops.rms_norm(x[batch.logit_rows], own["norm"], self.config.eps)
        return ops.sample(ops.linear(rows, own["head"]))

    def _layer(self, ops: Ops, weights: Mapping[str, Any], batch: Batch, before: Tensor,
               kept_only: bool = False) -> Tensor:
        """The decoder layer behind g(p - 1); with `kept_only` nobody wants more of it than K and V."""
        config, own = self.config, weights["draft"]["layers"][0]
        embedded = ops.embed(batch.tokens, weights["embed"])
        if self.target.embed_scale != 1.0:
            embedded = embedded * self.target.embed_scale
        parts = [blocks.project(ops, ops.rms_norm(each, own[norm], config.eps), own, key, config.qkv_widths)
                 for each, norm, key in ((embedded, "embed_norm", "qkv"), (before, "hidden_norm", "qkv_hidden"))]
        q, k, v = ((a + b).reshape(a.shape[0], -1, config.head_dim) for a, b in zip(*parts, strict=True))
        if kept_only:
            rope = config.rope[0]
            ops.attention(ops.rope(q, rope), ops.rope(k, rope), v, config.first_state, config.attention[0])
            return before
        x = before + blocks.attention(ops, q, k, v, own, config, 0)
        return x + feed_forward.forward(ops, ops.rms_norm(x, own["mlp_norm"], config.eps), own, config, 0)
