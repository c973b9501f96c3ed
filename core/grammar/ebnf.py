"""JSON Schemas as context-free grammars in GBNF, for backends whose own reading of schemas is not exact.

Nothing is relaxed: what cannot be written as rules is refused with its keyword and place. What may be generated is
always valid; it may be less than all that is valid (numbers in one spelling, declared properties in their order).
"""
from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

from .contract import GrammarError
from .patterns import HEX, PLAIN, TEXT, all_but, as_class, both, quoted, to_rule
from .ranges import Bounds, integers, numbers
from .schema import EXACT, REFUSED, check

TYPES = ("object", "array", "string", "number", "boolean", "null")
# Keywords that assert something, by what they are about; of a value of another type they say nothing.
OF_TYPE = {
    "object": ("properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties"),
    "array": ("items", "prefixItems", "additionalItems", "minItems", "maxItems"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")}
OF_ANY = ("type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref")
# Of a part of `allOf`, what may as well stand beside it.
MERGED = {"type", *OF_TYPE["string"], *OF_TYPE["number"], "minItems", "maxItems"}
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
FORMATS = {"uuid": "^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$",
           "ipv4": rf"^({_BYTE}\.){{3}}{_BYTE}$", **EXACT}
MAX_RULES, MAX_TEXT = 4000, 200_000
MAX_WAYS, MAX_ITEMS, MAX_LENGTH = 64, 256, 4096  # counted; the library writes each of what is no plain character down
EMPTY = '""'
SPACE = r'("" | " " | "\n" ([ ]{0,32} | [\t]{0,8}))'
# `chars` in this form, to the right and with its quote, is one that the library has masks for at little cost.
JSON = f"""ws ::= {SPACE}
string ::= "\\"" chars
chars ::= "\\"" | {TEXT} chars | "\\\\" escape chars
escape ::= ["\\\\/bfnrt] | "u" ([0-9a-cA-CefEF] {HEX} | [dD] [0-7]) {HEX} {HEX}
integer ::= "-"? ("0" | [1-9] [0-9]{{0,14}})
number ::= integer ("." [0-9]{{1,15}})? ([eE] [-+]? [0-9]{{1,2}})?
array ::= "[" ws (value ("," ws value)* ws)? "]"
object ::= "{{" ws (string ":" ws value ("," ws string ":" ws value)* ws)? "}}"
value ::= object | array | string | number | "true" | "false" | "null"
"""


def schema_to_gbnf(source: str) -> str:
    """The grammar of a schema's JSON, with the rule root. Raises `GrammarError` with the keyword and its place."""
    schema = check(source)
    writer = _Writer(schema)
    start = writer.of(schema, "$", (), ())
    if start is None:
        raise GrammarError("no text satisfies it")
    return f"root ::= {start}\n{JSON}" + "\n".join(f"{name} ::= {body}" for name, body in writer.rules.items())


class _Writer:
    """Collects rules. An expression is None where nothing satisfies it.

    empty: references that were followed to here without a character between; must: those without a way around, which
    a sentence could not end in.
    """

    def __init__(self, root: Any):
        self._root, self.rules, self._size = root, {}, 0
        self._made: dict[str, str | None] = {}

    def _rule(self, body: str) -> str:
        name = f"r{len(self.rules)}"
        self.rules[name] = body
        self._size += len(body)
        if len(self.rules) > MAX_RULES or self._size > MAX_TEXT:
            raise GrammarError("the schema is too large for this grammar backend")
        return name

    def of(self, schema: Any, place: str, empty: tuple[str, ...], must: tuple[str, ...]) -> str | None:
        """A value."""
        if isinstance(schema, bool):
            return "value" if schema else None
        if not isinstance(schema, dict):
            raise GrammarError(f"{place}: a schema must be an object or a boolean")
        schema = self._merged(schema, place)
        for name in REFUSED:
            if name in schema:
                raise GrammarError(f"{place}: the keyword {name} cannot be enforced; leave it out")
        for name in ("$id", "id"):
            if schema is not self._root and isinstance(schema.get(name), str):
                raise GrammarError(f"{place}: the keyword {name} is supported at the top of a schema only")
        said = [name for name in schema if name in OF_ANY or any(name in words for words in OF_TYPE.values())]
        for name, write in (("$ref", self._reference), ("const", self._values), ("enum", self._values),
                            ("anyOf", self._any_of), ("oneOf", self._any_of)):
            if name in said:
                self._alone(name, said, place, ("type",) if write == self._values else ())
                return write(schema, place, empty, must)
        return self._by_type(schema, place, must)

    @staticmethod
    def _alone(name: str, said: list[str], place: str, beside: tuple[str, ...]) -> None:
        for other in said:
            if other != name and other not in beside:
                raise GrammarError(f"{place}: {name} with {other} beside it cannot be enforced by this grammar backend")

    @staticmethod
    def _merged(schema: dict[str, Any], place: str) -> dict[str, Any]:
        """Without `allOf`, whose parts say what may as well stand beside it."""
        if "allOf" not in schema:
            return schema
        found = {name: value for name, value in schema.items() if name != "allOf"}
        parts = schema["allOf"]
        if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
            raise GrammarError(f"{place}: allOf must be a list of schemas that are objects")
        said = {name for names in (*OF_TYPE.values(), OF_ANY) for name in names}
        if len(parts) == 1 and not said & found.keys():
            return _Writer._merged(found | parts[0], place)
        for part in parts:
            for name, value in part.items():
                if name in said and (name not in MERGED or name in found):
                    raise GrammarError(f"{place}: allOf with {name} cannot be enforced by this grammar backend")
                found.setdefault(name, value)
        return found

    def _reference(self, schema: dict[str, Any], place: str, empty: tuple[str, ...], must: tuple[str, ...],
                   ) -> str | None:
        where = schema["$ref"]
        if not isinstance(where, str) or not (where == "#" or where.startswith("#/")):
            raise GrammarError(f"{place}: $ref must lead to a place within the schema, as #/$defs/name does")
        if where in empty:
            raise GrammarError(f"{place}: $ref {where[:100]!r} leads to itself")
        if where in must:
            raise GrammarError(f"{place}: $ref {where[:100]!r} has no end, so that no text satisfies it")
        if where not in self._made:
            self._made[where] = name = self._rule("")
            target = self._root
            for step in where.split("/")[1:]:
                target = _step(target, unquote(step).replace("~1", "/").replace("~0", "~"), place, where)
            body = self.of(target, where, (*empty, where), (*must, where))
            if body is None:
                raise GrammarError(f"{place}: nothing satisfies what $ref {where[:100]!r} leads to")
            self.rules[name] = body
            self._size += len(body)
        return self._made[where]

    def _values(self, schema: dict[str, Any], *_: Any) -> str | None:
        given = [schema["const"]] if "const" in schema else schema["enum"]
        if not isinstance(given, list):
            raise GrammarError("enum must be a list")
        kinds = _types(schema)
        found = [quoted(each) for each in given if any(_is_a(each, kind) for kind in kinds)]
        return self._rule(" | ".join(found)) if found else None

    def _any_of(self, schema: dict[str, Any], place: str, empty: tuple[str, ...], _: tuple[str, ...]) -> str | None:
        name = "anyOf" if "anyOf" in schema else "oneOf"
        if not isinstance(schema[name], list) or not schema[name]:
            raise GrammarError(f"{place}: {name} must be a list of schemas")
        if len(schema[name]) > MAX_WAYS:
            raise GrammarError(f"{place}: {name} may have at most {MAX_WAYS} parts for this grammar backend")
        if name == "oneOf":
            _check_apart(schema[name], place)
        found = [self.of(each, f"{place}.{name}[{i}]", empty, ()) for i, each in enumerate(schema[name])]
        found = [each for each in found if each is not None]
        return self._rule(" | ".join(found)) if found else None

    def _by_type(self, schema: dict[str, Any], place: str, must: tuple[str, ...]) -> str | None:
        write: dict[str, Callable[[dict[str, Any], str, tuple[str, ...]], str | None]] = {
            "object": self._object, "array": self._array, "string": self._string, "number": self._number,
            "integer": self._integer}
        kinds = _types(schema)
        if kinds == TYPES and not any(name in schema for words in OF_TYPE.values() for name in words):
            return "value"
        found = []
        for kind in kinds:
            if kind in write:
                found.append(write[kind](schema, place, must if len(kinds) == 1 else ()))
            else:
                found += ['"true"', '"false"'] if kind == "boolean" else ['"null"']
        found = [each for each in found if each is not None]
        return self._rule(" | ".join(found)) if found else None

    def _string(self, schema: dict[str, Any], place: str, _: tuple[str, ...]) -> str:
        form, pattern = schema.get("format"), schema.get("pattern")
        least, most = _counts(schema, "Length", place)
        if form is not None:
            if not isinstance(form, str) or form not in FORMATS:
                raise GrammarError(f"{place}: the format {str(form)[:100]} cannot be enforced; leave it out")
            if pattern is not None:
                raise GrammarError(f"{place}: format with pattern beside it cannot be enforced by this grammar backend")
            pattern = FORMATS[form]
        if pattern is None:
            return '"\\"" ' + _repeat(TEXT, least, most) + ' "\\""' if least or most is not None else "string"
        if least or most is not None:
            raise GrammarError(f"{place}: pattern with minLength or maxLength beside it cannot be enforced by this "
                               "grammar backend")
        if not isinstance(pattern, str):
            raise GrammarError(f"{place}: pattern must be a text")
        try:
            return f'"\\"" {self._rule(to_rule(pattern))} "\\""'
        except GrammarError as error:
            raise GrammarError(f"{place}.pattern: {error.message}") from None

    def _integer(self, schema: dict[str, Any], place: str, _: tuple[str, ...]) -> str | None:
        bounds = _bounds(schema, place)
        return "integer" if bounds == Bounds() else integers(bounds)

    def _number(self, schema: dict[str, Any], place: str, _: tuple[str, ...]) -> str | None:
        bounds = _bounds(schema, place)
        return "number" if bounds == Bounds() else numbers(bounds)

    def _array(self, schema: dict[str, Any], place: str, must: tuple[str, ...]) -> str | None:
        items, more = schema.get("items", True), schema.get("items", True)
        first = schema.get("prefixItems", [])
        if isinstance(items, list):
            if first:
                raise GrammarError(f"{place}: items that is a list cannot be enforced beside prefixItems")
            first, more = items, schema.get("additionalItems", True)
        if not isinstance(first, list):
            raise GrammarError(f"{place}: prefixItems must be a list")
        least, most = _counts(schema, "Items", place)
        parts: list[str] = []
        for i, each in enumerate(first[:most]):
            part = self.of(each, f"{place}.prefixItems[{i}]", (), must if i < least else ())
            if part is None:
                most = i
                break
            parts.append(part)
        rest = self.of(more, f"{place}.items", (), must if len(parts) < least else ()) if most is None or most > len(
            parts) else None
        if rest is None:
            most = len(parts) if most is None else min(most, len(parts))
        if most is not None and least > most:
            return None
        return '"[" ws ' + self._elements(parts, rest, least, most) + '"]"'

    def _elements(self, parts: list[str], rest: str | None, least: int, most: int | None) -> str:
        """parts: the first ones, perhaps fewer of them than there may be; rest: each further one."""
        if most == 0:
            return ""
        start = len(parts)
        following = ""  # what comes after element i, from the last on
        if rest is not None and (most is None or most > max(start, 1)):
            begin = max(start, 1)
            more = None if most is None else most - begin
            following = _repeat(self._rule(f'"," ws {rest}'), max(0, least - begin), more)
        for i in range(start - 1, 0, -1):
            body = f'"," ws {parts[i]} {following}'
            following = self._rule(body) if i < least else self._rule(f'"" | {body}')
        head = parts[0] if parts else rest
        body = f"{head} {following} ws "
        return body if least else f"({body})? "

    def _object(self, schema: dict[str, Any], place: str, must: tuple[str, ...]) -> str | None:
        if schema.get("patternProperties"):
            raise GrammarError(f"{place}: the keyword patternProperties cannot be enforced by this grammar backend")
        given, needed = schema.get("properties", {}), schema.get("required", [])
        needed = [] if isinstance(needed, bool) else needed  # of a draft long ago
        if not isinstance(given, dict) or not isinstance(needed, list) or not all(isinstance(n, str) for n in needed):
            raise GrammarError(f"{place}: properties must be an object, and required a list of names")
        further = schema.get("additionalProperties", True)
        given = given | {name: further for name in needed if name not in given}
        least, most = _counts(schema, "Properties", place)
        members: list[tuple[str, bool]] = []
        for name, each in given.items():
            value = self.of(each, f"{place}.properties.{name[:100]}", (), must if name in needed else ())
            if value is not None:
                members.append((f"{quoted(name)} \":\" ws {value}", name in needed))
            elif name in needed:
                return None
        other = self.of(further, f"{place}.additionalProperties", (), ())
        fixed = sum(is_needed for _, is_needed in members)
        if least > max(fixed, 1):
            raise GrammarError(f"{place}: minProperties {least} cannot be enforced by this grammar backend")
        if most is not None and most < len(members):
            raise GrammarError(f"{place}: maxProperties {most} cannot be enforced by this grammar backend, with "
                               "more properties")
        room = None if most is None else most - len(members)
        entry = None if other is None or room == 0 else self._rule(f'{self._other_name(given)} ":" ws {other}')
        if least and entry is None and not members:
            return None
        return '"{" ws ' + self._members(members, entry, least, room) + '"}"'

    def _members(self, members: list[tuple[str, bool]], entry: str | None, least: int, room: int | None) -> str:
        """members: declared ones, in order, and whether each must be there; entry: any further one, at most room."""
        next_one = "" if entry is None else self._rule(f'"," ws {entry}')
        after = "" if entry is None else _repeat(next_one, 0, room)
        alone = "" if entry is None else f"{entry} " + _repeat(next_one, 0, room and room - 1)
        starts = [alone] if alone else []  # an object may begin with any member up to the first that must be there
        for member, is_needed in reversed(members):
            begin = self._rule(f"{member} {after}")
            after = self._rule(f'"," ws {begin}' + ("" if is_needed else f' | {after or EMPTY}'))
            starts = [begin] if is_needed else [begin, *starts]
        must_be = least > 0 or any(is_needed for _, is_needed in members)
        if not starts:
            return ""
        body = f"({' | '.join(starts)}) ws "
        return body if must_be else f"({body})? "

    def _other_name(self, names: dict[str, Any]) -> str:
        """A name that is none of these: as a tree of their characters, at each of which it may turn away."""
        if not names:
            return "string"
        return f'"\\"" {self._turning_away(sorted(names), 0)}'

    def _turning_away(self, names: list[str], at: int) -> str:
        """The rest of a name, of which `at` characters were as those of all of these, up to its quote."""
        heads = sorted({name[at] for name in names if len(name) > at})
        ways = [] if any(len(name) == at for name in names) else ['"\\""']
        other = both(PLAIN, all_but([(ord(head), ord(head)) for head in heads]))
        ways.append(f'{as_class(other)} chars')
        for head in heads:
            if both([(ord(head), ord(head))], PLAIN):  # else it is escaped, and such names are left out
                below = self._turning_away([name for name in names if name[at:at + 1] == head], at + 1)
                ways.append(f"{as_class([(ord(head), ord(head))])} {below}")
        return self._rule(" | ".join(ways))


def _step(target: Any, name: str, place: str, where: str) -> Any:
    if isinstance(target, list) and name.isdigit() and int(name) < len(target):
        return target[int(name)]
    if isinstance(target, dict) and name in target:
        return target[name]
    raise GrammarError(f"{place}: $ref {where[:100]!r} leads nowhere")


def _types(schema: dict[str, Any]) -> tuple[str, ...]:
    """Names of types, integer only where number is not."""
    given = schema.get("type", TYPES)
    kinds = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, list | tuple) else ()
    if not kinds or not all(isinstance(kind, str) and kind in (*TYPES, "integer") for kind in kinds):
        raise GrammarError(f"type must be one of {', '.join(TYPES)} and integer, or a list of them")
    return tuple(dict.fromkeys(kind for kind in kinds if kind != "integer" or "number" not in kinds))


def _is_a(value: Any, kind: str) -> bool:
    known = {"object": dict, "array": list, "string": str, "number": int | float, "integer": int, "boolean": bool,
             "null": type(None)}
    return isinstance(value, known[kind]) and isinstance(value, bool) == (kind == "boolean")


def _check_apart(parts: list[Any], place: str) -> None:
    """That at most one of these can be true, since no type is in two."""
    seen: set[str] = set()
    for part in parts:
        kinds = set(_types(part)) if isinstance(part, dict) and "type" in part else set(TYPES)
        kinds |= {"number"} if "integer" in kinds else set()
        if kinds & seen:
            raise GrammarError(f"{place}: oneOf is supported only where its parts are of different types; use anyOf")
        seen |= kinds


def _counts(schema: dict[str, Any], what: str, place: str) -> tuple[int, int | None]:
    least, most = schema.get(f"min{what}", 0), schema.get(f"max{what}")
    for name, value in ((f"min{what}", least), (f"max{what}", most)):
        if name in schema and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise GrammarError(f"{place}: {name} must be a whole number from 0 on")
    limit = MAX_LENGTH if what == "Length" else MAX_ITEMS
    if least > limit:
        raise GrammarError(f"{place}: min{what} may be at most {limit} for this grammar backend")
    return least, most if most is None else min(most, limit)


def _bounds(schema: dict[str, Any], place: str) -> Bounds:
    """What the keywords of numbers say."""
    if schema.get("multipleOf", 1) != 1 or "multipleOf" in schema and "integer" not in _types(schema):
        raise GrammarError(f"{place}: the keyword multipleOf cannot be enforced by this grammar backend")
    found = {}
    for name in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
        if name not in schema:
            continue
        value = schema[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or value in (float("inf"), -float("inf")):
            raise GrammarError(f"{place}: {name} must be a number")
        found[name] = Decimal(repr(value))
    least = max(((found[name], name != "minimum") for name in ("minimum", "exclusiveMinimum") if name in found),
                default=(None, False))
    most = min(((found[name], name == "maximum") for name in ("maximum", "exclusiveMaximum") if name in found),
               default=(None, True))
    return Bounds(*least, most[0], not most[1])


def _repeat(term: str, least: int, most: int | None) -> str:
    if most == 0:
        return ""
    if (least, most) == (0, None):
        return f"{term}*"
    return f"{term}{{{least},{'' if most is None else most}}}"


