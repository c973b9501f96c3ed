"""Halves of characters (lone surrogates), which no encoding has: quoted by a client or written by a model, they end
nobody's request but the one that has them, and no process."""
from __future__ import annotations

import json

import msgspec
import pytest
from isthmus.core.adapters.peft import _Config
from isthmus.core.errors import IsthmusError, RequestError, encodable
from isthmus.core.grammar.library import open_backend
from isthmus.core.grammar.vocabulary import Vocabulary
from isthmus.core.messages import Command, Failed, SamplingParams, Submit, TokenOutput, TokenOutputs, pack_ids, refused
from isthmus.core.models.fields import Fields
from isthmus.core.parsers import CALL_ORDER, choose  # noqa: F401  (registers the notations)
from isthmus.core.parsers.contract import CALLS
from isthmus.core.parsers.json_text import as_object, read_json
from isthmus.core.processes.scheduler import SchedulerState
from isthmus.core.processes.wire import decode_to_api, decode_to_detokenizer, encode
from isthmus.core.server.protocol import ChatRequest
from isthmus.core.server.structured import grammar_of
from starlette.testclient import TestClient

from .fake_client import make_app
from .vocabularies import byte_level, tokenizer_of

COST = 3  # seconds
HALF = "\ud83d"


@pytest.mark.parametrize("text,expected", [
    ("plain", "plain"), ("\u00e9", "\u00e9"), (f"a{HALF}b", "a\ufffdb"), (HALF, "\ufffd"), ("\ude00x", "\ufffdx"),
    (f"\u00e9{HALF}", "\u00e9\ufffd"), (f"{HALF}\ude00", "\U0001f600"), (f"\ufeff{HALF}", "\ufeff\ufffd")])
def test_each_half_becomes_one_mark(text, expected):
    assert encodable(text) == expected


@pytest.mark.parametrize("message,decode", [
    (TokenOutputs([TokenOutput("a", b"\x00", "error", error=f"it says {HALF}", param=HALF)], b"1234"),
     decode_to_detokenizer),
    (Failed("scheduler", HALF), decode_to_api)])
def test_every_message_can_travel(message, decode):
    told = decode(encode(message))
    assert type(told) is type(message)
    if isinstance(told, TokenOutputs):
        assert told.handles == b"1234" and told.outputs[0].tokens == b"\x00"
        assert told.outputs[0].error == "it says \ufffd" and told.outputs[0].param == "\ufffd"


class Refusing:
    """An engine that quotes halves of characters in all that it says."""

    def submit(self, submit):
        raise RequestError(f"{HALF} is wrong", param=f"a.{HALF}") if submit.priority else KeyError(HALF)

    def command(self, name):
        if name == "answer":
            return {"base": HALF}
        raise IsthmusError(f"{name} {HALF}")


def test_refusals_and_answers_of_an_engine_can_be_sent():
    sent = []
    state = SchedulerState(Refusing(), lambda message: sent.append(encode(message)))
    submit = Submit("a", pack_ids([1]), SamplingParams(), priority=1)
    state.handle(submit)
    state.handle(msgspec.structs.replace(submit, priority=0))
    outputs = [decode_to_detokenizer(data).outputs[0] for data in sent]
    assert [output.error for output in outputs] == ["\ufffd is wrong",
                                                    "the request cannot be taken: KeyError: '\\ud83d'"]
    assert outputs[0].param == "a.\ufffd"
    for name in ("answer", "refuse"):
        state.handle(Command("t", name))
        assert not decode_to_api(sent[-1]).ok and b"error" in decode_to_api(sent[-1]).data


@pytest.mark.parametrize("kind,source", [
    ("json_schema", {"properties": {HALF: {"not": {}}}}), ("json_schema", {"enum": [HALF]}),
    ("json_schema", {"$ref": f"#/{HALF}"}), ("choice", [HALF]),
    ("structural_tag", {"triggers": ["<f"], "structures": [{"begin": f"<f{HALF}", "schema": {}, "end": ""}]}),
    ("structural_tag", {"triggers": ["<"], "structures": [
        {"begin": "<", "schema": {"properties": {HALF: {"not": {}}}}}]}),
    ("layout", [HALF, {"text": HALF}])])
def test_what_is_refused_of_a_grammar_can_be_told(kind, source):
    tokenizer = tokenizer_of(byte_level())
    backend = open_backend("llguidance", Vocabulary(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids))
    with pytest.raises(RequestError) as caught:
        backend.compile(kind, json.dumps(source))
    assert decode_to_detokenizer(encode(TokenOutputs([refused("a", caught.value)]))).outputs[0].finish == "error"


@pytest.mark.parametrize("field,value", [
    ("json_schema", {"properties": {HALF: {"not": {}}}}), ("guided_json", {"enum": [HALF]}),
    ("structural_tag", {"triggers": [HALF], "structures": []})])
def test_a_schema_as_text_is_read_as_strictly_as_a_body(field, value):
    asked = ChatRequest.model_validate({"messages": [1], field: json.dumps(value)})
    with pytest.raises(RequestError, match=f"{field} is not valid JSON") as caught:
        grammar_of(asked)
    assert caught.value.status == 400 and caught.value.param == field


def test_arguments_that_no_client_could_be_sent():
    assert as_object('{"a": [1, "x"]}') == {"a": [1, "x"]} and as_object('{"a": ') == as_object("[1]") == {}
    assert as_object('{"a": "\\ud83d\\ude00"}') == {"a": "\U0001f600"}
    assert msgspec.json.decode(msgspec.json.encode(as_object('{"a": "x\\ud83d"}'))) == {"a": "x\ufffd"}
    big = 10**30
    assert json.loads(msgspec.json.encode({"input": as_object(f'{{"a": {big}}}')})) == {"input": {"a": big}}
    with pytest.raises(ValueError):
        read_json('{"a": 1e999}')
    assert as_object('{"a": 1e999}') == {}


BIG = 10**30
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "\\ud83d", "b": ' + str(BIG) + '}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("path,body", [
    ("/v1/chat/completions", {"tools": TOOLS}), ("/api/chat", {"model": "default", "tools": TOOLS}),
    ("/v1/messages", {"max_tokens": 400, "tools": [{"name": "f", "input_schema": {"type": "object"}}]}),
    ("/v1/responses", {"tools": [{"type": "function", "name": "f"}]})])
@pytest.mark.parametrize("stream", [False, True])
def test_calls_that_a_model_writes_so_are_answers(path, body, stream):
    made = make_app(text=CALL)
    made.client.length = len(CALL)
    asked = body | {"stream": stream, "input" if path.endswith("responses") else "messages": [
        {"role": "user", "content": "go"}]}
    with TestClient(made.app) as http:
        answer = http.post(path, json=asked)
    assert answer.status_code == 200 and str(BIG) in answer.content.decode()
    assert "internal" not in answer.text


@pytest.mark.parametrize("name", CALL_ORDER)
@pytest.mark.parametrize("arguments", ["no JSON", "[1]", '{"a": "\\ud83d"}', "1" * 5000])
def test_an_earlier_call_is_shown_whatever_its_arguments_are(name, arguments):
    assert "f" in CALLS.create(name).example("f", arguments)


def test_what_an_adapter_was_made_for_can_be_told():
    assert _Config(Fields({"base_model_name_or_path": f"a{HALF}"}, "adapter_config.json")).base == "a?"
