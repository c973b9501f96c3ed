"""Ollama's calls: chat and generate, whole and as lines, options, what becomes of a conversation, models, refusals."""
from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
from isthmus.core.errors import Overloaded, RequestError
from starlette.testclient import TestClient

from .fake_client import END, START, TEXT, drive, fixtures, make_app

COST = 3  # seconds

HI = [{"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
COUNTS = {"total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration", "eval_count", "eval_duration"}


made, http = fixtures(model={"reasoning_parser": "think", "tool_parser": "hermes"})


def ask(http, path="/api/chat", **body):
    body = {"model": "tiny", "options": {"temperature": 0}, **({"messages": HI} if path == "/api/chat" else {}), **body}
    return http.post(path, json=body)


def whole(http, path="/api/chat", **body) -> dict:
    response = ask(http, path, stream=False, **body)
    assert response.status_code == 200, response.text
    return response.json()


def lines(http, path="/api/chat", **body) -> list[dict]:
    response = ask(http, path, **body)
    assert response.status_code == 200 and response.headers["content-type"] == "application/x-ndjson"
    found = [json.loads(line) for line in response.text.splitlines()]
    assert [line["done"] for line in found] == [False] * (len(found) - 1) + [True]
    return found


def plain(line: dict) -> dict:
    """An answer without times and ids."""
    message = dict(line.get("message", {}))
    if "tool_calls" in message:
        message["tool_calls"] = [call["function"] for call in message["tool_calls"]]
    return {key: value for key, value in line.items() if not key.endswith(("duration", "_at"))} | {"message": message}


TEXTS = {"plain": TEXT, "thinks": "<think>hm</think>\n\nso be it", "calls": "<think>a</think>I look." + CALL + CALL,
         "empty": "", "long": "x" * 600, "cut call": CALL.replace("Oslo", "x" * 600)}


@pytest.mark.parametrize("text", TEXTS)
def test_lines_come_to_the_same_answer(made, http, text):
    made.client.text = TEXTS[text]
    answer, stream = whole(http, tools=TOOLS), lines(http, tools=TOOLS)
    message = {"role": "assistant"}
    for part in (line["message"] for line in stream):
        for key in part.keys() - {"role"}:
            message[key] = message.get(key, type(part[key])()) + part[key]
    assert plain(stream[-1] | {"message": message}) == plain(answer)
    assert COUNTS < stream[-1].keys() and answer["total_duration"] >= answer["eval_duration"] >= 0
    assert answer["done_reason"] == ("length" if text in ("long", "cut call") else "stop")
    if text == "calls":
        call = answer["message"]["tool_calls"][1]["function"]
        assert call == {"index": 1, "name": "weather", "arguments": {"city": "Oslo"}}
        assert answer["message"]["thinking"] == "a" and answer["message"]["content"] == "I look."


def test_generate(made, http):
    answer, stream = whole(http, "/api/generate", prompt="Hi", system="Be."), lines(http, "/api/generate", prompt="Hi",
                                                                                     system="Be.")
    assert "".join(line["response"] for line in stream) == answer["response"] == TEXT
    assert stream[-1]["context"] == answer["context"] and stream[-1]["response"] == ""
    assert [(m["role"], m["content"]) for m in made.template.calls[-1][0]] == [("system", "Be."), ("user", "Hi")]
    went_on = whole(http, "/api/generate", prompt="And?", context=answer["context"])
    prompt = np.frombuffer(made.client.submits[-1].prompt, "<i4").tolist()
    assert prompt[:len(answer["context"])] == answer["context"] and prompt[len(answer["context"])] == START
    assert went_on["prompt_eval_count"] == len(prompt) and prompt[len(answer["context"]) - 1] == END


def test_a_raw_prompt_is_all_that_the_model_sees(made, http):
    made.client.text = "<think>hm</think>x"
    answer = whole(http, "/api/generate", prompt="Hi", raw=True)
    assert bytes(np.frombuffer(made.client.submits[-1].prompt, "<i4").tolist()) == b"Hi"
    assert answer["response"] == made.client.text and "context" not in answer and "thinking" not in answer


def test_options_reach_the_engine(made, http):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    whole(http, format=schema, keep_alive="5m", options={
        "num_predict": 7, "top_k": 5.0, "top_p": 0.5, "min_p": 0.1, "seed": 3, "stop": "x", "repeat_penalty": 1.25,
        "presence_penalty": 0.5, "temperature": 0.25, "num_ctx": 10**6, "num_gpu": 1, "mirostat": 0, "typical_p": 1.0})
    params = made.client.submits[-1].params
    assert (params.max_tokens, params.top_k, params.top_p, params.min_p, params.seed, params.stop) == (
        7, 5, 0.5, 0.1, 3, ("x",))
    assert (params.repetition_penalty, params.presence_penalty, params.temperature) == (1.25, 0.5, 0.25)
    assert json.loads(params.grammar.source) == schema
    whole(http, format="json", options={"num_predict": -1, "repeat_penalty": 1.5, "repeat_last_n": 0})
    params = made.client.submits[-1].params
    assert (params.grammar.kind, params.repetition_penalty) == ("json_object", 1.0) and params.max_tokens > 400
    whole(http, options={"num_predict": 10**6}, messages=[*HI])
    assert made.client.submits[-1].params.max_tokens == params.max_tokens, "as far as there is room"


def test_logprobs(http):
    answer = whole(http, logprobs=True, top_logprobs=2, options={"num_predict": 3})
    assert [each["token"] for each in answer["logprobs"]] and len(answer["logprobs"][0]["top_logprobs"]) == 2
    stream = lines(http, logprobs=True, options={"num_predict": 3})
    assert sum(len(line.get("logprobs", ())) for line in stream) == 3


def test_results_of_tools_find_their_calls(made, http):
    def called(*names):
        return {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [
            {"function": {"name": name, "arguments": {"a": 1}}} for name in names]}

    whole(http, tools=TOOLS, messages=[
        *HI, called("f", "g"), {"role": "tool", "tool_name": "g", "content": "of g"},
        {"role": "tool", "content": "of f"}, called("f"), {"role": "tool", "content": "of the second f"}])
    messages = made.template.calls[-1][0][-6:]
    ids = [call["id"] for message in messages for call in message.get("tool_calls", ())]
    assert len(set(ids)) == 3 and messages[1]["reasoning_content"] == "hm"
    assert [m["tool_call_id"] for m in messages if m["role"] == "tool"] == [ids[1], ids[0], ids[2]]


def test_nothing_said_is_the_wish_to_load(http):
    assert whole(http, messages=[])["done_reason"] == "load"
    assert lines(http, "/api/generate")[0]["response"] == ""


def test_old_turns_are_dropped_if_wanted(made, http):
    turns = [{"role": role, "content": f"{i} " + "x" * 40} for i in range(6) for role in ("user", "assistant")]
    body = {"messages": [{"role": "system", "content": "Keep me."}, *turns, {"role": "user", "content": "last"}]}
    assert "maximum context length" in ask(http, **body).json()["error"]
    assert 300 < whole(http, truncate=True, **body)["prompt_eval_count"] < 512


BAD = [
    ("/api/chat", {"model": None}, "model is required"), ("/api/chat", {"messages": ["x"]}, "messages[0].role"),
    ("/api/chat", {"messages": [{"role": "user", "content": 5}]}, "messages[0].content must be a string"),
    ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["aaaa"]}]}, "messages[0].images is not"),
    ("/api/chat", {"messages": [*HI, {"role": "assistant", "tool_calls": [
        {"function": {"name": "f", "arguments": "{}"}}]}]},
     "messages[1].tool_calls[0].function.arguments must be an object"),
    ("/api/chat", {"options": {"mirostat": 2}}, "options.mirostat is not supported"),
    ("/api/chat", {"options": {"whatever": 2}}, "options.whatever is not supported"),
    ("/api/chat", {"options": {"temperature": 9}}, "options.temperature must be"),
    ("/api/chat", {"options": {"top_k": 1.5}}, "options.top_k must be"), ("/api/chat", {"format": 5}, "format must be"),
    ("/api/chat", {"tools": [{"type": "x"}]}, "tools[0].type"), ("/api/chat", {"stream": "yes"}, "stream must be"),
    ("/api/generate", {"prompt": "x", "suffix": "y"}, "suffix is not supported"),
    ("/api/generate", {"prompt": "x", "template": "{{ .Prompt }}"}, "template is refused"),
    ("/api/generate", {"prompt": "x", "images": ["aaaa"]}, "images is not supported"),
    ("/api/generate", {"prompt": "x", "raw": True, "system": "y"}, "raw is true"),
    ("/api/generate", {"prompt": "x", "context": [1, 10**6]}, "context holds token id"),
    ("/api/generate", {"prompt": "x" * 600, "raw": True}, "maximum context length is 512"),
    ("/api/show", {"model": None}, "model is required")]


@pytest.mark.parametrize("path,body,words", BAD, ids=[words for _, _, words in BAD])
def test_what_is_wrong_is_named(http, path, body, words):
    response = ask(http, path, **body)
    assert response.status_code == 400 and words in response.json()["error"], response.text
    assert response.json().keys() == {"error"}


def test_an_error_of_the_engine_names_the_field_that_was_sent(made, http):
    made.client.refuse = RequestError("response_format.json_schema.schema: $: no", code="invalid_grammar",
                                      param="response_format.json_schema.schema")
    assert ask(http, stream=False).json() == ask(http).json() == {"error": "format: $: no"}


def test_statuses():
    made = make_app(server={"api_key": "k"})
    with TestClient(made.app) as http:
        body, keyed = {"model": "tiny", "messages": HI}, {"authorization": "Bearer k"}
        assert http.post("/api/chat", json=body).status_code == 401
        assert "API key" in http.get("/api/tags").json()["error"]
        for path in ("/api/chat", "/api/generate", "/api/show"):
            missing = http.post(path, json=body | {"model": "no:latest"}, headers=keyed)
            assert missing.status_code == 404 and "'no'" in missing.json()["error"]
        assert http.post("/api/pull", json=body, headers=keyed).status_code == 404
        made.client.refuse = Overloaded("2048 requests wait")
        assert http.post("/api/chat", json=body, headers=keyed).status_code == 429


def test_an_error_in_a_stream_is_its_last_line(made, http):
    made.client.die_after = 3
    response = ask(http)
    assert response.status_code == 200 and json.loads(response.text.splitlines()[-1]).keys() == {"error"}


def test_a_client_that_hangs_up_ends_its_request_and_no_ping_disturbs_lines():
    made = make_app(server={"sse_ping": 0.01})
    made.client.hold = 2

    async def main():
        body = json.dumps({"model": "tiny", "messages": HI}).encode()
        asyncio.get_running_loop().call_later(0.1, lambda: gone.append(1))
        return await drive(made.app, "/api/chat", body, lambda sent: len(sent) > 2)

    gone: list[int] = []
    sent = asyncio.run(main())
    assert all(json.loads(line) for line in b"".join(m.get("body", b"") for m in sent).splitlines())
    assert len(made.client.aborts) == 1


def test_models(http):
    (entry,), (loaded,) = (http.get(f"/api/{path}").json()["models"] for path in ("tags", "ps"))
    assert entry["name"] == entry["model"] == loaded["name"] == "tiny:latest" and entry["digest"] == loaded["digest"]
    shown = http.post("/api/show", json={"name": "tiny:latest"}).json()
    assert shown["capabilities"] == ["completion", "tools", "thinking"] and shown["details"] == entry["details"]
    architecture = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{architecture}.context_length"] == 512
    assert http.get("/api/version").json()["version"]
    assert entry["details"]["parameter_size"] == entry["details"]["family"] == "", "nothing is known of this one"


@pytest.mark.parametrize("rank, on_device", [(-1, False), (0, False), (10, False), (20, True)])
def test_what_is_known_of_a_model_is_told(made, http, rank, on_device):
    made.client.info |= {"model_type": "llama", "parameters": 134_515_008, "format": "q4_1", "weight_bytes": 9,
                         "kv_bytes": 1, "platform_rank": rank}
    loaded, = http.get("/api/ps").json()["models"]
    assert loaded["details"] == {"parent_model": "", "format": "safetensors", "family": "llama", "families": ["llama"],
                                 "parameter_size": "134.5M", "quantization_level": "Q4_1"}
    assert (loaded["size"], loaded["size_vram"]) == (10, 10 * on_device)


@pytest.mark.parametrize("keep_alive, reason", [
    (0, "unload"), (0.0, "unload"), ("0", "unload"), ("0s", "unload"), ("5m", "load"), (None, "load"), (-1, "load"),
    (False, "load"), ("10m", "load"), ([], "load")])
def test_a_request_that_says_nothing_loads_or_unloads(http, keep_alive, reason):
    for path, said in (("chat", {"messages": []}), ("generate", {"prompt": ""})):
        answer = http.post(f"/api/{path}", json={"model": "tiny", "keep_alive": keep_alive, "stream": False, **said})
        assert answer.status_code == 200 and answer.json()["done_reason"] == reason
