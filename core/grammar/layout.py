"""Layouts of outputs: literal texts, JSON, free texts and their repetitions as a tree, which becomes a Lark grammar.

A node is one of:
    "text"                                              itself; control tokens by their spelling
    [node, ...]                                         one after the other
    {"any": [node, ...]}                                one of them
    {"many": node, "between": "text", "least": n, "most": n or null}
    {"json": schema, "name": "text", "strict": bool}    a JSON value; name: whose it is, for messages; a schema that
                                                        cannot be enforced is an error if strict, else any object
    {"text": "end"}                                     any text up to `end`, which is a part of it
    {"plain": "characters"}                             any text that begins with none of these, white space aside
    {"free": "trigger", "then": node, "most": 1 or null}
                                                        any text, in which `trigger` begins a node; with most 1 the
                                                        output ends behind it, else there may be more
"""
from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from .contract import GrammarError
from .schema import check
from .tags import TEXT, words

MAX_NODES = 20_000
MAX_DEPTH = 20
Refuses = Callable[[Any], str]  # "" or why a schema cannot be enforced


def layout_to_lark(source: str, names: Mapping[str, int], spaces: str, refuses: Refuses | None = None) -> str:
    """The grammar. names: control tokens by their spelling. spaces: between the parts of JSON. refuses: asks the
    library of each schema, for a second try when the whole was refused. Raises `GrammarError`."""
    writer = _Writer(names, spaces, refuses)
    start = writer.node(json.loads(source), 0)
    return "\n".join([f"start: {start or writer.nothing()}", *writer.lines])


class _Writer:
    """Collects rules."""

    def __init__(self, names: Mapping[str, int], spaces: str, refuses: Refuses | None):
        self._names, self._spaces, self._refuses = names, spaces, refuses
        self.lines = [f"TEXT: {TEXT}"]
        self._count = 0

    def nothing(self) -> str:
        return '""'

    def node(self, node: Any, depth: int) -> str:
        """An expression for a node; "" for nothing."""
        self._count += 1
        if self._count > MAX_NODES or depth > MAX_DEPTH:
            raise GrammarError("there are too many tools, or too much in them")
        if isinstance(node, str):
            return words(node, self._names)
        if isinstance(node, list):
            return " ".join(filter(None, [self.node(each, depth + 1) for each in node]))
        kind = next(iter(node))
        return getattr(self, f"_{kind}")(node, depth + 1)

    def _rule(self, body: str, attributes: str = "") -> str:
        name = f"n{len(self.lines)}"
        self.lines.append(f"{name}{attributes}: {body}")
        return name

    def _any(self, node: dict[str, Any], depth: int) -> str:
        found = [self.node(each, depth) or self.nothing() for each in node["any"]]
        return found[0] if len(found) == 1 else self._rule(" | ".join(found))

    def _many(self, node: dict[str, Any], depth: int) -> str:
        one, least, most = self._rule(self.node(node["many"], depth)), node["least"], node["most"]
        between = words(node["between"], self._names)
        if most == 1:
            return one if least else f"{one}?"
        more = f"({between} {one})"
        last = "*" if most is None else f"{{0,{most - max(1, least)}}}"
        whole = " ".join([one, *[more] * (max(1, least) - 1), more + last])
        return whole if least else f"({whole})?"

    def _json(self, node: dict[str, Any], depth: int) -> str:
        try:
            schema = check(json.dumps(node["json"]))
            why = self._refuses(schema) if self._refuses is not None else ""
        except GrammarError as error:
            why = error.message
        if why and node["strict"]:
            raise GrammarError(f"{node['name']}: {why}" if node["name"] else why)
        if why:
            schema = {"type": "object"}
        if isinstance(schema, dict):
            schema = {**schema, "x-guidance": {"whitespace_pattern": self._spaces}}
        return f"%json {json.dumps(schema)}"

    def _text(self, node: dict[str, Any], depth: int) -> str:
        return self._up_to(node["text"])

    def _up_to(self, end: str) -> str:
        """Any text up to `end`, whose first control token, if it has one, ends it."""
        known = sorted((name for name in self._names if name and name in end), key=end.index)
        before, after = (end, "") if not known else (end[:end.index(known[0])], end[end.index(known[0]):])
        if not before:
            return f"TEXT {words(after, self._names)}"
        return f"{self._rule(f'TEXT {json.dumps(before)}', '[lazy]')} {words(after, self._names)}".strip()

    def _plain(self, node: dict[str, Any], depth: int) -> str:
        name = f"PLAIN_{len(self.lines)}"
        self.lines.append(f"{name}: /[ \\n\\t]*([^ \\n\\t{re.escape(node['plain'])}](.|\\n)*)?/")
        return name

    def _free(self, node: dict[str, Any], depth: int) -> str:
        head, then = self._up_to(node["free"]), self.node(node["then"], depth)
        tail = self._rule("TEXT")
        return f"({head} {then} | {tail})" if node["most"] == 1 else f"({head} {then})* {tail}"
