"""`tools`, `tool_choice` and `parallel_tool_calls`, checked: what the model may call and must call.

Sources: OpenAI's OpenAPI description (ChatCompletionTool, ChatCompletionToolChoiceOption); "any" is Mistral's word for
required.
"""
from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from ..errors import RequestError, shown
from ..parsers.contract import Tool, Tools
from .conversation import fault
from .protocol import ChatRequest

MAX_TOOLS = 512
MAX_FORCED = 8  # calls in a reply that must call: a small model would repeat itself until the context is full
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


@dataclass(frozen=True)
class Toolset:
    """What a request says of tools. offered: as the client sent them, for the chat template; none where calls are
    forbidden. tools: those that may be called. least, most: calls in one reply, None = as many as the model likes.
    bound: calls must be written under a grammar.
    """

    offered: list[dict[str, Any]] = field(default_factory=list)
    tools: Tools = field(default_factory=dict)
    least: int = 0
    most: int | None = None
    bound: bool = False


def read_toolset(asked: ChatRequest) -> Toolset:
    """The tools of a request. Raises the 400 that names what is wrong."""
    tools = _read_tools(asked.tools or [])
    mode, names = _read_choice(asked.tool_choice, tools)
    if mode == "none":
        return Toolset()
    allowed = tools if names is None else {name: tools[name] for name in names}
    single = asked.parallel_tool_calls is False or mode == "named"
    bound = bool(allowed) and (mode != "auto" or names is not None or any(tool.strict for tool in allowed.values()))
    least = int(mode in ("required", "named"))
    return Toolset(_plain(asked.tools or []), allowed, least, 1 if single else MAX_FORCED if least else None, bound)


def _read_tools(tools: list[Any]) -> dict[str, Tool]:
    if len(tools) > MAX_TOOLS:
        raise fault("tools", f"has {len(tools)} entries; at most {MAX_TOOLS} are allowed")
    found: dict[str, Tool] = {}
    for i, each in enumerate(tools):
        path = f"tools[{i}]"
        if not isinstance(each, dict):
            raise fault(path, f"must be an object with type and function; got {shown(each)}")
        if each.get("type", "function") != "function":
            raise fault(f"{path}.type", f"is {shown(each['type'])}: only functions are supported",
                        "unsupported_parameter")
        tool = _read_function(each.get("function"), f"{path}.function")
        if tool.name in found:
            raise fault(f"{path}.function.name", f"{tool.name!r} is there twice")
        found[tool.name] = tool
    return found


def _read_function(function: Any, path: str) -> Tool:
    if not isinstance(function, dict):
        raise fault(path, f"must be an object with a name; got {shown(function)}")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise fault(f"{path}.name", f"must be 1 to 128 letters, digits, _, -, ., : or /; got {shown(name)}")
    if not isinstance(function.get("description"), str | None):
        raise fault(f"{path}.description", f"must be a text; got {shown(function['description'])}")
    parameters = function.get("parameters")
    if not isinstance(parameters, dict | None):
        raise fault(f"{path}.parameters", f"must be a JSON Schema, an object; got {shown(parameters)}")
    strict = function.get("strict")
    if not isinstance(strict, bool | None):
        raise fault(f"{path}.strict", f"must be true or false; got {shown(strict)}")
    return Tool(name, parameters or {}, bool(strict))


def _plain(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tools as chat templates expect them: all of their fields there, and no other."""
    return [{"type": "function", "function": {
        "name": tool["function"]["name"], "description": tool["function"].get("description") or "",
        "parameters": tool["function"].get("parameters") or {"type": "object", "properties": {}}}} for tool in tools]


def _read_choice(choice: Any, tools: dict[str, Tool]) -> tuple[str, list[str] | None]:
    """The mode, and the names it is about, None for all."""
    if choice is None:
        return "auto", None
    if isinstance(choice, str):
        mode = {"any": "required"}.get(choice, choice)
        if mode not in ("none", "auto", "required"):
            raise fault("tool_choice", f"is {shown(choice)}; there are none, auto, required and the name of a function "
                        "as {'type': 'function', 'function': {'name': ...}}")
        if mode == "required" and not tools:
            raise fault("tool_choice", "is required, but there are no tools")
        return mode, None
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        return _read_allowed(choice.get("allowed_tools", choice), tools)
    if not isinstance(choice, dict) or choice.get("type", "function") != "function":
        raise fault("tool_choice", f"must be none, auto, required or an object of type function or allowed_tools; got "
                    f"{shown(choice)}")
    return "named", [_named(choice, "tool_choice", tools)]


def _read_allowed(allowed: Any, tools: dict[str, Tool]) -> tuple[str, list[str] | None]:
    path = "tool_choice.allowed_tools"
    if not isinstance(allowed, dict) or allowed.get("mode", "auto") not in ("auto", "required"):
        raise fault(f"{path}.mode", "must be auto or required")
    names = allowed.get("tools")
    if not isinstance(names, list) or not names or len(names) > MAX_TOOLS:
        raise fault(f"{path}.tools", f"must be a list of 1 to {MAX_TOOLS} functions")
    found = [_named(each, f"{path}.tools[{i}]", tools) for i, each in enumerate(names)]
    return allowed.get("mode", "auto"), list(dict.fromkeys(found))


def _named(value: Any, path: str, tools: dict[str, Tool]) -> str:
    """The name of a function that is there, in the form of the chat API or of the Responses API."""
    inner = value.get("function", value) if isinstance(value, dict) else None
    name = inner.get("name") if isinstance(inner, dict) else None
    if not isinstance(name, str):
        raise fault(f"{path}.function.name", f"must be a function's name; got {shown(name)}")
    if name not in tools:
        raise RequestError(f"{path}.function.name is {shown(name)}, which is none of the tools",
                           param=f"{path}.function.name", code="invalid_value")
    return name
