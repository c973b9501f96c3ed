"""Any JSON gets an answer or a client error with an envelope, never a 5xx, and answers have OpenAI's form."""
from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from starlette.testclient import TestClient

from .fake_client import VOCAB, make_app

MADE = make_app(text="é\U0001F98A one")

scalars = (st.none() | st.booleans() | st.integers(-2**70, 2**70) | st.floats(allow_nan=False, allow_infinity=False)
           | st.text(max_size=8))
anything = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3)
                        | st.dictionaries(st.text(max_size=6), inner, max_size=3), max_leaves=6)
ids = st.lists(st.integers(-1, VOCAB), max_size=4)
texts = st.text(max_size=8)
message = st.fixed_dictionaries({}, optional={
    "role": st.sampled_from(["user", "assistant", "system", "tool", "developer"]) | anything,
    "content": texts | anything | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": texts}), max_size=2),
    "name": anything, "tool_calls": anything, "tool_call_id": anything, "reasoning": anything})
FIELDS = {
    "model": st.sampled_from(["tiny", None]) | anything, "stream": st.booleans() | anything,
    "n": st.integers(0, 4) | anything,
    "max_tokens": st.integers(-1, 12) | anything, "max_completion_tokens": st.integers(1, 5) | anything,
    "temperature": st.floats(0, 2) | anything, "top_p": st.floats(0, 1) | anything,
    "top_k": st.integers(-1, 400) | anything,
    "min_p": st.floats(0, 1) | anything, "seed": st.integers(-2**63, 2**63 - 1) | anything, "stop": texts | anything,
    "stop_token_ids": ids | anything,
    "logit_bias": anything | st.dictionaries(st.sampled_from(["1", "299", "300"]), st.floats(-101, 101), max_size=2),
    "logprobs": st.booleans() | st.integers(-1, 6) | anything,
    "top_logprobs": st.integers(0, 20) | anything, "echo": st.booleans() | anything, "best_of": anything,
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans()}) | anything, "min_tokens": anything,
    "return_token_ids": st.booleans() | anything, "chat_template_kwargs": anything, "tools": anything,
    "response_format": anything, "structured_outputs": anything, "guided_json": anything | texts,
    "guided_regex": texts | anything, "guided_choice": st.lists(texts, max_size=3) | anything,
    "cache_salt": texts | anything, "priority": anything, "ignore_eos": st.booleans(),
    "session_id": texts | anything, "ttft_target": st.floats(allow_nan=False, allow_infinity=False) | anything,
    "cache_hint": anything | st.fixed_dictionaries({}, optional={
        "next_within": st.floats(-1, 100) | anything, "end_of_session": st.booleans() | anything,
        "single_shot": st.booleans() | anything}),
    "sampling_params": anything, "rid": anything, "suffix": anything, "tool_choice": anything, "unknown": anything}
more = st.fixed_dictionaries({}, optional=FIELDS)
prompt = texts | ids | st.lists(texts, max_size=3) | st.lists(ids, max_size=3) | anything
quick = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@pytest.fixture(scope="module")
def http():
    with TestClient(MADE.app) as client:
        yield client


def post(http, path: str, body) -> list[dict]:
    """The answer or the stream's events; [] for an error, which must be the client's and enveloped."""
    response = http.post(path, json=body)
    assert response.status_code < 500, (body, response.text)
    if response.status_code != 200:
        error = response.json()["error"]
        assert error["message"] and isinstance(error["code"], str) and len(response.content) < 4000
        return []
    if not response.headers["content-type"].startswith("text/event-stream"):
        return [response.json()]
    frames = response.text.split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]


@quick
@given(messages=st.lists(message, max_size=3) | anything, body=more)
def test_chat(http, messages, body):
    for value in post(http, "/v1/chat/completions", {**body, "messages": messages}):
        kind = ChatCompletionChunk if value["object"].endswith("chunk") else ChatCompletion
        kind.model_validate(value)


@quick
@given(prompt=prompt, body=more)
def test_completions(http, prompt, body):
    for value in post(http, "/v1/completions", {**body, "prompt": prompt}):
        assert value["object"] == "text_completion"
        for choice in value["choices"]:
            # The class has no word for two nulls that OpenAI sends: in a chunk, and for the first token of a prompt.
            choice["finish_reason"] = choice["finish_reason"] or "stop"
            if choice["logprobs"] and choice["logprobs"]["token_logprobs"][:1] == [None]:
                choice["logprobs"] |= {key: choice["logprobs"][key][1:] for key in choice["logprobs"]}
        if value["choices"]:
            Completion.model_validate(value)


@quick
@given(text=st.none() | texts | anything, ids=st.none() | ids | anything, body=more)
def test_native(http, text, ids, body):
    post(http, "/generate", {**body, "text": text, "input_ids": ids})
    post(http, "/tokenize", {**body, "prompt": text})
    post(http, "/detokenize", {**body, "tokens": ids})
    post(http, "/abort_request", {**body, "abort_all": text})


@quick
@given(body=anything, raw=st.binary(max_size=40))
def test_bodies(http, body, raw):
    for path in ("/v1/chat/completions", "/v1/completions", "/generate", "/tokenize", "/detokenize"):
        post(http, path, body)
        response = http.post(path, content=raw, headers={"content-type": "application/json"})
        assert response.status_code == 400


def test_nothing_is_left_running(http):
    assert MADE.client.waiting == 0 and MADE.app.state.server.running == {}
