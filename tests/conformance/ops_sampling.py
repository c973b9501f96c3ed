"""Cases of sampling: every parameter alone and together, scores, and tokens that wait in the State.

Rows are redrawn until no comparison (a cumulative sum against top_p or the uniform, a probability against min_p, the
best logit against the second) is closer than `MARGIN`, so that every correct platform picks the same token.
"""
from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..core.plan import Batch, Bias, Mask, Penalties, Sampling, StepResult
from .case import random_source
from .formats import rounded
from .opcase import PAGE, OpCase, Run, Step, normal, state, table, token_batch

MARGIN = 1e-4
VOCAB = 70  # no multiple of 32


def log_softmax(row: np.ndarray) -> np.ndarray:
    return row - row.max() - math.log(sum(math.exp(x - row.max()) for x in row))


def adjusted(row: np.ndarray, index: int, sampling: Sampling, entered: int) -> list[float]:
    """Mask, bias, penalties on one logit row, entry by entry; `entered` is the token the row was computed from."""
    row = [float(x) for x in row]
    if sampling.mask is not None:
        for which, words in zip(sampling.mask.rows, sampling.mask.bits, strict=True):
            for token in range(len(row)):
                if which == index and not int(words[token // 32]) >> (token % 32) & 1:
                    row[token] = -math.inf
    if sampling.bias is not None:
        for which, token, value in zip(*sampling.bias, strict=True):
            row[token] += float(value) if which == index else 0.0
    if sampling.penalties is not None:
        p = sampling.penalties
        counts = {int(t): int(c) for r, t, c in zip(p.rows, p.ids, p.counts, strict=True) if r == index}
        if p.pending[index]:
            counts[entered] = counts.get(entered, 0) + 1
        for token, count in counts.items():
            row[token] *= float(p.repetition[index]) ** (-1 if row[token] > 0 else 1)
            row[token] -= float(p.presence[index]) * (count > 0) + float(p.frequency[index]) * count
    return row


def close(a: float, b: float) -> bool:
    return a != b and abs(a - b) < MARGIN


def drawn(row: list[float], temperature: float, uniform: float, top_k: int, top_p: float, min_p: float) -> int | None:
    """One token of adjusted logits; None when a comparison is too close to call."""
    kept = sorted(range(len(row)), key=lambda token: (-row[token], token))
    if any(close(row[a], row[b]) for a, b in zip(kept, kept[1:], strict=False) if kept.index(a) < max(top_k, 1)):
        return None
    if temperature == 0:
        return kept[0]
    best = row[kept[0]]
    share = [math.exp((x - best) / temperature) for x in row]
    if top_k:
        kept = kept[:top_k]
    if top_p < 1:
        total, running = sum(share[token] for token in kept), 0.0
        for size, token in enumerate(kept, 1):
            running += share[token] / total
            if close(running, top_p):
                return None
            if running >= top_p:
                kept = kept[:size]
                break
    if min_p and any(close(share[token], min_p) for token in kept):
        return None
    kept = [token for token in kept if share[token] >= min_p]
    total, running = sum(share[token] for token in kept), 0.0
    for token in sorted(kept):
        running += share[token] / total
        if abs(running - uniform) < MARGIN and token != max(kept):
            return None
        if running > uniform:
            return token
    return max(kept)


def token_of(row: np.ndarray, index: int, sampling: Sampling, entered: int) -> int | None:
    def at(values: np.ndarray | None, off: float) -> float:
        return off if values is None else values[index].item()
    return drawn(adjusted(row, index, sampling, entered), at(sampling.temperature, 0), at(sampling.uniform, 0),
                 int(at(sampling.top_k, 0)), at(sampling.top_p, 1), at(sampling.min_p, 0))


def result(logits: np.ndarray, batch: Batch, tokens: list[int]) -> StepResult:
    """The result of one launch, padding included, from raw logits [L, V] and tokens [L]."""
    if batch.sampling.top_logprobs is None:
        return StepResult(np.array(tokens))
    logprobs = np.array([log_softmax(row) for row in logits])
    top = np.argsort(-logprobs, axis=1, kind="stable")[:, :len(batch.sampling.top_logprobs)]
    return StepResult(np.array(tokens), logprobs[np.arange(len(tokens)), tokens], top,
                      np.take_along_axis(logprobs, top, 1))


def sampled(ops: Any, w: Any, batch: Batch, softcap: float | None = None) -> Any:
    return ops.sample(ops.embed(batch.tokens, w["logits"])[batch.logit_rows], softcap)


def build(rng: np.random.Generator, dtype: str, sampling: Sampling, targets: list[int], softcap: float | None,
          levels: int | None, shift: float) -> Run:
    """One launch; `levels`: logits are one of so many integers, so that ties abound. `shift` is added to all."""
    count = len(targets)
    logits = np.zeros((count, VOCAB))
    tokens = []
    if sampling.temperature is not None:
        sampling = sampling._replace(uniform=np.zeros(count, np.float32))
    for row in range(count):
        token = None
        while token is None:
            logits[row] = rng.integers(0, levels, VOCAB) if levels else normal(rng, (VOCAB,), dtype, 2.0)
            logits[row] = rounded(logits[row] + shift, dtype)
            capped = softcap * np.tanh(logits[row] / softcap) if softcap else logits[row]
            if sampling.uniform is not None:
                sampling.uniform[row] = rng.random(dtype=np.float32)
            token = targets[row] if targets[row] >= 0 else token_of(capped, row, sampling, entered=row)
        tokens.append(token)
    capped = softcap * np.tanh(logits / softcap) if softcap else logits
    batch = token_batch(count, sampling=sampling, targets=np.array(targets))
    step = Step(lambda ops, w, batch: sampled(ops, w, batch, softcap), batch, result(capped, batch, tokens))
    return Run({"logits": table(logits)}, [step], state(dtype, count + 1), count + 1)


def case(name: str, dtype: str, sampling: Sampling, rows: int = 8, targets: list[int] | None = None,
         softcap: float | None = None, levels: int | None = None, shift: float = 0.0,
         features: tuple[str, ...] = ()) -> OpCase:
    rows = rows if sampling.temperature is None else len(sampling.temperature)
    targets = targets or [-1] * rows
    return OpCase(f"sample[{name},{dtype}]", "sample", dtype, features=features, build=lambda seed: build(
        random_source(seed, name), dtype, sampling, targets, softcap, levels, shift))


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def some_penalties(pending: tuple[int, ...] = (0,) * 8) -> Penalties:
    """Row 0 has none; 1 repetition; 2 presence; 3 frequency; 4 all; 5 negative ones; 6 and 7 ids at the ends."""
    rng = np.random.default_rng(5)
    entries = [(row, token, int(rng.integers(0, 4))) for row in range(8)
               for token in ([0, VOCAB - 1] if row > 5 else rng.choice(VOCAB, 30, replace=False))]
    return Penalties(*(ints(*column) for column in zip(*entries, strict=True)), pending=ints(*pending),
                     repetition=floats(1, 1.8, 1, 1, 1.3, 0.7, 2, 1), presence=floats(0, 0, 1.5, 0, 0.5, -1, 0, 2),
                     frequency=floats(0, 0, 0, 0.8, 0.6, -0.5, 0, 2))


def some_mask() -> Mask:
    """Rows 1 and 4 only; row 4 allows the last token alone."""
    bits = np.random.default_rng(6).integers(0, 1 << 32, (2, 3), dtype=np.uint32)
    bits[1] = (0, 0, 1 << (VOCAB - 1) % 32)
    return Mask(ints(1, 4), bits)


def some_bias() -> Bias:
    """Row 0 bans half the tokens, row 2 adds twice to one token, row 5 forces one."""
    bans = [(0, token, -math.inf) for token in range(0, VOCAB, 2)]
    rows, ids, values = zip(*bans, (2, 9, 3.0), (2, 9, 3.0), (5, 3, 100.0), strict=True)
    return Bias(ints(*rows), ints(*ids), floats(*values))


def times(count: int, sampling: Sampling) -> Sampling:
    """Each row's parameters `count` times, for more draws."""
    return Sampling(*(None if values is None else np.tile(values, count) for values in sampling))


WARM = floats(0, 0.2, 0.7, 1, 1, 1.5, 2, 1e-6)


def parameter_cases(dtype: str) -> Iterator[OpCase]:
    yield case("greedy", dtype, Sampling())
    yield case("greedy,ties", dtype, Sampling(), levels=3)
    yield case("temperature", dtype, times(3, Sampling(WARM)))
    yield case("temperature,ties", dtype, times(3, Sampling(WARM)), levels=3)
    best = ints(3, 0, 1, 2, 5, 7, 40, VOCAB)
    yield case("top_k", dtype, times(3, Sampling(WARM, top_k=best)))
    yield case("top_k,ties", dtype, times(3, Sampling(floats(*[1] * 8), top_k=best)), levels=4)
    yield case("top_p", dtype, times(3, Sampling(WARM, top_p=floats(0.5, 0.9, 0.9, 0.5, 1e-6, 0.95, 0.3, 1))))
    hot = Sampling(floats(*[1] * 8), top_p=floats(0.5, 0.9, 0.8, 0.1, 1e-6, 0.95, 0.3, 1))
    yield case("top_p,ties", dtype, times(3, hot), levels=2)
    yield case("min_p", dtype, times(3, Sampling(WARM, min_p=floats(0.1, 0.05, 0, 0.5, 1, 0.2, 0.9, 0.1))))
    together = Sampling(WARM, top_k=ints(0, 5, 20, 0, 30, 10, 3, 2), top_p=floats(1, 0.9, 0.8, 0.7, 1, 0.5, 0.9, 0.2),
                        min_p=floats(0, 0.1, 0.02, 0.3, 0.2, 0, 0.5, 0))
    yield case("top_k,top_p,min_p", dtype, times(3, together))
    yield case("softcap", dtype, Sampling(WARM, top_logprobs=ints(0, 0)), softcap=3.0, features=("logprobs",))
    yield case("penalties", dtype, Sampling(penalties=some_penalties()), features=("penalties",))
    yield case("penalties,negative_logits", dtype, Sampling(penalties=some_penalties()), shift=-9.0,
               features=("penalties",))
    yield case("penalties,pending", dtype, Sampling(WARM, penalties=some_penalties((1, 0, 1, 1, 1, 1, 1, 1))),
               features=("penalties",))
    yield case("bias", dtype, Sampling(bias=some_bias()), features=("logit_bias",))
    yield case("bias,temperature", dtype, Sampling(WARM, bias=some_bias()), features=("logit_bias",))
    yield bias_first(dtype)
    yield from zero_draws(dtype)
    yield case("mask", dtype, Sampling(mask=some_mask()), features=("grammar_mask",))
    yield case("mask,temperature", dtype, Sampling(floats(*[1.3] * 8), mask=some_mask()), features=("grammar_mask",))
    yield case("everything", dtype, together._replace(penalties=some_penalties(), bias=some_bias(), mask=some_mask(),
                                                      top_logprobs=ints(0, 0, 0)),
               features=("penalties", "logit_bias", "grammar_mask", "logprobs"))


def bias_first(dtype: str) -> OpCase:
    """Each row adds 8 to a token that repetition divides by 4; added after that, the token would win."""
    rows = ints(*range(8))
    off = floats(*[0] * 8)
    penalties = Penalties(rows, rows + 20, ints(*[1] * 8), ints(*[0] * 8), floats(*[4] * 8), off, off)
    sampling = Sampling(penalties=penalties, bias=Bias(rows, rows + 20, floats(*[8] * 8)))
    return case("bias_before_penalties", dtype, sampling, features=("penalties", "logit_bias"))


def zero_draws(dtype: str) -> Iterator[OpCase]:
    """A uniform of 0 draws the first token of any probability: a token of none, banned or far below, is never drawn."""
    logits = np.zeros((3, VOCAB))
    logits[1, :40], logits[2, ::2] = -29952, -29952  # exactly 0 by softmax, in every dtype
    warm = Sampling(floats(1, 1, 0.7), uniform=floats(0, 0, 0))
    bans = Bias(ints(0, 0, 1), ints(0, 1, 40), floats(*[-math.inf] * 3))
    for name, sampling, tokens, features in (("uniform0", warm, [0, 40, 1], ()),
                                             ("uniform0,bans", warm._replace(bias=bans), [2, 41, 1], ("logit_bias",))):
        step = Step(sampled, token_batch(3, sampling=sampling, targets=ints(-1, -1, -1)), StepResult(np.array(tokens)))
        run = Run({"logits": table(logits)}, [step], state(dtype, 4), 4)
        yield OpCase(f"sample[{name},{dtype}]", "sample", dtype, lambda seed, run=run: run, features=features)


def score_cases(dtype: str) -> Iterator[OpCase]:
    mixed = [-1, 5, VOCAB - 1, -2, 0, -1, -2, -2]
    for top in (0, 1, 5, 20):
        yield case(f"logprobs{top}", dtype, Sampling(top_logprobs=np.zeros(top, np.int32)), features=("logprobs",))
    yield case("logprobs,targets", dtype, Sampling(WARM, top_logprobs=np.zeros(2, np.int32)), targets=mixed,
               features=("logprobs",))
    yield case("logprobs,raw", dtype, Sampling(bias=some_bias(), mask=some_mask(), top_logprobs=np.zeros(2, np.int32)),
               features=("logprobs", "logit_bias", "grammar_mask"))


# Tokens that wait in the State: launches follow each other without a look at what came out.

Row = tuple[int, list[int], dict[int, int]]  # sequence slot, tokens, {offset in the row: target}


def chain_batch(rows: list[Row], lengths: dict[int, int], sampling: Sampling, padding: int = 0) -> Batch:
    """`lengths`: of every sequence, updated; its page has its slot's number. `padding`: tokens, rows and logit rows."""
    sizes = [len(tokens) for _, tokens, _ in rows]
    starts = [sum(sizes[:i]) for i in range(len(rows) + 1)]
    wanted = [(starts[i] + at, target) for i, (_, _, targets) in enumerate(rows) for at, target in targets.items()]
    places = [(seq, lengths.get(seq, 0) + at) for seq, tokens, _ in rows for at in range(len(tokens))]
    lengths.update({seq: position + 1 for seq, position in places})
    pad = [0] * padding
    return Batch(tokens=ints(*(t for _, tokens, _ in rows for t in tokens), *pad),
                 positions=ints(*(position for _, position in places), *pad),
                 slots=ints(*(seq * PAGE + position for seq, position in places), *pad),
                 rows=ints(*(i for i, n in enumerate(sizes) for _ in range(n)), *[len(rows) + padding - 1] * padding),
                 seqs=ints(*(seq for seq, _, _ in rows), *pad), starts=ints(*starts, *[starts[-1]] * padding),
                 lengths=ints(*(lengths[seq] for seq, _, _ in rows), *pad),
                 pages=ints(*(seq for seq, _, _ in rows), *pad)[:, None],
                 logit_rows=ints(*(at for at, _ in wanted), *pad),
                 targets=ints(*(t for _, t in wanted), *[-2] * padding), sampling=sampling)


def chain_run(dtype: str, batches: list[Batch], seed: int, own: float | None = None) -> Run:
    """The logits of a token are its row of one table (`own`: of the token itself); each launch sees the tokens that
    the ones before it left. Tables are drawn until no choice is close."""
    rng, steps = random_source(seed, "chain"), None
    while steps is None:
        logits = rounded(np.array([rng.permutation(VOCAB) / 16 - 2 for _ in range(VOCAB)]), dtype)
        if own is not None:
            np.fill_diagonal(logits, own)
        steps = chain_steps(logits, batches)
    return Run({"logits": table(logits)}, steps, state(dtype, 6), 6)


def chain_steps(logits: np.ndarray, batches: list[Batch]) -> list[Step] | None:
    """The launches with what each must give; None when a comparison is too close to call."""
    last: dict[int, int] = {}
    steps = []
    for batch in batches:
        seqs = batch.seqs[batch.rows].tolist()
        inputs = [t if t >= 0 else last[seq] for t, seq in zip(batch.tokens.tolist(), seqs, strict=True)]
        tokens = []
        for index, (at, target) in enumerate(zip(batch.logit_rows, batch.targets, strict=True)):
            token = int(target) if target >= 0 else token_of(logits[inputs[at]], index, batch.sampling, inputs[at])
            if token is None:
                return None
            tokens.append(token)
            if target == -1:
                last[seqs[at]] = token
        steps.append(Step(sampled, batch, result(logits[[inputs[at] for at in batch.logit_rows]], batch, tokens)))
    return steps


def kept_tokens() -> list[Batch]:
    """Slot 3 rests, slot 1 is scored by a target once, padding comes and goes: each keeps its own last token."""
    launches: list[tuple[list[Row], int]] = [
        ([(2, [3], {0: -1}), (1, [4], {0: -1}), (3, [5], {0: -1}), (4, [6, 8], {0: 8, 1: -1})], 0),
        ([(1, [-1], {0: -1}), (2, [-1], {0: -1})], 3),
        ([(3, [-1], {0: -1}), (1, [-1], {0: 7}), (5, [1, 2], {})], 1),
        ([(4, [-1], {0: -1}), (1, [-1], {0: -1}), (2, [-1], {0: -1}), (3, [-1], {0: -1})], 0)]
    lengths: dict[int, int] = {}
    return [chain_batch(rows, lengths, Sampling(), padding) for rows, padding in launches]


def pending_tokens() -> list[Batch]:
    """Tokens that would repeat for ever, but for penalties: where the one in the State is pending (rows 0 and 1) it
    counts as output, in row 1 of the second launch for the second time."""
    first: list[Row] = [(seq, [seq + 1], {0: -1}) for seq in (1, 2, 3)]
    then: list[Row] = [(seq, [-1], {0: -1}) for seq in (1, 2, 3)]
    everything = ints(*range(VOCAB))

    def penalties(row: int, strength: float) -> Penalties:
        return Penalties(np.full(VOCAB, row, np.int32), everything, everything % 2, ints(1, 1, 0),
                         floats(1.5, 1.1, 1.2), floats(0.3, 0.2, 0.1), floats(strength, strength, strength))
    lengths: dict[int, int] = {}
    return [chain_batch(first, lengths, Sampling()),
            chain_batch(then, lengths, Sampling(penalties=penalties(1, 0.7))),
            chain_batch(then, lengths, Sampling(penalties=penalties(2, 4.0)))]


def pending_embed(dtype: str, seed: int) -> Run:
    """Three sequences sample a token each; the next launch embeds them as -1, in another order, beside a given one."""
    lengths: dict[int, int] = {}
    start = chain_batch([(seq, [seq + 3], {0: -1}) for seq in (1, 2, 3)], lengths, Sampling())
    then = chain_batch([(3, [-1], {0: -2}), (1, [-1], {}), (4, [7], {}), (2, [-1], {})], lengths, Sampling())
    run = chain_run(dtype, [start], seed)
    kept = run.steps[0].expected.tokens
    values = normal(random_source(seed, "pending embed"), (VOCAB, 64), dtype)
    run.steps.append(Step(lambda ops, w, batch: ops.embed(batch.tokens, w["values"]), then,
                          values[[kept[2], kept[0], 7, kept[1]]], 4))
    run.weights["values"] = table(values)
    return run


def state_cases(dtype: str) -> Iterator[OpCase]:
    yield OpCase(f"embed[pending,{dtype}]", "embed", dtype, lambda seed: pending_embed(dtype, seed))
    yield OpCase(f"sample[state,{dtype}]", "sample", dtype, lambda seed: chain_run(dtype, kept_tokens(), seed))
    yield OpCase(f"sample[state,pending,{dtype}]", "sample", dtype,
                 lambda seed: chain_run(dtype, pending_tokens(), seed, own=4.0), features=("penalties",))


def sampling_cases(dtype: str) -> Iterator[OpCase]:
    yield from parameter_cases(dtype)
    yield from score_cases(dtype)
    yield from state_cases(dtype)
