"""`/generate`, what tokenizes, `/abort_request`, models, metrics and the rest of the plain endpoints."""
from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from isthmus.core.errors import IsthmusError, Overloaded
from isthmus.core.server.metrics import Metrics
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from .effort import until
from .fake_client import CONTEXT, END, START, TEXT, VOCAB, fixtures, make_app

HI = [{"role": "user", "content": "Hi"}]


made, http = fixtures()


def generate(http, limit=4, params=None, **body):
    params = {"max_new_tokens": limit, "temperature": 0, **(params or {})}
    return http.post("/generate", json={"sampling_params": params, **body})


def good(response):
    assert response.status_code == 200, response.text
    return response.json()


def param_of(response):
    assert response.status_code == 400, response.text
    return response.json()["error"]["param"]


# ---- /generate

@pytest.mark.parametrize("body", [{"text": "ab"}, {"input_ids": [97, 98]}])
def test_generate(made, http, body):
    value = good(generate(http, rid="mine", **body))
    meta = value["meta_info"]
    assert value["text"] == TEXT[:4] and value["output_ids"] == list(b"one ")
    assert meta.pop("e2e_latency") >= 0
    assert meta == {"id": "mine", "finish_reason": {"type": "length", "length": 4}, "prompt_tokens": 2,
                    "completion_tokens": 4, "cached_tokens": 1}
    assert made.client.submits[0].id.startswith("mine")


def test_generate_lists(http):
    assert len(good(generate(http, text=["a", "b"]))) == 2
    assert len(good(generate(http, input_ids=[[1], [2]], params={"n": 2}))) == 4
    assert [v["meta_info"]["id"] for v in good(generate(http, text=["a"], rid="r"))] == ["r-0"]


@pytest.mark.parametrize("params,matched", [({"stop": ["two"]}, "two"), ({}, END),
                                            ({"stop": [str(END)]}, END)])
def test_generate_finish(http, params, matched):
    assert good(generate(http, 100, params, text="a"))["meta_info"]["finish_reason"] == {
        "type": "stop", "matched": matched}


def test_generate_stream_holds_the_answer_so_far(http):
    frames = generate(http, 3, text="a", stream=True).text.split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    values = [json.loads(f.removeprefix("data: ")) for f in frames[:-2]]
    assert [v["text"] for v in values] == ["o", "on", "one"]
    assert [v["output_ids"] for v in values] == [[111], [111, 110], [111, 110, 101]]
    assert [v["meta_info"]["finish_reason"] for v in values] == [None, None, {"type": "length", "length": 3}]
    frames = generate(http, 2, text=["a", "b"], stream=True).text.split("\n\n")[:-2]
    assert sorted(json.loads(f.removeprefix("data: "))["index"] for f in frames) == [0, 0, 1, 1]


def test_generate_logprobs(http):
    meta = good(generate(http, 2, text="hey", return_logprob=True, top_logprobs_num=1))["meta_info"]
    assert meta["output_token_logprobs"] == [[-0.25, 111, "o"], [-0.25, 110, "n"]]
    assert meta["output_top_logprobs"] == [[[-0.25, 111, "o"]], [[-0.25, 110, "n"]]]
    assert "input_token_logprobs" not in meta
    more = {"return_logprob": True, "logprob_start_len": 1, "top_logprobs_num": 1}
    meta = good(generate(http, 2, text="hey", **more))["meta_info"]
    assert meta["input_token_logprobs"] == [[-0.25, 101, "e"], [-0.25, 121, "y"]]
    meta = good(generate(http, 2, text="hey", return_logprob=True, logprob_start_len=0))["meta_info"]
    assert meta["input_token_logprobs"][0] == [None, 104, "h"] and "input_top_logprobs" not in meta


@pytest.mark.parametrize("body,param", [
    ({}, "text"), ({"text": "a", "input_ids": [1]}, "text"), ({"input_ids": "a"}, "input_ids"),
    ({"input_ids": [VOCAB]}, "input_ids"), ({"input_ids": [[1], [-1]]}, "input_ids[1]"), ({"text": ""}, "text"),
    ({"text": 5}, "text"), ({"text": [1]}, "text"),
    ({"text": "a", "rid": ""}, "rid"), ({"text": "a", "image_data": "x"}, "image_data"),
    ({"text": "a", "sampling_params": {"regex": ""}}, "sampling_params.regex"),
    ({"text": "a", "sampling_params": {"num_beams": 2}}, "sampling_params.num_beams"),
    ({"text": "a", "sampling_params": {"temperature": 9}}, "sampling_params.temperature"),
    ({"text": "a", "sampling_params": {"max_new_tokens": 0}}, "sampling_params.max_new_tokens"),
    ({"text": "a", "sampling_params": 5}, "sampling_params"), ({"text": ["a"] * 200}, "text"),
    ({"text": "a" * 2 * CONTEXT}, "text")])
def test_generate_refusals(made, http, body, param):
    assert param_of(http.post("/generate", json=body)) == param
    assert not made.client.submits


def test_generate_default_length(made, http):
    good(http.post("/generate", json={"text": "a"}))
    assert made.client.submits[0].params.max_tokens == 128


def test_a_running_rid_is_not_taken_twice(made, http):
    running = made.app.state.server.running
    running["", "r"] = ("r",)
    assert param_of(generate(http, text="a", rid="r")) == "rid"
    running["other", "r"] = running.pop(("", "r"))
    good(generate(http, text="a", rid="r"))  # what other tenants call theirs is nobody's business


def test_no_two_requests_have_one_name_in_the_engine(made, http):
    made.client.hold = 1
    with ThreadPoolExecutor(2) as pool:
        two, one = (pool.submit(generate, http, text="a", rid=rid, params={"n": n})
                    for rid, n in (("r", 2), ("r-0", 1)))
        until(lambda: len(made.client.submits) == 3)
        assert len({submit.id for submit in made.client.submits}) == 3
        assert good(http.post("/abort_request", json={"rid": "r-0"})) == {"aborted": 1} and one.result(60)
        assert good(http.post("/abort_request", json={"rid": "r"})) == {"aborted": 2} and two.result(60)


def test_abort_request_forms(made, http):
    made.app.state.server.running.update({("", "a"): ("a-0", "a-1"), ("", "b"): ("b",)})
    aborted = []

    async def abort(id):
        aborted.append(id)

    made.client.abort = abort
    assert good(http.post("/abort_request", json={"rid": "a"})) == {"aborted": 2} and aborted == ["a-0", "a-1"]
    assert good(http.post("/abort_request", json={"rid": "zz"})) == {"aborted": 0}
    assert good(http.post("/abort_request", json={"abort_all": True})) == {"aborted": 3}
    for odd in ({}, {"rid": 5}, {"abort_all": "yes"}):
        assert param_of(http.post("/abort_request", json=odd)) == "rid"


# ---- tokens

@pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize"])
@pytest.mark.parametrize("name", ["prompt", "text", "content"])
def test_tokenize(http, path, name):
    value = good(http.post(path, json={name: "hé<|im_end|>", "return_token_strs": True}))
    assert value["tokens"] == [104, 0xC3, 0xA9, END] and value["count"] == 4 and value["max_model_len"] == CONTEXT
    assert value["token_strs"][0] == "h" and value["token_strs"][3] == "<|im_end|>"


def test_tokenize_a_conversation_as_chat_does(http):
    value = good(http.post("/tokenize", json={"messages": HI}))
    chat = good(http.post("/v1/chat/completions", json={"messages": HI, "max_tokens": 1, "return_token_ids": True}))
    assert value["tokens"] == chat["prompt_token_ids"] and "token_strs" not in value
    assert param_of(http.post("/tokenize", json={"messages": [{"role": "x"}]})) == "messages[0].role"
    assert param_of(http.post("/tokenize", json={})) == "prompt"


@pytest.mark.parametrize("path", ["/detokenize", "/v1/detokenize"])
def test_detokenize(http, path):
    assert good(http.post(path, json={"tokens": [START, 0xC3, 0xA9]})) == {"prompt": "<|im_start|>é",
                                                                           "text": "<|im_start|>é"}
    assert good(http.post(path, json={"tokens": [START, 97], "skip_special_tokens": True}))["text"] == "a"
    assert good(http.post(path, json={"tokens": []}))["text"] == ""
    for odd in ([VOCAB], [-1], [2**63]):
        assert param_of(http.post(path, json={"tokens": odd})) == "tokens"
    assert param_of(http.post(path, json={"tokens": [1, "2"]})) == "tokens"
    assert param_of(http.post(path, json={})) == "tokens"


def test_what_a_client_must_know_to_tokenize_here(http):
    value = good(http.get("/tokenizer_info"))
    assert value["eos_token"] == "<|im_end|>" and value["bos_token"] is None and value["model_max_length"] == CONTEXT
    assert good(http.post("/tokenize", json={"prompt": value["eos_token"]}))["tokens"] == [END]


# ---- the plain endpoints

def test_models(http):
    value = good(http.get("/v1/models"))
    card = value["data"][0]
    assert value["object"] == "list" and len(value["data"]) == 1
    assert card.pop("created") > 1_700_000_000
    assert card == {"id": "tiny", "object": "model", "owned_by": "isthmus", "root": "/models/tiny", "parent": None,
                    "max_model_len": CONTEXT}
    assert good(http.get("/v1/models/tiny"))["id"] == "tiny"
    response = http.get("/v1/models/org/other")
    assert response.status_code == 404 and response.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_flush_cache(made, http, method):
    assert good(http.request(method, "/flush_cache?timeout=5")) == {"success": True, "flushed_pages": 3}
    assert made.client.flushes == 1


def test_a_refused_flush_is_a_conflict(made, http):
    async def refuse(name):
        raise IsthmusError("3 requests are running")

    made.client.command = refuse
    response = http.post("/flush_cache")
    assert response.status_code == 409 and "3 requests" in response.json()["error"]["message"]
    assert response.json()["error"]["code"] == "flush_refused"


def test_server_info_has_no_secret():
    made = make_app(server={"api_key": "sekret"})
    with TestClient(made.app, headers={"authorization": "Bearer sekret"}) as http:
        for path in ("/server_info", "/get_server_info", "/", "/version", "/metrics"):
            response = http.get(path)
            assert response.status_code == 200 and "sekret" not in response.text
        info = good(http.get("/server_info"))
        assert info["served_model_name"] == "tiny" and info["info"]["vocab_size"] == VOCAB and info["version"]
        assert "/v1/chat/completions" in good(http.get("/"))["endpoints"]


# ---- metrics

def samples(http) -> dict[str, list]:
    response = http.get("/metrics")
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/plain")
    found: dict[str, list] = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


STATS = {"running": 3, "waiting": 2, "pages_total": 64, "pages_free": 40, "pages_cached": 20, "pages_used": 16,
         "prompt_tokens": 100, "generated_tokens": 50, "cached_tokens": 30, "reprefill_cached_tokens": 4,
         "preemptions": 1, "steps": 9, "hit_rate_window": 0.25, "queue_seconds": 1.5, "requests": 6,
         "finish_reasons": {"stop": 5}}


def test_engine_numbers_under_both_names(made, http):
    made.client.stats = STATS
    found = samples(http)
    for name, value in {
            "isthmus_requests_running": 3, "vllm:num_requests_running": 3, "isthmus_requests_waiting": 2,
            "vllm:num_requests_waiting": 2, "isthmus_kv_cache_usage_ratio": 0.25, "vllm:kv_cache_usage_perc": 0.25,
            "isthmus_prompt_tokens_total": 100, "vllm:prompt_tokens_total": 100, "isthmus_generated_tokens_total": 50,
            "vllm:generation_tokens_total": 50, "vllm:prefix_cache_queries_total": 100,
            "vllm:prefix_cache_hits_total": 30, "isthmus_prefix_cache_hits_total": 30,
            "isthmus_reprefill_cached_tokens_total": 4, "vllm:num_preemptions_total": 1, "isthmus_steps_total": 9,
            "isthmus_prefix_cache_hit_ratio_window": 0.25, "vllm:iteration_tokens_total_sum": 116,
            "vllm:iteration_tokens_total_count": 9, "vllm:cache_config_info": 1}.items():
        assert [s.value for s in found[name]] == [value], name
    assert found["vllm:num_requests_running"][0].labels == {"model_name": "tiny", "engine": "0"}
    assert found["isthmus_requests_running"][0].labels == {"model_name": "tiny"}
    assert found["vllm:cache_config_info"][0].labels["num_gpu_blocks"] == "64"


WHOLE = {**STATS, "pages_evictable": 12, "pages_used": 12, "pages_quarantined": 1, "pages_pinned": 5, "pins": 2,
         "kv_event_batches": 8, "step_schedule_seconds": 0.5, "step_device_seconds": 4.0, "step_finish_seconds": 0.25}
OWNED = {"requests": 3, "cache_used": 8, "cache_idle": 12, "free": 40, "quarantine": 1}


def test_step_time_and_pages_by_owner(made, http):
    made.client.stats = WHOLE
    found = samples(http)
    assert {s.labels["part"]: s.value for s in found["isthmus_step_seconds_total"]} == {
        "schedule": 0.5, "device": 4.0, "finish": 0.25}
    assert {s.labels["owner"]: s.value for s in found["isthmus_kv_pages_owned"]} == OWNED
    assert sum(OWNED.values()) == WHOLE["pages_total"]
    for name, value in (("isthmus_kv_pins", 2), ("isthmus_kv_pages_pinned", 5), ("isthmus_kv_event_batches_total", 8)):
        assert [s.value for s in found[name]] == [value], name
    info = good(http.get("/server_info"))
    assert info["pages"] == OWNED and info["step_seconds"] == {"schedule": 0.5, "device": 4.0, "finish": 0.25}
    assert info["health"] == {"ok": True, "reason": ""} and info["started"] > 1e9
    later = good(http.get("/server_info"))
    assert later["time"] > info["time"] and later["started"] == info["started"]


def test_missing_numbers_are_left_out(made, http):
    made.client.stats = {"running": 0, "finish_reasons": {}, "pages_total": 0, "queue_seconds": None}
    found = samples(http)
    assert "vllm:kv_cache_usage_perc" not in found and found["vllm:num_requests_running"][0].value == 0
    assert "isthmus_step_seconds_total" not in found and "isthmus_kv_pages_owned" not in found
    info = good(http.get("/server_info"))
    assert info["pages"] == info["step_seconds"] == {}


def test_latencies_and_ends_are_counted(http):
    for body in ({"max_tokens": 5}, {"max_tokens": 400}, {"max_tokens": 5, "n": 2},
                 {"max_tokens": 400, "stream": True}):
        assert http.post("/v1/chat/completions", json={"messages": HI, "temperature": 0, **body}).status_code == 200
    assert http.post("/v1/chat/completions", json={"messages": []}).status_code == 400
    found = samples(http)
    whole = len(TEXT) + 1
    tokens = 3 * 5 + 2 * whole
    for prefix in ("isthmus_", "vllm:"):
        assert found[prefix + "e2e_request_latency_seconds_count"][0].value == 5
        assert found[prefix + "time_to_first_token_seconds_count"][0].value == 5
        assert found[prefix + "inter_token_latency_seconds_count"][0].value == tokens - 5
        assert found[prefix + "request_generation_tokens_sum"][0].value == tokens
        buckets = [s.value for s in found[prefix + "e2e_request_latency_seconds_bucket"]]
        assert buckets == sorted(buckets) and buckets[-1] == 5
    ends = {s.labels["finished_reason"]: s.value for s in found["vllm:request_success_total"]}
    assert ends == {"stop": 2, "length": 3, "abort": 0}
    statuses = {s.labels["status"]: s.value for s in found["isthmus_http_responses_total"]}
    assert statuses["200"] == 4 and statuses["400"] == 1


@pytest.mark.parametrize("die_after,refuse", [(2, None), (None, Overloaded("full"))])
def test_failures_are_counted_as_such(made, http, die_after, refuse):
    made.client.die_after, made.client.refuse = die_after, refuse
    assert http.post("/v1/completions", json={"prompt": "x"}).status_code in (429, 503)
    ends = {s.labels["finish"]: s.value for s in samples(http)["isthmus_requests_finished_total"]}
    assert ends == {"error": 1}


def test_a_histogram_counts_bounds_as_prometheus_does():
    metrics = Metrics()
    histogram = metrics.measured["ttft"]
    for value in (0.001, 0.0011, 1000.0):
        histogram.observe(value)
    histogram.observe(0.02, 3)
    cumulative = dict(histogram.cumulative())
    assert (cumulative["0.001"], cumulative["0.0025"], cumulative["0.025"], cumulative["+Inf"]) == (1, 2, 5, 6)
    assert histogram.sum == pytest.approx(1000.0621)


def test_two_apps_do_not_share_numbers():
    first, second = make_app(), make_app()
    with TestClient(first.app) as http:
        http.get("/health")
    assert first.app.state.server.metrics.statuses == {200: 1} and not second.app.state.server.metrics.statuses
