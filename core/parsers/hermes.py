"""Calls as JSON between tags, wherever the model puts them: Hermes, Qwen, Command R, Granite, Phi 4."""
from __future__ import annotations

from typing import Any

from .contract import CALLS, Parser, Tools
from .json_text import read_json, write_json
from .layout import CallFormat, Group, Written
from .reader import CallReader, Malformed, Step

NAMES = ("name", "tool_name")
ARGUMENTS = ("arguments", "parameters")


def read_calls(value: Any, tools: Tools | None = None) -> list[tuple[str, str]]:
    """Name and arguments, as JSON, of each call of {"name": ..., "arguments": {...}} or a list of such. tools: only
    these are meant. Raises `Malformed`."""
    calls = [_read_call(each) for each in (value if isinstance(value, list) else [value])]
    if not calls or tools is not None and any(name not in tools for name, _ in calls):
        raise Malformed
    return calls


def _read_call(value: Any) -> tuple[str, str]:
    if not isinstance(value, dict):
        raise Malformed
    inner = value.get("function")
    value = inner if isinstance(inner, dict) else value
    name = next((value[key] for key in NAMES if key in value), None)
    return checked_name(name), written(next((value[key] for key in ARGUMENTS if key in value), {}))


def written(arguments: Any) -> str:
    """Arguments as JSON. Raises `Malformed` for what is no object."""
    if isinstance(arguments, str):  # written out twice
        arguments = parse_json(arguments) if arguments.strip() else {}
    if not isinstance(arguments, dict | None):
        raise Malformed
    return write_json(arguments or {})


def checked_name(name: Any) -> str:
    """A name that a model can mean a function by. Raises `Malformed`."""
    if isinstance(name, str) and 0 < len(name) <= 256 and name.isprintable() and not name.isspace():
        return name
    raise Malformed


def parse_json(text: str) -> Any:
    """A JSON value of a call. Raises `Malformed`."""
    try:
        return read_json(text)
    except ValueError:
        raise Malformed from None


def keyed_calls(value: Any) -> list[tuple[str, str]]:
    """Calls as objects with one key, the name: [{"f": {...}}]. Raises `Malformed`."""
    listed = value if isinstance(value, list) else [value]
    if not listed or not all(isinstance(each, dict) and len(each) == 1 for each in listed):
        raise Malformed
    return [(checked_name(name), written(arguments)) for each in listed for name, arguments in each.items()]


class TaggedReader(CallReader):
    """One object or a list of them between two tags; the second may be missing."""

    def __init__(self, format: TaggedJson):
        self._begin, self._end, self._read = format.begin, format.end, format.read
        super().__init__(format)

    def read(self) -> Step:
        while (mark := (yield from self.until(self._begin))):
            self.hold(mark)
            try:
                yield from self.blank()
                for name, arguments in self._read(parse_json((yield from self.json()))):
                    self.call(name, arguments)
            except Malformed:
                self.give_back()
                continue
            yield from self.blank()
            if self._end:
                yield from self.match(self._end)
        self.end()


class TaggedJson(CallFormat):
    """begin, end: the tags. name, arguments: the keys. listed: what is written is a list."""

    begin, end, name, arguments, listed = "", "", "name", "arguments", False
    read = staticmethod(read_calls)

    def __init__(self) -> None:
        before, between = '{"' + self.name + '": "', '", "' + self.arguments + '": '
        if self.listed:
            self.written = Written(before, between, "}")
            self.group = Group(self.begin, ", ", self.begin + "[", "]" + self.end)
        else:
            self.written = Written(self.begin + "\n" + before, between, "}\n" + self.end)
            self.group = Group(self.begin, "\n")

    def parser(self, tools: Tools) -> Parser:
        return TaggedReader(self)

    def bound_parser(self, tools: Tools) -> Parser:
        return self.parser(tools) if self.listed else super().bound_parser(tools)


class Hermes(TaggedJson):
    """Hermes 2 and 3, Qwen 2.5 and 3."""

    signs = (("<tool_call>",),)
    controls = ("<tool_call>", "</tool_call>")
    begin, end = "<tool_call>", "</tool_call>"


class Cohere(TaggedJson):
    """Command R7B and A."""

    signs = (("<|START_ACTION|>",),)
    controls = ("<|START_ACTION|>", "<|END_ACTION|>")
    begin, end, name, arguments, listed = "<|START_ACTION|>", "<|END_ACTION|>", "tool_name", "parameters", True


class Phi(TaggedJson):
    """Phi 4 mini, and Granite 3, which leaves out the second tag."""

    signs = (("<|tool_call|>",),)
    controls = ("<|tool_call|>", "<|/tool_call|>")
    begin, end, listed = "<|tool_call|>", "<|/tool_call|>", True


class Apertus(TaggedJson):
    """Apertus."""

    signs = (("<|tools_prefix|>",),)
    controls = ("<|tools_prefix|>", "<|tools_suffix|>")
    begin, end, listed = "<|tools_prefix|>", "<|tools_suffix|>", True
    read = staticmethod(keyed_calls)

    def __init__(self) -> None:
        super().__init__()
        self.written = Written('{"', '": ', "}")


CALLS.register("hermes", Hermes)
CALLS.register("apertus", Apertus)
CALLS.register("cohere", Cohere)
CALLS.register("phi4", Phi)
