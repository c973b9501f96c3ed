"""The engine requests behind one HTTP request: started together, merged into one stream, ended together."""
from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from ..errors import EngineStopped, RequestError
from ..messages import Logprobs, SamplingParams, Submit, TextOutput, Watch, pack_ids
from ..processes.backlog import Tap, output_size
from .context import Server
from .errors import ABORTED
from .metrics import Clock
from .protocol import StreamOptions
from .terms import Terms
from .validate import nth_seed
from .wire import Usage, usage

MAX_SAID = 2000  # characters of a prompt or an answer in the log
MAX_TOLD = 4     # prompts, and answers


def wants_usage(options: StreamOptions | None) -> bool:
    """Does the stream end with a chunk that has the usage?"""
    return bool(options and options.include_usage)


def new_id(prefix: str) -> str:
    """A response id such as "chatcmpl-5f0c..."."""
    return f"{prefix}-{uuid.uuid4().hex}"


@dataclass
class Prompt:
    """One prompt: its ids, and how it is sampled. `text` is its text where the answer repeats it. shown: control tokens
    that leave text in the answer."""

    ids: np.ndarray
    params: SamplingParams
    text: str = ""
    shown: tuple[int, ...] = ()


@dataclass
class Choice:
    """All that arrived for one answer. scored: packed ids with their log-probabilities, output by output. size: bytes
    of ids in it, alternatives included."""

    prompt: Prompt
    text: list[str] = field(default_factory=list)
    tokens: list[bytes] = field(default_factory=list)
    scored: list[tuple[bytes, Logprobs]] = field(default_factory=list)
    prompt_logprobs: Logprobs | None = None
    finish: str | None = None
    stop_reason: str | int | None = None
    cached: int = 0
    completion: int = 0
    drafted: int = 0
    accepted: int = 0
    size: int = 0

    def count(self, output: TextOutput) -> None:
        """Take over the numbers of one output."""
        self.completion = output.completion_tokens
        self.drafted, self.accepted = output.drafted, output.accepted
        self.cached = max(self.cached, output.cached_tokens)
        self.finish, self.stop_reason = output.finish, output.stop_reason

    def add(self, output: TextOutput) -> None:
        """Take over all of one output."""
        self.count(output)
        self.size += output_size(output)
        self.text.append(output.text)
        self.tokens.append(output.tokens)
        if output.logprobs is not None:
            self.scored.append((output.tokens, output.logprobs))
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs

    def matched(self) -> str | int | None:
        """The request's own stop string or stop id that ended it; None for the model's end or the limit."""
        reason = self.stop_reason
        return reason if isinstance(reason, str) or reason in self.prompt.params.stop_token_ids else None


class Generation:
    """`n` answers to each prompt; choice i answers prompt i // n with the request's seed + i % n.

    first: when the first token arrived, by `time.perf_counter`; None until then. clocks: of the choices that have
    begun.
    """

    def __init__(self, server: Server, id: str, prompts: Sequence[Prompt], n: int, terms: Terms):
        self.server, self.id, self.prompts, self.n, self.terms = server, id, prompts, n, terms
        self.choices = [Choice(prompt) for prompt in prompts for _ in range(n)]
        self.first: float | None = None
        self.clocks: list[Clock | None] = [None] * len(self.choices)
        self._said = [""] * len(self.choices) if server.config.server.log_contents else None

    @property
    def model(self) -> str:
        """What answers: an adapter's name, or the model's."""
        return self.terms.model or self.server.model

    def _submit(self, index: int, id: str) -> tuple[Submit, Watch]:
        prompt = self.choices[index].prompt
        params = prompt.params
        if index % self.n:
            params = msgspec.structs.replace(params, seed=nth_seed(params.seed, index % self.n))
        terms = self.terms
        submit = Submit(id, pack_ids(prompt.ids), params, terms.domain, terms.priority, time.monotonic(), terms.tenant,
                        terms.ttft, terms.hint, terms.adapter)
        return submit, Watch(id, params.stop, params.include_stop, params.skip_special, params.min_tokens,
                             prompt.shown)

    async def outputs(self, tap: Tap | None = None) -> AsyncIterator[tuple[int, TextOutput]]:
        """(choice, output) pairs as they come. Closing this early, or cancelling its task, aborts what still runs. tap:
        of a single choice, see `EngineClient.generate`."""
        key = self.terms.tenant, self.id
        if key in self.server.running:
            raise RequestError(f"request id {self.id!r} is in use", param="rid")
        name = f"{self.id}~{next(self.server.serial)}"  # another tenant may have this id, and another request this-0
        ids = [name] if len(self.choices) == 1 else [f"{name}-{i}" for i in range(len(self.choices))]
        self.server.metrics.call(self.n)
        self.server.running[key] = tuple(ids)
        try:
            merged = self._one(0, ids[0], tap) if len(ids) == 1 else self._merge(ids)
            async with aclosing(merged):
                async for pair in merged:
                    yield pair
        finally:
            del self.server.running[key]

    async def _one(self, index: int, id: str, tap: Tap | None = None) -> AsyncIterator[tuple[int, TextOutput]]:
        prompt = self.choices[index].prompt
        clock = self.server.metrics.clock(len(prompt.ids), prompt.params.max_tokens)
        self.clocks[index] = clock
        finish = "abort"

        def note(output: TextOutput) -> None:
            clock.output(output.completion_tokens, output.queued if output.queued >= 0 else None)
            if self.first is None and output.completion_tokens:
                self.first = time.perf_counter()
            if self._said is not None:
                self._said[index] = (self._said[index] + output.text)[:MAX_SAID]

        def take(output: TextOutput) -> bool:
            taken = tap(output)
            if taken:
                note(output)
            return taken

        try:
            stream = self.server.client.generate(*self._submit(index, id), tap and take)
            async with aclosing(stream):
                async for output in stream:
                    note(output)
                    finish = output.finish or finish
                    yield index, output
        except EngineStopped:
            raise
        except Exception:
            finish = "error"
            raise
        finally:
            clock.end(finish)

    async def _merge(self, ids: list[str]) -> AsyncIterator[tuple[int, TextOutput]]:
        # What waits beyond one output a choice waits where it is joined: in the client.
        queue: asyncio.Queue[tuple[int, TextOutput] | BaseException | None] = asyncio.Queue(len(ids))

        async def pump(index: int, id: str) -> None:
            last: BaseException | None = None
            try:
                async with aclosing(self._one(index, id)) as outputs:
                    async for pair in outputs:
                        await queue.put(pair)
            except Exception as error:  # carried to the reader, who raises it
                last = error
            await queue.put(last)

        tasks = [asyncio.ensure_future(pump(i, id)) for i, id in enumerate(ids)]
        try:
            left = len(tasks)
            while left:
                item = await queue.get()
                if item is None:
                    left -= 1
                elif isinstance(item, BaseException):
                    raise item
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def collect(self) -> list[Choice]:
        """All answers, complete."""
        async with aclosing(self.outputs()) as outputs:
            async for index, output in outputs:
                self.choices[index].add(output)
        return self.choices

    def asked_text(self) -> str:
        """The prompts' beginnings, for a log that is to have them."""
        decode = self.server.text.decode
        return "\n---\n".join(decode(p.ids[:MAX_SAID], False)[:MAX_SAID] for p in self.prompts[:MAX_TOLD])

    def said_text(self) -> str:
        """The answers' beginnings, where the log is to have them."""
        return "\n---\n".join((self._said or [])[:MAX_TOLD])

    def usage(self) -> Usage:
        """Tokens so far. A prompt counts once however often it is answered."""
        return usage(sum(len(prompt.ids) for prompt in self.prompts),
                     sum(choice.completion for choice in self.choices),
                     sum(choice.cached for choice in self.choices[::self.n]), 0,
                     sum(choice.drafted for choice in self.choices), sum(choice.accepted for choice in self.choices))

    def chunk_usage(self, options: StreamOptions | None) -> Usage | None | UnsetType:
        """`usage` of a chunk that has choices: OpenAI sends null there when the last chunk will have it."""
        if options is not None and options.continuous_usage_stats:
            return self.usage()
        return None if wants_usage(options) else UNSET


def check_ended(finish: str | None) -> None:
    """Raise when somebody else than the model or the client ended a request."""
    if finish == "abort":
        raise RequestError("the request was aborted by the server", status=503, code=ABORTED, kind="server_error")
