"""`POST /v1/completions`: raw prompts as text or token ids, one or many, with echo and scoring."""
from __future__ import annotations

import time
from typing import Any

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from ..messages import Logprobs, TextOutput, unpack_ids
from .answer import GenerationAnswer, respond
from .context import Server
from .generation import Choice, Generation, Prompt, check_ended, new_id, wants_usage
from .logprobs import LegacyShape
from .naming import as_sent, renamed
from .protocol import CompletionRequest, read
from .stream import Mold, event
from .terms import Caller
from .validate import (
    COMPLETION_TOKENS,
    Bounds,
    check_choices,
    check_ids,
    check_size,
    invalid,
    output_limit,
    sampling_params,
    split_prompts,
)
from .wire import Answer, LegacyLogprobs, TextChoice


async def completions(server: Server, request: Request) -> Response:
    """Continue one prompt or several, whole or as a stream."""
    return await respond(server, request, start)


def start(server: Server, caller: Caller, body: bytes) -> CompletionAnswer:
    """Check everything and prepare the engine requests; nothing runs yet."""
    asked = read(CompletionRequest, body)
    with renamed(as_sent(asked)):
        return prepare(server, caller, asked)


def prepare(server: Server, caller: Caller, asked: CompletionRequest) -> CompletionAnswer:
    """The same of a body that was read."""
    server.require_model(asked.model)
    n = asked.n or 1
    if asked.best_of is not None and asked.best_of != n:
        raise invalid("best_of", f"is {asked.best_of}; only the value of n ({n}) is supported")
    parts = split_prompts(asked.prompt)
    check_choices(len(parts), n, server.bounds)
    prompts = [read_prompt(server, asked, name, part) for name, part in parts]
    generation = Generation(server, new_id("cmpl"), prompts, n, server.terms(asked, caller))
    return CompletionAnswer(server, asked, generation)


def read_prompt(server: Server, asked: CompletionRequest, param: str, part: str | list[Any]) -> Prompt:
    """One prompt's ids and parameters."""
    bounds: Bounds = server.bounds
    if isinstance(part, str):
        check_size(server.text.least_tokens(len(part)), bounds, param)
        ids, text = server.text.encode(part, asked.add_special_tokens is not False), part
        if not len(ids):
            raise invalid(param, "is empty: at least one token is needed")
    else:
        check_size(len(part), bounds, param)
        ids, text = check_ids(part, bounds, param), ""
        if asked.echo:
            text = server.text.decode(ids, asked.skip_special_tokens is not False)
    limit = output_limit(asked.max_tokens, COMPLETION_TOKENS, len(ids), bounds, param)
    params = sampling_params(asked, bounds, limit, asked.logprobs, asked.logprobs if asked.echo else None)
    return Prompt(ids, params, text)


class CompletionAnswer(GenerationAnswer):
    """A completion, or its chunks: text, in each choice's last one its finish, and then, if asked for, the usage."""

    def __init__(self, server: Server, asked: CompletionRequest, generation: Generation):
        super().__init__(server, generation, asked, as_sent(asked))
        self._begun: set[int] = set()
        self._molds: dict[int, Mold] = {}
        options = asked.stream_options
        self._steady = not (asked.logprobs is not None or asked.return_token_ids
                            or options is not None and options.continuous_usage_stats)
        self.created = int(time.time())
        self.shapes = [LegacyShape(server.text, choice.prompt.params.skip_special) for choice in generation.choices]

    def whole(self, choices: list[Choice]) -> Answer:
        answers = [self._choice(i, choice) for i, choice in enumerate(choices)]
        return self._answer(answers, self.generation.usage())

    def chunk(self, index: int, output: TextOutput) -> bytes:
        """The event of an output; none for one that only holds a part of a character."""
        self.generation.choices[index].count(output)
        if self._steady and index in self._begun and output.text and output.finish is None:
            if (mold := self._molds.get(index)) is None:
                blank = event(self._answer([TextChoice(index, "", None, None)], self.generation.chunk_usage(
                    self.asked.stream_options)))
                mold = self._molds[index] = Mold(blank, b'"index":%d,"text":' % index)
            return mold(output.text)
        part = Choice(self.generation.choices[index].prompt)
        part.add(output)
        choice = self._choice(index, part, index not in self._begun)
        self._begun.add(index)
        silent = not choice.text and choice.logprobs is None and choice.token_ids is UNSET
        if silent and choice.finish_reason is None:
            return b""
        return event(self._answer([choice], self.generation.chunk_usage(self.asked.stream_options)))

    def last(self) -> bytes:
        return event(self._answer([], self.generation.usage())) if wants_usage(self.asked.stream_options) else b""

    def _choice(self, index: int, choice: Choice, first: bool = True) -> TextChoice:
        check_ended(choice.finish)
        prompt, wants_ids = choice.prompt, self.asked.return_token_ids
        tokens = b"".join(choice.tokens)
        echo = prompt.text if self.asked.echo and first else ""
        matched = choice.matched()
        return TextChoice(
            index, echo + "".join(choice.text), self._logprobs(index, choice, first), choice.finish,
            UNSET if matched is None else matched,
            unpack_ids(tokens).tolist() if wants_ids and tokens else UNSET,
            prompt.ids.tolist() if wants_ids and first else UNSET)

    def _logprobs(self, index: int, choice: Choice, first: bool) -> LegacyLogprobs | None:
        if self.asked.logprobs is None:
            return None
        shape, parts = self.shapes[index], []
        if self.asked.echo and first:
            scores = choice.prompt_logprobs or Logprobs(b"", 0, b"", b"")
            parts.append(shape.add(choice.prompt.ids.tolist(), scores))
        scored = [(unpack_ids(tokens).tolist(), values) for tokens, values in choice.scored if tokens]
        parts += [shape.add(ids, values, choice.finish == "stop" and i == len(scored) - 1)
                  for i, (ids, values) in enumerate(scored)]
        return join(parts) if parts else None

    def _answer(self, choices: list[TextChoice], numbers: Any) -> Answer:
        return Answer(self.generation.id, "text_completion", self.created, self.generation.model, choices, numbers)


def join(parts: list[LegacyLogprobs]) -> LegacyLogprobs:
    """Consecutive pieces as one."""
    whole = LegacyLogprobs([], [], [], [])
    for part in parts:
        whole.tokens += part.tokens
        whole.token_logprobs += part.token_logprobs
        whole.top_logprobs += part.top_logprobs
        whole.text_offset += part.text_offset
    return whole
