"""What clients ask for is enforced: a whole server whose model says anything answers them with what they can parse."""
from __future__ import annotations

import json
from typing import Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

from .scripted import KEY, whole_server

COST = 3  # seconds; some 40 where all clients are installed

ASKED = [{"role": "user", "content": "Where does it rain?"}]


class Rain(BaseModel):
    """Where and how much, as frameworks describe a type: nested, optional, bounded, with words about it.

    Nothing else may be there: a model that says anything would add to it until it is cut.
    """

    model_config = ConfigDict(extra="forbid")
    city: Literal["Oslo", "Bergen"] = Field(description="Where.")
    millimetres: int = Field(ge=0, le=99)
    kinds: list[Literal["rain", "snow"]] = Field(min_length=1, max_length=2)
    certain: bool | None = None


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with whole_server(tmp_path_factory.mktemp("enforced")) as address:
        yield address


@pytest.fixture
def openai(url):
    package = pytest.importorskip("openai", reason="openai is not installed")
    with package.OpenAI(base_url=url + "/v1", api_key=KEY, max_retries=0) as client:
        yield client


@pytest.mark.slow
def test_openai(openai):
    import openai as package
    words = {"model": "tiny", "max_tokens": 3000}
    parsed = openai.chat.completions.parse(messages=ASKED, response_format=Rain, **words)
    assert isinstance(parsed.choices[0].message.parsed, Rain)
    tool = package.pydantic_function_tool(Rain)
    with openai.chat.completions.stream(messages=ASKED, tools=[tool], tool_choice="required", parallel_tool_calls=False,
                                        **words) as stream:
        call = stream.get_final_completion().choices[0].message.tool_calls[0]
    assert isinstance(call.function.parsed_arguments, Rain)
    answer = openai.responses.parse(model="tiny", input="Hi", text_format=Rain, max_output_tokens=3000)
    assert isinstance(answer.output_parsed, Rain)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA", "RESPONSES_TOOLS", "ANTHROPIC_TOOLS"])
def test_instructor(url, openai, mode):
    instructor = pytest.importorskip("instructor", reason="instructor is not installed")
    if mode == "ANTHROPIC_TOOLS":
        anthropic = pytest.importorskip("anthropic", reason="anthropic is not installed")
        plain = anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0)
        client = instructor.from_anthropic(plain, mode=instructor.Mode[mode])
    else:
        client = instructor.from_openai(openai, mode=instructor.Mode[mode])
    limit = "max_output_tokens" if mode == "RESPONSES_TOOLS" else "max_tokens"
    found = client.chat.completions.create(model="tiny", messages=ASKED, response_model=Rain, max_retries=0,
                                           **{limit: 3000})
    assert isinstance(found, Rain)


@pytest.mark.slow
@pytest.mark.parametrize("responses", [False, True])
@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain(url, method, responses):
    package = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    model = package.ChatOpenAI(base_url=url + "/v1", api_key=KEY, model="tiny", max_retries=0, max_tokens=3000,
                               use_responses_api=responses)
    assert isinstance(model.with_structured_output(Rain, method=method).invoke("Hi"), Rain)
    call, = model.bind_tools([Rain], tool_choice="any", parallel_tool_calls=False).invoke("Hi").tool_calls
    assert call["name"] == "Rain" and Rain(**call["args"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["chat", "responses"])
@pytest.mark.parametrize("mode", ["ToolOutput", "NativeOutput"])
def test_pydantic_ai(url, kind, mode):
    package = pytest.importorskip("pydantic_ai", reason="pydantic-ai is not installed")
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider
    provider = OpenAIProvider(base_url=url + "/v1", api_key=KEY)
    model = (OpenAIChatModel if kind == "chat" else OpenAIResponsesModel)("tiny", provider=provider)
    agent = package.Agent(model, output_type=getattr(package, mode)(Rain), model_settings={"max_tokens": 3000})
    assert isinstance(agent.run_sync("Hi").output, Rain)


@pytest.mark.slow
@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "anthropic", "ollama_chat"])
def test_litellm(url, monkeypatch, provider):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    package = pytest.importorskip("litellm", reason="litellm is not installed")
    base = url + ("/v1" if provider in ("openai", "hosted_vllm") else "")
    asked = {"model": f"{provider}/tiny", "api_base": base, "api_key": KEY, "max_retries": 0, "max_tokens": 3000,
             "messages": ASKED}
    answer = package.completion(**asked, response_format=Rain)
    assert Rain.model_validate_json(answer.choices[0].message.content)
    if provider in ("openai", "anthropic"):  # hosted_vllm leaves additionalProperties out, Ollama's API has no choice
        tool = {"type": "function", "function": {"name": "Rain", "parameters": Rain.model_json_schema()}}
        answer = package.completion(**asked, tools=[tool], tool_choice="required", parallel_tool_calls=False)
        assert Rain(**json.loads(answer.choices[0].message.tool_calls[0].function.arguments))
