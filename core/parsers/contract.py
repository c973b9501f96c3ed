"""What a parser of replies is, the events that it gives, and the registries of the notations that models use.

A reply comes as text in pieces. A parser turns it into events, the same ones wherever it was cut: only the borders
between `Content`, `Reasoning` and `CallArguments` of one kind may move. It never fails: what is malformed is content.
"""
from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import msgspec

from ..registry import Registry


class Content(msgspec.Struct, frozen=True, tag=True):
    """Text for the user."""

    text: str


class Reasoning(msgspec.Struct, frozen=True, tag=True):
    """Text of the model's thinking."""

    text: str


class CallBegin(msgspec.Struct, frozen=True, tag=True):
    """A tool call begins. index: 0, 1, ... in one reply. id: unique, for the client's answer."""

    index: int
    id: str
    name: str


class CallArguments(msgspec.Struct, frozen=True, tag=True):
    """A piece of a call's arguments; all pieces of a call joined are a JSON object. Of a call that was cut by the limit
    of the output they are the beginning of one."""

    index: int
    text: str


class CallEnd(msgspec.Struct, frozen=True, tag=True):
    """A call is complete. One that the limit of the output cut has no end."""

    index: int


Event = Content | Reasoning | CallBegin | CallArguments | CallEnd


class Tool(msgspec.Struct, frozen=True):
    """A function that the model may call. parameters: a JSON Schema of an object. strict: calls must follow it."""

    name: str
    parameters: dict[str, Any]
    strict: bool = False


Tools = Mapping[str, Tool]  # by name, in the client's order


class Parser(ABC):
    """Reads one reply. Time is linear in the text, and what is held back is bounded."""

    thinking = False  # whether what comes next is reasoning

    @abstractmethod
    def feed(self, text: str) -> list[Event]:
        """The events that more text gives."""

    @abstractmethod
    def finish(self) -> list[Event]:
        """What was held back, now that no more comes."""


class Plain(Parser):
    """All is content."""

    def feed(self, text: str) -> list[Event]:
        return [Content(text)] if text else []

    def finish(self) -> list[Event]:
        return []


class CallFormat(ABC):
    """A notation of tool calls.

    signs: texts by which a chat template that uses it is known; all of one group must be there.
    controls: control tokens that the parser has to see in the text. single: chat templates refuse several calls in one
    message.
    """

    signs: tuple[tuple[str, ...], ...] = ()
    controls: tuple[str, ...] = ()
    single = False

    @abstractmethod
    def parser(self, tools: Tools) -> Parser:
        """For a reply that may call these."""

    def layout(self, tools: Tools, least: int, most: int | None, content: Any = None) -> Any:
        """How a reply of `least` to `most` calls is written, for the grammar kind "layout" of `core.grammar.layout`;
        None: these tools cannot be enforced in this notation. most None: as many as the model likes. least 0: there may
        be text before calls, or instead of them a reply of the layout `content`."""
        return None

    def bound_parser(self, tools: Tools) -> Parser:
        """For a reply that is held to `layout`: it may pass arguments on while they come."""
        return self.parser(tools)

    def example(self, name: str, arguments: str) -> str:
        """How a call is written, for models whose chat template does not say it. arguments: JSON."""
        return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'

    def call_id(self, index: int, name: str) -> str:
        """An id for the next call."""
        return "call_" + secrets.token_hex(12)

    def past_id(self, id: str) -> str:
        """What the chat template is given for the id of an earlier call, which may come from elsewhere."""
        return id


class Thinking(ABC):
    """A notation of reasoning.

    signs, controls: as for `CallFormat`. begin: what opens the reasoning, at the start of a reply. ends: texts of which
    each ends it. stop: what is written where it is cut short. always: every reply has one of `ends`.
    """

    signs: tuple[tuple[str, ...], ...] = ()
    controls: tuple[str, ...] = ()
    begin = ""
    ends: tuple[str, ...] = ()
    stop = ""
    always = False

    @abstractmethod
    def parser(self, opened: bool, rest: Parser, tools: Tools) -> Parser:
        """opened: the prompt ends inside the reasoning. rest: reads what comes after it. tools: what may be called,
        for a notation that has calls of its own."""


CALLS = Registry("tool parser", CallFormat, ("parser",), reserved=("auto", "none"))
THINKING = Registry("reasoning parser", Thinking, ("parser",), reserved=("auto", "none"))
