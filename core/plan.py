"""What crosses the neck: a `Batch` of integers down, a `StepResult` of token ids up.

A scheduler's `StepPlan` lists token ranges; the batch builder turns it into the padded arrays of a `Batch`.
Both are plain data, so a run can be recorded and replayed without the hardware.

Letters: T tokens, B rows (one sequence each), P pages per row, L logit rows, V vocabulary. Padding tokens write to
slot 0 (page 0 is nobody's), padding rows use sequence slot 0, padding logit rows point at token 0.
All arrays are numpy on the host; a platform moves them.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np


class Penalties(NamedTuple):
    """Repetition, presence and frequency penalties, sparse.

    Entry i says: token `ids[i]` belongs to the prompt or output of logit row `rows[i]` and occurs `counts[i]` times
    in its output (0 = in the prompt only). (row, id) pairs are distinct. Where `pending[l]` is 1, the row's input
    token is still in the State (overlap): it counts once more as output.
    Repetition (Keskar et al. 2019, CTRL): positive logits divided, others multiplied, once per distinct token.
    Presence and frequency (OpenAI API reference): logit -= presence * (count > 0) + frequency * count.
    """

    rows: np.ndarray        # [N] int32, index into L
    ids: np.ndarray         # [N] int32
    counts: np.ndarray      # [N] int32
    pending: np.ndarray     # [L] int32, 0 or 1
    repetition: np.ndarray  # [L] float32, 1 = off
    presence: np.ndarray    # [L] float32, 0 = off
    frequency: np.ndarray   # [L] float32, 0 = off


class Bias(NamedTuple):
    """Values added to logits before penalties; -inf bans a token. (row, id) pairs may repeat and then add up."""

    rows: np.ndarray    # [N] int32, index into L
    ids: np.ndarray     # [N] int32
    values: np.ndarray  # [N] float32


def already() -> None:
    """Nothing is waited for."""


class Mask(NamedTuple):
    """Token masks of a grammar: bit j of word i allows token 32 * i + j. Rows not listed are free.

    `rows` and the shape of `bits` are known at launch; `bits` may be read only after `ready` has returned. A mask
    needs the token of the step before, which may still run: a platform calls `ready` as late as it can, at the latest
    before it samples, and loses nothing by that. On the thread that launches it takes in the step before; on any other
    it waits until that was done, which is after the launch has returned: a launch must not wait for a thread that
    waits here. A platform without the feature "late_mask" gets masks that can be read at once.
    """

    rows: np.ndarray  # [M] int32, index into L
    bits: np.ndarray  # [M, ceil(V / 32)] uint32
    ready: Callable[[], None] = already


class Sampling(NamedTuple):
    """How each logit row picks its token. A field that is None is off for the whole batch (a static choice).

    Order: mask, bias, penalties, temperature, top-k, top-p over the renormalised rest, min-p, inverse CDF.
    The draw is the smallest token id t, in id order, with CDF(t) > uniform: `uniform` comes from core and depends
    only on the request's seed and output position, so a draw is the same on every platform up to logit error.
    temperature 0 means greedy: the largest logit after mask, bias and penalties, the lowest id among equals.
    logprobs are log softmax of the raw logits, before mask, bias, penalties and temperature.
    """

    temperature: np.ndarray | None = None  # [L] float32; None = every row greedy
    uniform: np.ndarray | None = None      # [L] float32 in [0, 1)
    top_k: np.ndarray | None = None        # [L] int32, 0 = off
    top_p: np.ndarray | None = None        # [L] float32, 1 = off
    min_p: np.ndarray | None = None        # [L] float32, 0 = off
    penalties: Penalties | None = None
    bias: Bias | None = None
    mask: Mask | None = None
    top_logprobs: np.ndarray | None = None  # [K] int32 zeros: only the length counts; K = 0 = the chosen token's only


class Batch(NamedTuple):
    """One step's input. Tokens of a row are contiguous and rows are in order; rows with one token come first. Rows of
    several tokens may have the same sequence slot (branches of a draft); none of their tokens is -1."""

    tokens: np.ndarray      # [T] int32; -1 = the last sampled token of the row's sequence slot, kept in State
    positions: np.ndarray   # [T] int32
    slots: np.ndarray       # [T] int32, page * page_size + offset where this token's K and V are written
    rows: np.ndarray        # [T] int32, index into B
    seqs: np.ndarray        # [B] int32, sequence slot of each row
    starts: np.ndarray      # [B + 1] int32, row b owns tokens starts[b] : starts[b + 1]; padding rows own none
    lengths: np.ndarray     # [B] int32, context length of the row, this step's tokens included; 0 = padding row
    pages: np.ndarray       # [B, P] int32, page table; entries past the context are 0
    logit_rows: np.ndarray  # [L] int32, index into T of the tokens whose logits are wanted
    targets: np.ndarray     # [L] int32; -1 = sample and keep the token in State; -2 = padding; else score this token
    #                         several of a row may be sampled (drafts): any of them is kept, and nobody reads it
    sampling: Sampling
    adapters: np.ndarray | None = None  # [T] int32, number of the low-rank adapter of the token's row, 0 = none; None =
    #                                     no row has one: of a step's batches either all have this field or none has


class StepResult(NamedTuple):
    """What a step gives back, on the host.

    tokens: the sampled token, or the target where one was given. logprobs: of that token. Both in order of L.
    """

    tokens: np.ndarray                     # [L] int32
    logprobs: np.ndarray | None = None     # [L] float32
    top_ids: np.ndarray | None = None      # [L, K] int32, best first
    top_logprobs: np.ndarray | None = None  # [L, K] float32


class Out(Protocol):
    """A launched step."""

    def collect(self) -> StepResult:
        """Block until the step is done. Raises what the step raised; may be called once."""
        ...


class Range(NamedTuple):
    """Tokens `start` to `stop` of one request, computed in this step; `sample` = its next token is wanted."""

    request: int  # sequence slot
    start: int
    stop: int
    sample: bool


class StepPlan(NamedTuple):
    """What the scheduler decided for one step: decode ranges first, then prefill chunks."""

    step: int
    ranges: tuple[Range, ...]
