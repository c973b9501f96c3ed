"""Chat templates: messages to a prompt, in which nothing that a client wrote is ever read as a control token."""
from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
import numpy as np

from ..errors import RequestError
from .sandbox import MAX_VALUE, ChatEnvironment, LimitError, Refusal
from .tokenizer import GUARD, Tokenizer, check_text

SECONDS = 5.0           # of computing that one render may take
MAX_SOURCE = 1 << 20    # characters in a template; the longest in use have about 40,000
MAX_DEPTH = 100         # of tools and arguments of tool calls

# Marks the end of the last message. The blank shows whether the template trims; noncharacters, as for `GUARD`.
_CONTINUE = "\ufdd2\ufdd3 "
_REASONING = ("reasoning_content", "thinking", "reasoning")
_RESERVED = frozenset((
    "messages", "tools", "add_generation_prompt", "continue_final_message", "bos_token", "eos_token", "unk_token",
    "pad_token", "chat_template", "conversation", "tokenize", "return_dict", "return_tensors", "tokenizer_kwargs",
    "padding", "truncation", "max_length", "loop", "self", "caller", "varargs", "kwargs", "environment", "context"))


class ChatTemplate:
    """A model's chat template and the tokenizer that reads what it renders.

    source: Jinja text; None for a model without one, for which every use is a `RequestError` that says what to do.
    tokenizer: None serves `render` only.
    special_texts: what `bos_token`, `eos_token`, ... are in the template; the tokenizer's by default.
    problem: why the template cannot be used, or None.
    """

    def __init__(self, source: str | None, tokenizer: Tokenizer | None, special_texts: Mapping[str, str] | None = None):
        self.source, self._tokenizer = source, tokenizer
        if special_texts is None:
            special_texts = tokenizer.special_texts if tokenizer else {}
        self._special_texts = dict(special_texts)
        self.problem: str | None = None
        self._template: jinja2.Template | None = None
        try:
            self._template = _compile(source)
        except RequestError as error:
            self.problem = str(error)

    def encode(self, messages: Sequence[Mapping[str, Any]], /, tools: Sequence[Mapping[str, Any]] | None = None,
               add_generation_prompt: bool = True, continue_final_message: bool = False, **kwargs: Any) -> np.ndarray:
        """The prompt's token ids, int32 [n]: control tokens from the template only, and exactly one bos if any.

        Raises `RequestError` for messages the template refuses or cannot render; see `render` for the arguments.
        """
        text = self._render(messages, tools, add_generation_prompt, continue_final_message, kwargs)
        ids = self._tokenizer.encode(text, parse_special=True)
        bos = self._tokenizer.bos_id
        if bos is None:
            return ids
        written = int(np.argmin(np.append(ids == bos, False)))
        if written:
            return ids[written - 1:]
        return np.append(np.int32(bos), ids) if self._tokenizer.add_bos else ids

    def render(self, messages: Sequence[Mapping[str, Any]], /, tools: Sequence[Mapping[str, Any]] | None = None,
               add_generation_prompt: bool = True, continue_final_message: bool = False, **kwargs: Any) -> str:
        """The prompt as text, for people.

        add_generation_prompt: end with the header of the assistant's turn.
        continue_final_message: end inside the last message, which the model goes on with; then no header is added.
        kwargs: further variables of the template, such as `enable_thinking`.
        """
        return self._render(messages, tools, add_generation_prompt, continue_final_message, kwargs).replace(GUARD, "")

    def _render(self, messages: Any, tools: Any, add_generation_prompt: bool, continue_final_message: bool,
                kwargs: dict[str, Any]) -> str:
        if self._template is None:
            raise RequestError(self.problem, param="messages")
        guard = self._tokenizer.guard if self._tokenizer else str
        variables = _guarded(_checked_variables(kwargs), guard)
        turns = _guarded(_plain_messages(messages, "developer" in self.source), guard)
        variables |= self._special_texts | {"messages": turns, "tools": _guarded(_checked_tools(tools), guard)}
        if continue_final_message:
            turns[-1]["content"] += _CONTINUE
        variables["add_generation_prompt"] = bool(add_generation_prompt) and not continue_final_message
        text = _run(self._template, variables)
        return _cut_at_continuation(text) if continue_final_message else text


@functools.cache
def _environment() -> ChatEnvironment:
    return ChatEnvironment()


@functools.lru_cache(maxsize=16)
def _compile(source: str | None) -> jinja2.Template:
    if source is None:
        raise RequestError("this model has no chat template: start the server with --chat-template=FILE, or use "
                           "/v1/completions", param="messages")
    if len(source) > MAX_SOURCE:
        raise RequestError(f"the chat template has {len(source)} characters, more than the limit of {MAX_SOURCE}")
    try:
        with _environment().limit(SECONDS):
            return _environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise RequestError(f"the chat template is malformed in line {error.lineno}: {error.message}") from error
    except Exception as error:
        # Sources can also exhaust Python's own parser: SyntaxError, RecursionError, MemoryError.
        raise RequestError(f"the chat template cannot be compiled: {type(error).__name__}: {error}") from error


def _run(template: jinja2.Template, variables: dict[str, Any]) -> str:
    try:
        with _environment().limit(SECONDS) as budget:
            budget.weigh([variables["messages"], variables["tools"]])
            chunks, size = [], 0
            for chunk in template.generate(variables):
                chunks.append(chunk)
                size += len(chunk)
                if size > MAX_VALUE:
                    raise LimitError(f"it writes more than {MAX_VALUE} characters")
            return "".join(chunks)
    except Refusal as refusal:
        raise RequestError(f"the chat template refuses these messages: {refusal}", param="messages") from None
    except LimitError as error:
        raise RequestError(f"the chat template was stopped: {error}", param="messages") from None
    except Exception as error:
        # A template is a program: given messages it does not expect, it may fail in any way.
        reason = f"{type(error).__name__}: {str(error)[:500]}"
        raise RequestError(f"the chat template cannot render these messages: {reason}",
                           param="messages") from error


def _cut_at_continuation(text: str) -> str:
    """The text up to the end of the last message, trimmed where the template trims messages."""
    place = text.rfind(_CONTINUE[:-1])
    if place < 0:
        raise RequestError("continue_final_message: the chat template leaves out or changes the last message",
                           param="messages")
    return text[:place] if text.startswith(_CONTINUE, place) else text[:place].rstrip()


def _guarded(value: Any, guard: Callable[[str], str], depth: int = 0) -> Any:
    """A copy of JSON data in which no text, key or value, can become a control token."""
    if depth > MAX_DEPTH:
        raise RequestError(f"messages, tools and template variables may nest {MAX_DEPTH} deep, not more")
    if isinstance(value, str):
        check_text(value)
        return guard(value)
    if isinstance(value, Mapping):
        return {_guarded(key, guard, depth + 1): _guarded(item, guard, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_guarded(item, guard, depth + 1) for item in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    raise RequestError(f"{type(value).__name__} is not JSON data, which is all that a chat template may see")


def _checked_variables(kwargs: dict[str, Any]) -> dict[str, Any]:
    for name in kwargs:
        if not name.isidentifier() or name.startswith("_") or name in _RESERVED or name in _environment().globals:
            raise RequestError(f"chat_template_kwargs may not set {name!r}", param="chat_template_kwargs")
    return kwargs


def _checked_tools(tools: Any) -> list | None:
    if tools is None or isinstance(tools, list | tuple) and not tools:
        return None
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, Mapping) for tool in tools):
        raise RequestError("tools must be a list of objects", param="tools")
    return list(tools)


def _plain_messages(messages: Any, knows_developer: bool) -> list[dict[str, Any]]:
    """Messages as templates expect them: text content, arguments of tool calls as objects, nothing null."""
    if not isinstance(messages, list | tuple) or not messages:
        raise RequestError("messages must be a list of at least one message", param="messages")
    return [_plain_message(message, f"messages[{i}]", knows_developer) for i, message in enumerate(messages)]


def _plain_message(message: Any, where: str, knows_developer: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} must be an object, not {type(message).__name__}", param=where)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{where}.role must be a string such as 'user', not {role!r:.100}", param=f"{where}.role")
    turn = {key: value for key, value in message.items() if value is not None}
    if message.get("content") is None and role in ("system", "developer", "user"):
        raise RequestError(f"{where}.content is missing", param=f"{where}.content")
    turn["content"] = _text(message.get("content"), f"{where}.content")
    turn["role"] = "system" if role == "developer" and not knows_developer else role
    if "tool_calls" in turn:
        calls = turn.pop("tool_calls")
        if not isinstance(calls, list | tuple):
            raise RequestError(f"{where}.tool_calls must be a list", param=f"{where}.tool_calls")
        if calls:
            turn["tool_calls"] = [_plain_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    reasoning = next((turn[name] for name in _REASONING if isinstance(turn.get(name), str)), None)
    if reasoning is not None:
        turn = {"thinking": reasoning} | turn | {"reasoning_content": reasoning}
    return turn


def _text(content: Any, where: str) -> str:
    """Content as one text: the parts of a list follow each other as they are."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise RequestError(f"{where} must be text or a list of parts, not {type(content).__name__}", param=where)
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text":
            raise RequestError(f"{where}[{i}] is of type {kind!r:.100}: this model reads only 'text'", param=where)
        if not isinstance(part.get("text"), str):
            raise RequestError(f"{where}[{i}].text must be a string", param=where)
        texts.append(part["text"])
    return "".join(texts)


def _plain_call(call: Any, where: str) -> dict[str, Any]:
    """A tool call whose arguments are an object, which templates write out in their own way."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where} must be an object with function.name", param=where)
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{where}.function.arguments is not JSON: {error}", param=where) from None
    if not isinstance(arguments, Mapping):
        raise RequestError(f"{where}.function.arguments must be a JSON object", param=where)
    return {**call, "function": {**function, "arguments": arguments}}
