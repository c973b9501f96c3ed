"""JSON Schemas that clients send: read within limits, refused where a keyword would not be honoured, and made exact
where grammar libraries take more than the standard.

What may be generated is always valid; it may be less than all that is valid. Sources: JSON Schema 2020-12; RFC 3339
(dates and times, here without leap seconds and the year 0); RFC 1123 (host names, here in letters, digits and hyphens
alone); ECMA-262 (white space in patterns).
"""
from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from ..errors import shown
from .contract import GrammarError

MAX_DEPTH = 64
MAX_VALUES = 20_000
# Of one schema; compiling takes longer with the square of each, a few tenths of a second with so many.
MOST = {"properties": 1000, "patternProperties": 48, "allOf": 256, "anyOf": 1024, "oneOf": 512, "enum": 10_000}
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
MAX_MULTIPLE = 10_000  # of `multipleOf`, zeros at the end left out; some above a million take minutes
MAX_PATTERN = 4096  # characters
REFUSED = ("not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "propertyNames",
           "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties", "unevaluatedItems",
           "$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor", "contentEncoding",
           "contentMediaType", "contentSchema", "x-guidance")
# Keywords whose values are schemas, lists of them, or objects of them.
ONE = ("items", "additionalProperties", "additionalItems")
MANY = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
NAMED = ("properties", "patternProperties", "$defs", "definitions")

_YEAR = r"([1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP = r"([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
DATE = (rf"({_YEAR}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
        rf"|02-(0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29)")
TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_LABEL = r"[A-Za-z0-9](-?[A-Za-z0-9]){0,30}"  # no two hyphens together, which are for encoded names
EXACT = {"date": f"^{DATE}$", "time": f"^{TIME}$", "date-time": f"^{DATE}T{TIME}$",
         "hostname": rf"^{_LABEL}(\.{_LABEL}){{0,3}}$"}  # labels under 64 characters, all of them under 254
_SPACE = r"\t\n\v\f\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
_ECMA = {"s": f"[{_SPACE}]", "S": f"[^{_SPACE}]"}
# An escape, the difference of two classes, or a hyphen that can stand for itself only.
_ESCAPE = re.compile(r"\\(.)|--|-(?=\\[dDsSwW])", re.DOTALL)


def check(source: str) -> Any:
    """The schema as JSON values, to be compiled. Raises `GrammarError` that names the keyword and its place."""
    try:
        schema = json.loads(source, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"the schema is not valid JSON: {error}") from None
    if not isinstance(schema, dict | bool):
        raise GrammarError(f"a schema must be an object or a boolean; got {shown(schema)}")
    if schema is True:
        return {}
    if schema is False:
        raise GrammarError("the schema is false: nothing satisfies it")
    count, multiple = 0, 1
    stack: list[tuple[dict[str, Any], str, int]] = [(schema, "$", 0)]
    while stack:
        part, place, depth = stack.pop()
        count += len(part)
        if depth > MAX_DEPTH or count > MAX_VALUES:
            raise GrammarError(f"the schema is too large: {MAX_DEPTH} levels and {MAX_VALUES} keywords are allowed")
        _make_exact(part, place)
        multiple = math.lcm(multiple, _digits(part.get("multipleOf")))
        if multiple > MAX_MULTIPLE:
            raise GrammarError(f"{place}: multipleOf {shown(part['multipleOf'])} cannot be enforced, alone or with "
                               "others of the schema: their common multiple, without zeros at its end, must be at most "
                               f"{MAX_MULTIPLE}")
        stack += [(below, where, depth + 1) for below, where in parts(part, place)]
    return schema


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no number")


def parts(schema: dict[str, Any], place: str) -> Iterator[tuple[dict[str, Any], str]]:
    """The schemas directly inside one, and where they are."""
    for name in ONE:
        if isinstance(schema.get(name), dict):
            yield schema[name], f"{place}.{name}"
    for name in MANY:
        if isinstance(schema.get(name), list):
            yield from ((each, f"{place}.{name}[{i}]") for i, each in enumerate(schema[name]) if isinstance(each, dict))
    for name in NAMED:
        if isinstance(schema.get(name), dict):
            yield from ((each, f"{place}.{name}.{key[:100]}") for key, each in schema[name].items()
                        if isinstance(each, dict))


def _digits(value: Any) -> int:
    """A number without its point and the zeros at its end; 1 for what is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        return 1
    number = Decimal(repr(value)).normalize()
    return int(number.scaleb(-number.as_tuple().exponent))


def _make_exact(schema: dict[str, Any], place: str) -> None:
    for name in COUNTS:  # 3.0 is a whole number, too
        if isinstance(schema.get(name), float) and schema[name].is_integer():
            schema[name] = int(schema[name])
    for name in REFUSED:
        if name in schema:
            raise GrammarError(f"{place}: the keyword {name} cannot be enforced; leave it out")
    if place != "$" and "$id" in schema:
        raise GrammarError(f"{place}: the keyword $id is supported at the top of a schema only")
    for name, most in MOST.items():
        if isinstance(schema.get(name), dict | list) and len(schema[name]) > most:
            raise GrammarError(f"{place}: {name} has {len(schema[name])} entries, at most {most} are allowed")
    if isinstance(schema.get("pattern"), str):
        schema["pattern"] = _as_ecma(schema["pattern"], place)
    if isinstance(schema.get("patternProperties"), dict):
        schema["patternProperties"] = {_as_ecma(key, place): each for key, each in schema["patternProperties"].items()}
    kind = schema.get("format")
    if isinstance(kind, str) and kind in EXACT:
        del schema["format"]
        parts = schema.get("allOf")
        if parts is None or isinstance(parts, list):
            schema["allOf"] = [*(parts or ()), {"pattern": EXACT[kind]}]


def _as_ecma(pattern: str, place: str) -> str:
    """\\s and \\S as ECMA-262 has them."""
    if len(pattern) > MAX_PATTERN:
        raise GrammarError(f"{place}: a pattern has {len(pattern)} characters, at most {MAX_PATTERN} are allowed")
    return spell_out(pattern, _ECMA)


def spell_out(pattern: str, classes: dict[str, str]) -> str:
    """A regular expression with classes in brackets in place of escapes. classes: by the escape's letter."""
    def one(match: re.Match[str]) -> str:
        # Before a bracket a hyphen would begin a range.
        return r"\-" if match[0] == "-" else classes.get(match[1], match[0])
    return _ESCAPE.sub(one, pattern)
