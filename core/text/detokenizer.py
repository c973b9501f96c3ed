"""Token ids to text, a few at a time, without ever showing half a character."""
from __future__ import annotations

import codecs
from collections.abc import Iterable

from .tokenizer import Tokenizer


class Utf8Stream:
    """Bytes in, complete characters out: the pieces joined are the UTF-8 decoding of all bytes, errors replaced.

    A character comes with its last byte; bytes that can no longer become one turn into U+FFFD at once (RFC 3629).
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, data: bytes) -> str:
        return self._decoder.decode(data)

    def flush(self) -> str:
        """What an unfinished character at the end leaves: U+FFFD, or nothing."""
        return self._decoder.decode(b"", final=True)


class Detokenizer:
    """The text of one growing sequence of tokens.

    skip_special: control tokens leave no text, but those of `shown`.
    at_start: the tokens begin a text, so that the space which some tokenizers put before every text is taken off.
    Tokens that continue a prompt keep it: there it is the space between two words.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True, at_start: bool = False,
                 shown: frozenset[int] = frozenset()):
        self._tokenizer, self._skip_special, self._shown = tokenizer, skip_special, shown
        self._strip = at_start and tokenizer.strip_leading_space
        self._stream = Utf8Stream()

    def push(self, ids: Iterable[int]) -> str:
        """The characters that these tokens complete."""
        skips = self._skip_special
        if self._shown:
            ids = [int(id) for id in ids]
            if not self._shown.isdisjoint(ids):
                hidden = self._tokenizer.special_ids if skips else ()
                ids, skips = [id for id in ids if id in self._shown or id not in hidden], False
        return self._clean(self._stream.push(self._tokenizer.join_bytes(ids, skips)))

    def flush(self) -> str:
        """What is left at the end of the sequence."""
        return self._clean(self._stream.flush())

    def _clean(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text
