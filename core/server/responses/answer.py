"""`POST /v1/responses`: a chat call as a response, whole, as a stream, or in the background."""
from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from ...errors import RequestError
from ...messages import Logprobs, TextOutput
from ..as_chat import RenderedAnswer, as_chat, fitting, placed
from ..chat_call import ChatCall, prepare
from ..context import Server
from ..errors import as_request_error
from ..generation import Choice, new_id
from ..logprobs import chat_logprobs
from ..naming import Names, as_sent, renamed
from ..protocol import ChatRequest
from ..protocol import read as read_body
from ..request_log import log
from ..stream import RESPONSES, EventStream, encode_json, json_response
from ..terms import Caller
from ..validate import invalid
from .body import LOGPROBS, ResponsesRequest, check, check_tool_choice, functions, response_format, shown_tools
from .builder import Builder
from .history import Kept, References, history
from .items import Item, chat_messages, input_items
from .store import Row
from .wire import failure, usage

NAMES = ((r"response_format\.json_schema", "text.format"), ("response_format", "text.format"),
         (r"tool_choice\.function", "tool_choice"),
         ("reasoning_effort", "reasoning.effort"), ("max_(completion_)?tokens", "max_output_tokens"),
         ("messages$", "input"))


def start(kept: Kept, server: Server, caller: Caller, body: bytes) -> ResponseAnswer:
    """Check everything and prepare the engine request; nothing runs yet."""
    asked = read_body(ResponsesRequest, body)
    check(asked)
    if kept.store is None and (asked.store or asked.background):
        raise invalid("store" if asked.store else "background", "needs a store of responses, and this server has none "
                      "(--response-store off)")
    id = new_id("resp").replace("-", "_")
    turns = read_turns(kept, asked, id, server.bodies.most)
    with renamed(turns.names):
        call = fitting(lambda messages: prepare(server, caller, chat_request(asked, messages), id), turns.messages,
                       asked.truncation == "auto")
    return ResponseAnswer(server, call, asked, kept, turns,
                          len(body) + len(encode_json(turns.messages)) if asked.background else 0)


class Turns(NamedTuple):
    """A conversation. items: the request's own. names: of fields of its chat request, for errors."""

    items: list[Item]
    messages: list[dict[str, Any]]
    names: Names


def read_turns(kept: Kept, asked: ResponsesRequest, id: str, most: int) -> Turns:
    """What was said before and is said now. id: of the response. most: bytes of what was said before."""
    numbers = itertools.count()
    items = input_items(asked.input, lambda prefix: f"{prefix}_{id.removeprefix('resp_')}i{next(numbers):02x}",
                        References(kept, most).find)
    before = history(kept, asked.previous_response_id, most) if asked.previous_response_id else []
    messages, begins = chat_messages(before + items)
    places = [f"input[{i - len(before)}]" if i >= len(before) else "previous_response_id" for i in begins]
    if not messages and not asked.instructions:
        raise invalid("input", "holds nothing that the model can read: reasoning that is empty or encrypted is left "
                      "out; add a message")
    if asked.instructions:
        messages.insert(0, {"role": "system", "content": asked.instructions})
        places.insert(0, "instructions")
    tools = [function.place for function in functions(asked.tools)]
    own = [] if asked.text and asked.text.format or not asked.response_format else ["response_format"]
    limit = [("max_tokens", "max_output_tokens")] if asked.max_output_tokens else as_sent(asked, *(
        [] if "max_tokens" in asked.sent else ["max_tokens"]))
    return Turns(items, messages, (*placed("messages", places), *limit, *as_sent(asked, *own),
                                   (r"tools\[(\d+)\]\.function", lambda match: tools[int(match[1])]), *NAMES))


def chat_request(asked: ResponsesRequest, messages: list[dict[str, Any]]) -> ChatRequest:
    """The chat request of these messages."""
    check_tool_choice(asked.tool_choice)
    scored = LOGPROBS in (asked.include or ())
    return as_chat(
        asked, messages, max_tokens=asked.max_output_tokens or asked.max_tokens,
        tools=[function.for_chat() for function in functions(asked.tools)] or None,
        tool_choice=asked.tool_choice, parallel_tool_calls=asked.parallel_tool_calls,
        response_format=response_format(asked) or asked.response_format,
        reasoning_effort=asked.reasoning and asked.reasoning.effort, logprobs=scored or None,
        top_logprobs=asked.top_logprobs, chat_template_kwargs=asked.chat_template_kwargs)


def response_object(server: Server, call: ChatCall, asked: ResponsesRequest, stored: bool) -> Item:
    """The response before anything was generated."""
    params = call.generation.prompts[0].params
    given = {"user": asked.user, "safety_identifier": asked.safety_identifier,
             "prompt_cache_key": asked.prompt_cache_key}
    return {
        "id": call.generation.id, "object": "response", "created_at": int(time.time()), "status": "in_progress",
        "background": bool(asked.background), "error": None, "incomplete_details": None,
        "instructions": asked.instructions, "max_output_tokens": asked.max_output_tokens,
        "max_tool_calls": asked.max_tool_calls, "model": call.generation.model, "output": [],
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "previous_response_id": asked.previous_response_id,
        "reasoning": {"effort": asked.reasoning and asked.reasoning.effort, "summary": None}, "service_tier": "default",
        "store": stored, "temperature": params.temperature, "top_p": params.top_p,
        "text": {"format": (asked.text and asked.text.format) or {"type": "text"}},
        "tool_choice": asked.tool_choice or "auto", "tools": shown_tools(asked.tools),
        "top_logprobs": asked.top_logprobs or 0, "truncation": asked.truncation or "disabled",
        "metadata": asked.metadata or {}, **{key: value for key, value in given.items() if value is not None}}


class ResponseAnswer(RenderedAnswer):
    """A response as it grows. items: the request's own. builder: what the client is told. size: bytes that one in the
    background keeps of its request, and of the conversation that it goes on with."""

    framing = RESPONSES

    def __init__(self, server: Server, call: ChatCall, asked: ResponsesRequest, kept: Kept, turns: Turns,
                 size: int):
        super().__init__(server, call, asked, turns.names)
        self.kept, self.items, self.size = kept, turns.items, size
        self.stored = kept.store is not None and asked.store is not False
        spaces = {function.name: (function.space, function.tool["name"]) for function in functions(asked.tools)
                  if function.space}
        self.builder = Builder(response_object(server, call, asked, self.stored), spaces)

    @property
    def response(self) -> Item:
        return self.builder.response

    def whole(self, choices: list[Choice]) -> Item:
        scored = iter(choices[0].scored)
        outputs = [*choices[0].tokens, b""]
        for tokens, events in zip(outputs, self.call.read_events(choices)[0], strict=True):
            _, values = next(scored, (b"", None)) if tokens else (b"", None)
            self.builder.add(events, self._scores(tokens, values))
        self._end(self.call.replies[0].finish)
        return self.response

    def _scores(self, tokens: bytes, values: Logprobs | None) -> list[Any]:
        return chat_logprobs(self.server.text, tokens, values) if tokens and values is not None else []

    def begin(self, *states: str) -> bytes:
        """The first events, if they were not sent yet."""
        return b"" if self.builder.events.next else b"".join(map(self.builder.state, ("created", *states)))

    def chunk(self, index: int, output: TextOutput) -> bytes:
        events = self.call.add(index, output)
        return self.begin("in_progress") + self.builder.add(events, self._scores(output.tokens, output.logprobs))

    def last(self) -> bytes:
        return self._end(self.call.replies[0].finish)

    def _end(self, finish: str | None) -> bytes:
        if finish == "length":
            return self.builder.end("incomplete", incomplete_details={"reason": "max_output_tokens"},
                                    usage=self._usage())
        return self.builder.end("completed", completed_at=int(time.time()), usage=self._usage())

    def _usage(self) -> dict[str, Any]:
        numbers, reasoning = self.call.usage(), sum(reply.reasoning_tokens for reply in self.call.replies)
        return usage(numbers.prompt_tokens, numbers.prompt_tokens_details.cached_tokens, numbers.completion_tokens,
                     reasoning)

    async def done(self) -> None:
        """A response that cannot be kept is an answer all the same."""
        if self.stored:
            await self.keep(None)

    async def deliver(self, request: Request, headers: dict[str, str]) -> Response:
        if not self.asked.background:
            return await super().deliver(request, headers)
        run = self.server.responses.background.start(self)
        if self.asked.stream:
            return EventStream(run.follow(-1), self.server.config.server.sse_ping, headers, self.framing)
        response = json_response(self.response)
        response.headers.update(headers)
        return response

    async def keep(self, events: bytes | None) -> None:
        """Put it into the store as it is now."""
        try:
            kept = await self.kept.store.run(lambda: self.kept.store.put(self.kept.owner, self._row(events)))
        except Exception as error:
            log.error("the store of responses: %s", error)
        else:
            if not kept:
                log.warning("the response %s is larger than the store of responses", self.response["id"])

    def _row(self, events: bytes | None) -> Row:
        return Row(self.response["id"], self.asked.previous_response_id, self.response["status"],
                   encode_json(self.response), encode_json(self.items), events)

    async def events(self) -> AsyncIterator[bytes]:
        try:
            async with aclosing(super().events()) as events:
                async for data in events:
                    yield data
        except Exception as error:
            known = as_request_error(error)
            if self.builder.events.next:
                yield self.fail(known)
            raise known from None

    def fail(self, error: RequestError) -> bytes:
        """The events of an error after the stream has begun."""
        code = {429: "rate_limit_exceeded", 400: "invalid_prompt"}.get(error.status, "server_error")
        data = self.builder.events.error(error)
        return data + self.builder.end("failed", error=failure(code, error.message), usage=self._usage())
