"""Streams past the layers: outputs that are written where they arrive, and the same answer as by the longer way."""
from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from isthmus.core.messages import TextOutput, TextOutputs, Watch, pack_ids
from isthmus.core.processes.backlog import MERGE_BYTES, Backlog
from isthmus.core.server.answer import GenerationAnswer
from isthmus.core.server.chat import ChatAnswer
from isthmus.core.server.connection import Connection, Direct
from isthmus.core.server.stream import Mold, event

from .effort import SOON
from .fake_client import Direct as Recorded
from .fake_client import drive, make_app

COST = 6  # seconds

HI = [{"role": "user", "content": "Hi"}]
ASKED = {
    "chat": ("/v1/chat/completions", {"messages": HI}),
    "completion": ("/v1/completions", {"prompt": "x"}),
    "native": ("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 40, "temperature": 0}}),
    "responses": ("/v1/responses", {"input": "Hi", "store": False}),
    "anthropic": ("/v1/messages", {"messages": HI}),
    "ollama": ("/api/chat", {"messages": HI, "model": "tiny", "options": {"temperature": 0, "num_predict": 40}}),
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
MORE = {
    "chat": [{"logprobs": True, "top_logprobs": 2}, {"stream_options": {"include_usage": True}},
             {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}, {"return_token_ids": True},
             {"stop": ["six"]}, {"n": 2}, {"tools": [TOOL]}],
    "completion": [{"logprobs": 2}, {"stream_options": {"include_usage": True}}, {"return_token_ids": True},
                   {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}, {"echo": True},
                   {"echo": True, "logprobs": 1}, {"n": 2}, {"prompt": ["a", "b"]}],
}
CASES = [(name, more) for name in ASKED for more in [{}, *MORE.get(name, [])]]


def post(made, name: str, direct=None, **more) -> list[dict]:
    """The messages of one streamed POST."""
    path, body = ASKED[name]
    body = {"max_tokens": 40, "temperature": 0, "stream": True, **body, **more}

    async def timed():
        async with asyncio.timeout(SOON):
            return await drive(made.app, path, json.dumps(body).encode(), direct=direct)
    return asyncio.run(timed())


def body(sent: list[dict]) -> bytes:
    return b"".join(message.get("body", b"") for message in sent)


def comparable(sent: list[dict]) -> list[bytes]:
    """The parts of a body, without what differs each time; those of several choices may come in any order."""
    text = re.sub(rb'([a-z]+[-_])?[0-9a-f]{24,32}|"(created|created_at|completed_at)":("[^"]*"|\d+)|'
                  rb'"[a-z0-9_]*(duration|latency)":[0-9.e-]+|"obfuscation":"[^"]*"', b"?", body(sent))
    return sorted(text.split(b"\n"))


@pytest.mark.parametrize("joined,name,more", [(False, *case) for case in CASES] + [(True, *case) for case in CASES[:8]])
def test_the_answer_is_the_same_by_both_ways(joined, name, more):
    ways = []
    for direct in (None, Recorded):
        made = make_app()
        if joined:
            in_pairs(made.client)
        ways.append(post(made, name, direct, **more))
        assert not made.client.aborts and not made.client.waiting
    assert comparable(ways[0]) == comparable(ways[1])
    written = sum("direct" in message for message in ways[1])
    assert written > (3 if joined else 15), "it takes the direct way"
    assert [message["type"] for message in ways[1]].count("http.response.start") == 1
    assert ways[1][-1]["more_body"] is False


def in_pairs(client) -> None:
    """Every two outputs arrive together, as they do at an event loop that lags."""
    plain, kept = client._receive, []

    def receive(message):
        if message.outputs[0].prompt_tokens:
            return plain(message)
        kept.append(message)
        if len(kept) == 2 or message.outputs[0].finish is not None:
            together = kept[:]
            kept.clear()
            client._receive = plain
            client._receive_all(together)
            client._receive = receive
    client._receive = receive


def test_a_client_that_lags_is_waited_for_and_gets_everything():
    class Moody(Recorded):
        """Takes three pieces, then none for a while."""

        def write(self, data: bytes) -> None:
            super().write(data)
            if sum("direct" in message for message in self.sent) % 3 == 0:
                self.open = False
                asyncio.get_running_loop().call_later(0.002, setattr, self, "open", True)
    made = make_app(delay=0.0005)
    sent = post(made, "chat", Moody)
    assert comparable(sent) == comparable(post(make_app(), "chat"))
    kinds = ["direct" in message for message in sent]
    assert any(kinds) and not all(kinds[2:-1])


@pytest.mark.parametrize("direct", [None, Recorded])
def test_what_fails_on_the_way_ends_that_request_only(monkeypatch, direct):
    plain = ChatAnswer.chunk

    def chunk(self, index, output):
        if output.completion_tokens == 5:
            raise ValueError("odd")
        return plain(self, index, output)
    monkeypatch.setattr(ChatAnswer, "chunk", chunk)
    made = make_app()
    sent = post(made, "chat", direct)
    last = json.loads(body(sent).split(b"\n\n")[-2].removeprefix(b"data: "))
    assert last["error"]["code"] == "internal_error" and "odd" not in last["error"]["message"]
    assert made.client.aborts == [made.client.submits[0].id], "the engine did not know"
    assert body(post(made, "completion", direct)).endswith(b"data: [DONE]\n\n")


def test_the_request_is_counted_by_both_ways():
    told = []
    for direct in (None, Recorded):
        made = make_app(server={"log_contents": True})
        post(made, "chat", direct)
        measured = made.app.state.server.metrics.measured
        told.append({name: sum(measured[name].counts) for name in ("ttft", "itl", "e2e")})
    assert told[0] == told[1] and told[0]["ttft"] == 1 and told[0]["itl"] == 39


# ---- the backlog

def output(i: int, finish: str | None = None) -> TextOutput:
    return TextOutput("a", chr(97 + i % 26), pack_ids([i]), finish, completion_tokens=i + 1)


@given(st.lists(st.sampled_from(["one", "many", "open", "shut", "turn"]), max_size=60))
def test_whatever_is_taken_the_order_is_kept(steps):
    async def main():
        got, takes, serial = [], [False], iter(range(10**6))

        def tap(output):
            if takes[0]:
                got.append(output.text)
            return takes[0]
        backlog = Backlog(tap)

        async def read():
            while True:
                output = await backlog.get()
                got.append(output.text)
                if output.finish is not None:
                    return
                await asyncio.sleep(0)  # it is not at once back for more
        reading = asyncio.ensure_future(read())
        for step in steps:
            if step == "one":
                backlog.put(output(next(serial)))
            elif step == "many":
                backlog.put_all([output(next(serial)) for _ in range(3)])
            elif step == "turn":
                await asyncio.sleep(0)
            else:
                takes[0] = step == "open"
        backlog.put_all([output(next(serial)), output(next(serial), "length")])
        assert backlog.ended
        await reading
        return "".join(got), next(serial)
    text, count = asyncio.run(main())
    assert text == "".join(chr(97 + i % 26) for i in range(count))


def test_what_came_together_is_one_piece_up_to_its_limit():
    async def main(count):
        taken = []
        backlog = Backlog(lambda output: bool(taken.append(output) or True))
        waiting = asyncio.ensure_future(backlog.get())
        await asyncio.sleep(0)
        backlog.put_all([output(i) for i in range(count)])
        waiting.cancel()
        return [len(output.tokens) // 4 for output in taken]
    most = MERGE_BYTES // 4
    assert asyncio.run(main(most)) == [most]
    assert asyncio.run(main(most + 1)) == [1] * (most + 1)


def test_the_last_output_is_the_readers():
    async def main():
        backlog = Backlog(lambda output: True)
        waiting = asyncio.ensure_future(backlog.get())
        await asyncio.sleep(0)
        backlog.put_all([output(0), output(1, "stop")])
        return await waiting, backlog.unread
    last, _ = asyncio.run(main())
    assert last.text == "b" and last.finish == "stop"


def test_messages_that_came_together_keep_the_order_of_kinds():
    """An end that comes between texts is heard after what came before it."""
    from isthmus.core.messages import Failed, SamplingParams, Submit

    async def main():
        client = make_app().client
        client._run = lambda submit: asyncio.sleep(0)
        outputs = client.generate(Submit("a", pack_ids([1]), SamplingParams()), Watch("a"))
        first = asyncio.ensure_future(anext(outputs))
        await asyncio.sleep(0)
        name = client.submits[0].id
        texts = [TextOutputs([TextOutput(name, c, pack_ids([i]), completion_tokens=i + 1)]) for i, c in enumerate("ab")]
        client._receive_all([*texts, Failed("scheduler", "killed")])
        return (await first).text, await asyncio.gather(anext(outputs), return_exceptions=True)
    text, (error,) = asyncio.run(main())
    assert text == "ab" and "killed" in str(error)


# ---- the mold

@given(st.text())
def test_a_mold_gives_what_the_encoder_gives(text):
    value = {"model": '"delta":{"content":""', "delta": {"content": "", "x": '"content":""'}}
    mold = Mold(event(value), b'"delta":{"content":')
    assert mold(text) == event({**value, "delta": {**value["delta"], "content": text}})


# ---- a socket

@pytest.fixture
def live() -> Iterator[SimpleNamespace]:
    made = make_app(delay=0.001)
    sock = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(made.app, http=Connection, log_level="error", log_config=None))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    made.address = sock.getsockname()
    yield made
    server.should_exit = True
    thread.join(SOON)


def test_over_a_socket_it_is_taken_and_the_connection_goes_on(live, monkeypatch):
    writes, plain, taken = [], Direct.write, []
    monkeypatch.setattr(Direct, "write", lambda self, data: writes.append(data) or plain(self, data))
    take = GenerationAnswer._take
    monkeypatch.setattr(GenerationAnswer, "_take", lambda self, output: taken.append(take(self, output)) or taken[-1])
    asked = json.dumps({"messages": HI, "max_tokens": 40, "stream": True}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    with socket.create_connection(live.address) as client:
        client.settimeout(SOON)
        for _ in range(2):
            client.sendall(head + b"Content-Length: %d\r\n\r\n" % len(asked) + asked)
            answer = b""
            while not answer.endswith(b"\r\n0\r\n\r\n"):
                answer += client.recv(65536)
            chunks = re.findall(rb"([0-9a-f]+)\r\n(.*?)\r\n(?=[0-9a-f]+\r\n)", answer.partition(b"\r\n\r\n")[2], re.S)
            assert all(int(size, 16) == len(data) for size, data in chunks) and chunks[-1][1] == b"data: [DONE]\n\n"
    assert sum(taken) > 60 and len(writes) > 60
