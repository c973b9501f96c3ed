"""Schemas written as rules: what is taken allows valid instances only, and what cannot be written is refused.

Here the rules are read by a recognizer of our own; tests/test_xgrammar.py has them in the library they are made for.
"""
from __future__ import annotations

import json
import random
import re

import jsonschema
import pytest
from isthmus.core.grammar.contract import GrammarError
from isthmus.core.grammar.ebnf import schema_to_gbnf
from isthmus.core.grammar.patterns import to_rule
from isthmus.core.grammar.xgrammar_backend import XGrammar

from .gbnf import Gbnf
from .json_schema_suite import read_groups
from .test_json_schema import OWN, SUITE

COST = 6  # seconds

OPEN = {"type": "object", "properties": {"a": {"type": "integer"}, "ab": {"const": 1}}, "required": ["b"]}
TEXTS = ["", "a", "ab", "b1", "a\nb", 'q"q', "back\\", "\u00e9", "\U0001F98A", "9", "- ", "aaaa"]
PATTERNS = ["^a", "b", "^a+$", "^$", "[^a]", ".", r"\d", r"^\w+$", r"\s", "^(a|b1)$", "^(ab?){1,3}$", r'^[^"\\]*$',
            '"', r"\\", "^a|1$", r"^[\w-]*$", "\u00e9|9", r"^\u0061", "^.{2}$", "a{4}", "^[a-]$", "^(?:a|b)?$"]


def made(schema) -> Gbnf:
    return Gbnf(schema_to_gbnf(json.dumps(schema)))


def allows(grammar: Gbnf, instance) -> bool:
    return grammar.matches(json.dumps(instance, ensure_ascii=False))


@pytest.mark.parametrize("number", range(len(OWN)))
def test_our_own_sample(number):
    schema, valid, invalid = OWN[number]
    try:
        grammar = made(schema)
    except GrammarError as error:
        assert "cannot be enforced" in error.message or "is supported only" in error.message, error.message
        return
    assert [each for each in valid if not allows(grammar, each)] == []
    assert [each for each in invalid if allows(grammar, each)] == []


@pytest.mark.parametrize("draft", ["draft7", pytest.param("draft2020-12", marks=pytest.mark.slow)])
def test_the_suite(draft):
    """No invalid instance of any schema that is taken."""
    if not (SUITE / draft).is_dir():
        pytest.skip(f"no {SUITE / draft}")
    wrong, taken = [], 0
    for group in read_groups(SUITE / draft):
        try:
            grammar = made(group.schema)
        except GrammarError:
            continue
        taken += 1
        wrong += [(group.file, name) for name, each, valid in group.tests if not valid and allows(grammar, each)]
    assert not wrong and taken >= 145


def test_names_that_are_declared_are_no_further_names():
    grammar = made(OPEN)
    right = [{"b": 1}, {"a": 1, "b": 2}, {"b": 1, "abc": "x"}, {"b": 1, "": 0}, {"a": 2, "ab": 1, "b": None, "c": []}]
    wrong = [{}, {"a": "x", "b": 1}, {"b": 1, "a": "x"}, {"b": 1, "ab": 2}, {"b": 1, "\u0061b": 2}]
    assert [allows(grammar, each) for each in right] == [True] * len(right)
    assert [allows(grammar, each) for each in wrong] == [False] * len(wrong)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns(pattern):
    """A string is allowed only if it matches, and of these the ones without two readings are."""
    grammar = Gbnf(f'root ::= "\\"" {to_rule(pattern)} "\\""')
    for text in TEXTS:
        matches = re.search(pattern.replace("$", r"\Z"), text, re.ASCII) is not None
        allowed = allows(grammar, text)
        assert allowed == matches or matches and json.dumps(text, ensure_ascii=False) != f'"{text}"', (pattern, text)


def test_numbers_between_bounds():
    rng = random.Random(5)
    for _ in range(60):
        places = rng.choice([0, 0, 1, 2])
        low, high = sorted(round(rng.choice([rng.uniform(-3, 3), rng.uniform(-200, 2e4), 0]), places) for _ in "ab")
        schema = {"type": rng.choice(["integer", "number"]), rng.choice(["minimum", "exclusiveMinimum"]): low,
                  rng.choice(["maximum", "exclusiveMaximum"]): high}
        checked = jsonschema.Draft202012Validator(schema)
        try:
            grammar = made(schema)
        except GrammarError as error:
            assert error.message == "no text satisfies it" and not checked.is_valid(int(high))
            continue
        middle = round((low + high) / 2, 3)
        for each in (low, high, low - 1, high + 1, middle, round(low + 0.001, 4), rng.randint(-9, 9)):
            each = int(each) if float(each).is_integer() else float(f"{each:.9g}")
            assert checked.is_valid(each) or not allows(grammar, each), (schema, each)
            if places == 0 and checked.is_valid(each):
                assert allows(grammar, each), (schema, each)


@pytest.mark.parametrize(("schema", "words"), [
    ({"patternProperties": {"a": {}}}, "$: the keyword patternProperties"),
    ({"properties": {"p": {"type": "integer", "multipleOf": 3}}}, "$.properties.p: the keyword multipleOf"),
    ({"properties": {"p": {"not": {}}}}, "$.properties.p: the keyword not"),
    ({"oneOf": [{"type": "string"}, {"maxLength": 2}]}, "$: oneOf is supported only"),
    ({"anyOf": [{"type": "string"}], "minLength": 2}, "$: anyOf with minLength beside it"),
    ({"allOf": [{"properties": {}}, {"required": ["a"]}]}, "$: allOf with properties"),
    ({"enum": ["a"], "minLength": 2}, "$: enum with minLength beside it"),
    ({"pattern": "a", "maxLength": 2}, "$: pattern with minLength or maxLength"),
    ({"pattern": "a(?=b)"}, "$.pattern: a group that looks around"), ({"pattern": r"(a)\1"}, r"$.pattern: \1"),
    ({"pattern": r"a\b"}, r"$.pattern: \b"), ({"pattern": "a$b"}, "$.pattern: an anchor in the middle"),
    ({"pattern": "((a+)+)+"}, "$.pattern: a repetition of what repeats"), ({"pattern": r"\p{L}"}, r"$.pattern: \p"),
    ({"format": "email"}, "$: the format email"), ({"format": "date", "pattern": "a"}, "$: allOf with pattern"),
    ({"properties": {"a": {}}, "minProperties": 2}, "$: minProperties 2"), ({"minLength": 10**5}, "$: minLength"),
    ({"properties": {"a": {}, "b": {}}, "maxProperties": 1}, "$: maxProperties 1"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}}, "leads to itself"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"items": {"$ref": "#/$defs/a"}, "minItems": 1, "type": "array"}}}, "no end"),
    ({"$ref": "#/$defs/b"}, "leads nowhere"), ({"$ref": "other.json"}, "within the schema"),
    ({"properties": {"a": {"$ref": "#/words/b"}}, "words": {"b": {"uniqueItems": True}}}, "the keyword uniqueItems"),
    ({"type": "integer", "minimum": 1.0e17}, "at most 15 digits"),
    ({"type": "string", "enum": [1]}, "no text satisfies it"), ({"const": "\ud800"}, "half of a character"),
    ({"anyOf": [{"type": "string"}] * 65}, "$: anyOf may have at most 64"),
    ({"properties": {f"{i}" * 9: {} for i in range(900)}}, "too large")])
def test_what_cannot_be_written_is_refused_with_its_place(schema, words):
    with pytest.raises(GrammarError) as refused:
        schema_to_gbnf(json.dumps(schema))
    assert words in refused.value.message


def test_a_name_that_is_too_long_to_be_read_is_refused():
    backend = XGrammar.__new__(XGrammar)  # which needs no library before there are rules
    with pytest.raises(GrammarError, match="too complex"):
        backend.compile("json_schema", json.dumps({"properties": {"x" * 5000: {}}}))
