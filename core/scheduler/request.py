"""One request inside the scheduler: the cold half of its state. The hot half is a row of `table.RequestTable`."""
from __future__ import annotations

import hashlib

import numpy as np

from ..messages import FinishReason, Logprobs, SamplingParams, Submit, pack_ids, unpack_ids


class Request:
    """Tokens, cache handle and sampling data of one request.

    tokens[:known] are the ids known to the host, prompt first. slot: row in the request table while it runs, else 0.
    node: where its locked prefix ends in the radix tree. finish is set once and never changes.
    """

    __slots__ = ("id", "params", "domain", "priority", "arrival", "started", "prompt_len", "tokens", "known", "slot",
                 "node", "finish", "stop_ids", "ban_ids", "bias_ids", "bias_values", "history", "cached", "attempts",
                 "score", "scores", "reported")

    def __init__(self, submit: Submit, eos_ids: tuple[int, ...], max_outputs: int):
        params = submit.params
        prompt = unpack_ids(submit.prompt)
        self.id, self.params, self.domain, self.priority = submit.id, params, submit.domain, submit.priority
        self.arrival, self.started = submit.arrival, 0.0
        self.prompt_len = self.known = len(prompt)
        self.tokens = np.zeros(len(prompt) + max_outputs, np.int32)
        self.tokens[:len(prompt)] = prompt
        self.slot, self.node, self.finish = 0, None, None
        self.stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(eos_ids))
        self.ban_ids = np.array(sorted(self.stop_ids), np.int32)
        self.bias_ids = np.fromiter(params.logit_bias.keys(), np.int32, len(params.logit_bias))
        self.bias_values = np.fromiter(params.logit_bias.values(), np.float32, len(params.logit_bias))
        self.history = History(prompt) if penalised(params) else None
        self.cached = self.attempts = 0
        self.score = params.prompt_logprobs is not None
        self.scores: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self.reported = False

    @property
    def outputs(self) -> int:
        """Output tokens known to the host."""
        return self.known - self.prompt_len

    def append(self, token: int) -> None:
        """One more sampled token arrived."""
        self.tokens[self.known] = token
        self.known += 1
        if self.history is not None:
            self.history.add(token)

    def finish_reason(self, token: int, limit: int) -> FinishReason | None:
        """Why the output ends with this token, or None. `limit` is the largest number of output tokens."""
        if token in self.stop_ids and self.outputs >= self.params.min_tokens:
            return "stop"
        return "length" if self.outputs >= limit else None

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

    adapter: (name, load number). salt: any string; "" is none. images: (content digest, offset, length) in tokens.
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
