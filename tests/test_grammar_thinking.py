"""A grammar behind the thinking, its budget, and layouts of calls: masks token by token, on real backends."""
from __future__ import annotations

import json
import random

import jsonschema
import numpy as np
import pytest
from isthmus.core.grammar.contract import GOES_ON, REFUSED, GrammarError
from isthmus.core.grammar.library import open_backend
from isthmus.core.grammar.thinking import AfterThinking, Anything, accept, fill, words_of
from isthmus.core.grammar.vocabulary import Vocabulary
from isthmus.core.messages import ThinkingSpec, pack_ids
from isthmus.core.parsers.contract import CALLS, CallEnd, Parser, Tool

from .test_parsers import parse
from .vocabularies import byte_level, tokenizer_of

COST = 20  # seconds

EOS = 2
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"], "additionalProperties": False}
TOOLS = {tool.name: tool for tool in (
    Tool("get_weather", {"type": "object", "properties": {
        "city": {"type": "string"}, "unit": {"type": "string", "enum": ["C", "F"]}, "days": {"type": "integer",
        "maximum": 9}},
        "required": ["city", "days"], "additionalProperties": False}, True),
    Tool("ping", {}))}


@pytest.fixture(scope="module")
def backend():
    tokenizer = tokenizer_of(byte_level())
    return open_backend("llguidance", Vocabulary(tokenizer, tokenizer.vocab_size + 40, tokenizer.eos_ids))


def spec(backend, opened=True, budget=-1, ends=("</think>",), stop="\n</think>\n\n") -> ThinkingSpec:
    spelled = [backend.vocabulary.encode(text) for text in ("<think>", stop)]
    begin = [backend.vocabulary.tokens.index(b"<think>")]
    return ThinkingSpec(opened, pack_ids(begin), ends, pack_ids(spelled[1]), budget)


def after(backend, thinking: ThinkingSpec, kind="json_schema", source=None) -> AfterThinking:
    inner = Anything() if kind == "any" else backend.compile(kind, source or json.dumps(SCHEMA)).start()
    return AfterThinking(inner, thinking, words_of(backend.vocabulary, thinking.ends))


def allowed(backend, matcher) -> np.ndarray:
    row = np.zeros((1, -(-backend.vocabulary.size // 32)), np.uint32)
    fill(backend, [matcher], row)
    ids = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
    return ids[ids < len(backend.vocabulary.tokens)]


def write(backend, matcher, text: str) -> bool:
    """Whether a text is allowed, byte by byte; the matcher goes on by it."""
    single = {piece: id for id, piece in reversed(list(enumerate(backend.vocabulary.tokens)))}
    for byte in text.encode():
        if accept(backend, [matcher], [single[bytes([byte])]])[0] == REFUSED:
            return False
    return True


def test_the_grammar_begins_where_the_thinking_ends(backend):
    matcher = after(backend, spec(backend))
    assert EOS not in allowed(backend, matcher) and matcher.forced() == []
    assert write(backend, matcher, 'free {"a": 1} <text </thin</think>\n\n{"a": "x"}')
    assert matcher.is_complete() or EOS in allowed(backend, matcher)
    assert not write(backend, after(backend, spec(backend)), 'hm</think>x')


def test_the_model_chooses_whether_it_thinks(backend):
    think = backend.vocabulary.tokens.index(b"<think>")
    first = allowed(backend, after(backend, spec(backend, opened=False)))
    assert {backend.vocabulary.tokens[i] for i in first} == {b"{", b"<think>"}
    assert write(backend, after(backend, spec(backend, opened=False)), '{"a": "y"}')
    matcher = after(backend, spec(backend, opened=False))
    assert accept(backend, [matcher], [think])[0] == GOES_ON
    assert write(backend, matcher, 'hm</think>{"a": "y"}')
    assert think not in allowed(backend, after(backend, ThinkingSpec(False, b"", ("</think>",), b"")))


@pytest.mark.parametrize("budget", [0, 1, 5])
@pytest.mark.parametrize("kind", ["json_schema", "any"])
def test_a_budget_ends_the_thinking(backend, budget, kind):
    matcher = after(backend, spec(backend, budget=budget), kind)
    assert write(backend, matcher, "a" * budget)
    stop = backend.vocabulary.encode("\n</think>\n\n")
    assert allowed(backend, matcher).tolist() == stop[:1] and matcher.forced() == stop
    for token in stop:
        assert allowed(backend, matcher).tolist() == [token]
        assert accept(backend, [matcher], [token])[0] == GOES_ON
    assert write(backend, matcher, '{"a": "x"}')
    early = after(backend, spec(backend, budget=20), kind)
    assert write(backend, early, 'hm</think>{"a": "x"')
    if kind == "any":
        assert write(backend, early, "b" * 40) and EOS in allowed(backend, early)


def test_taking_back_and_copies(backend):
    rng = random.Random(3)
    matcher = after(backend, spec(backend, opened=False, budget=6))
    trail = [matcher.clone()]
    for _ in range(40):
        choices = allowed(backend, matcher)
        if matcher.is_complete() or not len(choices):
            break
        token = int(rng.choice([c for c in choices if c != EOS] or [EOS]))
        if token == EOS:
            break
        assert matcher.accept(token)
        trail.append(matcher.clone())
    while len(trail) > 1:
        back = min(rng.randint(1, 4), len(trail) - 1)
        matcher.rollback(back)
        del trail[-back:]
        assert allowed(backend, matcher).tolist() == allowed(backend, trail[-1]).tolist()
    with pytest.raises(ValueError, match="taken back"):
        matcher.rollback(1)


def test_rows_with_and_without_thinking_are_filled_together(backend):
    plain = backend.compile("json_schema", json.dumps(SCHEMA)).start()
    both = [plain, after(backend, spec(backend)), plain.clone()]
    bits = np.zeros((3, -(-backend.vocabulary.size // 32)), np.uint32)
    fill(backend, both, bits)
    assert (bits[0] == bits[2]).all() and not (bits[0] == bits[1]).all()
    brace = backend.vocabulary.tokens.index(b"{")
    assert accept(backend, both, [brace, brace, EOS]).tolist() == [GOES_ON, GOES_ON, REFUSED]


def ends_in(layout) -> list[str]:
    """What ends free texts in a layout."""
    if isinstance(layout, str):
        return []
    if isinstance(layout, dict) and "text" in layout:
        return [layout["text"]]
    below = layout if isinstance(layout, list) else [v for v in layout.values() if isinstance(v, dict | list)]
    return [end for each in below for end in ends_in(each)]


def walk(backend, layout, seed: int, most: int = 300) -> str:
    """A random sentence. Where any text may come, what ends it is written soon."""
    rng, matcher = random.Random(seed), backend.compile("layout", json.dumps(layout)).start()
    out, names, ends = b"", set(backend.vocabulary.names.values()), ends_in(layout)
    for step in range(most):
        ids = allowed(backend, matcher).tolist()
        if matcher.is_complete() or EOS in ids and (step > most // 3 or rng.random() < 0.3 or len(ids) == 1):
            break
        if len(ids) > 150 and ends and rng.random() < 0.5:
            trial, end = matcher.clone(), rng.choice(ends)
            if write(backend, trial, end):
                matcher, out = trial, out + end.encode()
                continue
        forced = matcher.forced()
        ids = [i for i in ids if i not in names and backend.vocabulary.tokens[i].isascii()] or ids
        closing = [i for i in ids if backend.vocabulary.tokens[i][:1] in b'"}]<)\n|']
        token = forced[0] if forced else rng.choice(closing if closing and rng.random() < 0.5 else ids)
        assert matcher.accept(token)
        out += backend.vocabulary.tokens[token]
    return out.decode("utf-8", "ignore")


FORMATS = [name for name in CALLS if name != "harmony"]


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_enforced_is_read_as_calls(backend, name):
    """Random sentences of the layout: calls that follow their schemas, and nothing else."""
    format = CALLS.create(name)
    found = 0
    for seed in range(6):
        layout = format.layout(TOOLS, 1, 1 if seed % 2 else None)
        text = walk(backend, layout, seed)
        for parser in (format.bound_parser(TOOLS), format.parser(TOOLS)):
            content, _, calls, ended = parse(parser, list(text))
            if ended == len(calls) > 0 and not content:
                found += 1
            for call, arguments in calls[:ended]:
                value = json.loads(arguments)
                assert call in TOOLS
                if call == "get_weather":
                    jsonschema.validate(value, TOOLS[call].parameters)
            assert seed % 2 == 0 or len(calls) <= 1
    assert found >= 4, text


@pytest.mark.parametrize("name", FORMATS)
def test_with_a_choice_text_may_come_first_and_calls_still_follow_their_schemas(backend, name):
    format = CALLS.create(name)
    layout = format.layout(TOOLS, 0, None)
    matcher = backend.compile("layout", json.dumps(layout)).start()
    assert write(backend, matcher, "Hello there.") and EOS in allowed(backend, matcher)
    if format.written is not None:
        call = format.example("get_weather", "[]")
        assert not write(backend, backend.compile("layout", json.dumps(layout)).start(), call)


def test_calls_or_json_and_no_other_text(backend):
    layout = CALLS.create("hermes").layout(TOOLS, 0, None, {"json": SCHEMA, "name": "response_format", "strict": True})
    for text, right in (('{"a": "x"}', True), ("hello", False),
    ('<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>',
                                                                True), ('{"a": "z"}', False)):
        assert write(backend, backend.compile("layout", json.dumps(layout)).start(), text) == right


@pytest.mark.parametrize("parameters,words", [
    ({"type": "something"}, "Invalid type"), ({"properties": {"a": {"type": "string", "pattern": "("}}},
    "unclosed group"),
    ({"properties": {"a": {"not": {}}}}, "keyword not"), ({"properties": ["a"]}, "")])
def test_strict_tools_that_cannot_be_enforced_are_named(backend, parameters, words):
    for strict in (True, False):
        tools = {"f": Tool("f", parameters, strict)}
        source = json.dumps(CALLS.create("hermes").layout(tools, 1, None))
        if strict and words:
            with pytest.raises(GrammarError, match=f"(?s)f: .*{words}"):
                backend.compile("layout", source)
        elif not strict:
            assert write(backend, backend.compile("layout", source).start(),
                         '<tool_call>\n{"name": "f", "arguments": {"b": 1}}\n</tool_call>')


def test_arguments_come_as_they_are_written_where_they_are_enforced():
    parser: Parser = CALLS.create("hermes").bound_parser(TOOLS)
    text = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Os'
    events = [event for piece in text for event in parser.feed(piece)]
    assert len(events) > 10 and not any(isinstance(event, CallEnd) for event in events + parser.finish())
