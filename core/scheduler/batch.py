"""From a plan to the padded arrays of a `Batch`: vectorised over the decode rows, a short loop over prefill chunks."""
from __future__ import annotations

import numpy as np

from ..plan import Batch, Bias, Penalties, Sampling
from ..specs import Bucket, Buckets
from .request import Request
from .scheduler import Plan
from .table import RequestTable, uniforms

GREEDY = 1e-5  # a temperature below this is greedy: dividing by it would overflow float32 logits


def _i32(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts).astype(np.int32, copy=False)


def fit(count: int, sizes: tuple[int, ...], what: str) -> int:
    """The smallest bucket size that holds `count`; ValueError when none does."""
    for size in sizes:
        if size >= count:
            return size
    raise ValueError(f"{count} {what} exceed the largest bucket, {sizes[-1]}")


def build_batch(plan: Plan, table: RequestTable, page_size: int,
                buckets: Buckets | None) -> tuple[Batch, Bucket | None]:
    """The batch of a plan, before `Scheduler.advance`, and the bucket it is padded to (None = exact sizes)."""
    decode, chunks = plan.decode, plan.chunks
    last = table.length[decode] - 1
    seqs = _i32([decode, np.array([c.slot for c in chunks], np.int32)])
    counts = _i32([np.ones(len(decode), np.int32), np.array([c.stop - c.start for c in chunks], np.int32)])
    starts = np.zeros(len(seqs) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    tokens = _i32([np.where(table.known[decode] > last, table.last[decode], -1)]
                  + [c.request.tokens[c.start:c.stop] for c in chunks])
    positions = _i32([last] + [np.arange(c.start, c.stop) for c in chunks])
    rows = np.repeat(np.arange(len(seqs), dtype=np.int32), counts)
    lengths = _i32([last + 1, np.array([c.stop for c in chunks], np.int32)])
    slots = table.pages[seqs[rows], positions // page_size] * page_size + positions % page_size
    pages = table.pages[seqs, :max(1, -(-int(lengths.max()) // page_size))]
    used = np.arange(pages.shape[1]) < -(-lengths // page_size)[:, None]
    pages = np.where(used, pages, 0).astype(np.int32, copy=False)
    logit_rows, targets = _logit_rows(plan, starts)
    owners = np.zeros(len(targets), np.int32)
    sampled = np.flatnonzero(targets == -1)
    owners[sampled] = [r.slot for r in plan.samples]
    sampling = _sampling(plan, table, owners, sampled, tokens[logit_rows] == -1)
    batch = Batch(tokens, positions, slots.astype(np.int32, copy=False), rows, seqs, starts, lengths, pages, logit_rows,
                  targets, sampling)
    if buckets is None:
        return batch, None
    bucket = Bucket(fit(len(tokens), buckets.tokens, "tokens"), fit(len(seqs), buckets.rows, "rows"),
                    fit(pages.shape[1], buckets.pages, "pages a row"),
                    fit(len(targets), tuple(sorted({*buckets.rows, *buckets.tokens})), "logit rows"))
    return pad_batch(batch, bucket), bucket


def _logit_rows(plan: Plan, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which tokens' logits are wanted, and the target of each: -1 = sample. A lone padding row if there is none."""
    rows, targets = [starts[:len(plan.decode)]], [np.full(len(plan.decode), -1, np.int32)]
    for chunk, first in zip(plan.chunks, starts[len(plan.decode):-1].tolist(), strict=True):
        if chunk.scores:
            rows.append(np.arange(first, first + chunk.scores))
            targets.append(chunk.request.tokens[chunk.start + 1:chunk.start + 1 + chunk.scores])
        if chunk.sample:
            rows.append(np.array([first + chunk.stop - chunk.start - 1]))
            targets.append(np.array([-1]))
    rows, targets = _i32(rows), _i32(targets)
    return (rows, targets) if len(rows) else (np.zeros(1, np.int32), np.full(1, -2, np.int32))


def _sampling(plan: Plan, table: RequestTable, owners: np.ndarray, sampled: np.ndarray,
              unknown: np.ndarray) -> Sampling:
    """Parameters of each logit row from its slot's columns; a scored or padding row (slot 0) is greedy and plain."""
    temperature = table.temperature[owners]
    temperature[temperature < GREEDY] = 0
    drawn = temperature > 0
    k = max((c.request.params.prompt_logprobs for c in plan.chunks if c.scores), default=-1)
    k = max(k, int(table.logprobs[owners[sampled]].max(initial=-1)))
    top = None if k < 0 else np.zeros(k, np.int32)
    penalties, bias = _penalties(plan.samples, table, owners, sampled, unknown), _bias(plan.samples, table, sampled)
    if not drawn.any():
        return Sampling(penalties=penalties, bias=bias, top_logprobs=top)
    steps = table.length[owners] - table.prompt_len[owners]
    top_k, top_p, min_p = table.top_k[owners], table.top_p[owners], table.min_p[owners]
    top_p[owners == 0] = 1
    return Sampling(temperature, uniforms(table.seed[owners], steps), top_k if top_k[drawn].any() else None,
                    top_p if (top_p[drawn] < 1).any() else None, min_p if min_p[drawn].any() else None, penalties, bias,
                    None, top)


def _penalties(samples: list[Request], table: RequestTable, owners: np.ndarray, sampled: np.ndarray,
               unknown: np.ndarray) -> Penalties | None:
    penalised = table.penalised[owners]
    if not penalised.any():
        return None
    rows, ids, counts = [], [], []
    for row, request in zip(sampled.tolist(), samples, strict=True):
        if request.history is not None:
            rows.append(np.full(request.history.size, row, np.int32))
            ids.append(request.history.ids)
            counts.append(request.history.counts)
    factor = np.where(penalised, table.repetition[owners], 1).astype(np.float32)
    return Penalties(_i32(rows), _i32(ids), _i32(counts), (unknown & penalised).astype(np.int32), factor,
                     np.where(penalised, table.presence[owners], 0).astype(np.float32),
                     np.where(penalised, table.frequency[owners], 0).astype(np.float32))


def _bias(samples: list[Request], table: RequestTable, sampled: np.ndarray) -> Bias | None:
    """logit_bias, and a ban on every stop id while fewer than min_tokens are out."""
    slots = np.array([r.slot for r in samples], np.int32)
    banned = table.length[slots] - table.prompt_len[slots] < table.min_tokens[slots]
    rows, ids, values = [], [], []
    for i in np.flatnonzero(banned | table.biased[slots]).tolist():
        parts = [(samples[i].bias_ids, samples[i].bias_values)]
        if banned[i]:
            parts.append((samples[i].ban_ids, np.full(len(samples[i].ban_ids), -np.inf, np.float32)))
        for part_ids, part_values in parts:
            rows.append(np.full(len(part_ids), sampled[i], np.int32))
            ids.append(part_ids)
            values.append(part_values)
    if not rows:
        return None
    return Bias(_i32(rows), _i32(ids), np.concatenate(values).astype(np.float32, copy=False))


def pad_batch(batch: Batch, bucket: Bucket) -> Batch:
    """The same batch with the bucket's sizes: padding writes to slot 0 and asks for nothing."""
    def grow(array: np.ndarray, size: int, value: float = 0) -> np.ndarray:
        return np.concatenate([array, np.full(size - len(array), value, array.dtype)])

    tokens, rows, logits = bucket.tokens, bucket.rows, bucket.logits
    pages = np.zeros((rows, bucket.pages), np.int32)
    pages[:batch.pages.shape[0], :batch.pages.shape[1]] = batch.pages
    # A padding token belongs to the last row of the bucket, which is a padding row unless the bucket is full.
    return Batch(grow(batch.tokens, tokens), grow(batch.positions, tokens), grow(batch.slots, tokens),
                 grow(batch.rows, tokens, rows - 1), grow(batch.seqs, rows),
                 grow(batch.starts, rows + 1, batch.starts[-1]), grow(batch.lengths, rows), pages,
                 grow(batch.logit_rows, logits), grow(batch.targets, logits, -2),
                 _pad_sampling(batch.sampling, grow, logits))


def _pad_sampling(s: Sampling, grow, logits: int) -> Sampling:
    off = {"temperature": 0, "uniform": 0, "top_k": 0, "top_p": 1, "min_p": 0}
    columns = {name: None if getattr(s, name) is None else grow(getattr(s, name), logits, value)
               for name, value in off.items()}
    penalties = s.penalties
    if penalties is not None:
        penalties = penalties._replace(
            pending=grow(penalties.pending, logits), repetition=grow(penalties.repetition, logits, 1),
            presence=grow(penalties.presence, logits), frequency=grow(penalties.frequency, logits))
    return s._replace(**columns, penalties=penalties)
