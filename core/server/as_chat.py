"""What other APIs need to be a chat: their fields carried over, and events rendered."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

from ..errors import RequestError
from ..parsers.contract import Event
from .answer import GenerationAnswer
from .chat_call import ChatCall
from .context import Server
from .generation import Choice
from .naming import Names
from .protocol import ChatRequest, RequestFields

Messages = list[dict[str, Any]]


def as_chat(asked: RequestFields, messages: Messages, **fields: Any) -> ChatRequest:
    """A chat request with the fields that `asked` shares with it, and these; None = not sent."""
    shared = {name: getattr(asked, name) for name in RequestFields.model_fields}
    sent = {name: value for name, value in {**shared, **fields}.items() if value is not None}
    return ChatRequest.model_validate({**sent, "messages": messages})


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

    def __init__(self, server: Server, call: ChatCall, asked: Any, names: Names):
        super().__init__(server, call.generation, asked, names)
        self.call = call

    def read_events(self, choices: list[Choice]) -> list[Event]:
        """All events of the reply that was collected."""
        return list(chain.from_iterable(self.call.read_events(choices)[0]))
