"""Keys, headers, bodies and errors: what a request meets before anybody looks at what it asks."""
from __future__ import annotations

import asyncio
import json
import re

import pytest
from isthmus.core.config import size_bytes
from isthmus.core.errors import Overloaded, RequestError
from isthmus.core.server.access import authorized, split_keys
from isthmus.core.server.errors import as_request_error
from isthmus.core.server.limits import (
    CHECKED_BODY,
    MAX_DEPTH,
    MAX_DIGITS,
    MAX_KEYS,
    MAX_VALUES,
    parse_object,
    structure,
)
from starlette.testclient import TestClient

from .fake_client import drive, fixtures, make_app

JSON = {"content-type": "application/json"}
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "prompt": "x", "max_tokens": 2}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
POSTS = (CHAT, COMPLETIONS, "/generate", "/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize", "/abort_request",
         "/flush_cache")
GETS = ("/v1/models", "/v1/models/tiny", "/metrics", "/server_info", "/get_server_info", "/version", "/",
        "/flush_cache")


made, http = fixtures()


@pytest.fixture
def locked():
    made = make_app(server={"api_key": "sekret, ключ"})
    with TestClient(made.app) as client:
        yield client


def error_of(response, status: int) -> dict:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and isinstance(error["code"], str) and error["message"]
    assert "Traceback" not in response.text
    return error


# ---- keys

@pytest.mark.parametrize("value", [None, "", "Bearer", "Bearer ", "Bearer sekre", "Bearer sekretx", "Bearer SEKRET",
                                   "Basic sekret", "sekret", "Bearer \u00e9".encode("latin1"),
                                   "Bearer sekret, ключ".encode()])
def test_wrong_keys(locked, value):
    headers = {} if value is None else {"Authorization": value}
    for path in POSTS + ("/v1/embeddings", "//v1/chat/completions", "/v1/chat/completions/", "/V1/chat/completions",
                         "/v1/%63hat/completions", "/v1/./chat/completions", "/health/", "//health"):
        response = locked.post(path, json=BODY, headers=headers)
        assert error_of(response, 401)["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
    for path in GETS:
        error_of(locked.get(path, headers=headers), 401)
    for method in ("HEAD", "OPTIONS", "PUT"):
        assert locked.request(method, CHAT, headers=headers).status_code == 401


@pytest.mark.parametrize("headers", [{"Authorization": "Bearer sekret"}, {"Authorization": "bearer   sekret"},
                                     {"x-api-key": "sekret"}, {"Authorization": "Bearer ключ".encode()},
                                     {"Authorization": "Bearer sekret", "x-api-key": "sekret"}])
def test_right_keys(locked, headers):
    assert locked.post(CHAT, json=BODY, headers=headers).status_code == 200
    assert locked.get("/v1/models", headers=headers).status_code == 200


def test_health_needs_no_key(locked):
    assert locked.get("/health").status_code == 200 and locked.head("/health").status_code == 200
    assert locked.get("/ready").status_code == 200


def test_every_key_that_is_sent_must_be_right():
    keys = split_keys("a, b ,,")
    assert keys == (b"a", b"b")
    for sent, good in (([b"Bearer a"], True), ([b"Bearer a", b"Bearer b"], True), ([b"Bearer a", b"Bearer x"], False),
                       ([b"Bearer x", b"Bearer a"], False), ([b"Bearer a", b"Basic a"], False), ([], False)):
        assert authorized([(b"authorization", value) for value in sent], keys) is good
    assert not authorized([(b"authorization", b"Bearer a"), (b"x-api-key", b"no")], keys)
    assert split_keys(None) == split_keys("") == split_keys(" , ") == ()


def test_no_key_is_asked_for_unless_set(http):
    assert http.post(CHAT, json=BODY, headers={"Authorization": "Bearer whatever"}).status_code == 200


# ---- headers

def test_request_ids(http):
    assert http.get("/health", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    for bad in (None, "", "x" * 200, "a b", b"\xff"):
        headers = {} if bad is None else {"x-request-id": bad}
        for path in ("/health", "/nowhere", CHAT):
            own = http.get(path, headers=headers).headers["x-request-id"]
            assert len(own) == 32 and own.isalnum()
    assert http.post(CHAT, json={**BODY, "stream": True}, headers={"x-request-id": "s"}).headers["x-request-id"] == "s"


def test_header_floods(http):
    for headers in ({f"x-{i}": "y" for i in range(300)}, {"x-big": "z" * 80_000}):
        assert error_of(http.get("/health", headers=headers), 431)["code"] == "headers_too_large"
    assert http.get("/health", headers={f"x-{i}": "y" for i in range(50)}).status_code == 200


def test_no_cors_unless_configured(http):
    response = http.options(CHAT, headers={"origin": "http://evil", "access-control-request-method": "POST"})
    assert response.status_code == 405 and not [h for h in response.headers if h.startswith("access-control")]


# ---- routes

def test_unknown_paths_and_methods(http):
    assert error_of(http.get("/v1/nothing"), 404)["code"] == "not_found"
    assert error_of(http.post(CHAT + "/", json=BODY), 404) and error_of(http.get("/v1/models/"), 404)
    response = http.get(CHAT)
    assert error_of(response, 405)["code"] == "method_not_allowed" and "POST" in response.headers["allow"]
    error_of(http.delete("/v1/models/tiny"), 405)


def test_a_mistyped_path_or_method_is_told_with_what_was_meant(http):
    def told(method, path):
        return http.request(method, path, json=BODY).json()["error"]["message"]
    assert told("POST", "/v1/chat/completion") == (
        "there is no POST /v1/chat/completion; did you mean /v1/chat/completions?; GET / lists what there is")
    assert "did you mean /v1/models?" in told("GET", "/v1/modles") and "did you mean" not in told("GET", "/x" * 5000)
    assert told("GET", "/v1/chat/completions") == "/v1/chat/completions takes POST, not GET"
    endpoints = http.get("/").json()["endpoints"]
    assert endpoints["/v1/chat/completions"] == ["POST"] and endpoints["/v1/responses/{id}"] == ["GET", "DELETE"]
    assert sorted(endpoints) == list(endpoints) and not any("/page/" in path for path in endpoints)


# ---- bodies

@pytest.mark.parametrize("body", [
    b"", b"{", b"x", b"[]", b"3", b'"x"', b"null", b"NaN", b'{"a": NaN}', b'{"a": 1e999}', b'{"a": Infinity}',
    b"\xff\xfe", b'{"model": "\xff"}', b'{"a": "\\ud83d"}', b'{"a": "\\ude00\\ud83d"}', b"\xef\xbb\xbf{}", b"{} {}",
    b"[" * 20000 + b"]" * 20000, b'{"a":' * 20000 + b"1" + b"}" * 20000, b"[" * 20000, b'{"a": ' + b"1" * 5000 + b"}",
    b'{"messages":[],"zzz":' + b"[" * 101 + b"]" * 101 + b"}"], ids=lambda b: b[:12].decode("latin1"))
@pytest.mark.parametrize("path", POSTS[:-1])
def test_what_is_no_json_object_is_400(http, path, body):
    assert error_of(http.post(path, content=body, headers=JSON), 400)["code"] == "invalid_json"


@pytest.mark.parametrize("body, key", [
    (b'{"model": "tiny", "max_tokens": 1, "max_tokens": 9}', "max_tokens"),
    (b'{"model": 1, "mod\\u0065l": 2}', "model"),
    (b'{"messages": [{"role": "user", "content": "a", "role": "system"}]}', "role")])
def test_a_key_that_is_there_twice_is_400_and_named(http, body, key):
    error = error_of(http.post(CHAT, content=body, headers=JSON), 400)
    assert error["code"] == "invalid_json" and f"'{key}' twice" in error["message"]


@pytest.mark.parametrize("escape", ["\\ud83d", "\\ude00", "\\ude00\\ud83d"])
@pytest.mark.parametrize("stream", ["true", "false"])
def test_lone_surrogates(http, escape, stream):
    body = f'{{"stream": {stream}, "messages": [{{"role": "user", "content": "cut {escape} here"}}]}}'
    error_of(http.post(CHAT, content=body, headers=JSON), 400)
    pair = body.replace(escape, "\\ud83d\\ude00")
    assert http.post(CHAT, content=pair, headers=JSON).status_code == 200


def test_depth_and_values_of_a_body():
    def depth(body: bytes) -> int:
        return structure(body)[0]

    deep = b"[" * 150 + b"]" * 150
    assert depth(deep) == 150 and depth(b'{"a":' + deep + b"}") == 151
    assert depth(b'"' + b"[{" * 500 + b'"') == 0, "brackets in a string are text"
    assert depth(b'["' + b'[\\"[' * 500 + b'"]') == 1
    assert depth(b'["\\\\", ' + deep + b"]") == 151, "an escaped backslash does not escape the quote"
    assert depth(b"[]" * 500) == 1
    assert depth(b"]" * 500 + b"[" * 50) == 0
    assert depth(b'"\\' * 200_000 + b"[" * 200) >= 0, "linear in an unterminated string"
    flat = b'{"a":' + b"[" * (MAX_DEPTH - 1) + b"]" * (MAX_DEPTH - 1) + b"}"
    assert parse_object(flat)
    with pytest.raises(RequestError, match="nests 101 deep"):
        parse_object(b'{"b":' + flat + b"}")
    assert structure(b'{"a,[": [1, {}, "\\",[,"], "b": {"c": []}}')[1] == 8
    with pytest.raises(RequestError, match=f"holds {MAX_VALUES + 2} values"):
        parse_object(b'{"b":[' + b"1," * MAX_VALUES + b"1]}")
    assert len(parse_object(b'{"b":"' + b"," * 2 * MAX_VALUES + b'"}')["b"]) == 2 * MAX_VALUES


def test_keys_and_digits_of_a_body():
    assert structure(b'{"a:": {"b": ":\\":"}, "c": [{"d": 1}]}').keys == 4
    keys = b",".join(b'"%d":1' % i for i in range(MAX_KEYS))
    with pytest.raises(RequestError, match=f"the body holds {MAX_KEYS + 1} keys, more than the {MAX_KEYS} allowed"):
        parse_object(b'{"z":{' + keys + b"}}")
    assert len(parse_object(b"{" + keys + b"}")) == MAX_KEYS
    assert parse_object(b'{"b":"' + b":" * 2 * MAX_KEYS + b'"}')
    room = b" " * CHECKED_BODY
    for number, good in ((b"9" * MAX_DIGITS, True), (b"9" * (MAX_DIGITS + 1), False),
                         (b"1." + b"9" * (MAX_DIGITS + 1), False), (b"1," * 2 * MAX_DIGITS + b"1", True)):
        if good:
            assert parse_object(b'{"z":[' + number + b"]" + room + b"}")
            continue
        with pytest.raises(RequestError, match=f"a number of more than the {MAX_DIGITS} digits"):
            parse_object(b'{"z":[' + number + b"]" + room + b"}")
    assert parse_object(b'{"z":"' + b"9" * CHECKED_BODY + b'"}'), "digits of a string are text"


def test_json_in_a_string_has_the_same_limits(http):
    keys = json.dumps({str(i): 1 for i in range(MAX_KEYS + 1)})
    call = {"id": "x", "function": {"name": "f", "arguments": keys}}
    body = {"messages": [{"role": "assistant", "tool_calls": [call]}]}
    error = error_of(http.post(CHAT, json=body), 400)
    assert f"arguments holds {MAX_KEYS + 1} keys" in error["message"] and error["param"].endswith("arguments")
    error = error_of(http.post(COMPLETIONS, json={"prompt": "x", "guided_json": keys}), 400)
    assert f"it holds {MAX_KEYS + 1} keys" in error["message"] and error["param"] == "guided_json"


@pytest.mark.parametrize("media,good", [
    ("application/json", True), ("application/json; charset=utf-8", True), ("Application/JSON", True),
    ("application/vnd.api+json", True), ("text/plain", False), ("application/x-www-form-urlencoded", False),
    ("multipart/form-data", False), (None, False), ("", False)])
@pytest.mark.parametrize("browser", [{}, {"origin": "http://testserver"}, {"sec-fetch-site": "same-origin"}])
def test_only_json_media_types(http, media, good, browser):
    """Said by a browser; what is none may say nothing, or what `curl -d` says."""
    headers = browser | ({} if media is None else {"content-type": media})
    good = good or not browser and media in (None, "", "application/x-www-form-urlencoded")
    response = http.post(COMPLETIONS, content=b'{"prompt": "x"}', headers=headers)
    if good:
        assert response.status_code == 200
        return
    error = error_of(response, 415)
    assert error["code"] == "unsupported_media_type"
    assert error["message"].startswith(f"Content-Type is {repr(media) if media else 'missing'}; send")


def test_body_size_declared_and_real():
    made = make_app(server={"max_body": "1KiB"})
    with TestClient(made.app) as http:
        assert http.post(COMPLETIONS, json={"prompt": "x" * 400}).status_code == 200
        response = http.post(COMPLETIONS, json={"prompt": "x" * 2000})
        assert error_of(response, 413)["code"] == "request_too_large" and response.headers["connection"] == "close"
        assert "1024" in response.json()["error"]["message"]
        error_of(http.post(COMPLETIONS, content=(b"x" * 100 for _ in range(50)), headers=JSON), 413)
    for length in ("99999", "9" * 50):
        sent = asyncio.run(drive(made.app, COMPLETIONS, b"{}", headers={"content-length": length}))
        assert sent[0]["status"] == 413
    assert not made.client.submits[1:]


@pytest.mark.parametrize("text,size", [("16MiB", 2**24), ("1 KB", 1000), ("2.5GiB", 5 * 2**29), ("77", 77), ("0B", 0)])
def test_sizes(text, size):
    assert size_bytes(text) == size


@pytest.mark.parametrize("text", ["", "big", "-1", "1TB2", "MiB", "1e3"])
def test_no_sizes(text):
    with pytest.raises(ValueError, match="size"):
        size_bytes(text)


# ---- the engine's state

@pytest.mark.parametrize("stream", [False, True])
def test_loading_draining_dead(stream):
    made = make_app()
    with TestClient(made.app) as http:
        def ask(status):
            for path in (CHAT, COMPLETIONS, "/generate"):
                response = http.post(path, json={**BODY, "text": "x", "stream": stream})
                error = error_of(response, status)
                dead = error["code"] == "engine_dead"
                assert ("retry-after" not in response.headers) if dead else int(response.headers["retry-after"]) >= 1
                assert dead == made.client.gone
            return error["message"]

        assert http.get("/ready").json() == {"status": "ready"}
        made.client.load()
        assert "loading" in ask(503) and http.get("/health").status_code == 503
        assert http.get("/ready").status_code == 503 and "weights" in http.get("/ready").json()["reason"]
        assert http.get("/v1/models").status_code == 200 and http.get("/metrics").status_code == 200
        http.portal.call(made.client._serve)
        made.client.draining = True
        assert "shutting down" in ask(503) and http.get("/health").status_code == 200
        assert http.post(CHAT, json=BODY).json()["error"]["code"] == "server_stopping"
        assert http.get("/ready").status_code == 503
        made.client.draining = False
        made.client.fail()
        assert "killed" in ask(503) and http.get("/health").status_code == 503
        assert http.get("/health").json()["reason"] == "scheduler: killed"
        error_of(http.post("/flush_cache"), 503)
        assert http.get("/metrics").status_code == 200 and http.get("/server_info").status_code == 200


def test_the_age_of_the_last_step_is_a_metric_also_while_the_engine_is_stuck(made, http, monkeypatch):
    monkeypatch.setattr(type(made.client), "step_age", 44.0)
    made.client.stats = {"steps": 7}
    assert 'isthmus_step_age_seconds{model_name="tiny"} 44.0' in http.get("/metrics").text

    async def silent(name):
        await asyncio.sleep(3600)
    monkeypatch.setattr(made.client, "command", silent)
    text = http.get("/metrics").text
    assert 'isthmus_step_age_seconds{model_name="tiny"} 44.0' in text
    assert 'isthmus_steps_total{model_name="tiny"} 7.0' in text, "the last that it gave"
    info = http.get("/server_info").json()
    assert info["stats"] == {"steps": 7}
    assert float(re.search(r"isthmus_engine_stats_age_seconds\{[^}]*\} (\S+)", text)[1]) <= info["stats_age"]
    made.client.fail()
    text = http.get("/metrics").text
    assert "isthmus_steps_total" not in text and "stats_age" not in text, "nobody gives any now"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_queue_full_is_429_also_for_streams(made, http, stream, n):
    made.client.refuse = Overloaded("12 requests are waiting, the limit is 12", retry_after=3)
    response = http.post(CHAT, json={**BODY, "stream": stream, "n": n})
    error = error_of(response, 429)
    assert error["code"] == "overloaded" and int(response.headers["retry-after"]) >= 1 and "12" in error["message"]
    assert made.app.state.server.running == {}


def test_an_engine_refusal_keeps_its_field(made, http):
    made.client.refuse = RequestError("too much", param="logit_bias", code="invalid_value")
    error = error_of(http.post(CHAT, json=BODY), 400)
    assert (error["param"], error["code"]) == ("logit_bias", "invalid_value")


@pytest.mark.parametrize("stream", [False, True])
def test_what_nobody_foresaw_is_a_bare_500(made, http, stream, caplog):
    def boom(submit, watch):
        raise KeyError("secret detail")

    made.client._send_request = boom
    error = error_of(http.post(CHAT, json={**BODY, "stream": stream}), 500)
    assert error["code"] == "internal_error" and "secret" not in error["message"]
    assert "secret detail" in caplog.text


@pytest.mark.parametrize("body", [
    {"prompt": {f"k{i}": "x" * 100 for i in range(50_000)}}, {"prompt": [["x" * 10**6] * 3, 1]},
    {"prompt": list(range(10**6))}, {"prompt": "x", "logit_bias": {"k" * 10**6: 1}},
    {"prompt": "x", "logit_bias": {str(i): "x" for i in range(10**5)}}, {"prompt": "x", "stop": ["x" * 10] * 10**5},
    {"prompt": "x", "stop_token_ids": [-1] * 10**6}, {"prompt": "x", "seed": "9" * 10**6},
    {"messages": [{"role": "user", "content": ""}] * 10**5}, {"messages": [{"role": "u" * 10**6}]},
    {"messages": [], "chat_template_kwargs": {"k" * 10**6: 1}},
    {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"k-" * 10**6: 1}}],
    ids=lambda b: list(b)[-1])
def test_large_nonsense_is_answered_soon_and_shortly(made, http, body):
    import time
    path, data = CHAT if "messages" in body else COMPLETIONS, json.dumps(body)
    start = time.process_time()
    response = http.post(path, content=data, headers=JSON)
    assert error_of(response, 400) and len(response.content) < 4000
    assert time.process_time() - start < 2 and not made.client.submits


def test_unknown_exceptions_never_leak():
    assert as_request_error(RuntimeError("secret")).message == "internal server error; the server's log has the details"
