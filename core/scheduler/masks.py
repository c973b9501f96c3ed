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
from ..grammar.controls import Controlled, accept, fill
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


def _is_over(request: Request, token: int) -> bool:
    """Whether a request has ended, or ends with this token whatever its grammar says of it."""
    return bool(request.finish) or request.stuck is None and token in request.stop_ids


def refusal(request: Request, table: RequestTable) -> dict[str, Any]:
    """Why its grammar ended a request: error, status, code and param of its last output."""
    place, grammar = request.known_now(table) - request.prompt_len + 1, request.params.grammar
    if request.verdict == FAILED and isinstance(request.matcher, Controlled):
        return _control_refusal(request, request.matcher, place)
    field = grammar.field if grammar is not None else request.params.controls.fields
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


def _control_refusal(request: Request, matcher: Controlled, place: int) -> dict[str, Any]:
    if matcher.failed:
        return {"error": f"the logits processor {matcher.failed} failed at token {place} of the output",
                "param": "logits_processors"}
    grammar, fields = request.params.grammar, matcher.spec.fields
    left = f"of the tokens that {grammar.field} allows" if grammar is not None else "of all tokens"
    return {"error": f"{fields}: none {left} is left as token {place} of the output", "status": 400,
            "code": "invalid_value", "param": fields.split(",")[0]}


class Masks:
    """The masks of one step at a time. grammars: a `core.grammar.library.Library`, whose backend fills rows together.

    late: whether the host lacks a token that the masks need.
    """

    def __init__(self, table: RequestTable, rows: int, vocab_size: int, grammars: Any = None, ask: Ask | None = None):
        self._table, self._grammars, self._ask = table, grammars, ask or (lambda read: read())
        self._shape = rows, -(-vocab_size // 32)
        self._arrays: list[np.ndarray] = []  # two in turn: the device may still read the one before
        self._open: tuple[list[Request], np.ndarray] | None = None
        self._walked: list[np.ndarray] = []  # masks of drafts in the step that is planned, request after request
        self.late = False

    def _backend(self) -> Any:
        return self._grammars.backend

    def begin(self, rows: Rows, tokens: np.ndarray, drawn: int = 0) -> Mask:
        """The mask of a batch's logit rows, some of which have one, to be filled later. tokens: the input of each, -1
        where it is still on the device. drawn: how many at the end are of drafts, whose masks `walk` has made."""
        masked = rows.masked
        if not self._arrays or len(masked) > len(self._arrays[0]):
            self._arrays = [np.full((max(self._shape[0], len(masked)), self._shape[1]), ALL) for _ in range(2)]
        self._arrays.reverse()
        bits, plain = self._arrays[0][:len(masked)], int(np.count_nonzero(masked < len(tokens) - drawn))
        walked, self._walked = self._walked, []
        if plain < len(masked):
            bits[plain:] = np.concatenate(walked) if walked else ALL  # a rerun asks no grammar
        self._open = rows.owners[masked[:plain]].tolist(), bits[:plain]
        self.late = bool((tokens[masked] < 0).any())
        return Mask(masked.astype(np.int32), bits)

    def walk(self, request: Request, draft: list[int]) -> int:
        """How many tokens of a draft the request's grammar allows. Keeps the masks of its first token and of the place
        after each allowed one, for `begin`, unless there is none."""
        count, bits = _held(lambda: self._walk(request, draft), (0, None))
        if count:
            self._walked.append(bits[:count + 1])
        return count

    def _walk(self, request: Request, draft: list[int]) -> tuple[int, np.ndarray]:
        matcher, bits = request.matcher.clone(), np.full((len(draft) + 1, self._shape[1]), ALL)
        for place, token in enumerate([*draft, -1]):
            if matcher.is_complete():
                return place, bits  # what would come next is drawn, and seen by nobody
            row, part = bits[place], bits[place:place + 1]
            fill(self._backend, [matcher], part)
            if not row.any():
                row[:] = ALL
                return max(0, place - 1), bits
            self._keep_all_open([request], part, place)
            if token < 0 or token in request.stop_ids or not row[token >> 5] >> np.uint32(token & 31) & np.uint32(1):
                return place, bits
            matcher.accept(token)
        return len(draft), bits

    def forget_walks(self) -> None:
        """Nothing of what was drafted is used."""
        self._walked = []

    def follow(self, request: Request, tokens: list[int]) -> bytes:
        """Tell a request's grammar of tokens one after another: what it says of each, up to the first with which it
        does not go on, or that ends the output whatever it says."""
        stop = next((i for i, token in enumerate(tokens) if token in request.stop_ids), len(tokens))
        return self._ask(lambda: self._follow(request, tokens[:stop]))

    def _follow(self, request: Request, tokens: list[int]) -> bytes:
        said = b""
        for token in tokens:
            said += self._accept([request], [token])
            if said[-1] != GOES_ON:
                break
        return said

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
        if not len(rows) and not plan.chunks:
            return
        requests, tokens = list(plan.rows.grammatical), result.tokens[rows].tolist()
        for i in odd[rows].nonzero()[0][::-1].tolist():  # no other has ended or drew a stop id
            if _is_over(requests[i], tokens[i]):
                del requests[i], tokens[i]
                rows = np.delete(rows, i)
        for chunk in plan.chunks:
            row += chunk.scores + chunk.sample
            if chunk.sample and chunk.request.matcher is not None and (
                    not _is_over(chunk.request, token := int(result.tokens[row - 1]))):
                requests.append(chunk.request)
                tokens.append(token)
        if not requests:
            return
        said = np.frombuffer(self._ask(lambda: self._accept(requests, tokens)), np.int8)
        for i in (said != GOES_ON).nonzero()[0].tolist():
            requests[i].verdict = int(said[i])
            if i < len(rows):
                odd[rows[i]] = True

    def _accept(self, requests: Sequence[Request], tokens: Sequence[int]) -> bytes:
        said = np.full(len(requests), GOES_ON, np.int8)
        fresh = [i for i, request in enumerate(requests) if not request.ahead]
        if fresh:
            matchers, these = [requests[i].matcher for i in fresh], [tokens[i] for i in fresh]
            said[fresh] = _held(lambda: accept(self._backend, matchers, these), np.int8(BROKEN))
        for i in [i for i, request in enumerate(requests) if request.ahead or request.stuck is not None]:
            if requests[i].stuck is not None:
                said[i] = requests[i].stuck
            elif requests[i].matcher.is_complete():
                said[i] = COMPLETE
        for i in (said >= FAILED).nonzero()[0].tolist():
            if requests[i].params.grammar is not None:
                self._grammars.forget(requests[i].params.grammar)
        return said.tobytes()

    def _fill(self, requests: list[Request], bits: np.ndarray, live: list[int]) -> list[int]:
        """Masks of these requests into rows `live`; forced tokens, and what is wrong, as `fill` reads them."""
        part = bits if len(live) == len(bits) else np.empty((len(live), bits.shape[1]), np.uint32)
        why = FAILED
        if _held(lambda: fill(self._backend, [r.matcher for r in requests], part), True):
            part[:], why = 0, BROKEN
        found: list[int] = []
        # The largest word of a row with no other is its sum; modulo 2^32 that is a guess, but soon made.
        for i in (part.max(1) == part.sum(1, dtype=np.uint32)).nonzero()[0].tolist():
            request, word = requests[i], int(part[i].max())
            if not word:  # what is sampled is refused
                part[i] = ALL
                found += [live[i], 0, why]
            elif not word & (word - 1) and np.count_nonzero(part[i]) == 1:
                forced = request.matcher.forced()
                if len(forced) >= LEAST:
                    found += [live[i], len(forced), *forced]
        self._keep_all_open(requests, part)
        if part is not bits:
            bits[live] = part
        return found

    def _keep_all_open(self, requests: list[Request], part: np.ndarray, ahead: int = 0) -> None:
        """`_keep_open` for those whose mask allows an end that may have to be forbidden."""
        ends = {token for ids in {request.stop_ids for request in requests if request.goes_on} for token in ids}
        may_end = np.zeros(len(requests), np.uint32)
        for token in ends:
            may_end |= part[:, token >> 5] >> np.uint32(token & 31) & np.uint32(1)
        for i in may_end.nonzero()[0].tolist():
            if requests[i].goes_on:
                self._keep_open(requests[i], part[i], ahead)

    def _keep_open(self, request: Request, row: np.ndarray, ahead: int) -> None:
        """No end before min_tokens, and none with ignore_eos, unless the grammar allows nothing else. ahead: drafted
        tokens before this place."""
        held = [token for token in request.ban_ids.tolist() if row.item(token >> 5) >> (token & 31) & 1]
        params = request.params
        if not held or not params.ignore_eos and (
                request.known_now(self._table) + ahead - request.prompt_len >= params.min_tokens):
            return
        open_ = row.copy()
        for token in held:
            open_[token >> 5] &= ~np.uint32(1 << (token & 31))
        if open_.any():
            row[:] = open_
