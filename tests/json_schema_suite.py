"""The JSON Schema Test Suite against a grammar backend: which schemas are taken, and what they then allow.

    python -m tests.json_schema_suite [--backend xgrammar] ../shared/data/json_schema_test_suite/tests/draft2020-12

prints the table of docs/structured_output.md. A schema is taken or refused; of one that is taken no invalid instance
may be allowed, and valid ones may be missed (other spellings of a number, another order of keys).
"""
from __future__ import annotations

import json
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from isthmus.core.grammar.contract import GrammarBackend, GrammarError
from isthmus.core.grammar.library import open_backend

END = 256
CLOSING = {*b'"]}', END}


class Bytes:
    """A vocabulary of all bytes and an end, for `core.grammar`."""

    size, eos, special, names, spells = END + 1, (END,), frozenset((END,)), {}, True
    tokens = [bytes([byte]) for byte in range(256)] + [b"<end>"]

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


class Group(NamedTuple):
    """A schema of the suite. tests: (description, instance, valid)."""

    file: str
    name: str
    schema: Any
    tests: list[tuple[str, Any, bool]]


class Verdict(NamedTuple):
    """refused: why, "" when it is taken. wrong: descriptions of invalid instances that are allowed; missed: of valid
    ones that are not."""

    refused: str
    wrong: list[str]
    missed: list[str]


def tool_schemas(folder: Path, most: int) -> Iterator[Any]:
    """Parameters of real tools (BFCL), which call types by Python's names."""
    names = {"dict": "object", "float": "number", "tuple": "array", "list": "array", "String": "string",
             "HashMap": "object", "ArrayList": "array", "Array": "array", "double": "number", "long": "integer"}

    def translated(value: Any) -> Any:
        if isinstance(value, list):
            return [translated(each) for each in value]
        if not isinstance(value, dict):
            return value
        found = {key: translated(each) for key, each in value.items()}
        kind = found.get("type")
        if isinstance(kind, str):
            if kind.lower() == "any":
                del found["type"]
            else:
                found["type"] = names.get(kind, kind)
        return found
    seen: set[str] = set()
    for path in sorted(folder.glob("BFCL_v4_*.json")):
        if "format_sensitivity" in path.name:  # no tools
            continue
        for line in path.read_text("utf-8").splitlines():
            for tool in json.loads(line).get("function", []):
                text = json.dumps(translated(tool.get("parameters", {})))
                if text not in seen and len(seen) < most:
                    seen.add(text)
                    yield json.loads(text)


def api_schemas(path: Path, most: int) -> Iterator[Any]:
    """Named schemas of an OpenAPI description, each with those that it refers to."""
    parts = json.loads(path.read_text("utf-8"))["components"]["schemas"]
    for name in sorted(parts)[:most]:
        needed, waiting = {}, [name]
        while waiting:
            each = waiting.pop()
            if each not in needed and each in parts:
                text = json.dumps(parts[each])
                needed[each] = json.loads(text.replace("#/components/schemas/", "#/$defs/"))
                waiting += re.findall(r'"#/components/schemas/(\w+)"', text)
        yield {"$ref": f"#/$defs/{name}", "$defs": needed}


def read_groups(folder: Path) -> Iterator[Group]:
    for path in sorted(folder.rglob("*.json")):
        for group in json.loads(path.read_text("utf-8")):
            tests = [(test["description"], test["data"], test["valid"]) for test in group["tests"]]
            yield Group(str(path.relative_to(folder)), group["description"], group["schema"], tests)


def allows(backend: GrammarBackend, grammar: Any, instance: Any) -> bool:
    """Whether the grammar has this instance, as `json.dumps` writes it."""
    matcher = grammar.start()
    for byte in json.dumps(instance, ensure_ascii=False).encode("utf-8", "surrogatepass"):
        if not matcher.accept(byte):
            return False
    return END in next_tokens(matcher)


def next_tokens(matcher: Any) -> list[int]:
    """Those that the mask allows."""
    row = np.zeros(9, np.uint32)
    matcher.fill(row)
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


def sentence(grammar: Any, rng: random.Random, most: int = 4000) -> str | None:
    """A random text of a grammar that hurries to its end; None when it is not there after `most` bytes."""
    matcher, out = grammar.start(), bytearray()
    for _ in range(most):
        choices = next_tokens(matcher)
        assert choices, f"nothing may follow {bytes(out)!r}"
        ends = [t for t in choices if t in CLOSING]
        token = rng.choice(ends if ends and rng.random() < 0.6 else choices)
        if token == END:
            return out.decode()
        assert matcher.accept(token)
        out.append(token)
        if matcher.is_complete():
            return out.decode()
    return None


def judge(backend: GrammarBackend, group: Group) -> Verdict:
    try:
        grammar = backend.compile("json_schema", json.dumps(group.schema))
    except GrammarError as error:
        return Verdict(error.message, [], [])
    found = [(name, valid, allows(backend, grammar, instance)) for name, instance, valid in group.tests]
    return Verdict("", [name for name, valid, allowed in found if allowed and not valid],
                   [name for name, valid, allowed in found if valid and not allowed])


def main(words: list[str]) -> None:
    name, folders = (words[1], words[2:]) if words[:1] == ["--backend"] else ("llguidance", words)
    backend = open_backend(name, Bytes())
    print("| draft | schemas | taken | refused | instances | invalid allowed | valid missed |")
    print("|---|---|---|---|---|---|---|")
    reasons: Counter[str] = Counter()
    for folder in map(Path, folders):
        groups = list(read_groups(folder))
        verdicts = [judge(backend, group) for group in groups]
        taken = [(g, v) for g, v in zip(groups, verdicts, strict=True) if not v.refused]
        wrong, missed = sum(len(v.wrong) for _, v in taken), sum(len(v.missed) for _, v in taken)
        print(f"| {folder.name} | {len(groups)} | {len(taken)} | {len(groups) - len(taken)} | "
              f"{sum(len(g.tests) for g, _ in taken)} | {wrong} | {missed} |")
        reasons.update(v.refused.split("\n")[0] for v in verdicts if v.refused)
    for reason, count in reasons.most_common(12):
        print(f"{count:5}  {reason[:110]}")


if __name__ == "__main__":
    main(sys.argv[1:])
