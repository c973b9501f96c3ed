"""Limits that hold before a request costs anything, and the reading of JSON bodies under them."""
from __future__ import annotations

import re
from typing import Any

import msgspec
import numpy as np
from starlette.requests import Request

from ..errors import RequestError

MAX_DEPTH = 100            # nesting of a JSON body
MAX_HEADERS = 100          # header fields of a request
MAX_HEADER_BYTES = 65536   # names and values together
MAX_STOPS = 64             # stop strings of a request
MAX_STOP_CHARS = 1024      # in one stop string
MAX_STOP_IDS = 1024        # stop_token_ids of a request
MAX_BIAS = 1024            # logit_bias entries of a request
MAX_TEMPLATE_KWARGS = 32   # chat_template_kwargs of a request
MAX_TEXT = 1024            # characters of a short free text: cache_salt, rid, a template argument

_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
_NOT_BRACKETS = bytes(sorted(set(range(256)) - set(b"[]{}")))


def nesting_depth(body: bytes, limit: int) -> int:
    """Deepest nesting of arrays and objects in a JSON text, without parsing it; 0 when it cannot exceed `limit`."""
    if body.count(b"[") + body.count(b"{") <= limit:
        return 0
    brackets = np.frombuffer(_STRING.sub(b"", body).translate(None, _NOT_BRACKETS), np.uint8)
    steps = np.where((brackets == ord("[")) | (brackets == ord("{")), 1, -1)
    return int(steps.cumsum(dtype=np.int64).max(initial=0))


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
    depth = nesting_depth(body, MAX_DEPTH)
    if depth > MAX_DEPTH:
        raise RequestError(f"the body nests {depth} deep, more than the {MAX_DEPTH} allowed", code="invalid_json")
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise RequestError(f"the body must be a JSON object, not {type(value).__name__}", code="invalid_json")
    return value


async def read_object(request: Request, limit: int, required: bool = True) -> dict[str, Any]:
    """The JSON object that a request carries; {} for an empty body when none is required.

    A JSON media type is demanded (415) so that a foreign web page cannot post here without asking the browser first.
    """
    body = await read_body(request, limit)
    if not body and not required:
        return {}
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json" and not media.endswith("+json"):
        raise RequestError(f"Content-Type is {media or 'missing'!r}; send application/json", status=415)
    return parse_object(body)
