"""Grammars of running requests: masks of the rows that are sampled, and what each token does to its grammar.

A mask needs the token before it. With overlap that token is on the device while the next step is launched, so a mask is
begun with its batch and filled once the step before has been taken in (`core.plan.Mask`).

What grammars say goes through `ask`, so that a recording has it and a rerun needs no grammar.
"""
from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..grammar.contract import COMPLETE, FAILED, GOES_ON
from ..messages import pack_ids, unpack_ids
from ..plan import Mask, StepResult
from .plans import Plan
from .prefill import LEAST
from .request import Request
from .rows import Rows
from .table import RequestTable

log = logging.getLogger(__name__)

ALL = np.uint32(0xFFFFFFFF)
BROKEN = 4  # a verdict beside those of `core.grammar.contract`: the library failed in a way that nobody foresaw
Ask = Callable[[Callable[[], bytes]], bytes]


def _held(call: Callable[[], Any], otherwise: Any) -> Any:
    """What `call` gives, or `otherwise` when the grammars' library fails: those requests end, and nobody else's."""
    try:
        return call()
    except BaseException as error:
        # What its Rust code did not foresee is no `Exception`, and its class has no public name.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        log.exception("the library of grammars failed")
        return otherwise


def refusal(request: Request, table: RequestTable) -> dict[str, Any]:
    """Why its grammar ended a request: error, status, code and param of its last output."""
    field, place = request.params.grammar.field, request.known_now(table) - request.prompt_len + 1
    if request.verdict == FAILED:
        return {"error": f"{field}: it became too complex to follow at token {place} of the output; simplify it, or "
                         "make what it repeats shorter", "status": 400, "code": "invalid_grammar", "param": field}
    if request.verdict == BROKEN:
        return {"error": f"{field}: the library of grammars failed at token {place} of the output", "param": field}
    if request.params.logit_bias:
        return {"error": f"{field}: logit_bias leaves none of the tokens that it allows as token {place} of the output",
                "status": 400, "code": "invalid_value", "param": "logit_bias"}
    return {"error": f"{field}: what the device sampled as token {place} of the output is not allowed",
            "param": field}


class Masks:
    """The masks of one step at a time. grammars: a `core.grammar.library.Library`, whose backend fills rows together.

    late: whether the host lacks a token that the masks need.
    """

    def __init__(self, table: RequestTable, rows: int, vocab_size: int, grammars: Any = None, ask: Ask | None = None):
        self._table, self._grammars, self._ask = table, grammars, ask or (lambda read: read())
        self._shape = rows, -(-vocab_size // 32)
        self._arrays: list[np.ndarray] = []  # two in turn: the device may still read the one before
        self._open: tuple[list[Request], np.ndarray] | None = None
        self.late = False

    def begin(self, rows: Rows, tokens: np.ndarray) -> Mask:
        """The mask of a batch's logit rows, some of which have one, to be filled later. tokens: the input of each, -1
        where it is still on the device."""
        masked = rows.masked
        if not self._arrays:
            self._arrays = [np.full(self._shape, ALL) for _ in range(2)]
        self._arrays.reverse()
        bits = self._arrays[0][:len(masked)]
        self._open, self.late = (rows.owners[masked].tolist(), bits), bool((tokens[masked] < 0).any())
        return Mask(masked, bits)

    def fill(self) -> list[tuple[Request, list[int]]]:
        """Fill what was begun, if it is not filled. Returns requests whose next tokens are forced, with these."""
        if self._open is None:
            return []
        (requests, bits), self._open = self._open, None
        live = [i for i, request in enumerate(requests) if not request.finish]
        if len(live) < len(requests):
            bits[:] = ALL
        if not live:
            return []
        forced = unpack_ids(self._ask(lambda: pack_ids(self._fill([requests[i] for i in live], bits, live)))).tolist()
        found, place = [], 0
        while place < len(forced):  # row, number, tokens; or row, 0, what is wrong
            row, count = forced[place:place + 2]
            if count:
                found.append((requests[row], forced[place + 2:place + 2 + count]))
            else:
                requests[row].stuck = forced[place + 2]
            place += 2 + (count or 1)
        return found

    def give_up(self) -> None:
        """Allow everything: the step before has failed, and nobody will see what this one samples."""
        if self._open is not None:
            self._open[1][:] = ALL
            self._open = None

    def take(self, plan: Plan, result: StepResult, odd: np.ndarray) -> None:
        """Tell the grammars of a step's tokens. Sets `verdict` of requests that do not simply go on, and marks them
        among the decoding rows, `odd` bool [D]."""
        rows, row = plan.rows.masked, len(plan.decode)
        masked = plan.rows.owners[rows].tolist()
        pairs = list(zip(masked, result.tokens[rows].tolist(), strict=True))
        for chunk in plan.chunks:
            row += chunk.scores + chunk.sample
            if chunk.sample and chunk.request.matcher is not None:
                pairs.append((chunk.request, int(result.tokens[row - 1])))
        pairs = [(r, token) for r, token in pairs if not r.finish and (r.stuck is not None or token not in r.stop_ids)]
        if not pairs:
            return
        requests, tokens = zip(*pairs, strict=True)
        said = np.frombuffer(self._ask(lambda: self._accept(requests, tokens)), np.int8)
        for i in (said != GOES_ON).nonzero()[0].tolist():
            requests[i].verdict = int(said[i])
        odd[rows] |= np.array([request.verdict is not None for request in masked], bool)

    def _accept(self, requests: Sequence[Request], tokens: Sequence[int]) -> bytes:
        said = np.full(len(requests), GOES_ON, np.int8)
        fresh = [i for i, request in enumerate(requests) if not request.ahead]
        if fresh:
            matchers, these = [requests[i].matcher for i in fresh], [tokens[i] for i in fresh]
            said[fresh] = _held(lambda: self._grammars.backend.accept(matchers, these), np.int8(BROKEN))
        for i, request in enumerate(requests):
            if request.stuck is not None:
                said[i] = request.stuck
            elif request.ahead and request.matcher.is_complete():
                said[i] = COMPLETE
            if said[i] >= FAILED:
                self._grammars.forget(request.params.grammar)
        return said.tobytes()

    def _fill(self, requests: list[Request], bits: np.ndarray, live: list[int]) -> list[int]:
        """Masks of these requests into rows `live`; forced tokens, and what is wrong, as `fill` reads them."""
        part = bits if len(live) == len(bits) else np.empty((len(live), bits.shape[1]), np.uint32)
        why = FAILED
        if _held(lambda: self._grammars.backend.fill([request.matcher for request in requests], part), True):
            part[:], why = 0, BROKEN
        words = np.count_nonzero(part, axis=1)
        found: list[int] = []
        for i in (words <= 1).nonzero()[0].tolist():
            request, word = requests[i], int(part[i].max())
            if not word:  # what is sampled is refused
                part[i] = ALL
                found += [live[i], 0, why]
            elif not word & (word - 1):
                forced = request.matcher.forced()
                if len(forced) >= LEAST:
                    found += [live[i], len(forced), *forced]
        for i, request in enumerate(requests):
            if request.goes_on:
                self._keep_open(request, part[i])
        if part is not bits:
            bits[live] = part
        return found

    def _keep_open(self, request: Request, row: np.ndarray) -> None:
        """No end before min_tokens, and none with ignore_eos, unless the grammar allows nothing else."""
        held = [token for token in request.ban_ids.tolist() if row.item(token >> 5) >> (token & 31) & 1]
        params = request.params
        if not held or not params.ignore_eos and (
                request.known_now(self._table) - request.prompt_len >= params.min_tokens):
            return
        open_ = row.copy()
        for token in held:
            open_[token >> 5] &= ~np.uint32(1 << (token & 31))
        if open_.any():
            row[:] = open_
