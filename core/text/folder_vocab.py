"""A tokenizer from a Hugging Face model folder: tokenizer.json and the small JSON files beside it."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Library

from ..errors import CheckpointError
from ..files import read_text
from ..weights.files import read_json
from .library import library_call
from .vocab import Parts, Vocab

MAX_JSON = 1 << 28      # bytes in tokenizer.json; Gemma's, among the largest, has 33 million
MAX_UNUSED = 1 << 20    # ids below the highest that no token has
MAX_TEMPLATE = 1 << 20  # characters in chat_template.jinja, as many as a template may have
_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


def folder_vocab(folder: Path) -> Vocab:
    """The vocabulary of a model folder; `CheckpointError` names the file that is missing, malformed or unknown."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(f"{folder}: no tokenizer.json. Save its fast tokenizer there, or use a GGUF file")
    if path.stat().st_size > MAX_JSON:
        raise CheckpointError(f"{path}: {path.stat().st_size} bytes, more than the limit of {MAX_JSON}")
    with library_call(CheckpointError, str(path)):
        library = Library.from_file(str(path))
        library.no_padding()  # how the file pads and cuts is for training, and both may be of any length
        library.no_truncation()
        return _vocab_of(folder, library)


def _vocab_of(folder: Path, library: Library) -> Vocab:
    path, settings = folder / "tokenizer.json", _settings(folder)
    added = library.get_added_tokens_decoder()
    texts = _texts(path, library)
    names = {name: text for name in _NAMES if (text := _token_text(settings.get(name))) is not None}
    bos = library.token_to_id(names["bos_token"]) if "bos_token" in names else None
    eos = _end_ids(folder, library, names)
    special = {i for i, token in added.items() if token.special} | {*eos, *([] if bos is None else [bos])}
    spelling, strip = _decoding(path, library)
    return Vocab(
        parts=lambda: Parts(library.model, library.normalizer, library.pre_tokenizer), texts=texts,
        added={i: _added(token, i in special) for i, token in sorted(added.items())}, special=frozenset(special),
        spelling=spelling, strip_leading_space=strip, bos_id=bos, eos_ids=eos,
        add_bos=_adds(settings, "add_bos_token", library, bos, 0),
        add_eos=_adds(settings, "add_eos_token", library, eos[0] if eos else None, -1),
        chat_template=_template(folder, settings), special_texts=names,
        tool_template=_named_template(settings, "tool_use"))


def _json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _settings(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json over special_tokens_map.json."""
    return _json(folder / "special_tokens_map.json") | _json(folder / "tokenizer_config.json")


def _token_text(value: Any) -> str | None:
    """A token's text, which these files give as a string or as an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _texts(path: Path, library: Library) -> list[str | None]:
    vocab = library.get_vocab(with_added_tokens=True)
    highest = max(vocab.values(), default=-1)
    if highest > len(vocab) + MAX_UNUSED:
        raise CheckpointError(f"{path}: a token has the id {highest}, but there are only {len(vocab)} tokens")
    texts: list[str | None] = [None] * (highest + 1)
    for text, i in vocab.items():
        texts[i] = text
    return texts


def _added(token: AddedToken, special: bool) -> AddedToken:
    """Control tokens are matched in raw text only, so that a normalizer can never make one."""
    return AddedToken(token.content, single_word=token.single_word, lstrip=token.lstrip, rstrip=token.rstrip,
                      normalized=token.normalized and not special, special=special)


def _end_ids(folder: Path, library: Library, names: dict[str, str]) -> tuple[int, ...]:
    """The tokenizer's eos, then those of generation_config.json and config.json."""
    ids = [library.token_to_id(names["eos_token"])] if "eos_token" in names else []
    for file in ("generation_config.json", "config.json"):
        value = _json(folder / file).get("eos_token_id")
        ids += value if isinstance(value, list) else [value]
    known = (i for i in ids if isinstance(i, int) and 0 <= i < 2**31 and library.id_to_token(i) is not None)
    return tuple(dict.fromkeys(known))


def _adds(settings: dict[str, Any], name: str, library: Library, token: int | None, place: int) -> bool:
    """Whether an encoded text begins with bos, or ends with eos: as configured, else as the post-processor does it."""
    if isinstance(settings.get(name), bool):
        return settings[name]
    ids = library.encode("").ids
    return bool(ids) and token is not None and ids[place] == token


def _decoding(path: Path, library: Library) -> tuple[str, bool]:
    """(spelling, strip_leading_space) of `Vocab`, from the library's decoder."""
    state = json.loads(library.decoder.__getstate__()) if library.decoder is not None else {}
    steps = {step["type"]: step for step in state.get("decoders", [state] if state else [])}
    if "ByteLevel" in steps:
        return "bytes", False
    if "Metaspace" in steps:
        return "spm", steps["Metaspace"].get("prepend_scheme") != "never"
    if "Replace" in steps or "ByteFallback" in steps:
        return "spm", "Strip" in steps
    told = f"the decoder {', '.join(steps)} is of no known kind" if steps else "there is no decoder"
    raise CheckpointError(f"{path}: {told}; known: ByteLevel, Metaspace, ByteFallback")


def _template(folder: Path, settings: dict[str, Any]) -> str | None:
    """chat_template.jinja, else `chat_template` of tokenizer_config.json; of several named ones, "default"."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return read_text(path, MAX_TEMPLATE) or None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: {error}") from error
    return _named_template(settings, "default")


def _named_template(settings: dict[str, Any], name: str) -> str | None:
    """One of several templates; a model's only one is "default"."""
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}.get(name)
    elif name != "default":
        return None
    return template if isinstance(template, str) and template else None
