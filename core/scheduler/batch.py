"""From a plan to the padded arrays of a `Batch`: vectorised over the decode rows, a short loop over prefill chunks."""
from __future__ import annotations

import numpy as np

from ..plan import Batch, Bias, Penalties, Sampling
from ..specs import Bucket, Buckets
from .masks import Masks
from .plans import Drafts, Plan
from .request import History
from .rows import Rows
from .table import ADAPTED, BIASED, DRAWN, MASKED, MIN_P, MIN_TOKENS, PENALISED, SCORED, TOP_K, TOP_P, RequestTable


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
    page = last // page_size
    slots = (table.pages[decode, page] - page) * page_size + last
    more = bool(chunks) or plan.drafts is not None
    if more:
        counts, *others = _more_rows(plan, table, page_size)
        seqs, tokens, positions, slots, lengths = (_i32([ours, *theirs]) for ours, theirs in zip(
            (decode, tokens, last, slots, lengths), others, strict=True))
        counts = _i32([np.ones(len(decode), np.int32), *counts])
        starts = _i32([np.zeros(1, np.int32), np.cumsum(counts)])
        rows = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    pages = _page_table(table, seqs if more else decode, lengths, len(decode), len(chunks), page_size)
    if plan.drafts is not None and plan.drafts.shifts.any():
        _branch(pages[len(decode) + len(chunks):], table, plan.drafts, page_size)
    logit_rows, targets, sampled = _logit_rows(plan, starts, table)
    sampling = _sampling(plan, table, sampled, tokens[logit_rows] if more else tokens, masks)
    adapters = None
    if plan.rows.asked & ADAPTED or more and table.adapter[seqs].any():
        adapters = table.adapter[seqs][rows] if more else plan.rows.adapter
    return bucketed(Batch(tokens, positions, slots, rows, seqs, starts, lengths, pages, logit_rows, targets, sampling,
                          adapters), buckets)


def bucketed(batch: Batch, buckets: Buckets | None) -> tuple[Batch, Bucket | None]:
    """A batch padded to the smallest bucket that holds it, and that bucket; as it is where none are needed."""
    if buckets is None:
        return batch, None
    bucket = Bucket(fit(len(batch.tokens), buckets.tokens, "tokens"), fit(len(batch.seqs), buckets.rows, "rows"),
                    fit(batch.pages.shape[1], buckets.pages, "pages a row"),
                    fit(len(batch.targets), tuple(sorted({*buckets.rows, *buckets.tokens})), "logit rows"))
    return pad_batch(batch, bucket), bucket


def _more_rows(plan: Plan, table: RequestTable, page_size: int) -> tuple[list[np.ndarray], ...]:
    """What rows of prompt chunks and of drafts add to a batch, in parts: tokens a row, sequence slots, tokens, their
    positions, where they are written, lengths of the rows."""
    chunks, drafts = plan.chunks, plan.drafts
    counts, seqs = [np.array([c.size for c in chunks], np.int32)], [np.array([c.slot for c in chunks], np.int32)]
    tokens = [table.tokens[c.slot, c.start:c.stop] for c in chunks]
    positions = [np.arange(c.start, c.stop, dtype=np.int32) for c in chunks]
    slots = [_chunk_slots(table.pages[c.slot], c.start, c.stop, page_size) for c in chunks]
    lengths = [np.array([c.stop for c in chunks], np.int32)]
    if drafts is not None:
        theirs, heads = drafts.slots[drafts.rows], drafts.offsets == 0
        inputs = np.empty(len(heads), np.int32)
        inputs[heads], inputs[~heads] = table.last[drafts.slots], drafts.tokens
        places = (drafts.lengths - 1)[drafts.rows] + drafts.offsets
        page = places // page_size
        counts.append(drafts.counts + 1)
        seqs.append(drafts.slots)
        tokens.append(inputs)
        positions.append(places)
        slots.append((table.pages[theirs, page + drafts.shifts[drafts.rows]] - page) * page_size + places)
        lengths.append(drafts.lengths + drafts.counts)
    return counts, seqs, tokens, positions, slots, lengths


def _chunk_slots(row: np.ndarray, start: int, stop: int, page_size: int) -> np.ndarray:
    """Where the tokens at positions `start` to `stop` of a request with these pages are written."""
    pages = row[start // page_size:-(-stop // page_size), None] * page_size + np.arange(page_size)
    return pages.ravel()[start % page_size:start % page_size + stop - start]


def _page_table(table: RequestTable, seqs: np.ndarray, lengths: np.ndarray, decode: int, chunks: int,
                page_size: int) -> np.ndarray:
    """The rows' pages, 0 past their context. A decoding row has none beyond, nor has one with drafts; that of a chunk
    has its whole prompt's."""
    pages = table.pages[seqs, :-(-int(lengths.max()) // page_size)]
    for row, length in enumerate(lengths[decode:decode + chunks].tolist(), decode):
        pages[row, -(-length // page_size):] = 0
    return pages


def _branch(pages: np.ndarray, table: RequestTable, drafts: Drafts, page_size: int) -> None:
    """The pages of rows with drafts, some of which have own ones behind those that they share."""
    columns = np.arange(pages.shape[1]) + np.zeros_like(drafts.shifts)[:, None]
    own, beyond = (columns >= end[:, None] for end in (
        (drafts.lengths - 1) // page_size, -(-(drafts.lengths + drafts.counts) // page_size)))
    columns[own & ~beyond] += np.broadcast_to(drafts.shifts[:, None], own.shape)[own & ~beyond]
    pages[:] = np.where(beyond, 0, table.pages[drafts.slots[:, None], columns])


def _logit_rows(plan: Plan, starts: np.ndarray, table: RequestTable) -> tuple[np.ndarray, np.ndarray, Rows]:
    """Which tokens' logits are wanted, the target of each (-1 = sample), and the rows of those that are sampled, slot 0
    for others. A lone padding row if there is none."""
    count = len(plan.decode)
    if not plan.chunks and plan.drafts is None:
        return plan.rows.numbers[:-1], plan.rows.untold, plan.rows
    rows, targets, owners = [starts[:count]], [plan.rows.untold], [plan.decode]
    for chunk, first in zip(plan.chunks, starts[count:].tolist(), strict=False):
        if chunk.scores:
            rows.append(np.arange(first, first + chunk.scores))
            targets.append(table.tokens[chunk.slot, chunk.start + 1:chunk.start + 1 + chunk.scores])
            owners.append(np.zeros(chunk.scores, np.int32))
        if chunk.sample:
            rows.append(np.array([first + chunk.stop - chunk.start - 1]))
            targets.append(np.array([-1]))
            owners.append(np.array([chunk.slot]))
    if plan.drafts is not None:
        drawn = len(plan.drafts.rows)
        rows.append(np.arange(starts[-1] - drawn, starts[-1]))
        targets.append(np.full(drawn, -1))
        owners.append(plan.drafts.slots[plan.drafts.rows])
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
    steps, drawn = table.length[rows.slots] - rows.prompt_len, 0
    if plan.drafts is not None:
        drawn = len(plan.drafts.rows)
        steps[-drawn:] += plan.drafts.offsets
    penalties = _penalties(rows, tokens, plan.drafts) if asked & PENALISED else None
    bias = _bias(rows, steps) if asked & (BIASED | MIN_TOKENS) else None
    mask = masks.begin(rows, tokens, drawn) if masks is not None and asked & MASKED else None
    if not asked & DRAWN:
        return Sampling(penalties=penalties, bias=bias, mask=mask, top_logprobs=top)
    return Sampling(rows.temperature, rows.uniform(steps), rows.top_k if asked & TOP_K else None,
                    rows.top_p if asked & TOP_P else None, rows.min_p if asked & MIN_P else None, penalties, bias,
                    mask, top)


def _penalties(rows: Rows, tokens: np.ndarray, drafts: Drafts | None) -> Penalties:
    penalised, histories = rows.penalised, rows.histories
    if drafts is not None:
        histories = _drafted(histories, penalised - (len(tokens) - len(drafts.rows)), drafts)
    pending = np.zeros(len(tokens), np.int32)
    pending[penalised] = tokens[penalised] == -1
    numbers = penalised.astype(np.int32).repeat([h.size for h in histories])
    return Penalties(numbers, np.concatenate([h.ids for h in histories]), np.concatenate([h.counts for h in histories]),
                     pending, rows.repetition, rows.presence, rows.frequency)


def _drafted(histories: list[History], places: np.ndarray, drafts: Drafts) -> list[History]:
    """These histories with the drafted tokens that stand before each place; below 0 = not among the drafts' rows."""
    return [history if place < 0 or not drafts.offsets[place] else history.after(
        drafts.of(int(drafts.rows[place]))[:drafts.offsets[place]])
        for history, place in zip(histories, places.tolist(), strict=True)]


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
                 _pad_sampling(batch.sampling, grow, logits),
                 None if batch.adapters is None else grow(batch.adapters, tokens))


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
