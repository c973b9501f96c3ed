"""The mathematics of the models, in JAX: called once for each trace. What every layer needs alike is computed once."""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...core.platform import AttentionSpec, Batch, MoESpec, RopeSpec, StateSpec
from .attention import AttentionPlan
from .moe import act_mul, linear, moe
from .quant import RANKS, Dense, Experts, Groups, Vector


@dataclass(frozen=True)
class State:
    """K and V of every layer, and the last sampled token of each sequence slot. Steps take the arrays and give back
    others in the same memory."""

    spec: StateSpec
    layers: tuple[jax.Array, ...]
    last: jax.Array


class Logits(NamedTuple):
    """What `Ops.sample` returns inside a trace: sampling is a program of its own, so that its many variants do not
    multiply the traces of the model."""

    values: jax.Array


class Ops:
    """One trace's view of the state and the batch. `layers` is replaced as attention writes; the batch that a forward
    gets has the State's tokens in place of -1."""

    def __init__(self, layers: tuple[jax.Array, ...], last: jax.Array, batch: Batch, mode: str, world: int) -> None:
        self.layers, self.mode, self.world = list(layers), mode, world
        waiting = last[batch.seqs[batch.rows]]
        self.batch = batch._replace(tokens=jnp.where(batch.tokens < 0, waiting, batch.tokens))
        self.plan = AttentionPlan(self.batch, mode)
        self.turns: dict[RopeSpec, tuple[jax.Array, jax.Array]] = {}

    def embed(self, ids: jax.Array, weight: Dense) -> jax.Array:
        return weight.rows(ids)

    def linear(self, x: jax.Array, weight: Dense | Groups, bias: Vector | None = None) -> jax.Array:
        dense = isinstance(weight, Dense)
        out = weight.product(x) if dense else linear(x, weight, self.mode)
        out = out if bias is None else out + bias.values
        return out if dense and weight.table else out.astype(x.dtype)

    def rms_norm(self, x: jax.Array, weight: Vector, eps: float) -> jax.Array:
        wide = x.astype(jnp.float32)
        scale = lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + eps)
        return (wide * scale * weight.values).astype(x.dtype)

    def rope(self, x: jax.Array, spec: RopeSpec) -> jax.Array:
        if spec not in self.turns:
            self.turns[spec] = turns(self.batch.positions, spec)
        cos, sin = self.turns[spec]
        half = len(spec.inv_freq)
        first, second, rest = jnp.split(x.astype(jnp.float32), [half, 2 * half], -1)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], -1).astype(x.dtype)

    def attention(self, q: jax.Array, k: jax.Array, v: jax.Array, layer: int, spec: AttentionSpec) -> jax.Array:
        self.layers[layer] = self.plan.write(self.layers[layer], k, v)
        return self.plan.attend(q, self.layers[layer], spec)

    def act_mul(self, gate: jax.Array, up: jax.Array, kind: str) -> jax.Array:
        return act_mul(gate, up, kind)

    def moe(self, x: jax.Array, router_logits: jax.Array, w13: Experts | Groups, w2: Experts | Groups,
            spec: MoESpec, bias: Vector | None = None) -> jax.Array:
        return moe(x, router_logits, w13, w2, spec, bias, self.mode)

    def all_reduce(self, x: jax.Array) -> jax.Array:
        return x if self.world == 1 else lax.psum(x, RANKS)

    def sample(self, logits: jax.Array, softcap: float | None = None) -> Logits:
        logits = logits.astype(jnp.float32)
        return Logits(logits if softcap is None else softcap * jnp.tanh(logits / softcap))


def turns(positions: jax.Array, spec: RopeSpec) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine [T, 1, rotated / 2].

    Angles are counted in 2^-32 turns: a product of integers that wraps is exact however far the position, where float32
    would be off by position * 2^-24 radians.
    """
    rates = np.round(np.array(spec.inv_freq) / (2 * math.pi) * 2**32) % 2**32
    phase = positions.astype(jnp.uint32)[:, None, None] * jnp.asarray(rates.astype(np.uint32))
    angles = lax.bitcast_convert_type(phase, jnp.int32).astype(jnp.float32) * (2 * math.pi / 2**32)
    return spec.scale * jnp.cos(angles), spec.scale * jnp.sin(angles)
