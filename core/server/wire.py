"""Answers in OpenAI's form. A field left UNSET is not sent; None is sent as null, only where the schema wants it.

Source: OpenAI's OpenAPI description (CreateChatCompletionResponse and its relatives).
"""
from __future__ import annotations

from typing import Any

from msgspec import UNSET, Raw, Struct, UnsetType


class PromptDetails(Struct):
    """`usage.prompt_tokens_details`."""

    cached_tokens: int


class Usage(Struct):
    """`usage`."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


def usage(prompt: int, completion: int, cached: int) -> Usage:
    """`usage` from its three numbers; `cached` is a part of `prompt`."""
    return Usage(prompt, completion, prompt + completion, PromptDetails(cached))


class TopLogprob(Struct):
    """One alternative of a chat token."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Struct):
    """One chat token."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """`choices[].logprobs` of chat."""

    content: list[TokenLogprob] | Raw
    refusal: None = None


class LegacyLogprobs(Struct):
    """`choices[].logprobs` of completions: four lists of one length."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class Message(Struct):
    """`choices[].message`."""

    content: str | None
    role: str = "assistant"
    refusal: None = None


class ChatChoice(Struct):
    """One answer of a chat."""

    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class Delta(Struct):
    """What a chat chunk adds."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChunkChoice(Struct):
    """One answer's part of a chat chunk."""

    index: int
    delta: Delta
    finish_reason: str | None = None
    logprobs: ChatLogprobs | UnsetType = UNSET
    stop_reason: str | int | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class TextChoice(Struct):
    """One answer of a completion, whole or as a chunk."""

    index: int
    text: str
    logprobs: LegacyLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Answer(Struct):
    """A whole response or one chunk; `object` says which."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Any]
    usage: Usage | None | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
