"""Log-probabilities in the two shapes of OpenAI's API, and in SGLang's.

Text belongs to the token that completes it: the pieces of a character that is spread over several tokens are "" but for
the last, so that the pieces of all tokens always join to the text.
"""
from __future__ import annotations

import codecs
from collections.abc import Iterator

import numpy as np

from ..messages import Logprobs, unpack_ids
from .text_service import TextService
from .wire import LegacyLogprobs, TokenLogprob, TopLogprob

FLOOR = -1e9  # JSON has no -inf


def read(data: bytes) -> list[float]:
    """Packed float32 as numbers that JSON can carry."""
    return np.maximum(np.frombuffer(data, "<f4"), FLOOR).tolist()


def rows(logprobs: Logprobs) -> Iterator[tuple[float, list[int], list[float]]]:
    """Per token: its log-probability, and ids and log-probabilities of the best ones."""
    chosen, k = read(logprobs.chosen), logprobs.k
    ids, top = unpack_ids(logprobs.top_ids).tolist(), read(logprobs.top)
    for i, value in enumerate(chosen):
        yield value, ids[i * k:(i + 1) * k], top[i * k:(i + 1) * k]


def standalone(data: bytes) -> str:
    """A token on its own: its text, or OpenAI's "bytes:\\xf0\\x9f" when it holds a part of a character."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(text: TextService, tokens: bytes, logprobs: Logprobs) -> list[TokenLogprob]:
    """The chat shape for consecutive tokens; parts of characters show as U+FFFD in `token`, `bytes` has the truth."""
    content = []
    for id, (value, ids, top) in zip(unpack_ids(tokens).tolist(), rows(logprobs), strict=False):
        data = text.token_bytes(id)
        best = [(text.token_bytes(other), other_value) for other, other_value in zip(ids, top, strict=True)]
        content.append(TokenLogprob(data.decode("utf-8", "replace"), value, list(data), [
            TopLogprob(b.decode("utf-8", "replace"), v, list(b)) for b, v in best]))
    return content


class LegacyShape:
    """Builds the completions shape of one answer, piece by piece; offsets count characters of the answer's text."""

    def __init__(self, text: TextService, skip_special: bool):
        self.text, self.hidden = text, text.tokenizer.special_ids if skip_special else frozenset()
        self.offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, ids: list[int], logprobs: Logprobs, last: bool = False) -> LegacyLogprobs:
        """The next tokens. One more id than log-probabilities = the first of a prompt, which has none. `last`: no
        more will come and nobody cut it, so what is left of a character shows as U+FFFD, as it does in the text."""
        shape = LegacyLogprobs([], [], [], [])
        values: Iterator[tuple[float | None, list[int], list[float]]] = rows(logprobs)
        for i, id in enumerate(ids):
            unscored = i == 0 and len(ids) * 4 > len(logprobs.chosen)
            value, best, top = (None, [], []) if unscored else next(values)
            piece = self._piece(id, last and i == len(ids) - 1)
            shape.tokens.append(piece)
            shape.token_logprobs.append(value)
            shape.top_logprobs.append(None if value is None else self._top(id, piece, value, best, top))
            shape.text_offset.append(self.offset)
            self.offset += 0 if id in self.hidden else len(piece)
        return shape

    def _piece(self, id: int, last: bool) -> str:
        data = self.text.token_bytes(id)
        return data.decode("utf-8", "replace") if id in self.hidden else self._decoder.decode(data, last)

    def _top(self, id: int, piece: str, value: float, best: list[int], top: list[float]) -> dict[str, float]:
        """The best tokens by text; the chosen one always is there, under the text it has in `tokens`."""
        named = {piece: value}
        for other, other_value in zip(best, top, strict=True):
            if other != id:
                name = standalone(self.text.token_bytes(other))
                named[f"token_id:{other}" if name in named else name] = other_value
        return dict(sorted(named.items(), key=lambda item: -item[1]))


def native_logprobs(text: TextService, ids: list[int], logprobs: Logprobs) -> list[tuple[float | None, int, str]]:
    """SGLang's `output_token_logprobs`: (log-probability, id, text) per token; the first of a prompt has none."""
    values = read(logprobs.chosen)
    values = [None] * (len(ids) - len(values)) + values
    return [(value, id, standalone(text.token_bytes(id))) for value, id in zip(values, ids, strict=True)]


def native_top(text: TextService, logprobs: Logprobs) -> list[list[tuple[float, int, str]]]:
    """SGLang's `output_top_logprobs`: the best tokens per position."""
    return [[(v, id, standalone(text.token_bytes(id))) for id, v in zip(ids, top, strict=True)]
            for _, ids, top in rows(logprobs)]
