"""`isthmus run-batch`: OpenAI's batch files, answered by an engine started for them or by a server."""
from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from ..config import Config
from ..errors import ConfigError, RequestError, printable, shown
from ..logs import announce
from ..settings import SECRET, Resolved
from .backends import own_key
from .parser import add_model_argument
from .posting import Daemons, Poster, Reply, check_at_once, check_file, count_lines, json_lines
from .progress import ProgressLine
from .session import end_children, fetch, in_process, in_thread, make_local_client, make_process_client

ANSWER_S = 3600.0  # for one answer
RETRIES = 8        # of a request for which there is no place now
LONGEST_WAIT_S = 30.0
BEGIN = b'{"id": "'  # of an answer
MAX_ID = 512       # characters of a custom_id
MAX_TOLD = 300     # characters of a failure in the summary
AGAIN = (0, 408, 409, 429, 500, 502, 503, 504)  # statuses of a finished file that are tried again by the next run
URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/v1/rerank",
        "/rerank", "/v2/rerank", "/score", "/v1/score", "/generate", "/api/chat", "/api/generate", "/api/embed",
        "/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize")

Post = Callable[[str, bytes], Awaitable[Reply]]


class Asked(NamedTuple):
    """A line of the input: what to post, or what is wrong with it. id: the client's, None where there is none."""

    id: str | None
    url: str
    body: bytes
    error: RequestError | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument("-i", "--input", type=Path, metavar="FILE", help="requests, one JSON object a line")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE",
                        help="answers; what an earlier run has written there is kept, and not asked for again")
    parser.add_argument("--url", metavar="URL", help="a running server, instead of loading the model here")
    parser.add_argument("--key", metavar="KEY", help="key for --url; ISTHMUS_API_KEY unless given")
    parser.add_argument("--concurrency", type=int, default=256, metavar="N", help="most requests at once [256]")
    parser.add_argument("--overwrite", action="store_true", help="begin anew, whatever there is in the output")


def run(arguments: argparse.Namespace, resolved: Resolved) -> int:
    """0 when every request was answered with success, else 1."""
    ask = "which files? `isthmus run-batch -i requests.jsonl -o answers.jsonl`"
    source = check_file(arguments.input, ask)
    if arguments.output is None:
        raise ConfigError(ask)
    if arguments.output.exists() and (not arguments.output.is_file() or os.path.samefile(source, arguments.output)):
        raise ConfigError(f"--output {arguments.output}: it is no regular file, or the input itself")
    if arguments.key and not arguments.url:
        raise ConfigError("--key is the key for a server: add --url, or leave it out")
    at_once = check_at_once(arguments.concurrency)
    answers = Answers(arguments.output, arguments.overwrite)
    batch = Batch(source, answers, count_lines(source))
    with ProgressLine(sys.stderr) as line:
        if arguments.url:
            opened = remote(arguments.url, arguments.key or own_key(resolved), at_once)
        else:
            opened = local(resolved.config, line)
        try:
            asyncio.run(batch.run(opened, at_once, line))
        except KeyboardInterrupt:
            announce("isthmus: stopped; the same command goes on from here")
            raise
        finally:
            answers.close()
    announce(f"isthmus: {batch.summary()}")
    return 1 if batch.failed else 0


# ---- who answers

@asynccontextmanager
async def remote(url: str, key: str | None, at_once: int) -> Any:
    """A server somewhere."""
    poster = Poster(url, key, ANSWER_S)
    threads = Daemons(at_once)

    async def post(path: str, body: bytes) -> Reply:
        return await asyncio.wrap_future(threads.submit(poster.post, path, body))
    try:
        yield post
    finally:
        threads.close()


@asynccontextmanager
async def local(config: Config, line: ProgressLine) -> Any:
    """The server's own application, with nothing listening, over an engine that is started now."""
    loop, client = asyncio.get_running_loop(), None

    def progress(name: str, done: int, total: int | None) -> None:
        loop.call_soon_threadsafe(line, name, done, total)
    try:
        found = await in_thread(fetch, config, progress)
        found = replace(found, server=replace(found.server, **dict.fromkeys(SECRET), allowed_hosts=("*",),
                                              dump_requests=None))
        from ..server.app import create_app
        from ..server.text_service import open_text
        text = await in_thread(open_text, found)
        client = make_local_client(found, text) if in_process(found) else make_process_client(found)
        await client.start(line)
        app = create_app(client, text, found)
        async with app.router.lifespan_context(app):
            yield lambda path, body: post_to(app, path, body)
    finally:
        if client is not None:
            await client.close()
        end_children()


async def post_to(app: Any, path: str, body: bytes) -> Reply:
    """One request straight through ASGI."""
    began, parts, head, read, never = time.monotonic(), [], {}, [body], asyncio.Event()

    async def receive() -> dict[str, Any]:
        if read:
            return {"type": "http.request", "body": read.pop(), "more_body": False}
        await never.wait()
        raise AssertionError("nobody hangs up")

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            head.update(status=message["status"], headers={k.lower(): v for k, v in message["headers"]})
        else:
            parts.append(message.get("body", b""))

    fields = [(b"host", b"localhost"), (b"content-type", b"application/json"),
              (b"content-length", str(len(body)).encode())]
    await app({"type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1",
               "method": "POST", "scheme": "http", "path": path, "raw_path": path.encode(), "query_string": b"",
               "root_path": "", "headers": fields, "client": ("batch", 0), "server": ("localhost", 80)}, receive, send)
    headers, seconds = head["headers"], time.monotonic() - began
    return Reply(head["status"], b"".join(parts), headers.get(b"x-request-id", b"").decode("latin-1"), seconds, seconds)


async def pause(seconds: float) -> None:
    """Until a request is tried again."""
    await asyncio.sleep(seconds)


# ---- what is asked and answered

def list_requests(path: Path) -> Iterator[Asked]:
    """The lines of a batch file, each with what is wrong with it."""
    seen: set[str] = set()
    for number, entry in json_lines(path, "requests"):
        if isinstance(entry, RequestError):
            yield Asked(None, "", b"", entry)
            continue
        id, url, body = entry.get("custom_id"), entry.get("url"), entry.get("body")
        known = isinstance(id, str) and 0 < len(id) <= MAX_ID
        error = None
        if not known:
            error = f"line {number}: custom_id must be a text of 1 to {MAX_ID} characters; got {shown(id)}"
        elif id in seen:
            error = f"line {number}: the custom_id {shown(id)} is there twice"
        elif entry.get("method", "POST") != "POST":
            error = f"method is {shown(entry['method'])}; there is only POST"
        elif url not in URLS:
            error = f"url is {shown(url)}; there are: {', '.join(URLS)}"
        elif not isinstance(body, dict):
            error = f"body must be an object; got {shown(body)}"
        elif body.get("stream") is True:
            error = "body.stream is true; a batch has whole answers"
        elif url == "/v1/responses" and body.get("background") is True:
            error = "body.background is true; a batch waits for whole answers"
        if error:
            yield Asked(id if known and id not in seen else None, "", b"", RequestError(error, code="invalid_request"))
        else:
            yield Asked(id, url, json.dumps({**body, "stream": False} if url.startswith("/api/") else body).encode(),
                        None)
        if known:
            seen.add(id)


def _is_cut(path: Path, number: int) -> bool:
    """Is a file's last line, of this number, the beginning of an answer, cut off as a process ended?"""
    with open(path, "rb") as file:
        line = next(islice(file, number - 1, None))
    return not line.endswith(b"\n") and line[:len(BEGIN)] == BEGIN[:len(line)]


class Answers:
    """The output file. done: custom ids that need not be asked for again. Raises `ConfigError` for another file."""

    def __init__(self, path: Path, overwrite: bool):
        self.done: set[str] = set()
        kept, dropped, cut = [], False, 0
        if path.exists() and not overwrite:
            for number, entry in json_lines(path, "answers"):
                if not cut and isinstance(entry, RequestError):
                    cut, dropped = number, True
                    continue
                if cut or not {"custom_id", "response", "error"} <= entry.keys():
                    raise self._foreign(path, cut or number)
                status = (entry["response"] or {}).get("status_code", 0)
                again = entry["custom_id"] is None or not (status and status not in AGAIN)
                if again:
                    dropped = True
                else:
                    self.done.add(entry["custom_id"])
                    kept.append(number)
            if cut and not _is_cut(path, cut):
                raise self._foreign(path, cut)
        if dropped:
            self._rewrite(path, set(kept))
        try:
            self._file = open(path, "wb" if overwrite else "ab")
        except OSError as error:
            raise ConfigError(f"--output {path}: {(error.strerror or str(error)).lower()}") from None

    @staticmethod
    def _foreign(path: Path, number: int) -> ConfigError:
        return ConfigError(f"--output {path}, line {number}: this is no answer of a batch; name another file, or add "
                           "--overwrite")

    @staticmethod
    def _rewrite(path: Path, kept: set[int]) -> None:
        fresh = path.with_name(f".{path.name}.{os.getpid()}")
        with open(path, "rb") as old, open(fresh, "wb") as new:
            new.writelines(line for number, line in enumerate(old, 1) if number in kept)
        os.replace(fresh, path)

    def write(self, asked: Asked, reply: Reply | None, error: RequestError | None) -> None:
        """Add an answer, or why there is none."""
        response = fault = None
        if reply is not None and reply.status:
            try:
                body = json.loads(reply.body)
            except ValueError:
                body = reply.body.decode(errors="replace")[:1000]
            response = {"status_code": reply.status, "request_id": reply.request_id, "body": body}
        else:
            fault = {"code": (error.code if error else None) or "no_answer",
                     "message": error.message if error else reply.body.decode(errors="replace")}
        line = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": asked.id, "response": response, "error": fault}
        self._file.write(json.dumps(line, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class Batch:
    """One run over a batch file."""

    def __init__(self, source: Path, answers: Answers, total: int):
        self.source, self.answers, self.total = source, answers, total
        self.answered = self.failed = self.skipped = self.prompt_tokens = self.output_tokens = 0
        self.seconds, self.first_failure = 0.0, ""

    async def run(self, opened: Any, at_once: int, line: ProgressLine) -> None:
        """Ask for everything that is not answered yet, so many at once."""
        async with opened as post:
            began, running = time.monotonic(), set()
            try:
                for asked in list_requests(self.source):
                    if asked.id in self.answers.done:
                        self.skipped += 1
                        continue
                    while len(running) >= at_once:
                        done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                        self._raise(done)
                    running.add(asyncio.create_task(self._one(asked, post, line)))
                    await asyncio.sleep(0)
                while running:
                    done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    self._raise(done)
            finally:
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, return_exceptions=True)
            self.seconds = time.monotonic() - began

    @staticmethod
    def _raise(done: set[asyncio.Task[None]]) -> None:
        for task in done:
            task.result()

    async def _one(self, asked: Asked, post: Post, line: ProgressLine) -> None:
        reply = None
        if asked.error is None:
            for attempt in range(RETRIES):
                reply = await post(asked.url, asked.body)
                if reply.status not in (429, 503) or b'"engine_dead"' in reply.body:
                    break
                await pause(min(LONGEST_WAIT_S, 0.5 * 2**attempt))
        self.answers.write(asked, reply, asked.error)
        good = reply is not None and 200 <= reply.status < 300
        if not good and not self.first_failure:
            self.first_failure = self._told(asked, reply)
        self.answered += good
        self.failed += not good
        if good:
            self._count(reply.body)
        line("answer requests", self.answered + self.failed + self.skipped, self.total)

    @staticmethod
    def _told(asked: Asked, reply: Reply | None) -> str:
        """Which request it was, and why there is no answer."""
        why = asked.error.message if asked.error else ""
        if reply is not None:
            try:
                found = json.loads(reply.body)["error"]
                why = found if isinstance(found, str) else found["message"]
            except (ValueError, LookupError, TypeError):
                why = reply.body.decode(errors="replace").strip() or f"status {reply.status}"
        return printable(f"{f'{asked.id}: ' if asked.id else ''}{why}")[:MAX_TOLD]

    def _count(self, body: bytes) -> None:
        try:
            usage = json.loads(body).get("usage") or {}
        except (ValueError, AttributeError):
            return
        self.prompt_tokens += usage.get("prompt_tokens") or usage.get("input_tokens") or 0
        self.output_tokens += usage.get("completion_tokens") or usage.get("output_tokens") or 0

    def summary(self) -> str:
        """What came of it, in a line."""
        skipped = f", {self.skipped} were answered before" if self.skipped else ""
        speed = f", {self.output_tokens / self.seconds:.1f} tok/s" if self.output_tokens and self.seconds else ""
        first = f"; the first that failed: {self.first_failure}" if self.first_failure else ""
        return (f"{self.answered} requests answered in {self.seconds:.1f} s, {self.failed} failed{skipped}; "
                f"{self.prompt_tokens} prompt tokens, {self.output_tokens} output tokens{speed}{first}")
