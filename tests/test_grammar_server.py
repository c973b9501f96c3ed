"""Structured output over HTTP: every spelling of it, refusals that name the field, and answers that follow it."""
from __future__ import annotations

import json

import jsonschema
import pytest
from isthmus.core.messages import GrammarSpec

from .checkpoints import tiny_llama_gguf
from .fake_client import fixtures
from .serving import Serving

COST = 20  # seconds

HI = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["one", "two"]}, "b": {"type": "boolean"}},
          "required": ["a", "b"], "additionalProperties": False}
TAGS = {"type": "structural_tag", "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}
TEXT = json.dumps(SCHEMA)

FORMS = {
    "json_object": ({"response_format": {"type": "json_object"}}, "json_object", ""),
    "json_schema": ({"response_format": {"type": "json_schema", "json_schema": {
        "name": "x", "schema": SCHEMA, "strict": True}}}, "json_schema", TEXT),
    "json_object_schema": ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "json_schema", TEXT),
    "structural_tag": ({"response_format": TAGS}, "structural_tag", json.dumps(TAGS)),
    "vllm_json": ({"structured_outputs": {"json": SCHEMA}}, "json_schema", TEXT),
    "vllm_json_text": ({"structured_outputs": {"json": TEXT}}, "json_schema", TEXT),
    "vllm_json_object": ({"structured_outputs": {"json_object": True}}, "json_object", ""),
    "vllm_regex": ({"structured_outputs": {"regex": "a+", "json": None}}, "regex", "a+"),
    "vllm_choice": ({"structured_outputs": {"choice": ["a", "\u00e9"]}}, "choice", '["a", "\\u00e9"]'),
    "vllm_grammar": ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "grammar", 'root ::= "a"'),
    "vllm_tag": ({"structured_outputs": {"structural_tag": TAGS}}, "structural_tag", json.dumps(TAGS)),
    "guided_json": ({"guided_json": SCHEMA}, "json_schema", TEXT),
    "guided_regex": ({"guided_regex": "a+"}, "regex", "a+"),
    "guided_choice": ({"guided_choice": ["a"]}, "choice", '["a"]'),
    "guided_grammar": ({"guided_grammar": "start: /a/"}, "grammar", "start: /a/"),
    "sglang_json": ({"json_schema": TEXT}, "json_schema", TEXT),
    "sglang_regex": ({"regex": "a+"}, "regex", "a+"),
    "sglang_ebnf": ({"ebnf": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
    "sglang_tag": ({"structural_tag": json.dumps(TAGS)}, "structural_tag", json.dumps(TAGS)),
    "llama_grammar": ({"grammar": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
    "nothing": ({"structured_outputs": {"regex": None, "disable_fallback": False}, "guided_json": None}, None, ""),
    "text": ({"response_format": {"type": "text"}}, None, ""),
}
WRONG = [
    ({"response_format": {"type": "yaml"}}, "response_format.type"), ({"response_format": "json"}, "response_format"),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": {"type": "json_object", "schema": 5}}, "response_format.schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}}, "response_format.json_schema.schema"),
    ({"guided_json": "{"}, "guided_json"), ({"guided_json": 3}, "guided_json"), ({"guided_json": "[" * 999}, None),
    ({"guided_regex": ""}, "guided_regex"), ({"guided_regex": ["a"]}, "guided_regex"),
    ({"guided_regex": "a" * 70000}, "guided_regex"), ({"guided_choice": "a"}, "guided_choice"),
    ({"guided_choice": []}, "guided_choice"), ({"guided_choice": [1]}, "guided_choice"),
    ({"guided_choice": ["a"] * 2000}, "guided_choice"), ({"structural_tag": "[]"}, "structural_tag"),
    ({"structured_outputs": {"yaml": "a"}}, "structured_outputs.yaml"),
    ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
]


made, http = fixtures()


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/generate"])
def test_every_spelling_on_every_endpoint(made, http, name, path):
    body, kind, source = FORMS[name]
    if path == "/generate":
        sent = {"text": "a", "sampling_params": {"max_new_tokens": 4, **body}}
    else:
        sent = {"max_tokens": 4, **body} | ({"messages": HI} if "chat" in path else {"prompt": "a"})
    response = http.post(path, json=sent)
    assert response.status_code == 200, response.text
    assert "x-isthmus-ignored" not in response.headers
    grammar = made.client.submits[0].params.grammar
    if kind is None:
        assert grammar is None
        return
    assert grammar == GrammarSpec(kind, source, grammar.field)
    assert grammar.field.split(".")[0] in body


@pytest.mark.parametrize(("body", "param"), WRONG, ids=lambda v: str(v)[:50])
def test_what_is_malformed_is_400_with_the_name(made, http, body, param):
    response = http.post("/v1/chat/completions", json={"messages": HI, "max_tokens": 4, **body})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == (param or next(iter(body))) and not made.client.submits
    assert len(response.content) < 1000


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    with Serving(str(tiny_llama_gguf(folder / "tiny.gguf")), temporary=folder, delay_ms=0) as serving:
        yield serving


def ask(server, body, path="/v1/chat/completions"):
    sent = {"max_tokens": 150, "temperature": 1, "seed": 3, **body} | (
        {"messages": HI} if "chat" in path else {"prompt": "a"})
    response = server.ask("POST", path, sent)
    return response.status, response.read()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_answers_follow_the_schema(server, stream, path):
    status, data = ask(server, {**FORMS["json_schema"][0], "n": 3, "stream": stream}, path)
    assert status == 200, data
    texts: dict[int, str] = {}
    finishes = {}
    events = [json.loads(line[6:]) for line in data.split(b"\n\n") if line[6:] not in (b"", b"[DONE]")] if stream else [
        json.loads(data)]
    for choice in (choice for event in events for choice in event["choices"]):
        part = choice.get("delta", choice.get("message", {})).get("content", choice.get("text", ""))
        texts[choice["index"]] = texts.get(choice["index"], "") + (part or "")
        finishes[choice["index"]] = choice["finish_reason"] or finishes.get(choice["index"])
    assert set(finishes.values()) == {"stop"} and len(texts) == 3
    for text in texts.values():
        jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("body", "param", "word"), [
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"properties": {"a": {"not": {}}}}}}},
     "response_format.json_schema.schema", "$.properties.a: the keyword not"),
    ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json", "uniqueItems"),
    ({"guided_json": {"format": "iri"}}, "guided_json", "iri"),
    ({"guided_json": {"$ref": "#/nowhere"}}, "guided_json", "nowhere"),
    ({"guided_regex": "(a"}, "guided_regex", "unclosed group"), ({"guided_regex": "(?=a)"}, "guided_regex", "look-"),
    ({"guided_grammar": "root ::= foo"}, "guided_grammar", "foo"),
    ({"guided_regex": "((((((a{10}){10}){10}){10}){10}){10}){10}"}, "guided_regex", "too complex"),
    ({"guided_choice": ["a" * 300_000]}, "guided_choice", "guided_choice has 300004 bytes"),
    ({"structural_tag": {**TAGS, "triggers": ["<g"]}}, "structural_tag", "begins with no trigger")])
def test_what_cannot_be_honoured_is_400_with_the_keyword(server, body, param, word, stream):
    status, data = ask(server, {**body, "stream": stream})
    error = json.loads(data)["error"]
    assert (status, error["param"], error["code"]) == (400, param, "invalid_grammar") and word in error["message"]
    assert ask(server, {"max_tokens": 2})[0] == 200


@pytest.mark.parametrize("stream", [False, True])
def test_what_turns_out_too_complex_is_the_clients_fault(server, stream):
    """After twelve letters its text is forced without end, which no mask before it shows."""
    status, data = ask(server, {"structured_outputs": {"grammar": 'root ::= [a-y]{12} inner\ninner ::= "a" inner'},
                                "stream": stream})
    if stream:
        assert status == 200
        data = next(line[6:] for line in data.split(b"\n\n") if b'"error"' in line)
    else:
        assert status == 400
    error = json.loads(data)["error"]
    assert (error["type"], error["param"], error["code"]) == (
        "invalid_request_error", "structured_outputs.grammar", "invalid_grammar")
    assert "structured_outputs.grammar: it became too complex to follow at token" in error["message"]
    assert "logit_bias" not in error["message"]


def test_the_endless_ends_with_length(server):
    status, data = ask(server, {"guided_grammar": 'root ::= "a" root', "max_tokens": 20})
    choice = json.loads(data)["choices"][0]
    assert (status, choice["finish_reason"], set(choice["message"]["content"])) == (200, "length", {"a"})


def test_the_limit_of_tokens_is_told_and_the_text_is_a_beginning(server):
    status, data = ask(server, {"guided_regex": "abcdefgh{5}", "max_tokens": 6})
    choice = json.loads(data)["choices"][0]
    assert (status, choice["finish_reason"], choice["message"]["content"]) == (200, "length", "abcdef")
