"""What a step with drafts gives: tokens are appended, requests end, and what was rejected leaves no trace."""
from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..grammar.contract import GOES_ON
from ..messages import TokenOutput, pack_ids
from ..plan import StepResult
from ..scheduler.masks import refusal
from ..scheduler.outputs import NOT_A_NUMBER, output_of, token_logprobs
from ..scheduler.plans import Drafts
from ..scheduler.request import Request
from ..scheduler.table import MASKED, PENALISED, SCORED
from .accept import accepted
from .branches import best, take_over

if TYPE_CHECKING:
    from ..scheduler.scheduler import Scheduler


def settle_drafts(scheduler: Scheduler, drafts: Drafts, result: StepResult, first: int,
                  full: list[TokenOutput], columns: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
    """Take in the rows with drafts, whose logit rows begin at `first`.

    columns: (handles, tokens, requests) of the other rows; returned with those of which there is nothing more to tell,
    a request as often as it has tokens. What there is more to tell goes to `full`.
    """
    table = scheduler.table
    drawn = result.tokens[first:first + len(drafts.rows)]
    kept, counts = accepted(drafts.counts, drafts.tokens, drawn), drafts.counts
    starts = first + drafts.firsts
    if drafts.shifts.any():
        chosen = best(drafts, kept)
        counts = np.maximum.reduceat(drafts.counts, np.flatnonzero(drafts.shifts == 0))
        drawn = drawn[np.isin(drafts.rows, chosen)]
        drafts, kept, starts = drafts.only(chosen), kept[chosen], starts[chosen]
        take_over(table, drafts, scheduler.limits.page_size)
    slots, rows = drafts.slots, drafts.rows
    known, taken = table.known[slots], kept + 1
    scheduler.speculation.count(drafts, counts, kept)
    given = drafts.offsets < taken[rows]
    odd = (table.generation[slots] != drafts.generations) | (known + taken >= table.end[slots])
    odd |= drafts.flags & (PENALISED | SCORED | MASKED) > 0
    odd[rows[table.may_stop(drawn) & given]] = True
    even = ~odd
    told = given & even[rows]
    at, tokens = rows[told], drawn[told]
    table.tokens[slots[at], known[at] + drafts.offsets[told]] = tokens
    ours = slots[even]
    table.known[ours] = table.length[ours] = known[even] + taken[even]
    table.last[ours] = drawn[drafts.firsts[even] + kept[even]]
    scheduler.stats.generated_tokens += len(tokens)
    for row, start in zip(odd.nonzero()[0].tolist(), starts[odd].tolist(), strict=True):
        request, count = drafts.owners[row], int(taken[row])
        if not request.finish:
            _take_run(scheduler, request, result, start, count, full)
        if request.finish:
            kept[row] = -1
    scheduler.speculation.settled(drafts, kept)
    ours = table.handle[slots][at], tokens, drafts.owners[at]
    return tuple([np.concatenate(pair) for pair in zip(columns, ours, strict=True)])


def _take_run(scheduler: Scheduler, request: Request, result: StepResult, row: int, count: int,
              full: list[TokenOutput]) -> None:
    """The tokens of one request that asks for more than its tokens, or ends with one of them."""
    table, k, tokens = scheduler.table, request.params.logprobs, result.tokens[row:row + count].tolist()
    said = scheduler.masks.follow(request, tokens) if request.matcher is not None else b""
    reason, error, done = None, None, 0
    for place, token in enumerate(tokens):
        if k is not None and np.isnan(result.logprobs[row + place]):
            error = {"error": NOT_A_NUMBER}
            break
        if place < len(said) and said[place] != GOES_ON:
            request.verdict = said[place]
        if request.is_refused(token):
            error = refusal(request, table)
            break
        outputs, done = scheduler._append(request, token), place + 1
        reason = request.finish_reason(token, outputs)
        if reason:
            break
    scheduler.stats.generated_tokens += done
    table.length[request.slot] = table.known[request.slot]
    logprobs = token_logprobs(result, row, k, done) if k is not None and done else None
    ids = pack_ids(tokens[:done])
    if reason:
        stop_id = tokens[done - 1] if reason == "stop" and tokens[done - 1] in request.stop_ids else -1
        scheduler._finish(request, reason, stop_id, full, ids, logprobs)
    elif done:
        full.append(output_of(request, ids, logprobs=logprobs))
    if error is not None:
        scheduler._end(request, "error", **error)
