"""Tools for models whose chat template knows none: described in the system message, calls and results as plain text."""
from __future__ import annotations

import json
from typing import Any

from ..parsers.contract import CallFormat

INTRODUCTION = ("You can call functions. Each line between <tools> and </tools> describes one as JSON:\n<tools>\n"
                "{tools}\n</tools>\n\nTo call a function, write its name and its arguments exactly like this, and "
                "nothing after it:\n{example}\n\nAnswer without a call when no function helps.")
ARGUMENTS = '{"argument": "value"}'


def described(messages: list[dict[str, Any]], tools: list[dict[str, Any]], format: CallFormat,
              in_user: bool = False) -> list[dict[str, Any]]:
    """The conversation with the tools at its start. in_user: in the first message of the user, for templates that
    refuse a system message."""
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = INTRODUCTION.format(tools=lines, example=format.example("function_name", ARGUMENTS))
    role = "user" if in_user else "system"
    place = next((i for i, message in enumerate(messages) if message["role"] == role), None)
    if place is None or role == "system" and place > 0:
        return [{"role": role, "content": text}, *messages]
    first = messages[place]
    both = f"{text}\n\n{first['content']}" if in_user else f"{first['content']}\n\n{text}"
    return [*messages[:place], {**first, "content": both}, *messages[place + 1:]]


def flattened(messages: list[dict[str, Any]], format: CallFormat) -> list[dict[str, Any]]:
    """Calls as a part of the assistant's text, results as messages of the user, several in a row as one."""
    found: list[dict[str, Any]] = []
    for message in messages:
        role = message["role"]
        if role in ("tool", "function"):
            text, role = f"<tool_response>\n{message['content']}\n</tool_response>", "user"
        else:
            calls = [format.example(call["function"]["name"], call["function"]["arguments"] or "{}")
                     for call in message.get("tool_calls", ())]
            text = "\n".join(filter(None, [message["content"], *calls]))
        if found and found[-1]["role"] == role == "user" and "<tool_response>" in found[-1]["content"]:
            found[-1]["content"] += f"\n{text}"
        else:
            kept = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
            found.append({**kept, "role": role, "content": text})
    return found


def as_templates_want(messages: list[dict[str, Any]], format: CallFormat) -> list[dict[str, Any]]:
    """Earlier calls under ids that the template takes, one in a message where it refuses more: each is then followed by
    its own result."""
    found: list[dict[str, Any]] = []
    for message in messages:
        if "tool_call_id" in message:
            message = {**message, "tool_call_id": format.past_id(message["tool_call_id"])}
        calls = [{**call, "id": format.past_id(call["id"])} for call in message.get("tool_calls", ())]
        if len(calls) > 1 and format.single:
            found += [{**message, "content": message["content"] if i == 0 else "", "tool_calls": [call]}
                      for i, call in enumerate(calls)]
        else:
            found.append({**message, "tool_calls": calls} if calls else message)
    return _paired(found) if format.single else found


def _paired(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each result right behind its call."""
    asked = {message["tool_calls"][0]["id"] for message in messages if message.get("tool_calls")}
    results: dict[str, list[dict[str, Any]]] = {}
    for message in messages:
        if message.get("tool_call_id") in asked:
            results.setdefault(message["tool_call_id"], []).append(message)
    found: list[dict[str, Any]] = []
    for message in messages:
        if message.get("tool_call_id") not in asked:
            found.append(message)
        if message.get("tool_calls"):
            found += results.pop(message["tool_calls"][0]["id"], [])
    return found


def uses_tools(messages: list[dict[str, Any]]) -> bool:
    """Whether there are calls or results in a conversation."""
    return any(message["role"] in ("tool", "function") or "tool_calls" in message for message in messages)
