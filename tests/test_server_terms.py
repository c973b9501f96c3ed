"""On whose behalf a request is served: tenants, cache domains, sessions and hints, from HTTP and from Python."""
from __future__ import annotations

import http.client
import json

import pytest
from isthmus.core.api import Parameters
from isthmus.core.errors import ConfigError, RequestError
from isthmus.core.messages import CacheHint
from isthmus.core.scheduler.request import cache_domain
from isthmus.core.server.limits import MAX_NEXT_WITHIN, MAX_SESSION, MAX_TTFT
from isthmus.core.server.terms import Caller, Terms, caller_of, tenant_of, terms
from starlette.testclient import TestClient

from .checkpoints import tiny_llama_gguf
from .effort import SOON
from .fake_client import make_app
from .test_cli_serve import Serving

COST = 8  # seconds

CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2})
COMPLETION = ("/v1/completions", {"prompt": "Hi", "max_tokens": 2})
GENERATE = ("/generate", {"text": "Hi", "sampling_params": {"max_new_tokens": 2}})
CALLS = (CHAT, COMPLETION, GENERATE)
FULL = {"session_id": "s", "cache_hint": {"next_within": 30}, "priority": 3, "cache_salt": "x", "ttft_target": 0.5}


def post(call, made=None, headers=None, **fields):
    """(answer, what reached the engine)"""
    made = made or make_app()
    path, body = call
    answer = TestClient(made.app).post(path, json={**body, **fields}, headers=headers)
    return answer, made.client.submits


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize("call", CALLS)
def test_every_call_that_generates_takes_the_same_terms(call):
    answer, (submit,) = post(call, **FULL)
    assert answer.status_code == 200, answer.text
    assert "x-isthmus-ignored" not in answer.headers
    assert submit.hint == CacheHint("s", False, 30.0, False)
    assert (submit.priority, submit.domain, submit.ttft) == (3, cache_domain(salt="x"), 0.5)
    assert submit.tenant == ""


@pytest.mark.parametrize("call", CALLS)
def test_without_them_nothing_is_hinted(call):
    _, (submit,) = post(call)
    assert (submit.hint, submit.priority, submit.domain, submit.ttft, submit.tenant) == (None, 0, b"", 0.0, "")


@pytest.mark.parametrize("hint,session,expected", [
    ({"end_of_session": True}, "s", CacheHint("s", True)),
    ({"single_shot": True}, None, CacheHint(single=True)),
    ({"next_within": 0.5}, None, CacheHint(next_within=0.5)),
    ({"next_within": MAX_NEXT_WITHIN}, "s", CacheHint("s", False, float(MAX_NEXT_WITHIN))),
    ({"end_of_session": False, "single_shot": False, "next_within": 0}, None, None),
    ({}, "s", CacheHint("s")), ({}, None, None), (None, "s", CacheHint("s"))])
def test_hints(hint, session, expected):
    fields = {"cache_hint": hint} | ({"session_id": session} if session else {})
    answer, submits = post(CHAT, **fields)
    assert answer.status_code == 200, answer.text
    assert submits[0].hint == expected


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("fields,param", [
    ({"session_id": ""}, "session_id"), ({"session_id": 5}, "session_id"),
    ({"session_id": "x" * (MAX_SESSION + 1)}, "session_id"),
    ({"cache_hint": "soon"}, "cache_hint"), ({"cache_hint": 1}, "cache_hint must be an object; got 1"),
    ({"cache_hint": {"next_within": -1}}, "cache_hint.next_within"),
    ({"cache_hint": {"next_within": MAX_NEXT_WITHIN + 1}}, "cache_hint.next_within"),
    ({"cache_hint": {"next_within": "30s"}}, "cache_hint.next_within"),
    ({"cache_hint": {"end_of_session": 1}}, "cache_hint.end_of_session"),
    ({"cache_hint": {"end_of_session": True}}, "cache_hint.end_of_session"),
    ({"cache_hint": {"end_of_session": True, "next_within": 3}, "session_id": "s"}, "cache_hint.next_within"),
    ({"cache_hint": {"single_shot": True}, "session_id": "s"}, "cache_hint.single_shot"),
    ({"cache_hint": {"single_shot": True, "next_within": 3}}, "cache_hint.single_shot"),
    ({"ttft_target": 0}, "ttft_target"), ({"ttft_target": MAX_TTFT + 1}, "ttft_target"),
    ({"priority": 2**31}, "priority"), ({"priority": 1.5}, "priority"), ({"cache_salt": "x" * 2000}, "cache_salt")])
def test_a_wrong_term_is_a_400_that_names_it(call, fields, param):
    answer, submits = post(call, **fields)
    assert answer.status_code == 400 and not submits
    error = answer.json()["error"]
    assert error["param"] == param.split()[0] and param in error["message"] and "Fields" not in error["message"]


@pytest.mark.parametrize("call", CALLS)
def test_a_hint_that_is_spelled_wrong_is_told(call):
    answer, _ = post(call, session_id="s", cache_hint={"end_of_sesion": True, "foo": 1})
    assert answer.status_code == 200 and answer.headers["x-isthmus-ignored"] == "cache_hint.end_of_sesion"


@pytest.mark.parametrize("call", CALLS)
def test_headers_say_the_same_and_the_body_wins(call):
    headers = {"x-session-id": "from header", "x-slo-ttft-ms": "250"}
    _, (submit,) = post(call, headers=headers)
    assert submit.hint == CacheHint("from header") and submit.ttft == 0.25
    _, (submit,) = post(call, headers=headers, session_id="from body", ttft_target=2)
    assert submit.hint == CacheHint("from body") and submit.ttft == 2.0


@pytest.mark.parametrize("header,value", [
    ("x-slo-ttft-ms", "soon"), ("x-slo-ttft-ms", "-5"), ("x-slo-ttft-ms", "0"),
    ("x-slo-ttft-ms", "nan"), ("x-slo-ttft-ms", "1e12"),
    ("x-session-id", ""), ("x-session-id", "x" * (MAX_SESSION + 1))])
def test_a_wrong_header_is_a_400_that_names_it(header, value):
    answer, submits = post(CHAT, headers={header: value})
    assert answer.status_code == 400 and not submits
    error = answer.json()["error"]
    assert error["param"] == header and header in error["message"] and "b'" not in error["message"]


def test_a_session_header_that_is_no_text_is_refused():
    with pytest.raises(RequestError, match="x-session-id is 'ÿ'; expected text"):
        caller_of([(b"x-session-id", b"\xff")], False, b"s")


def test_a_tenant_is_the_holder_of_a_key():
    made = make_app(server={"api_key": "one, two"})
    submits = [post(CHAT, made, bearer(key), session_id="s")[1][-1] for key in ("one", "two", "one")]
    first, second, again = [submit.tenant for submit in submits]
    assert first and first == again != second
    assert [submit.hint.session for submit in submits] == [f"{first}/s", f"{second}/s", f"{first}/s"]
    other = make_app(server={"api_key": "one, two"})
    assert post(CHAT, other, bearer("one"))[1][0].tenant != first  # each server's secret is its own
    assert "one" not in first


def test_a_name_of_a_tenant_needs_the_secret():
    assert tenant_of(b"k", b"s") == tenant_of(b"k", b"s")
    assert len({tenant_of(key, secret) for key in (b"k", b"l") for secret in (b"s", b"t")}) == 4


def test_without_keys_there_are_no_tenants_whatever_is_sent():
    assert caller_of([(b"authorization", b"Bearer x")], False, b"s") == Caller()
    assert post(CHAT, headers=bearer("x"))[1][0].tenant == ""


@pytest.mark.parametrize("call", CALLS)
def test_isolated_tenants_share_no_cache_domain(call):
    made = make_app(server={"api_key": "one,two"}, cache={"cache_isolation": "key"})
    domains = []
    for key in ("one", "two", "one"):
        for salt in (None, "x"):
            answer, submits = post(call, made, bearer(key), **({"cache_salt": salt} if salt else {}))
            assert answer.status_code == 200
            domains.append(submits[-1].domain)
    assert len(set(domains)) == 4 and b"" not in domains and domains[:2] == domains[4:]
    shared = make_app(server={"api_key": "one,two"})
    assert {post(call, shared, bearer(key))[1][-1].domain for key in ("one", "two")} == {b""}


@pytest.mark.parametrize("isolation,other", [("none", True), ("key", False)])
def test_a_real_server_keeps_tenants_apart_when_asked(tmp_path, isolation, other):
    model = str(tiny_llama_gguf(tmp_path / "tiny.gguf"))
    with Serving(model, "--in-process", "--api-key", "one,two", "--cache-isolation", isolation,
                 temporary=tmp_path) as server:
        def cached(key):
            request = http.client.HTTPConnection(server.address, timeout=SOON)
            request.request("POST", "/v1/completions", json.dumps({"prompt": "word " * 20, "max_tokens": 1}),
                            {"Content-Type": "application/json", **bearer(key)})
            return json.loads(request.getresponse().read())["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached("one") == 0
        assert bool(cached("two")) is other
        assert cached("one") > 0 and cached("two") > 0


def test_isolation_without_keys_is_refused_at_the_start(monkeypatch):
    from isthmus.core.cli.run import _run
    monkeypatch.delenv("ISTHMUS_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="--cache-isolation key .* set ISTHMUS_API_KEY"):
        _run(["serve", "--cache-isolation", "key"])


def test_python_programs_say_the_same():
    asked = Parameters.model_validate({**FULL, "tenant": "t"})
    hint = CacheHint("t/s", False, 30.0)
    assert terms(asked, Caller(asked.tenant)) == Terms(cache_domain(salt="x"), 3, "t", 0.5, hint)
    isolated = terms(asked, Caller(asked.tenant), True)
    assert isolated.domain == cache_domain(salt="x", tenant="t") != cache_domain(salt="x")


def test_a_tenants_domain_is_not_a_salts():
    assert cache_domain(tenant="a") != cache_domain(salt="a") and cache_domain(tenant="a") != cache_domain(tenant="b")
