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
BODY_RATE = 2**16    # bytes of a body that must come in a second, on average, after that
MAX_UNREAD = 2**26   # bytes of a body that are thrown away so that its sender comes to read why
STALL_S = 60.0       # for a client to take some of what waits to be sent to it
LEAST_TAKEN = 2**14  # bytes; all when less is waiting
LAST_S = 1.5         # the same when the server ends; before uvicorn would cancel what still answers
DIRECT = "isthmus.direct"

log = logging.getLogger(__name__)


def most_connections() -> int:
    """How many may be open at once: `MAX_CONNECTIONS`, or what the system's limit on open files leaves."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return MAX_CONNECTIONS
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if files == resource.RLIM_INFINITY else max(1, min(MAX_CONNECTIONS, files - SPARE_FILES))


class Direct:
    """The ASGI extension `DIRECT`: parts of the body of an answer that has begun, without a message for each. Whoever
    stands between and changes bodies must take it out of the scope. cycle: uvicorn's, of the request."""

    def __init__(self, cycle: Any):
        self._cycle, self._flow, self._transport = cycle, cycle.flow, cycle.transport

    @property
    def open(self) -> bool:
        """Whether `write` may be called: the answer has begun and not ended, and the client takes what it is sent."""
        cycle = self._cycle
        return bool(cycle.chunked_encoding and not self._flow.write_paused and not cycle.response_complete
                    and not cycle.disconnected and not self._transport.is_closing())

    def write(self, data: bytes) -> None:
        """Send a part, which must not be empty."""
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))


class Connection(HttpToolsProtocol):
    """uvicorn's protocol, which by itself waits for ever and takes heads of any size.

    A step is a complete head, a piece of a body or its end. What comes without a step is counted in bytes, and while
    the server waits for the client the next step must come in time; so must a body as a whole. When more waits to be
    sent than the transport's limit, nothing is added until the client has taken it, which it must go on doing, also
    when its answer is complete.
    """

    def __init__(self, *arguments: Any, **more: Any):
        super().__init__(*arguments, **more)
        self._stepped = False
        self._bytes = 0  # received since the last step
        self._in_body, self._body, self._began = False, 0, 0.0  # of the last request: bytes so far, and since when
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
        if self.cycle is not None and self.cycle.response_complete:
            self._watch_stall()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_stall()

    def shutdown(self) -> None:
        super().shutdown()
        self.loop.call_later(LAST_S, self.transport.abort)

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
        self._stepped = self._in_body = True
        self._body, self._began = 0, self.loop.time()
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:
            self.scope["extensions"] = {DIRECT: Direct(self.cycle)}

    def on_body(self, body: bytes) -> None:
        self._stepped = True
        self._body += len(body)
        super().on_body(body)
        if self.cycle.response_complete and self._body > MAX_UNREAD:
            self.transport.close()

    def on_message_complete(self) -> None:
        self._stepped, self._in_body = True, False
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
        self._leave()

    def _leave(self) -> None:
        self.transport.close()
        self._watch_stall()

    def _wait(self) -> None:
        """Start to wait for the next step, unless it is for the server to act."""
        self._stop_waiting()
        patience = PATIENCE_S
        if self._in_body:
            whole = self._began + PATIENCE_S + self._body / BODY_RATE - self.loop.time()
            patience = min(patience, max(0.0, whole))
        if self.cycle is None or self._in_body or self.cycle.response_complete:
            self._deadline = self.loop.call_later(patience, self._too_late)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _watch_stall(self) -> None:
        self._stop_stall()
        self._unsent = self.transport.get_write_buffer_size()
        if self._unsent:
            self._stall = self.loop.call_later(STALL_S, self._stalled)

    def _stop_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _stalled(self) -> None:
        """The end of a client that reads next to nothing, and with it of its request; a slow one is waited for."""
        taken = self._unsent - self.transport.get_write_buffer_size()
        if taken >= min(LEAST_TAKEN, self._unsent):
            self._watch_stall()
        else:
            log.info("a client with %d bytes to read has read %d in %g s: closed", self._unsent, taken, STALL_S)
            self.transport.abort()

    def _too_late(self) -> None:
        if self.flow.read_paused:  # the application has not taken what has come
            self._body, self._began = 0, self.loop.time()
            self._wait()
        elif self._bytes or self._in_body and not self.cycle.response_complete:
            self.refuse(RequestError(f"the rest of the request did not come in time: {PATIENCE_S:g} s may pass, and a "
                                     f"body must come with {BODY_RATE} bytes/s", status=408))
        else:
            self._leave()
