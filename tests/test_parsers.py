"""Parsers of replies: every notation, cut anywhere, malformed, hostile; and how they are chosen."""
from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from isthmus.core.parsers import CALL_ORDER, NOT_ASKED, THINKING_ORDER
from isthmus.core.parsers.choose import Parsers
from isthmus.core.parsers.contract import (
    CALLS,
    THINKING,
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Parser,
    Plain,
    Reasoning,
)
from isthmus.core.parsers.json_text import JsonScan
from isthmus.core.parsers.literals import Literals
from isthmus.core.parsers.reader import MAX_CALL, Malformed
from isthmus.core.text import ChatTemplate

from .effort import at_most
from .reply_samples import BROKEN, FILE, PING, ROME, SAMPLES, TOOLS

COST = 12  # seconds

DATA = Path(__file__).resolve().parent.parent.parent / "shared" / "data"
TEMPLATES = DATA / "llama_cpp_models" / "models" / "templates"
MARKS = sorted({text for name in CALLS for text in CALLS.create(name).controls} | {
    text for name in THINKING for text in THINKING.create(name).controls} | {
    "<function=", "<parameter=", "</parameter>", "</function>", "[", "]", "{", "}", '"', "'", "\\", "(", ")", ",", ":",
    " ",
    "\n", "get_weather", "ping", "call:", "name", "arguments", "```json", "```", "to=functions.ping", "analysis",
    "final",
    "a", "=", "1", "True", '{"name": "ping", "arguments": {}}', "<", ">", "\u00e9", "\ud7ff", "invoke", 'name="a"'})


def parse(parser: Parser, pieces: list[str]):
    """Content, reasoning and calls; checks the order of events."""
    content, reasoning, calls, ended = [], [], [], set()
    for event in [event for piece in pieces for event in parser.feed(piece)] + parser.finish():
        if isinstance(event, Content):
            assert event.text
            content.append(event.text)
        elif isinstance(event, Reasoning):
            assert event.text
            reasoning.append(event.text)
        elif isinstance(event, CallBegin):
            assert event.index == len(calls) and event.id and event.name
            calls.append((event.name, []))
        elif isinstance(event, CallArguments):
            assert event.index == len(calls) - 1 and event.index not in ended
            calls[event.index][1].append(event.text)
        else:
            assert isinstance(event, CallEnd)
            ended.add(event.index)
            json.loads("".join(calls[event.index][1]))
    return "".join(content), "".join(reasoning), [(name, "".join(parts)) for name, parts in calls], len(ended)


def plain(name: str) -> Parser:
    return CALLS.create(name).parser(TOOLS)


def cut(text: str, places: list[int]) -> list[str]:
    places = sorted({place % (len(text) + 1) for place in places})
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@pytest.mark.parametrize("name,text,content,calls", SAMPLES)
def test_every_notation_is_read_wherever_it_is_cut(name, text, content, calls):
    whole = parse(plain(name), [text])
    assert whole[0] == content and not whole[1] and whole[3] == len(calls)
    assert [(name, json.loads(arguments)) for name, arguments in whole[2]] == calls
    assert parse(plain(name), list(text)) == whole
    for place in range(len(text)):
        assert parse(plain(name), [text[:place], text[place:]]) == whole, place


@pytest.mark.parametrize("name,text", BROKEN)
def test_what_is_no_call_is_content(name, text):
    for pieces in ([text], list(text), cut(text, [7, 20, 33])):
        assert parse(plain(name), pieces) == (text, "", [], 0)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(CALLS)), st.lists(st.sampled_from(MARKS) | st.text(max_size=4), max_size=25),
       st.lists(st.integers(0, 300), max_size=12))
def test_any_text_gives_the_same_wherever_it_is_cut(name, parts, places):
    text = "".join(parts)
    whole = parse(plain(name), [text])
    assert parse(plain(name), cut(text, places)) == whole
    assert parse(plain(name), list(text)) == whole


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(THINKING)), st.booleans(), st.lists(st.sampled_from(MARKS), max_size=20),
       st.lists(st.integers(0, 300), max_size=12))
def test_thinking_is_the_same_wherever_it_is_cut(name, opened, parts, places):
    def parser() -> Parser:
        return THINKING.create(name).parser(opened, plain("hermes"), TOOLS)
    text = "".join(parts)
    whole = parse(parser(), [text])
    assert parse(parser(), cut(text, places)) == whole == parse(parser(), list(text))


@pytest.mark.parametrize("text,opened,expected", [
    ("<think>\nhm\n</think>\n\nyes", False, ("yes", "hm")), ("hm\n</think>\n\nyes", True, ("yes", "hm")),
    ("<think>hm</think>yes", True, ("yes", "hm")), ("\n<think>hm", False, ("", "hm")), ("hm", True, ("", "hm")),
    ("yes <think>no</think>", False, ("yes <think>no</think>", "")), (" yes", False, (" yes", "")), ("", False, ("",
    "")),
    ("<think>\n\n</think>\n\nyes", False, ("yes", "")), ("yes</think>", False, ("yes</think>", ""))])
def test_thinking_between_tags(text, opened, expected):
    for pieces in ([text], list(text)):
        parser = THINKING.create("think").parser(opened, Plain(), {})
        assert parser.thinking == opened
        assert parse(parser, pieces)[:2] == expected


def test_harmony_has_thinking_calls_and_the_answer():
    text = ("<|channel|>analysis<|message|>User "
        "wants\nweather.<|end|><|start|>assistant<|channel|>commentary<|message|>I look."
            "<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
            '{"city": "Oslo"}<|call|>')
    parser = THINKING.create("harmony").parser(False, plain("harmony"), TOOLS)
    assert parse(parser, list(text)) == ("I look.", "User wants\nweather.", [("get_weather", '{"city": "Oslo"}')], 1)
    answer = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>It is {1}.\n\nYes"
    for rest in (Plain(), plain("harmony")):
        assert parse(THINKING.create("harmony").parser(False, rest, {}), [answer]) == ("It is {1}.\n\nYes", "Hm.", [],
            0)


def test_thinking_is_told_while_it_lasts():
    parser = THINKING.create("think").parser(False, Plain(), {})
    seen = [(parser.feed(piece), parser.thinking)[1] for piece in ("<think>", "a", "</think>", "b")]
    assert seen == [True, True, False, False]


FLOODS = {
    "hermes": ["<tool_call>", '<tool_call>{"a": "', '<tool_call>{"a":[', "<tool_call> "], "qwen3-coder": [
        "<tool_call><function=", "<function=f><parameter=a>", "<function=f>{"], "glm": ["<tool_call>f<arg_key>"],
    "deepseek-dsml": ['<\uff5cDSML\uff5ctool_calls><\uff5cDSML\uff5cinvoke name="'], "mistral": ["[TOOL_CALLS]",
    "[TOOL_CALLS]["],
    "pythonic": ["[f(", "[", "[ping(a='\\'", "<|tool_call_start|>["], "json": ["{", '{"a', "[{"],
    "gemma4": ["<|tool_call>", '<|tool_call>call:f{a:<|"|>', "<|tool_call>call:f{a:["],
    "harmony": ["<|channel|>", "<|channel|>analysis<|message|>", "<|start|><|channel|>to=functions.f<|message|>{"],
    "deepseek": ["<\uff5ctool\u2581call\u2581begin\uff5c>"], "kimi": ["<|tool_call_begin|>"],
    "cohere": ["<|START_ACTION|>[{"]}


@pytest.mark.parametrize("name,unit", [(name, unit) for name, units in FLOODS.items() for unit in units] + [
    (name, " ") for name in FLOODS])
def test_floods_are_over_at_once(name, unit):
    """In pieces and as a whole; what is read again for each piece or each mark would take minutes."""
    text = unit * (120_000 // len(unit))
    content, _, calls, _ = parse(plain(name), [text[i:i + 40] for i in range(0, len(text), 40)])
    assert len(content) <= len(text) and not calls
    assert parse(plain(name), [text])[0] == content


def test_headers_without_messages_are_not_joined_anew():
    """What is kept of a hundred thousand of them is what says whom the message is for."""
    parser = plain("harmony")
    head = "<|channel|>to=functions.ping" + "<|channel|>to=functions.other" * 100_000
    with at_most(60):  # joined, they would be 150 GB
        events = parser.feed(head + '<|message|>{"a": 1}<|call|>') + parser.finish()
    assert [event.name for event in events if isinstance(event, CallBegin)] == ["ping"]


def test_what_is_held_is_bounded():
    parser = plain("hermes")
    piece = "x" * 4096
    parser.feed('<tool_call>{"name": "ping", "arguments": {"a": "')
    out = [event for _ in range(MAX_CALL // len(piece) + 2) for event in parser.feed(piece)]
    assert sum(len(event.text) for event in out) >= MAX_CALL


def test_json_ends_where_it_ends():
    rng = random.Random(1)
    for value in ({"a": [1, "}\"\\", {"b": "]["}]}, [], [[["\\\\"]]], {"\u00e9": None}):
        text = json.dumps(value, ensure_ascii=False)
        for _ in range(20):
            scan, place = JsonScan(), 0
            for piece in cut(text + " rest", [rng.randrange(99) for _ in range(6)]):
                used = scan.feed(piece)
                place += used
                if scan.complete:
                    break
            assert scan.complete and place == len(text)


@pytest.mark.parametrize("text,value", [
    ("'a\\'b\\n\\x41\\u00e9'", "a'b\nA\u00e9"), ('"""a"b\nc"""', 'a"b\nc'), ("-1_000", -1000), ("+2.5e3", 2500.0),
    ("(1, 2,)", [1, 2]),
    ("{'a': [True, None], \"b\": {}}", {"a": [True, None], "b": {}}), ("false", False)])
def test_values_in_pythons_manner(text, value):
    assert Literals(text).value() == value


@pytest.mark.parametrize("text", ["", "a", "'a", "{a: 1}", "[1", "[" * 200 + "]" * 200, "'\\u12'", "1e999",
    "__import__('os')"])
def test_values_that_are_none(text):
    with pytest.raises(Malformed):
        source = Literals(text)
        source.value()
        if source.peek():
            raise Malformed


CHOSEN = {
    "Cohere2MoE": ("cohere", "cohere"), "GLM-4.7-Flash": ("glm", "think"), "Kimi-K2-Thinking": ("kimi", "think"),
    "LFM2.5-Instruct": ("pythonic", "think"), "MiroThinker": ("hermes", "think"),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ("qwen3-coder", "think"), "Qwen-Qwen2.5-7B-Instruct": ("hermes", "none"),
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": ("hermes", "none"), "Qwen3-Coder": ("qwen3-coder", "none"),
    "deepseek-ai-DeepSeek-V3.1": ("deepseek-v31", "think"), "deepseek-ai-DeepSeek-V4": ("deepseek-dsml", "think"),
    "llama-cpp-deepseek-r1": ("deepseek", "think"), "google-gemma-4-31B-it": ("gemma4", "gemma4"),
    "meetkai-functionary-medium-v3.1": ("functionary", "none"), "meta-llama-Llama-3.1-8B-Instruct": ("llama3-json",
    "none"),
    "mistralai-Ministral-3-14B-Reasoning-2512": ("mistral", "mistral"), "moonshotai-Kimi-K2": ("kimi", "none"),
    "unsloth-mistral-Devstral-Small-2507": ("mistral", "none"), "google-gemma-2-2b-it": ("hermes", "none")}


# Templates that write calls of earlier turns, which is how the model writes them.
WRITING = ("Apertus-8B-Instruct", "Bielik-11B-v3.0-Instruct", "CohereForAI-c4ai-command-r7b-12-2024-tool_use",
           "Cohere2MoE", "GLM-4.7-Flash", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "Qwen-Qwen2.5-7B-Instruct",
           "NousResearch-Hermes-3-Llama-3.1-8B-tool_use", "Qwen3-Coder", "Reka-Edge", "deepseek-ai-DeepSeek-V3.1",
           "deepseek-ai-DeepSeek-V4", "google-gemma-4-31B-it", "meetkai-functionary-medium-v3.1",
           "meta-llama-Llama-3.3-70B-Instruct", "mistralai-Ministral-3-14B-Reasoning-2512", "moonshotai-Kimi-K2",
           "stepfun-ai-Step-3.5-Flash", "unsloth-mistral-Devstral-Small-2507")


@pytest.mark.skipif(not TEMPLATES.is_dir(), reason=f"no templates in {TEMPLATES}")
@pytest.mark.parametrize("name", WRITING)
def test_what_templates_write_of_earlier_calls_is_read(name):
    source = (TEMPLATES / f"{name}.jinja").read_text()
    template, parsers = ChatTemplate(source, None, {"bos_token": "", "eos_token": "<eos>"}), Parsers(source)
    tools = [{"type": "function", "function": {"name": tool.name, "description": "d",
                                               "parameters": {"type": "object", "properties": {}, **tool.parameters}}}
             for tool in TOOLS.values()]
    calls = [ROME] if "Llama-3.3" in name else [FILE, ROME, PING]
    user = {"role": "user", "content": "Hi"}
    made = [{"id": f"abcdefgh{i}", "type": "function", "function": {"name": n, "arguments": json.dumps(a)}}
            for i, (n, a) in enumerate(calls)]
    turn = {"role": "assistant", "content": "", "reasoning_content": "I think.", "tool_calls": made}
    result = {"role": "tool", "tool_call_id": "abcdefgh0", "content": "ok"}
    before = template.render([user], tools, True)
    after = template.render([user, turn, result], tools, False)
    common = os.path.commonprefix([before, after])
    opened = parsers.reasoning is not None and common.rstrip().endswith(parsers.reasoning.begin.rstrip())
    parser = parsers.format.parser(TOOLS)
    if parsers.reasoning is not None:
        parser = parsers.reasoning.parser(opened, parser, TOOLS)
    found = parse(parser, [after[len(common):]])
    assert [(n, json.loads(a)) for n, a in found[2]] == calls


@pytest.mark.skipif(not TEMPLATES.is_dir(), reason=f"no templates in {TEMPLATES}")
@pytest.mark.parametrize("name", CHOSEN)
def test_the_parsers_are_read_off_the_template(name):
    found = Parsers((TEMPLATES / f"{name}.jinja").read_text())
    assert (found.calls.name, found.thinking.name) == CHOSEN[name], found.calls
    assert found.calls.why and found.thinking.why


def test_every_parser_can_be_found_and_set():
    assert {*CALL_ORDER, *NOT_ASKED} == set(CALLS) and set(THINKING_ORDER) == set(THINKING)
    found = Parsers("tools <tool_call> </think>", "llama3-json", "none")
    assert found.calls == ("llama3-json", "set") and found.reasoning is None and found.format is not None
