"""Notations of reasoning between two tags at the start of a reply."""
from __future__ import annotations

from collections.abc import Generator

from .contract import THINKING, Content, Event, Parser, Reasoning, Thinking, Tools
from .reader import MAX_BLANK, Malformed, Reader, Step


class TagReader(Reader):
    """Reasoning from an opening tag, which must come first, to a closing one; the rest is for another parser.

    White space around the tags is nobody's.
    """

    def __init__(self, begin: str, end: str, opened: bool):
        self._begin, self._end, self.thinking = begin, end, opened
        self._white = ""
        super().__init__()

    def read(self) -> Step:
        if self.thinking or (yield from self._opens()):
            self.thinking = True
            yield from self.blank()
            if (yield from self.match(self._begin)):  # some write once more what the prompt ends with
                yield from self.blank()
            yield from self.until(self._end)
            self.thinking = False
            yield from self.blank()
        while (yield from self.more()):
            self._out.append(Content(self._text[self._at:]))
            self._at = len(self._text)

    def _opens(self) -> Generator[None, None, bool]:
        """Whether the reply begins with reasoning."""
        self.hold(most=MAX_BLANK + len(self._begin))
        try:
            yield from self.blank()
            yield from self.need(self._begin)
        except Malformed:
            if held := self.release():
                self._out.append(Content(held))
            return False
        self.release()
        return True

    def take(self, text: str) -> None:
        text = self._white + text
        shown = max(len(text.rstrip()), len(text) - MAX_BLANK)
        self._white = text[shown:]
        if shown:
            self._out.append(Reasoning(text[:shown]))


class Pipe(Parser):
    """A parser of reasoning, whose content another one reads."""

    def __init__(self, first: Parser, rest: Parser):
        self._first, self._rest = first, rest

    @property
    def thinking(self) -> bool:
        return self._first.thinking

    def feed(self, text: str) -> list[Event]:
        return self._pass(self._first.feed(text))

    def finish(self) -> list[Event]:
        return self._pass(self._first.finish()) + self._rest.finish()

    def _pass(self, events: list[Event]) -> list[Event]:
        out: list[Event] = []
        for event in events:
            if isinstance(event, Content):
                out += self._rest.feed(event.text)
            else:
                out.append(event)
        return out


class Tagged(Thinking):
    """Reasoning between `begin` and the first of `ends`."""

    def parser(self, opened: bool, rest: Parser, tools: Tools) -> Parser:
        return Pipe(TagReader(self.begin, self.ends[0], opened), rest)


class ThinkTags(Tagged):
    """<think> ... </think>: Qwen, DeepSeek, GLM, Kimi, SmolLM and most others."""

    signs = (("</think>",),)
    controls = ("<think>", "</think>")
    begin, ends, stop = "<think>", ("</think>",), "\n</think>\n\n"


class Mistral(Tagged):
    """[THINK] ... [/THINK]: Magistral and Ministral."""

    signs = (("[/THINK]",),)
    controls = ("[THINK]", "[/THINK]")
    begin, ends, stop = "[THINK]", ("[/THINK]",), "[/THINK]"


class Cohere(Tagged):
    """<|START_THINKING|> ... <|END_THINKING|>: Command A and R7B."""

    signs = (("<|END_THINKING|>",),)
    controls = ("<|START_THINKING|>", "<|END_THINKING|>")
    begin, ends, stop = "<|START_THINKING|>", ("<|END_THINKING|>",), "<|END_THINKING|>"


class Apertus(Tagged):
    """<|inner_prefix|> ... <|inner_suffix|>: Apertus."""

    signs = (("<|inner_suffix|>",),)
    controls = ("<|inner_prefix|>", "<|inner_suffix|>")
    begin, ends, stop = "<|inner_prefix|>", ("<|inner_suffix|>",), "<|inner_suffix|>"


THINKING.register("think", ThinkTags)
THINKING.register("apertus", Apertus)
THINKING.register("cohere", Cohere)
THINKING.register("mistral", Mistral)
