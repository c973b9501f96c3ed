"""Harmony, the notation of gpt-oss: channels for thinking, for calls and for the answer."""
from __future__ import annotations

import re
from collections.abc import Generator
from typing import Any

from . import contract
from .contract import CALLS, THINKING, CallArguments, CallEnd, Content, Parser, Reasoning, Tools
from .hermes import parse_json, written
from .json_text import JsonScan
from .layout import CallFormat, Group, Written, json_layout
from .reader import MAX_BLANK, CallReader, Malformed, Step

CHANNEL, MESSAGE, START, END = "<|channel|>", "<|message|>", "<|start|>", "<|end|>"
CALL, RETURN, CONSTRAIN = "<|call|>", "<|return|>", "<|constrain|>"
BORDERS = (START, CHANNEL, END, CALL, RETURN)
_RECIPIENT = re.compile(r"\bto=functions\.([^\s<|]{1,256})")


class HarmonyReader(CallReader):
    """analysis is reasoning, calls go to functions.f, all else is content.

    eager: arguments are passed on while they come.
    """

    def __init__(self, format: contract.CallFormat, eager: bool = False):
        self._eager, self._kind = eager, Content
        super().__init__(format)

    def read(self) -> Step:
        mark = yield from self.until(*BORDERS)  # a reply without channels is content
        recipient = ""
        while mark:
            if mark in (START, CHANNEL):
                mark, recipient = yield from self._message(mark, recipient if mark == CHANNEL else "")
            else:
                recipient = ""
                mark = yield from self._between()
        self.thinking = False
        self.end()

    def _between(self) -> Generator[None, None, str]:
        """What stands between two messages is nobody's, unless it is text."""
        self._kind = Content
        return (yield from self.until(*BORDERS))

    def _message(self, mark: str, recipient: str) -> Generator[None, None, tuple[str, str]]:
        """One message, from its header on: what ended it, and the recipient in what of a header was read without a
        message; `recipient`: the one in what was read before."""
        self.hold(mark)
        try:
            text, end = yield from self.capture(MESSAGE, *BORDERS)
        except Malformed:
            if self._ended and self._at >= len(self._text):  # a header that was cut
                self.release()
                return "", ""
            self.give_back()
            return (yield from self._between()), ""
        self.release()
        found = _RECIPIENT.search(text)
        recipient = recipient or (found[1] if found else "")
        if end != MESSAGE:
            return end, recipient
        if recipient:
            return (yield from self._call(recipient)), ""
        self.thinking = mark == CHANNEL and text.strip().startswith("analysis")
        self._kind = Reasoning if self.thinking else Content
        self._flush()
        mark = yield from self.until(*BORDERS)
        self._flush()
        self.thinking = False
        self._kind = Content
        return mark, ""

    def _call(self, name: str) -> Generator[None, None, str]:
        """The arguments of a call, and what ended them."""
        if self._eager:
            scan, index = JsonScan(), self.begin(name)
            while not scan.complete and not scan.bad and (yield from self.more()):
                if part := self._pull(scan.feed(self._text, self._at)):
                    self._out.append(CallArguments(index, part))
            if scan.complete:
                self._out.append(CallEnd(index))
            return (yield from self._between())
        self.hold()
        try:
            yield from self.blank()
            self.call(name, written(parse_json((yield from self.json()))))
            yield from self.blank()
        except Malformed:
            self.give_back()
        return (yield from self._between())

    def take(self, text: str) -> None:
        text = self._white + text
        shown = max(len(text.rstrip()), len(text) - MAX_BLANK)
        self._white = text[shown:]
        if shown:
            self._out.append(self._kind(text[:shown]))

    def _flush(self) -> None:
        """White space at the border of two messages is nobody's."""
        self._white = ""


class HarmonyCalls(CallFormat):
    """gpt-oss."""

    signs = ((CHANNEL, MESSAGE),)
    controls = (CHANNEL, MESSAGE, START, END, CALL, RETURN, CONSTRAIN)
    written = Written(f"{CHANNEL}commentary to=functions.", f" {CONSTRAIN}json{MESSAGE}", "")
    group = Group("", "")

    def parser(self, tools: Tools) -> Parser:
        return HarmonyReader(self)

    def bound_parser(self, tools: Tools) -> Parser:
        return HarmonyReader(self, eager=True)

    def layout(self, tools: Tools, least: int, most: int | None, content: Any = None) -> Any:
        """One call, after any messages of thinking: the model's turn ends with it."""
        thoughts = {"many": [{"any": [f"{CHANNEL}analysis{MESSAGE}", f"{CHANNEL}commentary{MESSAGE}"]}, {"text": END},
                             f"{START}assistant"], "between": "", "least": 0, "most": None}
        call = json_layout(self.written, tools, 1, 1, Group("", ""))
        if least:
            return [thoughts, call]
        return [thoughts, {"any": [call, [f"{CHANNEL}final{MESSAGE}", {"plain": ""} if content is None else content]]}]


class Harmony(contract.Thinking):
    """gpt-oss: reads calls too, as they are channels."""

    signs = ((CHANNEL, MESSAGE),)
    controls = HarmonyCalls.controls
    begin = f"{CHANNEL}analysis{MESSAGE}"
    ends = (f"{CHANNEL}final{MESSAGE}", f"{CHANNEL}final {CONSTRAIN}json{MESSAGE}")
    always = True
    stop = f"{END}{START}assistant{CHANNEL}final{MESSAGE}"

    def parser(self, opened: bool, rest: Parser, tools: Tools) -> Parser:
        return rest if isinstance(rest, HarmonyReader) else HarmonyReader(HarmonyCalls())


CALLS.register("harmony", HarmonyCalls)
THINKING.register("harmony", Harmony)
