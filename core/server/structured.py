"""Structured output: what OpenAI's `response_format`, vLLM's `structured_outputs` and `guided_*`, SGLang's and
llama.cpp's fields ask for, as one grammar."""
from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from ..errors import RequestError, shown
from ..messages import GrammarSpec
from .limits import check_structure
from .protocol import SamplingFields

MAX_CHOICES = 1024
MAX_GRAMMAR = 65536  # characters of a grammar or a regular expression


def grammar_of(fields: SamplingFields) -> GrammarSpec | None:
    """The one grammar that a request asks for; None for free text. Raises a 400 that names the field at fault."""
    found = list(_asked(fields))
    if len(found) > 1:
        raise _fault(found[1].field, f"and {found[0].field} both ask for a structure; send one of them")
    return found[0] if found else None


def _asked(fields: SamplingFields) -> Iterator[GrammarSpec]:
    if fields.response_format is not None:
        yield from _response_format(fields.response_format)
    for name, value in (fields.structured_outputs or {}).items():
        if name not in READERS and name != "json_object":
            if value in (None, False):
                continue
            raise _fault(f"structured_outputs.{name[:100]}", f"is not supported; there are: {', '.join(READERS)}")
        if value is not None and value is not False:
            yield _read("json_object" if name == "json_object" else name, f"structured_outputs.{name}", value)
    for field, name in FIELDS.items():
        value = getattr(fields, field)
        if value is not None:
            yield _read(name, field, value)


def _response_format(form: dict[str, Any]) -> Iterator[GrammarSpec]:
    kind = form.get("type")
    if kind == "text":
        return
    if kind == "json_object":
        # With a schema it is what others write for json_schema.
        schema = form.get("schema")
        yield (GrammarSpec("json_object", "", "response_format") if schema is None
               else _read("json", "response_format.schema", schema))
    elif kind == "json_schema":
        outer = form.get("json_schema")
        if not isinstance(outer, dict) or outer.get("schema") is None:
            raise _fault("response_format.json_schema", "must be an object with a name and a schema")
        yield _read("json", "response_format.json_schema.schema", outer["schema"])
    elif kind == "structural_tag":
        yield _read("structural_tag", "response_format", form)
    else:
        raise _fault("response_format.type", f"is {shown(kind)}; there are text, json_object, json_schema and "
                     "structural_tag")


def _read(name: str, field: str, value: Any) -> GrammarSpec:
    if name == "json_object":
        return GrammarSpec("json_object", "", field)
    kind, read = READERS[name]
    return GrammarSpec(kind, read(field, value), field)


def _schema(field: str, value: Any) -> str:
    """A JSON value, or its text."""
    if isinstance(value, str):
        value = _parse(field, value)
    if not isinstance(value, dict | bool):
        raise _fault(field, f"must be a JSON Schema, an object; got {shown(value)}")
    return json.dumps(value)


def _object(field: str, value: Any) -> str:
    value = _parse(field, value) if isinstance(value, str) else value
    if not isinstance(value, dict):
        raise _fault(field, f"must be an object; got {shown(value)}")
    return json.dumps(value)


def _parse(field: str, text: str) -> Any:
    try:
        check_structure(text.encode(), "it")
        return msgspec.json.decode(text)  # which refuses halves of characters, as it does in bodies
    except (ValueError, RecursionError) as error:
        raise _fault(field, f"is not valid JSON: {error}") from None


def _text(field: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise _fault(field, f"must be a text that is not empty; got {shown(value)}")
    if len(value) > MAX_GRAMMAR:
        raise _fault(field, f"has {len(value)} characters, at most {MAX_GRAMMAR} are allowed")
    return value


def _choices(field: str, value: Any) -> str:
    if not isinstance(value, list) or not 0 < len(value) <= MAX_CHOICES or not all(isinstance(c, str) for c in value):
        raise _fault(field, f"must be a list of 1 to {MAX_CHOICES} texts; got {shown(value)}")
    return json.dumps(value)


def _fault(param: str, message: str) -> RequestError:
    return RequestError(f"{param} {message}", param=param, code="invalid_value")


READERS: dict[str, tuple[str, Callable[[str, Any], str]]] = {
    "json": ("json_schema", _schema), "regex": ("regex", _text), "choice": ("choice", _choices),
    "grammar": ("grammar", _text), "structural_tag": ("structural_tag", _object)}
# Fields of a request -> which of these they are.
FIELDS = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar",
          "json_schema": "json", "regex": "regex", "ebnf": "grammar", "grammar": "grammar",
          "structural_tag": "structural_tag"}
