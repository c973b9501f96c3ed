"""Unmodified frameworks over a socket, where they are installed: litellm, LangChain, Pydantic AI, instructor."""
from __future__ import annotations

import json

import pytest

from .scripted import CALL, CITY, KEY, SCHEMA, THOUGHT, TOOL, talking

COST = 4  # seconds; some 30 where all of them are installed

ASKED = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def live():
    with talking() as made:
        yield made


@pytest.fixture
def litellm(monkeypatch):
    for name, value in {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_TELEMETRY": "False"}.items():
        monkeypatch.setenv(name, value)
    package = pytest.importorskip("litellm", reason="litellm is not installed")
    monkeypatch.setattr(package, "num_retries", 0)
    return package


def to_litellm(live, provider: str) -> dict:
    base = live.url + ("/v1" if provider in ("openai", "hosted_vllm") else "")
    return {"model": f"{provider}/tiny", "api_base": base, "api_key": KEY, "max_retries": 0}


PROVIDERS = ["openai", "hosted_vllm", "anthropic", "ollama_chat"]


@pytest.mark.parametrize("provider", PROVIDERS)
def test_litellm_completes_and_streams(live, litellm, provider):
    live.says(THOUGHT, THOUGHT)
    asked = to_litellm(live, provider) | {"messages": ASKED, "max_tokens": 100}
    whole = litellm.completion(**asked)
    assert whole.choices[0].message.content == "so be it" and whole.choices[0].finish_reason == "stop"
    assert whole.usage.completion_tokens == len(THOUGHT) + 1
    assert whole.choices[0].message.reasoning_content == "hm"
    chunks = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
    built = litellm.stream_chunk_builder(chunks, messages=ASKED)
    assert built.choices[0].message.content == "so be it" and built.choices[0].message.reasoning_content == "hm"
    assert built.usage.completion_tokens == whole.usage.completion_tokens


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("stream", [False, True])
def test_litellm_calls_tools(live, litellm, provider, stream):
    asked = to_litellm(live, provider) | {"tools": [TOOL], "max_tokens": 300}
    live.says(CALL, "Rain.")
    answer = litellm.completion(**asked, messages=ASKED, stream=stream, tool_choice="required")
    if stream:
        answer = litellm.stream_chunk_builder(list(answer), messages=ASKED)
    message = answer.choices[0].message
    call = message.tool_calls[0]
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Oslo"})
    assert answer.choices[0].finish_reason == "tool_calls"
    told = [*ASKED, message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    assert litellm.completion(**asked, messages=told).choices[0].message.content == "Rain."
    assert "rain" in live.script.prompts[-1]


@pytest.mark.parametrize("provider", PROVIDERS)
def test_litellm_asks_for_a_schema(live, litellm, provider):
    from pydantic import BaseModel

    class City(BaseModel):
        city: str

    live.says(CITY)
    asked = to_litellm(live, provider) | {"messages": ASKED, "max_tokens": 100, "response_format": City}
    before = len(live.client.submits)
    assert json.loads(litellm.completion(**asked).choices[0].message.content) == {"city": "Oslo"}
    grammar = live.client.submits[before].params.grammar
    assert grammar is not None


def test_litellm_has_responses_texts_and_errors(live, litellm):
    asked = to_litellm(live, "openai")
    live.says("Fine.", "Fine.", CALL, "Fine.")
    assert litellm.responses(**asked, input="Hi").output[0].content[0].text == "Fine."
    kinds = [str(event.type) for event in litellm.responses(**asked, input="Hi", stream=True)]
    assert kinds[-1].endswith("response.completed") or "COMPLETED" in kinds[-1]
    called = litellm.responses(**asked, input="Hi", tools=[{"type": "function", "name": "weather",
                                                             "parameters": SCHEMA}])
    assert json.loads(called.output[0].arguments) == {"city": "Oslo"}
    text = litellm.text_completion(**asked | {"model": "text-completion-openai/tiny"}, prompt="Hi", max_tokens=20)
    assert text.choices[0].text == "Fine."
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**asked | {"model": "openai/no"}, messages=ASKED)
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**asked, messages=ASKED, temperature=9)
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(**asked | {"api_key": "no"}, messages=ASKED)


@pytest.fixture
def langchain(live):
    package = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")

    def made(**words):
        return package.ChatOpenAI(base_url=live.url + "/v1", api_key=KEY, model="tiny", max_retries=0, **words)
    return made


@pytest.mark.parametrize("responses", [False, True])
def test_langchain_invokes_and_streams(live, langchain, responses):
    model = langchain(use_responses_api=responses, stream_usage=True)
    live.says("so be it", "so be it")
    answer = model.invoke("Hi")
    assert answer.text == "so be it" and answer.usage_metadata["output_tokens"] == 9
    parts = list(model.stream("Hi"))
    whole = parts[0]
    for part in parts[1:]:
        whole += part
    assert whole.text == "so be it" and whole.usage_metadata["output_tokens"] == 9 and len(parts) > 5


@pytest.mark.parametrize("responses", [False, True])
@pytest.mark.parametrize("choice", [None, "any", "weather"])
def test_langchain_binds_tools(live, langchain, responses, choice):
    from langchain_core.messages import HumanMessage, ToolMessage
    model = langchain(use_responses_api=responses).bind_tools([TOOL], tool_choice=choice)
    live.says(CALL, CALL, "Rain.")
    first = model.invoke("Hi")
    parts = list(model.stream("Hi"))
    whole = parts[0]
    for part in parts[1:]:
        whole += part
    for call in (first.tool_calls[0], whole.tool_calls[0]):
        assert (call["name"], call["args"]) == ("weather", {"city": "Oslo"})
    told = [HumanMessage("Hi"), first, ToolMessage("rain", tool_call_id=first.tool_calls[0]["id"])]
    assert langchain(use_responses_api=responses).bind_tools([TOOL]).invoke(told).text == "Rain."


@pytest.mark.parametrize("responses", [False, True])
@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_langchain_has_structured_output(live, langchain, method, responses):
    from pydantic import BaseModel

    class weather(BaseModel):
        """Of a city."""

        city: str

    live.says(*[CALL if method == "function_calling" else CITY] * 3)
    model = langchain(use_responses_api=responses).with_structured_output(weather, method=method)
    assert model.invoke("Hi in JSON") == weather(city="Oslo")
    assert list(model.stream("Hi in JSON"))[-1] == weather(city="Oslo")
    raw = langchain(use_responses_api=responses).with_structured_output(weather, method=method, include_raw=True)
    assert raw.invoke("Hi in JSON")["parsing_error"] is None


@pytest.fixture
def pydantic_ai(monkeypatch):
    monkeypatch.setenv("PYDANTIC_AI_DISABLE_TELEMETRY", "1")
    return pytest.importorskip("pydantic_ai", reason="pydantic-ai is not installed")


def pydantic_model(live, kind: str):
    if kind == "anthropic":
        from pydantic_ai.models.anthropic import AnthropicModel
        from pydantic_ai.profiles.anthropic import AnthropicModelProfile
        from pydantic_ai.providers.anthropic import AnthropicProvider
        able = AnthropicModelProfile(supports_json_schema_output=True)  # which it believes of Anthropic's names only
        return AnthropicModel("tiny", provider=AnthropicProvider(base_url=live.url, api_key=KEY), profile=able)
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider
    provider = OpenAIProvider(base_url=live.url + "/v1", api_key=KEY)
    return (OpenAIChatModel if kind == "chat" else OpenAIResponsesModel)("tiny", provider=provider)


KINDS = ["chat", "responses", "anthropic"]


@pytest.mark.parametrize("kind", KINDS)
def test_pydantic_ai_agent_with_a_tool_and_a_type(live, pydantic_ai, kind):
    from pydantic import BaseModel

    class Rain(BaseModel):
        millimetres: int

    agent = pydantic_ai.Agent(pydantic_model(live, kind), output_type=Rain, system_prompt="Be brief.")
    asked = []

    @agent.tool_plain
    def weather(city: str) -> str:
        """Of a city."""
        asked.append(city)
        return "rain"

    done = '<tool_call>\n{"name": "final_result", "arguments": {"millimetres": 3}}\n</tool_call>'
    live.says("<think>hm</think>" + CALL, done)
    result = agent.run_sync("Hi")
    assert asked == ["Oslo"] and result.output == Rain(millimetres=3) and result.usage.requests == 2
    live.says("Good.")
    later = pydantic_ai.Agent(pydantic_model(live, kind)).run_sync("And?", message_history=result.all_messages())
    assert later.output == "Good."


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["NativeOutput", "PromptedOutput", "ToolOutput"])
def test_pydantic_ai_has_output_types(live, pydantic_ai, kind, mode):
    from pydantic import BaseModel

    class City(BaseModel):
        city: str

    call = '<tool_call>\n{"name": "final_result", "arguments": {"city": "Oslo"}}\n</tool_call>'
    live.says(call if mode == "ToolOutput" else CITY)
    model = pydantic_model(live, kind)
    agent = pydantic_ai.Agent(model, output_type=getattr(pydantic_ai, mode)(City))
    assert agent.run_sync("Hi").output == City(city="Oslo")


@pytest.mark.parametrize("kind", KINDS)
def test_pydantic_ai_streams(live, pydantic_ai, kind):
    agent = pydantic_ai.Agent(pydantic_model(live, kind))
    live.says(THOUGHT)
    with agent.run_stream_sync("Hi") as stream:
        assert "".join(stream.stream_text(delta=True)) == "so be it"


@pytest.fixture
def instructor():
    return pytest.importorskip("instructor", reason="instructor is not installed")


@pytest.fixture
def City():
    from pydantic import BaseModel

    class City(BaseModel):
        city: str
    return City


def instructed(live, instructor, mode: str):
    mode = instructor.Mode[mode]
    if mode.name.startswith("ANTHROPIC"):
        anthropic = pytest.importorskip("anthropic", reason="anthropic is not installed")
        return instructor.from_anthropic(anthropic.Anthropic(base_url=live.url, api_key=KEY, max_retries=0), mode=mode)
    import openai
    return instructor.from_openai(openai.OpenAI(base_url=live.url + "/v1", api_key=KEY, max_retries=0), mode=mode)


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON", "JSON_SCHEMA", "MD_JSON", "RESPONSES_TOOLS",
                                  "ANTHROPIC_TOOLS", "ANTHROPIC_JSON"])
def test_instructor(live, instructor, City, mode):
    call = '<tool_call>\n{"name": "%s", "arguments": {"city": "Oslo"}}\n</tool_call>'
    live.says(*([call % "City", call % "PartialCity"] if "TOOLS" in mode else [CITY] * 2))
    client = instructed(live, instructor, mode)
    words = {"model": "tiny", "messages": ASKED, "response_model": City, "max_retries": 0}
    words |= {"max_tokens": 300} if "ANTHROPIC" in mode else {}
    assert client.chat.completions.create(**words).city == "Oslo"
    *_, last = client.chat.completions.create_partial(**words)
    assert last.city == "Oslo"


def test_instructor_asks_again_after_a_fault(live, instructor):
    from pydantic import BaseModel, field_validator

    class City(BaseModel):
        city: str

        @field_validator("city")
        @classmethod
        def known(cls, value):
            if value == "Osl":
                raise ValueError("no such city")
            return value

    call = '<tool_call>\n{"name": "City", "arguments": {"city": "%s"}}\n</tool_call>'
    live.says(call % "Osl", call % "Oslo")
    client = instructed(live, instructor, "TOOLS")
    answer = client.chat.completions.create(model="tiny", messages=ASKED, response_model=City, max_retries=2)
    assert answer.city == "Oslo" and "no such city" in live.script.prompts[-1]

