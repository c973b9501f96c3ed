"""What every request passes first: header limits, access, and an id that comes back as `x-request-id`."""
from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable, Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import RequestError
from .access import Access
from .errors import error_response, speaks_anthropic
from .limits import MAX_HEADER_BYTES, MAX_HEADERS

OnEnd = Callable[[Scope, str, int | None, float], None]
_REQUEST_ID = re.compile(rb"[!-~]{1,128}")


class Gate:
    """ASGI middleware. `on_status` is told the status of each answer, each of `on_end` what has ended: scope, id,
    status (None if there was no answer) and when it began, by `time.perf_counter`."""

    def __init__(self, app: ASGIApp, access: Access, on_status: Callable[[int], None], on_end: Sequence[OnEnd] = ()):
        self.app, self.access, self.on_status, self.on_end = app, access, on_status, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = scope["headers"]
        request_id = next((v for k, v in headers if k == b"x-request-id" and _REQUEST_ID.fullmatch(v)), None)
        request_id = request_id or uuid.uuid4().hex.encode()
        scope.setdefault("state", {})["request_id"] = request_id.decode("ascii")
        ids = [(name, request_id) for name in ((b"x-request-id", b"request-id") if speaks_anthropic(scope) else
                                               (b"x-request-id",))]
        began, status = time.perf_counter(), None

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *ids]
                self.on_status(message["status"])
            await send(message)

        error = self._refusal(scope)
        app = self.app if error is None else error_response(error, scope)
        try:
            await app(scope, receive, send_with_id)
        finally:
            for tell in self.on_end:
                tell(scope, request_id.decode("ascii"), status, began)

    def _refusal(self, scope: Scope) -> RequestError | None:
        headers = scope["headers"]
        size = sum(len(name) + len(value) for name, value in headers)
        if len(headers) > MAX_HEADERS or size > MAX_HEADER_BYTES:
            return RequestError(f"{len(headers)} header fields with {size} bytes; at most {MAX_HEADERS} and "
                                f"{MAX_HEADER_BYTES} are allowed", status=431)
        return self.access.refusal(scope)
