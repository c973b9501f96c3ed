"""Nobody may hold up the event loop: hostile bodies, slow templates, long texts, large answers and fast engines.

A ticker runs beside each attack; the most that this process computed between two of its ticks is how long everybody
else stood still. Computing, not the clock: another process that is busy takes nothing away. What else this process
computes by chance (threads that earlier tests left behind, garbage collection) does: an attack that held up the loop
is repeated, for one that can hold it up does so each time.
"""
from __future__ import annotations

import asyncio
import json
import threading
import time

import pytest
from isthmus.core.server.limits import MAX_TOKENIZE
from isthmus.core.server.native import BYTES_PER_S, FREE_BYTES
from isthmus.core.server.stream import JsonList, encode_json

from .effort import SOON, at_most, unencumbered
from .fake_client import drive, make_app

COST = 20  # seconds

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
TICK_S, LIMIT_S = 0.01, 1.0


async def ticker(gaps: list[float]) -> None:
    last = time.process_time()
    while True:
        await asyncio.sleep(TICK_S)
        now = time.process_time()
        gaps.append(now - last)
        last = now


def attack(made, *posts: tuple[str, bytes | dict], timeout: float = 5 * SOON, hang_up=None):
    """All posts at once: (the ASGI messages of each, the longest standstill in seconds)."""
    async def main():
        gaps: list[float] = []
        ticking = asyncio.ensure_future(ticker(gaps))
        await asyncio.sleep(5 * TICK_S)
        bodies = [(path, body if isinstance(body, bytes) else json.dumps(body).encode()) for path, body in posts]
        async with asyncio.timeout(timeout):
            answers = await asyncio.gather(*(drive(made.app, path, body, hang_up) for path, body in bodies))
        await asyncio.sleep(2 * TICK_S)
        ticking.cancel()
        return answers, max(gaps)
    with unencumbered():
        return asyncio.run(main())


def standstill(made, *posts: tuple[str, bytes | dict]):
    """`attack`, up to three times: the answers of the last one and the least standstill."""
    answers, gap = attack(made, *posts)
    for _ in range(2):
        if gap < LIMIT_S:
            break
        answers, again = attack(made, *posts)
        gap = min(gap, again)
    return answers, gap


def body_of(messages: list[dict]) -> bytes:
    return b"".join(m.get("body", b"") for m in messages)


@pytest.fixture
def made():
    """An app whose model has room for long answers, and whose engine is faster than any reader."""
    made = make_app(text="one two three four five six seven")
    made.client.info["max_model_len"] = 20_000
    made.client.burst = True
    return made


# ---- bodies

def many(entry: bytes, count: int) -> bytes:
    return b",".join([entry] * count)


def keys(count: int) -> bytes:
    return b",".join(b'"%d":[]' % i for i in range(count))


BODIES = {
    "strings for ids": ("/detokenize", lambda: b'{"tokens":[' + many(b'""', 5_000_000) + b"]}"),
    "some strings for ids": ("/detokenize", lambda: b'{"tokens":[' + many(b'""', 1_900_000) + b"]}"),
    "too many ids": ("/detokenize", lambda: b'{"tokens":[' + many(b"1", 1_900_000) + b"]}"),
    "empty lists": (COMPLETIONS, lambda: b'{"a":[' + many(b"[]", 5_000_000) + b"]}"),
    "some empty lists": (COMPLETIONS, lambda: b'{"a":[' + many(b"[]", 990_000) + b"]}"),
    "empty prompts": (COMPLETIONS, lambda: b'{"prompt":[' + many(b'""', 1_900_000) + b"]}"),
    "biases": (COMPLETIONS, lambda: b'{"prompt":"a","logit_bias":{' + keys(240_000) + b"}}"),
    "a model of many": (COMPLETIONS, lambda: b'{"prompt":"a","model":{' + keys(240_000) + b"}}"),
    "a role of many": (CHAT, lambda: b'{"messages":[{"content":"a","role":{' + keys(240_000) + b"}}]}"),
    "arguments of many": (CHAT, lambda: b'{"messages":[{"role":"user","content":"a"}],"chat_template_kwargs":{'
                          + keys(240_000) + b"}}"),
    "keys": (COMPLETIONS, lambda: b'{"prompt":"a",' + keys(900_000) + b"}"),
    "keys of what is ignored": (COMPLETIONS, lambda: b'{"prompt":"a","z":{' + keys(900_000) + b"}}"),
    "digits": (COMPLETIONS, lambda: b'{"prompt":"a","z":[' + many(b"9" * 4000, 3500) + b"]}"),
    "quotes": (COMPLETIONS, lambda: b"[" * 101 + b'"' * 15_000_000),
    "escaped quotes": (COMPLETIONS, lambda: b"[" * 101 + b'"' + b'\\"' * 7_000_000),
    "messages": (CHAT, lambda: b'{"messages":[' + many(b'{"role":"user","content":""}', 120_000) + b"]}"),
    "a long name": (CHAT, lambda: b'{"messages":[{"role":"user","content":"a","name":"'
                    + b"<|im_start|>" * 1_200_000 + b'"}]}'),
    "long reasoning": (CHAT, lambda: b'{"messages":[{"role":"assistant","content":"a","reasoning_content":"'
                       + b"<|im_start|>" * 1_200_000 + b'"}]}'),
    "long arguments": (CHAT, lambda: json.dumps({"messages": [{"role": "assistant", "tool_calls": [
        {"id": "x", "function": {"name": "f", "arguments": "[" * 5_000_000}}]}]}).encode()),
    "a long text to tokenize": ("/tokenize", lambda: b'{"prompt":"' + b"a" * (MAX_TOKENIZE + 1) + b'"}'),
    "a long conversation to tokenize": ("/tokenize", lambda: b'{"messages":[{"role":"user","name":"'
                                        + b"a" * MAX_TOKENIZE + b'","content":"a"}]}'),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_hostile_body_stops_nobody_else(made, name):
    path, body = BODIES[name]
    (answer,), gap = standstill(made, (path, body()))
    assert answer[0]["status"] == (413 if "tokenize" in name else 400) and len(body_of(answer)) < 4000
    assert gap < LIMIT_S and not made.client.submits and not made.template.calls


@pytest.mark.slow
def test_hostile_bodies_at_once_stop_nobody_else(made):
    _, gap = standstill(made, *[(path, body()) for path, body in BODIES.values()])
    assert gap < 2 * LIMIT_S


def test_every_text_of_a_message_counts(made):
    made.client.info["max_model_len"] = 100
    long = "x" * 2000
    call = {"id": "x", "function": {"name": "f", "arguments": "{}"}}
    for message in ({"name": long}, {"reasoning_content": long}, {"tool_call_id": long}, {"content": long},
                    {"tool_calls": [{**call, "id": long}]}, {"tool_calls": [{**call, "function": {"name": long}}]},
                    {"tool_calls": [{**call, "function": {"name": "f", "arguments": long}}]}):
        (answer,), _ = attack(made, (CHAT, {"messages": [{"role": "assistant", "content": "a", **message}]}))
        assert json.loads(body_of(answer))["error"]["code"] == "context_length_exceeded", message
    assert not made.template.calls


def test_detokenize_takes_as_many_ids_as_the_context(made):
    made.client.info["max_model_len"] = 3
    answers, _ = attack(made, ("/detokenize", {"tokens": [97] * 3}), ("/detokenize", {"tokens": [97] * 4}))
    assert [a[0]["status"] for a in answers] == [200, 400]


def test_text_of_the_allowed_length_is_tokenized(made):
    made.app.state.server.text.tokenizer.encode = lambda text, *_: [len(text) % 256]
    (answer,), _ = attack(made, ("/tokenize", b'{"prompt":"' + b"a" * MAX_TOKENIZE + b'"}'))
    assert json.loads(body_of(answer))["count"] == 1


# ---- prompts

def busy(seconds: float):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        sum(range(1000))


def test_a_slow_template_stops_nobody_else(made, monkeypatch):
    plain = made.template.encode
    monkeypatch.setattr(made.template, "encode", lambda *args, **more: busy(1.5) or plain(*args, **more))
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    answers, gap = standstill(made, *[(path, body) for path in (CHAT, CHAT, "/tokenize")])
    assert [a[0]["status"] for a in answers] == [200] * 3 and gap < LIMIT_S


def test_large_work_leaves_threads_to_the_rest(made, monkeypatch):
    """Ten long texts are tokenized one at a time; a chat that comes later is answered before them."""
    tokenizer, done, answered = made.app.state.server.text.tokenizer, [], threading.Event()

    def encode(text, *_):
        if len(text) == 1:
            answered.set()
        done.append(len(text) if answered.wait(SOON) else None)
        return [1]
    monkeypatch.setattr(tokenizer, "encode", encode)
    long, short = ("/tokenize", {"prompt": "a" * 300_000}), ("/tokenize", {"prompt": "a"})
    attack(made, *[long] * 10, short)
    assert sorted(done) == [1, *[300_000] * 10]


# ---- answers

PLAIN = {COMPLETIONS: {"prompt": "x", "logprobs": 20}, CHAT: {"messages": [{"role": "user", "content": "x"}],
         "logprobs": True, "top_logprobs": 20}, GENERATE: {"text": "x", "return_logprob": True, "top_logprobs_num": 20}}


def wish(path: str, tokens: int, **more) -> tuple[str, dict]:
    params = {"max_tokens": tokens, "ignore_eos": True, "temperature": 0, "n": more.pop("n", 1)}
    return path, {**PLAIN[path], **more, **({"sampling_params": params} if path == GENERATE else params)}


@pytest.mark.parametrize("path", PLAIN)
def test_a_stream_of_a_fast_engine_stops_nobody_else(made, path):
    """Four streams of 3000 tokens with 20 alternatives each."""
    answers, gap = standstill(made, *[wish(path, 3000, stream=True)] * 4)
    assert gap < LIMIT_S
    for answer in answers:
        events = [m for m in answer if m.get("body", b"").startswith(b"data: ")]
        assert events[-1]["body"] == b"data: [DONE]\n\n" and len(events) < 1000, "what waits goes out together"
        if path == GENERATE:
            last = json.loads(events[-2]["body"][6:])
            assert last["meta_info"]["completion_tokens"] == len(last["output_ids"]) == 3000
            assert [len(last["meta_info"][f"output_{name}_logprobs"]) for name in ("token", "top")] == [3000] * 2


@pytest.mark.parametrize("path", PLAIN)
def test_a_large_answer_stops_nobody_else(made, path):
    answers, gap = standstill(made, wish(path, 300, n=32))
    assert gap < LIMIT_S and answers[0][0]["status"] == 200 and len(body_of(answers[0])) > 2_000_000


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("path", PLAIN)
def test_a_client_that_leaves_a_fast_stream_ends_it(made, path, n):
    with at_most(5):
        attack(made, wish(path, 15_000, stream=True, n=n), hang_up=lambda sent: len(sent) > 4)
    assert len(made.client.aborts) == n and made.client.waiting == 0


def test_scores_of_a_long_prompt_are_built_beside_the_loop(made):
    prompt = "x" * 15_000
    posts = [(COMPLETIONS, {"prompt": prompt, "echo": True, "logprobs": 20, "max_tokens": 1, "stream": True}),
             (GENERATE, {"text": prompt, "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 20,
                         "stream": True, "sampling_params": {"max_new_tokens": 1}})]
    answers, gap = standstill(made, *posts)
    assert gap < LIMIT_S and all(len(body_of(a)) > 1_000_000 for a in answers)


def test_events_that_repeat_the_answer_are_paced_by_their_size(made):
    """A client that reads for a while gets about so many bytes a second, however fast the engine is."""
    began = time.perf_counter()
    (answer,), _ = attack(made, wish(GENERATE, 15_000, stream=True))
    seconds = time.perf_counter() - began
    sizes = [len(m["body"]) for m in answer if m.get("body", b"").startswith(b"data: {")]
    small = sum(size for size in sizes if size <= FREE_BYTES)
    assert sum(sizes) < small + seconds * BYTES_PER_S + 2 * sizes[-1] + FREE_BYTES * len(sizes)
    assert sizes[-1] > 4_000_000 and len(sizes) < 5_000, "of 15 000 tokens"


def test_short_events_come_with_every_token():
    made = make_app()
    (answer,), _ = attack(made, (GENERATE, {"text": "x", "stream": True, "sampling_params": {
        "max_new_tokens": 300, "ignore_eos": True}}))
    counts = [json.loads(m["body"][6:])["meta_info"]["completion_tokens"] for m in answer
              if m.get("body", b"").startswith(b"data: {")]
    assert counts == list(range(1, 301))


def test_a_growing_list_is_the_list():
    grown, whole = JsonList(), []
    for part in ([], [1], [], [(0.5, 2, "a,]")], [None, []], []):
        grown.extend(part)
        whole += part
        assert json.loads(encode_json(grown.value())) == json.loads(encode_json(whole))
