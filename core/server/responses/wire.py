"""The response object and the events of its stream. A field left UNSET is not sent.

Source: OpenAI's description (Response, ResponseStreamEvent and their relatives).
"""
from __future__ import annotations

from typing import Any

from msgspec import UNSET, Struct, UnsetType

from ...errors import RequestError
from ..errors import error_code
from ..stream import typed_event


class TextDelta(Struct):
    """`response.output_text.delta`, and with no `logprobs` the deltas of reasoning."""

    type: str
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    delta: str
    logprobs: list[Any] | UnsetType = UNSET


class ArgumentsDelta(Struct):
    """`response.function_call_arguments.delta`."""

    type: str
    sequence_number: int
    item_id: str
    output_index: int
    delta: str


class Events:
    """Numbers the events of one stream."""

    def __init__(self) -> None:
        self.next = 0

    def _number(self) -> int:
        self.next += 1
        return self.next - 1

    def of(self, kind: str, **fields: Any) -> bytes:
        """An event with these fields."""
        return typed_event(kind, {"type": kind, "sequence_number": self._number(), **fields})

    def error(self, error: RequestError) -> bytes:
        """The event of an error."""
        return error_event(error, self._number())

    def text(self, kind: str, item: str, index: int, delta: str, logprobs: list[Any] | UnsetType = UNSET) -> bytes:
        """A piece of an item's text."""
        return typed_event(kind, TextDelta(kind, self._number(), item, index, 0, delta, logprobs))

    def arguments(self, item: str, index: int, delta: str) -> bytes:
        """A piece of a call's arguments."""
        kind = "response.function_call_arguments.delta"
        return typed_event(kind, ArgumentsDelta(kind, self._number(), item, index, delta))


def usage(prompt: int, cached: int, output: int, reasoning: int) -> dict[str, Any]:
    """`usage`. Nothing is charged for what is written to the cache, so that none is counted."""
    return {"input_tokens": prompt, "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": output, "output_tokens_details": {"reasoning_tokens": reasoning},
            "total_tokens": prompt + output}


def error_event(error: RequestError, number: int) -> bytes:
    """The event that tells of an error."""
    return typed_event("error", {"type": "error", "sequence_number": number, "code": error_code(error),
                                 "message": error.message, "param": error.param})


def failure(code: str, message: str) -> dict[str, str]:
    """`error` of a failed response."""
    return {"code": code, "message": message}
