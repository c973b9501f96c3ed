"""`POST /v1/messages` and `/v1/messages/count_tokens`: a chat call in Anthropic's form."""
from __future__ import annotations

from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ...messages import TextOutput
from ..answer import respond
from ..as_chat import RenderedAnswer, as_chat, as_far_as_fits, placed
from ..chat_call import ChatCall, encode_prompt, prepare
from ..context import Server
from ..generation import Choice, new_id
from ..naming import Names, as_sent, renamed
from ..protocol import ChatRequest
from ..protocol import read as read_body
from ..stream import ANTHROPIC, json_response, typed_event
from ..terms import Caller
from ..tools import read_toolset
from .blocks import Blocks
from .body import (
    CountRequest,
    MessagesRequest,
    chat_messages,
    chat_tool_choice,
    chat_tools,
    check,
    response_format,
)

STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
NAMES = ((r"response_format\.json_schema", "output_config.format"), ("response_format", "output_config.format"),
         (r"tools\[(\d+)\]\.function\.parameters", r"tools[\1].input_schema"),
         (r"tools\[(\d+)\]\.function", r"tools[\1]"), (r"tool_choice\.function", "tool_choice"),
         ("stop$", "stop_sequences"), ("max_completion_tokens", "max_tokens"),
         ("thinking_token_budget", "thinking.budget_tokens"), ("reasoning_effort", "output_config.effort"))


async def messages(server: Server, request: Request) -> Response:
    """Answer a conversation, whole or as a stream."""
    return await respond(server, request, start, in_thread=True)


def start(server: Server, caller: Caller, body: bytes) -> MessageAnswer:
    """Check everything and prepare the engine request; nothing runs yet."""
    asked = read_body(MessagesRequest, body)
    chat, names = chat_request(asked, max_tokens=asked.max_tokens)
    id = new_id("msg").replace("-", "_")
    with renamed(names):
        call = as_far_as_fits(lambda chat: prepare(server, caller, chat, id), chat)
    return MessageAnswer(server, call, asked, names)


async def count_tokens(server: Server, request: Request) -> Response:
    """How many tokens the same body has as a prompt."""
    server.require_ready()
    return await server.read(request, partial(_count, server), always=True, text=True)


def _count(server: Server, body: bytes) -> Response:
    asked = read_body(CountRequest, body)
    server.require_model(asked.model)
    chat, names = chat_request(asked)
    with renamed(names):
        ids = encode_prompt(server, chat, read_toolset(chat))
    return json_response({"input_tokens": len(ids)})


def chat_request(asked: CountRequest, **fields: Any) -> tuple[ChatRequest, Names]:
    """The chat request, and names for errors about it. A conversation that ends with the assistant is continued where
    it ends."""
    check(asked)
    found, places = chat_messages(asked)
    last = found[-1]
    resume = last["role"] == "assistant" and not last.get("tool_calls")
    chat = as_chat(
        asked, found, tools=chat_tools(asked.tools), **chat_tool_choice(asked.tool_choice),
        response_format=response_format(asked), stop=asked.stop_sequences or asked.stop,
        continue_final_message=resume or None, chat_template_kwargs=asked.chat_template_kwargs,
        reasoning_effort=asked.output_config and asked.output_config.effort, **thinking(asked), **fields)
    return chat, (*placed("messages", places), *_own_names(asked), *NAMES)


def _own_names(asked: CountRequest) -> Names:
    """Of what may be said in several fields: the one in which it was."""
    schema = asked.output_config and asked.output_config.format
    names = [*as_sent(asked, *([] if asked.stop_sequences or not asked.stop else ["stop"]),
                      *([] if schema or asked.output_format or not asked.response_format else ["response_format"]))]
    if asked.output_format and not schema:
        names.append((r"response_format(\.json_schema)?", "output_format"))
    return names


def thinking(asked: CountRequest) -> dict[str, Any]:
    """`thinking` as fields of a chat request. Nothing said leaves it to the model's template."""
    wish = asked.thinking
    if wish is None:
        return {}
    return {"enable_thinking": wish.type != "disabled",
            "thinking_token_budget": wish.budget_tokens if wish.type == "enabled" else None}


class MessageAnswer(RenderedAnswer):
    """A message, whole or as its events: start, blocks one after another, reason and usage, stop."""

    framing = ANTHROPIC

    def __init__(self, server: Server, call: ChatCall, asked: MessagesRequest, names: Names):
        super().__init__(server, call, asked, names)
        self.blocks = Blocks()
        self._begun = False

    def whole(self, choices: list[Choice]) -> dict[str, Any]:
        self.blocks.add(self.read_events(choices))
        self.blocks.close()
        return {**self._message(), "content": self.blocks.done, **self._end(), "usage": self._usage()}

    def chunk(self, index: int, output: TextOutput) -> bytes:
        events = self.call.add(index, output)
        data = b""
        if not self._begun:
            self._begun = True
            data = typed_event("message_start", {"type": "message_start", "message": {
                **self._message(), "usage": {**self._usage(), "output_tokens": 0}}}) + self.framing.ping
        return data + self.blocks.add(events)

    def last(self) -> bytes:
        data = self.blocks.close() + typed_event("message_delta", {
            "type": "message_delta", "delta": self._end(), "usage": self._usage()})
        return data + typed_event("message_stop", {"type": "message_stop"})

    def _message(self) -> dict[str, Any]:
        return {"id": self.generation.id, "type": "message", "role": "assistant", "model": self.generation.model,
                "content": [], "stop_reason": None, "stop_sequence": None}

    def _end(self) -> dict[str, Any]:
        """Why it ended."""
        reply = self.call.replies[0]
        matched = reply.choice.matched()
        sequence = matched if isinstance(matched, str) else None
        reason = STOP_REASONS.get(reply.finish, "end_turn" if sequence is None else "stop_sequence")
        if reason == "max_tokens" and reply.choice.completion < self.asked.max_tokens:
            reason = "model_context_window_exceeded"
        return {"stop_reason": reason, "stop_sequence": sequence if reason == "stop_sequence" else None}

    def _usage(self) -> dict[str, int]:
        """Here what came from the cache is no part of `input_tokens`; nothing is charged for what is written to it."""
        numbers = self.call.usage()
        cached = numbers.prompt_tokens_details.cached_tokens
        return {"input_tokens": numbers.prompt_tokens - cached, "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": cached, "output_tokens": numbers.completion_tokens}


ROUTES = (
    ("POST", "/v1/messages", messages),
    ("POST", "/v1/messages/count_tokens", count_tokens),
)
