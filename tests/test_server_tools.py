"""Tools and thinking over HTTP: what is refused, what the engine is held to, what clients read."""
from __future__ import annotations

import json

import pytest
from isthmus.core.messages import unpack_ids
from isthmus.core.server.text_service import TextService
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from starlette.testclient import TestClient

from .fake_client import ByteTokenizer, ChatMarks, make_app
from .vocabularies import byte_level, tokenizer_of

COST = 8  # seconds

HI = [{"role": "user", "content": "Hi"}]
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}
PING = {"type": "function", "function": {"name": "ping"}}
TOOLS = [WEATHER, PING]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Osl\u00f6"}}\n</tool_call>'
TWO = f'Let me see.\n{CALL}\n<tool_call>\n{{"name": "ping", "arguments": {{}}}}\n</tool_call>'
THOUGHT = "<think>\nHm, hm.\n</think>\n\n"
NAMED = {"type": "function", "function": {"name": "ping"}}


def served(text: str, template: str | None = "tools tool_calls <tool_call> </think>", **model):
    ChatMarks.source = template
    try:
        made = make_app(model=model, text=text)
        made.client.info["max_model_len"] = 2048
    finally:
        del ChatMarks.source
    return made


def post(made, **body):
    http = TestClient(made.app, raise_server_exceptions=False)
    return http.post("/v1/chat/completions", json={"messages": HI, "temperature": 0, "max_tokens": 200, **body})


def answer(made, **body) -> dict:
    response = post(made, **body)
    assert response.status_code == 200, response.text
    ChatCompletion.model_validate(response.json(), strict=True)
    return response.json()


def streamed(made, **body) -> list[dict]:
    response = post(made, stream=True, **body)
    assert response.status_code == 200, response.text
    frames = response.text.split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    events = [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]
    for event in events:
        ChatCompletionChunk.model_validate(event)
    return events


def assembled(events: list[dict], index: int = 0) -> tuple[dict, str]:
    """The message that the deltas of a choice make, and its finish."""
    message, finish, calls = {"content": "", "reasoning_content": ""}, [], []
    for choice in [c for event in events for c in event["choices"] if c["index"] == index]:
        delta = choice["delta"]
        assert choice["finish_reason"] is None or delta == {}
        finish += [choice["finish_reason"]] if choice["finish_reason"] else []
        message["content"] += delta.get("content") or ""
        message["reasoning_content"] += delta.get("reasoning_content") or ""
        assert delta.get("reasoning") == delta.get("reasoning_content")
        for part in delta.get("tool_calls", ()):
            if part["index"] == len(calls):
                assert part["id"] and part["type"] == "function" and part["function"]["arguments"] == ""
                calls.append([part["function"]["name"], ""])
            else:
                assert part.keys() == {"index", "function"} and part["function"].keys() == {"arguments"}
                calls[part["index"]][1] += part["function"]["arguments"]
    assert len(finish) == 1
    return message | {"calls": calls}, finish[0]


def plain(choice: dict) -> tuple[dict, str]:
    """A whole answer in the same form."""
    message = choice["message"]
    calls = [[c["function"]["name"], c["function"]["arguments"]] for c in message.get("tool_calls", ())]
    assert message.get("reasoning") == message.get("reasoning_content")
    return {"content": message["content"] or "", "reasoning_content": message.get("reasoning_content") or "",
            "calls": calls}, choice["finish_reason"]


@pytest.mark.parametrize("text,content,reasoning,calls,finish", [
    ("Hello.", "Hello.", "", [], "stop"), (CALL, "", "", [["get_weather", '{"city": "Osl\u00f6"}']], "tool_calls"),
    (TWO, "Let me see.", "", [["get_weather", '{"city": "Osl\u00f6"}'], ["ping", "{}"]], "tool_calls"),
    (THOUGHT + CALL, "", "Hm, hm.", [["get_weather", '{"city": "Osl\u00f6"}']], "tool_calls"),
    (THOUGHT + "Yes. ", "Yes. ", "Hm, hm.", [], "stop"), (CALL[:40], CALL[:40], "", [], "stop")])
def test_whole_and_streamed_answers_are_the_same_message(text, content, reasoning, calls, finish):
    made = served(text)
    choice = answer(made, tools=TOOLS)["choices"][0]
    assert plain(choice) == ({"content": content, "reasoning_content": reasoning, "calls": calls}, finish)
    assert (choice["message"]["content"] is None) == (not content)
    ids = [call["id"] for call in choice["message"].get("tool_calls", ())]
    assert len(set(ids)) == len(ids) and all(ids)
    assert assembled(streamed(made, tools=TOOLS)) == plain(choice)


def test_several_answers_each_have_their_calls():
    made = served(TWO)
    whole = answer(made, tools=TOOLS, n=3)["choices"]
    events = streamed(made, tools=TOOLS, n=3)
    assert [assembled(events, i) for i in range(3)] == [plain(choice) for choice in whole]
    ids = {call["id"] for choice in whole for call in choice["message"]["tool_calls"]}
    assert len(ids) == 6


def test_scores_and_ids_of_tokens_stay_in_line():
    made = served(THOUGHT + TWO)
    whole = answer(made, tools=TOOLS, logprobs=True, return_token_ids=True)["choices"][0]
    events = streamed(made, tools=TOOLS, logprobs=True, return_token_ids=True)
    choices = [choice for event in events for choice in event["choices"]]
    assert [id for choice in choices for id in choice.get("token_ids", ())] == whole["token_ids"]
    assert [e for c in choices if "logprobs" in c for e in c["logprobs"]["content"]] == whole["logprobs"]["content"]
    assert len(whole["logprobs"]["content"]) == len(whole["token_ids"]) == len((THOUGHT + TWO).encode()) + 1
    assert assembled(events) == plain(whole)


def test_tokens_of_the_thinking_are_told():
    made = served(THOUGHT + "Yes")
    usage = answer(made)["usage"]
    reasoning = usage["completion_tokens_details"]["reasoning_tokens"]
    assert len("<think>\nHm, hm.\n</think>") <= reasoning <= len(THOUGHT) < usage["completion_tokens"]
    assert streamed(made, stream_options={"include_usage": True})[-1]["usage"] == usage
    assert "completion_tokens_details" not in answer(served("Yes"))["usage"]


def test_thinking_can_be_left_where_it_is_or_left_out():
    made = served(THOUGHT + "Yes")
    left = answer(made, separate_reasoning=False)["choices"][0]["message"]
    assert left["content"] == THOUGHT + "Yes" and "reasoning" not in left
    out = answer(made, include_reasoning=False)["choices"][0]["message"]
    assert out["content"] == "Yes" and "reasoning" not in out
    assert assembled(streamed(made, include_reasoning=False))[0]["reasoning_content"] == ""


def test_a_prompt_may_open_the_thinking():
    made = served("Hm.\n</think>\nYes")
    messages = [*HI, {"role": "assistant", "content": "<think>\n"}]
    message = answer(made, messages=messages, continue_final_message=True)["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes")
    cut = answer(made, messages=messages, continue_final_message=True, max_tokens=3)["choices"][0]
    assert cut["message"]["content"] is None and cut["message"]["reasoning"] == "Hm."
    assert cut["finish_reason"] == "length"
    done = [*HI, {"role": "assistant", "content": "<think>a</think>"}]
    message = answer(made, messages=done, continue_final_message=True)["choices"][0]["message"]
    assert message["content"] == made.client.text


def params(made, **body):
    answer(made, **body)
    return made.client.submits[-1].params


def test_what_must_be_called_is_held_to_a_layout():
    made = served(CALL)
    assert params(made, tools=TOOLS).grammar is None
    assert params(made, tools=TOOLS, tool_choice="none").grammar is None
    required = params(made, tools=TOOLS, tool_choice="required").grammar
    assert required.kind == "layout" and required.field == "tools" and "get_weather" in required.source
    assert params(made, tools=TOOLS, tool_choice="any").grammar == required
    named = params(made, tools=TOOLS, tool_choice=NAMED).grammar
    assert "get_weather" not in named.source and '"most": 1' in named.source
    assert params(made, tools=TOOLS, tool_choice={"type": "function", "name": "ping"}).grammar == named
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}
    assert json.loads(params(made, tools=TOOLS, tool_choice=allowed).grammar.source)["free"] == "<tool_call>"
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    assert '"free"' in params(made, tools=[strict]).grammar.source
    single = params(made, tools=TOOLS, tool_choice="required", parallel_tool_calls=False).grammar
    assert '"most": 1' in single.source and '"most": 8' in required.source


def test_only_one_call_where_no_more_are_wanted():
    made = served(TWO)
    choice = answer(made, tools=TOOLS, parallel_tool_calls=False)["choices"][0]
    assert plain(choice)[0]["calls"] == [["get_weather", '{"city": "Osl\u00f6"}']]
    assert assembled(streamed(made, tools=TOOLS, parallel_tool_calls=False)) == plain(choice)


@pytest.mark.parametrize("text", ["<tool_", '<tool_call>\n{"name": "get_weather",', "<tool_call>"])
def test_what_the_limit_left_of_a_forced_call_is_no_content(text):
    made = served(text)
    choice = answer(made, tools=TOOLS, tool_choice="required")["choices"][0]
    assert not plain(choice)[0]["content"]
    assert assembled(streamed(made, tools=TOOLS, tool_choice="required")) == plain(choice)
    assert plain(answer(made, tools=TOOLS)["choices"][0])[0]["content"] == text, "where no call is forced it is"


def test_none_hides_the_tools_and_reads_no_calls():
    made = served(CALL)
    choice = answer(made, tools=TOOLS, tool_choice="none")["choices"][0]
    assert choice["message"]["content"] == CALL and "tool_calls" not in choice["message"]
    assert plain(answer(made)["choices"][0])[0]["content"] == CALL, "no tools at all"


def test_json_beside_tools_is_either_and_other_structures_are_refused():
    made = served(CALL)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    grammar = params(made, tools=TOOLS, response_format=form).grammar
    assert grammar.kind == "layout" and json.loads(grammar.source)["any"][1]["json"] == schema
    assert "any" not in json.loads(params(made, tools=TOOLS, tool_choice="required",
        response_format=form).grammar.source)
    tag = {"type": "structural_tag", "structures": [], "triggers": []}
    for choice in ("auto", "required", NAMED):
        for asked, field in (({"guided_regex": "a+"}, "guided_regex"), ({"guided_choice": ["a"]}, "guided_choice"),
                             ({"guided_grammar": 'root ::= "a"'}, "guided_grammar"),
                             ({"structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
                             ({"response_format": tag}, "response_format"), ({"guided_json": schema}, "guided_json")):
            if choice == "auto" and field == "guided_json":
                continue
            response = post(made, tools=TOOLS, tool_choice=choice, **asked)
            error = response.json()["error"]
            assert response.status_code == 400 and error["param"] == field and "cannot be combined" in error["message"]


def test_a_grammar_waits_for_the_end_of_the_thinking():
    made = served("{}")
    thinking = params(made, response_format={"type": "json_object"}).thinking
    assert (thinking.opened, thinking.ends, thinking.budget) == (False, ("</think>",), -1)
    begin, stop = (bytes(unpack_ids(ids).tolist()) for ids in (thinking.begin, thinking.stop))
    assert begin == b"<think>" and b"</think>" in stop
    opened = params(made, messages=[*HI, {"role": "assistant", "content": "<think>"}], continue_final_message=True,
                    guided_regex="a+").thinking
    assert opened.opened
    assert params(served("{}", template="x"), guided_regex="a+").thinking is None
    assert params(made).thinking is None and params(made).grammar is None


def test_a_budget_of_thinking():
    made = served("Yes")
    found = params(made, thinking_token_budget=7)
    assert found.thinking.budget == 7 and found.grammar.kind == "any"
    assert params(made, thinking_token_budget=0, response_format={"type": "json_object"}).thinking.budget == 0
    assert params(served("Yes", template="x"),
        thinking_token_budget=7).thinking is None, "no thinking is within any budget"
    assert post(made, thinking_token_budget=-1).json()["error"]["param"] == "thinking_token_budget"


WRONG = [
    ({"tools": {"a": 1}}, "tools"), ({"tools": ["f"]}, "tools[0]"), ({"tools": [{"type": "retrieval"}]},
    "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"), ({"tools": [{"type": "function", "function": {}}]},
                                                               "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "x" * 129}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f", "description": 1}}]}, "tools[0].function.description"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": [1]}}]}, "tools[0].function.parameters"),
    ({"tools": [{"type": "function", "function": {"name": "f", "strict": "yes"}}]}, "tools[0].function.strict"),
    ({"tools": [PING, WEATHER, PING]}, "tools[2].function.name"), ({"tools": [
        {"type": "function", "function": {"name": f"f{i}"}} for i in range(513)]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"), ({"tools": TOOLS, "tool_choice": "ping"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": 5}, "tool_choice"), ({"tools": TOOLS, "tool_choice": {"type": "custom"}},
    "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "no"}}}, "tool_choice.function.name"),
    ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function.name"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "x", "tools": [NAMED]}}},
     "tool_choice.allowed_tools.mode"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": []}}},
     "tool_choice.allowed_tools.tools"),
    ({"functions": [{"name": "f"}]}, "functions"), ({"function_call": "auto"}, "function_call"),
    ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls")]


@pytest.mark.parametrize("body,param", WRONG, ids=lambda v: str(v)[:60])
def test_what_is_wrong_is_named(body, param):
    made = served("Yes")
    response = post(made, **body)
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == param and len(error["message"]) < 400
    assert not made.client.submits


def test_odd_but_legal_tools():
    made = served("Yes")
    for tools in ([], [PING], [{"type": "function", "function": {"name": "f", "parameters": None,
    "description": None}}],
                  [{"type": "function", "function": {"name": "mcp:a/b.c-d_e", "parameters": {}, "strict": None}}],
                  [{"function": {"name": "f"}}]):
        answer(made, tools=tools)
    answer(made, tools=None, tool_choice=None, parallel_tool_calls=None)
    deep = '{"type": "object", "properties": {"a": ' * 30 + "{}" + "}}" * 30
    answer(made, tools=[{"type": "function", "function": {"name": "f", "parameters": json.loads(deep)}}])


def rendered(made) -> list[dict]:
    return made.template.calls[-1][0]


def test_models_without_tools_in_their_template_read_of_them_in_the_system_message():
    made = served(CALL, template="no such thing </think>")
    message = answer(made, messages=[{"role": "system", "content": "Be kind."}, *HI],
        tools=TOOLS)["choices"][0]["message"]
    assert message["tool_calls"][0]["function"]["name"] == "get_weather"
    system, user = rendered(made)
    assert system["content"].startswith("Be kind.\n\n") and '"get_weather"' in system["content"] and user == HI[0]
    assert '<tool_call>\n{"name": ' in system["content"]
    answer(made, tools=TOOLS)
    assert [m["role"] for m in rendered(made)] == ["system", "user"]
    call = {"id": "c", "type": "function", "function": {"name": "ping", "arguments": "{}"}}
    answer(made, messages=[*HI, {"role": "assistant", "content": "Ok.", "tool_calls": [call, call]},
                           {"role": "tool", "tool_call_id": "c", "content": "1"},
                           {"role": "tool", "tool_call_id": "c", "content": "2"}, *HI])
    one = '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'
    assert rendered(made)[1:] == [
        {"role": "assistant", "content": f"Ok.\n{one}\n{one}"},
        {"role": "user", "content": "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>\nHi"}]


def test_earlier_calls_are_in_the_form_that_templates_take():
    calls = [{"id": id, "type": "function", "function": {"name": "ping", "arguments": "{}"}} for id in ("toolu_1",
        "c2")]
    turns = [*HI, {"role": "assistant", "content": "Ok.", "tool_calls": calls},
             {"role": "tool", "tool_call_id": "c2", "content": "two"},
             {"role": "tool", "tool_call_id": "toolu_1", "content": "one"}, *HI]
    made = served("Yes", template="tools tool_calls", tool_parser="llama3-json")
    answer(made, messages=turns)
    assert rendered(made)[1:5] == [{**turns[1], "tool_calls": calls[:1]}, turns[3],
                                   {**turns[1], "content": "", "tool_calls": calls[1:]}, turns[2]]
    made = served("Yes", template="tools tool_calls", tool_parser="mistral")
    answer(made, messages=turns)
    ids = [call["id"] for call in rendered(made)[1]["tool_calls"]]
    assert [m["tool_call_id"] for m in rendered(made)[2:4]] == ids[::-1] and {len(id) for id in ids} == {9}
    made = served("Yes")
    answer(made, messages=turns)
    assert rendered(made) == turns


def test_a_model_may_have_a_template_of_its_own_for_tools():
    metadata = {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "tools"}
    tokenizer = tokenizer_of(byte_level() | metadata)
    assert (tokenizer.chat_template, tokenizer.tool_template) == ("plain", "tools")
    plain_one, tool_one = ChatMarks(), ChatMarks()
    text = TextService(ByteTokenizer(), plain_one, tool_one)
    text.encode_chat(HI)
    text.encode_chat(HI, tools=TOOLS)
    text.encode_chat([*HI, {"role": "tool", "content": "1"}])
    assert (len(plain_one.calls), len(tool_one.calls)) == (1, 2)


def test_words_for_thinking_reach_the_templates_that_know_them():
    made = served("Yes", template="{{ enable_thinking }} reasoning_effort </think>")
    for body, found in (({"reasoning_effort": "none"}, {"enable_thinking": False, "reasoning_effort": "none"}),
                        ({"enable_thinking": False}, {"enable_thinking": False}),
                        ({"reasoning_effort": "high"}, {"enable_thinking": True, "reasoning_effort": "high"}),
                        ({"chat_template_kwargs": {"enable_thinking": True}, "enable_thinking": False},
                         {"enable_thinking": True}), ({}, {})):
        answer(made, **body)
        assert made.template.calls[-1][1] == found
    made = served("Yes", template="{% if not thinking is defined %} </think>")
    answer(made, enable_thinking=True)
    assert made.template.calls[-1][1] == {"thinking": True}


def test_parsers_can_be_set():
    made = served('{"name": "ping", "parameters": {}}', tool_parser="llama3-json", reasoning_parser="none")
    assert plain(answer(made, tools=TOOLS)["choices"][0])[0]["calls"] == [["ping", "{}"]]
    off = served(THOUGHT + CALL, tool_parser="none", reasoning_parser="none")
    assert answer(off, tools=TOOLS)["choices"][0]["message"]["content"] == THOUGHT + CALL
    assert params(off, tools=TOOLS, guided_regex="a+").grammar.kind == "regex"
    assert params(off, tools=TOOLS, tool_choice="required").grammar.kind == "layout"


def test_calls_under_a_layout_stream_their_arguments_as_they_come():
    made = served(CALL)
    events = streamed(made, tools=TOOLS, tool_choice="required")
    parts = [part for e in events for c in e["choices"] for part in c["delta"].get("tool_calls", ())]
    assert len(parts) > 10 and assembled(events)[1] == "tool_calls"
    cut = streamed(made, tools=TOOLS, tool_choice="required", max_tokens=60)
    message, finish = assembled(cut)
    assert finish == "length" and message["calls"][0][0] == "get_weather" and not message["content"]
    whole = answer(made, tools=TOOLS, tool_choice="required", max_tokens=60)["choices"][0]
    assert plain(whole) == (message, finish)
