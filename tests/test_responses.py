"""`/v1/responses`: shapes against OpenAI's description, streams, conversations, tools, background, refusals."""
from __future__ import annotations

import asyncio
import json

import pytest
from isthmus.core.errors import Overloaded, RequestError
from starlette.testclient import TestClient

from .effort import until
from .fake_client import TEXT, drive, fixtures, make_app
from .openai_schema import check_event, needs_schema, validator

COST = 6  # seconds

TOOLS = [{"type": "function", "name": "weather", "description": "of a city", "strict": True, "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False}}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
ROOM = {"max_output_tokens": 300}


made, http = fixtures(model={"reasoning_parser": "think", "tool_parser": "hermes"})


def ask(http, **body):
    return http.post("/v1/responses", json={"model": "tiny", "input": "Hi", "temperature": 0, **body})


def answer(http, **body):
    response = ask(http, **body)
    assert response.status_code == 200, response.text
    return response.json()


def read_events(text: str) -> list[dict]:
    """The events of a stream; each has its name twice and the next number."""
    found = []
    for frame in text.split("\n\n")[:-1]:
        name, data = frame.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert found[-1]["type"] == name.removeprefix("event: ")
    return found


def stream(http, **body) -> list[dict]:
    response = ask(http, stream=True, **body)
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
    events = read_events(response.text)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def kinds(events: list[dict]) -> list[str]:
    """Names of events without those that repeat."""
    names = [event["type"].removeprefix("response.") for event in events]
    return [name for i, name in enumerate(names) if i == 0 or names[i - 1] != name]


def same(response: dict) -> dict:
    """A response without what differs from one to the next."""
    def plain(value):
        if isinstance(value, dict):
            return {key: plain(inner) for key, inner in value.items()
                    if key not in ("id", "created_at", "completed_at", "call_id")}
        return [plain(each) for each in value] if isinstance(value, list) else value
    return plain(response)


TEXTS = {"plain": TEXT, "thinks": "<think>hm</think>\n\nso be it", "calls": "<think>a</think>I look." + CALL + CALL,
         "cut thinking": "<think>" + "x" * 400, "cut call": '<tool_call>\n{"name": "weather", "arguments": {"city": "'
         + "x" * 400}


@needs_schema
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("body", [{}, {"include": ["message.output_text.logprobs"], "top_logprobs": 2}])
def test_responses_and_events_have_openais_form_and_agree(made, http, text, body):
    made.client.text = TEXTS[text]
    body |= {"tools": TOOLS, **ROOM, "metadata": {"a": "b"}, "instructions": "Be brief."}
    whole = answer(http, **body)
    events = stream(http, **body)
    validator("Response").validate(whole)
    for event in events:
        check_event(event)
    last = events[-1]
    assert last["type"] == ("response.incomplete" if text.startswith("cut") else "response.completed")
    assert same(last["response"]) == same(whole) and whole["usage"]["input_tokens_details"]["cached_tokens"] == 4
    check_deltas(events, last["response"]["output"])
    validator("Response").validate(http.get(f"/v1/responses/{whole['id']}").json())
    validator("ResponseItemList").validate(http.get(f"/v1/responses/{whole['id']}/input_items").json())


def check_deltas(events: list[dict], output: list[dict]) -> None:
    """The deltas of each item come to what the item holds, and to what its events say is done."""
    for index, item in enumerate(output):
        own = [event for event in events if event.get("output_index") == index]
        text = "".join(event["delta"] for event in own if event["type"].endswith(".delta"))
        done = next(event for event in own if event["type"].endswith(("text.done", "arguments.done")))
        assert own[0]["type"] == "response.output_item.added" and own[-1]["item"] == item
        if item["type"] == "function_call":
            assert text == item["arguments"] == done["arguments"]
        else:
            assert text == item["content"][0]["text"] == done["text"]


def test_the_order_of_events(made, http):
    made.client.text = TEXTS["calls"]
    part = ["output_item.added", "content_part.added"]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert kinds(stream(http, tools=TOOLS, **ROOM)) == [
        "created", "in_progress", *part, "reasoning_text.delta", "reasoning_text.done", "content_part.done",
        "output_item.done", *part, "output_text.delta", "output_text.done", "content_part.done", "output_item.done",
        *call, *call, "completed"]


def test_usage_counts_what_was_cached_and_thought(made, http):
    made.client.text = TEXTS["thinks"]
    usage = answer(http)["usage"]
    assert len("hm") <= usage["output_tokens_details"]["reasoning_tokens"] <= len("<think>hm</think>")
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


def test_a_conversation_goes_on_where_it_ended(made, http):
    made.client.text = TEXTS["calls"]
    first = answer(http, tools=TOOLS, instructions="Of the first turn only.", **ROOM)
    call = first["output"][2]
    assert (call["name"], json.loads(call["arguments"])) == ("weather", {"city": "Oslo"})
    made.client.text = "Rain."
    second = answer(http, previous_response_id=first["id"], tools=TOOLS, input=[
        {"type": "function_call_output", "call_id": call["call_id"], "output": "rain"},
        {"type": "function_call_output", "call_id": first["output"][3]["call_id"], "output": [
            {"type": "input_text", "text": "more "}, {"type": "input_text", "text": "rain"}]}])
    messages = made.template.calls[-1][0]
    assert [message["role"] for message in messages][-4:] == ["user", "assistant", "tool", "tool"]
    assert [message["content"] for message in messages][-4:] == ["Hi", "I look.", "rain", "more rain"]
    assert messages[-3]["reasoning_content"] == "a" and len(messages[-3]["tool_calls"]) == 2
    assert messages[-2]["tool_call_id"] == call["call_id"] and "first turn" not in str(messages)
    answer(http, previous_response_id=second["id"], input="And now?")
    assert [message["content"] for message in made.template.calls[-1][0]][-2:] == ["Rain.", "And now?"]


def test_functions_may_be_in_namespaces(made, http):
    made.client.text = CALL.replace("weather", "sky__weather")
    sky = {"type": "namespace", "name": "sky", "description": "Above.", "tools": TOOLS}
    tools = [TOOLS[0] | {"name": "other"}, sky]
    first = answer(http, tools=tools, **ROOM)
    call = first["output"][0]
    assert (call["namespace"], call["name"]) == ("sky", "weather") and first["tools"][1] == tools[1]
    answer(http, tools=tools, previous_response_id=first["id"], input=[
        {"type": "function_call_output", "call_id": call["call_id"], "output": "rain"}])
    assert made.template.calls[-1][0][-2]["tool_calls"][0]["function"]["name"] == "sky__weather"
    for wrong, param in (([{"type": "web_search"}], "tools[1].tools[0].type"), (5, "tools[1].tools"),
                         ([TOOLS[0] | {"parameters": 5}], "tools[1].tools[0].parameters")):
        assert ask(http, tools=[tools[0], sky | {"tools": wrong}]).json()["error"]["param"] == param


def test_items_may_be_sent_or_named_instead_of_kept(made, http):
    first = answer(http)
    own = first["output"][0]
    for items in ([{"role": "user", "content": "Hi"}, own], [{"role": "user", "content": [
            {"type": "input_text", "text": "Hi"}]}, {"type": "item_reference", "id": own["id"]}]):
        answer(http, input=[*items, {"role": "developer", "content": "Short!"}], store=False)
        assert [(m["role"], m["content"]) for m in made.template.calls[-1][0]] == [
            ("user", "Hi"), ("assistant", TEXT), ("developer", "Short!")]


def test_what_the_assistant_thinks_says_and_calls_is_one_message(made, http):
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    said = {"role": "assistant", "content": "I call."}
    hidden = {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": "abc"}
    answer(http, input=[{"role": "user", "content": "Hi"}, hidden, thought, said, call, call, thought, said,
                        {"role": "user", "content": "?"}])
    messages = made.template.calls[-1][0]
    assert [m["role"] for m in messages] == ["user", "assistant", "assistant", "user"]
    assert [len(m.get("tool_calls", ())) for m in messages] == [0, 2, 0, 0]
    assert [m.get("reasoning_content") for m in messages] == [None, "hm", "hm", None]
    refused = ask(http, input=[hidden])
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "input"
    assert "add a message" in refused.json()["error"]["message"]


def test_the_parameters_reach_the_engine(made, http):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    answer(http, text={"format": {"type": "json_schema", "name": "x", "schema": schema}, "verbosity": "low"}, top_p=0.5,
           max_output_tokens=7, min_p=0.1, seed=3, temperature=0.25, session_id="s", parallel_tool_calls=False)
    params = made.client.submits[-1].params
    assert (params.max_tokens, params.top_p, params.min_p, params.seed, params.temperature) == (7, 0.5, 0.1, 3, 0.25)
    assert params.grammar.kind == "json_schema" and json.loads(params.grammar.source) == schema
    assert made.client.submits[-1].hint.session == "s"
    answer(http, text={"format": {"type": "json_object"}})
    assert made.client.submits[-1].params.grammar.kind == "json_object"


def test_truncation_drops_the_oldest_turns(made, http):
    turns = [{"role": role, "content": f"{i} " + "x" * 40} for i in range(6) for role in ("user", "assistant")]
    body = {"input": [{"role": "system", "content": "Keep me."}, *turns, {"role": "user", "content": "last"}],
            "max_output_tokens": 20}
    refused = ask(http, **body)
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
    assert refused.json()["error"]["param"] == "input"
    whole = answer(http, truncation="auto", **body)
    used = [message["content"] for message in made.template.calls[-1][0]]
    kept = next(call[0] for call in reversed(made.template.calls) if len(call[0]) < len(body["input"])
                and call[0][0]["content"] == "Keep me.")
    assert used[0] == "Keep me." and used[-1] == "last" and kept[1]["role"] == "user"
    assert 300 < whole["usage"]["input_tokens"] <= 512 - 20


def called(arguments) -> dict:
    return {"type": "function_call", "call_id": "a", "name": "f", "arguments": arguments}


BAD = [
    ({"input": [{"type": []}]}, "input[0].type"), ({"input": [{"type": "message", "role": {}}]}, "input[0].role"),
    ({"input": None}, "input"), ({"input": []}, "input"), ({"input": 5}, "input"), ({"input": ["x"]}, "input[0]"),
    ({"input": [{"role": "pope", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": 5}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
    ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
    ({"input": [called({})]}, "input[0].arguments"),
    ({"input": [{"role": "user", "content": "x"}, called("[" * 200)]}, "input[1].tool_calls[0].function.arguments"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "custom", "name": "x"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [{"type": "function", "name": "f", "parameters": 5}]}, "tools[0].parameters"),
    ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
    ({"tool_choice": {"type": "function", "name": "g"}, "tools": TOOLS}, "tool_choice.name"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "poem"}}}, "text.format.type"),
    ({"conversation": "c"}, "conversation"), ({"prompt": {"id": "p"}}, "prompt"), ({"n": 2}, "n"),
    ({"background": True, "store": False}, "store"), ({"top_logprobs": 2}, "top_logprobs"),
    ({"max_output_tokens": 0}, "max_output_tokens"), ({"max_output_tokens": 9999}, "max_output_tokens"),
    ({"metadata": {"a": 1}}, "metadata.a"), ({"temperature": 9}, "temperature"), ({"truncation": "some"}, "truncation"),
    ({"previous_response_id": "resp_none"}, "previous_response_id"), ({"model": "other"}, "model"),
    ({"input": [{"type": "item_reference", "id": "msg_none"}]}, "input[0].id")]


@pytest.mark.parametrize("body,param", BAD, ids=[param for _, param in BAD])
def test_what_is_wrong_is_named(http, body, param):
    response = ask(http, **body)
    error = response.json()["error"]
    assert response.status_code in (400, 404) and error["param"] == param, response.text
    assert not http.app.state.server.running


def test_an_error_has_its_status_before_the_stream_and_two_events_in_it(made, http):
    made.client.refuse = Overloaded("2048 requests wait")
    response = ask(http, stream=True)
    assert response.status_code == 429 and response.headers["retry-after"] and response.json()["error"]["message"]
    made.client.refuse, made.client.die_after = None, 3
    events = read_events(ask(http, stream=True).text)
    assert "error" in kinds(events) and events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"]["code"] == "server_error"


def test_an_error_of_the_engine_names_the_field_that_was_sent(made, http):
    made.client.refuse = RequestError("response_format.json_schema.schema: $: no", code="invalid_grammar",
                                      param="response_format.json_schema.schema")
    for stream in (False, True):
        error = ask(http, stream=stream).json()["error"]
        assert (error["param"], error["message"]) == ("text.format.schema", "text.format.schema: $: no")


def test_a_client_that_hangs_up_ends_its_request(made):
    made.client.hold = 2
    body = json.dumps({"input": "Hi", "stream": True, "temperature": 0}).encode()
    asyncio.run(drive(made.app, "/v1/responses", body, lambda sent: len(sent) > 2))
    assert len(made.client.aborts) == 1 and not made.app.state.server.running


def test_in_the_background(made, http):
    made.client.hold = 5
    first = answer(http, background=True)
    assert first["status"] in ("queued", "in_progress") and first["background"]
    path = f"/v1/responses/{first['id']}"
    until(lambda: http.get(path).json()["output"])
    going_on = ask(http, previous_response_id=first["id"])
    assert going_on.status_code == 400 and "not ended" in going_on.json()["error"]["message"]
    ended = http.post(f"{path}/cancel").json()
    assert ended["status"] == "cancelled" and http.get(path).json() == ended and made.client.aborts
    assert ended["output"][0]["status"] == "incomplete"
    assert http.post(f"{path}/cancel").json() == ended, "twice is once"
    made.client.hold = None
    second = answer(http, background=True, max_output_tokens=5)["id"]
    until(lambda: http.get(f"/v1/responses/{second}").json()["status"] == "incomplete")
    assert http.post(f"/v1/responses/{answer(http)['id']}/cancel").status_code == 400, "not in the background"


def test_the_stream_of_one_in_the_background_can_be_had_again(made, http):
    events = stream(http, background=True, max_output_tokens=5)
    assert kinds(events)[:3] == ["created", "queued", "in_progress"] and events[-1]["type"] == "response.incomplete"
    path = f"/v1/responses/{events[0]['response']['id']}"
    until(lambda: http.get(path, params={"stream": "true"}).status_code == 200)
    assert read_events(http.get(path, params={"stream": "true"}).text) == events
    again = http.get(path, params={"stream": "true", "starting_after": 3})
    assert read_events(again.text) == events[4:]
    for number in (len(events) - 1, len(events), 10**6):  # whoever has seen the end, and comes back
        again = http.get(path, params={"stream": "true", "starting_after": number})
        assert (again.status_code, again.text) == (200, "")
        assert again.headers["content-type"].startswith("text/event-stream")
    assert http.get(path, params={"stream": "true", "starting_after": "x"}).status_code == 400
    assert http.get(f"/v1/responses/{answer(http)['id']}", params={"stream": "true"}).status_code == 400


def test_one_in_the_background_does_not_need_its_client(made, monkeypatch):
    made.client.delay = 0.001

    async def main():
        body = json.dumps({"input": "Hi", "stream": True, "temperature": 0, "background": True}).encode()
        sent = await drive(made.app, "/v1/responses", body, lambda sent: len(sent) > 1)
        id = json.loads(sent[1]["body"].split(b"data: ")[1].split(b"\n")[0])["response"]["id"]
        responses = made.app.state.server.responses
        run = responses.background.find("", id)
        await run.task
        return json.loads(responses.store.get("", id).response)

    response = asyncio.run(main())
    assert response["status"] == "completed" and response["output"][0]["content"][0]["text"] == TEXT


def test_only_so_many_run_in_the_background(made, http, monkeypatch):
    monkeypatch.setattr("isthmus.core.server.responses.background.MAX_RUNS", 2)
    made.client.hold = 1
    ids = [answer(http, background=True)["id"] for _ in range(2)]
    assert ask(http, background=True).status_code == 429
    assert all(http.delete(f"/v1/responses/{id}").json()["deleted"] for id in ids)
    assert http.get(f"/v1/responses/{ids[0]}").status_code == 404 and len(made.client.aborts) == 2


def test_what_runs_in_the_background_keeps_only_so_many_bytes_of_requests():
    made = make_app(server={"max_body": "4000"})
    unread = [{"type": "reasoning", "summary": [], "encrypted_content": "x" * 3000}, {"role": "user", "content": "Hi"}]
    with TestClient(made.app) as http:
        made.client.hold = 1
        background, ids = made.app.state.server.responses.background, []
        while (response := ask(http, background=True, input=unread)).status_code == 200:
            ids.append(response.json()["id"])
        assert response.status_code == 429 and "16000" in response.json()["error"]["message"] and len(ids) == 5
        assert 15000 < background.held <= 16000
        assert http.delete(f"/v1/responses/{ids[0]}").json()["deleted"]
        assert answer(http, background=True)["status"] in ("queued", "in_progress"), "there is room again"
        for id in ids[1:]:
            http.delete(f"/v1/responses/{id}")
        assert background.held < 200


def test_events_of_the_background_are_bounded(made, http, monkeypatch):
    monkeypatch.setattr("isthmus.core.server.responses.background.MAX_EVENTS", 4000)
    id = answer(http, background=True, stream=False, max_output_tokens=200)["id"]
    until(lambda: http.get(f"/v1/responses/{id}").json()["status"] == "completed")
    run_events = stream(http, background=True, max_output_tokens=200)
    assert run_events[-1]["type"] in ("response.completed", "error")


def test_each_key_has_its_own_responses():
    made = make_app(server={"api_key": "one,two"})
    with TestClient(made.app) as http:
        mine, other = {"authorization": "Bearer one"}, {"x-api-key": "two"}
        body = {"input": "Hi", "temperature": 0}
        id = http.post("/v1/responses", json=body, headers=mine).json()["id"]
        path = f"/v1/responses/{id}"
        assert http.get(path, headers=mine).status_code == 200
        for response in (http.get(path, headers=other), http.delete(path, headers=other),
                         http.post(f"{path}/cancel", headers=other), http.get(f"{path}/input_items", headers=other)):
            assert response.status_code == 404
        assert http.post("/v1/responses", json=body | {"previous_response_id": id}, headers=other).status_code == 400
        assert http.post("/v1/responses", json=body).status_code == 401
        made.client.hold = 1
        run = http.post("/v1/responses", json=body | {"background": True}, headers=mine).json()["id"]
        assert http.get(f"/v1/responses/{run}", headers=other).status_code == 404
        assert http.post(f"/v1/responses/{run}/cancel", headers=other).status_code == 404


def test_without_a_store(tmp_path):
    with TestClient(make_app(server={"response_store": "off"}).app) as http:
        whole = answer(http)
        assert whole["store"] is False and http.get(f"/v1/responses/{whole['id']}").status_code == 404
        assert ask(http, store=True).json()["error"]["param"] == "store"
        assert ask(http, background=True).json()["error"]["param"] == "background"
        assert ask(http, previous_response_id=whole["id"]).status_code == 400


def test_a_file_outlives_the_server(tmp_path):
    settings = {"response_store": str(tmp_path / "responses.db"), "api_key": "k"}
    keyed = {"authorization": "Bearer k"}
    made = make_app(server=settings)
    with TestClient(made.app, headers=keyed) as http:
        first = answer(http)["id"]
        made.client.hold = 1
        second = answer(http, background=True)["id"]
        until(lambda: made.client.submits[1:])
    with TestClient(make_app(server=settings).app, headers=keyed) as http:
        assert http.get(f"/v1/responses/{first}").json()["status"] == "completed"
        assert http.get(f"/v1/responses/{second}").json()["status"] == "cancelled"
        assert answer(http, previous_response_id=first)["previous_response_id"] == first


def test_tokens_are_counted_without_an_answer(made, http):
    counted = http.post("/v1/responses/input_tokens", json={"input": "Hi", "instructions": "x"}).json()
    assert counted["input_tokens"] == answer(http, instructions="x")["usage"]["input_tokens"]
    assert http.post("/v1/responses/input_tokens", json={}).json()["error"]["param"] == "input"


def test_input_items_are_listed_in_pages(http):
    first = answer(http, input=[{"role": "user", "content": str(i)} for i in range(5)])
    second = answer(http, input="last", previous_response_id=first["id"])
    path = f"/v1/responses/{second['id']}/input_items"

    def texts(**query):
        page = http.get(path, params=query).json()
        return [item["content"][0]["text"] for item in page["data"]], page

    assert texts()[0] == ["last", TEXT, "4", "3", "2", "1", "0"]
    some, page = texts(order="asc", limit=2)
    assert some == ["0", "1"] and page["has_more"] and page["last_id"] == page["data"][-1]["id"]
    assert texts(order="asc", limit=9, after=page["last_id"])[0] == ["2", "3", "4", TEXT, "last"]
    for query in ({"limit": 0}, {"limit": "x"}, {"order": "up"}, {"after": "x"}):
        assert http.get(path, params=query).status_code == 400
