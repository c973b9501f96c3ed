"""What a tokenizer consists of, whatever file it came from: the library's parts, token texts and kinds, special ids."""
from __future__ import annotations

from dataclasses import dataclass

from tokenizers import AddedToken, normalizers, pre_tokenizers
from tokenizers.models import Model


@dataclass(frozen=True)
class Vocab:
    """A vocabulary ready to encode and decode.

    model, normalizer, pre_tokenizer: parts of the `tokenizers` library.
    texts:    the text of each id as the file spells it; None where the id is unused.
    added:    id -> token that is matched in raw text before the model runs: control tokens and user-defined text.
    special:  ids that are control tokens: never made from ordinary text, and left out of decoded text.
    spelling: how `texts` stand for bytes: "bytes" (GPT-2's map of bytes to characters) or "spm" (U+2581 is a space,
              <0xNN> a byte).
    strip_leading_space: the model puts a space before every text, so that a decoded text loses one at its start.
    """

    model: Model
    normalizer: normalizers.Normalizer | None
    pre_tokenizer: pre_tokenizers.PreTokenizer | None
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
