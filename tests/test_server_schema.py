"""Every form of answer against OpenAI's own description, where it and the library that reads it are at hand."""
from __future__ import annotations

import json

import pytest
from starlette.testclient import TestClient

from .fake_client import make_app
from .openai_schema import needs_schema, validator

pytestmark = needs_schema


@pytest.fixture
def http():
    with TestClient(make_app().app) as client:
        yield client


@pytest.fixture
def check():
    return lambda value, name: validator(name).validate(value)


BODIES = [{}, {"n": 2}, {"logprobs": True, "top_logprobs": 2}, {"stop": ["two"], "max_tokens": 50}, {"max_tokens": 400}]


@pytest.mark.parametrize("body", BODIES)
def test_chat(http, check, body):
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, **body}
    check(http.post("/v1/chat/completions", json=body).json(), "CreateChatCompletionResponse")
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    frames = http.post("/v1/chat/completions", json=body).text.split("\n\n")[:-2]
    assert len(frames) > 5
    for frame in frames:
        check(json.loads(frame.removeprefix("data: ")), "CreateChatCompletionStreamResponse")


@pytest.mark.parametrize("body", [{}, {"n": 2}, {"logprobs": 2}, {"stop": ["two"], "max_tokens": 50}, {"echo": True}])
def test_completions(http, check, body):
    body = {"prompt": "x", "max_tokens": 5, **body}
    check(http.post("/v1/completions", json=body).json(), "CreateCompletionResponse")
    frames = http.post("/v1/completions", json={**body, "stream": True}).text.split("\n\n")[:-2]
    for frame in frames:
        value = json.loads(frame.removeprefix("data: "))
        for choice in value["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"  # the description has no chunks for this API
        check(value, "CreateCompletionResponse")


def test_models_and_errors(http, check):
    check(http.get("/v1/models").json(), "ListModelsResponse")
    check(http.get("/v1/models/tiny").json(), "Model")
    for response in (http.post("/v1/completions", json={}), http.get("/nowhere"), http.get("/v1/models/x")):
        assert response.status_code >= 400
        check(response.json(), "ErrorResponse")
