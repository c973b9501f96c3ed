"""The content of a message as it grows: blocks, and the events that tell of them.

Source: Anthropic's description of its streams (message_start, content_block_start, ..., message_stop).
"""
from __future__ import annotations

from typing import Any

from msgspec import Struct

from ...parsers.contract import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning
from ...parsers.json_text import as_object
from ..stream import encode_json, typed_event

DELTA = "content_block_delta"


class TextDelta(Struct, tag="text_delta", tag_field="type"):
    """More of a text."""

    text: str


class ThinkingDelta(Struct, tag="thinking_delta", tag_field="type"):
    """More of the thinking."""

    thinking: str


class InputDelta(Struct, tag="input_json_delta", tag_field="type"):
    """More of a call's input, as the text of its JSON."""

    partial_json: str


class BlockDelta(Struct):
    """`content_block_delta`."""

    index: int
    delta: TextDelta | ThinkingDelta | InputDelta
    type: str = DELTA


class Blocks:
    """One message's content. done: the blocks that are complete."""

    def __init__(self) -> None:
        self.done: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._text: list[str] = []

    def add(self, events: list[Event]) -> bytes:
        """More of the reply; its events in this API's form."""
        data = b""
        for event in events:
            if isinstance(event, Content):
                data += self._in("text", text="") + self._delta(TextDelta(event.text), event.text)
            elif isinstance(event, Reasoning):
                data += self._in("thinking", thinking="", signature="")
                data += self._delta(ThinkingDelta(event.text), event.text)
            elif isinstance(event, CallBegin):
                data += self.close() + self._begin("tool_use", id=event.id, name=event.name, input={})
            elif isinstance(event, CallArguments):
                data += self._delta(InputDelta(event.text), event.text)
            elif isinstance(event, CallEnd):
                data += self.close()
        return data

    def close(self) -> bytes:
        """The end of the block that is being written, if there is one."""
        block = self._open
        if block is None:
            return b""
        text, self._open = "".join(self._text), None
        # Of a call that the limit cut the input is empty, and the message says max_tokens.
        block.update({"input": as_object(text)} if block["type"] == "tool_use" else {block["type"]: text})
        self.done.append(block)
        return typed_event("content_block_stop", {"type": "content_block_stop", "index": len(self.done) - 1})

    def _in(self, kind: str, **fields: Any) -> bytes:
        """What leads to a block of this kind."""
        if self._open is not None and self._open["type"] == kind:
            return b""
        return self.close() + self._begin(kind, **fields)

    def _begin(self, kind: str, **fields: Any) -> bytes:
        self._open, self._text = {"type": kind, **fields}, []
        return typed_event("content_block_start", {"type": "content_block_start", "index": len(self.done),
                                                   "content_block": self._open})

    def _delta(self, delta: TextDelta | ThinkingDelta | InputDelta, text: str) -> bytes:
        self._text.append(text)
        return b"event: content_block_delta\ndata: %b\n\n" % encode_json(BlockDelta(len(self.done), delta))
