"""The way of all calls that generate: body -> what is asked -> engine requests -> one answer, or events as they come.

All that may be long on this way is done by `core.server.threads`: checking a large body, rendering a chat template,
tokenizing a long text, building a large answer. What is left to the event loop is short.
"""
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ..messages import TextOutput
from ..processes.backlog import output_size
from .context import Server
from .generation import Choice, Generation
from .naming import Names, renamed
from .protocol import GenerateRequest, RequestFields
from .request_log import log, plain
from .stream import OPENAI, EventStream, json_response, unless_hung_up
from .terms import Caller

MAX_WARNED = 1000  # different fields


class GenerationAnswer(ABC):
    """Turns the outputs of a generation into the response or its events. framing: what its streams have around them.
    names: of fields in the body, for errors."""

    framing = OPENAI

    def __init__(self, server: Server, generation: Generation, asked: RequestFields | GenerateRequest, names: Names):
        self.server, self.generation, self.asked, self.names = server, generation, asked, names
        self._stream: EventStream | None = None

    @abstractmethod
    def whole(self, choices: list[Choice]) -> Any:
        """The buffered response, as JSON values."""

    @abstractmethod
    def chunk(self, index: int, output: TextOutput) -> bytes:
        """The events that an output of choice `index` gives, which may be none: b""."""

    def last(self) -> bytes:
        """The events that follow when all choices have ended."""
        return b""

    async def done(self) -> None:
        """What is to be done when the answer is complete, before the client has all of it."""
        return None

    async def events(self) -> AsyncIterator[bytes]:
        """The stream without what its framing ends it with."""
        with renamed(self.names):
            async with aclosing(self.generation.outputs(self._take)) as outputs:
                async for index, output in outputs:
                    if output.prompt_logprobs is None:
                        data = self.chunk(index, output)
                    else:
                        data = await self.server.threads.run(partial(self.chunk, index, output), output_size(output))
                    if data:
                        yield data
            data = self.last()
            await self.done()
            if data:
                yield data

    def _take(self, output: TextOutput) -> bool:
        """Send what an output gives at once, if that is possible: nobody is woken for it."""
        stream = self._stream
        if stream is None or not stream.open:
            return False
        if data := self.chunk(0, output):
            stream.write(data)
        return True

    async def deliver(self, request: Request, headers: dict[str, str]) -> Response:
        """Run the generation, and send what it gives."""
        if self.asked.stream:
            self._stream = EventStream(self.events(), self.server.config.server.sse_ping, headers, self.framing)
            return self._stream
        with renamed(self.names):
            choices = await unless_hung_up(request, self.generation.collect())
        response = await self.server.threads.run(lambda: json_response(self.whole(choices)),
                                                 sum(choice.size for choice in choices))
        await self.done()
        response.headers.update(headers)
        return response


async def respond(server: Server, request: Request, start: Callable[[Server, Caller, bytes], GenerationAnswer],
                  in_thread: bool = False) -> Response:
    """Answer a request that generates. `start` checks the body and prepares the engine requests; nothing runs yet.
    `in_thread`: it may take long for a small body too."""
    server.require_ready()
    answer = await server.read(request, partial(start, server, server.caller(request)), in_thread)
    request.state.generation = answer.generation
    headers = tell_ignored(server, request, answer.asked.ignored)
    return await answer.deliver(request, headers)


def tell_ignored(server: Server, request: Request, ignored: dict[str, str]) -> dict[str, str]:
    """A header that names fields which were probably mistyped; the log has them too, and a warning the first time."""
    if not ignored:
        return {}
    request.state.ignored = tuple(ignored)
    for name in ignored.keys() - server.warned if len(server.warned) < MAX_WARNED else ():
        server.warned.add(name)
        log.warning("%s: the unknown field %s is ignored; did the client mean %s?", request.url.path, plain(name),
                    ignored[name])
    return {"x-isthmus-ignored": plain(",".join(ignored))}
