"""Limits that hold before a request costs anything, and the reading of JSON bodies under them."""
from __future__ import annotations

import gc
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, NamedTuple

import msgspec
import numpy as np
from starlette.requests import Request

from ..errors import Overloaded, RequestError, shown

MAX_DEPTH = 100            # nesting of a JSON body
MAX_VALUES = 2_000_000     # values in a JSON body
MAX_KEYS = 250_000         # keys of all its objects: a new one takes as long to read as ten values
MAX_DIGITS = 400           # one after the other in a number: the time to read an integer grows with their square
MAX_BODIES = 16            # bodies of the largest size that are held at once
DRAINED = 4                # times the largest size: so much is thrown away before the answer, which is read after it
FREE_BODY = 65536          # bytes of a body that do not count for that: what a connection holds unread anyway
CHECKED_BODY = 16384       # bytes up to which a key that is there twice is looked for, and long numbers are not
MAX_HEADERS = 100          # header fields of a request
MAX_HEADER_BYTES = 65536   # names and values together
MAX_STOPS = 64             # stop strings of a request
MAX_STOP_CHARS = 1024      # in one stop string
MAX_STOP_IDS = 1024        # stop_token_ids of a request
MAX_BAD_WORDS = 128         # bad_words of a request
MAX_BAD_CHARS = 256         # in one of them
MAX_BAD_TOKENS = 64         # of one of them
MAX_ALLOWED = 2**19         # allowed_token_ids of a request
MAX_PROCESSORS = 8          # logits_processors of a request
MAX_PROCESSOR_ARGUMENTS = 4096  # characters of the arguments of one
MAX_BIAS = 1024            # logit_bias entries of a request
MAX_TEMPLATE_KWARGS = 32   # chat_template_kwargs of a request
MAX_TEXT = 1024            # characters of a short free text: cache_salt, rid, a template argument
MAX_SESSION = 256          # characters of a session_id
MAX_NEXT_WITHIN = 7 * 86400  # seconds until the next request of a session
MAX_PIN = 3600             # seconds that a session may be pinned
MAX_TTFT = 3600            # seconds in which a first token may be wanted
MAX_TOKENIZE = 2**20       # characters of a text for /tokenize
BROWSER = ("origin", "sec-fetch-site")  # headers of which a browser sends one at least with what it posts
UNSAID = ("", "application/x-www-form-urlencoded")  # media types of clients that were not asked for any

_STEPS = np.zeros(256, np.int8)  # what a character does to the depth of a JSON text
_STEPS[list(b"[{")], _STEPS[list(b"]}")] = 1, -1


class Structure(NamedTuple):
    """Of a JSON text: deepest nesting of arrays and objects, values (commas and opening brackets), keys, and whether a
    number has more than `MAX_DIGITS` digits in a row."""

    depth: int
    values: int
    keys: int
    long_number: bool


def structure(body: bytes) -> Structure:
    """What is outside of the strings of a JSON text, without parsing it."""
    text = np.frombuffer(body.replace(rb"\\", b"").replace(rb'\"', b""), np.uint8)
    outside = np.cumsum(text == ord('"'), dtype=np.uint8) % 2 == 0  # of strings; an overflow keeps the parity
    steps = _STEPS[text] * outside
    steps = steps[steps != 0]
    depth = steps.cumsum(dtype=np.int32).max(initial=0)
    commas, colons = (int(np.count_nonzero((text == ord(sign)) & outside)) for sign in ",:")
    return Structure(int(depth), int(np.count_nonzero(steps > 0)) + commas, colons, _many_digits(text, outside))


def _many_digits(text: np.ndarray, outside: np.ndarray | bool = True) -> bool:
    """Whether more than `MAX_DIGITS` digits follow each other. text: uint8 [n]. outside: those that count, bool [n]."""
    run, length = (text - ord("0") < 10) & outside, 1  # uint8 wraps around; where so many begin
    while length <= MAX_DIGITS:
        more = min(length, MAX_DIGITS + 1 - length)
        run = run[:-more] & run[more:]
        length += more
    return bool(run.any())


def check_structure(body: bytes, what: str = "the body", param: str | None = None) -> None:
    """Raise 400 for a JSON text that nests too deeply or holds too much to be parsed: reading it would hold up all
    others. what, param: its name, and the field that it came in."""
    brackets = body.count(b"[") + body.count(b"{")
    if (brackets <= MAX_DEPTH and brackets + body.count(b",") <= MAX_VALUES and body.count(b":") <= MAX_KEYS
            and (len(body) <= CHECKED_BODY or not _many_digits(np.frombuffer(body, np.uint8)))):
        return
    found = structure(body)
    for wrong, problem in (
            (found.depth > MAX_DEPTH, f"nests {found.depth} deep, more than the {MAX_DEPTH} allowed"),
            (found.values > MAX_VALUES, f"holds {found.values} values, more than the {MAX_VALUES} allowed"),
            (found.keys > MAX_KEYS, f"holds {found.keys} keys, more than the {MAX_KEYS} allowed"),
            (found.long_number, f"holds a number of more than the {MAX_DIGITS} digits allowed")):
        if wrong:
            raise RequestError(f"{what} {problem}", code="invalid_json", param=param)


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


def parse_object(body: bytes) -> dict[str, Any]:
    """A JSON object within the limits; raises 400 for anything else (bad UTF-8, lone surrogates, NaN, depth), and for
    a key that is there twice, if the body is a small one."""
    check_structure(body)
    try:
        with _no_collection():
            value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise RequestError(f"the body must be a JSON object, not {type(value).__name__}", code="invalid_json")
    if len(body) <= CHECKED_BODY:
        _UNIQUE.decode(body.decode())
    return value


def _check_unique(pairs: list[tuple[str, Any]]) -> None:
    """Raise 400 for an object that has a key twice: readers differ in which of the two counts."""
    keys: set[str] = set()
    for key, _ in pairs:
        if key in keys:
            raise RequestError(f"the body has {shown(key)} twice in one object", code="invalid_json")
        keys.add(key)


_UNIQUE = json.JSONDecoder(object_pairs_hook=_check_unique)


class Bodies:
    """Request bodies from their first byte until they have been used, and the bytes that they take up together.

    most: bytes of one; a larger one is answered 413. total: of all; what comes beyond that is answered 503. The first
    `FREE_BODY` bytes of each are not counted: the number of connections bounds them, and small requests pass whoever
    keeps large ones waiting.
    """

    def __init__(self, most: int):
        self.most, self.total, self.held = most, MAX_BODIES * most, 0

    @asynccontextmanager
    async def read_json(self, request: Request) -> AsyncIterator[bytes]:
        """The body of a request that says that it sends JSON; it is counted until the context ends.

        A JSON media type is demanded (415) so that a foreign web page cannot post here without asking the browser
        first. Clients of Ollama often say none, and `curl -d` says that it is a form: from what is no browser both
        are taken.
        """
        parts: list[bytes] = []
        try:
            await self._receive(request, parts)
            media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            vague = media in UNSAID and not any(name in request.headers for name in BROWSER)
            if not vague and media != "application/json" and not media.endswith("+json"):
                said = f"is {media!r}" if media else "is missing"
                raise RequestError(f"Content-Type {said}; send application/json", status=415)
            parts[:] = [b"".join(parts)]
            yield parts[0]
        finally:
            self._release(parts)

    async def _receive(self, request: Request, parts: list[bytes]) -> None:
        """Fill `parts`. What is too large is thrown away before it is refused: most clients send all before they read,
        and would find the connection reset. But not when it is far too large, or the client waits for a go-ahead."""
        declared = request.headers.get("content-length", "")
        announced = int(declared[:20]) if declared.isdecimal() else 0
        if announced > (self.most if "expect" in request.headers else DRAINED * self.most):
            raise too_large(str(announced), self.most)
        size = 0
        async for part in request.stream():
            size += len(part)
            if max(size, announced) > self.most:
                self._release(parts)
                if size > DRAINED * self.most:
                    break
                continue
            more = max(0, min(len(part), size - FREE_BODY))
            if self.held + more > self.total:
                raise Overloaded(f"the request bodies that are being received hold {self.held} bytes, more than "
                                 f"{self.total} are not taken at once", status=503)
            self.held += more
            parts.append(part)
        if max(size, announced) > self.most:
            raise too_large(f"at least {max(size, announced)}", self.most)

    def _release(self, parts: list[bytes]) -> None:
        self.held -= max(0, sum(map(len, parts)) - FREE_BODY)
        parts.clear()
