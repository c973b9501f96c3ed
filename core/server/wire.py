"""Answers in OpenAI's form. A field left UNSET is not sent; None is sent as null, only where the schema wants it.

Source: OpenAI's OpenAPI description (CreateChatCompletionResponse and its relatives).
"""
from __future__ import annotations

from typing import Any

from msgspec import UNSET, Raw, Struct, UnsetType


class PromptDetails(Struct):
    """`usage.prompt_tokens_details`."""

    cached_tokens: int


class CompletionDetails(Struct):
    """`usage.completion_tokens_details`."""

    reasoning_tokens: int
    accepted_prediction_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET


class Usage(Struct):
    """`usage`."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails | UnsetType = UNSET


def usage(prompt: int, completion: int, cached: int, reasoning: int = 0, drafted: int = 0, accepted: int = 0) -> Usage:
    """`usage` from its numbers; `cached` is a part of `prompt`, and `reasoning`, sent unless 0, of `completion`; so is
    `accepted`, of the tokens `drafted`, sent where there were any."""
    details = CompletionDetails(reasoning) if reasoning or drafted else UNSET
    if drafted:
        details.accepted_prediction_tokens, details.rejected_prediction_tokens = accepted, drafted - accepted
    return Usage(prompt, completion, prompt + completion, PromptDetails(cached), details)


def drafts_of(numbers: Usage) -> tuple[int, int]:
    """(drafted, accepted) as `usage` was given them."""
    details = numbers.completion_tokens_details
    if details is UNSET or details.accepted_prediction_tokens is UNSET:
        return 0, 0
    accepted = details.accepted_prediction_tokens
    return accepted + details.rejected_prediction_tokens, accepted


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


class CalledFunction(Struct):
    """`function` of a tool call; `arguments` is JSON as text."""

    name: str
    arguments: str


class MessageCall(Struct):
    """`choices[].message.tool_calls[]`."""

    id: str
    function: CalledFunction
    type: str = "function"


class Message(Struct):
    """`choices[].message`. The reasoning goes by both names that clients read."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[MessageCall] | UnsetType = UNSET


class ChatChoice(Struct):
    """One answer of a chat."""

    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class FunctionDelta(Struct):
    """`function` of a tool call's part: the name in the first one only."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(Struct):
    """`choices[].delta.tool_calls[]`: id and type in the first part of a call only."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class Delta(Struct):
    """What a chat chunk adds."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


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
