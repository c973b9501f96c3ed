"""Who answers in `chat` and `generate`: an engine in this process, or a server somewhere."""
from __future__ import annotations

import contextlib
import http.client
import json
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ..config import Config
from ..errors import ConfigError, RequestError, printable
from ..settings import Resolved, list_settings
from .sampling import check_options
from .session import end_children, fetch, in_thread, make_local_client, platform_warning

Message = dict[str, str]
Prompt = str | Sequence[Message]

RESPONSE_TIMEOUT_S = 600
MAX_ANSWER = 2**24  # bytes of a whole answer, and of one event of a stream
TOO_LONG = "context_length_exceeded"
NO_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE")  # an SSLError's words for plain HTTP
NO_TEMPLATE = ("no chat template", "must provide a chat template")  # as servers put it


@dataclass
class Turn:
    """One answer in numbers. Times in seconds; decode counts from the first token on.

    prompt_tokens: 0 while the other side has not told; completion_tokens are then the pieces of text that came.
    """

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
        """"42 tokens, 31.5 tok/s, first after 0.12 s, 80 of 96 prompt tokens cached (83%)"."""
        if self.first is None or self.last is None:
            return "no tokens"
        spent, tokens = self.last - self.first, self.completion_tokens
        speed = f", {(tokens - 1) / spent:.1f} tok/s" if spent and tokens > 1 else ""
        share = f"({100 * self.cached_tokens // self.prompt_tokens}%)" if self.prompt_tokens else ""
        cached = f", {self.cached_tokens} of {self.prompt_tokens} prompt tokens cached {share}" if share else ""
        return (f"{'' if self.prompt_tokens else 'about '}{tokens} token{'' if tokens == 1 else 's'}{speed}, first "
                f"after {self.first - self.began:.2f} s{cached}")

    def cut(self, limit: int | None) -> str:
        """Why the answer ends in the middle, or "". `limit`: the most tokens that were asked for."""
        if self.finish != "length":
            return ""
        if limit is not None and self.completion_tokens >= limit:
            return f"cut at max_tokens {limit}"
        return "cut at the end of the context"


class LocalBackend:
    """The engine in a thread of this process."""

    def __init__(self, config: Config):
        self.config = config
        self.name = self.warning = ""
        self.client: Any = None
        self.text: Any = None

    async def open(self, progress: Any) -> None:
        """Fetch the model and open its text side; `name` and `can_chat` are known then."""
        import asyncio  # --help can do without
        loop = asyncio.get_running_loop()
        self.config = await in_thread(fetch, self.config, lambda *args: loop.call_soon_threadsafe(progress, *args))
        from ..server.text_service import open_text
        self.text = await in_thread(open_text, self.config)
        self.name = self.config.model.served_model_name or Path(self.config.model.model).stem

    async def load(self, progress: Any) -> None:
        """Load the engine."""
        self.client = make_local_client(self.config, self.text)
        await self.client.start(progress)
        self.name = f"{self.client.info['served_name']} on {self.client.info['platform']}"
        self.warning = platform_warning(self.client.info["platform"], self.client.info.get("platform_rank", 1))

    @property
    def can_chat(self) -> bool:
        """Whether the model has a chat template."""
        return self.text.template is not None

    @property
    def defaults(self) -> dict[str, Any]:
        """The sampling options that the model's makers recommend."""
        return self.client.info["sampling_defaults"]

    async def stream(self, prompt: Prompt, options: Mapping[str, Any], turn: Turn,
                     limit: int | None = None) -> AsyncIterator[str]:
        """The answer to a conversation, or the continuation of a text; numbers go into `turn`.

        limit: tokens of the answer unless `options` has max_tokens; None = as many as the context leaves.
        Raises `RequestError` for what cannot be served.
        """
        import asyncio

        from ..messages import Submit, Watch, pack_ids
        from ..server.validate import Bounds, output_limit, sampling_params
        if isinstance(prompt, str):
            ids = await asyncio.to_thread(self.text.encode, prompt)
        else:
            ids = await asyncio.to_thread(self.text.encode_chat, prompt)
        bounds = Bounds(self.client.info["vocab_size"], self.client.info["max_model_len"], 1, self.defaults)
        fields = check_options(options)
        room = output_limit(fields.max_tokens, limit, len(ids), bounds, "messages")
        params = sampling_params(fields, bounds, room)
        submit = Submit(secrets.token_hex(8), pack_ids(ids), params, arrival=time.monotonic())
        watch = Watch(submit.id, params.stop, params.include_stop, params.skip_special, params.min_tokens)
        async with aclosing(self.client.generate(submit, watch)) as outputs:
            async for output in outputs:
                turn.mark()
                turn.prompt_tokens = turn.prompt_tokens or output.prompt_tokens or len(ids)
                turn.cached_tokens = max(turn.cached_tokens, output.cached_tokens)
                turn.completion_tokens, turn.finish = output.completion_tokens, output.finish
                yield output.text

    async def close(self) -> None:
        """Stop the engine, or the download."""
        if self.client is not None:
            await self.client.close()
        end_children()


class RemoteBackend:
    """A server that speaks OpenAI's API; `url` with or without /v1. timeout: seconds without a word from it."""

    def __init__(self, url: str, model: str | None = None, api_key: str | None = None,
                 timeout: float = RESPONSE_TIMEOUT_S):
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # a port that is no number, brackets without an address
            valid = False
        if not valid:
            raise ConfigError(f"--url {url}: expected something like http://127.0.0.1:8000")
        self.secure, self.address = parts.scheme == "https", parts.netloc
        self.root_path = parts.path.rstrip("/").removesuffix("/v1")
        self.path, self.root = self.root_path + "/v1", f"{parts.scheme}://{parts.netloc}{self.root_path}"
        self.timeout, self.model, self.headers = timeout, model, {"Content-Type": "application/json"}
        if api_key:
            self.headers["Authorization"] = f"Bearer {api_key}"
        self.name, self.warning, self.can_chat, self.defaults = "", "", True, {}

    async def open(self, progress: Any) -> None:
        """Ask the server what it serves, and whether that can chat."""
        progress(f"connect to {self.address}", 0, 0)
        served = await in_thread(self.served)
        if self.model and self.model not in served:
            raise ConfigError(f"{self.address} has no model {self.model}; it serves {', '.join(served[:8])}")
        self.model = self.model or served[0]
        self.can_chat = await in_thread(self._has_template)
        self.name = printable(f"{self.model} at {self.address}")

    async def load(self, progress: Any) -> None:
        """The server has loaded it."""

    async def stream(self, prompt: Prompt, options: Mapping[str, Any], turn: Turn,
                     limit: int | None = None) -> AsyncIterator[str]:
        """As `LocalBackend.stream`. Where `limit` does not fit the context, the server's own default counts."""
        body: dict[str, Any] = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        body |= {"prompt": prompt} if isinstance(prompt, str) else {"messages": list(prompt)}
        body |= options
        tries = [body] if limit is None or "max_tokens" in options else [body | {"max_tokens": limit}, body]
        for asked in tries:
            try:
                async with aclosing(self._stream(asked, turn)) as pieces:
                    async for piece in pieces:
                        yield piece
                return
            except RequestError as error:
                if error.code != TOO_LONG or turn.first is not None or asked is body:
                    raise

    async def _stream(self, body: Mapping[str, Any], turn: Turn) -> AsyncIterator[str]:
        """One request. Leaving early closes the connection, which ends the request over there."""
        import asyncio
        loop, queue = asyncio.get_running_loop(), asyncio.Queue()
        connection, opened = self._connect(), []
        path = self.path + ("/completions" if "prompt" in body else "/chat/completions")

        def put(item: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: who asked has left
                loop.call_soon_threadsafe(queue.put_nowait, item)

        def read() -> None:
            try:
                connection.connect()
                opened.append(connection.sock)
                for event in self._events(connection, path, body):
                    put(event)
                put(None)
            except RequestError as error:
                put(error)
            except Exception as error:  # carried to the reader below
                put(self._unreachable(error))

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
        return kind(self.address, timeout=self.timeout)

    def _unreachable(self, error: Exception) -> RequestError:
        if getattr(error, "reason", None) in NO_TLS:
            return RequestError(f"{self.address} does not speak https: --url http://{self.address}", status=502)
        reason = (getattr(error, "strerror", None) or str(error) or type(error).__name__).lower()
        return RequestError(f"no server answers at {self.address} ({reason}): start one with `isthmus serve`, or check "
                            "--url", status=502)

    def _request(self, connection: Any, method: str, path: str, body: Any = None) -> http.client.HTTPResponse:
        try:
            connection.request(method, path, body and json.dumps(body).encode(), self.headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from None
        if response.status == 401:
            sent = "Authorization" in self.headers
            raise RequestError(f"{self.address} {'refuses this' if sent else 'asks for an'} API key: give "
                               f"{'another' if sent else 'it'} as --api-key or ISTHMUS_API_KEY", status=401)
        if response.status != 200:
            text = response.read(100_000).decode(errors="replace")
            known = _error(text)
            raise RequestError(printable(str(known.get("message") or text.strip()[:500]
                                             or f"{self.address} answered {response.status}")),
                               status=response.status, code=known.get("code"))
        return response

    def get_json(self, method: str, path: str, body: Any = None) -> Any:
        """The JSON of a whole answer, for which the server has `timeout` seconds, and `MAX_ANSWER` bytes.

        Raises `ValueError` for what is no JSON.
        """
        with self._one_answer() as connection:
            data = self._request(connection, method, path, body).read(MAX_ANSWER + 1)
        if len(data) > MAX_ANSWER:
            raise self._too_much()
        try:
            return json.loads(data)
        except RecursionError:
            raise ValueError("it nests too deeply") from None

    @contextlib.contextmanager
    def _one_answer(self) -> Iterator[Any]:
        """A connection that ends after `timeout` seconds: one that gets a byte now and then would last for ever."""
        connection, late = self._connect(), threading.Event()
        try:
            connection.connect()
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from None
        sock = connection.sock  # an answer without a length takes it from the connection

        def end() -> None:
            late.set()
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(self.timeout, end)
        timer.daemon = True
        timer.start()
        try:
            yield connection
        except (OSError, http.client.HTTPException) as error:
            if not late.is_set():
                raise self._unreachable(error) from None
        except ValueError:  # a refusal, or what comes of a connection that was cut
            if not late.is_set():
                raise
        finally:
            timer.cancel()
            connection.close()
        if late.is_set():
            raise RequestError(f"{self.address} gave no whole answer in {self.timeout:g} s", status=504)

    def _too_much(self) -> RequestError:
        return RequestError(f"{self.address} answers with more than {MAX_ANSWER} bytes at once", status=502)

    def served(self) -> list[str]:
        """Names of its models. `ConfigError` for what is no server with this API."""
        try:
            return [entry["id"] for entry in self.get_json("GET", self.path + "/models")["data"]] or ["default"]
        except RequestError as error:
            if error.status != 404:
                raise
        except (ValueError, LookupError, TypeError):  # something else than this API answers
            pass
        raise ConfigError(f"--url: {self.address} has no {self.path}/models, so it is not the address of a server "
                          "that speaks OpenAI's API, such as http://127.0.0.1:8000")

    def _has_template(self) -> bool:
        """False when the server says that it cannot chat. Only those with /tokenize can be asked without an answer."""
        try:
            self.get_json("POST", self.root_path + "/tokenize",
                          {"model": self.model, "messages": [{"role": "user", "content": "hello"}]})
        except (RequestError, ValueError) as error:
            return not any(words in str(error) for words in NO_TEMPLATE)
        return True

    def _events(self, connection: Any, path: str, body: Any) -> Any:
        """The JSON of each server-sent event up to [DONE]; comments and other fields are skipped."""
        response = self._request(connection, "POST", path, body)
        while line := response.readline(MAX_ANSWER + 1):
            if len(line) > MAX_ANSWER:
                raise self._too_much()
            data = line.decode().removeprefix("data:").strip() if line.startswith(b"data:") else ""
            if data == "[DONE]":
                return
            if data:
                event = json.loads(data)
                if "error" in event:
                    known = _error(data)
                    raise RequestError(printable(str(known.get("message") or data[:500])), status=500,
                                       code=known.get("code"))
                yield event


def _error(text: str) -> dict[str, Any]:
    """What is inside OpenAI's error envelope; {} for anything else."""
    try:
        found = json.loads(text)["error"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {"message": str(found)}


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
        turn.completion_tokens += not turn.prompt_tokens
    return piece


def add_backend_arguments(parser: Any) -> None:
    """Flags that choose a server instead of an engine here."""
    parser.add_argument("--url", metavar="URL", help="ask a running server instead of loading the model here")
    parser.add_argument("--api-key", dest="url_key", metavar="KEY", help="key for --url; ISTHMUS_API_KEY unless given")


def own_key(resolved: Resolved) -> str | None:
    """The key to send to a server of ours: of several that the settings name, the first."""
    return (resolved.config.server.api_key or "").split(",")[0].strip() or None


def make_backend(arguments: Any, resolved: Resolved) -> LocalBackend | RemoteBackend:
    """The one that the flags choose. Raises `ConfigError` for a flag that the other one needs."""
    given = [name for name, origin in resolved.origin.items() if origin == "command line"]
    if not arguments.url:
        if arguments.url_key:
            raise ConfigError("--api-key is the key for a server: add --url, or leave it out")
        return LocalBackend(resolved.config)
    if here := [list_settings()[name].flag for name in given if name != "model"]:
        raise ConfigError(f"{here[0]} is for an engine in this process, and with --url the server decides: leave one "
                          "of them out")
    model = resolved.config.model.model if "model" in given else None
    return RemoteBackend(arguments.url, model, arguments.url_key or own_key(resolved))
