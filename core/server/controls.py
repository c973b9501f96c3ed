"""`bad_words`, `allowed_token_ids` and `logits_processors` of a request, as the engine takes them."""
from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import RequestError, shown
from ..messages import ControlSpec, pack_ids
from ..suggest import suggest
from .limits import MAX_BAD_TOKENS, MAX_PROCESSOR_ARGUMENTS, MAX_PROCESSORS
from .protocol import SamplingFields


def control_of(fields: SamplingFields, bounds: Any) -> ControlSpec | None:
    """What a request forbids; None for nothing. Raises a 400 that names the field. bounds: a `Bounds`."""
    banned, phrases = _words(fields.bad_words or (), bounds)
    allowed = _allowed(fields.allowed_token_ids, bounds)
    processors = _processors(fields.logits_processors or (), bounds.processors)
    if not (banned or phrases or allowed or processors):
        return None
    return ControlSpec(allowed, pack_ids(sorted(banned)), tuple(phrases), processors)


def _words(words: Sequence[str], bounds: Any) -> tuple[set[int], list[bytes]]:
    """Tokens, and sequences of several, that spell these words in the middle of a text and behind a space."""
    banned: set[int] = set()
    phrases: dict[bytes, None] = {}
    for place, word in enumerate(words):
        if bounds.spell is None:
            raise _fault("bad_words", "needs a tokenizer, which there is none of here")
        for text in dict.fromkeys((word, " " + word.lstrip())):
            ids = bounds.spell(text)
            if not 0 < len(ids) <= MAX_BAD_TOKENS:
                raise _fault(f"bad_words[{place}]", f"has {len(ids)} tokens; 1 to {MAX_BAD_TOKENS} are allowed")
            if len(ids) == 1:
                banned.add(int(ids[0]))
            else:
                phrases[pack_ids(ids)] = None
    return banned, list(phrases)


def _allowed(ids: list[int] | None, bounds: Any) -> bytes:
    if ids is None:
        return b""
    if not ids:
        raise _fault("allowed_token_ids", "is empty: at least one token must be allowed")
    for id in (min(ids), max(ids)):
        if not 0 <= id < bounds.vocab_size:
            raise _fault("allowed_token_ids", f"holds token id {shown(id)}; this model has the ids 0 to "
                                              f"{bounds.vocab_size - 1}")
    return pack_ids(np.unique(ids))


def _processors(asked: Sequence[Any], names: Sequence[str]) -> tuple[tuple[str, str], ...]:
    found: dict[str, str] = {}
    for place, entry in enumerate(asked):
        field = f"logits_processors[{place}]"
        entry = {"name": entry} if isinstance(entry, str) else entry
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str) or set(entry) - {"name", "args"}:
            raise _fault(field, f"must be a name, or an object with name and args; got {shown(entry)}")
        name, arguments = entry["name"], entry.get("args") or {}
        if name not in names:
            there = f"there are: {', '.join(names)}" if names else "this server has none"
            raise _fault(field, f"is {shown(name)}; {there}{suggest(name, names)} (--logits-processors; code from "
                                "clients is never run)")
        if name in found:
            raise _fault(field, f"asks for {name} a second time")
        text = json.dumps(arguments) if isinstance(arguments, dict) else ""
        if not text or len(text) > MAX_PROCESSOR_ARGUMENTS:
            raise _fault(f"{field}.args", f"must be an object of at most {MAX_PROCESSOR_ARGUMENTS} characters")
        found[name] = text
    if len(found) > MAX_PROCESSORS:
        raise _fault("logits_processors", f"has {len(found)} entries, at most {MAX_PROCESSORS} are allowed")
    return tuple(found.items())


def _fault(param: str, message: str) -> RequestError:
    return RequestError(f"{param} {message}", param=param, code="invalid_value")
