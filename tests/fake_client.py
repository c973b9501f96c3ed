"""A client and a tokenizer for tests of the server: planned texts at once, and a record of what came in."""
from __future__ import annotations

import asyncio
import codecs
from types import SimpleNamespace
from typing import Any

import numpy as np
from isthmus.core.errors import EngineDead
from isthmus.core.messages import Abort, Logprobs, TextOutput, TextOutputs, pack_ids, refused, unpack_ids
from isthmus.core.processes.client import EngineClient

START, END, PAD = 256, 257, 258
TEXT = "one two three four five six seven eight nine ten "
MARKS = {"<|im_start|>": START, "<|im_end|>": END}
VOCAB = 300      # of the model
CONTEXT = 512


class ByteTokenizer:
    """One token per byte, and two marks. The model's vocabulary is larger, as padded vocabularies are."""

    vocab_size, bos_id, eos_ids, special_ids, add_bos = 259, None, (END,), frozenset((START, END, PAD)), False
    max_token_bytes = 12

    def encode(self, text: str, add_special: bool = False, parse_special: bool = False) -> list[int]:
        data, ids = text.encode(), []
        while data:
            mark = next((m for m in MARKS if parse_special and data.startswith(m.encode())), None)
            ids.append(MARKS[mark] if mark else data[0])
            data = data[len(mark):] if mark else data[1:]
        return ids

    def token_bytes(self, id: int) -> bytes:
        if not 0 <= id < self.vocab_size:
            raise IndexError(id)
        return bytes([id]) if id < 256 else self.id_to_token(id).encode()

    def id_to_token(self, id: int) -> str:
        return {**{v: k for k, v in MARKS.items()}, PAD: "<pad>"}.get(id) or bytes([id]).decode("latin1")

    def decode(self, ids: Any, skip_special: bool = True) -> str:
        ids = [int(i) for i in ids if not (skip_special and int(i) in self.special_ids) and int(i) < self.vocab_size]
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")


class ChatMarks:
    """A ChatML template that keeps contents apart from marks; `calls` records the messages and options."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[dict], dict]] = []
        self.tokenizer = ByteTokenizer()

    def encode(self, messages: list[dict], tools: Any = None, add_generation_prompt: bool = True,
               continue_final_message: bool = False, **kwargs: Any) -> list[int]:
        self.calls.append((messages, kwargs))
        ids: list[int] = []
        for message in messages:
            ids += [START, *self.tokenizer.encode(f"{message['role']}\n{message['content']}"), END, 10]
        if continue_final_message:
            ids = ids[:-2]
        return ids + ([START, *self.tokenizer.encode("assistant\n")] if add_generation_prompt else [])


class FakeClient(EngineClient):
    """Answers every request with `text` (or `texts[prompt]`), one token an output, every `delay` seconds.

    burst: send faster than anybody reads instead of each output after the one before was read.
    hold: stop sending after that many tokens. refuse: a `RequestError` for every request. die_after: the engine dies
    after that many tokens. submits, watches, aborts: what came in.
    """

    def _report(self) -> None:
        """It never hangs."""

    def _processor_time(self) -> float:
        return 0.0

    def __init__(self, config: Any, text: str = TEXT, delay: float = 0.0):
        super().__init__(config)
        self.info = {"model": "/models/tiny", "served_name": "tiny", "max_model_len": CONTEXT, "vocab_size": VOCAB,
                     "page_size": 16, "pages": 64}
        self.text, self.delay = text, delay
        self.texts: dict[str, str] = {}
        self.hold = self.die_after = self.refuse = None
        self.burst = False
        self.stats: dict[str, Any] = {}
        self.submits, self.watches, self.aborts = [], [], []
        self.flushes = 0
        self._tasks: dict[str, asyncio.Task] = {}
        self._visible: dict[str, str] = {}
        self.tokenizer = ByteTokenizer()
        self._serve()

    def _send(self, message: Any) -> None:
        if isinstance(message, Abort):
            for id in message.ids:
                self.aborts.append(id)
                task = self._tasks.pop(id, None)
                if task is not None:
                    task.cancel()
                    self._receive(TextOutputs([TextOutput(id, "", b"", "abort")]))

    def _send_request(self, submit: Any, watch: Any) -> None:
        self.submits.append(submit)
        self.watches.append(watch)
        if self.refuse is not None:
            error = refused(submit.id, self.refuse)
            output = TextOutput(submit.id, "", b"", "error", error=error.error, status=error.status, code=error.code,
                                param=error.param)
            asyncio.get_running_loop().call_soon(self._receive, TextOutputs([output]))
            return
        self._tasks[submit.id] = asyncio.ensure_future(self._run(submit))

    async def start(self, progress: Any = None) -> None:
        self._serve()

    async def command(self, name: str, timeout: float = 60.0) -> dict[str, Any]:
        if self._state != "ready":
            raise EngineDead(self._reason)
        self.flushes += name == "flush_cache"
        return self.stats if name == "stats" else {"flushed_pages": 3}

    def fail(self, reason: str = "scheduler: killed") -> None:
        """The engine is gone."""
        self._end("dead", reason)

    def load(self) -> None:
        """The engine is not there yet."""
        self._state, self._reason = "loading", "the model is loading: weights"

    async def _run(self, submit: Any) -> None:
        prompt = unpack_ids(submit.prompt)
        plan = self._plan(submit, self.tokenizer.decode(prompt))
        shown = 0
        if not plan:  # max_tokens 0: the prompt is scored
            self._receive(TextOutputs([TextOutput(submit.id, "", b"", "length", prompt_tokens=len(prompt),
                                                  prompt_logprobs=self._prompt_scores(submit, prompt))]))
        for i, (token, end, finish, reason) in enumerate(plan):
            if not self.burst:
                await self._until_read(submit.id)
            elif i % 16 == 0:
                await asyncio.sleep(0)
            if self.die_after == i:
                self.fail()
                return
            if self.hold == i:
                await asyncio.sleep(3600)
            last = finish is not None
            if last:
                self._tasks.pop(submit.id, None)
            k = submit.params.logprobs
            self._receive(TextOutputs([TextOutput(
                submit.id, self._visible[submit.id][shown:end], pack_ids([token]), finish, reason,
                prompt_tokens=len(prompt) if i == 0 else 0, cached_tokens=min(len(prompt) - 1, 4) if i == 0 else 0,
                completion_tokens=i + 1, logprobs=None if k is None else scores([token], k),
                prompt_logprobs=self._prompt_scores(submit, prompt) if i == 0 else None)]))
            shown = end

    async def _until_read(self, id: str) -> None:
        await asyncio.sleep(self.delay)
        while id in self._streams and self._streams[id]._items:
            await asyncio.sleep(self.delay)

    def _plan(self, submit: Any, prompt: str) -> list[tuple[int, int, str | None, str | int | None]]:
        """Per token: id, characters visible after it, finish, stop reason."""
        params = submit.params
        text = self.texts.get(prompt, self.text)
        if params.temperature:
            text = f"{params.seed % 1000:03d} " + text
        ids = list(text.encode())
        while params.ignore_eos and len(ids) < params.max_tokens:
            ids += ids
        ids = ids[:params.max_tokens]
        cuts = [(text.find(stop), stop) for stop in params.stop if stop in text]
        cut, stop = min(cuts, default=(len(text), None))
        if params.include_stop and stop:
            cut += len(stop)
        self._visible[submit.id] = bytes(ids).decode("utf-8", "ignore")[:cut if stop else None]
        decoder, plan, length = codecs.getincrementaldecoder("utf-8")(), [], 0
        for id in ids:
            length += len(decoder.decode(bytes([id])))
            ends = stop is not None and length >= text.find(stop) + len(stop)
            plan.append((id, min(length, len(self._visible[submit.id])), *(("stop", stop) if ends else (None, None))))
            if ends:
                return plan
        if len(ids) < params.max_tokens:
            plan.append((END, length, "stop", END))
        elif plan:
            plan[-1] = (plan[-1][0], len(self._visible[submit.id]), "length", None)
        return plan

    def _prompt_scores(self, submit: Any, prompt: Any) -> Logprobs | None:
        k = submit.params.prompt_logprobs
        return None if k is None else scores(prompt[1:].tolist(), k)


def scores(ids: list[int], k: int) -> Logprobs:
    """The chosen token is the best, then id + 1, id + 2, ..."""
    n = len(ids)
    top_ids = (np.array(ids)[:, None] + np.arange(k)) % 256 if n else np.zeros((0, k))
    top = np.tile(-0.25 - np.arange(k), (n, 1))
    return Logprobs(np.full(n, -0.25, "<f4").tobytes(), k, pack_ids(top_ids), top.astype("<f4").tobytes())


def make_app(server: dict | None = None, model: dict | None = None, scheduler: dict | None = None,
             cache: dict | None = None, **client: Any) -> SimpleNamespace:
    """An app over a `FakeClient`: `.app`, `.client`, `.template`."""
    from isthmus.core.config import CacheSettings, Config, ModelSettings, SchedulerSettings, ServerSettings
    from isthmus.core.server.app import create_app
    from isthmus.core.server.text_service import TextService
    config = Config(server=ServerSettings(**{"allowed_hosts": ("*",), **(server or {})}),
                    model=ModelSettings(**(model or {})), scheduler=SchedulerSettings(**(scheduler or {})),
                    cache=CacheSettings(**(cache or {})))
    fake, template = FakeClient(config, **client), ChatMarks()
    return SimpleNamespace(app=create_app(fake, TextService(ByteTokenizer(), template), config), client=fake,
                           template=template)


class Direct:
    """Stands for `core.server.connection.Direct`: what is written joins the messages, marked as direct."""

    def __init__(self, sent: list[dict]):
        self.sent, self.open = sent, True

    def write(self, data: bytes) -> None:
        assert self.open and data
        self.sent.append({"type": "http.response.body", "body": data, "more_body": True, "direct": True})


async def drive(app: Any, path: str, body: bytes, hang_up: Any = None, headers: dict | None = None,
                direct: Any = None) -> list[dict]:
    """One POST straight through ASGI; the client hangs up as soon as `hang_up(messages sent so far)` is true. direct:
    makes the extension of that name from the list of messages."""
    sent: list[dict] = []
    gone, chunks = asyncio.Event(), [body]
    fields = {"content-type": "application/json", "host": "localhost", **(headers or {})}

    async def receive() -> dict:
        if chunks:
            return {"type": "http.request", "body": chunks.pop(), "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict) -> None:
        sent.append(message)
        if hang_up is not None and hang_up(sent):
            gone.set()

    scope = {"type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "POST",
             "scheme": "http", "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
             "headers": [(k.encode(), v.encode()) for k, v in fields.items()], "client": ("test", 1),
             "server": ("test", 80), **({"extensions": {"isthmus.direct": direct(sent)}} if direct else {})}
    if hang_up is not None and hang_up(sent):
        asyncio.get_running_loop().call_later(0.02, gone.set)
    await app(scope, receive, send)
    return sent


def fixtures(**settings: Any) -> tuple[Any, Any]:
    """The fixtures `made`, what `make_app` gives for these settings, and `http`, a client for it in this process."""
    import pytest
    from starlette.testclient import TestClient

    @pytest.fixture
    def made():
        return make_app(**settings)

    @pytest.fixture
    def http(made):
        with TestClient(made.app) as client:
            yield client

    return made, http
