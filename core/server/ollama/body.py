"""The bodies of Ollama's calls as chat requests. Source: the API description in Ollama's documentation."""
from __future__ import annotations

import json
from collections import deque
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationError

from ...errors import RequestError, shown
from ..conversation import fault
from ..errors import validation_error
from ..limits import MAX_STOPS
from ..protocol import NEUTRAL, Body, RequestFields, ShortText, StopString, TermFields
from ..validate import invalid

Message = dict[str, Any]

# Options of Ollama's own engine that change how it computes, not what: there is nothing here that they could set.
ENGINE_OPTIONS = frozenset((
    "num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep", "use_mmap", "use_mlock", "numa",
    "low_vram", "f16_kv", "vocab_only", "penalize_newline", "repeat_last_n", "draft_num_predict"))
# Of the sampling parameters those with another name in a chat request.
OPTION_NAMES = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty",
            *OPTION_NAMES)
ROLES = ("system", "user", "assistant", "tool")


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _whole(value: Any) -> Any:
    """Clients in languages without integers send 40.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Integer = Annotated[int, BeforeValidator(_whole), Field(gt=-2**63, lt=2**63)]


class Options(Body):
    """`options`: those that have a meaning here; the others are looked at by `read_options`."""

    num_predict: Integer | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: Integer | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: Integer | None = None
    stop: Annotated[list[StopString], Field(max_length=MAX_STOPS), BeforeValidator(_as_list)] | None = None
    repeat_penalty: float | None = Field(None, ge=0.01, le=10)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repeat_last_n: Integer | None = None


class AskFields(TermFields):
    """What chat and generate have in common. Streams are the default here."""

    model: str = Field(min_length=1)
    stream: bool = True
    options: dict[str, Any] | None = None
    format: Any = None
    keep_alive: Any = None
    think: bool | ShortText | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    truncate: bool | None = None
    shift: bool | None = None


class ChatBody(AskFields):
    """`POST /api/chat`."""

    messages: list[Any] | None = None
    tools: list[Any] | None = None


class GenerateBody(AskFields):
    """`POST /api/generate`."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    context: list[Any] | None = None
    # What of this is not empty is refused by name.
    suffix: str | None = None
    template: str | None = None
    images: list[Any] | None = None


class ModelBody(Body):
    """`POST /api/show`; `name` is the older word."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None


def plain_name(name: str) -> str:
    """A model's name without the tag that every name has there."""
    return name.removesuffix(":latest")


def read_options(given: dict[str, Any] | None) -> dict[str, Any]:
    """Options as fields of a chat request. Raises the 400 for one that would change the answer and is not known."""
    given = given or {}
    for name in given:
        if name in Options.model_fields or name in ENGINE_OPTIONS or given[name] is None:
            continue
        if name in NEUTRAL and given[name] == NEUTRAL[name]:
            continue
        raise RequestError(f"options.{name[:100]} is not supported here; leave it out", param=f"options.{name[:100]}",
                           code="unsupported_parameter")
    try:
        options = Options.model_validate(given)
    except ValidationError as error:
        known = validation_error(error)
        raise RequestError(f"options.{known.message}", param=f"options.{known.param}", code=known.code) from None
    found = {OPTION_NAMES.get(name, name): getattr(options, name) for name in SAMPLING}
    if options.num_predict is not None and options.num_predict < 1:  # -1 and -2: as far as there is room
        del found["max_tokens"]
    if options.repeat_last_n == 0:  # looks at no token
        del found["repetition_penalty"], found["presence_penalty"], found["frequency_penalty"]
    return {name: value for name, value in found.items() if value is not None}


def response_format(form: Any) -> dict[str, Any] | None:
    """`format` as chat has it: "json" or a schema."""
    if form in (None, ""):
        return None
    if form == "json":
        return {"type": "json_object"}
    if not isinstance(form, dict):
        raise invalid("format", f"must be \"json\" or a JSON Schema, an object; got {shown(form)}")
    return {"type": "json_schema", "json_schema": {"name": "format", "schema": form}}


def thinking(think: bool | str | None) -> dict[str, Any]:
    """`think` as fields of a chat request: on, off or a word for the effort."""
    if isinstance(think, str):
        return {"reasoning_effort": think, "enable_thinking": True}
    return {} if think is None else {"enable_thinking": think}


def chat_messages(messages: list[Any]) -> list[Message]:
    """Messages as chat has them: arguments of calls as text, and ids for calls, which Ollama has none for."""
    found: list[Message] = []
    open_calls = OpenCalls([])
    for i, message in enumerate(messages):
        path = f"messages[{i}]"
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            role = message.get("role") if isinstance(message, dict) else message
            raise fault(f"{path}.role", f"must be one of {', '.join(ROLES)}; got {shown(role)}")
        if message.get("images"):
            raise fault(f"{path}.images", "is not supported yet: only text is", "unsupported_parameter")
        content = message.get("content")
        if not isinstance(content, str | None):
            raise fault(f"{path}.content", f"must be a string; got {shown(content)}")
        made: Message = {"role": message["role"], "content": content or ""}
        if message["role"] == "assistant":
            open_calls = OpenCalls(_assistant(made, message, path, i))
        elif message["role"] == "tool":
            made["tool_call_id"] = open_calls.answered(message)
        found.append(made)
    return found


def _assistant(made: Message, message: Message, path: str, number: int) -> list[tuple[str, str]]:
    """Fill in what an assistant's message has besides its content; ids and names of its calls."""
    if isinstance(message.get("thinking"), str) and message["thinking"]:
        made["reasoning_content"] = message["thinking"]
    calls = message.get("tool_calls")
    if not calls:
        return []
    if not isinstance(calls, list):
        raise fault(f"{path}.tool_calls", f"must be a list; got {shown(calls)}")
    made["tool_calls"] = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        place = f"{path}.tool_calls[{i}].function"
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise fault(f"{place}.name", f"must be a string; got {shown(function)}")
        arguments = function.get("arguments", {})
        if not isinstance(arguments, dict):
            raise fault(f"{place}.arguments", f"must be an object; got {shown(arguments)}")
        id = call.get("id") if isinstance(call.get("id"), str) and call["id"] else f"call_{number}_{i}"
        made["tool_calls"].append({"id": id, "type": "function", "function": {
            "name": function["name"], "arguments": json.dumps(arguments)}})
    return [(call["id"], call["function"]["name"]) for call in made["tool_calls"]]


class OpenCalls:
    """Calls, as id and name, that have no result yet."""

    def __init__(self, calls: list[tuple[str, str]]):
        self._names = dict(calls)
        self._ids: dict[str, deque[str]] = {}
        for id, name in calls:
            self._ids.setdefault(name, deque()).append(id)

    def answered(self, message: Message) -> str:
        """The id of the call that a result belongs to: the one it names, else the first of that name, or of all."""
        if isinstance(message.get("tool_call_id"), str):
            return message["tool_call_id"]
        name = message.get("tool_name") or message.get("name") or next(iter(self._names.values()), "")
        ids = self._ids.get(name) if isinstance(name, str) else None
        if not ids:
            return "call_0"
        self._names.pop(ids[0], None)
        return ids.popleft()


def check_generate(asked: GenerateBody) -> None:
    """Refuse what would be left out silently."""
    refused = {"suffix": "is not supported yet", "images": "is not supported yet: only text is",
               "template": "is refused: the server decides the template (--chat-template); raw: true uses none"}
    for field, why in refused.items():
        if getattr(asked, field):
            raise RequestError(f"{field} {why}", param=field, code="unsupported_parameter")
    if asked.raw and (asked.system or asked.context or asked.think is not None):
        raise invalid("raw", "is true: the prompt is all that the model sees, so leave system, context and think out")


def request_fields(asked: AskFields) -> RequestFields:
    """What an Ollama body shares with a chat request: whose it is, and how it samples."""
    shared = {name: getattr(asked, name) for name in TermFields.model_fields}
    sent = {name: value for name, value in shared.items() if value is not None}
    return RequestFields.model_validate({**sent, **read_options(asked.options), "model": plain_name(asked.model),
                                         "stream": asked.stream})
