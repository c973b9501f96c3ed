"""From a plan to the padded arrays of a `Batch`: vectorised over the decode rows, a short loop over prefill chunks."""
from __future__ import annotations

import numpy as np

from ..plan import Batch, Bias, Penalties, Sampling
from ..specs import Bucket, Buckets
from .masks import Masks
from .plans import Plan
from .rows import Rows
from .table import BIASED, DRAWN, MASKED, MIN_P, MIN_TOKENS, PENALISED, SCORED, TOP_K, TOP_P, RequestTable


def _i32(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts, dtype=np.int32, casting="same_kind")


def fit(count: int, sizes: tuple[int, ...], what: str) -> int:
    """The smallest bucket size that holds `count`; ValueError when none does."""
    for size in sizes:
        if size >= count:
            return size
    raise ValueError(f"{count} {what} exceed the largest bucket, {sizes[-1]}")


def build_batch(plan: Plan, table: RequestTable, page_size: int,
                buckets: Buckets | None, masks: Masks | None = None) -> tuple[Batch, Bucket | None]:
    """The batch of a plan, before `Scheduler.advance`, and the bucket it is padded to (None = exact sizes). The bits of
    its mask are filled by `masks`, later."""
    decode, chunks, lengths = plan.decode, plan.chunks, plan.lengths
    last = lengths - 1
    tokens = np.where(table.known[decode] > last, table.last[decode], np.int32(-1))
    seqs, positions, starts = plan.rows.seqs, last, plan.rows.numbers
    rows = starts[:-1]
    slots = table.pages[decode, last // page_size] * np.int32(page_size) + last % np.int32(page_size)
    if chunks:
        starts = np.arange(len(decode) + len(chunks) + 1, dtype=np.int32)
        seqs = _i32([decode, np.array([c.slot for c in chunks], np.int32)])
        counts = np.array([c.stop - c.start for c in chunks], np.int32)
        starts[len(decode) + 1:] = len(decode) + np.cumsum(counts)
        tokens = _i32([tokens] + [table.tokens[c.slot, c.start:c.stop] for c in chunks])
        positions = _i32([last] + [np.arange(c.start, c.stop) for c in chunks])
        rows = _i32([rows, np.repeat(np.arange(len(decode), len(seqs)), counts)])
        lengths = _i32([lengths, np.array([c.stop for c in chunks], np.int32)])
        slots = _i32([slots] + [_chunk_slots(table.pages[c.slot], c.start, c.stop, page_size) for c in chunks])
    pages = _page_table(table, seqs if chunks else decode, lengths, len(decode), page_size)
    logit_rows, targets, sampled = _logit_rows(plan, starts, table)
    sampling = _sampling(plan, table, sampled, tokens[logit_rows], masks)
    batch = Batch(tokens, positions, slots, rows, seqs, starts, lengths, pages, logit_rows, targets, sampling)
    if buckets is None:
        return batch, None
    bucket = Bucket(fit(len(tokens), buckets.tokens, "tokens"), fit(len(seqs), buckets.rows, "rows"),
                    fit(pages.shape[1], buckets.pages, "pages a row"),
                    fit(len(targets), tuple(sorted({*buckets.rows, *buckets.tokens})), "logit rows"))
    return pad_batch(batch, bucket), bucket


def _chunk_slots(row: np.ndarray, start: int, stop: int, page_size: int) -> np.ndarray:
    """Where the tokens at positions `start` to `stop` of a request with these pages are written."""
    pages = row[start // page_size:-(-stop // page_size), None] * page_size + np.arange(page_size)
    return pages.ravel()[start % page_size:start % page_size + stop - start]


def _page_table(table: RequestTable, seqs: np.ndarray, lengths: np.ndarray, decode: int, page_size: int) -> np.ndarray:
    """The rows' pages, 0 past their context. A decoding row has none beyond; that of a chunk has its whole prompt's."""
    pages = table.pages[seqs, :-(-int(lengths.max()) // page_size)]
    for row, length in enumerate(lengths[decode:].tolist(), decode):
        pages[row, -(-length // page_size):] = 0
    return pages


def _logit_rows(plan: Plan, starts: np.ndarray, table: RequestTable) -> tuple[np.ndarray, np.ndarray, Rows]:
    """Which tokens' logits are wanted, the target of each (-1 = sample), and the rows of those that are sampled, slot 0
    for others. A lone padding row if there is none."""
    count = len(plan.decode)
    if not plan.chunks:
        return plan.rows.numbers[:-1], plan.rows.untold, plan.rows
    rows, targets, owners = [starts[:count]], [plan.rows.untold], [plan.decode]
    for chunk, first in zip(plan.chunks, starts[count:-1].tolist(), strict=True):
        if chunk.scores:
            rows.append(np.arange(first, first + chunk.scores))
            targets.append(table.tokens[chunk.slot, chunk.start + 1:chunk.start + 1 + chunk.scores])
            owners.append(np.zeros(chunk.scores, np.int32))
        if chunk.sample:
            rows.append(np.array([first + chunk.stop - chunk.start - 1]))
            targets.append(np.array([-1]))
            owners.append(np.array([chunk.slot]))
    if not any(map(len, rows)):
        return np.zeros(1, np.int32), np.full(1, -2, np.int32), Rows(table, np.zeros(1, np.int32))
    return _i32(rows), _i32(targets), Rows(table, _i32(owners))


def _sampling(plan: Plan, table: RequestTable, rows: Rows, tokens: np.ndarray,
              masks: Masks | None) -> Sampling:
    """Parameters of each logit row from its slot's columns; a scored or padding row (slot 0) is greedy and plain.
    tokens: the input of each."""
    asked = rows.asked
    k = max((c.request.params.prompt_logprobs for c in plan.chunks if c.scores), default=-1)
    if asked & SCORED:
        k = max(k, rows.top)
    top = None if k < 0 else np.zeros(k, np.int32)
    steps = table.length[rows.slots] - rows.prompt_len
    penalties = _penalties(rows, tokens) if asked & PENALISED else None
    bias = _bias(rows, steps) if asked & (BIASED | MIN_TOKENS) else None
    mask = masks.begin(rows, tokens) if masks is not None and asked & MASKED else None
    if not asked & DRAWN:
        return Sampling(penalties=penalties, bias=bias, mask=mask, top_logprobs=top)
    return Sampling(rows.temperature, rows.uniform(steps), rows.top_k if asked & TOP_K else None,
                    rows.top_p if asked & TOP_P else None, rows.min_p if asked & MIN_P else None, penalties, bias,
                    mask, top)


def _penalties(rows: Rows, tokens: np.ndarray) -> Penalties:
    penalised, histories = rows.penalised, rows.histories
    pending = np.zeros(len(tokens), np.int32)
    pending[penalised] = tokens[penalised] == -1
    return Penalties(penalised.repeat([h.size for h in histories]), np.concatenate([h.ids for h in histories]),
                     np.concatenate([h.counts for h in histories]), pending, rows.repetition, rows.presence,
                     rows.frequency)


def _bias(rows: Rows, steps: np.ndarray) -> Bias | None:
    """logit_bias, and a ban on every stop id while fewer than min_tokens are out."""
    banned = steps < rows.min_tokens
    told = banned.tobytes()
    if rows.bias is None or rows.bias[0] != told:
        rows.bias = told, _make_bias(rows, banned)
    return rows.bias[1]


def _make_bias(rows: Rows, banned: np.ndarray) -> Bias | None:
    some = (banned | (rows.flags & BIASED > 0)).nonzero()[0].astype(np.int32)
    if not len(some):
        return None
    sizes, ids, values = [], [], []
    for request, ban in zip(rows.owners[some].tolist(), banned[some].tolist(), strict=True):
        ids.append(request.bias_ids)
        values.append(request.bias_values)
        if ban:
            ids.append(request.ban_ids)
            values.append(np.full(len(request.ban_ids), -np.inf, np.float32))
        sizes.append(len(request.bias_ids) + ban * len(request.ban_ids))
    return Bias(some.repeat(sizes), np.concatenate(ids), np.concatenate(values))


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
