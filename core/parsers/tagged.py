"""Calls whose arguments have tags of their own and hold texts as they are: Qwen 3 Coder, GLM, DeepSeek 3.2, MiniMax."""
from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Generator
from typing import Any

from .contract import CALLS, Parser, Tool, Tools
from .hermes import checked_name, parse_json, written
from .json_text import read_json, write_json
from .layout import CallFormat, Group, Written, grouped, pairs
from .reader import CallReader, Malformed, Step

Arguments = dict[str, Any]


def schema_of(tool: Tool | None, key: str) -> dict[str, Any]:
    """The schema of one argument; {} where nothing is known."""
    properties = tool.parameters.get("properties") if tool is not None else None
    found = properties.get(key) if isinstance(properties, dict) else None
    return found if isinstance(found, dict) else {}


def kinds_of(schema: dict[str, Any]) -> set[str]:
    """The JSON types that a schema names, also in its alternatives; empty for none."""
    kind = schema.get("type")
    found = {each for each in (kind if isinstance(kind, list) else [kind]) if isinstance(each, str)}
    for name in ("anyOf", "oneOf"):
        for each in schema[name] if isinstance(schema.get(name), list) else ():
            if isinstance(each, dict):
                found |= kinds_of(each)
    if "enum" in schema and not found and isinstance(schema["enum"], list):
        found = {"string" if isinstance(each, str) else "other" for each in schema["enum"]}
    return found


def convert(text: str, schema: dict[str, Any]) -> Any:
    """The value that a model wrote as plain text. Text stays text unless its schema wants something else."""
    kinds = kinds_of(schema)
    if kinds == {"string"}:
        return text
    try:
        value = read_json(text.strip())
    except ValueError:
        value = _PYTHON.get(text.strip(), text)
    if isinstance(value, str) and "string" in kinds:
        return text
    if kinds and "string" in kinds and not _fits(value, kinds - {"string"}):
        return text
    return value


_PYTHON = {"True": True, "False": False, "None": None}
_TYPES = {"integer": int, "number": (int, float), "boolean": bool, "array": list, "object": dict, "null": type(None)}


def _fits(value: Any, kinds: set[str]) -> bool:
    return any(isinstance(value, _TYPES.get(kind, ())) and (kind == "boolean" or not isinstance(value, bool))
               for kind in kinds)


def plain_value(schema: dict[str, Any], end: str, tool: Tool) -> Any:
    """The layout of an argument that is written as plain text up to `end`; None for one that cannot be enforced so."""
    kinds = kinds_of(schema)
    if kinds and "string" not in kinds:
        return [{"json": schema, "name": tool.name, "strict": tool.strict}, end]
    if kinds == {"string"} and isinstance(schema.get("enum"), list):
        words = [each + end for each in schema["enum"] if isinstance(each, str)]
        return {"any": words} if words else None
    return {"text": end} if not tool.strict or not _LIMITS & schema.keys() else None


_LIMITS = {"pattern", "format", "minLength", "maxLength", "const", "enum", "allOf", "oneOf", "$ref"}


class PairsFormat(CallFormat):
    """Arguments as pairs of a key and a value that is written as it is."""

    @abstractmethod
    def texts(self, name: str) -> tuple[str, str]:
        """What opens and closes a call."""

    @abstractmethod
    def pair(self, key: str, schema: dict[str, Any]) -> tuple[str, str]:
        """What stands before and behind a value."""

    def layout(self, tools: Tools, least: int, most: int | None, content: Any = None) -> Any:
        calls = [self._call(tool) for tool in tools.values()]
        return None if None in calls else grouped(calls, least, most, self.group, content)

    def _call(self, tool: Tool) -> list[Any] | None:
        def pair(key: str, schema: dict[str, Any]) -> Any:
            before, behind = self.pair(key, schema)
            value = plain_value(schema, behind, tool)
            return None if value is None or set(key) & set('<>"\n') else [before, value]
        opening, closing = self.texts(tool.name)
        return pairs(opening, tool, pair, "", closing)


class QwenCoderReader(CallReader):
    """<tool_call><function=f><parameter=a>text</parameter></function></tool_call>, the outer tags perhaps missing.
    Functionary writes one JSON object in place of the parameters."""

    def __init__(self, format: CallFormat, tools: Tools):
        self._tools = tools
        super().__init__(format)

    def read(self) -> Step:
        while (mark := (yield from self.until("<tool_call>", "<function="))):
            self.hold(mark)
            try:
                if mark == "<tool_call>":
                    yield from self.blank()
                    yield from self.need("<function=")
                name, _ = yield from self.capture(">")
                arguments = yield from self._arguments(checked_name(name.strip().strip('"')))
                self.call(name.strip().strip('"'), arguments)
            except Malformed:
                self.give_back()
                continue
            yield from self.blank()
            yield from self.match("</tool_call>")
        self.end()

    def _arguments(self, name: str) -> Generator[None, None, str]:
        tool, found = self._tools.get(name), {}
        yield from self.blank()
        if self._text.startswith("{", self._at):
            arguments = written(parse_json((yield from self.json())))
            yield from self.blank()
            yield from self.need("</function>")
            return arguments
        while (yield from self.need("<parameter=", "</function>")) != "</function>":
            key, _ = yield from self.capture(">")
            value, _ = yield from self.capture("</parameter>")
            yield from self.blank()
            found[key] = convert(value.removeprefix("\n").removesuffix("\n"), schema_of(tool, key))
        return write_json(found)


class QwenCoder(PairsFormat):
    """Qwen 3 Coder, Nemotron 3, Step 3.5."""

    signs = (("<function=", "<parameter="),)
    controls = ("<tool_call>", "</tool_call>")
    group = Group("<tool_call>", "\n")

    def parser(self, tools: Tools) -> Parser:
        return QwenCoderReader(self, tools)

    def texts(self, name: str) -> tuple[str, str]:
        return f"<tool_call>\n<function={name}>\n", "</function>\n</tool_call>"

    def pair(self, key: str, schema: dict[str, Any]) -> tuple[str, str]:
        return f"<parameter={key}>\n", "\n</parameter>\n"


class Functionary(CallFormat):
    """Functionary 3.1 and Llama 3 in its own words: <function=f>{...}</function>."""

    signs = (("<function=", "</function>"),)
    written = Written("<function=", ">", "</function>")
    group = Group("<function=", "\n")

    def parser(self, tools: Tools) -> Parser:
        return QwenCoderReader(self, tools)



class GlmReader(CallReader):
    """<tool_call>f<arg_key>a</arg_key><arg_value>text</arg_value></tool_call>"""

    def __init__(self, format: CallFormat, tools: Tools):
        self._tools = tools
        super().__init__(format)

    def read(self) -> Step:
        while (mark := (yield from self.until("<tool_call>"))):
            self.hold(mark)
            try:
                name, mark = yield from self.capture("<arg_key>", "</tool_call>")
                name, found = checked_name(name.strip()), {}
                while mark == "<arg_key>":
                    key, _ = yield from self.capture("</arg_key>")
                    yield from self.blank()
                    yield from self.need("<arg_value>")
                    value, _ = yield from self.capture("</arg_value>")
                    found[key.strip()] = convert(value, schema_of(self._tools.get(name), key.strip()))
                    yield from self.blank()
                    mark = yield from self.need("<arg_key>", "</tool_call>")
                self.call(name, write_json(found))
            except Malformed:
                self.give_back()
        self.end()


class Glm(PairsFormat):
    """GLM 4.5 to 4.7."""

    signs = (("<arg_key>", "<tool_call>"),)
    controls = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    group = Group("<tool_call>", "\n")

    def parser(self, tools: Tools) -> Parser:
        return GlmReader(self, tools)

    def texts(self, name: str) -> tuple[str, str]:
        return f"<tool_call>{name}", "</tool_call>"

    def pair(self, key: str, schema: dict[str, Any]) -> tuple[str, str]:
        return f"<arg_key>{key}</arg_key><arg_value>", "</arg_value>"


class InvokeReader(CallReader):
    """A group of <invoke name="f"><parameter name="a">text</parameter></invoke>, all words with a prefix."""

    def __init__(self, format: Invoke, tools: Tools):
        self._prefix, self._groups, self._tools = format.prefix, format.groups, tools
        super().__init__(format)

    def read(self) -> Step:
        prefix = self._prefix
        begins = tuple(f"<{group}>" for group in self._groups)
        while (mark := (yield from self.until(*begins))):
            self.hold(mark)
            end, first = mark.replace("<", "</", 1), True
            try:
                while True:
                    yield from self.blank()
                    if (yield from self.need(f"<{prefix}invoke ", end)) == end:
                        break
                    self.call(*(yield from self._invoke()))
                    self.hold()
                    first = False
                if first:
                    raise Malformed
                self.release()
            except Malformed:
                self.give_back()
        self.end()

    def _invoke(self) -> Generator[None, None, tuple[str, str]]:
        prefix, found = self._prefix, {}
        head, _ = yield from self.capture(">")
        name = checked_name(_attribute(head, "name"))
        tool = self._tools.get(name)
        while True:
            yield from self.blank()
            if (yield from self.need(f"<{prefix}parameter ", f"</{prefix}invoke>")) == f"</{prefix}invoke>":
                return name, write_json(found)
            head, _ = yield from self.capture(">")
            value, _ = yield from self.capture(f"</{prefix}parameter>")
            key, is_text = _attribute(head, "name"), _attribute(head, "string")
            if key is None:
                raise Malformed
            schema = {"type": "string"} if is_text == "true" else schema_of(tool, key)
            found[key] = convert(value, {} if is_text == "false" else schema)


def _attribute(head: str, name: str) -> str | None:
    found = re.search(rf'\b{name}="([^"]*)"', head)
    return found[1] if found else None


class Invoke(PairsFormat):
    """prefix: of all words. groups: names of the tag around all calls, the usual one first."""

    prefix, groups = "", ("",)

    def __init__(self) -> None:
        word = self.groups[0]
        self.group = Group(f"<{word}>", "\n", f"<{word}>\n", f"\n</{word}>")

    def parser(self, tools: Tools) -> Parser:
        return InvokeReader(self, tools)

    def texts(self, name: str) -> tuple[str, str]:
        return f'<{self.prefix}invoke name="{name}">\n', f"</{self.prefix}invoke>"

    def pair(self, key: str, schema: dict[str, Any]) -> tuple[str, str]:
        return f'<{self.prefix}parameter name="{key}">', f"</{self.prefix}parameter>\n"


class DeepSeekTags(Invoke):
    """DeepSeek 3.2 and 4."""

    signs = (("\uff5cDSML\uff5c",),)
    controls = ("\uff5cDSML\uff5c",)
    prefix = "\uff5cDSML\uff5c"
    groups = (prefix + "tool_calls", prefix + "function_calls")

    def pair(self, key: str, schema: dict[str, Any]) -> tuple[str, str]:
        before, behind = super().pair(key, schema)
        return before[:-1] + f' string="{"true" if kinds_of(schema) == {"string"} else "false"}">', behind


class MiniMax(Invoke):
    """MiniMax M2."""

    signs = (("<minimax:tool_call>",), ("minimax:tool_call",))
    controls = ("<minimax:tool_call>", "</minimax:tool_call>")
    groups = ("minimax:tool_call",)


CALLS.register("qwen3-coder", QwenCoder)
CALLS.register("functionary", Functionary)
CALLS.register("glm", Glm)
CALLS.register("deepseek-dsml", DeepSeekTags)
CALLS.register("minimax", MiniMax)
