"""Text to token ids and back, for tokenizers rebuilt from GGUF metadata or read from a Hugging Face folder.

Two encoders share one model. `parse_special=True` reads the text of control tokens as those tokens; it is for text that
the operator or a chat template wrote. `parse_special=False` reads it as ordinary characters; it is for text that a
client wrote. `Tokenizer.guard` joins the two: guarded text stays ordinary in a prompt encoded with parse_special.
"""
from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import AddedToken, normalizers
from tokenizers import Tokenizer as Library

from ..errors import CheckpointError, RequestError
from .folder_vocab import folder_vocab
from .gguf_vocab import gguf_vocab
from .library import library_call
from .vocab import Parts, Vocab

if TYPE_CHECKING:
    from ..weights.checkpoint import Checkpoint

# Two noncharacters, which no text for interchange holds (Unicode 23.7); removed after control tokens have been matched.
GUARD = "\ufdd0\ufdd1"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def load_tokenizer(checkpoint: Checkpoint, encodes: bool = True) -> Tokenizer:
    """The tokenizer of an open checkpoint; `CheckpointError` says what is missing or unknown.

    encodes: False for a process that only decodes: what encodes is then built at its first use, which takes about a
    second for the largest vocabularies.
    """
    vocab = gguf_vocab(checkpoint.metadata) if checkpoint.kind == "gguf" else folder_vocab(checkpoint.path)
    tokenizer = Tokenizer(vocab)
    if encodes:
        tokenizer.prepare()
    return tokenizer


def byte_characters() -> dict[int, int]:
    """GPT-2's map from the code point of a token's character to the byte it stands for (Radford et al. 2019)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {byte: byte for byte in plain} | {0x100 + i: byte for i, byte in enumerate(rest)}


class Tokenizer:
    """Encodes and decodes. Ids are int32 numpy arrays going out, any sequence of integers coming in.

    bos_id, eos_ids, special_ids, add_bos, add_eos, chat_template, tool_template, special_texts: see `Vocab`.
    """

    def __init__(self, vocab: Vocab):
        self.vocab = vocab
        self.vocab_size = len(vocab.texts)
        self.bos_id, self.eos_ids, self.special_ids = vocab.bos_id, vocab.eos_ids, vocab.special
        self.add_bos = vocab.add_bos and vocab.bos_id is not None
        self.add_eos = vocab.add_eos and bool(vocab.eos_ids)
        self.chat_template, self.special_texts = vocab.chat_template, vocab.special_texts
        self.tool_template = vocab.tool_template
        self.strip_leading_space = vocab.strip_leading_space

    def prepare(self) -> None:
        """Build now what encodes; else the first `encode` does. `CheckpointError` where the file is malformed."""
        try:
            self.encode_batch([""])
        except RequestError as error:
            raise CheckpointError(f"the tokenizer is malformed: {error}") from error

    def encode(self, text: str, add_special: bool = False, parse_special: bool = False) -> np.ndarray:
        """Token ids, int32 [n]. add_special: with bos and eos where the model wants them. See the module for the rest.

        `RequestError` for text that is not Unicode (a lone surrogate), or that the model's own rules cannot split.
        """
        return self.encode_batch([text], add_special, parse_special)[0]

    def encode_batch(self, texts: Sequence[str], add_special: bool = False, parse_special: bool = False,
                     ) -> list[np.ndarray]:
        """`encode` of several texts, on all cores."""
        for text in texts:
            check_text(text)
        rows = self._encoders[parse_special].encode(texts)
        if add_special:
            before = [self.bos_id] if self.add_bos else []
            after = [self.eos_ids[0]] if self.add_eos else []
            rows = [np.concatenate([before, row, after]).astype(np.int32) for row in rows]
        return rows

    def guard(self, text: str) -> str:
        """The text with every control token's spelling broken by `GUARD`; the same object where there is none."""
        if GUARD in text:
            raise RequestError("the text holds the noncharacters U+FDD0 U+FDD1, which are reserved here: remove them")
        if self._control_start is None:
            return text
        cuts = [m.start() + 1 for m in self._control_start.finditer(text) if self._control_at(text, m.start())]
        if not cuts:
            return text
        return GUARD.join(text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True))

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of a whole sequence; bytes that are not UTF-8 become U+FFFD."""
        text = self.join_bytes(ids, skip_special).decode("utf-8", errors="replace")
        return text[1:] if self.strip_leading_space and text.startswith(" ") else text

    def join_bytes(self, ids: Iterable[int], skip_special: bool = False) -> bytes:
        """The exact bytes behind ids. An id without a token (a padded vocabulary) has none."""
        table = self._visible if skip_special else self._pieces
        ids = ids.tolist() if isinstance(ids, np.ndarray) else ids
        return b"".join([table[i] if 0 <= i < self.vocab_size else b"" for i in ids])

    def token_bytes(self, id: int) -> bytes:
        """The exact bytes of a token; a control token's are its spelling. `RequestError` for an id out of range."""
        self._check(id)
        return self._pieces[id]

    def id_to_token(self, id: int) -> str | None:
        """The token as the vocabulary spells it; None for an unused id. `RequestError` for an id out of range."""
        self._check(id)
        return self.vocab.texts[id]

    def token_texts(self, ids: Iterable[int]) -> list[str]:
        """Each token by itself as text, as log-probabilities show it; a part of a character becomes U+FFFD."""
        return [self.join_bytes([i]).decode("utf-8", errors="replace") for i in ids]

    @cached_property
    def max_token_bytes(self) -> int:
        """Bytes of the longest token: a text of more than n times as many bytes cannot fit into n tokens."""
        return max(map(len, self._pieces))

    def _check(self, id: int) -> None:
        if not 0 <= id < self.vocab_size:
            raise RequestError(f"token id {id} is out of range: the vocabulary has {self.vocab_size} tokens")

    @cached_property
    def _encoders(self) -> tuple[_Encoder, _Encoder]:
        """For parse_special False and True."""
        with library_call(CheckpointError, "the tokenizer is malformed"):
            return self._make_encoders()

    def _make_encoders(self) -> tuple[_Encoder, _Encoder]:
        vocab, parts = self.vocab, self.vocab.parts()
        guard = normalizers.Replace(GUARD, "")
        guarded = normalizers.Sequence([guard, parts.normalizer]) if parts.normalizer else guard
        ordinary = {i: token for i, token in vocab.added.items() if i not in vocab.special}
        # A control token of one character cannot be broken by a guard inside it, so its text is never read as it.
        parsed = {i: token for i, token in vocab.added.items() if i not in vocab.special or len(token.content) > 1}
        return (_Encoder(parts, ordinary, self.vocab_size),
                _Encoder(parts._replace(normalizer=guarded), parsed, self.vocab_size))

    @cached_property
    def _pieces(self) -> list[bytes]:
        return _token_pieces(self.vocab)

    @cached_property
    def _visible(self) -> list[bytes]:
        return [b"" if i in self.special_ids else piece for i, piece in enumerate(self._pieces)]

    @cached_property
    def _controls(self) -> dict[str, tuple[set[str], list[int]]]:
        """First two characters of a control token -> (the tokens that begin so, their lengths)."""
        groups: dict[str, tuple[set[str], list[int]]] = {}
        for i in self.special_ids:
            if i in self.vocab.added and len(text := self.vocab.added[i].content) > 1:
                groups.setdefault(text[:2], (set(), []))[0].add(text)
        return {start: (texts, sorted({len(text) for text in texts})) for start, (texts, _) in groups.items()}

    @cached_property
    def _control_start(self) -> re.Pattern[str] | None:
        # A lookahead, so that places which overlap are all found.
        return re.compile(f"(?={'|'.join(map(re.escape, self._controls))})") if self._controls else None

    def _control_at(self, text: str, place: int) -> bool:
        texts, lengths = self._controls[text[place:place + 2]]
        return any(text[place:place + length] in texts for length in lengths)


class _Encoder:
    """One `tokenizers.Tokenizer` over a shared model, and the renumbering that its added tokens may need."""

    def __init__(self, parts: Parts, added: dict[int, AddedToken], size: int):
        self.library = Library(parts.model)
        if parts.normalizer is not None:
            self.library.normalizer = parts.normalizer
        if parts.pre_tokenizer is not None:
            self.library.pre_tokenizer = parts.pre_tokenizer
        self.library.add_tokens(list(added.values()))
        # The library numbers tokens that its model lacks by itself, in the order they come.
        moved = {own: i for i, token in added.items() if (own := self.library.token_to_id(token.content)) != i}
        self.renumber = None
        if moved:
            self.renumber = np.arange(max(size, self.library.get_vocab_size()), dtype=np.int32)
            self.renumber[list(moved)] = list(moved.values())

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        with library_call(RequestError, "the model's tokenizer cannot read this text"):
            encoded = self.library.encode_batch_fast(list(texts), add_special_tokens=False)
        rows = [np.array(row.ids, dtype=np.int32) for row in encoded]
        return rows if self.renumber is None else [self.renumber[row] for row in rows]


def check_text(text: str) -> None:
    """`RequestError` for text with a lone surrogate, which no tokenizer can read and no client meant to send."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            where = f"U+{ord(text[error.start]):04X} at character {error.start}"
            raise RequestError(f"the text has a lone surrogate, {where}: it was cut inside a character") from None


def _token_pieces(vocab: Vocab) -> list[bytes]:
    """The bytes of each token."""
    if vocab.spelling == "bytes":
        spelled = _byte_level(vocab)
    elif vocab.spelling == "spm":
        spelled = [(text or "").replace("\u2581", " ").encode() for text in vocab.texts]
        for i, text in enumerate(vocab.texts):
            if text and len(text) == 6 and (match := _BYTE_TOKEN.fullmatch(text)):
                spelled[i] = bytes([int(match[1], 16)])
    else:
        raise CheckpointError(f"unknown spelling {vocab.spelling!r} of tokens")
    for i, token in vocab.added.items():
        spelled[i] = token.content.encode()
    return spelled


def _byte_level(vocab: Vocab) -> list[bytes]:
    """One character a byte; a text with any other character stands for itself."""
    table = byte_characters()
    out = [text.translate(table) if text else "" for text in vocab.texts]
    known = set(table)
    return [mapped.encode("latin-1") if text and known.issuperset(map(ord, text)) else (text or "").encode()
            for text, mapped in zip(vocab.texts, out, strict=True)]
