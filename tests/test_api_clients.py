"""Unmodified clients of the Responses, Anthropic and Ollama APIs over a socket, where they are installed."""
from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from .effort import until
from .fake_client import TEXT, make_app
from .live import listening

COST = 10  # seconds

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
THOUGHT = "<think>hm</think>\n\nso be it"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
          "additionalProperties": False}
SCRIPTS = Path(__file__).parent / "api_clients"
NODE_PACKAGES = ("openai", "@anthropic-ai/sdk", "ollama", "ai@6", "@ai-sdk/openai@3", "@ai-sdk/anthropic@3", "zod")


@pytest.fixture(scope="module")
def live():
    made = make_app(server={"api_key": "sekret"}, model={"reasoning_parser": "think", "tool_parser": "hermes"})
    with listening(made.app) as made.url:
        yield made


class Play:
    """What the model says to clients that cannot tell it: by the last thing that it was told."""

    def get(self, prompt: str, default: str) -> str:
        last = prompt.rpartition("user\n")[2]
        said = {"rain": "Rain.", "weather?": "I look." + CALL, "think": THOUGHT, "as JSON": '{"city": "Oslo"}'}
        return next((text for word, text in said.items() if word in last), default)


@pytest.fixture
def says(live):
    """Sets what the model says, for one test."""
    yield lambda text: setattr(live.client, "text", text)
    live.client.text, live.client.hold = TEXT, None


@pytest.fixture
def responses(live):
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=live.url + "/v1", api_key="sekret", max_retries=0) as client:
        yield client.responses


@pytest.fixture
def claude(live):
    anthropic = pytest.importorskip("anthropic", reason="anthropic is not installed")
    with anthropic.Anthropic(base_url=live.url, api_key="sekret", max_retries=0) as client:
        yield client


@pytest.fixture
def ollama(live):
    package = pytest.importorskip("ollama", reason="ollama is not installed")
    yield package.Client(host=live.url, headers={"authorization": "Bearer sekret"})


def test_openai_responses(responses, says):
    value = responses.create(model="tiny", input="Hi", temperature=0, metadata={"a": "b"})
    assert value.output_text == TEXT and value.status == "completed" and value.usage.input_tokens_details.cached_tokens
    assert responses.retrieve(value.id).output_text == TEXT
    assert [item.content[0].text for item in responses.input_items.list(value.id)] == ["Hi"]
    more = responses.create(model="tiny", input="And?", previous_response_id=value.id, temperature=0)
    assert more.previous_response_id == value.id
    assert responses.input_tokens.count(model="tiny", input="Hi").input_tokens == value.usage.input_tokens
    responses.delete(value.id)
    import openai
    with pytest.raises(openai.NotFoundError):
        responses.retrieve(value.id)
    with pytest.raises(openai.BadRequestError) as bad:
        responses.create(model="tiny", input="Hi", tools=[{"type": "web_search"}])
    assert (bad.value.param, bad.value.code) == ("tools[0].type", "unsupported_parameter")


def test_openai_streams_responses(responses, says):
    says(THOUGHT)
    with responses.stream(model="tiny", input="Hi", temperature=0) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert final.output_text == "so be it" and final.output[0].content[0].text == "hm"
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"


def test_openai_parses_and_calls_tools(responses, says):
    from pydantic import BaseModel

    class City(BaseModel):
        city: str

    says('{"city": "Oslo"}')
    assert responses.parse(model="tiny", input="Hi", text_format=City, temperature=0).output_parsed.city == "Oslo"
    says("I look." + CALL)
    tools = [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}]
    with responses.stream(model="tiny", input="Hi", tools=tools, temperature=0) as stream:
        first = stream.until_done().get_final_response()
    call = first.output[1]
    assert (call.name, call.parsed_arguments) == ("weather", {"city": "Oslo"})
    says("Rain.")
    second = responses.create(model="tiny", previous_response_id=first.id, tools=tools, temperature=0, input=[
        {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}])
    assert second.output_text == "Rain."
    third = responses.create(model="tiny", store=False, temperature=0, input=[
        {"role": "user", "content": "Hi"}, *(item.to_dict() for item in first.output),
        {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}])
    assert third.output_text == "Rain."


def test_openai_in_the_background(live, responses, says):
    value = responses.create(model="tiny", input="Hi", background=True, stream=True, temperature=0)
    events = list(value)
    id = events[0].response.id
    until(lambda: responses.retrieve(id).status == "completed")
    again = list(responses.retrieve(id, stream=True, starting_after=5))
    assert [event.sequence_number for event in again] == [event.sequence_number for event in events[6:]]
    live.client.hold = 2
    running = responses.create(model="tiny", input="Hi", background=True)
    assert responses.cancel(running.id).status == "cancelled"


def test_anthropic_messages(claude, says):
    import anthropic
    asked = {"model": "tiny", "max_tokens": 300, "messages": [{"role": "user", "content": "Hi"}]}
    extra = {"extra_body": {"temperature": 0}}
    assert claude.messages.create(**asked, **extra).content[0].text == TEXT
    assert claude.messages.count_tokens(model="tiny", messages=asked["messages"]).input_tokens == 21
    assert [model.id for model in claude.models.list()] == ["tiny"] and claude.models.retrieve("tiny").display_name
    says(THOUGHT)
    with claude.messages.stream(**asked, **extra) as stream:
        assert "".join(stream.text_stream) == "so be it"
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text"] and final.usage.cache_read_input_tokens == 4
    assert final.stop_reason == "end_turn" and final.content[0].thinking == "hm"
    with pytest.raises(anthropic.NotFoundError) as missing:
        claude.messages.create(**asked | {"model": "no"})
    assert missing.value.body["error"]["type"] == "not_found_error" and missing.value.request_id
    with pytest.raises(anthropic.BadRequestError):
        claude.messages.create(**asked, tools=[{"type": "web_search_20250305", "name": "web_search"}])


def test_anthropic_calls_tools(claude, says):
    says("I look." + CALL + CALL)
    tools = [{"name": "weather", "input_schema": SCHEMA}]
    asked = {"model": "tiny", "max_tokens": 300, "tools": tools, "extra_body": {"temperature": 0}}
    begin = [{"role": "user", "content": "Hi"}]
    with claude.messages.stream(messages=begin, **asked) as stream:
        first = stream.get_final_message()
    calls = [block for block in first.content if block.type == "tool_use"]
    assert first.stop_reason == "tool_use" and [call.input for call in calls] == [{"city": "Oslo"}] * 2
    says("Rain.")
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "rain"} for call in calls]
    second = claude.messages.create(messages=[*begin, {"role": "assistant", "content": first.content},
                                              {"role": "user", "content": results}], **asked)
    assert second.content[0].text == "Rain."


def test_ollama_client(ollama, says):
    import ollama as package
    messages, options = [{"role": "user", "content": "Hi"}], {"temperature": 0, "num_predict": 300}
    assert ollama.chat("tiny", messages, options=options).message.content == TEXT
    parts = list(ollama.chat("tiny", messages, options=options, stream=True))
    assert "".join(part.message.content for part in parts) == TEXT and parts[-1].done_reason == "stop"
    first = ollama.generate("tiny", "Hi", options=options)
    assert first.response == TEXT and first.eval_count == len(TEXT) + 1
    assert ollama.generate("tiny", "And?", context=first.context, options=options).response == TEXT
    assert ollama.list().models[0].model == ollama.ps().models[0].model == "tiny:latest"
    assert ollama.show("tiny").modelinfo["model.context_length"] == 512
    says('{"city": "Oslo"}')
    assert json.loads(ollama.chat("tiny", messages, format=SCHEMA, options=options).message.content)
    says(THOUGHT)
    assert ollama.chat("tiny", messages, think=True, options=options).message.thinking == "hm"
    with pytest.raises(package.ResponseError) as missing:
        ollama.chat("no", messages)
    assert missing.value.status_code == 404 and "no" in missing.value.error


def test_ollama_client_calls_tools(ollama, says):
    def weather(city: str) -> str:
        """Of a city."""
        return city

    says("I look." + CALL)
    messages, options = [{"role": "user", "content": "Hi"}], {"temperature": 0}
    answer = ollama.chat("tiny", messages, tools=[weather], options=options)
    call = answer.message.tool_calls[0].function
    assert (call.name, dict(call.arguments)) == ("weather", {"city": "Oslo"})
    says("Rain.")
    result = {"role": "tool", "tool_name": "weather", "content": "rain"}
    second = ollama.chat("tiny", [*messages, answer.message, result], options=options)
    assert second.message.content == "Rain."


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    """A folder with the JavaScript clients."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node or npm is not installed")
    folder = tmp_path_factory.mktemp("node")
    (folder / "package.json").write_text('{"type": "module"}')
    done = subprocess.run(["npm", "install", "--no-audit", "--no-fund", *NODE_PACKAGES], cwd=folder, timeout=600,
                          capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"npm cannot install the clients: {done.stderr[-300:]}")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("script", ["openai", "anthropic", "ollama", "ai"])
def test_javascript(live, says, node, script):
    """Each script ends with 0 when all is as it expects."""
    code = (SCRIPTS / f"{script}.mjs").read_text()
    (node / f"{script}.mjs").write_text(code)
    live.client.texts = Play()
    done = subprocess.run(["node", f"{script}.mjs", live.url], cwd=node, timeout=600, capture_output=True, text=True,
                          env={**os.environ, "AI_SDK_LOG_WARNINGS": "false"})
    assert done.returncode == 0, done.stdout + done.stderr
