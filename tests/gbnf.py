"""A recognizer of grammars in GBNF without left recursion, in plain Python: slow, obvious, for tests of grammars."""
from __future__ import annotations

import re
from typing import Any

TOKEN = re.compile(r'\s*(?:("(?:\\.|[^"\\])*")|(\[(?:\\.|[^\]\\])*\])|(\{\d+(?:,\d*)?\})|([A-Za-z]\w*)|([()|*+?]))')
ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "b": "\b"}
HEX = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)


def plain(text: str) -> str:
    """Without escapes."""
    return HEX.sub(lambda m: chr(int(m[1] or m[2] or m[3], 16)) if m[4] is None else ESCAPES.get(m[4], m[4]), text)


class Gbnf:
    """`matches(text)` says whether a text is a sentence of the rule root."""

    def __init__(self, source: str):
        self.rules: dict[str, Any] = {}
        for line in source.strip().splitlines():
            name, _, body = line.partition("::=")
            self._tokens = [match[match.lastindex] for match in TOKEN.finditer(body)] + [""]
            assert not TOKEN.sub("", body).strip(), line
            self._at = 0
            self.rules[name.strip()] = self._choice()
            assert self._tokens[self._at] == "", line

    def _choice(self) -> Any:
        found = [self._sequence()]
        while self._tokens[self._at] == "|":
            self._at += 1
            found.append(self._sequence())
        return "choice", found

    def _sequence(self) -> Any:
        found = []
        while self._tokens[self._at] not in ("", "|", ")"):
            token = self._tokens[self._at]
            self._at += 1
            if token == "(":
                term = self._choice()
                assert self._tokens[self._at] == ")"
                self._at += 1
            elif token[0] == '"':
                term = "text", plain(token[1:-1])
            elif token[0] == "[":
                term = "class", re.compile(token, re.DOTALL)
            else:
                term = "rule", token
            after = self._tokens[self._at]
            if after in ("*", "+", "?") or after[:1] == "{":
                self._at += 1
                least, _, most = {"*": "0,", "+": "1,", "?": "0,1"}.get(after, after[1:-1]).partition(",")
                most = most if "," in after or after[0] != "{" else least
                term = "repeat", term, int(least), int(most) if most else None
            found.append(term)
        return "sequence", found

    def matches(self, text: str) -> bool:
        self._text, self._known = text, {}
        return len(text) in self._ends(("rule", "root"), 0)

    def _ends(self, node: Any, at: int) -> frozenset[int]:
        """Where what begins here may end."""
        key = id(node) if node[0] != "rule" else node[1], at
        if key not in self._known:
            self._known[key] = frozenset(getattr(self, f"_of_{node[0]}")(node, at))
        return self._known[key]

    def _of_choice(self, node: Any, at: int) -> set[int]:
        return set().union(*(self._ends(each, at) for each in node[1]))

    def _of_sequence(self, node: Any, at: int) -> set[int]:
        places = {at}
        for each in node[1]:
            places = set().union(*(self._ends(each, place) for place in places))
        return places

    def _of_text(self, node: Any, at: int) -> set[int]:
        return {at + len(node[1])} if self._text.startswith(node[1], at) else set()

    def _of_class(self, node: Any, at: int) -> set[int]:
        return {at + 1} if node[1].match(self._text, at) else set()

    def _of_rule(self, node: Any, at: int) -> frozenset[int]:
        return self._ends(self.rules[node[1]], at)

    def _of_repeat(self, node: Any, at: int) -> set[int]:
        _, term, least, most = node
        places, found, count = {at}, {at} if least == 0 else set(), 0
        while places and (most is None or count < most):
            after = set().union(*(self._ends(term, place) for place in places))
            count += 1
            places = after - found if count > least else after
            if count >= least:
                found |= after
        return found
