"""What every request passes first: header limits, the API key, and an id that comes back as `x-request-id`."""
from __future__ import annotations

import hmac
import re
import time
import uuid
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import RequestError
from .errors import error_response
from .limits import MAX_HEADER_BYTES, MAX_HEADERS
from .request_log import log_request

# Without a key: load balancers and process supervisors have none, and a browser asks for a page before it knows one.
OPEN_PATHS = frozenset({"/health", "/ready", "/dashboard"})
_REQUEST_ID = re.compile(rb"[!-~]{1,128}")


def split_keys(setting: str | None) -> tuple[bytes, ...]:
    """The accepted keys of `--api-key`: one, or several separated by commas."""
    return tuple(key.strip().encode() for key in (setting or "").split(",") if key.strip())


def sent_keys(headers: list[tuple[bytes, bytes]]) -> list[bytes]:
    """Keys in `Authorization: Bearer` and `x-api-key` fields, as the bytes that were sent."""
    keys = []
    for name, value in headers:
        if name == b"x-api-key":
            keys.append(value.strip())
        elif name == b"authorization":
            scheme, _, key = value.strip().partition(b" ")
            keys.append(key.strip() if scheme.lower() == b"bearer" else b"")
    return keys


def authorized(headers: list[tuple[bytes, bytes]], keys: tuple[bytes, ...]) -> bool:
    """Is every key that was sent, and at least one, an accepted one? Time does not tell how much of a key is right."""
    sent = sent_keys(headers)
    verdicts = [any([hmac.compare_digest(key, good) for good in keys]) for key in sent]
    return bool(verdicts) and all(verdicts)


class Gate:
    """ASGI middleware. `on_status` is told the status of each answer."""

    def __init__(self, app: ASGIApp, keys: tuple[bytes, ...], on_status: Callable[[int], None]):
        self.app, self.keys, self.on_status = app, keys, on_status

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = scope["headers"]
        request_id = next((v for k, v in headers if k == b"x-request-id" and _REQUEST_ID.fullmatch(v)), None)
        request_id = request_id or uuid.uuid4().hex.encode()
        began, status = time.perf_counter(), None

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
                self.on_status(message["status"])
            await send(message)

        error = self._refusal(scope)
        app = self.app if error is None else error_response(error, scope)
        try:
            await app(scope, receive, send_with_id)
        finally:
            log_request(scope, request_id.decode("ascii"), status, began)

    def _refusal(self, scope: Scope) -> RequestError | None:
        headers = scope["headers"]
        size = sum(len(name) + len(value) for name, value in headers)
        if len(headers) > MAX_HEADERS or size > MAX_HEADER_BYTES:
            return RequestError(f"{len(headers)} header fields with {size} bytes; at most {MAX_HEADERS} and "
                                f"{MAX_HEADER_BYTES} are allowed", status=431)
        if self.keys and scope["path"] not in OPEN_PATHS and not authorized(headers, self.keys):
            return RequestError("the API key is missing or wrong; send it as `Authorization: Bearer KEY`", status=401,
                                kind="authentication_error")
        return None
