"""Calls between control tokens of their own, with arguments as JSON: Mistral, DeepSeek 3, Kimi."""
from __future__ import annotations

import hashlib
import re
import secrets
import string

from .contract import CALLS, Parser, Tools
from .hermes import checked_name, parse_json, read_calls, written
from .layout import CallFormat, Group, Written
from .reader import CallReader, Malformed, Step

_NINE = re.compile(r"[A-Za-z0-9]{9}")
DIGITS = string.ascii_letters + string.digits


class MistralReader(CallReader):
    """[TOOL_CALLS] and then f[ARGS]{...}, f{...} or [{"name": "f", "arguments": {...}}]."""

    def read(self) -> Step:
        while (mark := (yield from self.until("[TOOL_CALLS]"))):
            self.hold(mark)
            try:
                yield from self.blank()
                yield from self.more()
                if self._text.startswith("[", self._at) and not (yield from self.match("[CALL_ID]", "[ARGS]")):
                    for name, arguments in read_calls(parse_json((yield from self.json()))):
                        self.call(name, arguments)
                    continue
                yield from self._named()
            except Malformed:
                self.give_back()
        self.end()

    def _named(self) -> Step:
        name, mark = yield from self.capture("[ARGS]", "[CALL_ID]", "{")
        if mark == "[CALL_ID]":
            _, mark = yield from self.capture("[ARGS]", "{")
        if mark == "{":  # a part of the arguments
            self._at -= 1
            self._held[-1] = self._held[-1][:-1]
        yield from self.blank()
        self.call(checked_name(name.strip()), written(parse_json((yield from self.json()))))


class Mistral(CallFormat):
    """Mistral's newer models: Ministral 3, Devstral, Magistral. Its templates want ids of nine letters and digits."""

    signs = (("[TOOL_CALLS]", "[ARGS]"),)
    controls = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    written = Written("[TOOL_CALLS]", "[ARGS]", "")
    group = Group("[TOOL_CALLS]", "")

    def parser(self, tools: Tools) -> Parser:
        return MistralReader(self)

    def call_id(self, index: int, name: str) -> str:
        return "".join(secrets.choice(DIGITS) for _ in range(9))

    def past_id(self, id: str) -> str:
        return id if _NINE.fullmatch(id) else hashlib.blake2b(id.encode(), digest_size=9).hexdigest()[:9]


class MistralList(Mistral):
    """Mistral 7B v0.3, Nemo, Large 2407: one list."""

    signs = (("[TOOL_CALLS]",),)
    written = Written('{"name": "', '", "arguments": ', "}")
    group = Group("[TOOL_CALLS]", ", ", "[TOOL_CALLS][", "]")

    def bound_parser(self, tools: Tools) -> Parser:
        return self.parser(tools)


BEGIN, END = "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"
CALL, BETWEEN, CALL_END = ("<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581sep\uff5c>",
                           "<\uff5ctool\u2581call\u2581end\uff5c>")


class DeepSeekReader(CallReader):
    """Calls of DeepSeek 3, R1 (a type, the name, a block of JSON) and 3.1 (the name, JSON)."""

    def read(self) -> Step:
        while (mark := (yield from self.until(BEGIN, END, CALL))):
            if mark != CALL:
                continue
            self.hold(mark)
            try:
                name, _ = yield from self.capture(BETWEEN)
                if name.strip() == "function":
                    name, _ = yield from self.capture("\n")
                    yield from self.blank()
                    yield from self.match("```json")
                yield from self.blank()
                self.call(checked_name(name.strip()), written(parse_json((yield from self.json()))))
            except Malformed:
                self.give_back()
                continue
            yield from self.blank()
            yield from self.match("```")
            yield from self.blank()
            yield from self.match(CALL_END)
        self.end()


class DeepSeek(CallFormat):
    """DeepSeek 3 and R1."""

    signs = ((CALL, "```json"),)
    controls = (BEGIN, END, CALL, BETWEEN, CALL_END)
    written = Written(f"{CALL}function{BETWEEN}", "\n```json\n", f"\n```{CALL_END}")
    group = Group(BEGIN, "\n", BEGIN, END)

    def parser(self, tools: Tools) -> Parser:
        return DeepSeekReader(self)


class DeepSeek31(DeepSeek):
    """DeepSeek 3.1."""

    signs = ((CALL,),)
    written = Written(CALL, BETWEEN, CALL_END)
    group = Group(BEGIN, "", BEGIN, END)


_ID = re.compile(r"functions\.[\w.-]{1,128}:\d{1,9}", re.ASCII)
K_BEGIN, K_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
K_CALL, K_BETWEEN, K_CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


class KimiReader(CallReader):
    """Ids such as functions.f:0, which the model writes, and JSON."""

    def read(self) -> Step:
        while (mark := (yield from self.until(K_BEGIN, K_END, K_CALL))):
            if mark != K_CALL:
                continue
            self.hold(mark)
            try:
                id, _ = yield from self.capture(K_BETWEEN)
                id = id.strip()
                name = checked_name(id.partition(":")[0].removeprefix("functions."))
                yield from self.blank()
                arguments = written(parse_json((yield from self.json())))
                self.call(name, arguments, id if _ID.fullmatch(id) else None)
            except Malformed:
                self.give_back()
                continue
            yield from self.blank()
            yield from self.match(K_CALL_END)
        self.end()


class Kimi(CallFormat):
    """Kimi K2. The index in an id counts up, which a layout cannot: what is enforced has 0 everywhere."""

    signs = ((K_CALL,),)
    controls = (K_BEGIN, K_END, K_CALL, K_BETWEEN, K_CALL_END)
    written = Written(f"{K_CALL}functions.", f":0{K_BETWEEN}", K_CALL_END)
    group = Group(K_BEGIN, "", K_BEGIN, K_END)

    def parser(self, tools: Tools) -> Parser:
        return KimiReader(self)

    def call_id(self, index: int, name: str) -> str:
        return f"functions.{name}:{index}"


CALLS.register("mistral", Mistral)
CALLS.register("mistral-list", MistralList)
CALLS.register("deepseek", DeepSeek)
CALLS.register("deepseek-v31", DeepSeek31)
CALLS.register("kimi", Kimi)
