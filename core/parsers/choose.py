"""Which notation a model uses, read off its chat template."""
from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..config import Config
from ..files import read_template
from ..registry import Registry
from . import (  # noqa: F401  (the modules register notations)
    CALL_ORDER,
    THINKING_ORDER,
    bare,
    gemma,
    harmony,
    hermes,
    listed,
    pythonic,
    tagged,
    thinking,
)
from .contract import CALLS, THINKING, CallFormat, Thinking

GENERIC = "hermes"  # for templates that know no tools: the server explains this notation to the model


def parsers_of(config: Config, own: str | None) -> Parsers:
    """As the settings have it. own: the model's own chat template."""
    settings = config.model
    return Parsers(read_template(settings.chat_template) or own, settings.tool_parser, settings.reasoning_parser)


class Choice(NamedTuple):
    """A parser's name, "none" for none, and why."""

    name: str
    why: str


class Parsers:
    """What reads a model's replies.

    calls, thinking: the choices. format, reasoning: their implementations, None for none. renders_tools, renders_calls:
    whether the chat template shows tools to the model, and earlier calls.
    """

    def __init__(self, template: str | None, tool_parser: str = "auto", reasoning_parser: str = "auto"):
        self.template = template or ""
        self.renders_tools = template is None or "tools" in template
        self.renders_calls = template is None or "tool_calls" in template
        self.calls = self._choose(CALLS, CALL_ORDER, template, tool_parser)
        if self.calls.name == "none" and tool_parser == "auto":
            self.calls = Choice(GENERIC, "the chat template shows no sign of a known notation")
        if not self.renders_tools and self.calls.name != "none":
            why = f"{self.calls.why} and has no tools: the system message describes them"
            self.calls = Choice(self.calls.name, why)
        self.thinking = self._choose(THINKING, THINKING_ORDER, template, reasoning_parser)
        self.format: CallFormat | None = None if self.calls.name == "none" else CALLS.create(self.calls.name)
        self.reasoning: Thinking | None = None if self.thinking.name == "none" else THINKING.create(self.thinking.name)

    @staticmethod
    def _choose(registry: Registry, order: Iterable[str], template: str | None, asked: str) -> Choice:
        if asked != "auto":
            return Choice(asked, "set")
        for name in order:
            for group in registry.create(name).signs:
                if template is not None and all(sign in template for sign in group):
                    return Choice(name, f"the chat template has {' and '.join(group)}")
        return Choice("none", "the chat template has no sign of one" if template else "there is no chat template")
