"""`/v1/messages` and `count_tokens`: shapes, streams, tools, thinking, what a conversation becomes, refusals."""
from __future__ import annotations

import asyncio
import json

import pytest
from isthmus.core.errors import Overloaded, RequestError
from starlette.testclient import TestClient

from .fake_client import TEXT, drive, fixtures, make_app

COST = 3  # seconds

HI = [{"role": "user", "content": "Hi"}]
TOOLS = [{"name": "weather", "description": "of a city", "input_schema": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
PREFILL = [*HI, {"role": "assistant", "content": "It is"}]


made, http = fixtures(model={"reasoning_parser": "think", "tool_parser": "hermes"})


def ask(http, path="/v1/messages", **body):
    body = {"model": "tiny", "max_tokens": 300, "messages": HI, "temperature": 0, **body}
    return http.post(path, json={key: value for key, value in body.items() if value is not None})


def answer(http, **body):
    response = ask(http, **body)
    assert response.status_code == 200, response.text
    return response.json()


def events(http, **body) -> list[dict]:
    response = ask(http, stream=True, **body)
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
    found = []
    for frame in response.text.split("\n\n")[:-1]:
        name, data = frame.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def assembled(stream: list[dict]) -> dict:
    """The message that a client makes of a stream."""
    message = dict(stream[0]["message"], content=[])
    parts: list[str] = []
    for event in stream[1:]:
        if event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(dict(event["content_block"]))
            parts = []
        elif event["type"] == "content_block_delta":
            parts.append(event["delta"][{"text_delta": "text", "thinking_delta": "thinking",
                                         "input_json_delta": "partial_json"}[event["delta"]["type"]]])
        elif event["type"] == "content_block_stop":
            block, text = message["content"][event["index"]], "".join(parts)
            kind = block["type"]
            block |= {"input": json.loads(text)} if kind == "tool_use" else {kind: text}
        elif event["type"] == "message_delta":
            message |= event["delta"] | {"usage": message["usage"] | event["usage"]}
    return message


def plain(message: dict) -> dict:
    """A message without its ids."""
    content = [{key: value for key, value in block.items() if key != "id"} for block in message["content"]]
    return {**message, "id": "", "content": content}


TEXTS = {"plain": TEXT, "thinks": "<think>hm</think>\n\nso be it", "calls": "<think>a</think>I look." + CALL + CALL,
         "empty": "", "long": "x" * 600}
KINDS = {"plain": ["text"], "thinks": ["thinking", "text"], "calls": ["thinking", "text", "tool_use", "tool_use"],
         "empty": [], "long": ["text"]}
REASONS = {"plain": "end_turn", "thinks": "end_turn", "calls": "tool_use", "empty": "end_turn", "long": "max_tokens"}


@pytest.mark.parametrize("text", TEXTS)
def test_a_stream_comes_to_the_same_message(made, http, text):
    made.client.text = TEXTS[text]
    whole = answer(http, tools=TOOLS)
    stream = events(http, tools=TOOLS)
    assert plain(assembled(stream)) == plain(whole)
    assert [block["type"] for block in whole["content"]] == KINDS[text]
    assert (whole["type"], whole["role"], whole["stop_reason"]) == ("message", "assistant", REASONS[text])
    names = [event["type"] for event in stream]
    assert names[:2] == ["message_start", "ping"] and names[-2:] == ["message_delta", "message_stop"]
    assert names.count("content_block_start") == names.count("content_block_stop") == len(whole["content"])


def test_usage_tells_apart_what_came_from_the_cache(http):
    usage = answer(http, max_tokens=5)["usage"]
    assert usage == {"input_tokens": 17, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 4,
                     "output_tokens": 5}
    assert http.post("/v1/messages/count_tokens", json={"messages": HI}).json() == {"input_tokens": 21}


def test_why_it_ended(made, http):
    stopped = answer(http, stop_sequences=["three"])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "three")
    assert stopped["content"] == [{"type": "text", "text": "one two "}]
    made.client.text = "x" * 2000
    assert answer(http, max_tokens=9)["stop_reason"] == "max_tokens"
    assert answer(http, max_tokens=100_000)["stop_reason"] == "model_context_window_exceeded"


def test_a_conversation_with_all_kinds_of_blocks(made, http):
    cached = {"cache_control": {"type": "ephemeral"}}
    answer(http, tools=[TOOLS[0] | cached], system=[
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=2;"}, {"type": "text", "text": "Be."},
        {"type": "text", "text": "Brief.", **cached}], messages=[
        {"role": "user", "content": [{"type": "text", "text": "Look", **cached}, {"type": "document", "source": {
            "type": "text", "media_type": "text/plain", "data": "a page"}}]},
        {"role": "user", "content": "again"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "I look."}, {"type": "tool_use", "id": "a", "name": "weather", "input": {"c": 1}},
            {"type": "tool_use", "id": "b", "name": "weather", "input": {}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "a", "content": "rain", **cached},
            {"type": "tool_result", "tool_use_id": "b", "is_error": True, "content": [
                {"type": "text", "text": "no"}, {"type": "text", "text": "net"}]}, {"type": "text", "text": "And?"}]}])
    calls = [{"id": id, "type": "function", "function": {"name": "weather", "arguments": arguments}}
             for id, arguments in (("a", {"c": 1}), ("b", {}))]
    given = [{key: value for key, value in message.items()} for message in made.template.calls[-1][0]]
    for message in given:
        for call in message.get("tool_calls", ()):
            arguments = call["function"]["arguments"]
            call["function"]["arguments"] = json.loads(arguments) if isinstance(arguments, str) else arguments
    system, *rest = given
    assert system["role"] == "system" and system["content"].startswith("Be.\nBrief.")
    assert rest == [
        {"role": "user", "content": "Look\na page\nagain"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a", "content": "rain"},
        {"role": "tool", "tool_call_id": "b", "content": "Error: no\nnet"}, {"role": "user", "content": "And?"}]


def test_a_system_may_speak_later_too(made, http):
    answer(http, messages=[*HI, {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}])
    assert [(m["role"], m["content"]) for m in made.template.calls[-1][0]] == [("user", "Hi"), ("system", "Be brief.")]


def test_an_answer_that_was_begun_goes_on(made, http):
    answer(http, messages=PREFILL)
    prompt = bytes(id for id in made.client.submits[-1].prompt[::4] if id < 128)
    assert prompt.endswith(b"It is"), "no end of turn and no new turn behind it"


def test_the_parameters_reach_the_engine(made, http):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    answer(http, top_p=0.5, top_k=7, temperature=0.25, stop_sequences=["x"], metadata={"user_id": "u"},
           service_tier="auto", thinking={"type": "disabled"}, context_management={"edits": []},
           output_config={"format": {"type": "json_schema", "schema": schema}})
    params = made.client.submits[-1].params
    assert (params.top_p, params.top_k, params.temperature, params.stop) == (0.5, 7, 0.25, ("x",))
    assert json.loads(params.grammar.source) == schema
    answer(http, output_format={"type": "json_schema", "schema": schema})
    assert made.client.submits[-1].params.grammar == params.grammar or made.client.submits[-1].params.grammar
    assert http.post("/v1/messages", headers={"x-session-id": "s"}, json={
        "max_tokens": 2, "messages": HI}).status_code == 200 and made.client.submits[-1].hint.session == "s"


BAD = [
    ({"messages": [{"role": []}]}, "messages[0].role"), ({"tool_choice": {"type": {}}}, "tool_choice.type is {}"),
    ({"max_tokens": None}, "max_tokens is required"), ({"messages": []}, "messages must hold at least 1"),
    ({"messages": ["x"]}, "messages[0].role"), ({"messages": [{"role": "pope", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content must be a string"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0] has type"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f"}]}]},
     "messages[0].content[0].input must be an object"),
    ({"messages": [{"role": "user", "content": [{"type": "server_tool_use"}]}]}, "messages[0].content[0].type"),
    ({"system": 5}, "system must be a string"),
    ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools[0].type"),
    ({"tools": [{"input_schema": {}}]}, "tools[0].name"), ({"tools": [{"name": "f", "input_schema": 5}]},
                                                           "tools[0].input_schema must be"),
    ({"thinking": {"type": "deep"}}, "thinking.type must be"),
    ({"tool_choice": {"type": "some"}}, "tool_choice.type"), ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name is 'g'"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers is not supported"), ({"temperature": 9}, "temperature must be"),
    ({"output_config": {"format": {"type": "x"}}}, "output_config.format must"), ({"n": 2}, "n is 2"),
    ({"system": "x" * 600}, "maximum context length is 512")]


@pytest.mark.parametrize("body,words", BAD, ids=[words for _, words in BAD])
def test_what_is_wrong_is_named(http, body, words):
    response = ask(http, **body)
    error = response.json()
    assert response.status_code == 400 and error["type"] == "error" and words in error["error"]["message"], error
    assert error["error"]["type"] == "invalid_request_error"
    assert error["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]


def test_statuses_and_their_words():
    made = make_app(server={"api_key": "k"})
    with TestClient(made.app) as http:
        def kind(response):
            return response.status_code, response.json()["error"]["type"]

        keyed = {"x-api-key": "k"}
        body = {"max_tokens": 5, "messages": HI}
        assert kind(http.post("/v1/messages", json=body)) == (401, "authentication_error")
        assert http.post("/v1/messages", json=body, headers=keyed).status_code == 200
        assert kind(http.post("/v1/messages", json=body | {"model": "no"}, headers=keyed)) == (404, "not_found_error")
        assert kind(http.get("/v1/messages", headers=keyed)) == (405, "invalid_request_error")
        made.client.refuse = Overloaded("2048 requests wait")
        full = http.post("/v1/messages", json=body | {"stream": True}, headers=keyed)
        assert kind(full) == (429, "rate_limit_error") and full.headers["retry-after"]
        made.client.load()
        assert kind(http.post("/v1/messages", json=body, headers=keyed)) == (503, "overloaded_error")


def test_an_error_in_a_stream_is_an_event(made, http):
    made.client.die_after = 3
    last = events(http)[-1]
    assert last["type"] == "error" and last["error"]["type"] == "overloaded_error" and last["request_id"]


def test_an_error_of_the_engine_names_the_field_that_was_sent(made, http):
    made.client.refuse = RequestError("response_format.json_schema.schema: $: no", code="invalid_grammar",
                                      param="response_format.json_schema.schema")
    for stream in (False, True):
        assert ask(http, stream=stream).json()["error"]["message"] == "output_config.format.schema: $: no"


def test_silence_is_broken_by_pings():
    made = make_app(server={"sse_ping": 0.01})
    made.client.hold = 2

    async def main():
        body = json.dumps({"max_tokens": 20, "messages": HI, "stream": True}).encode()
        return await drive(made.app, "/v1/messages", body, lambda sent: len(sent) > 8)

    sent = b"".join(message.get("body", b"") for message in asyncio.run(main()))
    assert sent.count(b'event: ping\ndata: {"type":"ping"}\n\n') > 2 and len(made.client.aborts) == 1


def test_models_have_the_form_that_who_asks_reads(http):
    own = {"anthropic-version": "2023-06-01"}
    page = http.get("/v1/models", headers=own).json()
    assert page["data"] == [http.get("/v1/models/tiny", headers=own).json()] and page["first_id"] == "tiny"
    assert page["data"][0]["type"] == "model" and http.get("/v1/models").json()["object"] == "list"
    assert http.get("/v1/models/no", headers=own).json()["error"]["type"] == "not_found_error"
    assert http.get("/v1/models/no").json()["error"]["code"] == "model_not_found"
