"""Calls without tags, which only a whole reply can be: Llama 3, and models that were told to write JSON."""
from __future__ import annotations

from typing import Any

from .contract import CALLS, Parser, Tools
from .hermes import parse_json, read_calls
from .layout import CallFormat, Group, Written
from .reader import MAX_BLANK, MAX_CALL, CallReader, Malformed, Step

PYTHON = "<|python_tag|>"


class JsonReader(CallReader):
    """Objects {"name": ..., "parameters": {...}}, also in a list, or with semicolons between them, from the first
    character on: any other reply is content. Only tools that there are count."""

    def __init__(self, format: CallFormat, tools: Tools):
        self._tools = tools
        super().__init__(format)

    def read(self) -> Step:
        self.hold(most=MAX_CALL + MAX_BLANK)
        try:
            yield from self._calls()
        except Malformed:
            self.give_back()
        while (yield from self.more()):
            self.take(self._text[self._at:])
            self._at = len(self._text)
        self.end()

    def _calls(self) -> Step:
        yield from self.blank()
        yield from self.match(PYTHON)
        yield from self.blank()
        fence = yield from self.match("```json", "```")
        yield from self.blank()
        while True:
            for name, arguments in read_calls(parse_json((yield from self.json())), self._tools):
                self.call(name, arguments)
            self.hold()
            yield from self.blank()
            if fence and (yield from self.match("```")):
                self.hold()
                yield from self.blank()
            if not (yield from self.match(";", ",")):
                break
            yield from self.blank()
        self.give_back()


class Llama3(CallFormat):
    """Llama 3.1 to 3.3."""

    signs = ((PYTHON,), ("<|start_header_id|>", '"parameters": '))
    controls = (PYTHON,)
    written = Written('{"name": "', '", "parameters": ', "}")
    group = Group("", "; ", signs="{[")
    single = True

    def parser(self, tools: Tools) -> Parser:
        return JsonReader(self, tools)

    def layout(self, tools: Tools, least: int, most: int | None, content: Any = None) -> Any:
        return super().layout(tools, least, 1 if self.single else most, content)


class Json(Llama3):
    """JSON with "arguments", for models without a notation of their own."""

    signs = ()
    single = False
    written = Written('{"name": "', '", "arguments": ', "}")


CALLS.register("llama3-json", Llama3)
CALLS.register("json", Json)
