"""Which parameters are taken, refused and ignored, and what reaches the engine."""
from __future__ import annotations

import json

import pytest
from isthmus.core.errors import RequestError
from isthmus.core.messages import SamplingParams
from isthmus.core.scheduler.request import cache_domain
from isthmus.core.server.errors import MAX_MESSAGE, encode_error
from isthmus.core.server.validate import nth_seed
from starlette.testclient import TestClient

from .fake_client import VOCAB, fixtures, make_app

HI = [{"role": "user", "content": "Hi"}]
BAD = [("temperature", -0.1), ("temperature", 1e6), ("temperature", "hot"), ("temperature", True), ("top_p", -1),
       ("top_p", 1.5), ("presence_penalty", 3), ("frequency_penalty", -9), ("n", 0), ("max_tokens", -5),
       ("max_tokens", "many"), ("max_tokens", 0), ("max_tokens", 1.5), ("stop", 5), ("stop", ["a", 3]), ("stop", [""]),
       ("stop", [f"s{i}" for i in range(10000)]), ("stop", ["x" * 10**6]), ("stop", {"a": 1}), ("seed", "x"),
       ("seed", 2**80), ("seed", 2**63), ("seed", 1.5), ("stream", "maybe"), ("stream", 1), ("repetition_penalty", 0),
       ("repetition_penalty", 1e-40), ("repetition_penalty", 0.009),
       ("repetition_penalty", -1), ("top_k", -7), ("top_k", 1.5), ("min_p", 2), ("min_p", -0.1), ("min_tokens", -1),
       ("min_tokens", 10**9), ("stop_token_ids", [-1]), ("stop_token_ids", [VOCAB + 1]), ("stop_token_ids", [2**40]),
       ("stop_token_ids", 5), ("stop_token_ids", [True]), ("stop_token_ids", list(range(1025))), ("ignore_eos", "yes"),
       ("logit_bias", {str(VOCAB + 9): 5}), ("logit_bias", {"-3": 5}), ("logit_bias", {"dog": 1}),
       ("logit_bias", {"5": "x"}), ("logit_bias", {"5": 1e9}), ("logit_bias", {"5": True}), ("logit_bias", [5]),
       ("logit_bias", {"٣": 1}), ("logit_bias", {str(i): 1 for i in range(49000)}), ("priority", "high"),
       ("cache_salt", 5), ("cache_salt", "x" * 5000), ("stream_options", 5)]
FINE = [("temperature", 2), ("temperature", 0), ("temperature", 1e-9), ("top_p", 1e-9), ("top_p", 0),
        ("presence_penalty", 2), ("frequency_penalty", -2), ("max_tokens", 1), ("seed", -1), ("seed", 2**62),
        ("seed", -2**63), ("user", "u" * 10**6), ("top_k", -1), ("top_k", 0), ("top_k", 2**40), ("min_p", 1),
        ("stop", None), ("stop", []), ("stop", "x"), ("logit_bias", {}), ("logit_bias", {"5": -100}),
        ("repetition_penalty", 1.3), ("repetition_penalty", 0.01),
        ("skip_special_tokens", False), ("priority", -3), ("n", None)]
IGNORED = {"user": "u", "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "prompt_cache_key": "k",
           "prompt_cache_retention": "24h", "prompt_cache_options": {"mode": "auto"}, "safety_identifier": "s",
           "reasoning_effort": "low", "verbosity": "low", "parallel_tool_calls": True, "tool_choice": "auto",
           "modalities": ["text"], "prediction": {"type": "content", "content": "x"},
           "response_format": {"type": "text"},
           "web_search_options": {}, "stream_options": {"include_obfuscation": False}, "session_id": "s",
           "separate_reasoning": True, "include_reasoning": True, "request_id": "r", "unheard_of": [1, {"a": None}],
           "tools": [], "functions": [], "guided_json": None, "lora_path": "", "suffix": "", "typical_p": 1.0,
           "no_repeat_ngram_size": 0, "length_penalty": 1, "top_n_sigma": -1, "echo": False, "best_of": 1}
REFUSED = {"functions": [{"name": "f"}],
           "custom_logit_processor": "x", "prompt_logprobs": -1, "truncate_prompt_tokens": 5,
           "modalities": ["text", "audio"], "suffix": "x", "stop_regex": "a", "use_beam_search": True,
           "chat_template": "x", "prompt_embeds": "gASV", "documents": [{"text": "x"}], "no_repeat_ngram_size": 3,
           "typical_p": 0.9, "top_a": 0.2, "xtc_probability": 0.5, "length_penalty": 0.8, "logit_processors": ["x"],
           "dry_multiplier": 0.8, "mirostat": 2, "top_n_sigma": 1}


made, http = fixtures()


def chat(http, **body):
    return http.post("/v1/chat/completions", json={"model": "tiny", "messages": HI, "max_tokens": 4, **body})


@pytest.mark.parametrize("key,value", BAD, ids=lambda v: str(v)[:30])
def test_out_of_range_is_400_with_the_name(made, http, key, value):
    response = chat(http, **{key: value})
    error = response.json()["error"]
    assert response.status_code == 400 and (error["param"] or "").startswith(key), error
    assert not made.client.submits and len(response.content) < 1000
    assert error["type"] == "invalid_request_error" and isinstance(error["code"], str)


@pytest.mark.parametrize("key", ["max_tokens", "min_tokens", "n", "best_of", "top_k", "seed", "priority", "prompt",
                                 "stop_token_ids", "logprobs"])
@pytest.mark.parametrize("value", [10**4000, -10**4000, "9" * 10**5, "\\" * 10**5], ids=lambda v: str(v)[:5])
def test_no_answer_repeats_a_long_value(http, key, value):
    body = {"prompt": "x", "max_tokens": 1, key: [value] if key in ("prompt", "stop_token_ids") else value}
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 400 and len(response.content) < 1000, response.text[:2000]


def test_the_envelope_is_short_whatever_the_message():
    sent = json.loads(encode_error(RequestError("a" * 10**6, param="b" * 10**6)))["error"]
    assert sent["message"] == "a" * MAX_MESSAGE + "..." and sent["param"] == "b" * MAX_MESSAGE + "..."


@pytest.mark.parametrize("key,value", FINE, ids=lambda v: str(v)[:30])
def test_legal_extremes_are_taken(http, key, value):
    response = chat(http, **{key: value})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("key", IGNORED)
def test_known_fields_without_effect_are_no_errors(http, key):
    assert chat(http, **{key: IGNORED[key]}).status_code == 200


@pytest.mark.parametrize("key", REFUSED)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_what_would_be_ignored_but_matters_is_refused_by_name(made, http, path, key):
    response = http.post(path, json={"messages": HI, "prompt": "x", key: REFUSED[key]})
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == key and error["code"] == "unsupported_parameter"
    assert not made.client.submits


@pytest.mark.parametrize("field", [{"echo": True}, {"best_of": 3}, {"typical_p": "x"}])
def test_chat_has_no_echo_and_no_best_of(made, http, field):
    error = chat(http, **field).json()["error"]
    assert error["code"] == "unsupported_parameter" and {error["param"]} == field.keys() and not made.client.submits


def test_sampling_of_others_is_refused_inside_sampling_params(made, http):
    sent = {"text": "a", "sampling_params": {"max_new_tokens": 2, "top_a": 0.5}}
    error = http.post("/generate", json=sent).json()["error"]
    assert error["param"] == "sampling_params.top_a" and not made.client.submits


def test_tools_that_must_not_be_used_change_nothing(made, http):
    tool = {"type": "function", "function": {"name": "f"}}
    assert chat(http, tools=[tool], tool_choice="none").status_code == 200
    for odd in ([{"type": "function", "function": None}], {"a": 1}, ["f"], [{"type": "function", "function": {}}],
                [{"type": "function", "function": {"name": 7}}]):
        assert chat(http, tools=odd, tool_choice="none").json()["error"]["param"].startswith("tools")
    named = {"type": "function", "function": {"name": "f"}}
    assert chat(http, tool_choice=named).json()["error"]["param"] == "tool_choice.function.name"
    for field in ({"tools": [tool]}, {"tool_choice": "required"}, {"thinking_token_budget": 5}):
        error = http.post("/v1/completions", json={"prompt": "x", **field}).json()["error"]
        assert error["code"] == "unsupported_parameter" and {error["param"]} == field.keys()


def test_every_parameter_reaches_the_engine(made, http):
    response = chat(http, max_tokens=9, min_tokens=2, temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, seed=7,
                    repetition_penalty=1.1, presence_penalty=0.3, frequency_penalty=-0.2,
                    logit_bias={"5": 1.5, "6": -3}, stop=["a\n", "b", "b"],
                    stop_token_ids=[9, 10], include_stop_str_in_output=True, ignore_eos=True,
                    skip_special_tokens=False, logprobs=True, top_logprobs=3, cache_salt="s", priority=4)
    assert response.status_code == 200, response.text
    submit, watch = made.client.submits[0], made.client.watches[0]
    assert submit.params == SamplingParams(
        max_tokens=9, min_tokens=2, temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, seed=7, repetition_penalty=1.1,
        presence_penalty=0.3, frequency_penalty=-0.2, logit_bias={5: 1.5, 6: -3.0}, stop=("a\n", "b"),
        stop_token_ids=(9, 10), include_stop=True, ignore_eos=True, skip_special=False, logprobs=3)
    assert (submit.domain, submit.priority) == (cache_domain(salt="s"), 4)
    assert (watch.id, watch.stop, watch.include_stop, watch.skip_special, watch.min_tokens) == (
        submit.id, ("a\n", "b"), True, False, 2)


def test_defaults(made, http):
    http.post("/v1/chat/completions", json={"messages": HI})
    params = made.client.submits[0].params
    assert params == SamplingParams(max_tokens=params.max_tokens, seed=params.seed)
    assert made.client.submits[0].domain == b""


def test_sglang_names(made, http):
    body = {"text": "x", "sampling_params": {"max_new_tokens": 3, "min_new_tokens": 1, "sampling_seed": 4,
                                             "no_stop_trim": True, "top_k": -1}}
    assert http.post("/generate", json=body).status_code == 200
    assert made.client.submits[0].params == SamplingParams(max_tokens=3, min_tokens=1, seed=4, include_stop=True)


def test_unseeded_requests_draw_their_own_seed(made, http):
    for _ in range(20):
        chat(http, temperature=1)
    seeds = [s.params.seed for s in made.client.submits]
    assert len(set(seeds)) == 20 and all(0 <= s < 2**63 for s in seeds)


def test_seeds_of_choices_stay_in_range():
    assert [nth_seed(2**63 - 1, i) for i in range(2)] == [2**63 - 1, -2**63]
    assert nth_seed(-1, 1) == 0


def test_salts_never_share(made, http):
    for salt in (None, "", "a", "b"):
        assert chat(http, cache_salt=salt).status_code == 200
    domains = [s.domain for s in made.client.submits]
    assert domains[0] == domains[1] == b"" and len(set(domains)) == 3


@pytest.mark.parametrize("name,status", [("tiny", 200), (None, 200), ("", 200), ("/models/tiny", 200), ("gpt-9", 404),
                                         (5, 400)])
def test_model_names(http, name, status):
    response = chat(http, model=name)
    assert response.status_code == status
    if status == 404:
        assert response.json()["error"]["code"] == "model_not_found" and "gpt-9" in response.json()["error"]["message"]


def test_the_served_name_is_the_name():
    made = make_app(model={"served_model_name": "house"})
    with TestClient(made.app) as http:
        assert chat(http, model="house").json()["model"] == "house"
        assert [m["id"] for m in http.get("/v1/models").json()["data"]] == ["house"]


@pytest.mark.parametrize("path, body, n", [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, 9), ("/generate", {"text": "x"}, 9),
    ("/v1/completions", {"prompt": ["x"] * 3}, 3), ("/v1/completions", {"prompt": ["x"] * 9}, 1)])
def test_more_answers_than_there_are_ever_places_for_are_no_case_for_a_retry(path, body, n):
    made = make_app(scheduler={"max_queued_requests": 2})
    made.client.info["max_running"] = 6
    with TestClient(made.app) as http:
        body = {**body, **({"sampling_params": {"n": n}} if path == "/generate" else {"n": n}), "max_tokens": 1}
        answer = http.post(path, json=body)
        assert answer.status_code == 400 and "retry-after" not in answer.headers
        assert "at most 8 can run and wait at once (--max-running-requests, --max-queued-requests)" in answer.text
        fits = http.post("/v1/completions", json={"prompt": ["x"] * 8, "max_tokens": 1})
        assert fits.status_code == 200
