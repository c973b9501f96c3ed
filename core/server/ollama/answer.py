"""`/api/chat` and `/api/generate`: a chat call, or a raw prompt, in Ollama's form. Streams are lines of JSON."""
from __future__ import annotations

import re
import time
from abc import abstractmethod
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from ...messages import TextOutput, unpack_ids
from ...parsers.contract import CallEnd, Content, Event, Plain, Reasoning
from ...parsers.json_text import as_object
from ..answer import respond
from ..as_chat import RenderedAnswer, as_chat, as_far_as_fits, fitting
from ..chat_call import ChatCall, Reply, prepare, wanted_logprobs
from ..context import Server
from ..generation import Choice, Generation, Prompt, new_id
from ..logprobs import chat_logprobs
from ..naming import Names, as_sent, renamed
from ..protocol import ChatRequest
from ..protocol import read as read_body
from ..stream import LINES, JsonList, encode_json
from ..terms import Caller
from ..validate import check_ids, check_size, output_limit, sampling_params
from .body import (
    AskFields,
    ChatBody,
    GenerateBody,
    chat_messages,
    check_generate,
    plain_name,
    request_fields,
    response_format,
    thinking,
)

NAMES: Names = (
    (r"response_format(\.json_schema\.schema)?", "format"), ("max_(completion_)?tokens", "options.num_predict"),
    ("repetition_penalty", "options.repeat_penalty"), ("reasoning_effort", "think"),
    (r"(temperature|top_p|top_k|min_p|seed|stop|presence_penalty|frequency_penalty)$", r"options.\1"))
S = 10**9  # nanoseconds

AnyBody = TypeVar("AnyBody", bound=AskFields)


async def chat(server: Server, request: Request) -> Response:
    """Continue a conversation."""
    return await respond(server, request, partial(_start, ChatBody, _start_chat), in_thread=True)


async def generate(server: Server, request: Request) -> Response:
    """Answer one prompt."""
    return await respond(server, request, partial(_start, GenerateBody, _start_generate), in_thread=True)


def _start(kind: type[AnyBody], prepare_call: Callable[[Server, Caller, AnyBody], ChatCall | None], server: Server,
           caller: Caller, body: bytes) -> Lines | LoadAnswer:
    began, asked = time.perf_counter(), read_body(kind, body)
    names = (*as_sent(asked), *NAMES)
    with renamed(names):
        server.require_model(plain_name(asked.model))
        call = prepare_call(server, caller, asked)
    form = ChatLines if isinstance(asked, ChatBody) else GenerateLines
    return LoadAnswer(asked) if call is None else form(server, call, asked, names, began)


def _start_chat(server: Server, caller: Caller, asked: ChatBody) -> ChatCall | None:
    if not asked.messages:
        return None
    make = partial(_chat_request, asked, tools=asked.tools or None)
    return fitting(lambda messages: _prepare(server, caller, make(messages)), chat_messages(asked.messages),
                   bool(asked.truncate))


def _start_generate(server: Server, caller: Caller, asked: GenerateBody) -> ChatCall | None:
    check_generate(asked)
    if not asked.prompt:
        return None
    messages = [{"role": "system", "content": asked.system}] if asked.system else []
    messages.append({"role": "user", "content": asked.prompt})
    chat = _chat_request(asked, messages)
    if asked.raw:
        check_size(server.text.least_tokens(len(asked.prompt)), server.bounds, "prompt")
        return _raw(server, caller, chat, server.text.encode(asked.prompt))
    call = _prepare(server, caller, chat)
    return call if not asked.context else _after(server, caller, chat, call, asked.context)


def _prepare(server: Server, caller: Caller, chat: ChatRequest) -> ChatCall:
    return as_far_as_fits(lambda chat: prepare(server, caller, chat, new_id("chat")), chat)


def _chat_request(asked: AskFields, messages: list[dict[str, Any]], **fields: Any) -> ChatRequest:
    return as_chat(request_fields(asked), messages, response_format=response_format(asked.format),
                   logprobs=asked.logprobs, top_logprobs=asked.top_logprobs, **thinking(asked.think), **fields)


def _raw(server: Server, caller: Caller, chat: ChatRequest, ids: np.ndarray) -> ChatCall:
    """The call of a prompt that no template was applied to: all of its answer is content."""
    limit = _limit(server, chat, len(ids), "prompt")
    prompt = Prompt(ids, sampling_params(chat, server.bounds, limit, wanted_logprobs(chat)))
    generation = Generation(server, new_id("gen"), [prompt], 1, server.terms(chat, caller))
    return ChatCall(chat, generation, [Reply(generation.choices[0], Plain())])


def _after(server: Server, caller: Caller, chat: ChatRequest, call: ChatCall, context: list[Any]) -> ChatCall:
    """The same call behind what `context` of an earlier answer holds, as ids."""
    prompt = call.generation.prompts[0]
    before = check_ids(context, server.bounds, "context")
    prompt.ids = np.concatenate([before, prompt.ids[int(prompt.ids[0] == before[0] == server.text.tokenizer.bos_id):]])
    limit = _limit(server, chat, len(prompt.ids), "context")
    prompt.params = msgspec.structs.replace(prompt.params, max_tokens=limit)
    return call


def _limit(server: Server, chat: ChatRequest, prompt: int, param: str) -> int:
    """Tokens to generate: as many as were asked for, and have room."""
    left = output_limit(None, None, prompt, server.bounds, param)
    return left if chat.max_tokens is None else min(chat.max_tokens, left)


def now() -> str:
    """The time as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def unloads(keep_alive: Any) -> bool:
    """Is that no time at all: 0, or a text such as "0s"?"""
    if isinstance(keep_alive, str):
        return re.fullmatch(r"0+(\.0*)?(ns|us|ms|s|m|h)?", keep_alive) is not None
    return keep_alive == 0 and keep_alive is not False


class LoadAnswer:
    """The answer to a request that says nothing: Ollama would load the model, or with `keep_alive` 0 unload it. Here it
    is loaded, and stays so."""

    generation = None

    def __init__(self, asked: AskFields):
        self.asked = asked

    async def deliver(self, request: Request, headers: dict[str, str]) -> Response:
        """One line, which is the whole answer too."""
        empty = {"message": {"role": "assistant", "content": ""}}
        part = empty if isinstance(self.asked, ChatBody) else {"response": ""}
        line = {"model": self.asked.model, "created_at": now(), **part, "done": True,
                "done_reason": "unload" if unloads(self.asked.keep_alive) else "load"}
        media = LINES.media.decode() if self.asked.stream else "application/json"
        return Response(encode_json(line) + b"\n", 200, headers, media)


class Lines(RenderedAnswer):
    """An answer as lines, or as the one object that they come to. Durations are in nanoseconds."""

    framing = LINES

    def __init__(self, server: Server, call: ChatCall, asked: AskFields, names: Names, began: float):
        super().__init__(server, call, asked, names)
        self._began = began

    def whole(self, choices: list[Choice]) -> dict[str, Any]:
        events = self.read_events(choices)
        scored = JsonList()  # a large answer would be a million objects at once
        for tokens, values in choices[0].scored:
            scored.extend(chat_logprobs(self.server.text, tokens, values))
        ids = unpack_ids(b"".join(choices[0].tokens)).tolist()
        return self._line(events, scored.value() if choices[0].scored else None) | self._end(ids)

    def chunk(self, index: int, output: TextOutput) -> bytes:
        events = self.call.add(index, output)
        scored = None
        if output.logprobs is not None and output.tokens:
            scored = chat_logprobs(self.server.text, output.tokens, output.logprobs)
        self._keep(output)
        if scored is None and not any(isinstance(event, Content | Reasoning | CallEnd) for event in events):
            return b""
        return encode_json(self._line(events, scored) | {"done": False}) + b"\n"

    def last(self) -> bytes:
        return encode_json(self._line([], None) | self._end(self._ids())) + b"\n"

    def _keep(self, output: TextOutput) -> None:
        """What the last line needs of an output."""

    def _ids(self) -> list[int]:
        return []

    def _line(self, events: list[Event], scored: Any) -> dict[str, Any]:
        """What these events say. scored: log-probabilities, None for none."""
        content = "".join(event.text for event in events if isinstance(event, Content))
        thought = "".join(event.text for event in events if isinstance(event, Reasoning))
        calls = [self._call(event.index) for event in events if isinstance(event, CallEnd)]
        line = {"model": self.asked.model, "created_at": now(), **self._part(content, thought, calls)}
        return line if scored is None else line | {"logprobs": scored}

    @abstractmethod
    def _part(self, content: str, thought: str, calls: list[Any]) -> dict[str, Any]:
        """The fields in which the two calls differ."""

    def _call(self, index: int) -> dict[str, Any]:
        call = self.call.replies[0].calls[index]
        return {"id": call.id, "function": {"index": index, "name": call.name, "arguments": as_object(call.arguments)}}

    def _end(self, ids: list[int]) -> dict[str, Any]:
        """What the last line has: reason, counts and durations."""
        numbers, at = self.call.usage(), time.perf_counter()
        first = self.generation.first or at
        return {"done": True, "done_reason": "length" if self.call.replies[0].finish == "length" else "stop",
                "total_duration": int((at - self._began) * S), "load_duration": 0,
                "prompt_eval_count": numbers.prompt_tokens, "prompt_eval_duration": int((first - self._began) * S),
                "eval_count": numbers.completion_tokens, "eval_duration": int((at - first) * S)}


class ChatLines(Lines):
    """`/api/chat`."""

    def _part(self, content: str, thought: str, calls: list[Any]) -> dict[str, Any]:
        more = {"thinking": thought, "tool_calls": calls}
        return {"message": {"role": "assistant", "content": content, **{k: v for k, v in more.items() if v}}}


class GenerateLines(Lines):
    """`/api/generate`. The last line has the ids of all that was said, for `context` of a next request; a raw prompt is
    the caller's own."""

    def __init__(self, server: Server, call: ChatCall, asked: GenerateBody, names: Names, began: float):
        super().__init__(server, call, asked, names, began)
        self._tokens: list[bytes] = []

    def _part(self, content: str, thought: str, calls: list[Any]) -> dict[str, Any]:
        return {"response": content, **({"thinking": thought} if thought else {})}

    def _keep(self, output: TextOutput) -> None:
        if not self.asked.raw:
            self._tokens.append(output.tokens)

    def _ids(self) -> list[int]:
        return unpack_ids(b"".join(self._tokens)).tolist()

    def _end(self, ids: list[int]) -> dict[str, Any]:
        context = {} if self.asked.raw else {"context": self.generation.prompts[0].ids.tolist() + ids}
        return super()._end(ids) | context
