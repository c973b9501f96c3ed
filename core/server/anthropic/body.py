"""The body of `/v1/messages` as a chat request. Source: Anthropic's description of its Messages API."""
from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Literal

from pydantic import Field

from ...errors import RequestError, shown
from ..conversation import fault
from ..limits import MAX_STOPS
from ..protocol import Body, RequestFields, ShortText, StopString
from ..validate import invalid

# A line about the client's build that changes with every request, and with it everything behind it in the cache.
ATTRIBUTION = "x-anthropic-billing-header:"

Message = dict[str, Any]


class ThinkingFields(Body):
    """`thinking`."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1, lt=10**20)


class OutputFields(Body):
    """`output_config`."""

    effort: ShortText | None = None
    format: dict[str, Any] | None = None


class CountRequest(RequestFields):
    """`POST /v1/messages/count_tokens`; messages and tools are checked below."""

    messages: list[Any] = Field(min_length=1)
    system: Any = None
    tools: list[Any] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: ThinkingFields | None = None
    output_config: OutputFields | None = None
    output_format: dict[str, Any] | None = None
    stop_sequences: list[StopString] | None = Field(None, max_length=MAX_STOPS)
    chat_template_kwargs: dict[str, Any] | None = None
    # Of what Anthropic's own servers do.
    mcp_servers: list[Any] | None = None
    container: Any = None


class MessagesRequest(CountRequest):
    """`POST /v1/messages`."""

    max_tokens: int = Field(ge=1, lt=10**20)


def chat_messages(asked: CountRequest) -> tuple[list[Message], list[str]]:
    """Messages for the chat template, and where each begins in the body. Raises the 400 that names a fault's place."""
    messages: list[Message] = []
    places: list[str] = []
    system = _system(asked.system)
    if system:
        messages.append(_grown({"role": "system", "content": system}))
        places.append("system")
    for i, message in enumerate(asked.messages):
        place = f"messages[{i}]"
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(role, str) or role not in READERS:
            raise fault(f"{place}.role", f"must be {' or '.join(READERS)}; got {shown(role)}")
        blocks = _blocks(message.get("content"), f"{place}.content")
        for part in READERS[role](blocks, f"{place}.content"):
            if messages and messages[-1]["role"] == part["role"] != "tool":
                _join(messages[-1], part)
            else:
                messages.append(_grown(part))
                places.append(place)
    return [_whole(message) for message in messages], places


def _grown(message: Message) -> Message:
    """With lists of its texts, so that more can be added."""
    thoughts = {"reasoning_content": [message["reasoning_content"]]} if "reasoning_content" in message else {}
    return {**message, "content": [message["content"]], **thoughts}


def _join(first: Message, second: Message) -> None:
    """One message of two that follow each other in one role, as Anthropic has it."""
    first["content"].append(second["content"])
    if "reasoning_content" in second:
        first.setdefault("reasoning_content", []).append(second["reasoning_content"])
    if "tool_calls" in second:
        first.setdefault("tool_calls", []).extend(second["tool_calls"])


def _whole(message: Message) -> Message:
    """With texts again."""
    thoughts = {"reasoning_content": "".join(message["reasoning_content"])} if "reasoning_content" in message else {}
    return {**message, "content": "\n".join(filter(None, message["content"])), **thoughts}


def _system(system: Any) -> str:
    if system is None:
        return ""
    return _instructions(_blocks(system, "system"), "system")[0]["content"]


def _instructions(blocks: list[Message], path: str) -> list[Message]:
    """What a system says, at the beginning or later."""
    texts = [text for text in _texts(blocks, path) if not text.startswith(ATTRIBUTION)]
    return [{"role": "system", "content": "\n".join(texts)}]


def _blocks(content: Any, path: str) -> list[Message]:
    """A content, which may be a string, as blocks with types."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise fault(path, f"must be a string or a list of blocks; got {shown(content)}")
    for i, block in enumerate(content):
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise fault(f"{path}[{i}]", f"must be an object with a type; got {shown(block)}")
    return content


def _string(block: Message, field: str, path: str) -> str:
    if not isinstance(block.get(field), str):
        raise fault(f"{path}.{field}", f"must be a string; got {shown(block.get(field))}")
    return block[field]


def _texts(blocks: list[Message], path: str) -> list[str]:
    return [_plain_text(block, f"{path}[{i}]") for i, block in enumerate(blocks)]


def _plain_text(block: Message, path: str) -> str:
    """The text of a block, or of a document that is one."""
    kind = block["type"]
    source = block.get("source") if kind == "document" else None
    if isinstance(source, dict) and source.get("type") == "text":
        return _string(source, "data", f"{path}.source")
    if kind in ("image", "document"):
        raise fault(path, f"has type {kind!r}: images and files are not supported yet; a document may be plain text",
                    "unsupported_parameter")
    if kind != "text":
        raise fault(f"{path}.type", f"is {shown(kind)}, which has no place here", "unsupported_parameter")
    return _string(block, "text", path)


def _user(blocks: list[Message], path: str) -> list[Message]:
    """What a user's blocks say, and the results of tools among them, in their order."""
    messages: list[Message] = []
    for i, block in enumerate(blocks):
        place = f"{path}[{i}]"
        if block["type"] == "tool_result":
            result = "\n".join(_texts(_blocks(block.get("content") or "", f"{place}.content"), f"{place}.content"))
            messages.append({"role": "tool", "tool_call_id": _string(block, "tool_use_id", place),
                             "content": f"Error: {result}" if block.get("is_error") is True else result})
        else:
            messages.append({"role": "user", "content": _plain_text(block, place)})
    return messages or [{"role": "user", "content": ""}]


def _assistant(blocks: list[Message], path: str) -> list[Message]:
    """One message of what the model thought, said and called. Thinking that is encrypted cannot be read."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Message] = []
    for i, block in enumerate(blocks):
        place, kind = f"{path}[{i}]", block["type"]
        if kind == "thinking":
            thoughts.append(_string(block, "thinking", place))
        elif kind == "tool_use":
            if not isinstance(block.get("input"), dict):
                raise fault(f"{place}.input", f"must be an object; got {shown(block.get('input'))}")
            calls.append({"id": _string(block, "id", place), "type": "function", "function": {
                "name": _string(block, "name", place), "arguments": json.dumps(block["input"])}})
        elif kind != "redacted_thinking":
            texts.append(_plain_text(block, place))
    more = {"reasoning_content": "".join(thoughts), "tool_calls": calls}
    return [{"role": "assistant", "content": "".join(texts), **{k: v for k, v in more.items() if v}}]


READERS = {"user": _user, "assistant": _assistant, "system": _instructions}


def chat_tools(tools: list[Any] | None) -> list[dict[str, Any]] | None:
    """Functions in chat's form. Tools of which Anthropic wrote the schema, or which it runs, are refused by name."""
    found = []
    for i, tool in enumerate(tools or ()):
        if not isinstance(tool, dict):
            raise fault(f"tools[{i}]", f"must be an object; got {shown(tool)}")
        kind = tool.get("type", "custom")
        if kind != "custom":
            raise fault(f"tools[{i}].type", f"is {shown(kind)}: there is only custom, a tool with an input_schema that "
                        "the client runs", "unsupported_parameter")
        function = {"name": _string(tool, "name", f"tools[{i}]"), "description": tool.get("description"),
                    "parameters": tool.get("input_schema"), "strict": tool.get("strict")}
        found.append({"type": "function", "function": {k: v for k, v in function.items() if v is not None}})
    return found or None


def chat_tool_choice(choice: dict[str, Any] | None) -> dict[str, Any]:
    """The fields of a chat request that `tool_choice` stands for."""
    if choice is None:
        return {}
    kind = choice.get("type")
    if not isinstance(kind, str) or kind not in CHOICES:
        raise invalid("tool_choice.type", f"is {shown(kind)}; there are {', '.join(CHOICES)}")
    alone = {"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") is True else {}
    return {"tool_choice": CHOICES[kind](choice), **alone}


def _named(choice: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": _string(choice, "name", "tool_choice")}}


CHOICES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "auto": lambda _: "auto", "any": lambda _: "required", "none": lambda _: "none", "tool": _named}


def response_format(asked: CountRequest) -> dict[str, Any] | None:
    """The schema of `output_config.format`, or of its older name, as chat has it."""
    within = asked.output_config and asked.output_config.format
    form = within or asked.output_format
    if not form:
        return asked.response_format
    if form.get("type") != "json_schema" or form.get("schema") is None:
        raise invalid("output_config.format" if within else "output_format",
                      f"must have the type json_schema and a schema; got {shown(form)}")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": form["schema"]}}


def check(asked: CountRequest) -> None:
    """Refuse what would be left out silently."""
    for field in ("mcp_servers", "container"):
        if getattr(asked, field):
            raise RequestError(f"{field} is not supported: this server runs no tools itself", param=field,
                               code="unsupported_parameter")
    if asked.n not in (None, 1):
        raise invalid("n", f"is {asked.n}; a message has one answer")
    if asked.return_token_ids:
        raise RequestError("return_token_ids is not supported here; use /v1/chat/completions", param="return_token_ids",
                           code="unsupported_parameter")
