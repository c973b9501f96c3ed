"""What other APIs need to be a chat: their fields carried over, faults told in the caller's words, events rendered."""
from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from itertools import chain
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ..errors import RequestError
from ..parsers.contract import Event
from .answer import GenerationAnswer
from .chat_call import ChatCall
from .context import Server
from .generation import Choice
from .protocol import ChatRequest, RequestFields

# Pattern of a field's path from its beginning -> what the caller calls that, as `re.sub` takes it.
Names = Sequence[tuple[str, str | Callable[[re.Match[str]], str]]]
Messages = list[dict[str, Any]]


def as_chat(asked: RequestFields, messages: Messages, **fields: Any) -> ChatRequest:
    """A chat request with the fields that `asked` shares with it, and these; None = not sent."""
    shared = {name: getattr(asked, name) for name in RequestFields.model_fields}
    sent = {name: value for name, value in {**shared, **fields}.items() if value is not None}
    return ChatRequest.model_validate({**sent, "messages": messages})


def new_name(path: str, names: Names) -> str:
    """What the caller calls a field of a chat request."""
    for pattern, name in names:
        if re.match(pattern, path):
            return re.sub(pattern, name, path, count=1)
    return path


@contextmanager
def renamed(names: Names) -> Iterator[None]:
    """Raises errors about fields of a chat request with the caller's names of them."""
    try:
        yield
    except RequestError as error:
        if error.param and (name := new_name(error.param, names)) != error.param:
            if error.message.startswith(error.param):
                error.message = name + error.message.removeprefix(error.param)
                error.args = (error.message,)
            error.param = name
        raise


def placed(field: str, places: Sequence[str]) -> Names:
    """Names for the entries of a list, each of which was made of what is at one of these places of the body."""
    return [(rf"{field}\[(\d+)\]", lambda match: places[int(match[1])])]


def as_far_as_fits(prepare: Callable[[ChatRequest], ChatCall], chat: ChatRequest) -> ChatCall:
    """What `prepare` makes of a request, whose limit of the output is only a limit: where less has room, less is it."""
    try:
        return prepare(chat)
    except RequestError as error:
        if error.code != "context_length_exceeded" or chat.max_tokens is None:
            raise
    return prepare(chat.model_copy(update={"max_tokens": None}))


def fitting(prepare: Callable[[Messages], ChatCall], messages: Messages, cut: bool) -> ChatCall:
    """What `prepare` makes of a conversation; with `cut`, without its oldest turns when it would be too long, as few as
    will do. What a system says at the beginning is kept, and a turn begins with a user's message."""
    try:
        return prepare(messages)
    except RequestError as error:
        if not cut or error.code != "context_length_exceeded":
            raise
        too_long = error
    head = next((i for i, message in enumerate(messages) if message["role"] not in ("system", "developer")), 0)
    starts = [i for i, message in enumerate(messages) if message["role"] == "user" and i > head]
    least, most, call = 0, len(starts), None
    while least < most:
        middle = (least + most) // 2
        try:
            call = prepare(messages[:head] + messages[starts[middle]:])
            most = middle
        except RequestError as error:
            if error.code != "context_length_exceeded":
                raise
            least = middle + 1
    if call is None:
        raise too_long
    return call


class RenderedAnswer(GenerationAnswer):
    """A chat call in another API's form. asked: that API's body. names: of fields of the chat request in it."""

    names: Names = ()

    def __init__(self, server: Server, call: ChatCall, asked: Any):
        super().__init__(server, call.generation, asked)
        self.call = call

    def read_events(self, choices: list[Choice]) -> list[Event]:
        """All events of the reply that was collected."""
        return list(chain.from_iterable(self.call.read_events(choices)[0]))

    async def events(self) -> AsyncIterator[bytes]:
        with renamed(self.names):
            async with aclosing(super().events()) as events:
                async for data in events:
                    yield data

    async def deliver(self, request: Request, headers: dict[str, str]) -> Response:
        with renamed(self.names):
            return await super().deliver(request, headers)
