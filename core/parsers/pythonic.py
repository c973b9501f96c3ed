"""Calls as a list of Python calls, [f(a=1), g(b="x")]: Llama 3.2 and 4, LFM 2, OLMo 3."""
from __future__ import annotations

import re
from typing import Any

from .contract import CALLS, Parser, Tool, Tools
from .hermes import checked_name, parse_json, read_calls
from .json_text import MAX_DEPTH, read_json, write_json
from .layout import CallFormat, Group, grouped, pairs
from .literals import Literals, is_word
from .reader import MAX_BLANK, MAX_CALL, CallReader, Malformed, Step

TAGS = {"<|python_start|>": "<|python_end|>", "<|tool_call_start|>": "<|tool_call_end|>",
        "<function_calls>": "</function_calls>"}
_SIGN = re.compile(r"[\"'()\[\]{}]")
_QUOTED = {quote: re.compile(rf"[\\{quote}]") for quote in "\"'"}


class BracketScan:
    """Finds where a list that comes in pieces ends. Strings hide brackets."""

    def __init__(self) -> None:
        self.complete = self.bad = False
        self._depth, self._quote, self._escaped = 0, "", False

    def feed(self, text: str, at: int) -> int:
        """As `JsonScan.feed`."""
        while at < len(text):
            if self._escaped:
                self._escaped, at = False, at + 1
                continue
            found = (_QUOTED[self._quote] if self._quote else _SIGN).search(text, at)
            if self._depth == 0 and (found is None or found.start() > at or found[0] != "["):
                self.bad = True
                return at
            if found is None:
                return len(text)
            at, sign = found.end(), found[0]
            if self._quote:
                self._escaped, self._quote = sign == "\\", "" if sign == self._quote else self._quote
            elif sign in "\"'":
                self._quote = sign
            else:
                self._depth += 1 if sign in "([{" else -1
                if self._depth > MAX_DEPTH:
                    self.bad = True
                    return at
                if self._depth == 0:
                    self.complete = True
                    return at
        return at


def read_list(text: str, tools: Tools | None) -> list[tuple[str, str]]:
    """The calls of a list, with or without its brackets. tools: only these are meant. Raises `Malformed`."""
    source, found = Literals(text), []
    listed = source.take("[")
    while source.peek() not in ("]", ""):
        name = checked_name(source.word())
        if tools is not None and name not in tools:
            raise Malformed
        source.need("(")
        found.append((name, write_json(_arguments(source))))
        if not source.take(",") and listed:
            break
    if listed:
        source.need("]")
    if source.peek() or not found:
        raise Malformed
    return found


def _arguments(source: Literals) -> dict[str, Any]:
    found = {}
    while not source.take(")"):
        key = source.word()
        source.need("=")
        found[key] = source.value()
        if not source.take(","):
            source.need(")")
            break
    return found


class PythonicReader(CallReader):
    """A list at the beginning of a reply, of tools that there are, or anywhere between tags."""

    def __init__(self, format: CallFormat, tools: Tools):
        self._tools = tools
        super().__init__(format)

    def read(self) -> Step:
        self.hold(most=MAX_CALL + MAX_BLANK)
        try:
            yield from self.blank()
            for call in read_list((yield from self.scanned(BracketScan())), self._tools):
                self.call(*call)
        except Malformed:
            self.give_back()
        while (mark := (yield from self.until(*TAGS))):
            self.hold(mark)
            try:
                text, _ = yield from self.capture(TAGS[mark])
                for call in _tagged(text):
                    self.call(*call)
            except Malformed:
                self.give_back()
        self.end()


def _tagged(text: str) -> list[tuple[str, str]]:
    """Calls between tags, where some models write JSON."""
    if text.lstrip()[:2] in ('[{', '{"'):
        return read_calls(parse_json(text.strip()))
    return read_list(text, None)


class Pythonic(CallFormat):
    """Llama 3.2 and 4, LFM 2, OLMo 3."""

    signs = (("[func_name1(",), ("<|tool_list_start|>",), ("List of tools: [",), ("<function_calls>",))
    controls = tuple(TAGS) + tuple(TAGS.values())

    group = Group("", ", ", "[", "]", signs="[")

    def parser(self, tools: Tools) -> Parser:
        return PythonicReader(self, tools)

    def layout(self, tools: Tools, least: int, most: int | None, content: Any = None) -> Any:
        """Values are JSON's, which are read as well."""
        calls = [self._call(tool) for tool in tools.values()]
        return None if None in calls else grouped(calls, least, most, self.group, content)

    def example(self, name: str, arguments: str) -> str:
        try:
            values = read_json(arguments)
        except ValueError:  # a client's
            values = None
        if not isinstance(values, dict):
            return f"[{name}({arguments})]"
        return f"[{name}({', '.join(f'{key}={value!r}' for key, value in values.items())})]"

    @staticmethod
    def _call(tool: Tool) -> list[Any] | None:
        def pair(key: str, schema: dict[str, Any]) -> Any:
            return [f"{key}=", {"json": schema, "name": tool.name, "strict": tool.strict}] if is_word(key) else None
        return pairs(f"{tool.name}(", tool, pair, ", ", ")") if is_word(tool.name) else None


CALLS.register("pythonic", Pythonic)
