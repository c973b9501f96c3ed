"""What a step gives: columns for most requests, messages for those of which there is more to tell."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..messages import FinishReason, Logprobs, TokenOutput, TokenOutputs, pack_ids
from ..plan import StepResult
from .request import Request

NOT_A_NUMBER = "the model's output is not a number (NaN): its weights are broken, or the way they are computed with is"
_NONE = np.zeros(0, np.int32)


class StepOutputs:
    """Outputs of one step. A request is in `full` or in the columns, never in both.

    full: first outputs, endings, log-probabilities, errors.  handles, tokens: int32 [n], one new token each; of one
    request with drafts several, in order.
    owners: the requests of the columns, object [n].
    Iterating makes a `TokenOutput` of each; `message` is the form that travels.
    """

    __slots__ = ("full", "handles", "tokens", "owners")

    def __init__(self, full: Sequence[TokenOutput] = (), handles: np.ndarray = _NONE, tokens: np.ndarray = _NONE,
                 owners: np.ndarray = _NONE):
        self.full, self.handles, self.tokens, self.owners = full, handles, tokens, owners

    def followed_by(self, later: StepOutputs) -> StepOutputs:
        """These and full outputs that came after them."""
        return StepOutputs([*self.full, *later.full], self.handles, self.tokens, self.owners) if later.full else self

    def __len__(self) -> int:
        return len(self.full) + len(self.tokens)

    def __iter__(self) -> Iterator[TokenOutput]:
        for request, token in zip(self.owners.tolist(), self.tokens.tolist(), strict=True):
            yield TokenOutput(request.id, pack_ids([token]), handle=request.handle)
        yield from self.full

    def message(self) -> TokenOutputs:
        """For the detokenizer."""
        return TokenOutputs(list(self.full), pack_ids(self.handles), pack_ids(self.tokens))


def scored_outputs(rows: np.ndarray, owners: np.ndarray, result: StepResult) -> list[TokenOutput]:
    """One output for each of these rows, whose requests go on and want log-probabilities."""
    tokens, chosen = pack_ids(result.tokens[rows]), result.logprobs[rows].tobytes()
    ids, top, width = pack_ids(result.top_ids[rows]), result.top_logprobs[rows].tobytes(), 4 * result.top_ids.shape[1]
    outputs = []
    for i, request in enumerate(owners[rows].tolist()):
        k, one, best = request.params.logprobs, slice(4 * i, 4 * i + 4), width * i
        most = slice(best, best + 4 * k)
        outputs.append(TokenOutput(request.id, tokens[one], logprobs=Logprobs(chosen[one], k, ids[most], top[most]),
                                   handle=request.handle))
    return outputs


def output_of(request: Request, tokens: bytes = b"", finish: FinishReason | None = None, stop_id: int = -1,
              logprobs: Logprobs | None = None, error: str = "", **more: Any) -> TokenOutput:
    """The next output of a request; its first one has what is told once. more: status, code and param of
    an error."""
    first, request.reported = not request.reported, True
    if finish is not None and request.drafted:
        more |= {"drafted": request.drafted, "accepted": request.accepted}
    return TokenOutput(request.id, tokens, finish, stop_id, request.prompt_len if first else 0,
                       request.cached if first else 0, logprobs,
                       request.prompt_scores() if first and finish not in ("abort", "error") else None, error,
                       handle=request.handle, queued=_queued(request) if first else -1.0, **more)


def _queued(request: Request) -> float:
    """Seconds from arrival until it was first computed; -1 if it never was."""
    return max(0.0, request.started - request.arrival) if request.attempts else -1.0


def token_logprobs(result: StepResult, row: int, k: int, count: int = 1) -> Logprobs:
    """Those of the tokens of `count` logit rows from this one on, with the `k` best."""
    rows = slice(row, row + count)
    return Logprobs(result.logprobs[rows].tobytes(), k, pack_ids(result.top_ids[rows, :k]),
                    result.top_logprobs[rows, :k].tobytes())
