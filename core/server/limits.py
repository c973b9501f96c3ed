"""Limits that hold before a request costs anything, and the reading of JSON bodies under them."""
from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
from starlette.requests import Request

from ..errors import RequestError

MAX_DEPTH = 100            # nesting of a JSON body
MAX_VALUES = 2_000_000     # values in a JSON body
MAX_HEADERS = 100          # header fields of a request
MAX_HEADER_BYTES = 65536   # names and values together
MAX_STOPS = 64             # stop strings of a request
MAX_STOP_CHARS = 1024      # in one stop string
MAX_STOP_IDS = 1024        # stop_token_ids of a request
MAX_BIAS = 1024            # logit_bias entries of a request
MAX_TEMPLATE_KWARGS = 32   # chat_template_kwargs of a request
MAX_TEXT = 1024            # characters of a short free text: cache_salt, rid, a template argument
MAX_TOKENIZE = 2**22       # characters of a text for /tokenize

_STEPS = np.zeros(256, np.int8)  # what a character does to the depth of a JSON text
_STEPS[list(b"[{")], _STEPS[list(b"]}")] = 1, -1


def structure(body: bytes) -> tuple[int, int]:
    """Deepest nesting of arrays and objects in a JSON text, and the number of values in it (commas and opening
    brackets), without parsing it."""
    text = np.frombuffer(body.replace(rb"\\", b"").replace(rb'\"', b""), np.uint8)
    outside = np.cumsum(text == ord('"'), dtype=np.uint8) % 2 == 0  # of strings; an overflow keeps the parity
    steps = _STEPS[text] * outside
    steps = steps[steps != 0]
    depth = steps.cumsum(dtype=np.int32).max(initial=0)
    return int(depth), int(np.count_nonzero(steps > 0) + np.count_nonzero((text == ord(",")) & outside))


def check_structure(body: bytes) -> None:
    """Raise 400 for a JSON text that nests too deeply or holds too many values to be parsed."""
    brackets = body.count(b"[") + body.count(b"{")
    if brackets <= MAX_DEPTH and brackets + body.count(b",") <= MAX_VALUES:
        return
    depth, values = structure(body)
    if depth > MAX_DEPTH:
        raise RequestError(f"the body nests {depth} deep, more than the {MAX_DEPTH} allowed", code="invalid_json")
    if values > MAX_VALUES:
        raise RequestError(f"the body holds {values} values, more than the {MAX_VALUES} allowed", code="invalid_json")


@contextmanager
def _no_collection() -> Iterator[None]:
    """JSON has no cycles, but collecting garbage would go through all of a large body again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def too_large(size: str, limit: int) -> RequestError:
    return RequestError(f"the body has {size} bytes, more than the {limit} allowed; see --max-body", status=413)


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body; raises 413 as soon as its declared or its real size is over `limit` bytes."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > limit:
        raise too_large(declared[:20], limit)
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise too_large(f"at least {size}", limit)
        chunks.append(chunk)
    return b"".join(chunks)


def parse_object(body: bytes) -> dict[str, Any]:
    """A JSON object within the limits; raises 400 for anything else (bad UTF-8, lone surrogates, NaN, depth)."""
    check_structure(body)
    try:
        with _no_collection():
            value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise RequestError(f"the body must be a JSON object, not {type(value).__name__}", code="invalid_json")
    return value


async def read_json(request: Request, limit: int) -> bytes:
    """The body of a request that says that it sends JSON.

    A JSON media type is demanded (415) so that a foreign web page cannot post here without asking the browser first.
    """
    body = await read_body(request, limit)
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json" and not media.endswith("+json"):
        raise RequestError(f"Content-Type is {media or 'missing'!r}; send application/json", status=415)
    return body
