"""`POST /v1/chat/completions`: the events of a chat call in OpenAI's form."""
from __future__ import annotations

import time
from typing import Any

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from ..messages import TextOutput, unpack_ids
from ..parsers.contract import CallArguments, CallBegin, Content, Event, Reasoning
from .answer import GenerationAnswer, respond
from .chat_call import ChatCall, Reply, prepare
from .context import Server
from .generation import Choice, new_id, wants_usage
from .logprobs import chat_logprobs
from .naming import as_sent, renamed
from .protocol import ChatRequest, read
from .stream import JsonList, Mold, event
from .terms import Caller
from .wire import (
    Answer,
    CalledFunction,
    ChatChoice,
    ChatLogprobs,
    ChunkChoice,
    Delta,
    FunctionDelta,
    Message,
    MessageCall,
    ToolCallDelta,
    Usage,
)


async def chat_completions(server: Server, request: Request) -> Response:
    """Answer a conversation, whole or as a stream."""
    return await respond(server, request, start, in_thread=True)


def start(server: Server, caller: Caller, body: bytes) -> ChatAnswer:
    """Check everything and prepare the engine requests; nothing runs yet."""
    asked = read(ChatRequest, body)
    with renamed(as_sent(asked)):
        return ChatAnswer(server, prepare(server, caller, asked, new_id("chatcmpl")))


def message(reply: Reply, asked: ChatRequest) -> Message:
    """A complete reply. Its content is null where it has calls or reasoning only."""
    reasoning = reply.reasoning if asked.include_reasoning is not False else ""
    calls = [MessageCall(call.id, CalledFunction(call.name, call.arguments)) for call in reply.calls]
    content = reply.content or None if calls or reply.reasoning else reply.content
    return Message(content, reasoning_content=reasoning or UNSET, reasoning=reasoning or UNSET,
                   tool_calls=calls or UNSET)


def delta(one: Event, asked: ChatRequest) -> Delta | None:
    """What an event adds to a message; None for nothing."""
    if isinstance(one, Content):
        return Delta(content=one.text)
    if isinstance(one, Reasoning):
        return None if asked.include_reasoning is False else Delta(reasoning_content=one.text, reasoning=one.text)
    if isinstance(one, CallBegin):
        return Delta(tool_calls=[ToolCallDelta(one.index, FunctionDelta("", one.name), one.id, "function")])
    if isinstance(one, CallArguments):
        return Delta(tool_calls=[ToolCallDelta(one.index, FunctionDelta(one.text))])
    return None


class ChatAnswer(GenerationAnswer):
    """A chat completion, or its chunks: role, what events add, one finish per choice and, if asked for, the usage."""

    def __init__(self, server: Server, call: ChatCall):
        super().__init__(server, call.generation, call.asked, as_sent(call.asked))
        self.call, self.created = call, int(time.time())
        self._begun: set[int] = set()
        self._molds: dict[int, Mold] = {}
        options = self.asked.stream_options
        self._steady = not (self.asked.logprobs or self.asked.return_token_ids
                            or options is not None and options.continuous_usage_stats)

    def whole(self, choices: list[Choice]) -> Answer:
        answers = [self._choice(i, reply) for i, reply in enumerate(self.call.read(choices))]
        prompt_ids = self.generation.prompts[0].ids.tolist() if self.asked.return_token_ids else UNSET
        return Answer(self.generation.id, "chat.completion", self.created, self.generation.model, answers,
                      self.call.usage(), prompt_ids)

    def _choice(self, index: int, reply: Reply) -> ChatChoice:
        choice, logprobs = reply.choice, None
        if self.asked.logprobs:
            content = JsonList()  # a large answer would be a million objects at once
            for tokens, values in choice.scored:
                content.extend(chat_logprobs(self.server.text, tokens, values))
            logprobs = ChatLogprobs(content.value())
        ids = unpack_ids(b"".join(choice.tokens)).tolist() if self.asked.return_token_ids else UNSET
        return ChatChoice(index, message(reply, self.asked), logprobs, reply.finish, _matched(choice), ids)

    def chunk(self, index: int, output: TextOutput) -> bytes:
        events = self.call.add(index, output)
        if self._steady and len(events) == 1 and type(events[0]) is Content and output.finish is None:
            if (mold := self._molds.get(index)) is not None:
                return mold(events[0].text)
            if index in self._begun:
                self._molds[index] = Mold(self._chunk(ChunkChoice(index, Delta(content=""))), b'"delta":{"content":')
        data = b""
        if index not in self._begun:
            data = self._chunk(ChunkChoice(index, Delta(role="assistant", content="")), first=not self._begun)
            self._begun.add(index)
        data += self._added(index, output, events)
        if output.finish is not None:
            reply = self.call.replies[index]
            data += self._chunk(ChunkChoice(index, Delta(), reply.finish, stop_reason=_matched(reply.choice)))
        return data

    def last(self) -> bytes:
        if not wants_usage(self.asked.stream_options):
            return b""
        return event(Answer(self.generation.id, "chat.completion.chunk", self.created, self.generation.model, [],
                            self.call.usage()))

    def _added(self, index: int, output: TextOutput, events: list[Event]) -> bytes:
        """The chunks with what an output adds, its tokens and their scores in the first. Nothing for an output that
        only holds a part of a character or of a call."""
        logprobs: ChatLogprobs | UnsetType = UNSET
        ids: Any = UNSET
        if self.asked.logprobs and output.logprobs is not None and output.tokens:
            logprobs = ChatLogprobs(chat_logprobs(self.server.text, output.tokens, output.logprobs))
        if self.asked.return_token_ids and output.tokens:
            ids = unpack_ids(output.tokens).tolist()
        deltas = [made for made in (delta(one, self.asked) for one in events) if made is not None]
        if not deltas and logprobs is UNSET and ids is UNSET:
            return b""
        first, *rest = deltas or [Delta(content="")]
        return b"".join([self._chunk(ChunkChoice(index, first, logprobs=logprobs, token_ids=ids)),
                         *(self._chunk(ChunkChoice(index, each)) for each in rest)])

    def _chunk(self, choice: ChunkChoice, first: bool = False) -> bytes:
        prompt_ids = UNSET
        if first and self.asked.return_token_ids:
            prompt_ids = self.generation.prompts[0].ids.tolist()
        return event(Answer(self.generation.id, "chat.completion.chunk", self.created, self.generation.model, [choice],
                            self._usage(), prompt_ids))

    def _usage(self) -> Usage | None | UnsetType:
        """`usage` of a chunk that has choices: OpenAI sends null there when the last chunk will have it."""
        options = self.asked.stream_options
        if options is not None and options.continuous_usage_stats:
            return self.call.usage()
        return None if wants_usage(options) else UNSET


def _matched(choice: Choice) -> str | int | UnsetType:
    matched = choice.matched()
    return UNSET if matched is None else matched
