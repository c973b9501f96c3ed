"""Items, of which a conversation consists here: checked, as they are kept, and as messages of a chat."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ...errors import RequestError, shown
from ..conversation import MEDIA_PARTS, fault
from .body import joined

ROLES = ("user", "assistant", "system", "developer")

Item = dict[str, Any]


def input_items(given: Any, id: Callable[[str], str], find: Callable[[str], Item | None]) -> list[Item]:
    """The items of `input`, each whole and with an id. id: prefix -> a new one. find: the item that a reference means.
    Raises the 400 that names the place of a fault."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise fault("input", "is required: text or a list of items" if given is None else
                    f"must be text or a list of items; got {shown(given)}")
    if not given:
        raise fault("input", "is empty: at least one item is needed")
    return [_item(item, f"input[{i}]", id, find) for i, item in enumerate(given)]


def _item(item: Any, path: str, id: Callable[[str], str], find: Callable[[str], Item | None]) -> Item:
    if not isinstance(item, dict):
        raise fault(path, f"must be an object; got {shown(item)}")
    kind = item.get("type") or ("message" if "role" in item else "item_reference" if "id" in item else None)
    if kind == "item_reference":
        found = find(_text(item, "id", path))
        if found is None:
            raise RequestError(f"{path}.id names the item {shown(item['id'])}, which is not kept here", status=404,
                               param=f"{path}.id", code="item_not_found")
        return found
    if not isinstance(kind, str) or kind not in READERS:
        raise fault(f"{path}.type", f"is {shown(kind)}: there are {', '.join(READERS)} and item_reference",
                    "unsupported_parameter")
    prefix, read = READERS[kind]
    given = item.get("id")
    return {"type": kind, "id": given if isinstance(given, str) and given else id(prefix), **read(item, path)}


def _text(item: Item, name: str, path: str) -> str:
    if not isinstance(item.get(name), str):
        raise fault(f"{path}.{name}", f"must be a string; got {shown(item.get(name))}")
    return item[name]


def _message(item: Item, path: str) -> Item:
    role = item.get("role")
    if role not in ROLES:
        raise fault(f"{path}.role", f"must be one of {', '.join(ROLES)}; got {shown(role)}")
    content, part = item.get("content"), "output_text" if role == "assistant" else "input_text"
    content = [{"type": part, "text": content}] if isinstance(content, str) else content
    return {"role": role, "status": "completed", "content": _parts(content, f"{path}.content", part)}


def _parts(content: Any, path: str, kind: str) -> list[Item]:
    """Parts of text, all of one kind."""
    if not isinstance(content, list):
        raise fault(path, f"must be a string or a list of parts; got {shown(content)}")
    found = []
    for i, part in enumerate(content):
        given = part.get("type") if isinstance(part, dict) else None
        if given in MEDIA_PARTS:
            raise fault(f"{path}[{i}]", f"has type {given!r}: images, audio and files are not supported yet",
                        "unsupported_parameter")
        if given == "refusal" and isinstance(part.get("refusal"), str):
            found.append({"type": "refusal", "refusal": part["refusal"]})
        elif given in ("input_text", "output_text", "text", "summary_text", "reasoning_text") and isinstance(
                part.get("text"), str):
            found.append({"type": kind, "text": part["text"],
                          **({"annotations": [], "logprobs": []} if kind == "output_text" else {})})
        else:
            raise fault(f"{path}[{i}]", f"must be {{'type': '{kind}', 'text': ...}}; got {shown(part)}")
    return found


def _call(item: Item, path: str) -> Item:
    space = {"namespace": item["namespace"]} if isinstance(item.get("namespace"), str) and item["namespace"] else {}
    return {"call_id": _text(item, "call_id", path), "name": _text(item, "name", path), **space,
            "arguments": _text(item, "arguments", path), "status": "completed"}


def _output(item: Item, path: str) -> Item:
    output = item.get("output")
    if not isinstance(output, str):
        output = _parts(output, f"{path}.output", "input_text")
    return {"call_id": _text(item, "call_id", path), "output": output, "status": "completed"}


def _reasoning(item: Item, path: str) -> Item:
    """Reasoning that another server has encrypted cannot be read, and is left out, as it would be by its template."""
    return {"summary": _parts(item.get("summary") or [], f"{path}.summary", "summary_text"),
            "content": _parts(item.get("content") or [], f"{path}.content", "reasoning_text")}


READERS: dict[str, tuple[str, Callable[[Item, str], Item]]] = {
    "message": ("msg", _message), "function_call": ("fc", _call), "function_call_output": ("fco", _output),
    "reasoning": ("rs", _reasoning)}


def chat_messages(items: list[Item]) -> tuple[list[dict[str, Any]], list[int]]:
    """Messages for the chat template, and for each the item that it begins with. What the assistant thought, said and
    called between two others is one message."""
    made: list[Part] = []
    for i, item in enumerate(items):
        part = _part(item, i)
        if item["type"] == "reasoning" and not part.thoughts:  # encrypted by somebody else
            continue
        if made and part.role == made[-1].role == "assistant" and made[-1].may_go_on(item["type"]):
            made[-1].add(part)
        else:
            made.append(part)
    return [part.message() for part in made], [part.begin for part in made]


@dataclass
class Part:
    """A message that grows. begin: number of its first item. texts, thoughts: what is not empty."""

    role: str
    begin: int
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[Item] = field(default_factory=list)
    answers: str | None = None

    def may_go_on(self, kind: str) -> bool:
        """Can an item of this kind follow what is in an assistant's message already?"""
        return kind == "function_call" or not self.texts and not self.calls

    def add(self, other: Part) -> None:
        self.texts += other.texts
        self.thoughts += other.thoughts
        self.calls += other.calls

    def message(self) -> dict[str, Any]:
        """In chat's form."""
        more = {"reasoning_content": "".join(self.thoughts), "tool_calls": self.calls, "tool_call_id": self.answers}
        return {"role": self.role, "content": "".join(self.texts), **{k: v for k, v in more.items() if v}}


def _part(item: Item, begin: int) -> Part:
    kind = item["type"]
    if kind == "message":
        return Part(item["role"], begin, _filled(plain(item["content"])))
    if kind == "function_call_output":
        output = item["output"]
        return Part("tool", begin, _filled(output if isinstance(output, str) else plain(output)),
                    answers=item["call_id"])
    if kind == "reasoning":
        return Part("assistant", begin, thoughts=_filled(plain(item["content"] or item["summary"])))
    return Part("assistant", begin, calls=[{"id": item["call_id"], "type": "function", "function": {
        "name": joined(item.get("namespace", ""), item["name"]), "arguments": item["arguments"]}}])


def _filled(text: str) -> list[str]:
    return [text] if text else []


def plain(parts: list[Item]) -> str:
    """The texts of parts, put together."""
    return "".join(part["refusal"] if part["type"] == "refusal" else part["text"] for part in parts)
