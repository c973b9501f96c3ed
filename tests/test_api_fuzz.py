"""Any JSON gets an answer or a client error of the API's own form from Responses, Anthropic and Ollama, never a 5xx."""
from __future__ import annotations

import json
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from .fake_client import make_app
from .openai_schema import SPEC, check_event, validator
from .test_server_fuzz import anything, texts

COST = 6  # seconds

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
MADE = make_app(text="<think>hé</think>one" + CALL, model={"reasoning_parser": "think", "tool_parser": "hermes"})
PATHS = ("/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/api/chat", "/api/generate", "/api/show")
quick = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def fields(**of):
    """An object with some of these, each perhaps with something else in it."""
    return st.fixed_dictionaries({}, optional={name: value | anything for name, value in of.items()})


def block(*kinds: str):
    return fields(type=st.sampled_from(kinds), text=texts, thinking=texts, id=texts, name=texts, input=anything,
                  tool_use_id=texts, content=texts, call_id=texts, arguments=texts | st.just("{}"), output=texts,
                  summary=st.just([]), role=st.sampled_from(["user", "assistant", "system"]))


SCHEMA = st.just({"type": "object", "properties": {"a": {"type": "integer"}}})
NUMBERS = {"temperature": st.floats(0, 2), "top_p": st.floats(0, 1), "top_k": st.integers(-1, 400),
           "seed": st.integers(-2**63, 2**63), "stop": texts, "stop_sequences": st.lists(texts, max_size=2),
           "max_tokens": st.integers(-1, 300), "max_output_tokens": st.integers(-1, 300), "stream": st.booleans(),
           "model": st.sampled_from(["tiny", None])}
items = st.lists(block("message", "function_call", "function_call_output", "reasoning", "item_reference", "input_text"),
                 max_size=3)
responses = fields(
    **NUMBERS, input=texts | items, instructions=texts, previous_response_id=texts, store=st.booleans(),
    background=st.just(False), include=st.lists(st.sampled_from(["message.output_text.logprobs", "x"]), max_size=2),
    text=fields(format=fields(type=st.sampled_from(["text", "json_object", "json_schema"]), schema=SCHEMA)),
    reasoning=fields(effort=texts), tools=st.lists(fields(
        type=st.sampled_from(["function", "namespace", "web_search"]), name=st.just("f"), parameters=SCHEMA,
        tools=anything), max_size=2), tool_choice=st.sampled_from(["auto", "none", "required"]),
    truncation=st.sampled_from(["auto", "disabled"]), metadata=st.dictionaries(texts, texts, max_size=2),
    top_logprobs=st.integers(0, 3), max_tool_calls=st.integers(0, 3))
blocks = texts | st.lists(block("text", "tool_use", "tool_result", "thinking", "image"), max_size=3)
messages = fields(
    **NUMBERS, system=blocks,
    thinking=fields(type=st.sampled_from(["enabled", "disabled"]), budget_tokens=st.integers()),
    messages=st.lists(fields(role=st.sampled_from(["user", "assistant"]), content=blocks), max_size=3),
    tools=st.lists(fields(name=st.just("f"), input_schema=SCHEMA, type=st.just("custom")), max_size=2),
    tool_choice=fields(type=st.sampled_from(["auto", "any", "none", "tool"]), name=st.just("f")),
    output_config=fields(format=fields(type=st.just("json_schema"), schema=SCHEMA), effort=texts))
ollama = fields(
    model=st.sampled_from(["tiny", "tiny:latest"]), stream=st.booleans(), format=SCHEMA | st.just("json"),
    options=fields(**NUMBERS, num_predict=st.integers(-2, 300), num_ctx=st.integers(), mirostat=st.just(0)),
    think=st.booleans(), raw=st.booleans(), prompt=texts, system=texts, keep_alive=texts, truncate=st.booleans(),
    context=st.lists(st.integers(0, 260), max_size=3), logprobs=st.booleans(),
    messages=st.lists(fields(
        role=st.sampled_from(["user", "assistant", "tool"]), content=texts, thinking=texts, tool_name=texts,
        tool_calls=st.lists(fields(function=fields(name=texts, arguments=st.just({}))), max_size=2)), max_size=3),
    tools=st.lists(fields(type=st.just("function"), function=fields(name=st.just("f"), parameters=SCHEMA)), max_size=2))


@pytest.fixture(scope="module")
def http():
    with TestClient(MADE.app) as client:
        yield client


def post(http, path: str, body):
    """The response, whose status is no fault of the server's, and whose message is short."""
    response = http.post(path, json=body)
    assert response.status_code < 500, (body, response.text)
    assert response.status_code == 200 or len(response.content) < 6000
    return response


def events(response) -> list[dict]:
    return [json.loads(frame.partition("data: ")[2]) for frame in response.text.split("\n\n")[:-1]]


@quick
@given(body=responses | anything)
def test_responses(http, body):
    response = post(http, "/v1/responses", body)
    if response.status_code != 200:
        assert isinstance(response.json()["error"]["code"], str)
    elif response.headers["content-type"].startswith("text/event-stream"):
        found = events(response)
        assert found[-1]["type"] in ("response.completed", "response.incomplete")
        for event in {event["type"]: event for event in found}.values() if SPEC.exists() else ():
            check_event(event)
    elif SPEC.exists():
        validator("Response").validate(response.json())
    post(http, "/v1/responses/input_tokens", body)


@quick
@given(body=messages | anything)
def test_messages(http, body):
    response = post(http, "/v1/messages", body)
    if response.status_code != 200:
        assert response.json()["type"] == "error" and response.json()["error"]["message"]
    elif response.headers["content-type"].startswith("text/event-stream"):
        assert events(response)[-1] == {"type": "message_stop"}
    else:
        assert response.json()["type"] == "message"
    post(http, "/v1/messages/count_tokens", body)


@quick
@given(body=ollama | anything)
def test_ollama(http, body):
    for path in ("/api/chat", "/api/generate", "/api/show"):
        response = post(http, path, body)
        if response.status_code != 200:
            assert response.json().keys() == {"error"}
        elif path != "/api/show":
            assert json.loads(response.text.splitlines()[-1])["done"]


@settings(quick, max_examples=6)
@given(raw=st.binary(max_size=40), id=texts)
def test_no_json_and_any_path(http, raw, id):
    for path in PATHS:
        response = http.post(path, content=raw, headers={"content-type": "application/json"})
        assert response.status_code == 400
    for path in ("", "/cancel", "/input_items"):
        for method in ("GET", "POST", "DELETE"):
            assert http.request(method, f"/v1/responses/{quote(id, safe='')}{path}").status_code < 500


def test_nothing_is_left_running(http):
    assert MADE.client.waiting == 0 and MADE.app.state.server.running == {}
