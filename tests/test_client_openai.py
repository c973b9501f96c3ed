"""OpenAI's own package, whichever major is installed, on chat; its Responses are in test_api_clients.py.

`ci/clients.py` runs both with openai 2 as well as 3: much still asks for the older.
"""
from __future__ import annotations

import json

import pytest

from .scripted import CALL, CITY, KEY, SCHEMA, THOUGHT, TOOL, talking

COST = 3  # seconds

ASKED = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture(scope="module")
def live():
    with talking() as made:
        yield made


@pytest.fixture
def chat(live):
    openai = pytest.importorskip("openai", reason="openai is not installed")
    with openai.OpenAI(base_url=live.url + "/v1", api_key=KEY, max_retries=0) as client:
        yield client.chat.completions


def test_parses_a_type(live, chat):
    from pydantic import BaseModel

    class City(BaseModel):
        city: str

    live.says(CITY, CITY)
    answer = chat.parse(**ASKED, response_format=City)
    assert answer.choices[0].message.parsed == City(city="Oslo")
    assert live.client.submits[-1].params.grammar is not None
    with chat.stream(**ASKED, response_format=City) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == City(city="Oslo")


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "weather"}}])
def test_streams_calls_of_tools(live, chat, choice):
    strict = {"type": "function", "function": TOOL["function"] | {"strict": True}}
    live.says("<think>hm</think>" + CALL, "Rain.")
    with chat.stream(**ASKED, tools=[strict], tool_choice=choice, stream_options={"include_usage": True}) as stream:
        kinds = [event.type for event in stream]
        first = stream.get_final_completion()
    call = first.choices[0].message.tool_calls[0]
    assert (call.function.name, call.function.parsed_arguments) == ("weather", {"city": "Oslo"})
    assert "tool_calls.function.arguments.done" in kinds and first.choices[0].finish_reason == "tool_calls"
    assert first.usage.completion_tokens and first.choices[0].message.reasoning_content == "hm"
    told = [*ASKED["messages"], first.choices[0].message,
            {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    assert chat.create(model="tiny", messages=told, tools=[TOOL]).choices[0].message.content == "Rain."
    assert "rain" in live.script.prompts[-1]


def test_streams_reasoning_and_logprobs(live, chat):
    live.says(THOUGHT)
    with chat.stream(**ASKED, logprobs=True, top_logprobs=2) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "so be it" and len(final.choices[0].logprobs.content) > 8


def test_asynchronous_client(live, chat):
    import asyncio

    import openai

    async def main():
        async with openai.AsyncOpenAI(base_url=live.url + "/v1", api_key=KEY, max_retries=0) as client:
            async for _ in await client.chat.completions.create(**ASKED, stream=True):
                break  # and leaves
            async with client.responses.stream(model="tiny", input="Hi") as stream:
                return (await stream.get_final_response()).output_text
    live.says("Left alone.", "Heard out.")
    assert asyncio.run(main()) == "Heard out."


def test_raw_answers_have_their_id(live, chat):
    live.says("x")
    raw = chat.with_raw_response.create(**ASKED)
    assert raw.headers["x-request-id"] and raw.parse().choices[0].message.content == "x"


def test_functions_of_long_ago_are_refused_in_words(live, chat):
    import openai
    with pytest.raises(openai.BadRequestError) as refused:
        chat.create(**ASKED, functions=[{"name": "weather", "parameters": SCHEMA}])
    assert "tools" in refused.value.message and json.dumps(refused.value.body)
