"""One call of a chat model, whatever API it came in by: a `ChatRequest` in, events and messages out.

`prepare` checks everything and makes the engine requests. Each answer has a `Reply`, which turns the engine's outputs
into events while they come (`ChatCall.add`), or all at once (`ChatCall.read`), with the same message at the end. An API
renders these and knows nothing of notations.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import numpy as np

from ..errors import RequestError
from ..messages import TextOutput
from ..parsers.choose import GENERIC
from ..parsers.contract import CALLS, CallArguments, CallBegin, CallEnd, Content, Event, Parser, Reasoning
from .context import Server
from .conversation import characters, generation_prompt, parse_messages, template_kwargs
from .generation import Choice, Generation, Prompt, check_ended
from .protocol import ChatRequest
from .reading import Reading, thinking_kwargs
from .terms import Caller
from .tool_prompt import as_templates_want, described, flattened, uses_tools
from .tools import Toolset, read_toolset
from .validate import check_choices, check_size, invalid, output_limit, sampling_params
from .wire import Usage, drafts_of, usage

ID_BYTES = 4


@dataclass
class ToolCall:
    """One call that a reply makes. arguments: JSON; of a call that is not `complete` its beginning."""

    id: str
    name: str
    parts: list[str] = field(default_factory=list)
    complete: bool = False

    @property
    def arguments(self) -> str:
        return "".join(self.parts)


class Reply:
    """One answer as it comes.

    most: calls that it may make; further ones are left out. only_calls: what is no call and no thinking is a call that
    the limit of the output cut before it could be read, and is left out. calls: so far. reasoning_tokens: of the
    completion's.
    """

    def __init__(self, choice: Choice, parser: Parser, most: int | None = None, only_calls: bool = False):
        self.choice, self._parser, self._most, self._only_calls = choice, parser, most, only_calls
        self.calls: list[ToolCall] = []
        self.reasoning_tokens = self._silent = 0
        self._content: list[str] = []
        self._reasoning: list[str] = []

    def add(self, output: TextOutput) -> list[Event]:
        """The events of an output that `choice` has counted; with its last one all that was held back."""
        return self._add(output.text, len(output.tokens) // ID_BYTES, output.finish is not None)

    def read(self) -> list[list[Event]]:
        """The events of all that `choice` has collected: of each output, and then those of the end."""
        outputs = zip(self.choice.text, self.choice.tokens, strict=True)
        return [*(self._add(text, len(tokens) // ID_BYTES, False) for text, tokens in outputs), self._add("", 0, True)]

    @property
    def content(self) -> str:
        """The text for the user so far."""
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        """The text of the thinking so far."""
        return "".join(self._reasoning)

    @property
    def finish(self) -> str | None:
        """Why the answer ended: "stop", "length", "tool_calls" for calls that the model made and then stopped; None
        while it runs."""
        return "tool_calls" if self.choice.finish == "stop" and self.calls else self.choice.finish

    def _add(self, text: str, tokens: int, last: bool) -> list[Event]:
        thinking, events = self._parser.thinking, self._parser.feed(text) if text else []
        if thinking or self._parser.thinking or any(isinstance(event, Reasoning) for event in events):
            self.reasoning_tokens += self._silent + tokens
            self._silent = 0
        else:  # tokens that may turn out to open the thinking
            self._silent = 0 if events else self._silent + tokens
        if last:
            events = events + self._parser.finish()
        return [event for event in events if self._take(event)]

    def _take(self, event: Event) -> bool:
        """Whether it is a part of the answer."""
        if isinstance(event, Content):
            if self._only_calls:
                return False
            self._content.append(event.text)
        elif isinstance(event, Reasoning):
            self._reasoning.append(event.text)
        elif self._most is not None and event.index >= self._most:
            return False
        elif isinstance(event, CallBegin):
            self.calls.append(ToolCall(event.id, event.name))
        elif isinstance(event, CallArguments):
            self.calls[event.index].parts.append(event.text)
        elif isinstance(event, CallEnd):
            self.calls[event.index].complete = True
        return True


@dataclass
class ChatCall:
    """A prepared call: nothing runs before `generation` is asked for its outputs. replies: one for each choice."""

    asked: ChatRequest
    generation: Generation
    replies: list[Reply]

    def add(self, index: int, output: TextOutput) -> list[Event]:
        """The events that an output of choice `index` gives, which is counted. Raises when the server ended it."""
        check_ended(output.finish)
        self.generation.choices[index].count(output)
        return self.replies[index].add(output)

    def read(self, choices: list[Choice]) -> list[Reply]:
        """The replies that `Generation.collect` has collected, complete. May take long for a long answer."""
        self.read_events(choices)
        return self.replies

    def read_events(self, choices: list[Choice]) -> list[list[list[Event]]]:
        """The same as the events of each reply, output by output."""
        for choice in choices:
            check_ended(choice.finish)
        return [reply.read() for reply in self.replies]

    def usage(self) -> Usage:
        """Tokens so far, with those of the reasoning."""
        base = self.generation.usage()
        return usage(base.prompt_tokens, base.completion_tokens, base.prompt_tokens_details.cached_tokens,
                     sum(reply.reasoning_tokens for reply in self.replies), *drafts_of(base))


def wanted_logprobs(asked: ChatRequest) -> int | None:
    """How many alternatives per token; None = no log-probabilities at all."""
    if not asked.logprobs:
        if asked.top_logprobs:
            raise invalid("top_logprobs", "needs logprobs to be true")
        return None
    return asked.top_logprobs or 0


def prepare(server: Server, caller: Caller, asked: ChatRequest, id: str) -> ChatCall:
    """Check a request and make its engine requests. id: of the response. Raises `RequestError`, a 400 or 404 that names
    the field of `ChatRequest` at fault. May take seconds: call it in a thread."""
    server.require_model(asked.model)
    bounds, n = server.bounds, asked.n or 1
    check_choices(1, n, bounds)
    logprobs = wanted_logprobs(asked)
    toolset = read_toolset(asked)
    ids = encode_prompt(server, asked, toolset)
    if asked.max_tokens == 0:
        raise invalid("max_tokens", "must be at least 1")
    limit = output_limit(asked.max_tokens, None, len(ids), bounds, "messages")
    reading = Reading(server, asked, toolset, ids)
    params = reading.bind(sampling_params(asked, bounds, limit, logprobs))
    generation = Generation(server, id, [Prompt(ids, params, shown=reading.shown)], n,
                            server.terms(asked, caller))
    only_calls = toolset.least > 0 and asked.separate_reasoning is not False
    return ChatCall(asked, generation, [Reply(choice, reading.parser(), toolset.most, only_calls)
                                        for choice in generation.choices])


def encode_prompt(server: Server, asked: ChatRequest, toolset: Toolset) -> np.ndarray:
    """The prompt's ids."""
    bounds, parsers = server.bounds, server.parsers
    check_size(len(asked.messages), bounds, "messages")
    messages, size = parse_messages(asked.messages)
    check_size(server.text.least_tokens(size + characters(toolset.offered)), bounds, "messages")
    options = generation_prompt(asked.add_generation_prompt, asked.continue_final_message)
    variables = {**thinking_kwargs(asked, parsers.template),
                 **template_kwargs(asked.chat_template_kwargs, server.config.model.template_kwargs)}
    format = parsers.format or CALLS.create(GENERIC)
    if uses_tools(messages):
        shape = as_templates_want if parsers.renders_calls else flattened
        messages = shape(messages, format)
    encode = partial(server.text.encode_chat, **options, **variables)
    if not toolset.offered:
        return encode(messages)
    if parsers.renders_tools:
        return encode(messages, tools=toolset.offered)
    try:
        return encode(described(messages, toolset.offered, format))
    except RequestError:
        if messages[0]["role"] in ("system", "developer"):
            raise
        return encode(described(messages, toolset.offered, format, in_user=True))
