"""What a configuration answers: its log-probabilities on a text, beside those of a reference.

A server is asked to score the text (`/v1/completions` with `echo` and `logprobs`), so anybody's server can be held to
any other's that has the same tokens.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import RequestError

SHORTEST = 40  # characters of a piece that is cut no further
Ask = Callable[[Mapping[str, Any]], Any]


@dataclass(frozen=True)
class Scores:
    """Of all tokens of a text but the first of each piece: what they are, their log-probabilities, and what the
    configuration would have written in their places. characters: of the pieces."""

    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    best: tuple[str, ...]
    characters: int

    @property
    def perplexity(self) -> float:
        """By token, exp of the mean negative log-probability."""
        return math.exp(-math.fsum(self.logprobs) / len(self.logprobs))


def score(ask: Ask, model: str, texts: Sequence[str]) -> Scores:
    """Have a server score the texts. ask: posts a body to /v1/completions and gives the answer's JSON.

    Raises `RequestError` for a server that cannot, or whose answer has no scores.
    """
    tokens: list[str] = []
    values: list[float] = []
    best: list[str] = []
    characters = 0
    for text in texts:
        for piece, found in _pieces(ask, model, text):
            characters += len(piece)
            tokens += found[0]
            values += found[1]
            best += found[2]
    if not values:
        raise RequestError("the text is too short to be scored", status=400)
    return Scores(tuple(tokens), tuple(values), tuple(best), characters)


def _pieces(ask: Ask, model: str, text: str) -> Iterator[tuple[str, tuple[list[str], list[float], list[str]]]]:
    """The text, or where the context is too short for it its halves, with their scores."""
    try:
        yield text, _read(ask({"model": model, "prompt": text, "max_tokens": 1, "temperature": 0, "echo": True,
                               "logprobs": 1}))
    except RequestError as error:
        middle = text.find(" ", len(text) // 2)
        if error.status != 400 or "context" not in f"{error.code} {error.message}" or len(text) < 2 * SHORTEST \
                or middle < 0:
            raise
        yield from _pieces(ask, model, text[:middle])
        yield from _pieces(ask, model, text[middle:])


def _read(answer: Any) -> tuple[list[str], list[float], list[str]]:
    """Tokens, log-probabilities and best tokens of the prompt, its first token left out."""
    try:
        scores, prompt = answer["choices"][0]["logprobs"], answer["usage"]["prompt_tokens"]
        tokens, values, tops = scores["tokens"], scores["token_logprobs"], scores["top_logprobs"]
        kept = range(1, prompt)
        return ([str(tokens[i]) for i in kept], [float(values[i]) for i in kept],
                [str(max(tops[i], key=tops[i].__getitem__)) for i in kept])
    except (LookupError, TypeError, ValueError, AttributeError):
        raise RequestError("the server gives no log-probabilities of a prompt (echo with logprobs)",
                           status=502) from None


def beside(scores: Scores, reference: Scores) -> dict[str, float]:
    """Figures of a configuration beside the reference's. Where the tokens differ only the perplexity is told, by
    character."""
    same = scores.tokens == reference.tokens
    mine, theirs = (math.fsum(s.logprobs) / (len(s.logprobs) if same else s.characters) for s in (scores, reference))
    found = {"perplexity": scores.perplexity, "perplexity_delta": math.exp(theirs - mine) - 1}
    if same:
        count = len(scores.tokens)
        found["agreement"] = sum(a == b for a, b in zip(scores.best, reference.best, strict=True)) / count
        found["logprob_error"] = math.fsum(abs(a - b) for a, b in zip(scores.logprobs, reference.logprobs,
                                                                      strict=True)) / count
    return found
