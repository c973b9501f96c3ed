"""Streams over real time: hang-ups, keep-alives, errors in the middle, and the official client over a socket."""
from __future__ import annotations

import asyncio
import json
import threading
import time

import httpx
import openai
import pytest
from isthmus.core.errors import EngineDead
from isthmus.core.server.stream import ANTHROPIC, LINES, OPENAI, RESPONSES, EventStream
from isthmus.core.server.threads import LARGE, SMALL
from starlette.testclient import TestClient

from .effort import SOON, until
from .fake_client import TEXT, drive, make_app
from .live import listening

COST = 12  # seconds

HI = [{"role": "user", "content": "Hi"}]
PATHS = {"/v1/chat/completions": {"messages": HI}, "/v1/completions": {"prompt": "x"}, "/generate": {"text": "x"}}


def body_of(path: str, **more) -> bytes:
    body = {**PATHS[path], "max_tokens": 400, "sampling_params": {"max_new_tokens": 400}, **more}
    return json.dumps(body).encode()


def run(made, path: str, hang_up=None, **more) -> list[dict]:
    """The ASGI messages of one POST."""
    async def timed():
        async with asyncio.timeout(SOON):
            return await drive(made.app, path, body_of(path, **more), hang_up)
    return asyncio.run(timed())


def text(messages: list[dict]) -> str:
    return b"".join(m.get("body", b"") for m in messages).decode()


# ---- hang-ups

@pytest.mark.parametrize("path", PATHS)
def test_hanging_up_aborts_a_stream_at_once(path):
    made = make_app(delay=0.005)
    run(made, path, lambda sent: len(sent) > 4, stream=True)
    assert made.client.aborts == [made.client.submits[0].id]
    assert made.client.waiting == 0 and made.app.state.server.running == {}


@pytest.mark.parametrize("path", PATHS)
def test_hanging_up_aborts_a_buffered_answer_at_once(path):
    made = make_app(delay=0.005)
    sent = run(made, path, lambda sent: not sent)
    assert made.client.aborts == [made.client.submits[0].id]
    assert made.client.waiting == 0 and sent[0]["status"] == 499


@pytest.mark.parametrize("stream", [False, True])
def test_hanging_up_aborts_every_answer(stream):
    made = make_app(delay=0.005)
    run(made, "/v1/completions", lambda sent: len(sent) > 6 if stream else not sent, stream=stream, n=3,
        prompt=["a", "b"])
    ids = [s.id for s in made.client.submits]
    assert len(ids) == 6 and sorted(made.client.aborts) == sorted(ids) and made.client.waiting == 0


def test_hanging_up_before_the_first_token():
    made = make_app()
    made.client.hold = 0
    sent = run(made, "/v1/chat/completions", lambda sent: not sent, stream=True)
    assert sent == [] and made.client.aborts == [made.client.submits[0].id]


def test_a_finished_stream_aborts_nothing():
    made = make_app()
    sent = run(made, "/v1/chat/completions", stream=True)
    assert text(sent).endswith("data: [DONE]\n\n") and not made.client.aborts
    assert sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}


@pytest.mark.parametrize("framing", [OPENAI, RESPONSES, ANTHROPIC, LINES])
def test_a_stream_without_events_is_a_whole_answer(framing):
    async def nothing():
        return
        yield b""

    async def main():
        sent, never = [], asyncio.Event()

        async def send(message):
            sent.append(message)
        await EventStream(nothing(), 0, {}, framing)({"type": "http"}, never.wait, send)
        return sent
    sent = asyncio.run(main())
    assert [m["type"] for m in sent[:2]] == ["http.response.start", "http.response.body"] and sent[0]["status"] == 200
    assert text(sent[1:]).encode() == framing.done and sent[-1]["more_body"] is False


# ---- keep-alives

@pytest.mark.parametrize("hold", [0, 3])
def test_comments_while_silent(hold):
    made = make_app(server={"sse_ping": 0.05})
    made.client.hold = hold
    sent = run(made, "/v1/chat/completions", lambda sent: text(sent).count(": ping") == 3, stream=True)
    assert sent[0]["status"] == 200 and text(sent).count(": ping\n\n") == 3
    assert [frame for frame in text(sent).split("\n\n") if frame][-3:] == [": ping"] * 3
    assert made.client.aborts


def test_no_comments_while_tokens_flow_or_when_off():
    made = make_app(server={"sse_ping": 2}, delay=0.01)  # four seconds of tokens
    assert ": ping" not in text(run(made, "/v1/chat/completions", stream=True, ignore_eos=True))
    silent = make_app(server={"sse_ping": 0})
    silent.client.hold = 3
    start = time.monotonic()
    sent = run(silent, "/v1/chat/completions", lambda sent: sent and time.monotonic() - start > 0, stream=True)
    assert ": ping" not in text(sent)


def test_clients_live_with_comments():
    made = make_app(server={"sse_ping": 0.02}, delay=0.05, text="ab")
    sent = text(run(made, "/v1/completions", stream=True, temperature=0))
    data = [json.loads(f[6:]) for f in sent.split("\n\n") if f.startswith("data: {")]
    assert ": ping" in sent and "".join(c["choices"][0]["text"] for c in data) == "ab"


# ---- errors in the middle

@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("n", [1, 2])
def test_engine_death_ends_the_stream_with_an_error(path, n):
    made = make_app()
    made.client.die_after = 3
    sent = run(made, path, stream=True, n=n, sampling_params={"max_new_tokens": 50, "n": n})
    frames = [f for f in text(sent).split("\n\n") if f]
    error = json.loads(frames[-1].removeprefix("data: "))["error"]
    assert sent[0]["status"] == 200 and "[DONE]" not in text(sent)
    assert error["code"] == "engine_dead" and "killed" in error["message"] and sent[-1]["more_body"] is False


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_planned_stop_is_told_as_one(path, stream):
    made = make_app()
    made.client.hold = 3

    async def scenario():
        call = asyncio.ensure_future(drive(made.app, path, body_of(path, stream=stream)))
        while not made.client.waiting:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        made.client.draining = True
        await made.client.close()
        return await call, await drive(made.app, path, body_of(path))
    cut, late = asyncio.run(scenario())
    last = [f for f in text(cut).split("\n\n") if f][-1].removeprefix("data: ")
    error = json.loads(last)["error"]
    assert error["code"] == "server_stopping" and "send it again" in error["message"]
    assert "engine" not in error["message"]
    assert cut[0]["status"] == (200 if stream else 503) and late[0]["status"] == 503
    assert json.loads(text(late))["error"]["code"] == "server_stopping"


def test_engine_death_in_a_buffered_answer_is_503():
    made = make_app()
    made.client.die_after = 3
    assert run(made, "/v1/chat/completions")[0]["status"] == 503


def test_an_error_before_the_first_token_is_no_200():
    made = make_app()
    made.client.die_after = 0
    sent = run(made, "/v1/chat/completions", stream=True)
    assert sent[0]["status"] == 503 and json.loads(sent[1]["body"])["error"]["code"] == "engine_dead"


def test_an_error_after_a_comment_goes_into_the_stream():
    made = make_app(server={"sse_ping": 0.03}, delay=0.1)
    made.client.die_after = 0
    sent = run(made, "/v1/chat/completions", stream=True)
    assert sent[0]["status"] == 200 and ": ping" in text(sent) and '"engine_dead"' in text(sent)


@pytest.mark.parametrize("stream", [False, True])
def test_an_abort_by_the_server_is_an_error_to_the_client(stream):
    made = make_app()
    made.client.hold = 2

    async def scenario():
        call = asyncio.ensure_future(drive(made.app, "/v1/chat/completions",
                                           body_of("/v1/chat/completions", stream=stream)))
        while not made.client.submits:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.02)
        (_, id), = made.app.state.server.running
        sent = await drive(made.app, "/abort_request", json.dumps({"rid": id}).encode())
        assert json.loads(sent[1]["body"]) == {"aborted": 1}
        return await call

    sent = asyncio.run(asyncio.wait_for(scenario(), SOON))
    assert json.loads(text(sent).split("data: ")[-1])["error"]["code"] == "aborted"
    if not stream:
        assert sent[0]["status"] == 503 and (b"x-should-retry", b"false") in sent[0]["headers"]


# ---- the official client over a socket

@pytest.fixture(scope="module")
def live():
    made = make_app(server={"api_key": "sekret"}, delay=0.001)
    with listening(made.app) as made.url:
        yield made


@pytest.fixture
def sdk(live):
    with openai.OpenAI(base_url=live.url + "/v1", api_key="sekret", max_retries=0) as client:
        yield client


def test_sdk_chat(sdk):
    value = sdk.chat.completions.create(model="tiny", messages=HI, max_tokens=7, temperature=0, logprobs=True,
                                        top_logprobs=2, n=2)
    assert [c.message.content for c in value.choices] == [TEXT[:7]] * 2
    assert value.usage.prompt_tokens_details.cached_tokens == 4 and value.usage.completion_tokens == 14
    assert value.choices[0].logprobs.content[0].top_logprobs[0].token == "o"


def test_sdk_stream(sdk):
    with sdk.chat.completions.stream(model="tiny", messages=HI, max_tokens=100, temperature=0,
                                     stream_options={"include_usage": True}) as stream:
        final = stream.until_done().get_final_completion()
    assert final.choices[0].message.content == TEXT and final.choices[0].finish_reason == "stop"
    assert final.usage.completion_tokens == len(TEXT) + 1


def test_sdk_completions(sdk):
    value = sdk.completions.create(model="tiny", prompt=["a", "b"], max_tokens=3, temperature=0, echo=True, logprobs=1)
    assert [c.text for c in value.choices] == ["aone", "bone"]
    chunks = list(sdk.completions.create(model="tiny", prompt="a", max_tokens=3, temperature=0, stream=True))
    assert "".join(c.choices[0].text for c in chunks) == "one"


def test_sdk_models(sdk):
    assert [m.id for m in sdk.models.list()] == ["tiny"] and sdk.models.retrieve("tiny").owned_by == "isthmus"


def test_sdk_errors(live, sdk):
    with pytest.raises(openai.BadRequestError) as bad:
        sdk.chat.completions.create(model="tiny", messages=HI, temperature=9)
    assert (bad.value.param, bad.value.code) == ("temperature", "invalid_value")
    with pytest.raises(openai.NotFoundError) as missing:
        sdk.chat.completions.create(model="nope", messages=HI)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        sdk.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * 1000}])
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=live.url + "/v1", api_key="wrong", max_retries=0).models.list()


def test_sdk_hears_of_an_error_in_the_stream(live, sdk, monkeypatch):
    plain = type(live.client)._run

    async def dies(self, submit):
        asyncio.get_running_loop().call_later(0.02, self._streams[submit.id].put, EngineDead("killed"))
        await plain(self, submit)

    monkeypatch.setattr(type(live.client), "_run", dies)
    with pytest.raises(openai.APIError, match="killed"):
        for _ in sdk.chat.completions.create(model="tiny", messages=HI, max_tokens=400, stream=True,
                                             extra_body={"ignore_eos": True}):
            pass


def test_closed_sockets_abort(live):
    """Forty clients leave after their first event or before it; nothing of them stays."""
    def leave(i: int) -> None:
        body = {"model": "tiny", "messages": HI, "stream": True, "max_tokens": 400, "ignore_eos": True, "seed": i}
        with httpx.Client(headers={"authorization": "Bearer sekret"}, verify=False) as http:
            with http.stream("POST", live.url + "/v1/chat/completions", json=body) as response:
                if i % 4:
                    next(response.iter_lines())

    before = len(live.client.submits)
    threads = [threading.Thread(target=leave, args=(i,)) for i in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    until(lambda: not live.client.waiting and not live.app.state.server.running)
    assert live.client.waiting == 0 and live.app.state.server.running == {}
    ids = {s.id for s in live.client.submits[before:]}
    assert len(ids) == 40 and ids <= set(live.client.aborts)


def test_http_answers_over_a_socket(live):
    with httpx.Client(base_url=live.url, headers={"authorization": "Bearer sekret"}) as http:
        assert http.post("/v1/completions", content=b"\xff", headers={"content-type": "application/json"}
                         ).status_code == 400
        big = http.post("/v1/completions", content=b"x" * (2**24 + 1), headers={"content-type": "application/json"})
        assert big.status_code == 413
    with httpx.Client(base_url=live.url, headers={"authorization": "Bearer sekret"}) as http:
        assert http.get("/v1/models").status_code == 200


def test_lifespan_ends_the_threads():
    made = make_app()
    with TestClient(made.app):
        pass
    for size in (SMALL + 1, LARGE + 1):
        with pytest.raises(RuntimeError, match="shutdown"):
            asyncio.run(made.app.state.server.threads.run(lambda: None, size))
