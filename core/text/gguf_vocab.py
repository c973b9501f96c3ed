"""A tokenizer rebuilt from the metadata of a GGUF file.

Source: the GGUF document of the ggml project (keys `tokenizer.*`, token types 1 normal, 2 unknown, 3 control,
4 user-defined, 5 unused, 6 byte). Metadata values are plain Python values as `core.weights` reads them.
"""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers
from tokenizers.models import BPE

from ..errors import CheckpointError, shown
from .library import library_call
from .pretokenizers import named_split
from .vocab import Parts, Vocab

MAX_TOKEN = 1 << 10     # characters in a token of a scored vocabulary; Gemma's longest has 31

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

# End-of-turn tokens of known chat formats, for files that do not name theirs in tokenizer.ggml.eot_token_id.
_END_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<turn|>", "<|eom_id|>", "<|end_of_turn|>")
_SPACE = "\u2581"


def gguf_vocab(metadata: dict[str, Any]) -> Vocab:
    """The vocabulary of a GGUF file; `CheckpointError` names what is missing, malformed or unknown."""
    kind = _word(metadata, "tokenizer.ggml.model")
    if kind not in _KINDS:
        raise CheckpointError(f"unknown tokenizer {shown(kind)} (tokenizer.ggml.model); known: {', '.join(_KINDS)}")
    tokens = _column(metadata, "tokens", str)
    types = np.array(_column(metadata, "token_type", int, len(tokens)) or [NORMAL] * len(tokens))
    special = set(np.flatnonzero((types == CONTROL) | (types == UNKNOWN)).tolist())
    bos = _token_id(metadata, "bos", len(tokens))
    eos = _end_ids(metadata, tokens, special)
    # Files exist that call an end token user-defined; as such, any user could end a turn by writing it.
    special |= {*eos, *([] if bos is None else [bos])}
    matched = special | set(np.flatnonzero(types == USER_DEFINED).tolist())
    build, spelling, add_bos, space = _KINDS[kind]
    if kind == "gpt2":
        add_bos = named_split(_word(metadata, "tokenizer.ggml.pre")).add_bos
    return Vocab(
        parts=partial(_parts, build, metadata, tokens, types), texts=list(tokens), spelling=spelling,
        special=frozenset(special), bos_id=bos, eos_ids=eos,
        added={i: AddedToken(tokens[i], special=i in special, normalized=False) for i in sorted(matched) if tokens[i]},
        strip_leading_space=space and _flag(metadata, "add_space_prefix", True),
        add_bos=_flag(metadata, "add_bos_token", add_bos), add_eos=_flag(metadata, "add_eos_token", False),
        chat_template=_word(metadata, "tokenizer.chat_template") or None,
        tool_template=_word(metadata, "tokenizer.chat_template.tool_use") or None,
        special_texts={name: tokens[i] for name, i in _named_ids(metadata, len(tokens)).items()})


def _parts(build: Callable[..., Parts], *vocabulary: Any) -> Parts:
    with library_call(CheckpointError, "the tokenizer in the GGUF file is malformed"):
        return build(*vocabulary)


def _column(metadata: dict[str, Any], name: str, kind: type, length: int | None = None) -> list:
    """An array of the vocabulary; `length` None means that it must be there, else how long it must be if it is."""
    values = metadata.get(f"tokenizer.ggml.{name}")
    if values is None and length is not None:
        return []
    if not isinstance(values, list) or set(map(type, values)) != {kind}:
        raise CheckpointError(f"tokenizer.ggml.{name} must be a non-empty array of {kind.__name__}")
    if length is not None and len(values) != length:
        raise CheckpointError(f"tokenizer.ggml.{name} has {len(values)} entries for {length} tokens")
    return values


def _token_id(metadata: dict[str, Any], name: str, size: int) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if value is None:
        return None
    if type(value) is not int or not 0 <= value < size:
        raise CheckpointError(f"tokenizer.ggml.{name}_token_id is {shown(value)}, but there are {size} tokens")
    return value


def _named_ids(metadata: dict[str, Any], size: int) -> dict[str, int]:
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: _token_id(metadata, key, size) for name, key in names.items()}
    return {name: value for name, value in ids.items() if value is not None}


def _end_ids(metadata: dict[str, Any], tokens: list[str], special: set[int]) -> tuple[int, ...]:
    """Ids that end an output: eos, end of turn and end of message, as the file or else their text says."""
    named = [_token_id(metadata, name, len(tokens)) for name in ("eos", "eot", "eom")]
    by_text = [] if named[1] is not None else [i for i in sorted(special) if tokens[i] in _END_OF_TURN]
    return tuple(dict.fromkeys(i for i in [*named, *by_text] if i is not None))


def _flag(metadata: dict[str, Any], name: str, default: bool) -> bool:
    value = metadata.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(value, bool | int):
        raise CheckpointError(f"tokenizer.ggml.{name} must be true or false, not {shown(value)}")
    return bool(value)


def _word(metadata: dict[str, Any], key: str) -> str | None:
    value = metadata.get(key)
    if value is not None and not isinstance(value, str):
        raise CheckpointError(f"{key} must be a string, not {shown(value)}")
    return value


def _ids(tokens: list[str]) -> dict[str, int]:
    """Token text to id; the first of equals wins."""
    return dict(zip(reversed(tokens), range(len(tokens) - 1, -1, -1), strict=True))


def _merges(metadata: dict[str, Any]) -> list[tuple[str, str]]:
    """Pairs in order of rank. A merge is two tokens with a space between, of which the first may begin with one."""
    pairs = []
    for merge in _column(metadata, "merges", str):
        cut = merge.find(" ", 1)
        if cut < 0:
            raise CheckpointError(f"tokenizer.ggml.merges has {merge[:80]!r}, which is not two tokens")
        pairs.append((merge[:cut], merge[cut + 1:]))
    return pairs


def _gpt2(metadata: dict[str, Any], tokens: list[str], types: np.ndarray) -> Parts:
    """Byte-level BPE."""
    split = named_split(_word(metadata, "tokenizer.ggml.pre"))
    model = BPE(vocab=_ids(tokens), merges=_merges(metadata), ignore_merges=split.ignore_merges)
    return Parts(model, None, split.build())


def _spm(metadata: dict[str, Any], tokens: list[str], types: np.ndarray) -> Parts:
    """SentencePiece's BPE: of all neighbours that together are a token, the pair with the best score joins first."""
    scores = _column(metadata, "scores", float, len(tokens))
    if not scores:
        raise CheckpointError("tokenizer.ggml.scores is missing: this kind of tokenizer joins tokens by score")
    prefix = [normalizers.Prepend(_SPACE)] if _flag(metadata, "add_space_prefix", True) else []
    return Parts(_fallback_bpe(metadata, tokens, _scored_merges(tokens, types, scores)),
                 normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)]), None)


def _gemma4(metadata: dict[str, Any], tokens: list[str], types: np.ndarray) -> Parts:
    """BPE over whole lines with U+2581 for spaces, by explicit merges."""
    return Parts(_fallback_bpe(metadata, tokens, _merges(metadata)), normalizers.Replace(" ", _SPACE),
                 pre_tokenizers.Split(Regex(r"\n+"), "isolated"))


def _fallback_bpe(metadata: dict[str, Any], tokens: list[str], merges: list[tuple[str, str]]) -> BPE:
    """BPE that spells a character outside the vocabulary by its bytes, or by the unknown token where those lack too."""
    unknown = _token_id(metadata, "unknown", len(tokens))
    return BPE(vocab=_ids(tokens), merges=merges, byte_fallback=True, fuse_unk=True,
               unk_token=None if unknown is None else tokens[unknown])


def _scored_merges(tokens: list[str], types: np.ndarray, scores: list[float]) -> list[tuple[str, str]]:
    """Every split of a normal token into two normal tokens, by falling score of the whole."""
    normal = np.flatnonzero(types == NORMAL)
    normal = normal[np.argsort(-np.asarray(scores)[normal], kind="stable")]
    ordered = [tokens[i] for i in normal.tolist()]
    if (longest := max(map(len, ordered), default=0)) > MAX_TOKEN:
        raise CheckpointError(f"tokenizer.ggml.tokens has one of {longest} characters, the limit is {MAX_TOKEN}")
    known, merges = set(ordered), []
    for token in ordered:
        for cut in range(1, len(token)):
            if (right := token[cut:]) in known and (left := token[:cut]) in known:
                merges.append((left, right))
    return merges


# Builder, spelling of tokens, and, when the file does not say: bos before a text, a space before a text.
_KINDS: dict[str, tuple[Callable[..., Parts], str, bool, bool]] = {
    "gpt2": (_gpt2, "bytes", False, False), "llama": (_spm, "spm", True, True), "gemma4": (_gemma4, "spm", True, False)}
