"""What a tokenizer consists of, whatever file it came from: the library's parts, token texts, special ids."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from tokenizers import AddedToken, normalizers, pre_tokenizers
from tokenizers.models import Model


class Parts(NamedTuple):
    """What of the `tokenizers` library encodes ordinary text."""

    model: Model
    normalizer: normalizers.Normalizer | None
    pre_tokenizer: pre_tokenizers.PreTokenizer | None


@dataclass(frozen=True)
class Vocab:
    """A vocabulary ready to decode, and how to build what encodes, which takes most of the time.

    parts:    builds the encoding parts; `CheckpointError` where the file's do not fit each other.
    texts:    the text of each id as the file spells it; None where the id is unused.
    added:    id -> token that is matched in raw text before the model runs: control tokens and user-defined text.
    special:  ids that are control tokens: never made from ordinary text, and left out of decoded text.
    spelling: how `texts` stand for bytes: "bytes" (GPT-2's map of bytes to characters) or "spm" (U+2581 is a space,
              <0xNN> a byte).
    tool_template: the chat template for conversations with tools, where the model has two.
    strip_leading_space: the model puts a space before every text, so that a decoded text loses one at its start.
    """

    parts: Callable[[], Parts]
    texts: list[str | None]
    added: dict[int, AddedToken]
    special: frozenset[int]
    spelling: str
    strip_leading_space: bool
    bos_id: int | None
    eos_ids: tuple[int, ...]
    add_bos: bool
    add_eos: bool
    chat_template: str | None
    special_texts: dict[str, str]
    tool_template: str | None = None
