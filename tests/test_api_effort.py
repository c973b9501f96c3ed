"""Long conversations cost the three APIs time in proportion: no form of a body holds a thread for minutes."""
from __future__ import annotations

import json

import pytest
from isthmus.core.server.anthropic.body import CountRequest
from isthmus.core.server.anthropic.body import chat_messages as of_anthropic
from isthmus.core.server.ollama.body import chat_messages as of_ollama
from isthmus.core.server.responses.items import chat_messages as of_items
from isthmus.core.server.responses.items import input_items
from starlette.testclient import TestClient

from .effort import at_most
from .fake_client import make_app

COST = 3  # seconds

N = 30_000
CALL = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "x" * 50}]}
ITEMS = {"calls": CALL, "thoughts": THOUGHT, "empty": {"role": "assistant", "content": ""},
         "said": {"role": "assistant", "content": "x"}}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": "x"}
BLOCKS = {"text": {"type": "text", "text": "x" * 50}, "thinking": {"type": "thinking", "thinking": "x" * 50},
          "calls": {"type": "tool_use", "id": "a", "name": "f", "input": {}}}


@pytest.mark.parametrize("kind", ITEMS)
def test_items(kind):
    items = input_items([ITEMS[kind]] * N, lambda prefix: prefix, lambda id: None)
    with at_most(2):
        messages, begins = of_items(items)
    assert len(messages) == len(begins) == (1 if kind in ("calls", "thoughts", "empty") else N)


@pytest.mark.parametrize("role,kind", [("user", "text"), *(("assistant", kind) for kind in BLOCKS)])
@pytest.mark.parametrize("apart", [False, True])
def test_blocks(role, kind, apart):
    messages = ([{"role": role, "content": [BLOCKS[kind]]}] * N if apart else
                [{"role": role, "content": [BLOCKS[kind]] * N}])
    with at_most(3):
        assert len(of_anthropic(CountRequest(messages=messages))[0]) == 1


def test_results_that_no_call_waits_for():
    calls = [{"function": {"name": f"f{i}", "arguments": {}}} for i in range(N)]
    results = [{"role": "tool", "tool_name": "g", "content": "x"}] * N
    with at_most(3):
        assert len(of_ollama([{"role": "assistant", "tool_calls": calls}, *results])) == N + 1


def test_an_error_in_a_late_message_is_named_at_once():
    made = make_app()
    made.client.info["max_model_len"] = 10**6
    wrong = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "[" * 200}
    with TestClient(made.app) as http, at_most(6):
        answer = http.post("/v1/responses", content=json.dumps({"input": [*[{"role": "user", "content": "x"}] * 20_000,
                           wrong]}), headers={"content-type": "application/json"}).json()
    assert answer["error"]["param"] == "input[20000].tool_calls[0].function.arguments"


def test_items_by_reference_are_bounded():
    made = make_app(server={"max_body": "100KB"})
    with TestClient(made.app) as http:
        first = http.post("/v1/responses", json={"input": "x" * 300, "temperature": 0}).json()
        item = {"type": "item_reference", "id": first["output"][0]["id"]}
        answer = http.post("/v1/responses", json={"input": [item] * 1000, "truncation": "auto"})
        assert answer.status_code == 400 and "names items" in answer.json()["error"]["message"]
