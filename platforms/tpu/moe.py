"""Feed-forward: activations, and routing tokens to experts through one grouped matrix product."""
from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from ...core.platform import MoESpec
from .matmul_kernel import grouped_matmul, refusal
from .quant import Experts, Groups, Vector, precision

ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": partial(jax.nn.gelu, approximate=True),
               "gelu": partial(jax.nn.gelu, approximate=False), "sigmoid": jax.nn.sigmoid}
TILE = 128  # rows of one expert in a tile, at most


def act_mul(gate: jax.Array, up: jax.Array, kind: str) -> jax.Array:
    return (ACTIVATIONS[kind](gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(gate.dtype)


def outside_hidden(scores: jax.Array, spec: MoESpec, corrected: bool) -> jax.Array:
    """Scores [T, experts] for the choice, -inf outside the best groups of each token."""
    grouped = scores.reshape(len(scores), spec.groups, -1)
    best = lax.top_k(grouped, 2 if corrected else 1)[0].sum(-1)
    _, kept = lax.top_k(best, spec.top_groups)
    seen = (kept[:, None] == jnp.arange(spec.groups)[:, None]).any(-1)
    return jnp.where(seen[..., None], grouped, -jnp.inf).reshape(scores.shape)


def route(logits: jax.Array, spec: MoESpec, bias: Vector | None) -> tuple[jax.Array, jax.Array]:
    """Router logits [T, experts] -> chosen experts [T, top_k] and their weights [T, top_k], float32."""
    logits = logits.astype(jnp.float32)
    scores = jax.nn.sigmoid(logits) if spec.scoring == "sigmoid" else jax.nn.softmax(logits, -1)
    choice = scores if bias is None else scores + bias.values
    if spec.groups > 1:
        choice = outside_hidden(choice, spec, bias is not None)
    _, chosen = lax.top_k(choice, spec.top_k)  # the lower index first among equals
    weights = jnp.take_along_axis(scores, chosen, -1)
    if spec.renormalize:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return chosen, weights * spec.scale


def kernel_takes(weight: Experts | Groups, mode: str) -> bool:
    """Does the Pallas kernel run a product with this weight?"""
    return mode == "interpret" or (mode == "mosaic" and refusal(weight) is None)


def linear(x: jax.Array, weight: Groups, mode: str) -> jax.Array:
    """[T, in] -> [T, out] float32, with one matrix kept in groups."""
    if not kernel_takes(weight, mode):
        return jnp.dot(x, weight.expanded(x.dtype)[0], precision=precision(x.dtype),
                       preferred_element_type=jnp.float32)
    rows = min(TILE, -(-len(x) // 16) * 16)
    tiles = -(-len(x) // rows)
    filled = jnp.pad(x, ((0, tiles * rows - len(x)), (0, 0)))
    out = grouped_matmul(filled, weight, jnp.zeros(tiles, jnp.int32), tiles, mode == "interpret")
    return out[:len(x)]


def moe(x: jax.Array, logits: jax.Array, w13: Experts | Groups, w2: Experts | Groups, spec: MoESpec,
        bias: Vector | None, mode: str) -> jax.Array:
    """[T, D] -> [T, D]: pairs of token and expert, sorted by expert, go through both products; float32 sums."""
    chosen, weights = route(logits, spec, bias)
    pairs = chosen.reshape(-1)
    order = jnp.argsort(pairs, stable=True)
    counts = jnp.bincount(pairs, length=spec.experts)
    if kernel_takes(w13, mode) and kernel_takes(w2, mode):
        out = _in_tiles(x[order // spec.top_k], pairs[order], counts, w13, w2, spec, mode)
    else:
        out = _feed_forward(x[order // spec.top_k], w13, w2, spec,
                            lambda x, w: lax.ragged_dot(x, w.expanded(x.dtype), counts, precision=precision(x.dtype),
                                                        preferred_element_type=jnp.float32))
    scaled = out * weights.reshape(-1)[order][:, None]
    # Back in order of the tokens: a sum over top_k neighbours needs no scatter of sums.
    back = jnp.zeros_like(order).at[order].set(jnp.arange(len(order)))
    return scaled[back].reshape(len(x), spec.top_k, -1).sum(1).astype(x.dtype)


def _in_tiles(x: jax.Array, experts: jax.Array, counts: jax.Array, w13: Experts | Groups, w2: Experts | Groups,
              spec: MoESpec, mode: str) -> jax.Array:
    """The kernel's way: each expert's rows filled up to whole tiles. x [pairs, D] sorted by expert, as `experts` is."""
    rows = min(TILE, max(16, 1 << (len(x) // spec.experts).bit_length()))
    tiles = min(len(x), -(-len(x) // rows) + spec.experts)
    per_expert = -(-counts // rows)
    ends = jnp.cumsum(per_expert)
    within = jnp.arange(len(x)) - (jnp.cumsum(counts) - counts)[experts]
    place = (ends - per_expert)[experts] * rows + within
    number = jnp.arange(tiles)
    expert = jnp.minimum(jnp.sum(number[:, None] >= ends[None], 1), spec.experts - 1).astype(jnp.int32)
    filled = jnp.zeros((tiles * rows, x.shape[1]), x.dtype).at[place].set(x)
    out = _feed_forward(filled, w13, w2, spec,
                        lambda x, w: grouped_matmul(x, w, expert, ends[-1], mode == "interpret"))
    return out[place]


def _feed_forward(x: jax.Array, w13: Experts | Groups, w2: Experts | Groups, spec: MoESpec, product) -> jax.Array:
    gate, up = jnp.split(product(x, w13).astype(x.dtype), 2, -1)
    return product(act_mul(gate, up, spec.act), w2)
