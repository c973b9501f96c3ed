"""Kernels of sampling. A row's weights are integers, so that sums are the same in any order and split.

A weight is exp((logit - largest) / temperature) in units of 2^-44: 2^18 of them fit 63 bits. Logits are compared by an
int32 key that orders as the float does. Equals are told apart by their id, the lower first, as everywhere.
"""
from __future__ import annotations

import triton
import triton.language as tl

from .activation import tanh

LOWEST = tl.constexpr(-2147483648)  # below every key


@triton.jit
def key_of(x):
    """float32 -> int32 in the same order; x is not -0."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def value_of(key):
    """The float32 of a key."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def ranked(x, id):
    """Value and id in one int64: the greater value, and of equals the lower id, is the greater."""
    return (key_of(x).to(tl.int64) << 32) | (0x7FFFFFFF - id).to(tl.int64)


@triton.jit
def id_in(ranked):
    return 0x7FFFFFFF - (ranked & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def value_in(ranked):
    return value_of((ranked >> 32).to(tl.int32))


@triton.jit
def share(total, part):
    """floor(total * part) for part in [0, 1], exact for a total of 62 bits and a part of 30."""
    scaled = (part * 1073741824.0).to(tl.int64)
    return (total >> 30) * scaled + (((total & 0x3FFFFFFF) * scaled) >> 30)


@triton.jit
def load_logits(row, at, mask, cap, CAPPED: tl.constexpr):
    """float32 logits, soft-capped, no -0, -inf where the mask is off."""
    x = tl.load(row + at, mask=mask, other=-float("inf")).to(tl.float32)
    if CAPPED:
        x = tl.where(mask, cap * tanh(x / cap), x)
    return tl.where(x == 0, 0.0, x)


@triton.jit
def relative(x, largest, temperature):
    """exp((x - largest) / temperature); 0 of what is no number."""
    return tl.where(x > -float("inf"), tl.exp((x - largest) / temperature), 0.0)


@triton.jit
def fixed(weight):
    return (weight * 17592186044416.0).to(tl.int64)


@triton.jit
def scan_kernel(logits, out, mask_rows, mask_bits, best, raw_max, raw_sum, vocab, row_stride, words, splits, cap,
                CAPPED: tl.constexpr, BLOCK: tl.constexpr):
    """A block of a row: soft cap and grammar mask into `out`, the best of what is left, and the log-sum-exp's parts of
    what there was. Each output and the mask may be None."""
    row = tl.program_id(0)
    split = tl.program_id(1)
    at = split * BLOCK + tl.arange(0, BLOCK)
    inside = at < vocab
    x = load_logits(logits + row.to(tl.int64) * row_stride, at, inside, cap, CAPPED)
    if raw_max is not None:
        most = tl.max(x, 0)
        from_most = tl.where(inside & (x > -float("inf")), tl.exp(x - most), 0.0)
        total = tl.sum(tl.where(x != x, x, from_most), 0)
        tl.store(raw_max + row * splits + split, most)
        tl.store(raw_sum + row * splits + split, total)
    if mask_rows is not None:
        masked = tl.load(mask_rows + row)
        word = tl.load(mask_bits + masked.to(tl.int64) * words + at // 32, mask=inside & (masked >= 0), other=-1)
        x = tl.where(((word >> (at % 32)) & 1) != 0, x, -float("inf"))
    if out is not None:
        tl.store(out + row.to(tl.int64) * vocab + at, x, mask=inside)
    if best is not None:
        tl.store(best + row * splits + split, tl.max(tl.where(inside, ranked(x, at), -0x7FFFFFFFFFFFFFFF), 0))


@triton.jit
def bias_kernel(x, offsets, ids, values, vocab, BLOCK: tl.constexpr):
    """Add a row's values; its ids are distinct."""
    row = tl.program_id(0)
    start, stop = tl.load(offsets + row), tl.load(offsets + row + 1)
    for first in range(start, stop, BLOCK):
        at = first + tl.arange(0, BLOCK)
        mask = at < stop
        place = x + row.to(tl.int64) * vocab + tl.load(ids + at, mask=mask, other=0)
        tl.store(place, tl.load(place, mask=mask) + tl.load(values + at, mask=mask, other=0.0), mask=mask)


@triton.jit
def penalized(x, count, repetition, presence, frequency):
    """A seen token's logit; count 0 = seen in the prompt only."""
    x = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
    return x - (tl.where(count > 0, presence, 0.0) + frequency * count.to(tl.float32))


@triton.jit
def penalty_kernel(x, offsets, ids, counts, pending, inputs, repetition, presence, frequency, vocab,
                   BLOCK: tl.constexpr):
    """Penalties of a row's entries, and of its input token where that is pending: counted once more if it is among the
    entries, and else as one of its own."""
    row = tl.program_id(0)
    start, stop = tl.load(offsets + row), tl.load(offsets + row + 1)
    waiting, entered = tl.load(pending + row) != 0, tl.load(inputs + row)
    r, p, f = tl.load(repetition + row), tl.load(presence + row), tl.load(frequency + row)
    found = tl.zeros((BLOCK,), tl.int32)
    for first in range(start, stop, BLOCK):
        at = first + tl.arange(0, BLOCK)
        mask = at < stop
        id = tl.load(ids + at, mask=mask, other=-1)
        again = (waiting & (id == entered)).to(tl.int32)
        found = tl.maximum(found, again)
        place = x + row.to(tl.int64) * vocab + id
        count = tl.load(counts + at, mask=mask, other=0) + again
        tl.store(place, penalized(tl.load(place, mask=mask, other=0.0), count, r, p, f), mask=mask)
    alone = waiting & (tl.max(found, 0) == 0)
    place = x + row.to(tl.int64) * vocab + entered
    once = tl.full((), 1, tl.int32)
    tl.store(place, penalized(tl.load(place, mask=alone, other=0.0), once, r, p, f), mask=alone)


@triton.jit
def top_of(best, row, splits, SPLITS: tl.constexpr):
    """The row's best, of its blocks'."""
    split = tl.arange(0, SPLITS)
    return tl.max(tl.load(best + row * splits + split, mask=split < splits, other=-0x7FFFFFFFFFFFFFFF), 0)


@triton.jit
def limits(row, top_k, top_p, vocab):
    """The row's k, 0 = off, and p, 1 = off."""
    k = tl.full((), 0, tl.int32)
    p = tl.full((), 1.0, tl.float32)
    if top_k is not None:
        k = tl.load(top_k + row)
    if top_p is not None:
        p = tl.minimum(tl.load(top_p + row), 1.0)
    return tl.where(k < vocab, k, 0), p


@triton.jit
def probe(row, vocab, floor, largest, temperature, BLOCK: tl.constexpr):
    """How many logits are at least `floor`, their mass, and the mass of all."""
    count = tl.zeros((BLOCK,), tl.int32)
    mass = tl.zeros((BLOCK,), tl.int64)
    total = tl.zeros((BLOCK,), tl.int64)
    for first in range(0, vocab, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = load_logits(row, at, at < vocab, 0.0, False)
        weight = fixed(relative(x, largest, temperature))
        above = (x >= floor) & (at < vocab)
        count += above.to(tl.int32)
        mass += tl.where(above, weight, 0)
        total += weight
    return tl.sum(count, 0), tl.sum(mass, 0), tl.sum(total, 0)


@triton.jit
def narrow_kernel(x, best, targets, temperature, top_k, top_p, values, ids, counts, floors, totals, vocab, row_stride,
                  splits, CAPACITY: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """Collect the logits among which the cuts of top-k and top-p surely fall, in the order of ids.

    Looks for a floor above which there are at most CAPACITY and, for sure, the k best or the mass p. counts: how many
    were collected; -1 = the row has no cut, or more than CAPACITY may be kept, and all are to be looked at.
    """
    row = tl.program_id(0)
    heat = tl.load(temperature + row)
    k, p = limits(row, top_k, top_p, vocab)
    by_count = k > 0
    largest = value_in(top_of(best, row, splits, SPLITS))
    finite = tl.abs(largest) < float("inf")
    tl.store(counts + row, -1)
    if (by_count | (p < 1)) & finite & (heat > 0) & (tl.load(targets + row) == -1):
        source = x + row.to(tl.int64) * row_stride
        split = tl.arange(0, SPLITS)
        tops = value_in(tl.load(best + row * splits + split, mask=split < splits, other=0))
        tops = tl.where((split < splits) & (tops > -float("inf")), tops, float("inf"))
        floor = tl.min(tops, 0)  # the least of the blocks' best: more are above it than there are blocks
        safe, unsafe = largest - float("inf"), largest
        number = vocab + 0
        tries = tl.where(by_count & (k > CAPACITY), 8, 0)
        total = tl.zeros((), tl.int64)
        while ((number > CAPACITY) | (tries == 0)) & (tries < 8):
            count, mass, total = probe(source, vocab, floor, largest, heat, BLOCK)
            enough = tl.where(by_count, count >= k, mass >= share(total, p))
            safe = tl.where(enough, floor, safe)
            number = tl.where(enough, count, number)
            unsafe = tl.where(enough, unsafe, floor)
            # Twice as deep while nothing is safe, then between the two.
            deeper = largest - tl.maximum(2 * (largest - floor), heat)
            floor = tl.where(safe == -float("inf"), deeper, safe + (unsafe - safe) * 0.5)
            tries += 1
        if number <= CAPACITY:
            base = 0
            for first in range(0, vocab, BLOCK):
                at = first + tl.arange(0, BLOCK)
                logit = load_logits(source, at, at < vocab, 0.0, False)
                above = (logit >= safe) & (at < vocab)
                rank = base + tl.cumsum(above.to(tl.int32), 0) - 1
                tl.store(values + row * CAPACITY + rank, logit, mask=above)
                tl.store(ids + row * CAPACITY + rank, at, mask=above)
                base += tl.sum(above.to(tl.int32), 0)
            tl.store(counts + row, number)
            tl.store(floors + row, safe)
            tl.store(totals + row, total)


@triton.jit
def candidates(source, collected, at, count, few):
    """Logits of the collected ones if they are few, else of all."""
    all_of = load_logits(source, at, (at < count) & (few == 0), 0.0, False)
    return tl.where(few, tl.load(collected + at, mask=(at < count) & few, other=-float("inf")), all_of)


@triton.jit
def weights(source, collected, at, count, few, least, min_p, largest, temperature, CUT: tl.constexpr):
    """Masses of the candidates that are kept for sure, and 1 for those at the cut, of which some are."""
    x = candidates(source, collected, at, count, few)
    weight = relative(x, largest, temperature)
    kept = (weight >= min_p) & (at < count)
    same = at
    if CUT:
        key = key_of(x)
        same = ((key == least) & (at < count)).to(tl.int32)
        kept = kept & (key > least)
    return tl.where(kept, fixed(weight), 0), same


@triton.jit
def divide(source, collected, count, few, least, largest, temperature, BLOCK: tl.constexpr):
    """The candidates whose key is at least `least`: number, mass, lowest key; and the highest key of the others."""
    number = tl.zeros((BLOCK,), tl.int32)
    mass = tl.zeros((BLOCK,), tl.int64)
    lowest = tl.full((BLOCK,), 2147483647, tl.int32)
    highest = tl.full((BLOCK,), LOWEST, tl.int32)
    for first in range(0, count, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = candidates(source, collected, at, count, few)
        key = key_of(x)
        chosen = (key >= least) & (at < count)
        number += chosen.to(tl.int32)
        mass += tl.where(chosen, fixed(relative(x, largest, temperature)), 0)
        lowest = tl.minimum(lowest, tl.where(chosen, key, 2147483647))
        highest = tl.maximum(highest, tl.where(chosen, LOWEST, key))
    return tl.sum(number, 0), tl.sum(mass, 0), tl.min(lowest, 0), tl.max(highest, 0)


@triton.jit
def greatest_with(source, collected, count, few, k, wanted, lowest, largest, temperature, BLOCK: tl.constexpr):
    """The greatest key such that k candidates (or, with k = 0, the mass `wanted`) are at least it, and number and mass
    of those above it. Halves what lies between the known bounds, and moves each bound on to a key that there is."""
    least = lowest
    high = key_of(largest) + 1
    while high > least + 1:
        middle = (least >> 1) + (high >> 1) + (least & high & 1)
        number, mass, next, previous = divide(source, collected, count, few, middle, largest, temperature, BLOCK)
        enough = tl.where(k > 0, number >= k, mass >= wanted)
        least = tl.where(enough, tl.maximum(next, middle), least)
        high = tl.where(enough, high, tl.minimum(previous + 1, middle))
    number, mass, next, previous = divide(source, collected, count, few, least + 1, largest, temperature, BLOCK)
    return least, number, mass


@triton.jit
def cuts(source, collected, count, few, k, p, total, lowest, largest, temperature, BLOCK: tl.constexpr):
    """Where top-k and then top-p cut: the last key that is kept, and how many of that key are, those of lowest ids."""
    least = lowest
    ties = count
    if k > 0:
        least, number, mass = greatest_with(source, collected, count, few, k, total, lowest, largest, temperature,
                                            BLOCK)
        ties = k - number
        total = mass + ties * fixed(relative(value_of(least), largest, temperature))
    if p < 1:
        wanted = share(total, p)
        nothing = tl.full((), 0, tl.int32)
        last, number, mass = greatest_with(source, collected, count, few, nothing, wanted, least, largest, temperature,
                                           BLOCK)
        each = tl.maximum(fixed(relative(value_of(last), largest, temperature)), 1)
        needed = tl.minimum(tl.maximum((wanted - mass + each - 1) // each, 1), count).to(tl.int32)
        ties = tl.where(last == least, tl.minimum(needed, ties), needed)
        least = last
    return least, ties


@triton.jit
def pick(source, collected, count, few, least, ties, min_p, uniform, largest, temperature, CUT: tl.constexpr,
         BLOCK: tl.constexpr):
    """The place, among the candidates, of the first whose cumulative kept mass exceeds uniform * all kept mass.

    CUT: those are kept whose key is above `least`, and the first `ties` whose key is just that; else all. And of these
    those of a weight of at least min_p.
    """
    tied = tl.full((), 0, tl.int64)
    left = tl.full((), 0, tl.int32)
    if CUT:
        weight = relative(value_of(least), largest, temperature)
        tied = tl.where(weight >= min_p, fixed(weight), 0)
    mass = tl.zeros((BLOCK,), tl.int64)
    equal = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, count, BLOCK):
        at = first + tl.arange(0, BLOCK)
        kept, same = weights(source, collected, at, count, few, least, min_p, largest, temperature, CUT)
        mass += kept
        if CUT:
            equal += same
    total = tl.sum(mass, 0)
    if CUT:
        left = tl.minimum(tl.sum(equal, 0), ties)
        total += left * tied
    target = tl.minimum(share(total, uniform), total - 1)
    found = count
    passed = tl.zeros((), tl.int64)
    first = 0
    while (first < count) & (found == count):
        at = first + tl.arange(0, BLOCK)
        kept, same = weights(source, collected, at, count, few, least, min_p, largest, temperature, CUT)
        block = tl.sum(kept, 0)
        if CUT:
            here = tl.minimum(tl.sum(same, 0), left)
            block += here * tied
        if passed + block > target:
            if CUT:
                kept += tl.where((same != 0) & (tl.cumsum(same, 0) <= left), tied, 0)
            over = (kept > 0) & (passed + tl.cumsum(kept, 0) > target)
            found = tl.min(tl.where(over, at, count), 0)
        passed += block
        if CUT:
            left -= here
        first += BLOCK
    return tl.minimum(found, count - 1)


@triton.jit
def draw_kernel(x, best, targets, temperature, uniform, top_k, top_p, min_p, values, ids, counts, floors, totals,
                tokens, last, slots, vocab, row_stride, splits, CAPACITY: tl.constexpr, SPLITS: tl.constexpr,
                BLOCK: tl.constexpr):
    """A row's token: its target, 0 for padding, else the best or a draw, which `last` keeps under the row's slot."""
    row = tl.program_id(0)
    target = tl.load(targets + row)
    top = top_of(best, row, splits, SPLITS)
    token = id_in(top)
    if temperature is not None:
        heat = tl.load(temperature + row)
        largest = value_in(top)
        if (target == -1) & (heat > 0) & (tl.abs(largest) < float("inf")):
            source = x + row.to(tl.int64) * row_stride
            least = tl.full((), LOWEST, tl.int32)
            count = vocab + 0
            ties = vocab + 0
            collected = source
            listed = tl.full((), -1, tl.int32)
            if values is not None:
                listed = tl.load(counts + row)
                collected = values + row * CAPACITY
            few = listed >= 0
            if values is not None:
                k, p = limits(row, top_k, top_p, vocab)
                if (k > 0) | (p < 1):
                    total = tl.load(totals + row, mask=few, other=0)
                    lowest = key_of(tl.load(floors + row, mask=few, other=-float("inf")))
                    count = tl.where(few, listed, vocab)
                    if few == 0:
                        number, total, next, previous = divide(source, collected, count, few, lowest, largest, heat,
                                                               BLOCK)
                    least, ties = cuts(source, collected, count, few, k, p, total, lowest, largest, heat, BLOCK)
            floor_p = tl.load(min_p + row) if min_p is not None else 0.0
            place = pick(source, collected, count, few, least, ties, floor_p, tl.load(uniform + row), largest, heat,
                         values is not None, BLOCK)
            token = place
            if values is not None:
                token = tl.where(few, tl.load(ids + row * CAPACITY + place, mask=few, other=0), place)
    if last is not None:
        tl.store(last + tl.load(slots + row), token, mask=target == -1)
    tl.store(tokens + row, tl.where(target == -1, token, tl.maximum(target, 0)))


@triton.jit
def top_kernel(logits, found, vocab, row_stride, splits, wanted, cap, CAPPED: tl.constexpr, BLOCK: tl.constexpr):
    """The `wanted` best of a block of a row, best first."""
    row = tl.program_id(0)
    split = tl.program_id(1)
    at = split * BLOCK + tl.arange(0, BLOCK)
    x = load_logits(logits + row.to(tl.int64) * row_stride, at, at < vocab, cap, CAPPED)
    rest = tl.where(at < vocab, ranked(x, at), -0x7FFFFFFFFFFFFFFF)
    for place in range(wanted):
        best = tl.max(rest, 0)
        tl.store(found + (row * splits + split).to(tl.int64) * wanted + place, best)
        rest = tl.where(rest == best, -0x7FFFFFFFFFFFFFFF, rest)


@triton.jit
def logprob_kernel(logits, tokens, raw_max, raw_sum, found, logprobs, top_ids, top_logprobs, row_stride, splits, wanted,
                   cap, CAPPED: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """Log-probability of a row's token, and the `wanted` best of its blocks' best."""
    row = tl.program_id(0)
    split = tl.arange(0, SPLITS)
    most = tl.load(raw_max + row * splits + split, mask=split < splits, other=-float("inf"))
    part = tl.load(raw_sum + row * splits + split, mask=split < splits, other=0.0)
    largest = tl.max(most, 0)
    total = largest + tl.log(tl.sum(tl.where(most > -float("inf"), part * tl.exp(most - largest), part), 0))
    token = tl.load(tokens + row)
    chosen = load_logits(logits + row.to(tl.int64) * row_stride, token, token >= 0, cap, CAPPED)
    tl.store(logprobs + row, chosen - total)
    if found is not None:
        at = tl.arange(0, BLOCK)
        rest = tl.load(found + row.to(tl.int64) * splits * wanted + at, mask=at < splits * wanted,
                       other=-0x7FFFFFFFFFFFFFFF)
        for place in range(wanted):
            best = tl.max(rest, 0)
            tl.store(top_ids + row * wanted + place, id_in(best))
            tl.store(top_logprobs + row * wanted + place, value_in(best) - total)
            rest = tl.where(rest == best, -0x7FFFFFFFFFFFFFFF, rest)
