"""From logits to tokens in the order that `Sampling` states, all rows at once, without a sort of the vocabulary.

Top-k and top-p keep all logits above a threshold, and of those equal to it the lowest ids: the threshold is found bit
by bit on the logits' ordered bit patterns, exactly and in 32 passes at any k. Sums of weights go in two levels, so
that float32 is as good for 150,000 entries as for a few hundred.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import lax

Arrays = Mapping[str, jax.Array]
BLOCK = 256  # entries that are summed before the sums are


def sample(logits: jax.Array, last: jax.Array, given: Arrays) -> tuple[dict[str, jax.Array], jax.Array]:
    """logits [L, V] after a soft cap and `last` [seqs] of the State -> the step's result by field, and the new `last`.

    given: the arrays of `Sampling` by name, those of penalties, bias and mask with a prefix; targets [L]; seqs [L] and
    inputs [L] of each logit row: its sequence slot, and the token that it follows (-1 = in `last`).
    """
    logits = logits.astype(jnp.float32)
    targets, seqs = given["targets"], given["seqs"]
    inputs = jnp.where(given["inputs"] < 0, last[seqs], given["inputs"])
    tokens = choose(adjust(logits, given, inputs), given)
    tokens = jnp.where(targets == -1, tokens, jnp.maximum(targets, 0)).astype(jnp.int32)
    last = last.at[jnp.where(targets == -1, seqs, len(last))].set(tokens, mode="drop")
    out = {"tokens": tokens}
    if "top_logprobs" in given:
        total = jax.nn.logsumexp(logits, -1)
        out["logprobs"] = jnp.take_along_axis(logits, tokens[:, None], 1)[:, 0] - total
        values, out["top_ids"] = lax.top_k(logits, min(len(given["top_logprobs"]), logits.shape[1]))
        out["top_logprobs"] = values - total[:, None]
    return out, last


# Mask, bias, penalties. Entries that only fill an array up name a row past the last, and are dropped.

def adjust(logits: jax.Array, given: Arrays, inputs: jax.Array) -> jax.Array:
    """[L, V] after mask, bias and penalties."""
    if "mask.rows" in given:
        rows, bits = given["mask.rows"], given["mask.bits"]
        token = jnp.arange(logits.shape[1])
        allowed = bits[:, token // 32] >> (token % 32).astype(jnp.uint32) & 1
        kept = jnp.where(allowed == 1, logits[jnp.minimum(rows, len(logits) - 1)], -jnp.inf)
        logits = logits.at[rows].set(kept, mode="drop")
    if "bias.rows" in given:
        logits = logits.at[given["bias.rows"], given["bias.ids"]].add(given["bias.values"], mode="drop")
    if "penalties.rows" in given:
        logits = penalise(logits, given, inputs)
    return logits


def penalise(logits: jax.Array, given: Arrays, inputs: jax.Array) -> jax.Array:
    rows, ids, pending = (given[f"penalties.{name}"] for name in ("rows", "ids", "pending"))
    repetition, presence, frequency = (given[f"penalties.{name}"][:, None]
                                       for name in ("repetition", "presence", "frequency"))
    every = jnp.arange(len(logits))
    counts = jnp.zeros(logits.shape, jnp.int32).at[rows, ids].add(given["penalties.counts"], mode="drop")
    counts = counts.at[every, inputs].add(pending)
    seen = jnp.zeros(logits.shape, bool).at[rows, ids].set(True, mode="drop")
    seen = seen.at[every, inputs].max(pending == 1)
    scaled = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(seen, scaled, logits)
    off = presence * (counts > 0) + frequency * counts
    return jnp.where(counts > 0, logits - off, logits)


# Choice.

def choose(logits: jax.Array, given: Arrays) -> jax.Array:
    """[L] tokens of adjusted logits [L, V]: the first of the largest, or drawn where a row's temperature is above 0."""
    greedy = jnp.argmax(logits, -1)
    if "temperature" not in given:
        return greedy
    temperature = given["temperature"]
    top = jnp.take_along_axis(logits, greedy[:, None], 1)
    weights = jnp.exp((logits - top) / jnp.where(temperature > 0, temperature, 1)[:, None])
    kept = keep(logits, weights, given)
    drawn = invert(jnp.where(kept, weights, 0), given["uniform"])
    return jnp.where((temperature > 0) & ~jnp.isneginf(top[:, 0]), drawn, greedy)


def keep(logits: jax.Array, weights: jax.Array, given: Arrays) -> jax.Array:
    """[L, V]: what top-k, then top-p of the rest, then min-p keep. Weights are relative to the best, which is 1."""
    kept = jnp.ones(logits.shape, bool)
    if "top_k" in given or "top_p" in given:
        order = ordered(logits)
        if "top_k" in given:
            count = jnp.where(given["top_k"] > 0, given["top_k"], logits.shape[1])
            least = threshold(order, lambda above: above.sum(1) < count)
            above = order > least
            kept = above | first_equal(order == least, count - above.sum(1))
        if "top_p" in given:
            mass = jnp.where(kept, weights, 0)
            goal = given["top_p"] * total(mass)
            least = threshold(order, lambda above: total(jnp.where(above, mass, 0)) < goal)
            above, equal = order > least, kept & (order == least)
            each = jnp.where(equal, weights, 0).max(1)  # equal logits have equal weights
            room = jnp.ceil((goal - total(jnp.where(above, mass, 0))) / jnp.maximum(each, 1e-37))
            fewer = kept & above | first_equal(equal, jnp.maximum(room, 1))
            kept = jnp.where(given["top_p"][:, None] < 1, fewer, kept)
    if "min_p" in given:
        kept &= weights >= given["min_p"][:, None]
    return kept


def ordered(x: jax.Array) -> jax.Array:
    """float32 -> uint32 in the same order; both zeros are equal."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def threshold(order: jax.Array, holds: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """[L, 1] the least x for which `holds(order > x)`: a condition [L] that stays true when x grows."""
    def clear(step: jax.Array, x: jax.Array) -> jax.Array:
        lower = x & ~(jnp.uint32(1 << 31) >> step.astype(jnp.uint32))
        return jnp.where(holds(order > lower)[:, None], lower, x)
    return lax.fori_loop(0, 32, clear, jnp.full((len(order), 1), 0xffffffff, jnp.uint32))


def first_equal(equal: jax.Array, count: jax.Array) -> jax.Array:
    """The first `count` [L] true entries of each row, in order of ids."""
    return equal & (jnp.cumsum(equal, 1) <= count[:, None])


def blocks(weights: jax.Array) -> jax.Array:
    """[L, V] -> [L, ceil(V / BLOCK), BLOCK], filled with zeros."""
    return jnp.pad(weights, ((0, 0), (0, -weights.shape[1] % BLOCK))).reshape(len(weights), -1, BLOCK)


def total(weights: jax.Array) -> jax.Array:
    """[L] sums in two levels; the barrier keeps the compiler from joining them into one long sum."""
    return lax.optimization_barrier(blocks(weights).sum(2)).sum(1)


def invert(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """[L] the first id whose cumulative weight exceeds uniform * total: first its block, then within. Ids of weight 0
    are never given, however the sums are rounded."""
    parts = blocks(weights)
    ends = jnp.cumsum(lax.optimization_barrier(parts.sum(2)), 1)
    goal = uniform * ends[:, -1]
    block = first_above(ends, goal, (parts > 0).any(2))
    before = jnp.where(block > 0, jnp.take_along_axis(ends, jnp.maximum(block - 1, 0)[:, None], 1)[:, 0], 0)
    part = jnp.take_along_axis(parts, block[:, None, None], 1)[:, 0]
    return block * BLOCK + first_above(before[:, None] + jnp.cumsum(part, 1), goal, part > 0)


def first_above(cumulative: jax.Array, goal: jax.Array, possible: jax.Array) -> jax.Array:
    """[L] the first possible column above the goal, the last possible one if rounding leaves none."""
    hit = possible & (cumulative > goal[:, None])
    last = possible.shape[1] - 1 - jnp.argmax(possible[:, ::-1], 1)
    return jnp.where(hit.any(1), jnp.argmax(hit, 1), last)
