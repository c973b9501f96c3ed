"""Errors name fields as the client sent them, whatever they are called inside, in every API."""
from __future__ import annotations

import pytest
from isthmus.core.errors import RequestError
from starlette.testclient import TestClient

from .fake_client import make_app

COST = 4  # seconds
HI = [{"role": "user", "content": "Hi"}]
CHAT, TEXT, NATIVE = ("/v1/chat/completions", {"messages": HI}), ("/v1/completions", {"prompt": "a"}), "/generate"
RESPONSES, MESSAGES = ("/v1/responses", {"input": "a"}), ("/v1/messages", {"messages": HI, "max_tokens": 5})
LIMITS, MUCH = ("max_tokens", "max_completion_tokens", "max_new_tokens"), 10**6


def post(path: str, body: dict, **client):
    made = make_app()
    vars(made.client).update(client)
    with TestClient(made.app) as http:
        return http.post(path, json=body)


@pytest.mark.parametrize("path,body,param", [
    *((path, body | {name: MUCH}, name) for path, body in (CHAT, TEXT, RESPONSES) for name in LIMITS),
    *((CHAT[0], CHAT[1] | {name: 0}, name) for name in LIMITS),
    *((path, body | {name: MUCH}, name) for path, body in (CHAT, TEXT, RESPONSES, MESSAGES)
      for name in ("min_tokens", "min_new_tokens")),
    *((path, body | {name: "none"}, name) for path, body in (CHAT, TEXT, RESPONSES, MESSAGES)
      for name in ("lora_path", "lora_adapter")),
    (RESPONSES[0], RESPONSES[1] | {"max_output_tokens": MUCH}, "max_output_tokens"),
    (CHAT[0], CHAT[1] | {"max_completion_tokens": MUCH, "max_tokens": 1}, "max_completion_tokens"),
    *((NATIVE, {"text": "a", "sampling_params": {name: value}}, f"sampling_params.{name}")
      for name, value in (*((name, MUCH) for name in LIMITS), *((name, 0) for name in LIMITS), ("min_new_tokens", MUCH),
                          ("stop_token_ids", [MUCH]), ("logit_bias", {"x": 1}), ("regex", ""))),
    (NATIVE, {"text": "a", "lora_adapter": "none"}, "lora_adapter"),
    (MESSAGES[0], MESSAGES[1] | {"output_format": {"type": "x"}}, "output_format"),
    (MESSAGES[0], MESSAGES[1] | {"output_config": {"format": {"type": "x"}}}, "output_config.format"),
    (MESSAGES[0], MESSAGES[1] | {"response_format": {"type": "x"}}, "response_format.type"),
    (RESPONSES[0], RESPONSES[1] | {"response_format": {"type": "x"}}, "response_format.type"),
    (RESPONSES[0], RESPONSES[1] | {"text": {"format": {"type": "x"}}}, "text.format.type")])
def test_the_name_that_was_sent_is_told(path, body, param):
    answer = post(path, body)
    error = answer.json()["error"]
    assert answer.status_code in (400, 404), error
    if path == "/v1/messages":  # whose errors have no field
        assert error["message"].startswith(f"{param} "), error
    else:
        assert error["param"] == param, error
        assert param in error["message"] or "maximum context" in error["message"]


@pytest.mark.parametrize("body,word", [
    ({"options": {"repeat_penalty": -1}}, "options.repeat_penalty"), ({"options": {"num_predict": "x"}}, "num_predict"),
    ({"format": 5}, "format"), ({"lora_adapter": "none"}, "lora_adapter"), ({"lora_path": "none"}, "lora_path")])
def test_ollamas_names_are_told(body, word):
    answer = post("/api/chat", {"model": "default", "messages": HI} | body)
    assert answer.status_code in (400, 404) and answer.json()["error"].removeprefix("options.").startswith(
        word.removeprefix("options."))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path,body,param", [
    *((path, body | {"max_new_tokens": 4}, "max_new_tokens") for path, body in (CHAT, TEXT, RESPONSES)),
    (RESPONSES[0], RESPONSES[1] | {"max_output_tokens": 4}, "max_output_tokens"),
    (NATIVE, {"text": "a", "sampling_params": {"max_tokens": 4}}, "sampling_params.max_tokens")])
def test_what_the_engine_refuses_is_told_in_the_same_words(path, body, param, stream):
    answer = post(path, body | {"stream": stream}, refuse=RequestError("max_tokens is odd", param="max_tokens"))
    error = answer.json()["error"]
    assert answer.status_code == 400 and (error["param"], error["message"]) == (param, f"{param} is odd")


@pytest.mark.parametrize("path,body,param", [
    (CHAT[0], CHAT[1] | {"logprobs": True, "top_logprobs": 9}, "top_logprobs"),
    (CHAT[0], CHAT[1] | {"logprobs": True}, "logprobs"), (TEXT[0], TEXT[1] | {"logprobs": 9}, "logprobs"),
    (NATIVE, {"text": "a", "return_logprob": True, "top_logprobs_num": 9}, "top_logprobs_num"),
    (NATIVE, {"text": "a", "return_logprob": True}, "return_logprob"),
    (RESPONSES[0], RESPONSES[1] | {"include": ["message.output_text.logprobs"]}, "include")])
@pytest.mark.parametrize("inside", ["logprobs", "prompt_logprobs"])
def test_scores_are_called_as_they_were_asked_for(path, body, param, inside):
    answer = post(path, body, refuse=RequestError(f"{inside} 9 is outside 0 to 5", param=inside))
    assert answer.json()["error"]["param"] == param
    assert answer.json()["error"]["message"] == f"{param} 9 is outside 0 to 5"


@pytest.mark.parametrize("path,body,param", [
    (CHAT[0], CHAT[1] | {"logprobs": True, "top_logprobs": 9}, "logprobs"),
    (TEXT[0], TEXT[1] | {"logprobs": 9}, "logprobs"),
    (NATIVE, {"text": "a", "return_logprob": True, "top_logprobs_num": 9}, "return_logprob"),
    (RESPONSES[0], RESPONSES[1] | {"include": ["message.output_text.logprobs"], "top_logprobs": 2}, "include")])
def test_where_there_are_no_scores_the_field_that_asks_for_them_is_named(path, body, param):
    answer = post(path, body, refuse=RequestError("logprobs is not available on null: why", param="logprobs",
                                                  code="unsupported_parameter"))
    assert answer.json()["error"]["param"] == param
    assert answer.json()["error"]["message"] == f"{param} is not available on null: why"
