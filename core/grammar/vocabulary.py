"""The tokens of a model as grammars see them: their bytes, and which of them end an output."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

MARK = "\x02"  # a character that no merge joins to what follows it
PROBES = ("a", " name", '{"name": 1}', "\n  \"x\"", "\u00e9t\u00e9 \u65e5\u672c")


class Vocabulary:
    """tokens: the bytes of each id, b"" for one that text never has.  special: ids of control tokens.
    eos: ids that end an output.  size: ids that the model has, which may be more than there are tokens.
    """

    def __init__(self, tokenizer: Any, size: int, eos: Sequence[int]):
        self._tokenizer = tokenizer
        known = min(size, tokenizer.vocab_size)
        self.size, self.eos = size, tuple(i for i in eos if i < known)
        self.tokens = [tokenizer.token_bytes(i) for i in range(known)]
        self.special = frozenset(i for i in tokenizer.special_ids if i < known)
        self.names = {self.tokens[i].decode("utf-8", "replace"): i for i in self.special}
        # Whether `encode` gives back the very bytes: else nobody can say how the model would spell a text.
        self.spells = all(self._bytes(self.encode(text)) == text.encode() for text in PROBES)

    def encode(self, text: str) -> list[int]:
        """Ids that spell `text` in the middle of an output."""
        ids = self._tokenizer.encode(text).tolist()
        data = text.encode()
        if self._bytes(ids) == data:
            return ids
        # Some tokenizers put a space before every text: read it behind a mark, and take the mark off.
        ids, skip = self._tokenizer.encode(MARK + text).tolist(), 0
        while skip < len(ids) and len(self._bytes(ids[skip:])) > len(data):
            skip += 1
        return ids[skip:]

    def _bytes(self, ids: Sequence[int]) -> bytes:
        return b"".join([self.tokens[i] for i in ids if i < len(self.tokens)])
