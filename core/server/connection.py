"""One client's connection, bounded before there is a request (its number, its silence, the size of its head) and while
there is an answer (what the client does not take)."""
from __future__ import annotations

import asyncio
import logging
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from ..errors import Overloaded, RequestError

MAX_CONNECTIONS = 4096
SPARE_FILES = 100    # descriptors that are not connections
MAX_HEAD = 65536     # bytes of an unfinished head, and of anything else that does not end
PATIENCE_S = 30.0    # for a whole head, and for each next piece of a body
STALL_S = 60.0       # for a client to take some of what waits to be sent to it

log = logging.getLogger(__name__)


def most_connections() -> int:
    """How many may be open at once: `MAX_CONNECTIONS`, or what the system's limit on open files leaves."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return MAX_CONNECTIONS
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if files == resource.RLIM_INFINITY else max(1, min(MAX_CONNECTIONS, files - SPARE_FILES))


class Connection(HttpToolsProtocol):
    """uvicorn's protocol, which by itself waits for ever and takes heads of any size.

    A step is a complete head, a piece of a body or its end. What comes without a step is counted in bytes, and while
    the server waits for the client the next step must come in time. When more waits to be sent than the transport's
    limit, nothing is added until the client has taken it, which it must go on doing.
    """

    def __init__(self, *arguments: Any, **more: Any):
        super().__init__(*arguments, **more)
        self._stepped = False
        self._bytes = 0  # received since the last step
        self._deadline: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._unsent = 0  # bytes that waited to be sent when the client last took some

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        limit = most_connections()
        if len(self.connections) > limit:
            self.refuse(Overloaded(f"{limit} connections are open, which is the limit", status=503))
        else:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._stop_stall()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_stall()

    def resume_writing(self) -> None:
        self._stop_stall()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        self._stepped = False
        super().data_received(data)
        if self.transport.is_closing():
            return
        self._bytes = 0 if self._stepped else self._bytes + len(data)
        if self._bytes > MAX_HEAD:
            self.refuse(RequestError(f"the head of the request has more than the {MAX_HEAD} bytes allowed", status=431))
        elif self._stepped or self._deadline is None:
            self._wait()

    def on_headers_complete(self) -> None:
        self._stepped = True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._stepped = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._stepped = True
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self.refuse(RequestError(msg))

    def refuse(self, error: RequestError) -> None:
        """Say why, unless that would fall into an answer that has begun, and close."""
        from .errors import encode_error  # not before the socket is open: it brings much along
        cycle = self.cycle
        if not self.pipeline and (cycle is None or cycle.response_complete or not cycle.response_started):
            body = encode_error(error)
            fields = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[error.status] + fields + body)
        self.transport.close()

    def _wait(self) -> None:
        """Start to wait for the next step, unless it is for the server to act."""
        self._stop_waiting()
        if self.cycle is None or self.cycle.more_body or self.cycle.response_complete:
            self._deadline = self.loop.call_later(PATIENCE_S, self._too_late)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _watch_stall(self) -> None:
        self._unsent = self.transport.get_write_buffer_size()
        self._stall = self.loop.call_later(STALL_S, self._stalled)

    def _stop_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _stalled(self) -> None:
        """The end of a client that reads nothing, and with it of its request; a slow one is waited for again."""
        if self.transport.get_write_buffer_size() < self._unsent:
            self._watch_stall()
        else:
            log.info("a client with %d bytes to read has read none for %g s: closed", self._unsent, STALL_S)
            self.transport.abort()

    def _too_late(self) -> None:
        if self.flow.read_paused:  # the application has not taken what has come
            self._wait()
        elif self._bytes or self.cycle is not None and self.cycle.more_body:
            self.refuse(RequestError(f"the rest of the request did not come within {PATIENCE_S:g} s", status=408))
        else:
            self.transport.close()
