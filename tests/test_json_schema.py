"""Schemas: every one that is taken allows valid instances only; by a sample of our own, the suite and real ones."""
from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import jsonschema
import pytest
from isthmus.core.grammar.contract import GrammarError
from isthmus.core.grammar.library import open_backend

from .json_schema_suite import Bytes, Group, api_schemas, judge, read_groups, sentence, tool_schemas

COST = 15  # seconds

DATA = Path(__file__).resolve().parent.parent.parent / "shared" / "data"
SUITE, TOOLS = DATA / "json_schema_test_suite" / "tests", DATA / "bfcl" / "data"
API = DATA / "openai_openapi" / "openapi.json"
DRAFTS = ["draft4", "draft6", "draft7", "draft2019-09", "draft2020-12"]
TAKEN = {"draft4": 140, "draft6": 170, "draft7": 175, "draft2019-09": 190, "draft2020-12": 190}  # at least

CARD = {"type": "object", "required": ["name", "born"], "additionalProperties": False, "properties": {
    "name": {"type": "string", "minLength": 1, "maxLength": 5}, "born": {"type": "string", "format": "date"},
    "email": {"type": "string", "format": "email"}, "score": {"type": "number", "minimum": 0, "maximum": 10}}}
TREE = {"$ref": "#/$defs/node", "$defs": {"node": {"type": "object", "additionalProperties": False, "properties": {
    "tag": {"enum": ["a", "b"]}, "kids": {"type": "array", "maxItems": 2, "items": {"$ref": "#/$defs/node"}}},
    "required": ["tag", "kids"]}}}
# schema, valid instances, invalid ones
OWN = [
    (CARD, [{"name": "x", "born": "2024-02-29"}], [{"name": "", "born": "2024-02-29"}, {"name": "x"},
                                                   {"name": "x", "born": "2023-02-29"}, {"name": "x", "born": 1},
                                                   {"name": "x", "born": "2024-02-29", "score": 11}]),
    (TREE, [{"tag": "a", "kids": [{"tag": "b", "kids": []}]}], [{"tag": "a"}, {"tag": "c", "kids": []},
                                                               {"tag": "a", "kids": [1]}]),
    ({"type": ["integer", "null"]}, [1, None, -3], [1.5, "1", True, []]),
    ({"const": {"a": [1, "z", None]}}, [{"a": [1, "z", None]}], [{"a": [1, "z"]}, {"a": [1, "z", None], "b": 1}]),
    ({"enum": ["a", 1, None, [2]]}, ["a", 1, None, [2]], ["b", 2, [1], True]),
    ({"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False}, [[1, "a"], [1], []],
     [["a"], [1, "a", 2]]),
    ({"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2}, [[True], [True, False]],
     [[], [True] * 3, [1]]),
    ({"type": "integer", "minimum": -3, "exclusiveMaximum": 12, "multipleOf": 3}, [-3, 0, 9], [-6, 12, 4]),
    ({"type": "string", "pattern": "^[a-c]+\\d?$"}, ["abc1", "a"], ["", "abcd", "1"]),
    ({"type": "string", "pattern": "b"}, ["abc", "b"], ["ac", ""]),
    ({"anyOf": [{"type": "string", "maxLength": 1}, {"type": "integer"}]}, ["a", 5], ["ab", 1.5, None]),
    ({"oneOf": [{"type": "object", "properties": {"k": {"const": "x"}}, "required": ["k"]},
                {"type": "object", "properties": {"k": {"const": "y"}}, "required": ["k"]}]}, [{"k": "x"}, {"k": "y"}],
     [{"k": "z"}, {}]),
    ({"allOf": [{"type": "integer"}, {"minimum": 3}, {"maximum": 5}]}, [3, 5], [2, 6, 4.5]),
    ({"type": "object", "patternProperties": {"^n_": {"type": "number"}}, "additionalProperties": {"type": "string"}},
     [{"n_a": 1, "b": "x"}, {}], [{"n_a": "x"}, {"b": 1}]),
    ({"type": "object", "minProperties": 1, "maxProperties": 2}, [{"a": 1}, {"a": 1, "b": 2}],
     [{}, {"a": 1, "b": 2, "c": 3}]),
    ({"format": "uuid", "type": "string"}, ["2eb8aa08-aa98-11ea-b4aa-73b441d16380"], ["2eb8aa08"]),
    ({"format": "ipv4", "type": "string"}, ["10.0.255.1"], ["10.0.256.1", "10.0.1"]),
    ({"format": "time", "type": "string"}, ["23:59:59Z", "00:00:00.25+01:30"], ["24:00:00Z", "23:59:60Z", "00:00:00"]),
    ({"type": "object", "properties": {"a": {}}, "required": ["a", "b"]}, [{"a": 1, "b": 2}], [{"a": 1}, {"b": 1}]),
    ({}, [1, "a", None, {"a": []}], []),
]
# Of its formats "time" is another, without a zone.
CHECKER = jsonschema.FormatChecker({"date", "ipv4", "ipv6", "uuid", "email"} & {*jsonschema.FormatChecker.checkers})


@pytest.fixture(scope="module")
def backend():
    return open_backend("llguidance", Bytes())


@pytest.mark.parametrize("number", range(len(OWN)))
def test_our_own_sample(backend, number):
    schema, valid, invalid = OWN[number]
    tests = [("valid", each, True) for each in valid] + [("invalid", each, False) for each in invalid]
    assert judge(backend, Group("", "", schema, tests)) == ("", [], [])
    grammar, rng = backend.compile("json_schema", json.dumps(schema)), random.Random(number)
    made = [text for text in (sentence(grammar, rng) for _ in range(4)) if text is not None]
    assert made
    for text in made:
        jsonschema.validate(json.loads(text), schema, format_checker=CHECKER)


@pytest.mark.parametrize("draft", DRAFTS)
def test_the_suite(backend, draft):
    """No invalid instance of any schema that is taken."""
    if not (SUITE / draft).is_dir():
        pytest.skip(f"no {SUITE / draft}")
    verdicts = [(group, judge(backend, group)) for group in read_groups(SUITE / draft)]
    wrong = [(group.file, group.name, name) for group, verdict in verdicts for name in verdict.wrong]
    assert not wrong
    assert sum(not verdict.refused for _, verdict in verdicts) >= TAKEN[draft]


def check_real(backend, schemas, seed: int) -> Counter:
    """Sentences of all schemas that are taken, each valid."""
    counts: Counter[str] = Counter()
    rng = random.Random(seed)
    for schema in schemas:
        try:
            grammar = backend.compile("json_schema", json.dumps(schema))
        except GrammarError as error:
            counts["refused"] += 1
            counts[error.message.split("\n")[0][-60:]] += 1
            continue
        counts["taken"] += 1
        text = sentence(grammar, rng, 1500)
        if text is not None:
            counts["sentences"] += 1
            # Some of these schemas are themselves not quite valid: a name is required twice.
            jsonschema.Draft202012Validator(schema, format_checker=CHECKER).validate(json.loads(text))
    return counts


@pytest.mark.parametrize("most", [60, pytest.param(2500, marks=pytest.mark.slow)])
def test_real_tools(backend, most):
    if not TOOLS.is_dir():
        pytest.skip(f"no {TOOLS}")
    counts = check_real(backend, tool_schemas(TOOLS, most), 1)
    assert counts["taken"] >= 0.97 * (counts["taken"] + counts["refused"]), counts
    assert counts["sentences"] >= 0.8 * counts["taken"]


@pytest.mark.parametrize("most", [40, pytest.param(2000, marks=pytest.mark.slow)])
def test_real_schemas_of_an_api(backend, most):
    if not API.is_file():
        pytest.skip(f"no {API}")
    counts = check_real(backend, api_schemas(API, most), 2)
    assert counts["taken"] >= 0.5 * (counts["taken"] + counts["refused"]), counts
