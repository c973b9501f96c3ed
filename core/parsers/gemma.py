"""Gemma's calls: call:f{a:<|"|>text<|"|>,b:1} between tags, in the words of Gemma 4 and of FunctionGemma."""
from __future__ import annotations

from collections.abc import Generator
from typing import Any

from .contract import CALLS, THINKING, Parser, Tool, Tools
from .hermes import checked_name
from .json_text import write_json
from .layout import CallFormat, Group, grouped, pairs
from .literals import Literals, is_word
from .reader import CallReader, Malformed, Step
from .tagged import kinds_of
from .thinking import Tagged


class GemmaReader(CallReader):
    """Strings are in quotes of their own, so that they need no escapes."""

    def __init__(self, format: Gemma4):
        self._begin, self._end, self._quote = format.begin, format.close, format.quote
        super().__init__(format)

    def read(self) -> Step:
        while (mark := (yield from self.until(self._begin))):
            self.hold(mark)
            try:
                self.call(*_read((yield from self._text_of_call()), self._quote))
            except Malformed:
                self.give_back()
        self.end()

    def _text_of_call(self) -> Generator[None, None, str]:
        """Up to the closing tag, which may be inside a string."""
        parts, inside = [], False
        while True:
            part, mark = yield from self.capture(self._quote, *(() if inside else (self._end,)))
            if mark == self._end:
                return "".join([*parts, part])
            parts += [part, mark]
            inside = not inside


def _read(text: str, quote: str) -> tuple[str, str]:
    source = Literals(text, quote)
    source.take("call:")
    name = checked_name(source.word())
    arguments = source.value()
    if source.peek() or not isinstance(arguments, dict):
        raise Malformed
    return name, write_json(arguments)


class Gemma4(CallFormat):
    """Gemma 4."""

    signs = (("<|tool_call>",),)
    begin, close, quote = "<|tool_call>", "<tool_call|>", '<|"|>'
    controls = (begin, close, quote)

    def __init__(self) -> None:
        self.group = Group(self.begin, "")

    def parser(self, tools: Tools) -> Parser:
        return GemmaReader(self)

    def layout(self, tools: Tools, least: int, most: int | None, content: Any = None) -> Any:
        calls = [self._call(tool) for tool in tools.values()]
        return None if None in calls else grouped(calls, least, most, self.group, content)

    def _call(self, tool: Tool) -> list[Any] | None:
        def pair(key: str, schema: dict[str, Any]) -> Any:
            if not is_word(key):
                return None
            if kinds_of(schema) == {"string"} and schema.keys() <= {"type", "description", "title", "default"}:
                return [f"{key}:{self.quote}", {"text": self.quote}]
            return [f"{key}:", {"json": schema, "name": tool.name, "strict": tool.strict}]
        if not is_word(tool.name):
            return None
        return pairs(f"{self.begin}call:{tool.name}{{", tool, pair, ",", "}" + self.close)


class FunctionGemma(Gemma4):
    """FunctionGemma."""

    signs = (("<start_function_call>",),)
    begin, close, quote = "<start_function_call>", "<end_function_call>", "<escape>"
    controls = (begin, close, quote)


class Gemma4Thinking(Tagged):
    """<|channel>thought ... <channel|>"""

    signs = (("<|channel>", "<channel|>"),)
    controls = ("<|channel>", "<channel|>")
    begin, ends, stop = "<|channel>thought\n", ("<channel|>",), "\n<channel|>"


CALLS.register("gemma4", Gemma4)
CALLS.register("functiongemma", FunctionGemma)
THINKING.register("gemma4", Gemma4Thinking)
