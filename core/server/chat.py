"""`POST /v1/chat/completions`."""
from __future__ import annotations

import time

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from ..messages import TextOutput, unpack_ids
from .answer import GenerationAnswer, respond
from .context import Server
from .conversation import generation_prompt, parse_messages, template_kwargs
from .generation import Choice, Generation, Prompt, check_ended, new_id, wants_usage
from .logprobs import chat_logprobs
from .protocol import ChatRequest, read
from .stream import JsonList, event
from .terms import Caller, terms
from .validate import check_choices, check_size, invalid, output_limit, sampling_params
from .wire import Answer, ChatChoice, ChatLogprobs, ChunkChoice, Delta, Message


async def chat_completions(server: Server, request: Request) -> Response:
    """Answer a conversation, whole or as a stream."""
    return await respond(server, request, start, in_thread=True)


def wanted_logprobs(asked: ChatRequest) -> int | None:
    """How many alternatives per token; None = no log-probabilities at all."""
    if not asked.logprobs:
        if asked.top_logprobs:
            raise invalid("top_logprobs", "needs logprobs to be true")
        return None
    return asked.top_logprobs or 0


def start(server: Server, caller: Caller, body: bytes) -> ChatAnswer:
    """Check everything and prepare the engine requests; nothing runs yet."""
    asked = read(ChatRequest, body)
    server.require_model(asked.model)
    bounds, n = server.bounds, asked.n or 1
    check_choices(1, n, bounds)
    logprobs = wanted_logprobs(asked)
    check_size(len(asked.messages), bounds, "messages")
    messages, size = parse_messages(asked.messages)
    check_size(server.text.least_tokens(size), bounds, "messages")
    ids = server.text.encode_chat(
        messages, **generation_prompt(asked.add_generation_prompt, asked.continue_final_message),
        **template_kwargs(asked.chat_template_kwargs))
    if asked.max_tokens == 0:
        raise invalid("max_tokens", "must be at least 1")
    limit = output_limit(asked.max_tokens, None, len(ids), bounds, "messages")
    prompt = Prompt(ids, sampling_params(asked, bounds, limit, logprobs))
    generation = Generation(server, new_id("chatcmpl"), [prompt], n, terms(asked, caller, server.isolates))
    return ChatAnswer(server, asked, generation)


class ChatAnswer(GenerationAnswer):
    """A chat completion, or its chunks: role, text, one finish per choice and, if asked for, the usage."""

    def __init__(self, server: Server, asked: ChatRequest, generation: Generation):
        super().__init__(server, generation, asked)
        self.created = int(time.time())
        self._begun: set[int] = set()

    def whole(self, choices: list[Choice]) -> Answer:
        answers = [self._choice(i, choice) for i, choice in enumerate(choices)]
        prompt_ids = self.generation.prompts[0].ids.tolist() if self.asked.return_token_ids else UNSET
        return Answer(self.generation.id, "chat.completion", self.created, self.server.model, answers,
                      self.generation.usage(), prompt_ids)

    def _choice(self, index: int, choice: Choice) -> ChatChoice:
        check_ended(choice.finish)
        logprobs = None
        if self.asked.logprobs:
            content = JsonList()  # a large answer would be a million objects at once
            for tokens, values in choice.scored:
                content.extend(chat_logprobs(self.server.text, tokens, values))
            logprobs = ChatLogprobs(content.value())
        ids = unpack_ids(b"".join(choice.tokens)).tolist() if self.asked.return_token_ids else UNSET
        matched = choice.matched()
        return ChatChoice(index, Message("".join(choice.text)), logprobs, choice.finish,
                          UNSET if matched is None else matched, ids)

    def chunk(self, index: int, output: TextOutput) -> bytes:
        check_ended(output.finish)
        choice = self.generation.choices[index]
        choice.count(output)
        data = b""
        if index not in self._begun:
            data = self._chunk(ChunkChoice(index, Delta(role="assistant", content="")), first=not self._begun)
            self._begun.add(index)
        data += self._text(index, output)
        if output.finish is not None:
            matched = choice.matched()
            data += self._chunk(ChunkChoice(index, Delta(), output.finish,
                                            stop_reason=UNSET if matched is None else matched))
        return data

    def last(self) -> bytes:
        if not wants_usage(self.asked.stream_options):
            return b""
        return event(Answer(self.generation.id, "chat.completion.chunk", self.created, self.server.model, [],
                            self.generation.usage()))

    def _text(self, index: int, output: TextOutput) -> bytes:
        """The chunk with an output's text; nothing for an output that only holds a part of a character."""
        logprobs = ids = UNSET
        if self.asked.logprobs and output.logprobs is not None and output.tokens:
            logprobs = ChatLogprobs(chat_logprobs(self.server.text, output.tokens, output.logprobs))
        if self.asked.return_token_ids and output.tokens:
            ids = unpack_ids(output.tokens).tolist()
        if not output.text and logprobs is UNSET and ids is UNSET:
            return b""
        return self._chunk(ChunkChoice(index, Delta(content=output.text), logprobs=logprobs, token_ids=ids))

    def _chunk(self, choice: ChunkChoice, first: bool = False) -> bytes:
        prompt_ids = UNSET
        if first and self.asked.return_token_ids:
            prompt_ids = self.generation.prompts[0].ids.tolist()
        return event(Answer(self.generation.id, "chat.completion.chunk", self.created, self.server.model, [choice],
                            self.generation.chunk_usage(self.asked.stream_options), prompt_ids))
