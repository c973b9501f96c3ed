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

from ..grammar.contract import COMPLETE, GOES_ON, REFUSED
from ..messages import pack_ids, unpack_ids
from ..plan import Mask, StepResult
from .plans import Plan
from .prefill import LEAST
from .request import Request
from .rows import Rows
from .table import RequestTable

log = logging.getLogger(__name__)

ALL = np.uint32(0xFFFFFFFF)
REFUSED_TOKEN = ("the grammar allows none of the tokens that could be sampled here: logit_bias bans what it needs, or "
                 "it is too complex")
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
        while place < len(forced):  # row, number, tokens
            row, count = forced[place:place + 2]
            found.append((requests[row], forced[place + 2:place + 2 + count]))
            place += 2 + count
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
        pairs = [(r, token) for r, token in pairs if not r.finish and token not in r.stop_ids]
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
            said[fresh] = _held(lambda: self._grammars.backend.accept(matchers, these), np.int8(REFUSED))
        for i, request in enumerate(requests):
            if request.stuck:
                said[i] = REFUSED
            elif request.ahead and request.matcher.is_complete():
                said[i] = COMPLETE
        return said.tobytes()

    def _fill(self, requests: list[Request], bits: np.ndarray, live: list[int]) -> list[int]:
        """Masks of these requests into rows `live`; forced tokens as `fill` reads them."""
        part = bits if len(live) == len(bits) else np.empty((len(live), bits.shape[1]), np.uint32)
        if _held(lambda: self._grammars.backend.fill([request.matcher for request in requests], part), True):
            part[:] = 0
        words = np.count_nonzero(part, axis=1)
        found: list[int] = []
        for i in (words <= 1).nonzero()[0].tolist():
            request, word = requests[i], int(part[i].max())
            if not word:  # a limit of the grammar's; what is sampled is refused
                request.stuck, part[i] = True, ALL
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
