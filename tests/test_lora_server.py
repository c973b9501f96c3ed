"""Adapters over HTTP: chosen by name, listed, loaded and unloaded at run time; what is wrong is told."""
from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest
from isthmus.core.config import (
    AdapterSettings,
    CacheSettings,
    Config,
    ModelSettings,
    PlatformSettings,
    SchedulerSettings,
    ServerSettings,
)
from isthmus.core.errors import RequestError
from isthmus.core.processes.in_process import InProcessClient
from isthmus.core.server.adapters import FIRST, Catalogue
from isthmus.core.server.app import create_app
from isthmus.core.server.text_service import open_text
from starlette.testclient import TestClient

from .checkpoints import tiny_llama_gguf
from .effort import until
from .lora_files import drawn_for, write_adapter
from .serving import Serving

COST = 12  # seconds
ADMIN = {"authorization": "Bearer root"}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    root = tmp_path_factory.mktemp("lora-server")
    model = tiny_llama_gguf(root / "tiny.gguf")
    return root, model, [write_adapter(root / f"adapter{i}", drawn_for(model, i, 4, strength=3.0)) for i in range(3)]


@pytest.fixture(scope="module")
def call(files):
    """call(path, body, **headers) -> status and answer, of a server with one adapter named at start and two slots."""
    _, model, adapters = files
    config = Config(model=ModelSettings(model=str(model), dtype="float32"), platform=PlatformSettings(platform="cpu"),
                    cache=CacheSettings(kv_cache_memory="4MiB"), scheduler=SchedulerSettings(max_running_requests=8),
                    adapters=AdapterSettings(lora=(f"first={adapters[0]}",), max_loras=2, max_lora_adapters=4),
                    server=ServerSettings(admin_api_key="root", in_process=True))
    client = InProcessClient(config)
    app = create_app(client, open_text(config), config)
    with TestClient(app, base_url="http://localhost") as http:
        http.portal.call(client.start)

        def ask(path, body=None, headers=ADMIN):
            answer = http.get(path, headers=headers) if body is None else http.post(path, json=body, headers=headers)
            return answer.status_code, answer.json() if "json" in answer.headers["content-type"] else answer.text
        yield ask
        http.portal.call(client.close)


def said(call, model=None, **more) -> str:
    status, answer = call("/v1/completions", {
        "model": model, "prompt": [5, 6, 7, 8], "max_tokens": 12, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, **more})
    assert status == 200, answer
    assert model is None or answer["model"] == model
    return json.dumps(answer["choices"][0]["token_ids"])


def names(call) -> list[str]:
    return [card["id"] for card in call("/v1/models")[1]["data"]]


def test_a_request_chooses_by_name_and_the_list_has_parents(call):
    base = call("/v1/models")[1]["data"][0]
    card = call("/v1/models/first")[1]
    assert (card["id"], card["parent"], card["root"]) == ("first", base["id"], "first") and base["parent"] is None
    plain, adapted = said(call), said(call, "first")
    assert plain != adapted and said(call, base["id"]) == plain
    assert said(call, lora_path="first") == said(call, lora_adapter="first") == adapted
    status, chat = call("/v1/chat/completions", {"model": "first", "messages": [{"role": "user", "content": "a"}],
                                                 "max_tokens": 2})
    assert status == 200 and chat["model"] == "first"
    status, native = call("/generate", {"input_ids": [5, 6, 7, 8], "lora_path": "first", "sampling_params": {
        "max_new_tokens": 12, "temperature": 0, "ignore_eos": True}})
    assert status == 200 and json.dumps(native["output_ids"]) == adapted


def test_what_there_is_not_is_told_with_what_there_is(call):
    status, answer = call("/v1/completions", {"model": "second", "prompt": "a"})
    assert status == 404 and "'first'" in answer["error"]["message"] and answer["error"]["code"] == "model_not_found"
    status, answer = call("/generate", {"text": "a", "lora_path": "second"})
    assert (status, answer["error"]["param"]) == (404, "lora_path")


def test_adapters_come_and_go_while_the_server_runs(call, files):
    _, _, adapters = files
    before = said(call)
    assert call(LOAD, {"lora_name": "second", "lora_path": str(adapters[1])})[0] == 200
    assert names(call)[1:] == ["first", "second"]
    second = said(call, "second")
    assert second not in (before, said(call, "first"))
    status, answer = call(LOAD, {"lora_name": "second", "lora_path": str(adapters[2])})
    assert (status, answer["error"]["code"]) == (400, "already_loaded") and said(call, "second") == second
    assert call(LOAD, {"lora_name": "second", "lora_path": str(adapters[2]), "load_inplace": True})[0] == 200
    third = said(call, "second")
    assert third != second, "the new one of the same name, and nothing of the old one's cache"
    assert call(LOAD, {"lora_name": "third", "lora_path": str(adapters[1])})[0] == 200  # three adapters, two slots
    assert (said(call, "third"), said(call, "second"), said(call, "first")) == (second, third, said(call, "first"))
    for name in ("second", "third"):
        assert call(UNLOAD, {"lora_name": name})[0] == 200
        assert call("/v1/completions", {"model": name, "prompt": "a"})[0] == 404
    assert call(UNLOAD, {"lora_name": "third"})[0] == 404 and names(call)[1:] == ["first"] and said(call) == before


def test_metrics_tell_of_adapters(call):
    said(call, "first")
    text = call("/metrics")[1]
    assert 'isthmus_lora_adapters{model_name="tiny"} 1.0' in text and "isthmus_lora_moves_total" in text
    assert 'vllm:lora_requests_info{engine="0",max_lora="2",model_name="tiny"' in text


@pytest.mark.parametrize(("body", "status", "words"), [
    ({"lora_name": "x"}, 400, "lora_path"), ({"lora_name": "a b", "lora_path": "/x"}, 400, "no name for an adapter"),
    ({"lora_name": "tiny", "lora_path": "/x"}, 400, "the base model"),
    ({"lora_name": "x", "lora_path": "/nowhere/at/all"}, 400, "no such folder"),
    ({"lora_name": "x", "lora_path": "MODEL"}, 400, "no folder"),
])
def test_a_wrong_load_is_refused_and_leaves_nothing(call, files, body, status, words):
    body = {key: str(files[1]) if value == "MODEL" else value for key, value in body.items()}
    got, answer = call(LOAD, body)
    assert got == status and words in answer["error"]["message"], answer
    assert names(call)[1:] == ["first"]


def test_only_who_holds_the_admin_key_may_load(call):
    for path in (LOAD, UNLOAD, "/load_lora_adapter", "/unload_lora_adapter"):
        assert call(path, {"lora_name": "first", "lora_path": "/x"}, {})[0] in (401, 403)


class Engines:
    """A client whose engine knows one adapter at each start. idle: until somebody waits for it."""

    def __init__(self):
        self.asked, self.idle, self.info, self.refuses, self.hangs = [], False, {}, "", ""
        self.begin()

    def begin(self):
        self.info["adapters"] = [{"name": "start", "number": 1, "path": "/s", "loaded": 0.0}]

    async def settle(self):
        if self.idle:
            self.idle = False
            self.begin()
            await self.on_start()

    async def compute(self, name, timeout, lora, **arguments):
        if arguments.get("give_up"):
            self.given_up = lora, arguments["path"]
            return {"reading": False}
        self.asked.append((name, lora))
        if self.refuses == lora and name == "read_adapter":
            raise RequestError("it is not there any more")
        kept = [known for known in self.info["adapters"] if known["name"] != lora]
        if name == "add_adapter" and (len(self.asked) % 2 or lora == self.hangs):
            return {"reading": True}
        if name == "add_adapter":
            kept.append({"name": lora, "number": int(arguments["number"]), "path": arguments["path"], "loaded": 0.0})
        return {"adapters": kept, "found": len(kept) < len(self.info["adapters"]), "requests": 0}


@pytest.fixture
def engines():
    client = Engines()
    return client, Catalogue(SimpleNamespace(client=client, info=client.info))


def test_a_new_engine_gets_back_what_was_loaded_at_run_time(engines):
    client, catalogue = engines

    async def live():
        await client.on_start()
        await catalogue.load("x", "/x", False)
        await catalogue.load("start", "/other", True)
        before = catalogue.known
        client.begin()  # the engine was started anew
        assert catalogue.known == before, "requests may name them, and wait"
        await client.on_start()
        assert {known["name"]: known for known in client.info["adapters"]} == catalogue.known == before
        assert catalogue.choose("x", None)[1] >= FIRST, "one number is one adapter for good"
        await catalogue.unload("start")
        client.begin()
        client.refuses = "x"
        await client.on_start()
        assert catalogue.known == {} and client.info["adapters"] == []
    asyncio.run(live())


def test_adapters_come_and_go_while_the_model_rests(engines):
    client, catalogue = engines

    async def live():
        await client.on_start()
        await catalogue.load("x", "/x", False)
        await catalogue.load("y", "/y", False)
        client.idle, asked = True, len(client.asked)
        assert await catalogue.unload("x") == await catalogue.unload("start") == 0
        with pytest.raises(RequestError, match="there is no adapter 'x'; this server has y"):
            await catalogue.unload("x")
        assert client.idle and len(client.asked) == asked and list(catalogue.known) == ["y"]
        await catalogue.load("z", "/z", False)
        assert not client.idle and list(catalogue.known) == ["y", "z"]
        assert [known["name"] for known in client.info["adapters"]] == ["y", "z"]
    asyncio.run(live())


def test_files_that_are_read_for_ever_are_given_up(engines, monkeypatch):
    client, catalogue = engines
    monkeypatch.setattr("isthmus.core.server.adapters.READ_S", 10.0)
    monkeypatch.setattr("isthmus.core.server.adapters.POLL_S", 1.0)
    monkeypatch.setattr("isthmus.core.server.adapters.asyncio.sleep", lambda _, real=asyncio.sleep: real(0))
    client.hangs = "x"

    async def live():
        await client.on_start()
        with pytest.raises(RequestError, match="'x': '/x' is still being read after 10 s") as error:
            await catalogue.load("x", "/x", False)
        assert (error.value.status, error.value.param) == (504, "lora_path")
        assert client.asked == [("read_adapter", "x"), *[("add_adapter", "x")] * 10]
        waits = asyncio.ensure_future(catalogue.load("x", "/again", False))
        while client.asked[-1][0] != "add_adapter" or len(client.asked) == 11:
            await asyncio.sleep(0)
        assert client.given_up == ("x", "/x")
        waits.cancel()  # the server ends
        with pytest.raises(asyncio.CancelledError):
            await waits
        while client.given_up != ("x", "/again"):
            await asyncio.sleep(0)
        assert list(catalogue.known) == ["start"]
    asyncio.run(live())


@pytest.mark.slow
def test_a_server_whose_model_rests_knows_its_adapters(files, tmp_path):
    _, model, adapters = files
    quick = "import isthmus.core.processes.client as client; client.PING_S = 0.05"
    with Serving(str(model), "--lora", f"first={adapters[0]}", "--max-loras", "2", "--idle-unload", "0.5",
                 "--platform", "cpu", delay_ms=None, temporary=tmp_path, before=quick,
                 ISTHMUS_ADMIN_API_KEY="root") as server:
        def ask(path, body=None):
            answer = server.ask("POST" if body else "GET", path, body, **ADMIN)
            return answer.status, json.loads(answer.read())

        def rest():
            until(lambda: ask("/health")[1] == {"status": "idle"})

        def complete(name):
            return ask("/v1/completions", {"model": name, "prompt": "x", "max_tokens": 1})[0]
        rest()
        assert ask(LOAD, {"lora_name": "b", "lora_path": str(adapters[1])})[0] == 200
        rest()
        assert complete("b") == 200
        rest()
        assert ask(UNLOAD, {"lora_name": "b"})[0] == 200 and ask("/health")[1] == {"status": "idle"}
        assert complete("b") == 404 and complete("first") == 200
