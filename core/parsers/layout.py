"""How calls are written where they are enforced: layouts for `core.grammar.layout`, and a reader of them that passes
arguments on while they come, as they cannot turn out malformed."""
from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from . import contract
from .contract import CallArguments, CallEnd, Parser, Tool, Tools
from .json_text import JsonScan
from .reader import CallReader, Step


class Written(NamedTuple):
    """The texts of a call before its name, between name and arguments, and after its arguments, which are JSON."""

    before: str
    between: str
    after: str


class Group(NamedTuple):
    """What stands around the calls of a reply. trigger: what text before a call has not in it; "" where there is no
    text beside calls, which then begin with `begin` or one of `signs`. begin, end: around all of them."""

    trigger: str
    separator: str
    begin: str = ""
    end: str = ""
    signs: str = ""


def json_layout(written: Written, tools: Tools, least: int, most: int | None, group: Group, content: Any = None) -> Any:
    """The layout of calls whose arguments are JSON."""
    def call(name: str) -> list[Any]:
        return [written.before + name + written.between, arguments(tools, name), written.after]
    return grouped([call(name) for name in tools], least, most, group, content)


def grouped(calls: list[list[Any]], least: int, most: int | None, group: Group, content: Any = None) -> Any:
    """The layout of calls of any form, each a list that begins with a text."""
    many = {"many": {"any": calls}, "between": group.separator, "least": max(1, least), "most": most}
    whole = [group.begin, many, group.end]
    if least:
        return whole
    if content is not None:
        return {"any": [whole, content]}
    if not group.trigger:
        return {"any": [whole, {"plain": group.signs}]}
    size = len(group.trigger)
    if group.begin:
        return {"free": group.trigger, "then": [group.begin[size:], many, group.end], "most": 1}
    return {"free": group.trigger, "then": {"any": [[text[size:], *rest] for text, *rest in calls]}, "most": most}


def arguments(tools: Tools, name: str) -> dict[str, Any]:
    """The node of a tool's arguments."""
    tool = tools[name]
    schema = {"type": "object", **tool.parameters} if tool.parameters else {"type": "object", "properties": {},
                                                                            "additionalProperties": False}
    return {"json": schema, "name": name, "strict": tool.strict}


class CallFormat(contract.CallFormat):
    """A notation that can be enforced. written: of one call with JSON arguments. group: around calls."""

    written: Written | None = None
    group: Group

    def layout(self, tools: Tools, least: int, most: int | None, content: Any = None) -> Any:
        assert self.written is not None
        return json_layout(self.written, tools, least, most, self.group, content)

    def example(self, name: str, arguments: str) -> str:
        if self.written is None:
            return super().example(name, arguments)
        before, between, after = self.written
        return self.group.begin + before + name + between + arguments + after + self.group.end

    def bound_parser(self, tools: Tools) -> Parser:
        return self.parser(tools) if self.written is None else EagerReader(self, self.written, self.group, tools)


def pairs(opening: str, tool: Tool, pair: Callable[[str, dict[str, Any]], Any], between: str,
          closing: str) -> list[Any] | None:
    """The layout of a call that lists its arguments: those that are required in order, then any of the others. pair:
    one of them; None for what cannot be enforced, which makes the whole None."""
    properties, required = tool.parameters.get("properties") or {}, tool.parameters.get("required") or []
    if not isinstance(required, list) or not isinstance(properties, dict):
        return None
    if _OTHER & tool.parameters.keys() or "$ref" in json.dumps(properties):
        return None
    schemas = {key: schema if isinstance(schema, dict) else {} for key, schema in properties.items()}
    made = {key: pair(key, schema) for key, schema in schemas.items()}
    if None in made.values():
        return None
    needed = [node for key, node in made.items() if key in required]
    others = {"any": [node for key, node in made.items() if key not in required]}
    parts: list[Any] = [opening]
    for i, node in enumerate(needed):
        parts += [between, node] if i else [node]
    if others["any"]:
        parts.append({"many": [between, others], "between": "", "least": 0, "most": None} if needed else
                     {"many": others, "between": between, "least": 0, "most": None})
    return [*parts, closing]


_OTHER = {"allOf", "anyOf", "oneOf", "$ref", "$defs", "definitions", "patternProperties", "minProperties"}


class EagerReader(CallReader):
    """Reads what was written under `json_layout`, for one `Written` of a format."""

    def __init__(self, format: contract.CallFormat, written: Written, group: Group, tools: Tools):
        self._names = {name + written.between: name for name in tools}
        self._before, self._after, self._separator = written.before, written.after, group.separator
        self._drops = tuple(filter(str.strip, (group.begin, group.end)))
        super().__init__(format)

    def read(self) -> Step:
        while (mark := (yield from self.until(self._before, *self._drops))):
            if mark != self._before:
                continue
            self.hold(mark)
            name = yield from self.match(*self._names)
            if not name:  # the reply was cut
                self.give_back()
                continue
            yield from self._arguments(self.begin(self._names[name]))
            yield from self.match(self._after)
            yield from self.match(self._separator)
        self.end()

    def _arguments(self, index: int) -> Step:
        scan = JsonScan()
        while not scan.complete and not scan.bad and (yield from self.more()):
            part = self._pull(scan.feed(self._text, self._at))
            if part:
                self._out.append(CallArguments(index, part))
        if scan.complete:
            self._out.append(CallEnd(index))
