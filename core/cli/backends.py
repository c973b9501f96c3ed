"""Who answers in `chat` and `generate`: an engine in this process, or a server somewhere."""
from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from ..config import Config
from ..errors import ConfigError, RequestError
from .session import fetch, in_thread, make_local_client, open_text

Message = dict[str, str]
Prompt = str | Sequence[Message]

NUMBERS = {"temperature": float, "top_p": float, "min_p": float, "top_k": int, "max_tokens": int, "seed": int,
           "repetition_penalty": float, "presence_penalty": float, "frequency_penalty": float}
RESPONSE_TIMEOUT_S = 600


@dataclass
class Turn:
    """One answer in numbers. Times in seconds; decode counts from the first token on."""

    began: float
    first: float | None = None
    last: float | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    finish: str | None = None

    def mark(self) -> None:
        """A token has arrived."""
        self.last = time.monotonic()
        self.first = self.first if self.first is not None else self.last

    def summary(self) -> str:
        """"42 tokens, 31.5 tok/s, first after 0.12 s, 80 of 96 prompt tokens cached"."""
        if self.first is None or self.last is None:
            return "no tokens"
        spent = self.last - self.first
        speed = f", {(self.completion_tokens - 1) / spent:.1f} tok/s" if spent and self.completion_tokens > 1 else ""
        return (f"{self.completion_tokens} tokens{speed}, first after {self.first - self.began:.2f} s, "
                f"{self.cached_tokens} of {self.prompt_tokens} prompt tokens cached")


class LocalBackend:
    """The engine in a thread of this process."""

    def __init__(self, config: Config):
        self.config = config
        self.name = ""
        self.client: Any = None
        self.text: Any = None

    async def start(self, progress: Any) -> None:
        """Fetch and load the model."""
        loop = asyncio.get_running_loop()
        local = await in_thread(fetch, self.config, lambda *args: loop.call_soon_threadsafe(progress, *args))
        self.text = await in_thread(open_text, local)
        self.client = make_local_client(local, self.text)
        await self.client.start(progress)
        self.name = f"{self.client.info['served_name']} on {self.client.info['platform']}"

    @property
    def can_chat(self) -> bool:
        """Whether the model has a chat template."""
        return self.text.template is not None

    async def stream(self, prompt: Prompt, options: Mapping[str, Any], turn: Turn) -> AsyncIterator[str]:
        """The answer to a conversation, or the continuation of a text; numbers go into `turn`."""
        import msgspec

        from ..messages import SamplingParams, Submit, Watch, pack_ids
        if isinstance(prompt, str):
            ids = await self.text.encode(prompt)
        else:
            ids = await self.text.encode_chat(prompt, sum(len(m["content"]) for m in prompt))
        room = self.client.info["max_model_len"] - len(ids)
        if room < 1:
            raise RequestError(f"the conversation has {len(ids)} tokens, the context is "
                               f"{self.client.info['max_model_len']}: /clear starts afresh")
        wanted = {"seed": secrets.randbits(31), **options}
        wanted["max_tokens"] = min(room, wanted.get("max_tokens") or room)
        params = msgspec.convert(wanted, SamplingParams)
        id = secrets.token_hex(8)
        submit = Submit(id, pack_ids(ids), params, arrival=time.monotonic())
        watch = Watch(id, params.stop, params.include_stop, params.skip_special, params.min_tokens)
        async with aclosing(self.client.generate(submit, watch)) as outputs:
            async for output in outputs:
                turn.mark()
                turn.prompt_tokens = turn.prompt_tokens or output.prompt_tokens or len(ids)
                turn.cached_tokens = max(turn.cached_tokens, output.cached_tokens)
                turn.completion_tokens, turn.finish = output.completion_tokens, output.finish
                yield output.text

    async def close(self) -> None:
        """Stop the engine."""
        if self.client is not None:
            await self.client.close()
        if self.text is not None:
            self.text.close()


class RemoteBackend:
    """A server that speaks OpenAI's API; `url` with or without /v1."""

    def __init__(self, url: str, model: str | None = None, api_key: str | None = None):
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url {url}: expected something like http://127.0.0.1:8000")
        self.secure, self.address = parts.scheme == "https", parts.netloc
        self.path = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        self.model, self.headers = model, {"Content-Type": "application/json"}
        if api_key:
            self.headers["Authorization"] = f"Bearer {api_key}"
        self.name = ""

    async def start(self, progress: Any) -> None:
        """Ask the server what it serves."""
        progress(f"connect to {self.address}", 0, 0)
        served = await asyncio.to_thread(self._models)
        self.model = self.model or served[0]
        self.name = f"{self.model} at {self.address}"

    @property
    def can_chat(self) -> bool:
        """The server decides."""
        return True

    async def stream(self, prompt: Prompt, options: Mapping[str, Any], turn: Turn) -> AsyncIterator[str]:
        """As `LocalBackend.stream`. Leaving early closes the connection, which ends the request over there."""
        body: dict[str, Any] = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        body |= options
        body |= {"prompt": prompt} if isinstance(prompt, str) else {"messages": list(prompt)}
        loop, queue = asyncio.get_running_loop(), asyncio.Queue()
        connection, opened = self._connect(), []
        path = self.path + ("/completions" if isinstance(prompt, str) else "/chat/completions")

        def put(item: Any) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, item)

        def read() -> None:
            try:
                connection.connect()
                opened.append(connection.sock)
                for event in self._events(connection, path, body):
                    put(event)
                put(None)
            except Exception as error:  # carried to the reader below
                put(error if isinstance(error, RequestError) else RequestError(f"{self.address}: {error}", status=502))

        threading.Thread(target=read, daemon=True).start()
        try:
            while (event := await queue.get()) is not None:
                if isinstance(event, Exception):
                    raise event
                if piece := _take(event, turn):
                    yield piece
        finally:
            for sock in opened:
                with contextlib.suppress(OSError):  # the other side may have closed it
                    sock.shutdown(socket.SHUT_RDWR)
            connection.close()

    async def close(self) -> None:
        """Nothing is kept open."""

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self.secure else http.client.HTTPConnection
        return kind(self.address, timeout=RESPONSE_TIMEOUT_S)

    def _request(self, connection: Any, method: str, path: str, body: Any = None) -> http.client.HTTPResponse:
        try:
            connection.request(method, path, body and json.dumps(body).encode(), self.headers)
            response = connection.getresponse()
        except OSError as error:
            raise RequestError(f"no server answers at {self.address}: {error}", status=502) from None
        if response.status != 200:
            text = response.read(100_000).decode(errors="replace")
            raise RequestError(_message(text) or f"{self.address} answered {response.status}", status=response.status)
        return response

    def _models(self) -> list[str]:
        connection = self._connect()
        try:
            data = json.loads(self._request(connection, "GET", self.path + "/models").read())
            return [entry["id"] for entry in data["data"]] or ["default"]
        finally:
            connection.close()

    def _events(self, connection: Any, path: str, body: Any) -> Any:
        """The JSON of each server-sent event up to [DONE]; comments and other fields are skipped."""
        for line in self._request(connection, "POST", path, body):
            data = line.decode().removeprefix("data:").strip() if line.startswith(b"data:") else ""
            if data == "[DONE]":
                return
            if data:
                event = json.loads(data)
                if "error" in event:
                    raise RequestError(_message(data) or data, status=500)
                yield event


def _message(text: str) -> str:
    try:
        return json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return text.strip()[:500]


def _take(event: Mapping[str, Any], turn: Turn) -> str:
    """The text of one chunk; its numbers go into `turn`."""
    if usage := event.get("usage"):
        turn.prompt_tokens, turn.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        turn.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    piece = ""
    for choice in event.get("choices", ()):
        piece += (choice.get("delta") or {}).get("content") or choice.get("text") or ""
        turn.finish = choice.get("finish_reason") or turn.finish
    if piece:
        turn.mark()
    return piece


def add_backend_arguments(parser: Any) -> None:
    """Flags that choose a server instead of an engine here."""
    parser.add_argument("--url", metavar="URL", help="ask a running server instead of loading the model here")
    parser.add_argument("--api-key", dest="url_key", metavar="KEY", help="key for --url; ISTHMUS_API_KEY unless given")


def make_backend(arguments: Any, config: Config) -> LocalBackend | RemoteBackend:
    """The one that the flags choose."""
    if arguments.url:
        return RemoteBackend(arguments.url, config.model.model, arguments.url_key or config.server.api_key)
    return LocalBackend(config)


def parse_option(name: str, value: str) -> Any:
    """A sampling option from text; raises `ConfigError` for an unknown name or a wrong number."""
    from .settings import suggest
    name = name.replace("-", "_")
    if name == "stop":
        return (value,)
    if name not in NUMBERS:
        raise ConfigError(f"there is no option {name}{suggest(name, [*NUMBERS, 'stop'])}; there are: "
                          f"{', '.join([*NUMBERS, 'stop'])}")
    try:
        return NUMBERS[name](value)
    except ValueError:
        raise ConfigError(f"{name}: {value!r} is not a {'whole ' if NUMBERS[name] is int else ''}number") from None


def add_sampling_arguments(parser: Any) -> None:
    """Flags for the sampling options."""
    group = parser.add_argument_group("sampling")
    for name, kind in NUMBERS.items():
        group.add_argument("--" + name.replace("_", "-"), dest=f"option_{name}", metavar="N" if kind is int else "X")
    group.add_argument("--stop", dest="option_stop", action="append", metavar="TEXT",
                       help="the answer ends before this text; may be repeated")


def given_options(arguments: Any) -> dict[str, Any]:
    """The sampling options that stand on the command line."""
    found = {name: parse_option(name, value) for name in NUMBERS
             if (value := getattr(arguments, f"option_{name}")) is not None}
    if arguments.option_stop:
        found["stop"] = tuple(arguments.option_stop)
    return found
