"""One request inside the scheduler: the cold half of its state. The hot half is a row of `table.RequestTable`."""
from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

from ..grammar.contract import COMPLETE, FAILED, Matcher
from ..messages import FinishReason, Logprobs, SamplingParams, Submit, pack_ids, unpack_ids

if TYPE_CHECKING:
    from .table import RequestTable

ID_BYTES = 4

class Request:
    """Tokens, cache handle and sampling data of one request.

    stored: ids known when it last came to or left the device, as int32 bytes, prompt first: those of a running request
    are in the request table. slot: its row there while it runs, else 0. node: where its locked prefix ends in the radix
    tree. limit: most output tokens. turn: its number in order of first admission. left: the plan that sent it back.
    finish is set once and never changes. ticket is the schedule policy's, use the eviction policy's.
    matcher: of its grammar, None without one, at the last token that the host knows. verdict: what it said of that, if
    not to go on. stuck: what it is going to say, as it allows nothing more. ahead: tokens that it forced, counted as
    known although the first is in flight. goes_on: an end may have to be forbidden. drafted, accepted: tokens, while it
    ran before.
    """

    __slots__ = ("id", "handle", "params", "domain", "priority", "tenant", "ttft", "hint", "arrival", "started",
                 "prompt_len", "limit", "stored", "slot", "node", "finish", "stop_ids", "ban_ids", "bias_ids",
                 "bias_values", "history", "cached", "attempts", "turn", "left", "score", "scores", "reported",
                 "ticket", "use", "matcher", "ahead", "verdict", "stuck", "goes_on", "adapter",
                 "drafted", "accepted")

    def __init__(self, submit: Submit, eos_ids: tuple[int, ...], limit: int, handle: int = 0, 
                 matcher: Matcher | None = None):
        params = submit.params
        self.id, self.params, self.domain, self.priority = submit.id, params, submit.domain, submit.priority
        if submit.adapter:  # whoever asks, pages of different adapters are never shared
            self.domain = cache_domain((submit.domain.hex(), submit.adapter))
        self.handle, self.tenant, self.ttft, self.hint = handle, submit.tenant, submit.ttft, submit.hint
        self.arrival, self.started, self.adapter = submit.arrival, 0.0, submit.adapter
        self.stored, self.prompt_len, self.limit = submit.prompt, len(submit.prompt) // ID_BYTES, limit
        self.slot, self.node, self.finish, self.ticket, self.use = 0, None, None, None, None
        self.stop_ids = eos_ids if matcher is not None or not params.ignore_eos else ()
        if params.stop_token_ids:
            self.stop_ids = tuple(sorted({*self.stop_ids, *params.stop_token_ids}))
        self.ban_ids = self.bias_ids = self.bias_values = self.history = None
        self.cached = self.attempts = self.turn = self.left = self.drafted = self.accepted = 0
        self.score = params.prompt_logprobs is not None
        self.scores: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self.reported = False
        self.matcher, self.verdict, self.stuck = matcher, None, None
        self.ahead: list[int] = []
        self.goes_on = matcher is not None and bool(params.min_tokens or params.ignore_eos)

    @property
    def ids(self) -> np.ndarray:
        """`stored` as int32."""
        return unpack_ids(self.stored)

    @property
    def known(self) -> int:
        """Tokens in `stored`: where its prefill ends while it runs."""
        return len(self.stored) // ID_BYTES

    def go_ahead(self, tokens: list[int]) -> None:
        """These tokens, of which the first is in flight, are known already."""
        self.ahead = tokens
        for token in tokens:
            if not self.matcher.accept(token):
                self.stuck = FAILED
            if self.history is not None:
                self.history.add(token)

    def is_refused(self, token: int) -> bool:
        """Whether its grammar does not allow this token, its next one."""
        return self.verdict not in (None, COMPLETE) or bool(self.ahead) and token != self.ahead[0]

    def known_now(self, table: RequestTable) -> int:
        """Tokens that the host knows, whether or not it runs."""
        return int(table.known[self.slot]) if self.slot else self.known

    def prepare(self) -> None:
        """Make what only a running request needs, when it is first admitted."""
        bias = self.params.logit_bias
        self.ban_ids = np.array(self.stop_ids, np.int32)
        self.bias_ids = np.fromiter(bias.keys(), np.int32, len(bias))
        self.bias_values = np.fromiter(bias.values(), np.float32, len(bias))
        if penalised(self.params):
            self.history = History(self.ids)

    def finish_reason(self, token: int, outputs: int) -> FinishReason | None:
        """Why the output ends with this token, its `outputs`-th, or None. A grammar comes before min_tokens."""
        if token in self.stop_ids and (outputs >= self.params.min_tokens or self.matcher is not None):
            return "stop"
        if self.verdict is not None:
            return "stop"
        return "length" if outputs >= self.limit else None

    def prompt_scores(self) -> Logprobs | None:
        """Log-probabilities of prompt tokens 1 .. n - 1, once all are there."""
        if not self.scores:
            return None
        chosen, ids, top = (np.concatenate(parts) for parts in zip(*self.scores, strict=True))
        self.scores = []
        return Logprobs(chosen.tobytes(), ids.shape[1], pack_ids(ids), top.tobytes())


class History:
    """Distinct tokens of prompt and output with their output counts, for penalties; grown in place."""

    def __init__(self, prompt: np.ndarray):
        ids = np.unique(prompt)
        self._index = dict(zip(ids.tolist(), range(len(ids)), strict=True))
        self._ids = np.concatenate([ids, np.zeros(len(ids) + 16, np.int32)]).astype(np.int32)
        self._counts = np.zeros(len(self._ids), np.int32)
        self.size = len(ids)

    @property
    def ids(self) -> np.ndarray:
        return self._ids[:self.size]

    @property
    def counts(self) -> np.ndarray:
        return self._counts[:self.size]

    def after(self, tokens: np.ndarray) -> History:
        """Another one, with further output tokens."""
        other = History.__new__(History)
        other._index, other.size = dict(self._index), self.size
        other._ids, other._counts = self._ids.copy(), self._counts.copy()
        for token in tokens.tolist():
            other.add(token)
        return other

    def add(self, token: int) -> None:
        """Count one output token."""
        at = self._index.get(token)
        if at is None:
            at = self._index[token] = self.size
            if at == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros(at, np.int32)])
                self._counts = np.concatenate([self._counts, np.zeros(at, np.int32)])
            self._ids[at] = token
            self.size += 1
        self._counts[at] += 1


def penalised(params: SamplingParams) -> bool:
    """Does any penalty differ from "off"?"""
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def cache_domain(adapter: tuple[str, int] | None = None, salt: str | None = None,
                 images: tuple[tuple[str, int, int], ...] = (), tenant: str = "") -> bytes:
    """The cache domain of a request: b"" without extras, else a digest in which every part is tagged and delimited.

    adapter: (the domain without it, load number). salt: any string; "" is none. images: (content digest, offset,
    length) in tokens.
    tenant: whose pages nobody else may share; "" = everybody's.
    """
    if not adapter and not salt and not images and not tenant:
        return b""
    digest = hashlib.blake2b(digest_size=16)
    parts = [("adapter", *map(str, adapter))] if adapter else []
    parts += [("salt", salt)] if salt else []
    parts += [("tenant", tenant)] if tenant else []
    parts += [("image", *map(str, image)) for image in images]
    for part in parts:
        for word in part:
            data = word.encode("utf-8", "surrogatepass")
            digest.update(len(data).to_bytes(4, "little") + data)
        digest.update(b"\xff\xff\xff\xff")
    return digest.digest()
