"""Structural tags: free text in which a trigger begins a tag, whose contents then follow a JSON Schema to its end.

The form is that of vLLM and SGLang: {"structures": [{"begin": "<f=a>", "schema": {...}, "end": "</f>"}], "triggers":
["<f="]}.
"""
from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from .contract import GrammarError
from .schema import check

MAX_TAGS = 128
TEXT = r"/(.|\n)*/"


def tags_to_lark(source: str, names: Mapping[str, int], spaces: str) -> str:
    """The grammar in Lark's notation. names: control tokens by their spelling. spaces: between the parts of JSON.

    Raises `GrammarError` that names what is wrong.
    """
    structures, triggers = read_tags(source)
    lines = [f"start: ({' | '.join(f'tag_{i}' for i in range(len(structures)))})* tail", "tail: TEXT", f"TEXT: {TEXT}"]
    for i, (begin, schema, end) in enumerate(structures):
        trigger = next(t for t in triggers if begin.startswith(t))
        if trigger in names:
            head = f"TEXT <[{names[trigger]}]>"
        else:
            lines.append(f"trigger_{i}[lazy]: TEXT {json.dumps(trigger)}")
            head = f"trigger_{i}"
        body = json.dumps({**schema, "x-guidance": {"whitespace_pattern": spaces}}) if isinstance(
            schema, dict) else json.dumps(schema)
        lines.append(f"tag_{i}: {head} {words(begin[len(trigger):], names)} %json {body} {words(end, names)}")
    return "\n".join(lines)


def read_tags(source: str) -> tuple[list[tuple[str, Any, str]], list[str]]:
    """(begin, schema, end) of each structure, and the triggers."""
    given = json.loads(source)
    structures, triggers = given.get("structures"), given.get("triggers")
    if not isinstance(structures, list) or not 0 < len(structures) <= MAX_TAGS:
        raise GrammarError(f"structures must be a list of 1 to {MAX_TAGS} objects; the form with "
                           "`format` is not supported")
    if not isinstance(triggers, list) or not triggers or not all(isinstance(t, str) and t for t in triggers):
        raise GrammarError("triggers must be a list of texts that are not empty")
    found = []
    for i, each in enumerate(structures):
        place = f"structures[{i}]"
        if not isinstance(each, dict) or not isinstance(each.get("begin"), str) or not isinstance(
                each.get("end", ""), str):
            raise GrammarError(f"{place} needs begin and end, which are texts, and schema")
        if not any(each["begin"].startswith(trigger) for trigger in triggers):
            raise GrammarError(f"{place}.begin {each['begin'][:100]!r} begins with no trigger, so that it would never "
                               "be enforced")
        try:
            schema = check(json.dumps(each.get("schema", {})))
        except GrammarError as error:
            raise GrammarError(f"{place}.schema: {error.message}") from None
        found.append((each["begin"], schema, each.get("end", "")))
    return found, triggers


def words(text: str, names: Mapping[str, int]) -> str:
    """A literal text in Lark's notation, control tokens by their ids."""
    if not text:
        return ""
    known = sorted((name for name in names if name and name in text), key=len, reverse=True)
    parts = re.split("(" + "|".join(map(re.escape, known)) + ")", text) if known else [text]
    return " ".join(f"<[{names[part]}]>" if part in names else json.dumps(part) for part in parts if part)
