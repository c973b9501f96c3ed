"""Running requests as numpy columns, one row (sequence slot) each; slot 0 is nobody's.

Three lengths of a row, in tokens: computed <= length - 1 while it decodes, and length - 1 <= known <= length.

    tokens    0 ........ computed ........ known ........ length
              K and V launched  | to compute | sampled, still on the device (overlap)
"""
from __future__ import annotations

import numpy as np

from ..messages import SamplingParams

_MIX1, _MIX2, _GOLDEN = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB), np.uint64(0x9E3779B97F4A7C15)


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finalizer (Steele, Lea and Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * _MIX1
    x = (x ^ (x >> np.uint64(27))) * _MIX2
    return x ^ (x >> np.uint64(31))


def uniforms(seeds: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """One number in [0, 1) for each (seed uint64, output position): float32, a function of these two alone."""
    with np.errstate(over="ignore"):
        bits = _mix(_mix(seeds + _GOLDEN) + (steps.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return ((bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0 ** -24)).astype(np.float32)


class RequestTable:
    """Columns of the running requests. `seqs` rows (row 0 unused), `max_pages` page numbers each."""

    def __init__(self, seqs: int, max_pages: int):
        zeros = lambda dtype: np.zeros(seqs, dtype)  # noqa: E731
        self.length, self.known, self.computed = zeros(np.int32), zeros(np.int32), zeros(np.int32)
        self.prompt_len, self.limit, self.last = zeros(np.int32), zeros(np.int32), zeros(np.int32)
        self.page_count, self.tree_pages = zeros(np.int32), zeros(np.int32)
        self.pages = np.zeros((seqs, max_pages), np.int32)
        self.seed = zeros(np.uint64)
        self.temperature, self.top_p, self.min_p = zeros(np.float32), zeros(np.float32), zeros(np.float32)
        self.repetition, self.presence, self.frequency = zeros(np.float32), zeros(np.float32), zeros(np.float32)
        self.top_k, self.min_tokens, self.logprobs = zeros(np.int32), zeros(np.int32), zeros(np.int32)
        self.penalised, self.biased = zeros(bool), zeros(bool)
        self._free = list(range(seqs - 1, 0, -1))

    @property
    def free(self) -> int:
        """Slots that no request has."""
        return len(self._free)

    def take(self, params: SamplingParams, known: int, prompt_len: int, limit: int) -> int:
        """A free slot, filled for a request with `known` tokens and at most `limit` outputs."""
        slot = self._free.pop()
        self.length[slot] = self.known[slot] = known
        self.prompt_len[slot], self.limit[slot] = prompt_len, limit
        self.computed[slot] = self.page_count[slot] = self.tree_pages[slot] = 0
        self.pages[slot] = 0
        self.seed[slot] = np.uint64((params.seed or 0) & 0xFFFFFFFFFFFFFFFF)
        self.temperature[slot], self.top_k[slot], self.top_p[slot] = params.temperature, params.top_k, params.top_p
        self.min_p[slot], self.min_tokens[slot] = params.min_p, params.min_tokens
        self.repetition[slot], self.presence[slot] = params.repetition_penalty, params.presence_penalty
        self.frequency[slot] = params.frequency_penalty
        self.logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        self.penalised[slot] = (params.repetition_penalty != 1.0 or params.presence_penalty != 0.0
                                or params.frequency_penalty != 0.0)
        self.biased[slot] = bool(params.logit_bias)
        return slot

    def give_back(self, slot: int) -> None:
        """The slot is free again."""
        self.length[slot] = self.known[slot] = self.computed[slot] = 0
        self._free.append(slot)
