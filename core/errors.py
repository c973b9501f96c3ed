"""Errors that core raises on purpose. Every message names the value at fault and the way out."""
from __future__ import annotations

import reprlib
from collections.abc import Mapping
from itertools import islice
from typing import Any

SHOWN = 100  # characters of a value in a message
LONG = 1000  # of the beginning and of the end of a message about a file
SHORT = reprlib.Repr()
SHORT.maxlevel, SHORT.maxstring, SHORT.maxother, SHORT.maxlong = 3, SHOWN, SHOWN, SHOWN


def shown(value: Any) -> str:
    """A value for a message: only the beginning of what is long or deep, which is also all that is looked at."""
    if isinstance(value, Mapping):
        value = dict(islice(value.items(), SHORT.maxdict + 1))
    try:
        return cut(SHORT.repr(value), SHOWN)
    except ValueError:  # Python itself writes out no more than 4300 digits
        return "a number of thousands of digits"


def cut(text: str, size: int) -> str:
    """The text, or its first `size` characters and three dots."""
    return text if len(text) <= size else text[:size] + "..."


def said(error: BaseException) -> str:
    """What an exception says, whatever its class makes of that; "" when it says nothing that can be shown."""
    try:
        return printable(str(error))
    except Exception:  # of its own __str__
        return ""


def printable(text: str) -> str:
    """The text, lines kept, with "?" for what steers a terminal, is not seen or has no encoding."""
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)


def encodable(text: str) -> str:
    """The text, with U+FFFD for each half of a character (a lone surrogate), which no encoding has."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class IsthmusError(Exception):
    """Base of every deliberate error."""


class RequestError(IsthmusError, ValueError):
    """A request that cannot be served as asked: the server answers with `status` and OpenAI's error shape.

    `param` names the offending field, `code` is OpenAI's word for the kind (`context_length_exceeded`, ...). Both, and
    the message, can be encoded, whatever they quote.
    """

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None,
                 kind: str = "invalid_request_error", retry_after: float | None = None):
        message, param = encodable(message), param and encodable(param)
        super().__init__(message)
        self.message, self.status, self.param, self.code, self.kind = message, status, param, code, kind
        self.retry_after = retry_after


class Overloaded(RequestError):
    """The queue is full (429) or the server is draining or loading (503); `retry_after` is in seconds."""

    def __init__(self, message: str, *, status: int = 429, retry_after: float = 1.0, code: str = "overloaded"):
        super().__init__(message, status=status, code=code, kind="overloaded_error", retry_after=retry_after)


class EngineDead(IsthmusError):
    """The process that computes is gone; every waiting request ends with this."""


class EngineStopped(EngineDead):
    """The engine was stopped on purpose; a request that had not ended may be sent again, elsewhere or later."""


class EngineRestarting(EngineDead):
    """The process that computed is gone and started anew: whoever waited may send the request again soon."""


class CheckpointError(IsthmusError, ValueError):
    """A checkpoint that is missing, truncated, hostile or of an unknown kind. What its message quotes is printable, and
    of what is long (the names in a file are as long as it likes) the beginning and the end are there."""

    def __init__(self, message: str):
        if len(message) > 2 * LONG:
            message = f"{message[:LONG]} ... {message[-LONG:]}"
        super().__init__(printable(message))


class ConfigError(IsthmusError, ValueError):
    """A setting that is unknown, out of range or in conflict with another."""
