"""Chat messages and template arguments: OpenAI's forms checked, faults named by their place."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import RequestError, shown
from .limits import MAX_TEMPLATE_KWARGS, MAX_TEXT, check_structure

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
TEXT_PARTS = ("text", "input_text", "output_text")
MEDIA_PARTS = ("image_url", "input_image", "image", "input_audio", "audio_url", "video_url", "file", "input_file")
TEXT_FIELDS = ("name", "tool_call_id", "reasoning_content", "reasoning")
RESERVED_KWARGS = frozenset((
    "tokenize", "chat_template", "messages", "conversation", "conversations", "tools", "documents", "bos_token",
    "eos_token", "pad_token", "unk_token", "return_dict", "return_tensors", "self", "raise_exception", "strftime_now",
    "add_generation_prompt", "continue_final_message", "padding", "truncation", "max_length", "source", "tokenizer",
    "kwargs", "varargs", "caller", "loop", "super", "range", "dict", "lipsum", "cycler", "joiner", "namespace",
    "template"))


def fault(path: str, message: str, code: str = "invalid_value") -> RequestError:
    return RequestError(f"{path} {message}", param=path, code=code)


def parse_messages(messages: list[Any]) -> tuple[list[dict[str, Any]], int]:
    """Messages for the template, and the number of characters in all their texts. Raises 400 that names the faulty
    place."""
    parsed = [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    return parsed, sum(map(characters, parsed))


def characters(value: Any) -> int:
    """Of all strings in a parsed message or in tools, however deep."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict | list):
        return sum(map(characters, value.values() if isinstance(value, dict) else value))
    return 0


def _message(message: Any, path: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise fault(path, f"must be an object with role and content; got {shown(message)}")
    role = message.get("role")
    if role not in ROLES:
        raise fault(f"{path}.role", f"must be one of {', '.join(ROLES)}; got {shown(role)}")
    parsed: dict[str, Any] = {"role": role}
    calls = message.get("tool_calls")
    if role == "assistant" and calls:
        parsed["tool_calls"] = _tool_calls(calls, f"{path}.tool_calls")
    content = message.get("content")
    if content is None and role == "assistant" and (calls or isinstance(message.get("refusal"), str)):
        content = message.get("refusal") if not calls else ""
    parsed["content"] = _content(content, f"{path}.content")
    parsed |= {key: message[key] for key in TEXT_FIELDS if isinstance(message.get(key), str)}
    return parsed


def _content(content: Any, path: str) -> str:
    """A string, or the texts of a list of parts put together; nothing is added between parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise fault(path, f"must be a string or a list of parts; got {shown(content)}")
    return "".join(_part(part, f"{path}[{i}]") for i, part in enumerate(content))


def _part(part: Any, path: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in MEDIA_PARTS:
        raise fault(path, f"has type {kind!r}: images, audio and files are not supported yet", "unsupported_parameter")
    if kind == "refusal" and isinstance(part.get("refusal"), str):
        return part["refusal"]
    if kind not in TEXT_PARTS or not isinstance(part.get("text"), str):
        raise fault(path, f"must be {{'type': 'text', 'text': ...}}; got {shown(part)}")
    return part["text"]


def _tool_calls(calls: Any, path: str) -> list[dict[str, Any]]:
    """Calls that the model made earlier; the template makes an object of each call's JSON text."""
    if not isinstance(calls, list):
        raise fault(path, f"must be a list; got {shown(calls)}")
    parsed = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise fault(f"{path}[{i}].function.name", f"must be a string; got {shown(function)}")
        place, arguments = f"{path}[{i}].function.arguments", function.get("arguments", "{}")
        if not isinstance(arguments, str):
            raise fault(place, f"must be a string of JSON; got {shown(arguments)}")
        check_structure(arguments.encode("utf-8", "surrogatepass"), place, place)
        parsed.append({"id": str(call.get("id", "")), "type": "function",
                       "function": {"name": function["name"], "arguments": arguments}})
    return parsed


def template_kwargs(kwargs: dict[str, Any] | None, allowed: Sequence[str] = ()) -> dict[str, Any]:
    """`chat_template_kwargs`: few plain values under names that mean nothing to the renderer itself. allowed: the only
    names that there may be; () = any."""
    kwargs = kwargs or {}
    if len(kwargs) > MAX_TEMPLATE_KWARGS:
        raise fault("chat_template_kwargs", f"has {len(kwargs)} entries; at most {MAX_TEMPLATE_KWARGS} are allowed")
    for name, value in kwargs.items():
        path = f"chat_template_kwargs.{name[:MAX_TEXT]}"
        if name in RESERVED_KWARGS or name.startswith("_") or not name.isidentifier():
            raise fault(path, "is a reserved name or not a name")
        if allowed and name not in allowed:
            raise fault(path, f"is not allowed here; this server takes {', '.join(allowed)} (--template-kwargs)")
        if not isinstance(value, (str, int, float, bool, type(None))) or len(str(value)) > MAX_TEXT:
            raise fault(path, f"must be a number, true, false, null or a string of at most {MAX_TEXT} characters")
    return kwargs


def generation_prompt(add: bool | None, resume: bool | None) -> dict[str, bool]:
    """`add_generation_prompt` and `continue_final_message` with their defaults; asking for both is a contradiction."""
    if add and resume:
        raise fault("continue_final_message", "and add_generation_prompt cannot both be true")
    return {"add_generation_prompt": not resume if add is None else add, "continue_final_message": bool(resume)}
