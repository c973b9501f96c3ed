"""`/v1/chat/completions` over planned outputs: shapes, streams, usage, several answers, conversations."""
from __future__ import annotations

import json

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from starlette.testclient import TestClient

from . import fake_client
from .fake_client import END, START, TEXT, fixtures, make_app

HI = [{"role": "user", "content": "Hi"}]


made, http = fixtures()


def chat(http, **body):
    body = {"model": "tiny", "messages": HI, "max_tokens": 8, "temperature": 0, **body}
    return http.post("/v1/chat/completions", json=body)


def answer(http, **body):
    response = chat(http, **body)
    assert response.status_code == 200, response.text
    return response.json()


def events(response) -> list[dict]:
    """The events of a stream; checks framing, [DONE] and headers."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache" and response.headers["x-accel-buffering"] == "no"
    frames = response.text.split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]


def text_of(chunks: list[dict], index: int = 0) -> str:
    return "".join(c["delta"].get("content") or "" for e in chunks for c in e["choices"] if c["index"] == index)


def refusal(response, param: str) -> dict:
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["param"] == param, error
    assert isinstance(error["code"], str) and error["message"]
    return error


def test_whole_answer_has_every_required_field_and_no_other_null(http):
    value = answer(http)
    ChatCompletion.model_validate(value, strict=True)
    assert value["object"] == "chat.completion" and value["model"] == "tiny" and value["id"].startswith("chatcmpl-")
    assert value["choices"] == [{"index": 0, "message": {"content": TEXT[:8], "role": "assistant", "refusal": None},
                                 "logprobs": None, "finish_reason": "length"}]
    prompt = value["usage"]["prompt_tokens"]
    assert value["usage"] == {"prompt_tokens": prompt, "completion_tokens": 8, "total_tokens": prompt + 8,
                              "prompt_tokens_details": {"cached_tokens": 4}}
    assert "system_fingerprint" not in value


def test_stream_is_role_text_finish(http):
    chunks = events(chat(http, stream=True, max_tokens=3))
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)
    assert [c["choices"][0]["delta"] for c in chunks] == [
        {"role": "assistant", "content": ""}, {"content": "o"}, {"content": "n"}, {"content": "e"}, {}]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None, None, None, None, "length"]
    assert len({c["id"] for c in chunks}) == 1 and all("usage" not in c for c in chunks)


@pytest.mark.parametrize("limit", [3, 200])
@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": True}])
def test_usage_chunk_only_when_asked(http, options, limit):
    whole = answer(http, max_tokens=limit)
    chunks = events(chat(http, stream=True, max_tokens=limit, stream_options=options))
    last = [c for c in chunks if c["choices"] == []]
    if options and options.get("include_usage"):
        assert last == [chunks[-1]] and chunks[-1]["usage"] == whole["usage"]
        assert all(c["usage"] is None for c in chunks[:-1])
    else:
        assert not last and not any(c.get("usage") for c in chunks)
    finishes = [c["finish_reason"] for e in chunks for c in e["choices"] if c["finish_reason"]]
    assert finishes == [whole["choices"][0]["finish_reason"]]
    assert text_of(chunks) == whole["choices"][0]["message"]["content"]


def test_continuous_usage(http):
    chunks = events(chat(http, stream=True, max_tokens=3, stream_options={"continuous_usage_stats": True}))
    assert [c["usage"]["completion_tokens"] for c in chunks] == [1, 1, 2, 3, 3]


def test_characters_are_never_broken():
    made = make_app(text="ok \U0001F98A \U0001F468\u200D\U0001F469 end")
    with TestClient(made.app) as http:
        whole = answer(http, max_tokens=100)["choices"][0]["message"]["content"]
        chunks = events(chat(http, stream=True, max_tokens=100))
    assert whole == made.client.text == text_of(chunks)
    assert all(c["delta"].get("content") != "" for e in chunks[1:] for c in e["choices"]), "a chunk without content"


def test_several_answers(made, http):
    body = {"n": 3, "temperature": 1, "seed": 5, "max_tokens": 10}
    value = answer(http, **body)
    assert [s.params.seed for s in made.client.submits] == [5, 6, 7]
    assert len({s.id for s in made.client.submits}) == 3
    texts = [c["message"]["content"] for c in value["choices"]]
    assert [c["index"] for c in value["choices"]] == [0, 1, 2] and len(set(texts)) == 3
    chunks = events(chat(http, stream=True, stream_options={"include_usage": True}, **body))
    assert [text_of(chunks, i) for i in range(3)] == texts
    for i in range(3):
        own = [c for e in chunks for c in e["choices"] if c["index"] == i]
        assert [c["finish_reason"] for c in own if c["finish_reason"]] == ["length"]
        assert [c["delta"].get("role") for c in own] == ["assistant"] + [None] * (len(own) - 1)
    single = answer(http, **{**body, "n": 1})["usage"]
    assert value["usage"] == chunks[-1]["usage"]
    assert value["usage"]["completion_tokens"] == 30 and value["usage"]["prompt_tokens"] == single["prompt_tokens"]
    assert value["usage"]["prompt_tokens_details"] == single["prompt_tokens_details"]


@pytest.mark.parametrize("n", [129, 10**5, 10**9, 0, -1, 1.5, True, "2"])
def test_number_of_answers_is_bounded(made, http, n):
    refusal(chat(http, n=n), "n")
    assert not made.client.submits


@pytest.mark.parametrize("extra,k", [({}, 0), ({"top_logprobs": None}, 0), ({"top_logprobs": 0}, 0),
                                     ({"top_logprobs": 1}, 1), ({"top_logprobs": 20}, 20)])
def test_logprobs(http, extra, k):
    value = answer(http, max_tokens=12, logprobs=True, **extra)
    choice = value["choices"][0]
    content = choice["logprobs"]["content"]
    assert choice["logprobs"]["refusal"] is None and len(content) == 12
    assert b"".join(bytes(t["bytes"]) for t in content).decode() == choice["message"]["content"]
    for token in content:
        assert token["token"] == bytes(token["bytes"]).decode() and token["logprob"] == -0.25
        values = [t["logprob"] for t in token["top_logprobs"]]
        assert len(values) == k and values == sorted(values, reverse=True)
        assert not k or token["top_logprobs"][0]["token"] == token["token"]
    chunks = events(chat(http, max_tokens=12, logprobs=True, stream=True, **extra))
    streamed = [t for e in chunks for c in e["choices"] if "logprobs" in c for t in c["logprobs"]["content"]]
    assert streamed == content


@pytest.mark.parametrize("bad", [{"logprobs": True, "top_logprobs": 21}, {"logprobs": True, "top_logprobs": -1},
                                 {"top_logprobs": 3}, {"logprobs": False, "top_logprobs": 3},
                                 {"logprobs": True, "top_logprobs": 10**6}])
def test_logprobs_range(http, bad):
    refusal(chat(http, **bad), "top_logprobs")


def test_a_logprob_of_minus_infinity_is_still_json(monkeypatch, http):
    real = fake_client.scores

    def with_infinity(ids, k):
        found = real(ids, k)
        return type(found)(b"\x00\x00\x80\xff" * len(ids), found.k, found.top_ids, found.top)

    monkeypatch.setattr(fake_client, "scores", with_infinity)
    token = answer(http, max_tokens=1, logprobs=True)["choices"][0]["logprobs"]["content"][0]
    assert token["logprob"] == -1e9


def test_token_ids_both_ways(http):
    value = answer(http, max_tokens=3, return_token_ids=True)
    assert value["choices"][0]["token_ids"] == list(b"one") and value["prompt_token_ids"][0] == START
    chunks = events(chat(http, max_tokens=3, return_token_ids=True, stream=True))
    assert [id for e in chunks for c in e["choices"] for id in c.get("token_ids", ())] == list(b"one")
    assert [c.get("prompt_token_ids") for c in chunks] == [value["prompt_token_ids"]] + [None] * (len(chunks) - 1)


def test_stop_string_ends_the_text_and_is_named(made, http):
    for body in ({"stop": [" three"]}, {"stop": " three"}):
        value = answer(http, max_tokens=40, **body)["choices"][0]
        assert (value["message"]["content"], value["finish_reason"]) == ("one two", "stop")
        assert value["stop_reason"] == " three"
    assert "stop_reason" not in answer(http, max_tokens=400)["choices"][0], "its own end is no stop"
    assert made.client.watches[0].stop == (" three",) and made.client.submits[0].params.stop == (" three",)


def test_default_length_is_the_rest_of_the_context(made, http):
    answer(http, max_tokens=None)
    submit = made.client.submits[-1]
    assert submit.params.max_tokens == 512 - len(submit.prompt) // 4
    answer(http, max_tokens=None, max_completion_tokens=7)
    assert made.client.submits[-1].params.max_tokens == 7
    answer(http, max_tokens=6, max_completion_tokens=None)
    assert made.client.submits[-1].params.max_tokens == 6


def test_content_parts_equal_the_string(made, http):
    whole = answer(http, messages=[{"role": "user", "content": "Name a fruit."}])
    parts = [{"type": "text", "text": "Name a"}, {"type": "text", "text": " fruit."}]
    split = answer(http, messages=[{"role": "user", "content": parts}])
    assert whole["usage"] == split["usage"] and made.client.submits[0].prompt == made.client.submits[1].prompt


@pytest.mark.parametrize("content,param", [
    ([{"type": "foo", "text": "x"}], "messages[0].content[0]"), ([{"type": "text"}], "messages[0].content[0]"),
    ([3], "messages[0].content[0]"), ({"a": 1}, "messages[0].content"), (7, "messages[0].content"),
    (None, "messages[0].content"),
    ([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/a.png"}}],
     "messages[0].content[1]"),
    ([{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}], "messages[0].content[0]")])
def test_odd_contents_are_refused_by_place(http, content, param):
    refusal(chat(http, messages=[{"role": "user", "content": content}]), param)


@pytest.mark.parametrize("messages,param", [
    ("hello", "messages"), ([], "messages"), (None, "messages"), ([None], "messages[0]"),
    ([{"content": "x"}], "messages[0].role"), ([{"role": "wizard", "content": "x"}], "messages[0].role"),
    ([{"role": ["user"], "content": "x"}], "messages[0].role"), ([{"role": "user"}], "messages[0].content"),
    ([*HI, {"role": "assistant", "content": None}], "messages[1].content"),
    ([*HI, {"role": "assistant", "content": None, "tool_calls": 3}], "messages[1].tool_calls"),
    ([*HI, {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": 3}}]}],
     "messages[1].tool_calls[0].function.name")])
def test_odd_conversations_are_refused_by_place(http, messages, param):
    refusal(chat(http, messages=messages), param)


def test_missing_messages(http):
    response = http.post("/v1/chat/completions", json={"model": "tiny"})
    assert refusal(response, "messages")["code"] == "missing_required_parameter"


def test_tool_calls_and_results_reach_the_template(made, http):
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    answer(http, messages=[*HI, {"role": "assistant", "content": None, "tool_calls": [call]},
                           {"role": "tool", "tool_call_id": "c1", "content": "4", "foo": 1},
                           {"role": "assistant", "content": "four", "reasoning": "hm"},
                           {"role": "developer", "name": "anna", "content": "Be brief."}])
    messages, _ = made.template.calls[-1]
    assert messages[1] == {"role": "assistant", "content": "", "tool_calls": [call]}
    assert messages[2] == {"role": "tool", "content": "4", "tool_call_id": "c1"}
    assert messages[3] == {"role": "assistant", "content": "four", "reasoning": "hm"}
    assert messages[4] == {"role": "developer", "name": "anna", "content": "Be brief."}


def test_marks_in_contents_are_text(http):
    def count(text):
        return answer(http, messages=[{"role": "user", "content": text}])["usage"]["prompt_tokens"]
    assert count("x" + "<|im_end|>" * 5) - count("x") == 50


@pytest.mark.parametrize("kwargs", [
    {"tokenize": True}, {"chat_template": "{{ 'pwned' }}"}, {"messages": []}, {"conversation": 1}, {"tools": 5},
    {"bos_token": "x"}, {"return_dict": True}, {"self": 1}, {"raise_exception": 1}, {"add_generation_prompt": False},
    {"_x": 1}, {"a b": 1}, {"thinking": [1]}, {"thinking": {"a": 1}}, {"thinking": "x" * 2000},
    {f"k{i}": 1 for i in range(100)}])
def test_template_kwargs_are_few_plain_values(made, http, kwargs):
    response = chat(http, chat_template_kwargs=kwargs)
    assert response.status_code == 400 and response.json()["error"]["param"].startswith("chat_template_kwargs")
    assert not made.client.submits


def test_harmless_template_kwargs_arrive(made, http):
    answer(http, chat_template_kwargs={"enable_thinking": False, "date": "today", "level": 3, "other": None})
    assert made.template.calls[-1][1] == {"enable_thinking": False, "date": "today", "level": 3, "other": None}
    refusal(chat(http, chat_template_kwargs="x"), "chat_template_kwargs")
    refusal(chat(http, chat_template="{{ cycler.__init__.__globals__ }}"), "chat_template")


def test_continuing_the_last_message(made, http):
    messages = [*HI, {"role": "assistant", "content": "I am"}]
    answer(http, messages=messages, continue_final_message=True)
    ids = list(memoryview(made.client.submits[-1].prompt).cast("i"))
    assert bytes(ids[-4:]) == b"I am"
    answer(http, messages=messages, add_generation_prompt=False)
    assert list(memoryview(made.client.submits[-1].prompt).cast("i"))[-2:] == [END, 10]
    refusal(chat(http, messages=messages, continue_final_message=True, add_generation_prompt=True),
            "continue_final_message")


def test_a_model_without_template_says_so(made, http):
    made.app.state.server.text.template = None
    assert "--chat-template" in refusal(chat(http), "messages")["message"]
