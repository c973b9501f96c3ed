"""The line that each answered request leaves in the log, and the words that refusals are put in."""
from __future__ import annotations

import asyncio
import json
import logging
import re

import pytest
from isthmus.core.errors import Overloaded
from isthmus.core.logs import JsonFormatter
from isthmus.core.server.protocol import ChatRequest, SamplingFields, lookalikes
from isthmus.core.server.request_log import log_request
from starlette.testclient import TestClient

from .fake_client import drive, make_app

CHAT = "/v1/chat/completions"
SECRET = "the launch code is 0000"


@pytest.fixture
def lines(caplog):
    """The lines so far at level info, from an app that answers with a secret."""
    caplog.set_level(logging.INFO, logger="isthmus.request")
    return lambda: [r.getMessage() for r in caplog.records if r.name == "isthmus.request"]


def fields(line: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in line.split() if "=" in word)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path, body", [(CHAT, {"messages": [{"role": "user", "content": SECRET}]}),
                                        ("/v1/completions", {"prompt": SECRET}), ("/generate", {"text": SECRET})])
def test_a_request_leaves_one_line_with_its_numbers_and_without_its_contents(path, body, stream, lines):
    limit = {"sampling_params": {"max_new_tokens": 8}} if path == "/generate" else {"max_tokens": 8}
    with TestClient(make_app(text=SECRET, delay=0.005).app) as http:
        answer = http.post(path, json={**body, **limit, "stream": stream}, headers={"x-request-id": "mine"})
    assert answer.status_code == 200
    line, = lines()
    assert line.startswith(f"POST {path} 200 id=") and "launch" not in line and "0000" not in line
    found = fields(line)
    assert (found["finish"], found["output"], found["cached"], found["request"]) == ("length", "8", "4", "mine")
    assert int(found["prompt"]) >= len(SECRET) and found["id"] in answer.text
    assert 0 < float(found["ttft"][:-1]) < float(found["time"][:-1])


def test_several_answers_are_one_line(lines):
    with TestClient(make_app().app) as http:
        http.post("/v1/completions", json={"prompt": ["ab", "cd"], "n": 2, "max_tokens": 3})
    line, = lines()
    assert (fields(line)["prompt"], fields(line)["output"], fields(line)["finish"]) == ("4", "12", "length")


def test_what_is_refused_or_left_is_logged_as_such(lines):
    made = make_app(server={"api_key": "k"})
    with TestClient(made.app) as http:
        http.post(CHAT, json={"messages": []}, headers={"x-api-key": "k"})
        http.post(CHAT, json={"messages": []})
        http.post("/no%0Asuch%20place", json={}, headers={"x-api-key": "k"})
    assert [re.sub(r" time=.*", "", line) for line in lines()] == [
        f"POST {CHAT} 400 code=invalid_value param=messages", f"POST {CHAT} 401 code=invalid_api_key",
        "POST /no\\nsuch%20place 404 code=not_found"]
    made = make_app()
    made.client.hold = 2
    body = json.dumps({"prompt": "x", "stream": True}).encode()
    asyncio.run(drive(made.app, "/v1/completions", body, lambda sent: len(sent) >= 3))
    assert lines()[-1].startswith("POST /v1/completions 200 ") and fields(lines()[-1])["finish"] == "unfinished"
    body = json.dumps({"prompt": "x"}).encode()
    asyncio.run(drive(made.app, "/v1/completions", body, lambda sent: True))
    assert lines()[-1].startswith("POST /v1/completions 499 ")


@pytest.mark.parametrize("stream", [False, True])
def test_the_line_says_why_a_request_failed_and_not_what_it_held(stream, lines):
    made = make_app()
    with TestClient(made.app) as http:
        http.post(CHAT, json={"messages": [{"role": "user", "content": SECRET}], "max_tokens": 9999, "stream": stream})
        http.post(CHAT, json={"messages": [{"role": SECRET, "content": "x"}]})
        made.client.refuse = Overloaded("12 requests are waiting for a place, the limit is 12")
        http.post("/v1/completions", json={"prompt": SECRET, "stream": stream})
        made.client.refuse, made.client.die_after = None, 2
        http.post("/v1/completions", json={"prompt": SECRET, "stream": stream})
    found = lines()
    assert not any("launch" in line or "0000" in line for line in found)
    assert [(line.split()[2], fields(line).get("code"), fields(line).get("param")) for line in found] == [
        ("400", "context_length_exceeded", "max_tokens"), ("400", fields(found[1])["code"], "messages[0].role"),
        ("429", "overloaded", None), ("200" if stream else "503", "engine_dead", None)]


def test_json_has_the_numbers_as_fields(caplog):
    caplog.set_level(logging.INFO, logger="isthmus.request")
    with TestClient(make_app().app) as http:
        http.post("/v1/completions", json={"prompt": SECRET, "max_tokens": 3}, headers={"x-request-id": "mine"})
        http.post("/v1/completions", json={"prompt": SECRET, "n": 0})
    good, bad = (json.loads(JsonFormatter().format(r)) for r in caplog.records if r.name == "isthmus.request")
    assert good["message"] == "POST /v1/completions 200" and good["time"].endswith("Z")
    assert (good["method"], good["path"], good["status"], good["request"]) == ("POST", "/v1/completions", 200, "mine")
    assert (good["output"], good["prompt"], good["finish"]) == (3, len(SECRET), "length")
    assert isinstance(good["ttft"], float) and isinstance(good["seconds"], float)
    assert (bad["status"], bad["code"], bad["param"]) == (400, "invalid_value", "n")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path, body, ignored", [
    (CHAT, {"messages": [{"role": "user", "content": "x"}], "topk": 1, "user": "u", "foo": 1}, "topk"),
    ("/v1/completions", {"prompt": "x", "temprature": 0, "repeat_penalty": 2, "store": True},
     "temprature,repeat_penalty"),
    ("/v1/completions", {"prompt": "x", "top_logprobs": 2, "top_p": 0.5, "max_new_tokens": 2}, "top_logprobs"),
    ("/generate", {"text": "x", "temperature": 0, "sampling_params": {"max_new_token": 2, "top-k": 1}},
     "temperature,sampling_params.max_new_token,sampling_params.top-k"),
    ("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 2}}, None)])
def test_a_field_that_is_probably_mistyped_is_told(path, body, ignored, stream, lines, caplog):
    with TestClient(make_app().app) as http:
        answers = [http.post(path, json={**body, "stream": stream}) for _ in range(2)]
    assert all(a.status_code == 200 and a.headers.get("x-isthmus-ignored") == ignored for a in answers)
    told = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(told) == (ignored.count(",") + 1 if ignored else 0), "once a field"
    assert fields([line for line in lines() if line.startswith("POST")][0]).get("ignored") == ignored


@pytest.mark.parametrize("word, meant", [("topk", "top_k"), ("top-p", "top_p"), ("maxTokens", "max_tokens"),
                                         ("temp", None), ("user", None), ("metadata", None), ("service_tier", None),
                                         ("parallel_tool_calls", None), ("prompt_cache_key", None), ("store", None),
                                         ("reasoning_effort", None), ("verbosity", None), ("safety_identifier", None)])
def test_fields_that_are_no_mistakes_are_not_taken_for_some(word, meant):
    assert lookalikes({word: 1}, ChatRequest).get(word) == meant
    assert len(lookalikes({f"top_k{i}": 1 for i in range(10_000)}, ChatRequest)) <= 32


def test_an_id_of_the_client_cannot_forge_a_line(lines):
    with TestClient(make_app().app) as http:
        http.post("/generate", json={"text": "x", "rid": "a\nPOST /forged 200",
                                     "sampling_params": {"max_new_tokens": 1}})
    line, = lines()
    assert "\n" not in line and fields(line)["id"] == r"a\nPOST%20/forged%20200"


def test_probes_are_logged_only_for_debugging(lines, caplog):
    with TestClient(make_app().app) as http:
        for path in ("/health", "/ready", "/metrics", "/v1/models"):
            http.get(path)
        assert lines() == []
        caplog.set_level(logging.DEBUG, logger="isthmus.request")
        http.get("/health")
        assert lines()[0].startswith("GET /health 200 time=")


def test_nothing_is_put_together_that_nobody_reads(caplog):
    caplog.set_level(logging.WARNING, logger="isthmus.request")
    log_request({"method": "POST", "state": {"generation": None}}, "id", 200, 0.0)  # has no path: it would fail
    assert not caplog.records


# ---- words

@pytest.mark.parametrize("body, message", [
    ({"messages": []}, "messages must hold at least 1 entry; got []"),
    ({"messages": "hello"}, "messages must be a valid list; got 'hello'"),
    ({"messages": [1], "temperature": 9}, "temperature must be less than or equal to 2; got 9"),
    ({"messages": [1], "temperature": "hot"}, "temperature must be a valid number; got 'hot'"),
    ({"messages": [1], "stop": [""]}, "stop[0] must have at least 1 character; got ''"),
    ({"messages": [1], "stop": ["a"] * 65}, "stop has 65 entries, at most 64 are allowed; got ['a', "),
    ({"messages": [1], "n": 0}, "n must be greater than or equal to 1; got 0"),
])
def test_refusals_are_in_words_that_follow_the_field(body, message):
    with TestClient(make_app().app) as http:
        answer = http.post(CHAT, json={**body, "model": "tiny"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(message)


def test_no_field_is_refused_in_the_words_of_the_library():
    odd = ([], {}, "x", -10**30, 10**30, True, 1.5, [[]], {"a": "b"}, "")
    with TestClient(make_app().app) as http:
        for field in {**ChatRequest.model_fields, **SamplingFields.model_fields}:
            for value in odd:
                body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, field: value}
                answer = http.post(CHAT, json=body)
                if answer.status_code == 400:
                    message = answer.json()["error"]["message"]
                    assert " should " not in message and " item" not in message and "validation" not in message, message
